"""The closures that are timed do what their rows say: launch the named kernel, allocate nothing, wait for nothing."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import write_tiny_bert

from tilerank import packing
from tilerank.bench import attention as bench
from tilerank.bench.forward import seed_tokens
from tilerank.bench.packed_library import CapturedLibrary
from tilerank.bench.peers import DTYPES
from tilerank.bench.timing import closure_faults
from tilerank.bench.workloads import Workload, make_inputs
from tilerank.kernels import library, registry
from tilerank.reranker import load_model

pytestmark = pytest.mark.gpu

CALLS = [
    pytest.param(row, layout, id=f"{row.name}-{layout}")
    for row in registry.attention_rows()
    if row.device == "cuda"
    for layout in row.layouts
]


def prepared(row, layout):
    workload = Workload("small", (64, 33, 1), 64, heads=2, head_dim=32 if row.head_dims is None else row.head_dims[0])
    inputs = make_inputs(workload, DTYPES[row.dtypes[0]], "cuda")
    masked = layout == "packed" or "key_lengths" in row.masks
    return bench.kernel_call(library.load(), row, inputs, layout, masked=masked)


@pytest.mark.parametrize(("row", "layout"), CALLS)
def test_the_timed_closure_has_no_faults(row, layout):
    call = prepared(row, layout)
    assert closure_faults(call.run, bench.kernel_pattern(row)) == ()
    call.poison()
    assert call.run().isfinite().all()


@pytest.mark.parametrize(("row", "layout"), CALLS[:1])
def test_faults_are_seen(row, layout):
    """Planted: another kernel's name, an allocation, a wait."""
    call = prepared(row, layout)
    assert any("expected names" in fault for fault in closure_faults(call.run, "tilerank::another::"))

    def allocating():
        torch.empty(1000, device="cuda")
        return call.run()

    def waiting():
        call.run()
        torch.cuda.synchronize()

    assert any("allocates" in fault for fault in closure_faults(allocating, bench.kernel_pattern(row)))
    assert any("waits" in fault for fault in closure_faults(waiting, bench.kernel_pattern(row)))


@pytest.mark.parametrize("first_only", [False, True])
def test_the_captured_library_keeps_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_only: bool
) -> None:
    """Its first tokens, bounds and joined weights are nobody else's: freed, they would be overwritten here."""
    monkeypatch.setattr(torch, "compile", lambda module: module)
    model = load_model(write_tiny_bert(tmp_path / "m"), "cross-encoder", torch.float32, "sdpa").cuda()
    tokens = seed_tokens(model.config.vocab_size, [9, 30, 4, 17])
    shape = (60, 4)
    values = torch.empty(packing.size_of(*shape), dtype=torch.int32)
    packing.fill(values.numpy(), tokens, np.arange(4), shape, with_types=True, positions_from=0)
    batch = packing.PackedBatch(values.cuda(), *shape, *shape, 30)
    captured = CapturedLibrary(model, batch, first_only=first_only)
    expected = captured.run(batch).clone()
    gc.collect()
    held = [
        torch.full((count,), 7, dtype=torch.int64, device="cuda") for count in (4, 60, 600, 6000) for _ in range(99)
    ]
    assert torch.equal(captured.run(batch), expected)
    assert len(held) == 396
