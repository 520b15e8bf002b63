"""The closures that are timed do what their rows say: launch the named kernel, allocate nothing, wait for nothing."""

from __future__ import annotations

import pytest
import torch

from tilerank.bench import attention as bench
from tilerank.bench.peers import DTYPES
from tilerank.bench.timing import closure_faults
from tilerank.bench.workloads import Workload, make_inputs
from tilerank.kernels import library, registry

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
