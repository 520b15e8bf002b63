"""Random calls of every CUDA row on a device against float64 (see `tests/kernels/fuzz.py`)."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import fuzz
from tilerank.kernels import registry
from tilerank.kernels.torch_device import device_sm

pytestmark = pytest.mark.gpu

ROWS = [row for row in registry.attention_rows() if row.device == "cuda"]


@pytest.fixture(autouse=True)
def true_fp32():
    """SDPA in true fp32."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    yield
    matmul.fp32_precision = before


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_random_calls(row):
    sm = device_sm("cuda")
    cases = [case for case in fuzz.cases_of(row) if row.lowest_sm(case.dtype) <= sm <= (row.max_sm or sm)]
    if not cases:
        pytest.skip(f"{row.name} does not run on compute capability {sm / 10}")
    fuzz.check(cases)
