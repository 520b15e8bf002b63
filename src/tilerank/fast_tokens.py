"""Token ids by ``tokie``, where they are proven to be those of ``tokenizers``. Imports no torch.

``tokie`` is several times faster, but not equal everywhere: its Unicode tables are newer (an unassigned code point, or
one that Unicode added lately, is dropped by one and kept by the other), and it passes over some settings in silence.
So a vocabulary is served only when its settings are those of `SERVED`, a text only when all of its characters are in
`AGREED` and it is shorter than `LONGEST`, and a sample of the vocabulary itself is compared when it is loaded.
Everything else goes to ``tokenizers``: a text in silence, since its ids are the same either way, a vocabulary by name
(see `TextTokenizer.engine`).

The tests compare the two on every character of `AGREED`, on random strings of them, on long texts and on whole data
sets.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilerank.spread import spread, start, threads

if TYPE_CHECKING:
    from tokenizers import Tokenizer

AGREED = (
    (0x0000, 0x007E),  # ASCII but for delete
    (0x0080, 0x0377),  # Latin with its marks, phonetics, the first of Greek
    (0x037A, 0x037F),
    (0x0384, 0x038A),
    (0x038C, 0x038C),
    (0x038E, 0x03A1),  # Greek capitals, but for gaps that no character has
    (0x03A3, 0x052F),  # Greek, Cyrillic
    (0x1DFC, 0x1F15),  # Latin with more marks
    (0x2000, 0x2064),  # punctuation and spaces
    (0x2070, 0x2071),
    (0x2074, 0x208E),
    (0x2090, 0x209C),  # superscripts and subscripts
    (0x20A0, 0x20C0),  # currencies
    (0x2100, 0x218B),  # letterlike symbols, number forms
    (0x2190, 0x2429),  # arrows, operators, technical symbols
    (0x2460, 0x2B73),  # enclosed, box drawing, shapes, dingbats
    (0x3000, 0x303F),  # punctuation of Chinese and Japanese
    (0x3041, 0x3096),
    (0x3099, 0x30FF),  # kana
    (0x3220, 0xA48C),  # Chinese characters, Yi
    (0xAC00, 0xD7A3),  # Hangul syllables
    (0xFB00, 0xFB06),  # ligatures
    (0xFE00, 0xFE0F),  # which form of a pictograph is meant
    (0xFEFF, 0xFEFF),  # byte order mark
    (0xFF01, 0xFFBE),  # full and half width forms
    (0xFFFD, 0xFFFD),  # what could not be read
    (0x1F300, 0x1F6D7),
    (0x1F900, 0x1FA53),  # pictographs
)
"""First and last code point of each range of characters that both tokenizers treat alike, alone and together."""

SERVED: dict[str, dict[str, Any]] = {
    "model": {"type": "WordPiece", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
}
"""Settings of a tokenizer.json that ``tokie`` was seen to honour; lowercase or not is its choice."""

_ADDED = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
LONGEST = 1 << 16
"""Bytes of UTF-8 from which ``tokie`` cuts a text into pieces, one for each core, at blanks if it finds them: a word
without blanks falls apart."""

_PROBES = 512
_AT_ONCE = LONGEST // 4
"""Characters, of up to four bytes, that are encoded in one call: below `LONGEST`."""
_SMALLEST_PART = 2048
"""Characters below which a call of its own costs more than it is spread for."""
_SEPARATOR_LENGTH = 8

_AGREED_ASCII = bytes(range(AGREED[0][1] + 1))
_IS_AGREED = bytearray(0x110000)
for _first, _last in AGREED:
    _IS_AGREED[_first : _last + 1] = b"\1" * (_last + 1 - _first)


class FastEncoder:
    """``tokie`` over one vocabulary, with ``tokenizers`` for the texts that it may encode otherwise.

    Raises ValueError, with the reason, for a vocabulary that it does not serve, and ImportError without ``tokie``.
    Never changed after that, so that several threads may encode.
    """

    def __init__(self, backend: Tokenizer) -> None:
        import tokie

        settings = json.loads(backend.to_str())
        if reason := refusal(settings):
            raise ValueError(reason)
        self._backend = backend
        with tempfile.TemporaryDirectory(prefix="tilerank-") as folder:
            file = Path(folder) / "tokenizer.json"  # tokie reads nothing but files
            file.write_text(json.dumps({**settings, "truncation": None, "padding": None}), encoding="utf-8")
            self._fast = tokie.Tokenizer.from_json(str(file))
        self._separator = _separator(settings.get("added_tokens") or ())
        probes = _probes(list(settings["model"]["vocab"]))
        expected = encode_with_tokenizers(backend, probes)
        for found in (self.encode(probes), self._encode_mixed(probes)):
            for text, ours, theirs in zip(probes, found, expected, strict=True):
                if not np.array_equal(ours, theirs):
                    raise ValueError(f"tokie encodes {text!r:.60} otherwise than tokenizers")

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, int32, without special tokens."""
        return self.start(texts)()

    def start(self, texts: Sequence[str]) -> Callable[[], list[np.ndarray]]:
        """`encode`, begun by helpers; the function that is returned does the rest and waits for them."""
        # Helpers are left nothing but `tokie`: whatever else they did would be done by one after the other, under the
        # interpreter's lock and with cold caches.
        parts = [] if self._separator is None else [self._separator[0].join([*part, ""]) for part in _parts(texts)]
        if not parts or not are_agreed(texts, parts):
            return lambda: self._encode_mixed(texts)
        work = start(self._ids, parts, min(len(parts), threads()) - 1)
        return lambda: self._rows(texts, work.wait())

    def _rows(self, texts: Sequence[str], found: Sequence[np.ndarray]) -> list[np.ndarray]:
        """``found``: ids of runs of texts, the separator behind each text."""
        ids = np.concatenate(found)
        ends = np.flatnonzero(ids == self._separator[1])
        if len(ends) != len(texts):  # a text has the token itself
            return self._encode_mixed(texts)
        bounds = ends.tolist()
        return [ids[first:end] for first, end in zip([0, *[end + 1 for end in bounds]], bounds, strict=False)]

    def _encode_mixed(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Text by text, each by the one that is to encode it."""
        agreed = list(map(is_agreed, texts))
        fast = iter(spread(self._ids, [text for text, is_fast in zip(texts, agreed, strict=True) if is_fast]))
        others = [text for text, is_fast in zip(texts, agreed, strict=True) if not is_fast]
        slow = iter(encode_with_tokenizers(self._backend, others))
        return [next(fast) if is_fast else next(slow) for is_fast in agreed]

    def _ids(self, text: str) -> np.ndarray:
        """Gives up the interpreter's lock while it works."""
        return self._fast.encode_batch_flat([text], False)[0].view(np.int32)


def _parts(texts: Sequence[str]) -> list[Sequence[str]]:
    """Runs of texts of nearly as many characters each: no more of them than threads, unless that makes them too long.

    A call waits for the interpreter's lock at its end, and one call too many would begin when the others have ended.
    """
    if not texts:
        return []
    total = sum(map(len, texts)) + _SEPARATOR_LENGTH * len(texts)
    count = max(min(threads(), total // _SMALLEST_PART), -(-8 * total // (7 * _AT_ONCE)), 1)
    parts: list[Sequence[str]] = []
    first, size, before, number = 0, 0, 0, 0
    for index, text in enumerate(texts):
        length = len(text) + _SEPARATOR_LENGTH
        own = (2 * before + length) * count // (2 * total)  # of the part in which its middle lies
        if index > first and (own > number or size + length > _AT_ONCE):
            parts.append(texts[first:index])
            first, size = index, 0
        size, before, number = size + length, before + length, own
    parts.append(texts[first:])
    return parts


def _separator(added: Sequence[dict[str, Any]]) -> tuple[str, int] | None:
    """A special token that keeps texts apart, and its id; None where no such token is known.

    It has brackets at its ends, and no special token has brackets elsewhere: so none overlaps another, and no word
    becomes one, since ``BertPreTokenizer`` takes brackets out of words.
    """
    if any("[" in token["content"][1:] or "]" in token["content"][:-1] for token in added):
        return None
    for token in added:
        if re.fullmatch(r"\[\w+\]", token["content"]) and len(token["content"]) <= _SEPARATOR_LENGTH:
            return token["content"], token["id"]
    return None


def is_agreed(text: str) -> bool:
    """Whether every character of ``text`` is in `AGREED`, and its length below `LONGEST`."""
    if text.isascii():
        return len(text) < LONGEST and "\x7f" not in text
    # A character has at most four bytes.
    return _has_agreed_characters(text) and (4 * len(text) < LONGEST or len(text.encode("utf-8")) < LONGEST)


def are_agreed(texts: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether `is_agreed` of every text, found sooner than one by one; False where that takes a closer look. parts: all
    of them, joined by ASCII."""
    return (
        4 * max(map(len, parts)) < LONGEST
        and not any(["\x7f" in part for part in parts])
        and _has_agreed_characters("".join([text for text in texts if not text.isascii()]))
    )


def _has_agreed_characters(text: str) -> bool:
    rare = text.encode("utf-8", "surrogatepass").translate(None, _AGREED_ASCII).decode("utf-8", "surrogatepass")
    return all(map(_IS_AGREED.__getitem__, map(ord, set(rare))))


def encode_with_tokenizers(backend: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Token ids of each text by ``tokenizers``, int32, without special tokens."""
    try:
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    except TypeError:
        # Half of a surrogate pair (text cut inside an emoji, then stored as JSON): encoded as U+FFFD.
        whole = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
        encodings = backend.encode_batch_fast(whole, add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]


def refusal(settings: dict[str, Any]) -> str | None:
    """Why a tokenizer.json is not served (the setting, its value, what is served), or None when it is."""
    for section, wanted in SERVED.items():
        found = settings.get(section) or {}
        for key, value in wanted.items():
            if found.get(key) != value:
                return f"{section}.{key} is {found.get(key)!r}; tokie serves {value!r}"
    vocabulary = settings["model"]["vocab"]
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        return f"the {len(vocabulary)} ids of the vocabulary leave gaps; tokie numbers them without"
    for token in settings.get("added_tokens") or ():
        for key, value in _ADDED.items():
            if token.get(key) != value:
                return f"the added token {token.get('content')!r} has {key}={token.get(key)!r}; tokie serves {value!r}"
    return None


def _probes(vocabulary: list[str]) -> list[str]:
    """Texts that show a vocabulary read wrong: some of its words, in runs, cut short, and longer than any word."""
    words = [word.removeprefix("##") for word in vocabulary[:: max(1, len(vocabulary) // _PROBES)]]
    texts = [" ".join(words[start : start + 8]) for start in range(0, len(words), 8)]
    texts += ["".join(words[start : start + 3]) for start in range(0, len(words), 24)]
    return [text for text in [*texts, "a" * 100, "a" * 101, "Ünïcode, naïve: 漢字 😀 (x)", ""] if is_agreed(text)]
