"""How many tokens the model's input rows have, and how much of a padded batch is padding. Imports no torch.

A batch padded to ``max_length`` has one row a passage. Attention over it computes ``rows * max_length ** 2`` scores a
head, of which the sum of the squared lengths is wanted: their ratio is what masking and packing can save.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilerank.errors import TilerankError
from tilerank.models import Kind, ResolvedModel, describe
from tilerank.types import Dataset, Pool

_BIN_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PoolLengths:
    """Token counts of every query's rows, as the model gets them: special tokens counted, cut at ``max_length``."""

    kind: Kind  # cross-encoder: a row is query and passage; bi-encoder: a row is the passage
    max_length: int
    lengths: Mapping[str, tuple[int, ...]]  # query id -> tokens of each candidate's row, best first
    cut_passages: int  # rows whose passage was cut to fit
    cut_queries: int  # cross-encoder: queries that leave no token for a passage, so that they are cut too


def pair_length(query_tokens: int, passage_tokens: int, max_length: int, special_tokens: int = 3) -> int:
    """Tokens of a (query, passage) row of at most ``max_length``, given the token counts of both texts.

    The ``special_tokens`` ([CLS] and two [SEP]) are always kept. What does not fit is cut from the passage; a query
    that leaves no room for it is cut too. Raises ValueError for a ``max_length`` that the special tokens fill.
    """
    if query_tokens < 0 or passage_tokens < 0:
        raise ValueError(f"token counts must be at least 0, got {query_tokens} and {passage_tokens}")
    if max_length <= special_tokens:
        raise ValueError(f"max_length must be above the {special_tokens} special tokens, got {max_length}")
    return min(query_tokens + passage_tokens + special_tokens, max_length)


def pool_lengths(dataset: Dataset, pools: Sequence[Pool], model: ResolvedModel, max_length: int) -> PoolLengths:
    """Count the tokens of every row of ``pools`` by the tokenizer.json of ``model``; each text is tokenised once.

    Rows are cut at ``max_length``, or at a smaller limit that the model's own configuration sets. Raises
    `TilerankError` when the tokenizer cannot be read, ``max_length`` is above the model's position table, or it
    leaves no room for a text.
    """
    limit = describe(model.path).position_limit
    if limit is not None and max_length > limit:
        raise TilerankError(
            f"workload.max_length is {max_length}, but the position table of {model.name} serves at most {limit} "
            "tokens; lower it"
        )
    max_length = min([max_length, *_own_limits(model.path)])
    tokenizer = _read_tokenizer(model.path / "tokenizer.json")
    pairs = model.kind == "cross-encoder"
    special_tokens = tokenizer.num_special_tokens_to_add(pairs)
    if max_length <= special_tokens:
        raise TilerankError(
            f"workload.max_length must be above the {special_tokens} special tokens of {model.name}, found {max_length}"
        )
    wanted = {doc_id for pool in pools for doc_id in pool.doc_ids}
    passages = [document for document in dataset.documents if document.doc_id in wanted]
    passage_tokens = _count(tokenizer, [(passage.doc_id, passage.contents) for passage in passages])
    if pairs:
        query_tokens = _count(tokenizer, [(query.query_id, query.text) for query in dataset.queries])
    else:
        query_tokens = {query.query_id: 0 for query in dataset.queries}
    rows = {
        pool.query_id: [(query_tokens[pool.query_id], passage_tokens[doc_id]) for doc_id in pool.doc_ids]
        for pool in pools
    }
    room = max_length - special_tokens
    return PoolLengths(
        kind=model.kind,
        max_length=max_length,
        lengths={
            query_id: tuple(pair_length(query, passage, max_length, special_tokens) for query, passage in counts)
            for query_id, counts in rows.items()
        },
        cut_passages=sum(query + passage > room for counts in rows.values() for query, passage in counts),
        cut_queries=sum(count >= room for count in query_tokens.values()),
    )


