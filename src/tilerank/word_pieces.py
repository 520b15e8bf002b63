"""Token ids by the kernel library's WordPiece: plain words there, the rest by `FastEncoder`. Imports no torch.

The library looks up words of printable ASCII. A chunk (what lies between two blanks) with any other character, or with
a special token, is foreign to it: all those of a call are encoded together by ``tokie``, or by ``tokenizers`` where
``tokie`` is not known to agree. That is exact because blanks end whatever normalisation and words can reach.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tilerank.fast_tokens import FastEncoder, rows_of

if TYPE_CHECKING:
    from tilerank.kernels.library import Library

_END = b"\xff"  # of a text; no byte of UTF-8


class WordEncoder:
    """The library's WordPiece over the vocabulary of ``others``. Raises ValueError for one that it does not serve.

    Never changed after that, so that several threads may encode.
    """

    def __init__(self, others: FastEncoder, library: Library) -> None:
        settings = others.settings
        if others.separator is None:
            raise ValueError("no special token keeps texts apart")
        special = [token["content"] for token in settings.get("added_tokens") or ()]
        if any(not token or token.split() != [token] for token in special):
            raise ValueError("a special token has blanks in it")
        model = settings["model"]
        self._others = others
        self._separator, self._separator_id = others.separator
        self._words = library.wordpiece(
            sorted(model["vocab"], key=model["vocab"].get),
            special,
            unknown=model["vocab"][model["unk_token"]],
            lowercase=bool(settings["normalizer"].get("lowercase")),
            most_letters=model["max_input_chars_per_word"],
        )
        weakref.finalize(self, self._words.destroy)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, int32, without special tokens."""
        if not texts:
            return []
        try:
            joined = _END.join(map(str.encode, texts))
        except UnicodeEncodeError:  # half of a surrogate pair
            return self._others.encode(texts)
        chunks, count = self._words.foreign(joined, self._separator)
        foreign = self._ids_of(chunks, count)
        if foreign is None:
            return self._others.encode(texts)
        ids, ends = self._words.encode(joined, len(texts), foreign, self._separator_id)
        return rows_of(ids, ends.tolist())

    def _ids_of(self, chunks: bytes, count: int) -> np.ndarray | None:
        """Ids of joined chunks, the separator's between them; None where a chunk has the separator itself."""
        if count == 0:
            return np.zeros(0, dtype=np.int32)
        ids = self._others.encode([chunks.decode()])[0]
        return ids if np.count_nonzero(ids == self._separator_id) == count - 1 else None


def make(others: FastEncoder) -> WordEncoder | str:
    """A `WordEncoder`, or why there is none."""
    from tilerank.errors import TilerankError
    from tilerank.kernels import library

    try:
        return WordEncoder(others, library.load())
    except (TilerankError, ValueError, KeyError) as error:
        return str(error)
