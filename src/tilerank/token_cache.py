"""Token ids of a corpus in one memory-mapped file, so that a known passage is never tokenised again. Imports no torch.

The file belongs to one tokenizer, by digest, and finds a passage by the digest of its text: a passage that has changed
is simply not found. It is written whole and renamed into place: several processes may read while one writes, a writer
that is killed leaves the old file, and the same corpus and tokenizer give the same bytes.

Layout, little-endian: a header (`_HEADER`), the crc32 of it and of the index, uint32; the index, for each text, by
rising digest, the digest's first and second half and where its ids end, ``[texts]`` uint64 each, and the crc32 of its
ids, ``[texts]`` uint32; then all ids, int32, without special tokens and uncut.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilerank.data.atomic import check_place, whole_file
from tilerank.errors import TilerankError

_HEADER = struct.Struct("<8s32sQQI")  # magic, tokenizer's sha256, texts, ids, the largest id
_START = _HEADER.size + 4  # where the index begins
_MAGIC = b"TRTOKEN2"
_FORMATS = _MAGIC[:-1]  # what every format begins with
_INDEX_BYTES = 28  # for each text
_BATCH = 1024
_REMEMBERED = 1 << 24
"""Characters of the texts that a cache remembers, of some 10,000 passages."""

Encode = Callable[[Sequence[str]], list[np.ndarray]]


@dataclass(frozen=True, slots=True)
class IndexReport:
    """What `write_tokens` did."""

    passages: int  # distinct texts in the file
    tokens: int
    tokenised: int  # texts that were not in the file before
    bytes: int


class TokenCache:
    """The file ``path``, read in place. ``tokenizer`` is the digest of the tokenizer that it belongs to.

    Texts that were found are remembered, `_REMEMBERED` characters of them: the next time the text itself finds its ids,
    which takes a twentieth of a digest's time where the caller hands in the same string. Safe for several threads.

    Raises `TilerankError` for a file that is missing, of another kind or format, or not whole. The ids, most of the
    file, are not read before they are looked up: damage to them is refused when their passage is first looked up.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            # A plain view of it: slicing a memmap itself takes ten times as long.
            data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r")) if size else np.zeros(0, np.uint8)
        except OSError as error:
            raise TilerankError(f"{path}: {error.strerror or error}; write it with `tilerank index`") from error
        header = data[: _HEADER.size].tobytes()
        if len(data) < _START or not header.startswith(_FORMATS):
            raise TilerankError(f"{path} is no token cache; write one with `tilerank index`")
        magic, tokenizer, texts, ids, self.largest_id = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise TilerankError(
                f"{path} has the format {magic.decode('ascii', 'replace')}, and this version reads {_MAGIC.decode()}; "
                "write it again with `tilerank index`"
            )
        end = _START + _INDEX_BYTES * texts
        index, checksum = data[_START:end], data[_HEADER.size : _START].tobytes()
        if len(data) != end + 4 * ids or checksum != _checksum(header, index):
            raise TilerankError(f"{path} is damaged; write it again with `tilerank index`")
        self.tokenizer = tokenizer.hex()
        self._high, self._low, self._ends = index[: 24 * texts].view("<u8").reshape(3, texts)
        self._checksums = index[24 * texts :].view("<u4")
        self._ids = data[end:].view("<i4")
        self._remembered: dict[str, np.ndarray] = {}
        self._characters = 0  # of these texts, or some more where threads added to it at once

    def __len__(self) -> int:
        """Texts in the file."""
        return len(self._high)

    def find(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        """Token ids of each text, int32, or None for one that the file does not have; `TilerankError` for damage."""
        known = self._remembered
        found = [known.get(text) for text in texts]
        new = [row for row, ids in enumerate(found) if ids is None]
        if new:
            for row, ids in zip(new, self._look_up([texts[row] for row in new]), strict=True):
                found[row] = ids
                if ids is not None:
                    self._remember(texts[row], ids)
        return found

    def _remember(self, text: str, ids: np.ndarray) -> None:
        if self._characters > _REMEMBERED:
            self._remembered, self._characters = {}, 0
        self._remembered[text] = ids
        self._characters += len(text)

    def _look_up(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        keys = _digests(texts)
        places = np.searchsorted(self._high, keys[:, 0])
        return [self._at(int(place), high, low) for place, (high, low) in zip(places, keys, strict=True)]

    def _at(self, place: int, high: np.uint64, low: np.uint64) -> np.ndarray | None:
        while place < len(self._high) and self._high[place] == high:
            if self._low[place] == low:
                start = int(self._ends[place - 1]) if place else 0
                ids = self._ids[start : int(self._ends[place])]
                if zlib.crc32(ids) != self._checksums[place]:
                    raise TilerankError(
                        f"{self.path} is damaged: a passage's ids are not those that were written; write it again with "
                        "`tilerank index`"
                    )
                return ids
            place += 1
        return None


def write_tokens(path: Path, tokenizer: str, encode: Encode, texts: Sequence[str]) -> IndexReport:
    """Write the ids of ``texts`` to ``path``, and of no others; those that it has already are not tokenised again.

    tokenizer: digest of what ``encode`` is. Raises `TilerankError` where ``path`` cannot be written, and where it is
    something else than a token cache, whole or damaged: a file of the user's, a link, a device.
    """
    from tqdm import tqdm

    _check_replaceable(path)
    distinct = list(dict.fromkeys(texts))
    known = _known(path, tokenizer, distinct)
    missing = [text for text, ids in zip(distinct, known, strict=True) if ids is None]
    encoded: list[np.ndarray] = []
    with tqdm(total=len(missing), desc="token cache", unit="passage", disable=None) as bar:
        for start in range(0, len(missing), _BATCH):
            encoded += encode(missing[start : start + _BATCH])
            bar.update(len(encoded) - bar.n)
    new = iter(encoded)
    rows = [np.asarray(next(new) if ids is None else ids, dtype="<i4") for ids in known]
    keys = _digests(distinct)
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    ends = np.cumsum([len(rows[row]) for row in order], dtype=np.uint64)
    checksums = np.array([zlib.crc32(rows[row]) for row in order], dtype="<u4")
    index = np.concatenate([keys[order, 0], keys[order, 1], ends]).astype("<u8").tobytes() + checksums.tobytes()
    tokens = int(ends[-1]) if len(ends) else 0
    largest = max((int(ids.max(initial=0)) for ids in rows), default=0)
    header = _HEADER.pack(_MAGIC, bytes.fromhex(tokenizer), len(distinct), tokens, largest)
    with whole_file(path) as stream:
        stream.write(header + _checksum(header, index) + index)
        for row in order:
            stream.write(rows[row])
        size = stream.tell()
    return IndexReport(len(distinct), tokens, len(missing), size)


def _checksum(header: bytes, index: Any) -> bytes:
    return zlib.crc32(index, zlib.crc32(header)).to_bytes(4, "little")


def _check_replaceable(path: Path) -> None:
    check_place(path)
    try:
        with path.open("rb") as stream:
            start = stream.read(len(_FORMATS))
    except FileNotFoundError:
        return
    except OSError as error:
        raise TilerankError(f"{path}: {error.strerror or error}; name another, or mend its permissions") from error
    if start and start != _FORMATS:
        raise TilerankError(f"{path} is no token cache, and is not replaced by one; name another, or delete it first")


def _known(path: Path, tokenizer: str, texts: Sequence[str]) -> list[np.ndarray | None]:
    """What `TokenCache.find` has, and nothing where the file is absent, damaged or another tokenizer's."""
    with contextlib.suppress(TilerankError):
        old = TokenCache(path)
        if old.tokenizer == tokenizer:
            return old.find(texts)
    return [None] * len(texts)


def _digests(texts: Sequence[str]) -> np.ndarray:
    """``[n, 2]`` uint64: both halves of each text's digest."""
    digests = b"".join(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest() for text in texts
    )
    return np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
