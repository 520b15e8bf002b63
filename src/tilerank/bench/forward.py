"""The whole forward pass on workload ``seed``, ids on the device already: the packed model, the same from a library's
parts, and transformers' padded model.

On a GPU the library's is `packed_library`: compiled, in a CUDA graph; where that does not serve it is
transformers' model on packed tokens with torch's own attention. Wall times of synchronised passes, so that launches
count where they set the pace. The model's limit cuts the lengths.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from tilerank import packing
from tilerank.bench.floors import Rates, measured_rates
from tilerank.bench.forward_parts import Sizes, floors, parts_record
from tilerank.bench.packed_library import captured
from tilerank.bench.peers import DTYPES, HuggingFaceScorer, arithmetic
from tilerank.bench.rerank import ERROR_FLOORS, RerankSetup, make_reranker
from tilerank.bench.timing import Case, Ratio, WallClock, measure, ratio
from tilerank.bench.workloads import SEED_LENGTHS, Workload
from tilerank.encoder import PackedEncoder
from tilerank.models import describe
from tilerank.packing import PackedBatch
from tilerank.reranker import load_model
from tilerank.tokenization import Tokens

OURS, LIBRARY, TRANSFORMERS = "tilerank", "packed_library", "transformers_sdpa"
SHORT = "packed_library_first_tokens"
"""The library's pass with this project's own short cut, so that it is known what the rest is worth."""
WARMUP, ROUNDS = 5, 40


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

    A pass whose logits (vectors) are wrong has no time; ``failures`` says why. A ratio below the spread is listed under
    ``noise``.
    """
    description = describe(setup.path)
    limit = min(setup.max_length, description.own_max_length or setup.max_length)
    tokens = seed_tokens(description.vocabulary_size or 1000, [min(count, limit) for count in SEED_LENGTHS])
    exact = _padded(setup, "fp64", tokens)()
    runs = {OURS: _packed(setup, precision, tokens), TRANSFORMERS: _padded(setup, precision, tokens)}
    if _can_compile(setup):
        runs[LIBRARY] = _compiled(setup, precision, tokens, first_only=False)
        runs[SHORT] = _compiled(setup, precision, tokens, first_only=True)
    else:
        runs[LIBRARY] = _packed(replace(setup, attention="sdpa", host_path="packed"), precision, tokens)

    def error(found: torch.Tensor) -> float:
        return float((found.double() - exact).abs().max())

    tolerance = max(2 * error(runs[TRANSFORMERS]()), ERROR_FLOORS[precision])
    cases = [Case(name, run, error, tolerance) for name, run in runs.items()]
    rows = measure(cases, WallClock(setup.device), warmup=warmup, rounds=rounds, description=f"forward {precision}")
    record: dict[str, Any] = {"max_abs_error": {row.name: row.error for row in rows if np.isfinite(row.error)}}
    if failures := {row.name: row.failure for row in rows if row.failure}:
        record["failures"] = failures
    ours, *_ = spreads = [row.spread for row in rows]
    if ours is not None:
        record |= {"ms": 1e3 * ours.median, "p10_ms": 1e3 * ours.p10, "p90_ms": 1e3 * ours.p90}
    compared: dict[str, Ratio] = {}
    for name, spread in zip(list(runs)[1:], spreads[1:], strict=True):
        if spread is not None:
            record[f"{name}_ms"] = 1e3 * spread.median
            if ours is not None:
                compared[f"speedup_vs_{name}"] = ratio(ours, spread)
    record |= {key: found.value for key, found in compared.items()}
    if noise := [key for key, found in compared.items() if found.is_noise]:
        record["noise"] = noise
    if parts := _parts(setup, precision, tokens):
        record["parts"] = parts
    return record


def _packed(setup: RerankSetup, precision: str, tokens: Tokens) -> Callable[[], torch.Tensor]:
    reranker = make_reranker(setup, precision)
    return reranker.forward_of(tokens)


def _parts(setup: RerankSetup, precision: str, tokens: Tokens) -> dict[str, Any] | None:
    """Where a fused pass spends its time, by `forward_parts`; None for another one."""
    reranker = make_reranker(setup, precision)
    encoder = reranker.encoder
    if setup.device != "cuda" or not isinstance(encoder, PackedEncoder) or encoder.fused is None:
        return None
    config = reranker.model.config
    sizes = Sizes(config.num_hidden_layers, config.hidden_size, config.intermediate_size)
    heads = config.num_attention_heads
    lengths = tuple(int(length) for length in tokens.lengths)
    workload = Workload("seed", lengths, max(lengths), heads, config.hidden_size // heads)
    attention = {"varlen": "flash_fwd", "mem_efficient": "fmha"}.get(reranker.attention, f"{reranker.attention}::")
    least = floors(workload, sizes, precision, _rates())
    return {"used": encoder.fused.parts.used, **parts_record(reranker.forward_of(tokens), attention, least)}


@cache
def _rates() -> Rates:
    return measured_rates()


def _can_compile(setup: RerankSetup) -> bool:
    """Whether `packed_library` serves the model, and this machine can compile for its GPU."""
    is_bert = setup.kind == "cross-encoder" and describe(setup.path).family == "bert"
    return setup.device == "cuda" and is_bert and importlib.util.find_spec("triton") is not None


def _compiled(setup: RerankSetup, precision: str, tokens: Tokens, *, first_only: bool) -> Callable[[], torch.Tensor]:
    shape = (int(tokens.lengths.sum()), len(tokens.lengths))
    values = torch.empty(packing.size_of(*shape), dtype=torch.int32)
    rows = np.arange(len(tokens.lengths))
    packing.fill(values.numpy(), tokens, rows, shape, with_types=True, positions_from=0)
    batch = PackedBatch(values.to(setup.device), *shape, *shape, int(tokens.lengths.max()))
    model = load_model(setup.path, setup.kind, DTYPES[precision], "sdpa").to(setup.device)
    with arithmetic(precision):
        return captured(model, batch, first_only=first_only)


def _padded(setup: RerankSetup, precision: str, tokens: Tokens) -> Callable[[], torch.Tensor]:
    scorer = HuggingFaceScorer(setup.path, setup.kind, precision, setup.device, setup.max_length, setup.batch_size)
    ids, types, mask = torch.from_numpy(tokens.padded(np.arange(len(tokens.lengths)), 0)).to(setup.device)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if describe(setup.path).uses_token_types:
        inputs["token_type_ids"] = types
    return lambda: scorer.forward(inputs)
