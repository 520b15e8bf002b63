"""The rows that compute in fp32 from two fp16 terms a number, on the CPU: right whatever size the numbers have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kernels import abi
from kernels.host import programs

from tilerank.kernels.library import Library

ROWS = ("split_fp16",)
"""Those that the emulator runs."""

HEAD_DIM = 32
LENGTHS = (70, 5, 131)

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def host() -> Library:
    return Library(programs.build("plain") / "library" / "libtilerank.so")


def draw(seed: int, lengths: tuple[int, ...] = LENGTHS) -> Arrays:
    """q, k and v of packed sequences, one head."""
    values = np.random.default_rng(seed).standard_normal((3, sum(lengths), 1, HEAD_DIM))
    return tuple(values.astype(np.float32))


def run(
    host: Library, row: str, arrays: Arrays, lengths: tuple[int, ...] = LENGTHS, causal: bool = False
) -> np.ndarray:
    out = np.full_like(arrays[0], np.nan)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    host.attention_varlen(row, abi.packed_params(*arrays, out, offsets, offsets, causal=causal))
    return out


def assert_right(out: np.ndarray, arrays: Arrays, lengths: tuple[int, ...] = LENGTHS, causal: bool = False) -> None:
    """Every element within what fp32 sums would give: 3e-7 of the weighted |v| for every unit of the scores that count.

    A score that counts belongs to a weight that is not nothing; a key far below the maximum forgives no error.
    """
    first = 0
    for length in lengths:
        rows = slice(first, first + length)
        first += length
        q, k, v = (array[rows, 0].astype(np.float64) for array in arrays)
        scores = q @ k.T / np.sqrt(HEAD_DIM)
        if causal:
            hidden = np.triu(np.ones((length, length), bool), 1)
            scores[hidden] = -np.inf
            v = np.where(np.isfinite(v), v, 0)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        counting = np.abs(np.where(weights > 1e-12, scores, 0)).max(1, keepdims=True)
        # What a score is summed from may be much larger than the score.
        size = np.where(weights > 1e-12, np.abs(q) @ np.abs(np.where(np.isfinite(k), k, 0)).T, 0).max(1, keepdims=True)
        limit = 3e-7 * (4 + counting + size) * (weights @ np.abs(v)) + 1e-44
        error = np.abs(out[rows, 0] - weights @ v)
        assert (error <= limit).all(), (error / limit).max()


def scaled(*factors: float) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        for array, factor in zip(arrays, factors, strict=True):
            array *= np.float32(factor)

    return change


def one_element(which: int, value: float, token: int = 90) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[which][token, 0, 3] = value

    return change


def tokens_apart(which: int) -> Callable[[Arrays], None]:
    """Neighbouring tokens from 1e-6 to 1e6."""

    def change(arrays: Arrays) -> None:
        sizes = 10.0 ** np.random.default_rng(5).uniform(-6, 6, len(arrays[which]))
        arrays[which][:] *= sizes[:, None, None].astype(np.float32)

    return change


def column_apart(arrays: Arrays) -> None:
    """A column that is huge in k and tiny in q."""
    arrays[0][:, 0, 7] *= np.float32(1e-9)
    arrays[1][:, 0, 7] *= np.float32(1e9)


def large_values_of_small_weight(arrays: Arrays) -> None:
    scaled(8, 8, 8)(arrays)
    arrays[2][100] *= np.float32(1e8)


SIZES = {
    "N(0,1)": scaled(1, 1, 1),
    "x8": scaled(8, 8, 8),
    "x1e-3": scaled(1e-3, 1e-3, 1e-3),
    "beyond fp16": scaled(1e6, 1e-6, 1e9),
    "below fp16": scaled(1e-12, 1e12, 1e-20),
    "nearly the largest": scaled(1e-34, 1e34, 1e36),
    "nearly the smallest": scaled(1, 1, 1e-36),
    "scores beyond fp32": scaled(1e30, 1e30, 1),
    "zeros": scaled(0, 0, 0),
    "zero keys": scaled(1, 0, 1),
    "one large k": one_element(1, 1e10),
    "one large v": one_element(2, 1e10),
    "one large q": one_element(0, 1e10),
    "large later tile": one_element(2, 1e4, token=200),
    "k apart": tokens_apart(1),
    "v apart": tokens_apart(2),
    "q apart": tokens_apart(0),
    "column apart": column_apart,
    "large values of small weight": large_values_of_small_weight,
}


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
