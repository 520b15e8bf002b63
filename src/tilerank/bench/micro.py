"""Attention over lengths and head dims, dense, as ``auto`` serves it: beside torch's backends and in plain operators.

The shapes are those that kernel papers use (batch 4, 16 heads), and one each for causal masks, grouped-query heads and
cross lengths. Where there is no GPU the same kinds of call run on the CPU at a small size, and only their error is
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilerank.bench.attention import OURS_FACTOR, PEER_FACTOR, best_peer, dense_call, kernel_pattern
from tilerank.bench.attention_peers import Attention, dense_peers
from tilerank.bench.peers import DTYPES, arithmetic
from tilerank.bench.timing import Case, EventClock, Row, closure_faults, measure, ratio
from tilerank.bench.workloads import max_abs_error
from tilerank.config import TimingSettings
from tilerank.kernel_choices import Call
from tilerank.kernels import build, library, registry
from tilerank.kernels.torch_device import device_sm

EAGER = "sdpa math"
"""The peer that is attention in plain operators: two products, a softmax, all scores in memory."""

MAX_ROUNDS = 15
"""Rounds a shape: there are many shapes, and the longest take milliseconds."""

CHECK_ROWS = 65  # on the CPU: one more than two tiles


@dataclass(frozen=True, slots=True)
class Shape:
    """One dense call."""

    rows: int  # queries
    head_dim: int
    keys: int | None = None  # None: as many as queries
    causal: bool = False
    kv_heads: int | None = None  # None: as many as query heads
    batch: int = 4
    heads: int = 16

    @property
    def name(self) -> str:
        """``<seq>x<dim>``, and what makes the call another one."""
        parts = [f"{self.rows}x{self.head_dim}"]
        parts += ["causal"] * self.causal
        parts += [f"kv{self.kv_heads}"] if self.kv_heads is not None else []
        parts += [f"keys{self.keys}"] if self.keys is not None else []
        return "_".join(parts)


SHAPES = (
    *(Shape(rows, 64) for rows in (128, 512, 1024, 2048, 4096)),
    *(Shape(2048, head_dim) for head_dim in (32, 80, 96, 128)),
    Shape(2048, 64, causal=True),
    Shape(2048, 64, kv_heads=4),
    Shape(512, 64, keys=2048),
)

CHECK_SHAPES = tuple(
    Shape(CHECK_ROWS, head_dim, keys, causal, kv_heads, batch=2, heads=2)
    for head_dim, keys, causal, kv_heads in (
        *((head_dim, None, False, None) for head_dim in (32, 64, 80, 96, 128)),
        *((64, None, True, None), (64, None, False, 1), (64, 33, False, None)),
    )
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """N(0,1) tensors of one shape with the float64 result, and how far SDPA is from it."""

    q: torch.Tensor  # [B, H, Sq, D], a view of [B, Sq, H, D] memory as transformers passes it; so are k and v
    k: torch.Tensor  # [B, Hkv, Sk, D]
    v: torch.Tensor
    exact: torch.Tensor  # [B, H, Sq, D] float64
    sdpa_error: float

    def tolerance(self, factor: float) -> float:
        """What an output may be off by: ``factor`` times SDPA's error, and one rounding of the largest result."""
        return factor * self.sdpa_error + torch.finfo(self.q.dtype).eps * float(self.exact.abs().amax())


def make_inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    """Draw inputs on the CPU, so that every device starts from the same numbers."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, heads: int) -> torch.Tensor:
        memory = torch.randn(shape.batch, rows, heads, shape.head_dim, generator=generator)
        return memory.to(device=device, dtype=dtype).transpose(1, 2)

    kv_heads = shape.heads if shape.kv_heads is None else shape.kv_heads
    keys = shape.rows if shape.keys is None else shape.keys
    q, k, v = draw(shape.rows, shape.heads), draw(keys, kv_heads), draw(keys, kv_heads)
    exact = reference(q, k, v, causal=shape.causal)
    sdpa = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=shape.causal, enable_gqa=kv_heads != shape.heads
    )
    return Inputs(q, k, v, exact, max_abs_error(sdpa, exact))


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Attention in float64, sequence by sequence: at 4,096 rows the scores of all would not fit beside the rest."""
    group = q.shape[1] // k.shape[1]
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    out = torch.empty_like(q, dtype=torch.float64)
    for index in range(q.shape[0]):
        query, key, value = (tensor[index].double() for tensor in (q, k, v))
        key, value = (tensor.repeat_interleave(group, dim=0) for tensor in (key, value))
        scores = query @ key.transpose(-1, -2) * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(hidden, -float("inf"))
        out[index] = torch.softmax(scores, dim=-1) @ value
    return out


