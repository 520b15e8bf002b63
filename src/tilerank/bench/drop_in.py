"""transformers with nothing but its attention swapped: how much sooner one padded forward pass ends, how much sooner
it should by Amdahl's law, and that its scores are right.

One run on one device gives all of it, over the same queries' real pairs, padded as the model's tokenizer pads them:

- wall time of the forward pass with SDPA and with ours, taking turns (see `tilerank.bench.timing`);
- device time of the attention operators within both forward passes, as torch's profiler attributes it.

The prediction is 1 / (1 - share + share / kernel_speedup), with share = SDPA's attention time / the baseline's wall
time and kernel_speedup = SDPA's attention time / ours. Where the host, not the device, sets the pace (short or 16-bit
forward passes), wall time does not fall with device time and the two part.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import tilerank
from tilerank.amdahl import amdahl
from tilerank.bench.peers import HuggingFaceScorer
from tilerank.bench.rerank import ERROR_FLOORS, Call, RerankSetup, reference_scores
from tilerank.bench.timing import Case, Row, Spread, WallClock, measure
from tilerank.errors import TilerankError
from tilerank.kernels.huggingface import calls_interface
from tilerank.quality import Task, quality_record, score_by_all

IMPLEMENTATION = "tilerank_drop_in"
"""The name that the swapped attention is registered under."""

SDPA_OPERATOR = "aten::scaled_dot_product_attention"
OUR_OPERATOR = "tilerank::attention"

_UNMODIFIED = "unmodified fp32"

# The reference in double is slow: on a CPU this many pairs of at most so many tokens are enough to see a lost mask.
CHECK_PAIRS = 6
CHECK_MAX_LENGTH = 96


class DropInScorer(HuggingFaceScorer):
    """`HuggingFaceScorer` after ``model.set_attn_implementation``: same weights, tokenizer, padding and batches.

    variant: a row of the registry, or auto. The other arguments are the parent's. Raises `TilerankError` for a model
    that computes attention by itself: transformers would go on with that, and nothing would be swapped.
    """

    def __init__(self, *args: Any, variant: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if reason := _refusal(type(self._model)):
            raise TilerankError(reason)
        tilerank.register(IMPLEMENTATION, variant)
        self._model.set_attn_implementation(IMPLEMENTATION)


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """What the attention operators of some forward passes took."""

    calls: int
    seconds: float  # device time of the kernels they launched; 0 on a CPU
    kernels: tuple[str, ...]  # their distinct names


def attention_time(run: Callable[[], Any], operator: str) -> AttentionTime:
    """Profile one call of ``run`` and add up the outermost occurrences of ``operator``."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda) as profiler:
        run()
        if on_cuda:
            torch.cuda.synchronize()
    found = [event for event in profiler.events() if event.name == operator and event.device_type == DeviceType.CPU]
    return AttentionTime(
        calls=len(found),
        seconds=sum(event.device_time_total for event in found) / 1e6,
        kernels=tuple(sorted({kernel.name for event in found for kernel in _kernels(event)})),
    )


def _kernels(event: Any) -> list[Any]:
    return [*event.kernels, *itertools.chain.from_iterable(_kernels(child) for child in event.cpu_children)]


