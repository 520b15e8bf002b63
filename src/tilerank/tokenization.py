"""Texts to token ids for a reranker: cut on the passage side, no padding until a batch is formed.

Imports no torch (`load_tokenizer` alone does, through transformers).

The rule. A pair has at most ``max_length`` tokens, separators included, and it is the passage that is cut, as
transformers does with ``truncation="only_second"``. Where the query leaves no room for a single passage token, the
longer of the two is cut first (``longest_first``, which sentence-transformers applies to every pair) and a warning
gives the query's length. Both rules give the same tokens as long as the query has at most half of the room.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tilerank.errors import TilerankError
from tilerank.fast_tokens import FastEncoder, encode_with_tokenizers
from tilerank.models import describe
from tilerank.token_cache import TokenCache

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_TAIL = 32  # tokens at the end of a sequence, most often enough to tell it from others
_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")


Begin: TypeAlias = Callable[[Sequence[str]], Callable[[], list[np.ndarray]]]
"""Texts -> a function that gives their ids, maybe begun by other threads."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """``n`` token sequences back to back, without padding."""

    ids: np.ndarray  # [sum of lengths] int32
    type_ids: np.ndarray  # [sum of lengths] int32; BERT: 0 for the query and its separators, 1 for the passage
    lengths: np.ndarray  # [n] int64, special tokens included
    truncated: np.ndarray  # [n] bool: the passage (of a pair) or the text lost tokens

    def distinct(self, seen: dict[bytes, int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The first row of each distinct sequence, and for every sequence its place among these, ``[n]``.

        ``seen`` has the places of sequences of earlier calls, which are not distinct any more, and gets the new ones:
        places go on counting.
        """
        if seen is None:
            return self._distinct_alone()
        rows, inverse = [], []
        for row, key in enumerate(self._keys(range(len(self.lengths)))):
            number = len(seen)
            place = seen.setdefault(key, number)
            if place == number:
                rows.append(row)
            inverse.append(place)
        return np.array(rows, dtype=np.int64), np.array(inverse, dtype=np.int64)

    def _distinct_alone(self) -> tuple[np.ndarray, np.ndarray]:
        """`distinct` without earlier calls: only sequences of one length that end alike are compared as a whole."""
        everyone = np.arange(len(self.lengths))
        lengths, ends = self.lengths.tolist(), np.cumsum(self.lengths).tolist()

        def tail(row: int) -> bytes:
            return self.ids[ends[row] - min(lengths[row], _TAIL) : ends[row]].tobytes()

        alike = _alike(_alike(range(len(ends)), lengths.__getitem__), tail)
        found: dict[bytes, int] = {}
        earlier = [found.setdefault(key, row) for row, key in zip(alike, self._keys(alike), strict=True)]
        if earlier == alike:  # nearly always
            return everyone, everyone
        first = everyone.copy()  # the first row that is equal to this one
        first[alike] = earlier
        is_first = first == everyone
        return np.flatnonzero(is_first), (np.cumsum(is_first) - 1)[first]

    def _keys(self, rows: Sequence[int]) -> Iterator[bytes]:
        """What tells the sequences ``rows`` from others."""
        ends = np.cumsum(self.lengths).tolist() if rows else []
        for row in rows:
            span = slice(ends[row - 1] if row else 0, ends[row])
            yield self.ids[span].tobytes() + self.type_ids[span].tobytes()

    def padded(self, rows: np.ndarray, pad_id: int) -> np.ndarray:
        """The sequences ``rows``, at least one, as ``[3, len(rows), longest]`` int64: ids, type ids, mask."""
        lengths = self.lengths[rows]
        starts = (np.cumsum(self.lengths) - self.lengths)[rows]
        position = np.arange(lengths.max())
        valid = position < lengths[:, None]
        source = (starts[:, None] + position)[valid]
        batch = np.zeros((3, *valid.shape), dtype=np.int64)
        batch[0] = pad_id
        batch[0, valid] = self.ids[source]
        batch[1, valid] = self.type_ids[source]
        batch[2] = valid
        return batch


