"""The rows that compute in fp32 from two fp16 terms a number, on a device: right whatever size the numbers have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilerank
from tests.kernels.sizes import LENGTHS, SIZES, Arrays, assert_right, draw
from tilerank.kernels import registry

pytestmark = pytest.mark.gpu

ROWS = [row.name for row in registry.attention_rows() if row.products == "fp16x3"]


def run(row: str, arrays: Arrays, lengths: tuple[int, ...] = LENGTHS, causal: bool = False) -> np.ndarray:
    offsets = torch.tensor(np.cumsum((0, *lengths)), dtype=torch.int32, device="cuda")
    q, k, v = (torch.from_numpy(array).cuda() for array in arrays)
    longest = max(lengths)
    out = tilerank.attention_varlen(q, k, v, offsets, offsets, longest, longest, causal=causal, variant=row)
    return out.cpu().numpy()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("row", ROWS)
def test_numbers_of_any_size(row: str, size: str) -> None:
    arrays = draw(1)
    SIZES[size](arrays)
    assert_right(run(row, arrays), arrays)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("row", ROWS)
def test_hidden_keys_do_not_leak(row: str, value: float) -> None:
    arrays = draw(2, (40,))
    arrays[1][20:] = value
    arrays[2][20:] = value
    out = run(row, arrays, (40,), causal=True)
    assert_right(out[:20], tuple(array[:20] for array in arrays), (20,), causal=True)


@pytest.mark.parametrize("row", ROWS)
def test_neighbours_change_no_bit(row: str) -> None:
    arrays = draw(4)
    together = run(row, arrays)
    arrays[2][80] *= np.float32(1e9)  # a sequence that goes the slow way
    others = run(row, arrays)
    alone = run(row, tuple(array[: LENGTHS[0]] for array in arrays), LENGTHS[:1])
    assert (alone == together[: LENGTHS[0]]).all()
    assert (alone == others[: LENGTHS[0]]).all()
