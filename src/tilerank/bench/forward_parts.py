"""Where the fused forward pass spends its time: each part's kernels in one replay, and the least they could take.

A part's kernels are told apart by their order: between two attentions stand the rest of one layer and the start of the
next. Floors are those of `tilerank.bench.floors`: bytes that must move, products, exps.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tilerank.bench.floors import BYTES, Rates, attention_floor
from tilerank.bench.workloads import Workload
from tilerank.errors import TilerankError

EMBEDDINGS, QKV, ATTENTION, OUT, UP, DOWN, LAST = PARTS = (
    "embeddings",
    "query, key, value",
    "attention",
    "attention output",
    "feed-forward up",
    "feed-forward down",
    "last layer and head",
)

BETWEEN = "between attentions"
"""Attention output, feed-forward and the next product in one kernel; `PARTS` has them one by one."""

# Kernels between two attentions, by how many there are: one for all; fused ends; GELU, LayerNorm, or both as kernels of
# their own.
_BETWEEN = {
    1: (BETWEEN,),
    4: (OUT, UP, DOWN, QKV),
    5: (OUT, UP, UP, DOWN, QKV),
    6: (OUT, OUT, UP, DOWN, DOWN, QKV),
    7: (OUT, OUT, UP, UP, DOWN, DOWN, QKV),
}


TOKEN_ATTENTION = "warp_keys::"
"""In the name of the kernel that may stand for the last attention, from first tokens alone."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a layer's arithmetic depends on."""

    layers: int
    width: int
    wide: int  # of the feed-forward part


def label(kernels: Sequence[str], attention: str) -> tuple[str, ...]:
    """The part of each kernel of a pass, given in order. ``attention``: what an attention kernel's name contains.

    Raises `TilerankError` for an order that is not that of a fused pass.
    """
    places = [number for number, name in enumerate(kernels) if attention in name or TOKEN_ATTENTION in name]
    if len(places) < 2:
        raise TilerankError(f"{len(places)} kernels are called {attention!r}; a pass of two layers or more has as many")
    labels = [EMBEDDINGS] * (places[0] - 1) + [QKV]
    for start, end in itertools.pairwise(places[:-1]):
        labels += [ATTENTION, *_rest(end - start - 1)]
    # The last layer begins within what follows: its keys and values, then first tokens alone.
    usual = places[1] - places[0] - 1 if len(places) > 2 else 4
    rest = _rest(usual)
    labels += [ATTENTION, *(rest if rest == (BETWEEN,) else rest[:-1])]
    return (*labels, *[LAST] * (len(kernels) - len(labels)))


def _rest(count: int) -> tuple[str, ...]:
    if count not in _BETWEEN:
        raise TilerankError(f"{count} kernels stand between two attentions; known: {', '.join(map(str, _BETWEEN))}")
    return _BETWEEN[count]


def floors(
    workload: Workload, sizes: Sizes, precision: str, rates: Rates, *, whole_layers: bool = False
) -> dict[str, float]:
    """The least seconds of each of `PARTS` in one pass; whole_layers: of those that it has with `BETWEEN`. fp32
    products are three of fp16, or FMAs where that is sooner; weights are read once a layer."""
    rows, width, wide, size = workload.tokens, sizes.width, sizes.wide, BYTES[precision]

    def least(fmas: int, moved: int) -> float:
        products = fmas * {"fp32": 3, "tf32": 2}.get(precision, 1) / rates.fp16_fmas
        if precision == "fp32":
            products = min(products, fmas / rates.fp32_fmas)
        return max(products, size * moved / rates.hbm_bytes)

    def linear(depth: int, columns: int, moved: int) -> float:
        return least(rows * depth * columns, rows * moved + depth * columns)

    most = sizes.layers - 1
    attention = attention_floor(workload, precision, rates).seconds
    embeddings = 2 * size * rows * width / rates.hbm_bytes
    if whole_layers:
        # found and x in, x and the next product out; keys and values alone for the last layer.
        weights = 2 * width * width + 2 * width * wide
        behind = rows * (width * width + 2 * width * wide)
        fmas = most * behind + (most - 1) * rows * 3 * width**2 + rows * 2 * width**2
        moved = rows * width * ((most - 1) * 6 + 5) + most * weights
        return {
            EMBEDDINGS: embeddings,
            QKV: linear(width, 3 * width, 4 * width),
            ATTENTION: most * attention,
            BETWEEN: least(fmas, moved),
            LAST: embeddings,  # keys and values are read once
        }
    return {
        EMBEDDINGS: embeddings,
        QKV: most * linear(width, 3 * width, 4 * width),
        ATTENTION: most * attention,
        OUT: most * linear(width, width, 3 * width),
        UP: most * linear(width, wide, width + wide),
        DOWN: most * linear(wide, width, wide + 2 * width),
        # Keys and values of all tokens are made and read once.
        LAST: linear(width, 2 * width, 3 * width) + 2 * size * rows * width / rates.hbm_bytes,
    }


def parts_record(
    kernels: Sequence[tuple[str, float]], attention: str, least: Mapping[str, float]
) -> dict[str, dict[str, float | int]]:
    """Part -> ``us``, ``launches`` and ``floor_us``. kernels: name and seconds of each kernel of one pass, in order;
    least: what `floors` gave."""
    record: dict[str, dict[str, float | int]] = {}
    parts = label([name for name, _ in kernels], attention)
    for part, (_, seconds) in zip(parts, kernels, strict=True):
        entry = record.setdefault(part, {"us": 0.0, "launches": 0, "floor_us": 1e6 * least[part]})
        entry["us"] += 1e6 * seconds
        entry["launches"] += 1
    return record


_LOOKED_AT = 7
"""Calls whose median a kernel's time is: a single one may be interrupted by another process on the device."""


def kernels_of(run: Callable[[], object]) -> list[tuple[str, float]]:
    """Name and seconds of each kernel that ``run`` launches, in order, copies left out: medians of `_LOOKED_AT` calls.

    Where kernels overlap, time counts for the one that ends first. Raises `TilerankError` where two calls differ.
    """
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_LOOKED_AT):
            run()
            torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [event for event in events if not event.name.startswith(("Memcpy", "Memset"))]
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in kernels]
    return [(name, 1e-6 * microseconds) for name, microseconds in medians(exclusive(spans), _LOOKED_AT)]


def medians(times: Sequence[tuple[str, float]], calls: int) -> list[tuple[str, float]]:
    """One call's kernels from those of ``calls`` in a row; `TilerankError` where they are not the same kernels."""
    count = len(times) // calls
    each = [times[start : start + count] for start in range(0, count * calls, count)] if count else []
    names = [[name for name, _ in one] for one in each]
    if count * calls != len(times) or any(found != names[0] for found in names):
        raise TilerankError(f"{len(times)} kernels in {calls} calls: they are not the same in each")
    return [(same[0][0], statistics.median(seconds for _, seconds in same)) for same in zip(*each, strict=True)]


def exclusive(spans: Sequence[tuple[str, float, float]]) -> list[tuple[str, float]]:
    """Name and time of each kernel of ``spans`` (name, start, end), in order of their starts: from its start, or where
    it began before others ended from the last of these ends, to its own end."""
    times, ended = [], float("-inf")
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        times.append((name, max(0.0, end - max(start, ended))))
        ended = max(ended, end)
    return times
