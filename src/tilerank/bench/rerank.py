"""One query's passages from raw text to scores: `tilerank.Reranker` beside what people use today, by every host path.

`bench_precision` times all systems interleaved, `bench_steps` the host paths beside each other with where their time
goes, `bench_many` pairs of many queries at once.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from tqdm import tqdm

from tilerank import host_path as host_paths
from tilerank.bench.memory import PeakMemory, in_own_processes, peak_device_memory
from tilerank.bench.peers import HuggingFaceScorer, SentenceTransformersScorer, TunedScorer
from tilerank.bench.timing import Case, Row, Spread, WallClock, measure
from tilerank.encoder import PackedEncoder
from tilerank.errors import TilerankError
from tilerank.quality import Task
from tilerank.reranker import Reranker
from tilerank.token_cache import TokenCache

# Each peer gets the batch size it is quickest with on the first call. 32 is sentence-transformers' own; on a CPU
# trying more costs more than it tells.
BATCH_SIZES = {"cpu": (8, 32), "cuda": (8, 16, 32, 64)}
MANY_BATCH_SIZES = {"cpu": (32,), "cuda": (64, 256)}

STEP_CALLS = {"cpu": 1, "cuda": 6}
"""Calls that the host paths are timed on."""

PHASE_ROUNDS = 2
"""How often each of them is taken apart into its phases."""

EARLIER_ROUNDS = 1
"""Rounds of the host paths before those that launch graphs: the spread of `STEP_CALLS` calls tells enough of them."""

CHOICE_CALLS = 10
"""Calls by whose pairs a batch size for many queries is chosen."""

# A score may be off by twice what the unmodified model is at the same precision, or by this where that model is
# exact by luck: a few units in the last place of a logit near 10. See `ErrorLimits`.
ERROR_FLOORS = {"fp32": 2e-5, "tf32": 2e-2, "fp16": 2e-2, "bf16": 1e-1}

OURS, CACHED, CROSS_ENCODER, TUNED = "tilerank", host_paths.CACHED, "cross_encoder", "tuned_peer"

PHASES = ("tokens", "batches", "forward", "scores")
"""Where the time of a host path goes: ids of the texts; batches formed and on the device; the model, launches and
wait; scores on the host."""

System: TypeAlias = Callable[["Call"], np.ndarray]
"""Logits or cosines ``[passages]`` of a call."""

Peer: TypeAlias = Callable[["Call", int], np.ndarray]
"""The same, by a batch size."""


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
    host_path: str = host_paths.AUTO  # of `tilerank.Reranker`
    token_cache: Path | None = None  # holds the calls' passages; None: there is no such row


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
    return score_all(setup, "fp64", calls)


def score_all(setup: RerankSetup, precision: str, calls: Sequence[Call]) -> tuple[np.ndarray, ...]:
    """The unmodified model's logits (cosines) at ``precision``, one array ``[passages]`` a call."""
    scorer = HuggingFaceScorer(setup.path, setup.kind, precision, setup.device, setup.max_length, setup.batch_size)
    bar = tqdm(calls, desc=f"unmodified {precision}", unit="query", disable=None)
    return tuple(scorer.score(call.query, call.passages) for call in bar)


