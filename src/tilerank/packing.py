"""Packed batches: which sequences go together, and how they lie in memory."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch

from tilerank.tokenization import Tokens


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences back to back, as one row of int32: ids, type ids and positions ``[tokens]``, bounds
    ``[sequences + 1]``, the index of each first token ``[sequences]``.

    A batch may be filled up: tokens after the last sequence belong to none, sequences after it are empty.
    """

    values: torch.Tensor
    tokens: int
    sequences: int
    used_tokens: int
    used_sequences: int
    longest: int  # tokens of the longest sequence

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Views of ``values``: ids, type ids, positions, bounds, first tokens."""
        sizes = [self.tokens] * 3 + [self.sequences + 1, self.sequences]
        return self.values[: sum(sizes)].split(sizes)


def size_of(tokens: int, sequences: int) -> int:
    """Values of a batch of this shape."""
    return 3 * tokens + 2 * sequences + 1


def plan(lengths: np.ndarray, budget: int, most_sequences: int | None = None) -> list[np.ndarray]:
    """Group sequences of ``lengths`` into as few batches as hold ``budget`` tokens each, of nearly equal size.

    The longest sequence goes to the emptiest batch, so that no batch has more than ``budget`` and one sequence.
    ``most_sequences`` bounds a batch too. Returns indices into ``lengths``, each in exactly one batch.
    """
    if not len(lengths):
        return []
    count = max(-(-int(lengths.sum()) // budget), -(-len(lengths) // (most_sequences or len(lengths))))
    if count == 1:
        return [np.arange(len(lengths))]
    batches: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, number) for number in range(count)]
    for index in np.argsort(-lengths, kind="stable"):
        tokens, number = heapq.heappop(emptiest)
        batches[number].append(int(index))
        if len(batches[number]) != most_sequences:
            heapq.heappush(emptiest, (tokens + int(lengths[index]), number))
    return [np.array(batch, dtype=np.int64) for batch in batches if batch]


def fill(
    values: np.ndarray,
    tokens: Tokens,
    rows: np.ndarray,
    shape: tuple[int, int],
    *,
    with_types: bool,
    positions_from: int,
) -> None:
    """Write the sequences ``rows`` of ``tokens`` into ``values``, as `PackedBatch` of ``shape`` (tokens, sequences).

    positions_from: the number of a first token's position. Where it is not 0 the number before it is padding's, of
    tokens and of positions alike, and padding written out in a text is not counted, as in transformers'
    ``create_position_ids_from_input_ids`` (modeling_roberta.py). A shape with empty sequences needs a token that
    belongs to none: it stands for their first.
    """
    total, sequences = shape
    number = len(rows)
    is_all = number == len(tokens.lengths) and bool((rows[1:] > rows[:-1]).all())  # they lie there as they will here
    lengths = tokens.lengths if is_all else tokens.lengths[rows]
    used = int(lengths.sum())
    if total < used + (sequences > number):
        raise ValueError(f"{used} tokens in {number} sequences do not fit {total} tokens in {sequences}")
    ends, first = values[3 * total : -sequences], values[-sequences:]
    ends[0], ends[number + 1 :] = 0, used
    np.cumsum(lengths, out=ends[1 : number + 1])
    first[:number], first[number:] = ends[:number], total - 1
    positions = np.arange(positions_from, positions_from + used, dtype=np.int32)
    positions -= first[:number].repeat(lengths)
    source: slice | np.ndarray = slice(None)
    if not is_all:
        source = positions + ((np.cumsum(tokens.lengths) - tokens.lengths)[rows] - positions_from).repeat(lengths)
    ids, types, places = every = values[: 3 * total].reshape(3, total)
    ids[:used] = tokens.ids[source]
    types[:used] = tokens.type_ids[source] if with_types else 0
    places[:used] = positions
    if positions_from and (is_padding := ids[:used] == positions_from - 1).any():
        passed = np.cumsum(is_padding)
        passed -= (passed - is_padding)[first[:number]].repeat(lengths)
        places[:used] = np.where(is_padding, positions_from - 1, positions - passed)
    every[:, used:] = 0
