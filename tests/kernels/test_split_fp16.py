"""The rows that compute in fp32 from two fp16 terms a number, on the CPU: right whatever size the numbers have."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import abi
from kernels.host import programs
from kernels.sizes import LENGTHS, SIZES, Arrays, assert_right, draw

from tilerank.kernels.library import Library

ROWS = ("split_fp16",)
"""Those that the emulator runs."""


@pytest.fixture(scope="module")
def host() -> Library:
    return Library(programs.build("plain") / "library" / "libtilerank.so")


def run(
    host: Library, row: str, arrays: Arrays, lengths: tuple[int, ...] = LENGTHS, causal: bool = False
) -> np.ndarray:
    out = np.full_like(arrays[0], np.nan)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    host.run(row, abi.packed_params(*arrays, out, offsets, offsets, causal=causal))
    return out


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("row", ROWS)
def test_numbers_of_any_size(host: Library, row: str, size: str) -> None:
    arrays = draw(1)
    SIZES[size](arrays)
    assert_right(run(host, row, arrays), arrays)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("row", ROWS)
def test_hidden_keys_do_not_leak(host: Library, row: str, value: float) -> None:
    arrays = draw(2, (40,))
    arrays[1][20:] = value
    arrays[2][20:] = value
    out = run(host, row, arrays, (40,), causal=True)
    seen = tuple(array[:20] for array in arrays)
    assert_right(out[:20], seen, (20,), causal=True)


@pytest.mark.parametrize("row", ROWS)
def test_what_a_row_sees_may_be_infinite(host: Library, row: str) -> None:
    arrays = draw(3, (40,))
    arrays[2][7, 0, 1] = np.inf
    arrays[2][8, 0, 2] = np.nan
    out = run(host, row, arrays, (40,))
    assert np.isposinf(out[:, 0, 1]).all()
    assert np.isnan(out[:, 0, 2]).all()
    assert np.isfinite(np.delete(out, [1, 2], axis=2)).all()


@pytest.mark.parametrize("row", ROWS)
def test_neighbours_change_no_bit(host: Library, row: str) -> None:
    arrays = draw(4)
    together = run(host, row, arrays)
    arrays[2][80] *= np.float32(1e9)  # a sequence that goes the slow way
    others = run(host, row, arrays)
    alone = run(host, row, tuple(array[: LENGTHS[0]] for array in arrays), LENGTHS[:1])
    assert (alone == together[: LENGTHS[0]]).all()
    assert (alone == others[: LENGTHS[0]]).all()
