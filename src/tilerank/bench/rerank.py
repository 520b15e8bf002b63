"""One query's passages from raw text to scores: `tilerank.Reranker` beside what people use today."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from tqdm import tqdm

from tilerank.bench.memory import peak_device_mb
from tilerank.bench.peers import HuggingFaceScorer, SentenceTransformersScorer, TunedScorer
from tilerank.bench.timing import Case, Row, Spread, WallClock, measure
from tilerank.errors import TilerankError
from tilerank.quality import Task
from tilerank.reranker import Reranker

# Each system gets the batch size it is quickest with on the first call.
BATCH_SIZES = (8, 16, 32, 64)

# A score may be off by twice what the unmodified model is at the same precision, or by this where that model is
# exact by luck: a few units in the last place of a logit near 10.
ERROR_FLOORS = {"fp32": 2e-5, "tf32": 2e-2, "fp16": 2e-2, "bf16": 1e-1}

OURS, CROSS_ENCODER, TUNED = "tilerank", "cross_encoder", "tuned_peer"

System: TypeAlias = Callable[["Call", int], np.ndarray]
"""(call, batch size) -> logits or cosines ``[passages]``."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a search engine asks of a reranker at once: one query and its candidates."""

    query: str
    passages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RerankSetup:
    """The model and how every system runs it."""

    path: Path
    kind: str
    device: str
    max_length: int
    attention: str  # of `tilerank.Reranker`
    batch_size: int  # pairs a forward pass of the unmodified model


def calls_of(task: Task) -> tuple[Call, ...]:
    """The task's queries that have candidates, in order. Raises `TilerankError` when there is none."""
    calls = tuple(
        Call(task.query_texts[query_id], tuple(task.passages[doc_id] for doc_id in doc_ids))
        for query_id, doc_ids in task.candidates.items()
        if doc_ids
    )
    if not calls:
        raise TilerankError(
            f"none of the first {len(task.candidates)} queries has candidates: there is nothing to time"
        )
    return calls


def reference_scores(setup: RerankSetup, calls: Sequence[Call]) -> tuple[np.ndarray, ...]:
    """The unmodified model's logits (cosines) in float64, one array ``[passages]`` a call."""
    return _score_all(setup, "fp64", calls)


def _score_all(setup: RerankSetup, precision: str, calls: Sequence[Call]) -> tuple[np.ndarray, ...]:
    scorer = HuggingFaceScorer(setup.path, setup.kind, precision, setup.device, setup.max_length, setup.batch_size)
    bar = tqdm(calls, desc=f"unmodified {precision}", unit="query", disable=None)
    return tuple(scorer.score(call.query, call.passages) for call in bar)


def bench_precision(
    setup: RerankSetup, precision: str, calls: Sequence[Call], reference: Sequence[np.ndarray], rounds: int
) -> dict[str, Any]:
    """Time all systems on every call, interleaved, and return the record ``rerank.<precision>``.

    reference: `reference_scores` of ``calls``. Times are over all calls and rounds. A system whose scores are
    wrong on any call has no times; ``failures`` says why.
    """
    unmodified = _score_all(setup, precision, calls)
    tolerances = [
        max(2 * float(np.abs(scores - exact).max()), ERROR_FLOORS[precision])
        for scores, exact in zip(unmodified, reference, strict=True)
    ]
    arguments = (setup.path, setup.kind, precision, setup.device, setup.max_length)
    systems: dict[str, System] = {
        OURS: _ours(setup, precision),
        CROSS_ENCODER: _peer(SentenceTransformersScorer(*arguments)),
        TUNED: _peer(TunedScorer(*arguments)),
    }
    repetitions = 5 if setup.device == "cuda" else 1
    sizes = {name: _best_batch_size(name, system, calls[0], repetitions) for name, system in systems.items()}
    clock = WallClock(setup.device)
    rows: dict[str, list[Row]] = {name: [] for name in systems}
    for number, (call, exact, tolerance) in enumerate(zip(calls, reference, tolerances, strict=True), start=1):
        cases = [
            Case(name, partial(system, call, sizes[name]), _error_against(exact), tolerance)
            for name, system in systems.items()
        ]
        description = f"rerank {precision}, query {number} of {len(calls)}"
        # The check before timing has run every closure once on this call's shapes: nothing is left to warm up.
        for row in measure(cases, clock, warmup=0, rounds=rounds, description=description):
            rows[row.name].append(row)
    pairs = rounds * sum(len(call.passages) for call in calls)
    record = summarise(rows, pairs)
    record["batch_sizes"] = sizes
    return record