def call_of(shape: Shape) -> Call:
    """The kind of call that a shape is."""
    return Call("attention", "padded", shape.head_dim, frozenset({"causal"} if shape.causal else ()))


def calls(on_cpu: bool) -> tuple[Call, ...]:
    """The kinds of call that are timed, or checked on a CPU."""
    return tuple(dict.fromkeys(map(call_of, CHECK_SHAPES if on_cpu else SHAPES)))


def chosen(shape: Shape, precision: str, device: str) -> registry.Row:
    """The row that ``auto`` takes for this shape on this machine."""
    keys = shape.rows if shape.keys is None else shape.keys
    request = call_of(shape).request(device_sm(device), precision, shape.head_dim, keys)
    return registry.select(request, registry.attention_rows()).row


def check_shapes(precision: str, shapes: Sequence[Shape] = CHECK_SHAPES) -> dict[str, dict[str, Any]]:
    """``micro.<precision>`` of a machine without a GPU: the error of small calls, and ``timed: false``."""
    lib = library.load(build.Target("cpu"))
    records = {}
    for shape in shapes:
        inputs = make_inputs(shape, DTYPES[precision], "cpu")
        row = chosen(shape, precision, "cpu")
        call = dense_call(lib, row, inputs.q, inputs.k, inputs.v, causal=shape.causal)
        call.poison()
        error = max_abs_error(call.run(), inputs.exact)
        record: dict[str, Any] = {"timed": False, "variant": row.name}
        tolerance = inputs.tolerance(OURS_FACTOR)
        if error <= tolerance:
            record |= {"max_abs_error": error, "sdpa_max_abs_error": inputs.sdpa_error}
        else:
            record["failure"] = f"error {error:.3g} against float64 is above {tolerance:.3g}"
        records[shape.name] = record
    return records


def time_shapes(precision: str, timing: TimingSettings, shapes: Sequence[Shape] = SHAPES) -> dict[str, dict[str, Any]]:
    """``micro.<precision>`` of this machine's GPU."""
    return {shape.name: _time_shape(shape, precision, timing) for shape in shapes}


def _time_shape(shape: Shape, precision: str, timing: TimingSettings) -> dict[str, Any]:
    row = chosen(shape, precision, "cuda")
    with arithmetic(precision):
        inputs = make_inputs(shape, DTYPES[precision], "cuda")
        call = dense_call(library.load(), row, inputs.q, inputs.k, inputs.v, causal=shape.causal)
        faults = closure_faults(call.run, kernel_pattern(row))
        peers = dense_peers(inputs.q, inputs.k, inputs.v, causal=shape.causal)
        ours, *others = measure(
            [
                _case(row.name, call.run, inputs, OURS_FACTOR, call.poison),
                *(_case(peer.name, peer.run, inputs, PEER_FACTOR) for peer in peers if peer.run is not None),
            ],
            EventClock(timing.flush_mb),
            warmup=timing.warmup,
            rounds=min(timing.rounds, MAX_ROUNDS),
            description=f"{precision} {shape.name}",
        )
    record = {"variant": row.name, "sdpa_max_abs_error": inputs.sdpa_error}
    if faults:
        return {**record, "failure": f"the timed closure {'; '.join(faults)}"}
    return {**record, **shape_record(ours, others)}


def _case(name: str, run: Attention, inputs: Inputs, factor: float, poison: Callable[[], None] | None = None) -> Case:
    return Case(name, run, lambda out: max_abs_error(out, inputs.exact), inputs.tolerance(factor), poison)


def shape_record(ours: Row, peers: Sequence[Row]) -> dict[str, Any]:
    """The figures of one shape from the rows of one `measure` call."""
    if ours.spread is None:
        return {"failure": ours.failure}
    record: dict[str, Any] = {
        "us": 1e6 * ours.spread.median,
        "p10_us": 1e6 * ours.spread.p10,
        "p90_us": 1e6 * ours.spread.p90,
        "repetitions": ours.spread.repetitions,
        "max_abs_error": ours.error,
    }
    best = best_peer(peers)
    if best is not None:
        speedup = ratio(ours.spread, best.spread)
        record |= {
            "best_peer": best.name,
            "best_peer_us": 1e6 * best.spread.median,
            "speedup_vs_best_peer": speedup.value,
            "speedup_vs_best_peer_is_noise": speedup.is_noise,
        }
    eager = next((row for row in peers if row.name == EAGER and row.spread is not None), None)
    if eager is not None:
        record["eager_us"] = 1e6 * eager.spread.median
    return record
