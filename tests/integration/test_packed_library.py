"""The peer of the fused encoder computes the same scores: what a library's parts give for packed tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny_bert

from tilerank.bench import packed_library
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
