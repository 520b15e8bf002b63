"""Inputs whose numbers differ in size as few models' do, for the rows that multiply fp16 terms, and what is right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

HEAD_DIM = 32
LENGTHS = (70, 5, 131)

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def draw(seed: int, lengths: tuple[int, ...] = LENGTHS) -> Arrays:
    """q, k and v of packed sequences, one head."""
    values = np.random.default_rng(seed).standard_normal((3, sum(lengths), 1, HEAD_DIM))
    return tuple(values.astype(np.float32))


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


def chunk_apart(which: int) -> Callable[[Arrays], None]:
    """The second 64 tokens of a sequence far above the first."""

    def change(arrays: Arrays) -> None:
        first = sum(LENGTHS[:2]) + 64
        arrays[which][first : first + 64] *= np.float32(1e6)

    return change


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
    "later keys apart": chunk_apart(1),
    "later values apart": chunk_apart(2),
    "column apart": column_apart,
    "large values of small weight": large_values_of_small_weight,
}