def refusal(setup: RerankSetup) -> str | None:
    """Why the model's attention cannot be swapped, or None when it can. Reads no weights."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(setup.path, local_files_only=True)
    is_classifier = setup.kind == "cross-encoder"
    family = transformers.AutoModelForSequenceClassification if is_classifier else transformers.AutoModel
    return _refusal(family._model_mapping[type(config)])


def _refusal(model: type[torch.nn.Module]) -> str | None:
    if calls_interface(model):
        return None
    return f"{model.__name__} computes attention by itself: there is nothing to swap"


def scorers(setup: RerankSetup, precision: str) -> tuple[HuggingFaceScorer, DropInScorer]:
    """The unmodified model, and the one with its attention swapped for ``setup.attention``."""
    return HuggingFaceScorer(*_arguments(setup, precision)), _swapped(setup, precision)


def _swapped(setup: RerankSetup, precision: str) -> DropInScorer:
    return DropInScorer(*_arguments(setup, precision), variant=_variant(setup))


def _arguments(setup: RerankSetup, precision: str) -> tuple[Any, ...]:
    return setup.path, setup.kind, precision, setup.device, setup.max_length, setup.batch_size


def _variant(setup: RerankSetup) -> str:
    # The rerank path may be set to SDPA; a drop-in that swaps nothing has no figure.
    return "auto" if setup.attention == "sdpa" else setup.attention


def _forward(scorer: HuggingFaceScorer, call: Call) -> Callable[[], np.ndarray]:
    """The closure that is timed: every batch of one call, tokenised and on the device already, to scores."""
    return partial(scorer.score_inputs, scorer.inputs(call.query, call.passages))


def time_drop_in(
    setup: RerankSetup, precision: str, calls: Sequence[Call], reference: Sequence[np.ndarray], rounds: int
) -> dict[str, Any]:
    """Time both on every call and return ``drop_in.<precision>`` (CUDA only). reference: `reference_scores` of
    ``calls``.

    A forward pass whose scores are off by more than twice SDPA's own error, on any call, has no time: the record then
    has ``failure`` instead.
    """
    baseline, ours = scorers(setup, precision)
    systems = {"sdpa": baseline, "tilerank": ours}
    rows: dict[str, list[Row]] = {name: [] for name in systems}
    closures: dict[str, list[Callable[[], np.ndarray]]] = {name: [] for name in systems}
    progress = tqdm(calls, desc=f"drop-in {precision}", unit="query", disable=None)
    for call, truth in zip(progress, reference, strict=True):
        inputs = baseline.inputs(call.query, call.passages)
        runs = {name: partial(scorer.score_inputs, inputs) for name, scorer in systems.items()}
        tolerance = 2 * _error(runs["sdpa"](), truth) + ERROR_FLOORS[precision]
        cases = [
            Case(name, run, lambda scores, truth=truth: _error(scores, truth), tolerance) for name, run in runs.items()
        ]
        # The check before timing has run every closure once on this call's shapes: nothing is left to warm up.
        for row in measure(cases, WallClock(setup.device), warmup=0, rounds=rounds, description=call.query[:40]):
            rows[row.name].append(row)
        for name, run in runs.items():
            closures[name].append(run)
    # Starting the profiler takes longer than a call: once for all of them.
    profiled = {
        name: attention_time(lambda runs=closures[name]: [run() for run in runs], operator)
        for name, operator in (("sdpa", SDPA_OPERATOR), ("tilerank", OUR_OPERATOR))
    }
    seconds = {name: found.seconds for name, found in profiled.items()}
    return summarise(rows, seconds, set(profiled["tilerank"].kernels))


def _error(scores: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(np.asarray(scores, dtype=np.float64) - exact).max())


def summarise(
    rows: Mapping[str, Sequence[Row]], attention_seconds: Mapping[str, float], kernels: set[str]
) -> dict[str, Any]:
    """``drop_in.<precision>`` from the rows of ``sdpa`` and ``tilerank``, one a call, and the device time of their
    attention over one forward pass of every call.

    ``ms`` and ``baseline_ms`` are means over calls of each call's median: means add up, as Amdahl's law needs.
    """
    record: dict[str, Any] = {
        "timed": True,
        "variants": sorted({name for kernel in kernels for name in re.findall(r"tilerank::(\w+)::", kernel)}),
    }
    failure = next((row.failure for found in rows.values() for row in found if row.failure), None)
    if failure is not None:
        return {**record, "timed": False, "failure": failure}
    mean = {name: float(np.mean([row.spread.median for row in found])) for name, found in rows.items()}
    spread = {name: Spread.of(np.concatenate([row.seconds for row in found])) for name, found in rows.items()}
    count = len(rows["sdpa"])
    share = attention_seconds["sdpa"] / count / mean["sdpa"]
    kernel_speedup = attention_seconds["sdpa"] / attention_seconds["tilerank"]
    return {
        **record,
        "max_abs_error": max(row.error for row in rows["tilerank"]),
        "sdpa_max_abs_error": max(row.error for row in rows["sdpa"]),
        "ms": 1e3 * mean["tilerank"],
        "p10_ms": 1e3 * spread["tilerank"].p10,
        "p90_ms": 1e3 * spread["tilerank"].p90,
        "baseline_ms": 1e3 * mean["sdpa"],
        "baseline_p10_ms": 1e3 * spread["sdpa"].p10,
        "baseline_p90_ms": 1e3 * spread["sdpa"].p90,
        "repetitions": spread["tilerank"].repetitions,
        "speedup": mean["sdpa"] / mean["tilerank"],
        "attention_share": share,
        "kernel_speedup": kernel_speedup,
        "predicted_speedup": amdahl(share, kernel_speedup),
        "queries": count,
    }


def rank_tasks(setup: RerankSetup, precisions: Sequence[str], tasks: Mapping[str, Task]) -> dict[str, dict[str, Any]]:
    """``quality.<name>.<precision>`` of every task of ``tasks`` (by name): the model with its attention swapped beside
    the unmodified one in fp32, on the same candidates."""
    unmodified = HuggingFaceScorer(*_arguments(setup, "fp32"))
    models = {_UNMODIFIED: unmodified} | {precision: _swapped(setup, precision) for precision in precisions}
    records: dict[str, dict[str, Any]] = {}
    for name, task in tasks.items():
        found = score_by_all(
            task, unmodified.inputs, {each: model.score_inputs for each, model in models.items()}, name
        )
        records[name] = {
            precision: quality_record(task, found[_UNMODIFIED], found[precision]) for precision in precisions
        }
    return records


def check_drop_in(setup: RerankSetup, precision: str, call: Call) -> dict[str, Any]:
    """``drop_in.<precision>`` on a machine without a GPU: scores of some short pairs of one call through the
    reference, beside SDPA's, and ``timed: false``. ``failure`` says what is wrong with them."""
    short = Call(call.query, tuple(sorted(call.passages, key=len)[:CHECK_PAIRS]))
    setup = RerankSetup(
        setup.path, setup.kind, setup.device, min(setup.max_length, CHECK_MAX_LENGTH), setup.attention, CHECK_PAIRS + 1
    )
    (exact,) = reference_scores(setup, [short])
    baseline, ours = (_error(scorer.score(short.query, short.passages), exact) for scorer in scorers(setup, precision))
    record = {"timed": False, "pairs": len(short.passages)}
    tolerance = 2 * baseline + ERROR_FLOORS[precision]
    if not ours <= tolerance:
        return {**record, "failure": f"error {ours:.3g} against float64 is above {tolerance:.3g}"}
    return {**record, "max_abs_error": ours, "sdpa_max_abs_error": baseline}
