"""The peer of the fused encoder computes the same scores: what a library's parts give for packed tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny_bert

from tilerank.bench import forward, packed_library
from tilerank.bench.rerank import RerankSetup
from tilerank.packed_attention import _by_sequence
from tilerank.reranker import load_model


@pytest.mark.parametrize("first_only", [False, True])
@torch.inference_mode()
def test_the_library_scores_as_the_padded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_only: bool
) -> None:
    """With attention that a CPU has; torch's variable-length kernels need a GPU."""
    monkeypatch.setattr(packed_library, "_attention", lambda *call: _by_sequence(*call, call[0].shape[-1] ** -0.5))
    model = load_model(write_tiny_bert(tmp_path / "m"), "cross-encoder", torch.float32, "sdpa")
    lengths = [7, 20, 3]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    ids = torch.randint(5, 60, (30,), generator=torch.Generator().manual_seed(0)).int()
    types = (torch.arange(30) % 2).int()
    places = torch.cat([torch.arange(length) for length in lengths]).int()
    library = packed_library.PackedLibrary(model, first_only=first_only).eval()
    found = library(ids, types, places, bounds, torch.arange(4).int(), bounds[:-1].long(), 20)
    for row, (start, end) in enumerate(itertools.pairwise(bounds)):
        alone = model(input_ids=ids[None, start:end].long(), token_type_ids=types[None, start:end].long())
        torch.testing.assert_close(found[row], alone.logits[0, 0], atol=1e-4, rtol=0)


def test_the_benchmark_judges_and_times_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that `bench_forward` does with the library on a GPU, but for the compiler and the graph: made once within the
    arithmetic of a precision, run outside of it on several lists of ids, timed on the first."""
    calls = []

    def attention(*call):
        calls.append(len(call[0]))
        return _by_sequence(*call, call[0].shape[-1] ** -0.5)

    monkeypatch.setattr(packed_library, "_attention", attention)
    monkeypatch.setattr(forward, "_can_compile", lambda setup: True)
    monkeypatch.setattr(forward, "SEED_LENGTHS", (40, 3, 17, 60))
    folder = write_tiny_bert(tmp_path / "m")
    setup = RerankSetup(folder, "cross-encoder", "cpu", 64, "auto", 4)
    for precision in ("fp32", "fp16"):
        calls.clear()
        record = forward.bench_forward(setup, precision, warmup=0, rounds=2)
        assert "failures" not in record, record
        systems = {"tilerank", "packed_library", "transformers_sdpa"}
        systems |= {"packed_library_first_tokens"} if precision == "fp16" else set()
        assert set(record["max_abs_error"]) == systems
        for name in systems - {"tilerank"}:
            assert record[f"speedup_vs_{name}"] == pytest.approx(record[f"{name}_ms"] / record["ms"])
        assert record["packed_library_compiled"] is False
        assert "parts" not in record
        assert (4 in calls) == (precision == "fp16"), "four first tokens in the last layer, where that is the short cut"