def _ours(setup: RerankSetup, precision: str) -> System:
    reranker = Reranker(
        setup.path, device=setup.device, precision=precision, attention=setup.attention, max_length=setup.max_length
    )
    logits = torch.nn.Identity()

    def score(call: Call, batch_size: int) -> np.ndarray:
        pairs = [(call.query, passage) for passage in call.passages]
        return reranker.predict(pairs, batch_size=batch_size, activation_fn=logits)

    return score


def _peer(scorer: SentenceTransformersScorer | TunedScorer) -> System:
    def score(call: Call, batch_size: int) -> np.ndarray:
        scorer.batch_size = batch_size
        return scorer.score(call.query, call.passages)

    return score


def _error_against(exact: np.ndarray) -> Callable[[np.ndarray], float]:
    return lambda scores: float(np.abs(np.asarray(scores, dtype=np.float64) - exact).max())


def _best_batch_size(name: str, system: System, call: Call, repetitions: int) -> int:
    """The batch size of `BATCH_SIZES` that is quickest on ``call``, by its best of ``repetitions``."""
    system(call, BATCH_SIZES[0])  # warm-up
    seconds = dict.fromkeys(BATCH_SIZES, float("inf"))
    for size in tqdm(BATCH_SIZES, desc=f"batch size of {name}", leave=False, disable=None):
        for _ in range(repetitions):
            start = time.perf_counter()
            system(call, size)  # returns host memory: the device has finished
            seconds[size] = min(seconds[size], time.perf_counter() - start)
    return min(BATCH_SIZES, key=seconds.__getitem__)


def summarise(rows: Mapping[str, Sequence[Row]], pairs: int) -> dict[str, Any]:
    """The record ``rerank.<precision>`` from the rows of every system, one a call, in the same order.

    pairs: pairs that our system scored in all its timed repetitions. A speedup whose repetition-by-repetition
    p10 and p90 lie on both sides of 1 is listed under ``noise``.
    """
    failures = {
        name: next(row.failure for row in found if row.failure)
        for name, found in rows.items()
        if any(row.failure for row in found)
    }
    seconds = {name: np.concatenate([row.seconds for row in found]) for name, found in rows.items()}
    record: dict[str, Any] = {
        "max_abs_error": {name: max(row.error for row in found) for name, found in rows.items() if _finite(found)},
        "tolerance": max(row.tolerance for row in rows[OURS]),
    }
    if failures:
        record["failures"] = failures
    if OURS not in failures:
        spread = Spread.of(seconds[OURS])
        record["ms"], record["p10_ms"], record["p90_ms"] = (
            1e3 * value for value in (spread.median, spread.p10, spread.p90)
        )
        record["repetitions"] = spread.repetitions
        record["pairs_per_s"] = pairs / float(seconds[OURS].sum())
    noise = []
    for name in (CROSS_ENCODER, TUNED):
        if name in failures:
            continue
        record[f"{name}_ms"] = 1e3 * Spread.of(seconds[name]).median
        if OURS not in failures:
            record[f"speedup_vs_{name}"] = record[f"{name}_ms"] / record["ms"]
            low, high = np.percentile(seconds[name] / seconds[OURS], [10, 90])
            if low < 1 < high:
                noise.append(f"speedup_vs_{name}")
    if noise:
        record["noise"] = noise
    return record


def _finite(rows: Sequence[Row]) -> bool:
    return all(np.isfinite(row.error) for row in rows)


def memory_record(setup: RerankSetup, precision: str, calls: Sequence[Call]) -> dict[str, float]:
    """``memory.<precision>``: peak CUDA memory of the call with the most text, weights included."""
    call = max(calls, key=lambda one: sum(map(len, one.passages)))

    def ours() -> Callable[[], Any]:
        return partial(_ours(setup, precision), call, setup.batch_size)

    def unmodified() -> Callable[[], Any]:
        scorer = HuggingFaceScorer(setup.path, setup.kind, precision, setup.device, setup.max_length, setup.batch_size)
        return partial(scorer.score, call.query, call.passages)

    return {"peak_mb": peak_device_mb(ours), "baseline_peak_mb": peak_device_mb(unmodified)}
