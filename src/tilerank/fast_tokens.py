"""Token ids by ``tokie``, where they are proven to be those of ``tokenizers``. Imports no torch.

``tokie`` is several times faster, but not equal everywhere: its Unicode tables are newer (an unassigned code point, or
one that Unicode added lately, is dropped by one and kept by the other), and it passes over some settings in silence.
So a vocabulary is served only when its settings are those of `SERVED`, a text only when all of its characters are in
`AGREED`, and a sample of the vocabulary itself is compared when it is loaded. Everything else goes to ``tokenizers``:
a text in silence, since its ids are the same either way, a vocabulary by name (see `TextTokenizer.engine`).

The tests compare the two on every character of `AGREED`, on random strings of them and on whole data sets.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_Way: TypeAlias = Callable[[Sequence[str]], list[np.ndarray]]

AGREED = (
    (0x0000, 0x007E),  # ASCII but for delete
    (0x0080, 0x0377),  # Latin with its marks, phonetics, the first of Greek
    (0x03A3, 0x052F),  # Greek, Cyrillic
    (0x1DFC, 0x1F15),  # Latin with more marks
    (0x2000, 0x2064),  # punctuation and spaces
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
_PROBES = 512
_SEPARATOR = b"\xff\xfe"  # in no text's UTF-8
_FEW = 128
"""Texts below which one after another may be sooner: the other ways start a thread for each core, every time."""

_IS_AGREED = np.zeros(0x110000, dtype=bool)
for _first, _last in AGREED:
    _IS_AGREED[_first : _last + 1] = True


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
        probes = _probes(list(settings["model"]["vocab"]))
        expected = encode_with_tokenizers(backend, probes)
        ways: list[_Way] = [self._at_once, self._one_by_one]
        if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
            ways.append(self._through_memory)
        for way in ways:
            for text, ours, theirs in zip(probes, way(probes), expected, strict=True):
                if not np.array_equal(ours, theirs):
                    raise ValueError(f"tokie encodes {text!r:.60} otherwise than tokenizers")
        # Threads, lists and copies cost otherwise on every machine.
        passages = [" ".join(probes[start : start + 40]) for start in range(0, len(probes), 2)]
        seconds = {way: _seconds(way, passages) for way in ways}
        self._few = min(seconds, key=seconds.__getitem__)
        self._many = ways[-1] if ways[-1] != self._one_by_one else self._at_once

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, int32, without special tokens."""
        agreed = [is_agreed(text) for text in texts]
        asked = [text for text, is_fast in zip(texts, agreed, strict=True) if is_fast]
        fast = iter((self._few if len(asked) < _FEW else self._many)(asked))
        others = [text for text, is_fast in zip(texts, agreed, strict=True) if not is_fast]
        slow = iter(encode_with_tokenizers(self._backend, others))
        return [next(fast) if is_fast else next(slow) for is_fast in agreed]

    def _one_by_one(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(self._fast.encode(text, False).ids, dtype=np.int32) for text in texts]

    def _at_once(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(encoding.ids, dtype=np.int32) for encoding in self._fast.encode_batch(list(texts), False)]

    def _through_memory(self, texts: Sequence[str]) -> list[np.ndarray]:
        """By way of a file in memory: `encode_files` gives arrays, where the others give a list for each text, and a
        Python integer for each token. It leaves empty texts out."""
        full = [text.encode("utf-8") for text in texts if text]
        if not full:
            return [np.zeros(0, np.int32) for _ in texts]
        file = os.memfd_create("tilerank")
        try:
            with open(file, "wb", closefd=False) as stream:
                stream.write(_SEPARATOR.join(full))
            ids, ends = self._fast.encode_files([f"/proc/self/fd/{file}"], _SEPARATOR, False)
        finally:
            os.close(file)
        ids = ids.view(np.int32)
        rows = iter([ids[start:end] for start, end in itertools.pairwise(ends.tolist())])
        return [next(rows) if text else np.zeros(0, np.int32) for text in texts]


def _seconds(way: _Way, texts: Sequence[str]) -> float:
    """The best of three."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        way(texts)
        times.append(time.perf_counter() - start)
    return min(times)


def is_agreed(text: str) -> bool:
    """Whether every character of ``text`` is in `AGREED`."""
    if text.isascii():
        return "\x7f" not in text
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return bool(_IS_AGREED[points].all())


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