def workload_record(lengths: PoolLengths) -> dict[str, float]:
    """The figures of ``workload.<name>`` for a batch padded to ``max_length``; empty when there is no row.

    sequences, tokens, padded_rows: rows, their tokens, and the rows shorter than ``max_length``, means over all
    queries; mean_tokens: tokens a row; square_ratio: sum of squared lengths / (rows * max_length squared).
    """
    counts = [count for row in lengths.lengths.values() for count in row]
    if not counts:
        return {}
    queries = len(lengths.lengths)
    full_square = len(counts) * lengths.max_length**2
    figures = {
        "sequences": len(counts) / queries,
        "tokens": sum(counts) / queries,
        "mean_tokens": sum(counts) / len(counts),
        "padded_rows": sum(count < lengths.max_length for count in counts) / queries,
        "square_ratio": sum(count * count for count in counts) / full_square,
    }
    return {name: round(figure, 6) for name, figure in figures.items()}


def histogram(counts: Iterable[int], max_length: int) -> tuple[list[int], list[int]]:
    """Bin token counts: ``edges`` 0, 16, ... max_length and rows a bin; a bin holds (edge, next edge]."""
    edges = [*range(0, max_length, _BIN_TOKENS), max_length]
    rows = [0] * (len(edges) - 1)
    for count in counts:
        rows[max(count - 1, 0) // _BIN_TOKENS] += 1
    return edges, rows


def write_lengths(path: Path, lengths: PoolLengths) -> None:
    """Write JSON: kind, max_length, cut_passages, cut_queries, histogram {edges, rows} and queries {id: [tokens]}."""
    counts = [count for row in lengths.lengths.values() for count in row]
    edges, rows = histogram(counts, lengths.max_length)
    record = {
        "kind": lengths.kind,
        "max_length": lengths.max_length,
        "cut_passages": lengths.cut_passages,
        "cut_queries": lengths.cut_queries,
        "histogram": {"edges": edges, "rows": rows},
        "queries": {query_id: list(row) for query_id, row in lengths.lengths.items()},
    }
    path.write_text(json.dumps(record) + "\n", encoding="ascii", newline="\n")


def read_lengths(path: Path) -> PoolLengths:
    """Read what `write_lengths` wrote; `TilerankError` when the file is missing or damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return PoolLengths(
            kind=record["kind"],
            max_length=record["max_length"],
            lengths={query_id: tuple(row) for query_id, row in record["queries"].items()},
            cut_passages=record["cut_passages"],
            cut_queries=record["cut_queries"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or "not a record of token lengths"
        raise TilerankError(f"{path}: {reason}; run `dvc repro retrieve` to make it") from error


def _own_limits(model: Path) -> list[int]:
    """Token limits that the model folder itself sets, for sentence-transformers and for its tokenizer."""
    limits = [describe(model).own_max_length]
    configuration = model / "tokenizer_config.json"
    if configuration.is_file():
        try:
            limits.append(json.loads(configuration.read_text(encoding="utf-8")).get("model_max_length"))
        except (OSError, ValueError) as error:
            raise TilerankError(f"{configuration} cannot be read ({error}); fetch the model again") from error
    return [int(limit) for limit in limits if limit is not None]


def _read_tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    if not path.is_file():
        raise TilerankError(f"{path} is missing; save the model with its fast tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise TilerankError(f"{path} cannot be read ({error}); fetch the model again") from error
    # Files carry the truncation and padding of whoever saved them; lengths here are those of the whole texts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _count(tokenizer: Any, texts: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Tokens of each (id, text), without special tokens."""
    from tqdm import tqdm

    counts = {}
    with tqdm(total=len(texts), desc="token lengths", unit=" texts", leave=False, disable=None) as progress:
        for start in range(0, len(texts), 1024):
            batch = texts[start : start + 1024]
            encodings = tokenizer.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
            counts.update((text_id, len(encoding.ids)) for (text_id, _), encoding in zip(batch, encodings, strict=True))
            progress.update(len(batch))
    return counts
