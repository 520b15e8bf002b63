"""The whole forward pass on workload ``seed``, ids on the device already: the packed model, the same with torch's own
attention, and transformers' padded model.

Wall times of synchronised passes, so that launches count where they set the pace. The model's limit cuts the lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from tilerank.bench.peers import HuggingFaceScorer
from tilerank.bench.rerank import ErrorLimits, ErrorLog, RerankSetup, error_record, make_reranker
from tilerank.bench.timing import Case, Ratio, WallClock, measure, ratio
from tilerank.bench.workloads import SEED_LENGTHS
from tilerank.models import describe
from tilerank.tokenization import Tokens

OURS, LIBRARY, TRANSFORMERS = "tilerank", "packed_library", "transformers_sdpa"
WARMUP, ROUNDS = 5, 40
DRAWS = 8
"""Lists of ids whose scores are judged."""

System: TypeAlias = Callable[[Tokens], Callable[[], torch.Tensor]]
"""Puts tokens on the device and returns what runs the model over them: logits ``[n]`` or vectors ``[n, d]``."""


def seed_tokens(vocabulary: int, lengths: Sequence[int], seed: int = 0) -> Tokens:
    """Random ids of these lengths (no special tokens: the first 1,000 ids have them), the last two thirds of each
    sequence a passage's."""
    first = 1000 if vocabulary > 2000 else 0
    counts = np.array(lengths, dtype=np.int64)
    ids = np.random.default_rng(seed).integers(first, vocabulary, counts.sum(), dtype=np.int32)
    types = np.concatenate([np.arange(count) >= count // 3 for count in counts]).astype(np.int32)
    return Tokens(ids, types, counts, np.zeros(len(counts), dtype=bool))


def bench_forward(setup: RerankSetup, precision: str, *, warmup: int = WARMUP, rounds: int = ROUNDS) -> dict[str, Any]:
    """``forward.<precision>``: medians in ms and how many times sooner ours ends than each of the others.

    A pass whose logits (vectors) are wrong has no time; ``failures`` says why. They are judged over `DRAWS` lists of
    ids (see `tilerank.bench.rerank.ErrorLimits`), the first of which is timed. A ratio below the spread is listed under
    ``noise``.
    """
    description = describe(setup.path)
    limit = min(setup.max_length, description.own_max_length or setup.max_length)
    lengths = [min(count, limit) for count in SEED_LENGTHS]
    draws = [seed_tokens(description.vocabulary_size or 1000, lengths, seed) for seed in range(DRAWS)]
    systems: dict[str, System] = {
        OURS: make_reranker(setup, precision).forward_of,
        LIBRARY: make_reranker(replace(setup, attention="sdpa"), precision).forward_of,
        TRANSFORMERS: _padded(setup, precision),
    }
    exact = _scores(_padded(setup, "fp64"), draws)
    found = {name: _scores(system, draws) for name, system in systems.items()}
    limits = ErrorLimits.of(precision, found[TRANSFORMERS], exact)
    logs = {name: ErrorLog() for name in systems}
    for name, scores in found.items():
        for ours, truth in zip(scores, exact, strict=True):
            logs[name].against(truth)(ours)

    def error(scores: torch.Tensor, log: ErrorLog) -> float:
        return log.against(exact[0])(_on_host(scores))

    cases = [
        Case(name, system(draws[0]), partial(error, log=logs[name]), limits.largest) for name, system in systems.items()
    ]
    rows = measure(cases, WallClock(setup.device), warmup=warmup, rounds=rounds, description=f"forward {precision}")
    record = {**error_record(logs), "tolerance": limits.largest, "rms_tolerance": limits.rms}
    if failures := {name: reason for name, log in logs.items() if (reason := log.failure(limits))}:
        record["failures"] = failures
    ours, *theirs = (None if row.name in failures else row.spread for row in rows)
    if ours is not None:
        record |= {"ms": 1e3 * ours.median, "p10_ms": 1e3 * ours.p10, "p90_ms": 1e3 * ours.p90}
    compared: dict[str, Ratio] = {}
    for name, spread in zip((LIBRARY, TRANSFORMERS), theirs, strict=True):
        if spread is not None:
            record[f"{name}_ms"] = 1e3 * spread.median
            if ours is not None:
                compared[f"speedup_vs_{name}"] = ratio(ours, spread)
    record |= {key: found.value for key, found in compared.items()}
    if noise := [key for key, found in compared.items() if found.is_noise]:
        record["noise"] = noise
    return record


def _scores(system: System, draws: Sequence[Tokens]) -> list[np.ndarray]:
    return [_on_host(system(draw)()) for draw in draws]


def _on_host(scores: torch.Tensor) -> np.ndarray:
    return scores.double().cpu().numpy()


def _padded(setup: RerankSetup, precision: str) -> System:
    scorer = HuggingFaceScorer(setup.path, setup.kind, precision, setup.device, setup.max_length, setup.batch_size)
    uses_types = describe(setup.path).uses_token_types

    def forward_of(tokens: Tokens) -> Callable[[], torch.Tensor]:
        ids, types, mask = torch.from_numpy(tokens.padded(np.arange(len(tokens.lengths)), 0)).to(setup.device)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if uses_types:
            inputs["token_type_ids"] = types
        return lambda: scorer.forward(inputs)

    return forward_of