def _alike(rows: Iterable[int], tell: Callable[[int], Hashable]) -> list[int]:
    """Those of ``rows`` that share what ``tell`` says of them."""
    groups: dict[Hashable, list[int]] = {}
    for row in rows:
        groups.setdefault(tell(row), []).append(row)
    return [row for group in groups.values() if len(group) > 1 for row in group]


class TextTokenizer:
    """A `tokenizers.Tokenizer` with this project's truncation (see the module's docstring).

    ``backend`` belongs to this object from here on: its own truncation and padding are switched off, after which it is
    never changed again, so that several threads may encode. ``cut_from`` is the end at which texts are cut: "right"
    or "left". ``texts`` is how many texts the longest sequences hold: 2 where `pairs` is called, 1 for `texts` alone.
    ``fast`` takes ``tokie`` for vocabularies that it serves (see `tilerank.fast_tokens`): the same ids, sooner.
    Raises ValueError when ``max_length`` leaves no room for one token of each.

    ``engine`` is what encodes, "tokie" or "tokenizers", and ``engine_reason`` why.
    """

    def __init__(
        self,
        backend: Tokenizer,
        max_length: int,
        *,
        pad_id: int = 0,
        cut_from: str = "right",
        texts: int = 2,
        fast: bool = True,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.max_length = max_length
        self.pad_id = pad_id
        self._backend = backend
        self._cut_from = cut_from
        self._one = _Template.of(backend, 1)
        self._two = _Template.of(backend, 2)
        shortest = texts + (self._two if texts == 2 else self._one).specials
        if max_length < shortest:
            what = "a pair of one token each" if texts == 2 else "a text of one token"
            raise ValueError(f"max_length is {max_length}; {what} takes {shortest}")
        self.engine, self.engine_reason, self._begin = _engine(backend, fast)
        self._cache: TokenCache | None = None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, int32, uncut and without special tokens."""
        return self._begin(texts)()

    @property
    def digest(self) -> str:
        """Hexadecimal sha256 of what decides the ids of a text: the vocabulary and every setting of the backend."""
        return hashlib.sha256(self._backend.to_str().encode("utf-8")).hexdigest()

    def use_cache(self, cache: TokenCache) -> None:
        """Take ids from ``cache`` where it has them; `TilerankError` when it belongs to another tokenizer, or has an id
        that is none of its."""
        if cache.tokenizer != self.digest:
            raise TilerankError(
                f"{cache.path} holds ids of another tokenizer ({cache.tokenizer[:12]}, not {self.digest[:12]}); write "
                "it again with `tilerank index`"
            )
        largest = max(self._backend.get_vocab().values(), default=0)
        if cache.largest_id > largest:
            raise TilerankError(
                f"{cache.path} holds the id {cache.largest_id}, and the tokenizer's last is {largest}; delete it and "
                "write it again with `tilerank index`"
            )
        self._cache = cache

    def pairs(self, queries: Sequence[str], passages: Sequence[str]) -> Tokens:
        """Encode ``queries[i]`` with ``passages[i]``; warns about each query that had to be cut."""
        return self.start_pairs(queries, passages)()

    def start_pairs(self, queries: Sequence[str], passages: Sequence[str]) -> Callable[[], Tokens]:
        """`pairs`, begun by other threads; the function that is returned does the rest and waits for them."""
        encoded = self._start(queries, passages)
        return lambda: self._pairs(queries, passages, encoded())

    def _pairs(self, queries: Sequence[str], passages: Sequence[str], encoded: dict[str, np.ndarray]) -> Tokens:
        query_ids, passage_ids = [encoded[text] for text in queries], [encoded[text] for text in passages]
        query_counts, passage_counts = _counts(query_ids), _counts(passage_ids)
        room = self.max_length - self._two.specials
        query_kept, passage_kept = _share(query_counts, passage_counts, room)
        if query_kept is query_counts and passage_kept is passage_counts:
            return self._two.assemble([query_ids, passage_ids], [query_kept, passage_kept], passage_counts < 0)
        is_cut = query_kept < query_counts
        for query, count in {queries[row]: query_counts[row] for row in np.flatnonzero(is_cut)}.items():
            _warn_about_query(query, count, f"{room - 1}, which would leave one token for the passage")
        kept = [self._cut(query_ids, query_counts, query_kept), self._cut(passage_ids, passage_counts, passage_kept)]
        return self._two.assemble(kept, [query_kept, passage_kept], passage_kept < passage_counts)

    def texts(self, queries: Sequence[str], passages: Sequence[str]) -> Tokens:
        """Encode each text by itself, the queries first; warns about each query that had to be cut."""
        return self.start_texts(queries, passages)()

    def start_texts(self, queries: Sequence[str], passages: Sequence[str]) -> Callable[[], Tokens]:
        """`texts`, begun by other threads; the function that is returned does the rest and waits for them."""
        texts = [*queries, *passages]
        encoded = self._start(queries, passages)
        return lambda: self._texts(queries, texts, encoded())

    def _texts(self, queries: Sequence[str], texts: Sequence[str], encoded: dict[str, np.ndarray]) -> Tokens:
        ids = [encoded[text] for text in texts]
        counts = _counts(ids)
        room = self.max_length - self._one.specials
        kept = np.minimum(counts, room)
        for query, count in {q: n for q, n in zip(queries, counts, strict=False) if n > room}.items():
            _warn_about_query(query, count, str(room))
        return self._one.assemble([self._cut(ids, counts, kept)], [kept], kept < counts)

    def _start(self, queries: Sequence[str], passages: Sequence[str]) -> Callable[[], dict[str, np.ndarray]]:
        """Begin with the token ids of each distinct text, without special tokens; a cache has passages."""
        known: dict[str, np.ndarray] = {}
        missing = list(dict.fromkeys([*queries, *passages]))
        if self._cache is not None:
            distinct = list(dict.fromkeys(passages))
            found = zip(distinct, self._cache.find(distinct), strict=True)
            known = {text: ids for text, ids in found if ids is not None}
            missing = [text for text in missing if text not in known]
        encode = self._begin(missing)
        return lambda: {**known, **dict(zip(missing, encode(), strict=True))}

    def _cut(self, ids: list[np.ndarray], counts: np.ndarray, kept: np.ndarray) -> list[np.ndarray]:
        cut = list(ids)
        for row in np.flatnonzero(kept < counts):
            cut[row] = ids[row][counts[row] - kept[row] :] if self._cut_from == "left" else ids[row][: kept[row]]
        return cut


def _engine(backend: Tokenizer, fast: bool) -> tuple[str, str, Begin]:
    """Name, reason and function of what encodes."""
    reason = "asked for"
    if fast:
        try:
            return "tokie", "it serves this vocabulary", FastEncoder(backend).start
        except ImportError:
            reason = "tokie is not installed"
        except (ValueError, OSError) as error:
            reason = str(error)
    return "tokenizers", reason, lambda texts: partial(encode_with_tokenizers, backend, texts)


def load_tokenizer(path: Path, max_length: int, *, texts: int = 2, fast: bool = True) -> TextTokenizer:
    """The tokenizer of the model folder ``path``, as transformers (hence sentence-transformers) builds it.

    Sequences are cut at ``max_length`` or at the tokenizer's own ``model_max_length``, whichever is less. ``texts`` and
    ``fast`` are as in `TextTokenizer`. Raises `TilerankError` for a folder without a vocabulary, or with one that has
    fewer than half as many tokens as the model (transformers makes do with a handful of special tokens, in silence).
    """
    if not any(file.is_file() for pattern in _VOCABULARIES for file in path.glob(pattern)):
        raise TilerankError(f"{path}: no usable tokenizer (the folder has none of {', '.join(_VOCABULARIES)})")
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(path, local_files_only=True)
        backend = loaded.backend_tokenizer
    except Exception as error:  # transformers, tokenizers and the operating system each raise their own
        raise TilerankError(f"{path}: no usable tokenizer ({' '.join(str(error).split())[:200]})") from error
    tokens, expected = len(loaded), describe(path).vocabulary_size
    if expected is not None and tokens < expected / 2:
        raise TilerankError(f"{path}: no usable tokenizer (it has {tokens} tokens, the model {expected})")
    return TextTokenizer(
        backend,
        min(max_length, loaded.model_max_length),
        pad_id=loaded.pad_token_id or 0,
        cut_from=loaded.truncation_side,
        texts=texts,
        fast=fast,
    )


@dataclass(frozen=True, slots=True)
class _Template:
    """Special tokens around one text or two, learned from what the tokenizer's post-processor does to a sample."""

    gaps: tuple[np.ndarray, ...]  # ids before, between and after the texts
    runs: tuple[_Run, ...]  # of equal type ids

    @property
    def specials(self) -> int:
        return sum(len(gap) for gap in self.gaps)

    @staticmethod
    def of(backend: Tokenizer, texts: int) -> _Template:
        sample = backend.encode(*["a"] * texts)
        owner = sample.sequence_ids  # None for a special token
        ids, types = np.array(sample.ids, dtype=np.int32), np.array(sample.type_ids, dtype=np.int32)
        spans = [[i for i, text in enumerate(owner) if text == number] for number in range(texts)]
        if not all(span and span == list(range(span[0], span[-1] + 1)) for span in spans):
            raise TilerankError(f"the tokenizer does not put {texts} text(s) between special tokens: {sample.tokens}")
        edges = [0, *(edge for span in spans for edge in (span[0], span[-1] + 1)), len(owner)]
        gaps = [slice(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]
        pieces = [[(int(kind), 1, ()) for kind in types[gap]] for gap in gaps]
        for number, span in enumerate(spans):
            pieces[number].append((int(types[span[0]]), 0, (number,)))
        runs: list[_Run] = []
        for kind, specials, texts_in in itertools.chain(*pieces):
            if runs and runs[-1].kind == kind:
                specials, texts_in = runs[-1].specials + specials, runs[-1].texts + texts_in
                runs.pop()
            runs.append(_Run(kind, specials, texts_in))
        return _Template(tuple(ids[gap] for gap in gaps), tuple(runs))

    def assemble(self, texts: list[list[np.ndarray]], counts: list[np.ndarray], truncated: np.ndarray) -> Tokens:
        """``texts[k][i]`` is the k-th text of sequence i, already cut, and ``counts[k][i]`` its length."""
        number = len(truncated)
        width = len(self.gaps) + len(texts)
        parts = [self.gaps[0]] * (width * number + 1)  # one more, so that there is something to join
        parts[-1] = self.gaps[0][:0]
        for k, gap in enumerate(self.gaps):
            parts[2 * k : -1 : width] = [gap] * number
        for k, rows in enumerate(texts):
            parts[2 * k + 1 : -1 : width] = rows
        lengths = np.empty((number, len(self.runs)), dtype=np.int64)
        for k, run in enumerate(self.runs):
            lengths[:, k] = run.specials
            for text in run.texts:
                lengths[:, k] += counts[text]
        kinds = np.array([run.kind for run in self.runs] * number, dtype=np.int32)
        return Tokens(np.concatenate(parts), kinds.repeat(lengths.reshape(-1)), lengths.sum(1), truncated)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of tokens with one type id."""

    kind: int
    specials: int  # special tokens in it
    texts: tuple[int, ...]  # and which texts


def _counts(ids: list[np.ndarray]) -> np.ndarray:
    return np.fromiter(map(len, ids), np.int64, len(ids))


def _share(queries: np.ndarray, passages: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """How many of each pair's tokens are kept, special tokens aside: the rule in the module's docstring. The arrays
    themselves where all are."""
    longest = queries.max(initial=0)
    if longest < room:  # nearly always
        is_cut = longest + passages.max(initial=0) > room
        return queries, np.minimum(passages, room - queries) if is_cut else passages
    query_fits = queries < room
    fits = queries + passages <= room
    shorter = np.minimum(queries, passages)
    longer = np.maximum(shorter, room - shorter)
    halves = shorter + longer > room
    shorter, longer = np.where(halves, room // 2, shorter), np.where(halves, room - room // 2, longer)
    query_is_longer = queries > passages
    query_cut, passage_cut = np.where(query_is_longer, (longer, shorter), (shorter, longer))
    query_kept = np.where(fits | query_fits, queries, query_cut)
    passage_kept = np.where(fits, passages, np.where(query_fits, room - queries, passage_cut))
    return query_kept, passage_kept


def _warn_about_query(query: str, count: int, allowed: str) -> None:
    shown = query if len(query) <= 60 else f"{query[:57]}..."
    warnings.warn(f"query {shown!r} has {count} tokens, more than {allowed}: it was cut", stacklevel=2)