@dataclass(frozen=True, slots=True)
class ErrorLimits:
    """How far scores may be from float64's: twice as far as the unmodified model's at the same precision, the largest
    error and the root of the mean square each over all pairs of all calls.

    Not call by call: two maxima over 50 roundings each differ by more than two every now and then, whatever computed
    them. Over all pairs both numbers hardly move, and the second sees what the first cannot: scores that are off
    everywhere, and nowhere by much.
    """

    largest: float
    rms: float

    @classmethod
    def of(cls, precision: str, scores: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> ErrorLimits:
        """From the unmodified model's ``scores`` and float64's, one array ``[passages]`` a call."""
        log = ErrorLog()
        for found, truth in zip(scores, exact, strict=True):
            log.against(truth)(found)
        floor = ERROR_FLOORS[precision]
        return cls(max(2 * log.largest, floor), max(2 * log.rms, floor / 4))


class ErrorLog:
    """Every error of one system's scores that was looked at."""

    def __init__(self) -> None:
        self._errors: list[np.ndarray] = []

    def against(self, exact: np.ndarray) -> Callable[[np.ndarray], float]:
        """A function that keeps the errors of scores and returns the largest (see `error_against`)."""

        def error(scores: np.ndarray) -> float:
            self._errors.append(np.abs(np.asarray(scores, dtype=np.float64) - exact))
            return float(self._errors[-1].max())

        return error

    @property
    def largest(self) -> float:
        """NaN where an error is."""
        return float(np.max(np.concatenate(self._errors)))

    @property
    def rms(self) -> float:
        """The root of the mean square; NaN where an error is."""
        return float(np.sqrt(np.mean(np.concatenate(self._errors) ** 2)))

    def failure(self, limits: ErrorLimits) -> str | None:
        """Why the system fails, or None."""
        if not self.largest <= limits.largest:
            return f"error {self.largest:.3g} against float64 is above {limits.largest:.3g}"
        if not self.rms <= limits.rms:
            return f"error {self.rms:.3g} (root mean square) against float64 is above {limits.rms:.3g}"
        return None


def error_limits(
    setup: RerankSetup, precision: str, calls: Sequence[Call], reference: Sequence[np.ndarray]
) -> ErrorLimits:
    """What scores of ``calls`` are held to. reference: their `reference_scores`."""
    return ErrorLimits.of(precision, score_all(setup, precision, calls), reference)


@dataclass(frozen=True, slots=True, eq=False)
class Rerankers:
    """Ours at one precision, loaded once for all that is timed."""

    plain: Reranker
    cached: Reranker | None  # with the setup's token cache

    @classmethod
    def of(cls, setup: RerankSetup, precision: str) -> Rerankers:
        """As ``setup`` has them."""
        plain = make_reranker(setup, precision)
        if setup.token_cache is None:
            return cls(plain, None)
        cached = copy.copy(plain)  # the same model and graphs
        cached.tokenizer = copy.copy(plain.tokenizer)
        cached.tokenizer.use_cache(TokenCache(setup.token_cache))
        return cls(plain, cached)


def bench_precision(
    setup: RerankSetup,
    precision: str,
    rerankers: Rerankers,
    calls: Sequence[Call],
    reference: Sequence[np.ndarray],
    limits: ErrorLimits,
    rounds: int,
) -> dict[str, Any]:
    """Time all systems on every call, interleaved, and return the record ``rerank.<precision>``.

    reference, limits: `reference_scores` and `error_limits` of ``calls``. Times are over all calls and rounds. A system
    whose scores are wrong has no times; ``failures`` says why.
    """
    reranker = rerankers.plain
    systems: dict[str, System] = {OURS: partial(score, reranker)}
    if rerankers.cached is not None:
        systems[CACHED] = partial(score, rerankers.cached)
    sizes: dict[str, int] = {}
    for name, peer in peers(setup, precision).items():
        repetitions = 3 if setup.device == "cuda" else 1
        sizes[name] = _best_batch_size(name, peer, calls[0], BATCH_SIZES[setup.device], repetitions)
        systems[name] = partial(peer, batch_size=sizes[name])
    clock = WallClock(setup.device)
    rows: dict[str, list[Row]] = {name: [] for name in systems}
    logs = {name: ErrorLog() for name in systems}
    for number, (call, exact) in enumerate(zip(calls, reference, strict=True), start=1):
        cases = [
            Case(name, partial(system, call), logs[name].against(exact), limits.largest)
            for name, system in systems.items()
        ]
        description = f"rerank {precision}, query {number} of {len(calls)}"
        # The check before timing has run every closure once on this call's shapes: nothing is left to warm up.
        for row in measure(cases, clock, warmup=0, rounds=rounds, description=description):
            rows[row.name].append(row)
    record = summarise(rows, logs, limits)
    record["batch_sizes"] = sizes
    record["host_path"], record["attention"] = reranker.host_path.name, reranker.attention
    record["tokenizer"] = reranker.tokenizer.engine
    if isinstance(reranker.encoder, PackedEncoder) and reranker.encoder.graphs is not None:
        report = reranker.encoder.graphs.report()
        record["graphs"] = {"captures": report.captures, "eager": report.eager, "waste": report.waste}
    return record


def make_reranker(setup: RerankSetup, precision: str, host_path: str | None = None, **options: Any) -> Reranker:
    """`tilerank.Reranker` as ``setup`` has it, or by another host path."""
    return Reranker(
        setup.path,
        device=setup.device,
        precision=precision,
        attention=setup.attention,
        max_length=setup.max_length,
        host_path=host_path or setup.host_path,
        **options,
    )


def score(reranker: Reranker, call: Call) -> np.ndarray:
    """Logits or cosines ``[passages]`` as a caller gets scores: all checks, no activation."""
    pairs = [(call.query, passage) for passage in call.passages]
    return reranker.predict(pairs, activation_fn=torch.nn.Identity())


def peers(setup: RerankSetup, precision: str) -> dict[str, Peer]:
    """What people use today, by name."""
    arguments = (setup.path, setup.kind, precision, setup.device, setup.max_length)
    return {
        CROSS_ENCODER: _peer(SentenceTransformersScorer(*arguments)),
        TUNED: _peer(TunedScorer(*arguments)),
    }


def _peer(scorer: SentenceTransformersScorer | TunedScorer) -> Peer:
    def score(call: Call, batch_size: int) -> np.ndarray:
        scorer.batch_size = batch_size
        return scorer.score(call.query, call.passages)

    return score


def error_against(exact: np.ndarray) -> Callable[[np.ndarray], float]:
    """The largest absolute difference of scores from ``exact``."""
    return lambda scores: float(np.abs(np.asarray(scores, dtype=np.float64) - exact).max())


def _best_batch_size(name: str, peer: Peer, call: Call, sizes: Sequence[int], repetitions: int) -> int:
    """The batch size of ``sizes`` that is quickest on ``call``, by its best of ``repetitions``."""
    peer(call, sizes[0])  # warm-up
    seconds = dict.fromkeys(sizes, float("inf"))
    for size in tqdm(sizes, desc=f"batch size of {name}", leave=False, disable=None):
        for _ in range(repetitions):
            start = time.perf_counter()
            peer(call, size)  # returns host memory: the device has finished
            seconds[size] = min(seconds[size], time.perf_counter() - start)
    return min(sizes, key=seconds.__getitem__)


def summarise(rows: Mapping[str, Sequence[Row]], logs: Mapping[str, ErrorLog], limits: ErrorLimits) -> dict[str, Any]:
    """The record ``rerank.<precision>`` from the rows of every system, one a call, in the same order, and its errors.

    A speedup whose repetition-by-repetition p10 and p90 lie on both sides of 1 is listed under ``noise``.
    """
    failures = {name: reason for name in rows if (reason := logs[name].failure(limits))}
    seconds = {name: np.concatenate([row.seconds for row in found]) for name, found in rows.items()}
    record: dict[str, Any] = {
        **error_record(logs),
        "tolerance": limits.largest,
        "rms_tolerance": limits.rms,
    }
    if failures:
        record["failures"] = failures
    if OURS not in failures:
        spread = Spread.of(seconds[OURS])
        record["ms"], record["p10_ms"], record["p90_ms"] = (
            1e3 * value for value in (spread.median, spread.p10, spread.p90)
        )
        record["repetitions"] = spread.repetitions
    if CACHED in seconds and CACHED not in failures:
        record["cached_ms"] = 1e3 * Spread.of(seconds[CACHED]).median
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


def error_record(logs: Mapping[str, ErrorLog]) -> dict[str, Any]:
    """Errors by system, of those that gave numbers."""
    finite = {name: log for name, log in logs.items() if np.isfinite(log.rms)}
    return {
        "max_abs_error": {name: log.largest for name, log in finite.items()},
        "rms_error": {name: log.rms for name, log in finite.items()},
    }


def bench_steps(
    setup: RerankSetup,
    precision: str,
    rerankers: Rerankers,
    calls: Sequence[Call],
    reference: Sequence[np.ndarray],
    limits: ErrorLimits,
    rounds: int,
) -> dict[str, Any]:
    """Time the host paths of the device and of the model beside each other: ``rerank.<precision>.steps``.

    For each path ``ms``, ``p10_ms`` and ``p90_ms`` as it runs, and of `PHASES` the median ``<phase>_ms`` of passes that
    wait for the device after each: on a GPU their sum is above ``ms``, whose phases overlap. Where there is a token
    cache the last path is timed with it too, as ``cached``, unless the setup asks for another path. A path whose scores
    are wrong has ``failure`` instead.
    """
    is_auto = setup.host_path == host_paths.AUTO
    last = rerankers.plain if is_auto else make_reranker(setup, precision, host_paths.AUTO)
    names = [path.name for path in host_paths.of_device(setup.device)]
    names = names[: names.index(last.host_path.name) + 1]
    paths = {name: make_reranker(setup, precision, name) for name in names[:-1]} | {names[-1]: last}
    if is_auto and rerankers.cached is not None:
        paths[CACHED] = rerankers.cached
    calls = calls[: STEP_CALLS[setup.device]]
    logs = {name: ErrorLog() for name in paths}
    rows: dict[str, list[Row]] = {name: [] for name in paths}
    phases: dict[str, list[Mapping[str, float]]] = {name: [] for name in paths}
    earlier = {path.name for path in host_paths.PATHS if setup.device == "cuda" and not path.graphs}
    for call, exact in zip(calls, reference, strict=False):
        cases = {
            name: Case(name, partial(score, reranker, call), logs[name].against(exact), limits.largest)
            for name, reranker in paths.items()
        }
        clock = WallClock(setup.device)
        for number, are_earlier in ((min(rounds, EARLIER_ROUNDS), True), (rounds, False)):
            some = [case for name, case in cases.items() if (name in earlier) == are_earlier]
            for row in measure(some, clock, warmup=0, rounds=number, description=f"host paths {precision}"):
                rows[row.name].append(row)
        for name, reranker in paths.items():
            time_phases(reranker, call)  # as one piece a call has shapes that it may not have had before
            phases[name] += [time_phases(reranker, call) for _ in range(PHASE_ROUNDS)]
    return {name: _step_record(rows[name], phases[name], logs[name].failure(limits)) for name in paths}


def _step_record(rows: Sequence[Row], phases: Sequence[Mapping[str, float]], failure: str | None) -> dict[str, Any]:
    if failure is not None:
        return {"failure": failure}
    spread = Spread.of(np.concatenate([row.seconds for row in rows]))
    return {
        "ms": 1e3 * spread.median,
        "p10_ms": 1e3 * spread.p10,
        "p90_ms": 1e3 * spread.p90,
        **{f"{phase}_ms": 1e3 * statistics.median(one[phase] for one in phases) for phase in PHASES},
        "max_abs_error": max(row.error for row in rows),
    }


def time_phases(reranker: Reranker, call: Call) -> dict[str, float]:
    """Seconds of each of `PHASES` in one call, the device idle between them."""
    marks = [time.perf_counter()]

    def mark() -> None:
        if reranker.device.type == "cuda":
            torch.cuda.synchronize(reranker.device)
        marks.append(time.perf_counter())

    reranker.score_in_steps([(call.query, passage) for passage in call.passages], mark)
    return {phase: end - start for phase, start, end in zip(PHASES, marks[:-1], marks[1:], strict=True)}


def bench_many(
    setup: RerankSetup, precision: str, rerankers: Rerankers, calls: Sequence[Call], rounds: int
) -> dict[str, Any]:
    """Pairs a second over all calls at once: `Reranker.rank_many` beside sentence-transformers, which sorts its batches
    by length itself, at its best batch size of `MANY_BATCH_SIZES`. Part of ``rerank.<precision>``.
    """
    reranker = rerankers.plain
    queries, candidates = [call.query for call in calls], [call.passages for call in calls]
    pairs = [(call.query, passage) for call in calls for passage in call.passages]
    theirs = SentenceTransformersScorer(setup.path, setup.kind, precision, setup.device, setup.max_length)
    sizes = MANY_BATCH_SIZES[setup.device]
    if setup.device == "cuda":  # graphs, and what the allocator keeps
        reranker.rank_many(queries, candidates)

    def seconds(batch_size: int, some: Sequence[tuple[str, str]]) -> float:
        theirs.batch_size = batch_size
        start = time.perf_counter()
        theirs.score_pairs(some)
        return time.perf_counter() - start

    few = pairs[: sum(len(call.passages) for call in calls[:CHOICE_CALLS])]
    size = sizes[0] if len(sizes) == 1 else min(sizes, key=lambda one: min(seconds(one, few) for _ in range(2)))
    best = {OURS: float("inf"), CROSS_ENCODER: float("inf")}
    for _ in range(rounds):
        start = time.perf_counter()
        reranker.rank_many(queries, candidates)
        best[OURS] = min(best[OURS], time.perf_counter() - start)
        best[CROSS_ENCODER] = min(best[CROSS_ENCODER], seconds(size, pairs))
    return {
        "pairs_per_s": len(pairs) / best[OURS],
        "cross_encoder_pairs_per_s": len(pairs) / best[CROSS_ENCODER],
        "many_batch_size": size,
        "many_pairs": len(pairs),
    }


def memory_record(setup: RerankSetup, precision: str, calls: Sequence[Call]) -> dict[str, float]:
    """``memory.<precision>``: peak CUDA memory of the call with the most text, weights included: what tensors held,
    and (``reserved``) what torch's allocator held for them and for graphs."""
    call = max(calls, key=lambda one: sum(map(len, one.passages)))
    peaks = in_own_processes(_peak_memory, (setup, precision, call, True), (setup, precision, call, False))
    return {
        f"{prefix}{name}_mb": value
        for prefix, peak in zip(("", "baseline_"), peaks, strict=True)
        for name, value in (("peak", peak.allocated), ("reserved", peak.reserved))
    }


def _peak_memory(setup: RerankSetup, precision: str, call: Call, is_ours: bool) -> PeakMemory:
    def ours() -> Callable[[], Any]:
        return partial(score, make_reranker(setup, precision), call)

    def unmodified() -> Callable[[], Any]:
        scorer = HuggingFaceScorer(setup.path, setup.kind, precision, setup.device, setup.max_length, setup.batch_size)
        return partial(scorer.score, call.query, call.passages)

    return peak_device_memory(ours if is_ours else unmodified)
