"""The whole forward pass on workload ``seed``, ids on the device already: the packed model, the same from a library's
parts, and transformers' padded model.

On a GPU the library's is `packed_library`: compiled, in a CUDA graph; where that does not serve it is transformers'
model on packed tokens with torch's own attention. Wall times of synchronised passes, so that launches count where they
set the pace. The model's limit cuts the lengths.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch

from tilerank import packing
from tilerank.bench.floors import Rates, measured_rates
from tilerank.bench.forward_parts import Sizes, floors, kernels_of, parts_record
from tilerank.bench.packed_library import CapturedLibrary
from tilerank.bench.peers import DTYPES, HuggingFaceScorer, arithmetic
from tilerank.bench.rerank import ErrorLimits, ErrorLog, RerankSetup, error_record, make_reranker
from tilerank.bench.timing import Case, Ratio, WallClock, measure, ratio
from tilerank.bench.workloads import SEED_LENGTHS, Workload
from tilerank.encoder import PackedEncoder
from tilerank.errors import TilerankError
from tilerank.models import describe
from tilerank.packing import PackedBatch
from tilerank.reranker import Reranker, load_model
from tilerank.tokenization import Tokens

OURS, LIBRARY, TRANSFORMERS = "tilerank", "packed_library", "transformers_sdpa"
SHORT = "packed_library_first_tokens"
"""The library's pass with this project's own short cut, so that it is known what the rest is worth."""
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
    draws, exact = _draws(setup, tuple(lengths)), _exact(setup, tuple(lengths))
    reranker = make_reranker(setup, precision)
    systems: dict[str, System] = {
        OURS: reranker.forward_of,
        TRANSFORMERS: _padded(setup, precision),
    }
    compiled: dict[str, list[CapturedLibrary]] = {}
    if _can_compile(setup):
        compiled[LIBRARY] = []
        systems[LIBRARY] = _compiled(setup, precision, compiled[LIBRARY], first_only=False)
        if precision == "fp16":  # compiling takes a good part of the benchmark: once is enough
            systems[SHORT] = _compiled(setup, precision, [], first_only=True)
    else:
        systems[LIBRARY] = make_reranker(replace(setup, attention="sdpa", host_path="packed"), precision).forward_of
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
    for name, spread in zip(list(systems)[1:], theirs, strict=True):
        if spread is not None:
            record[f"{name}_ms"] = 1e3 * spread.median
            if ours is not None:
                compared[f"speedup_vs_{name}"] = ratio(ours, spread)
    record |= {key: found.value for key, found in compared.items()}
    if noise := [key for key, found in compared.items() if found.is_noise]:
        record["noise"] = noise
    if LIBRARY in compiled:
        record["packed_library_compiled"] = compiled[LIBRARY][0].is_compiled
    if parts := _parts(reranker, precision, draws[0]):
        record["parts"] = parts
    return record


def _draws(setup: RerankSetup, lengths: tuple[int, ...]) -> list[Tokens]:
    vocabulary = describe(setup.path).vocabulary_size or 1000
    return [seed_tokens(vocabulary, lengths, seed) for seed in range(DRAWS)]


@cache
def _exact(setup: RerankSetup, lengths: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """What all precisions are judged by: the unmodified model in float64, which takes longer than all that is timed."""
    return tuple(_scores(_padded(setup, "fp64"), _draws(setup, lengths)))


def _scores(system: System, draws: Sequence[Tokens]) -> list[np.ndarray]:
    return [_on_host(system(draw)()) for draw in draws]


def _on_host(scores: torch.Tensor) -> np.ndarray:
    return scores.double().cpu().numpy()


def _parts(reranker: Reranker, precision: str, tokens: Tokens) -> dict[str, Any] | None:
    """Where a fused pass spends its time, by `forward_parts`; None for another one."""
    if reranker.device.type != "cuda":
        return None
    encoder = reranker.encoder
    if not isinstance(encoder, PackedEncoder) or encoder.fused is None:
        return None
    config = reranker.model.config
    sizes = Sizes(config.num_hidden_layers, config.hidden_size, config.intermediate_size)
    heads = config.num_attention_heads
    lengths = tuple(int(length) for length in tokens.lengths)
    workload = Workload("seed", lengths, max(lengths), heads, config.hidden_size // heads)
    attention = {"varlen": "flash_fwd", "mem_efficient": "fmha"}.get(reranker.attention, f"{reranker.attention}::")
    used = encoder.fused.parts.used
    least = floors(workload, sizes, precision, _rates(), whole_layers="between" in used)
    try:
        return {"used": used, **parts_record(kernels_of(reranker.forward_of(tokens)), attention, least)}
    except TilerankError as error:  # a composition whose kernels have another order
        return {"used": used, "unknown": str(error)}


@cache
def _rates() -> Rates:
    return measured_rates()


def _can_compile(setup: RerankSetup) -> bool:
    """Whether `packed_library` serves the model, and this machine can compile for its GPU."""
    is_bert = setup.kind == "cross-encoder" and describe(setup.path).family == "bert"
    return setup.device == "cuda" and is_bert and importlib.util.find_spec("triton") is not None


def _compiled(setup: RerankSetup, precision: str, library: list[CapturedLibrary], *, first_only: bool) -> System:
    """``library``: empty; holds what was compiled once the first tokens are known."""
    model = load_model(setup.path, setup.kind, DTYPES[precision], "sdpa").to(setup.device)

    def forward_of(tokens: Tokens) -> Callable[[], torch.Tensor]:
        shape = (int(tokens.lengths.sum()), len(tokens.lengths))
        values = torch.empty(packing.size_of(*shape), dtype=torch.int32)
        rows = np.arange(len(tokens.lengths))
        packing.fill(values.numpy(), tokens, rows, shape, with_types=True, positions_from=0)
        batch = PackedBatch(values.to(setup.device), *shape, *shape, int(tokens.lengths.max()))
        if not library:
            with arithmetic(precision):
                library.append(CapturedLibrary(model, batch, first_only=first_only))
        return lambda: library[0].run(batch)

    return forward_of


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
