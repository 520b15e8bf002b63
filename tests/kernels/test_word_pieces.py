"""The kernel library's WordPiece gives the ids of `tokenizers`, whatever stands between its words."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilerank.fast_tokens import AGREED, FastEncoder, encode_with_tokenizers
from tilerank.kernels import build, library
from tilerank.kernels.library import KernelError
from tilerank.word_pieces import WordEncoder

pytest.importorskip("tokie", reason="tokie has no wheel for this platform")

BLANKS = [" ", "\n", "\t", "\r", "  ", " \n "]
WORDS = (
    "the Protein antidisestablishmentarianism [SEP] [CLS]x x[UNK] [MASK] [PAD] [SE P] [ ] ##ing #ing Zürich 漢字 かな 😀 İ "
    "ﬁ ß ς Σ Ǆ 3.14 p<0.05 --- 한국어 ｆｕｌｌ a\u0301 \u0301a \u200b \u00ad a\x00b \x1f a\x0bb \x7f \ufffd \u2028 \ufeff "
    "a\u00a0b a\u3000b \u0378 \ue000 don't U.S.A. e-mail@x.org IL-2R(alpha)"
).split(" ")


@pytest.fixture(scope="module", params=["uncased", "cased"])
def backend(request: pytest.FixtureRequest, cross_encoder_dir: Path) -> Any:
    from tokenizers import Tokenizer

    settings = json.loads((cross_encoder_dir / "tokenizer.json").read_text(encoding="utf-8"))
    settings["normalizer"]["lowercase"] = request.param == "uncased"
    return Tokenizer.from_str(json.dumps({**settings, "truncation": None, "padding": None}))


@pytest.fixture(scope="module")
def encoder(backend: Any) -> WordEncoder:
    return WordEncoder(FastEncoder(backend), library.load(build.Target("cpu")))


def differing(encoder: WordEncoder, backend: Any, texts: Sequence[str], at_once: int = 64) -> list[str]:
    """Texts whose ids are not those of `tokenizers`."""
    found = []
    for start in range(0, len(texts), at_once):
        batch = texts[start : start + at_once]
        pairs = zip(batch, encoder.encode(batch), encode_with_tokenizers(backend, batch), strict=True)
        found += [text for text, ours, theirs in pairs if ours.dtype != np.int32 or not np.array_equal(ours, theirs)]
    return found


def test_every_character_between_and_beside_blanks(encoder: WordEncoder, backend: Any) -> None:
    points = [point for first, last in [(0, 0x24F), *AGREED] for point in range(first, last + 1)]
    texts = [f"a{chr(point)}b {chr(point)} {chr(point)}\u0301 b\n{chr(point)}" for point in points]
    assert differing(encoder, backend, texts, at_once=512) == []


def random_texts(count: int, seed: int) -> Iterator[str]:
    """Words with and without blanks between them, some of random letters, some of all of Unicode."""
    draw = random.Random(seed)
    for _ in range(count):
        parts = []
        for _ in range(draw.randint(0, 14)):
            kind = draw.random()
            if kind < 0.4:
                parts.append(draw.choice(WORDS))
            elif kind < 0.8:
                parts.append("".join(chr(draw.randint(0x20, 0x7E)) for _ in range(draw.randint(1, 12))))
            else:
                first, last = draw.choice([*AGREED, (0, 0x2FFF), (0x10000, 0x10FFFF)])
                points = (draw.randint(first, last) for _ in range(draw.randint(1, 5)))
                parts.append("".join(chr(point) for point in points if not 0xD800 <= point <= 0xDFFF))
            parts.append(draw.choice([*BLANKS, "", " ", " "]))
        yield "".join(parts)


def test_random_texts(encoder: WordEncoder, backend: Any) -> None:
    assert differing(encoder, backend, list(random_texts(20_000, seed=0))) == []
    assert differing(encoder, backend, list(random_texts(500, seed=1)), at_once=1) == []


def test_words_of_every_length(encoder: WordEncoder, backend: Any) -> None:
    """One letter too many makes a word unknown, and eight letters are looked up at a time."""
    draw = random.Random(2)
    texts = []
    for count in [*range(40), 63, 64, 65, *range(95, 140), 1000, 70_000]:
        letters = "".join(draw.choices("aeinrst", k=count))
        texts += [letters, letters.upper(), f"({letters})", f" {letters} the", f"{letters}é", "a" * count, "7" * count]
    assert differing(encoder, backend, texts) == []


def test_texts_without_words(encoder: WordEncoder, backend: Any) -> None:
    texts = ["", " ", "\n\t\r ", "[PAD]", "[SEP][SEP]", "é", "\x00", "\u0301", "the", " the", "the "]
    for batch in ([], [""], ["", ""], texts, texts * 2, ["\ud83d half", "the"]):
        found = encoder.encode(batch)
        expected = encode_with_tokenizers(backend, batch) if batch else []
        assert [row.tolist() for row in found] == [row.tolist() for row in expected]


@pytest.mark.parametrize("folder", ["scifact_dir", "cranfield_dir"])
def test_every_passage_of_a_data_set(
    folder: str, encoder: WordEncoder, backend: Any, request: pytest.FixtureRequest
) -> None:
    lines = (request.getfixturevalue(folder) / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    texts = [f"{record.get('title', '')} {record['text']}".strip() for record in records]
    assert differing(encoder, backend, texts) == []


def test_threads_may_encode_at_once(encoder: WordEncoder, backend: Any) -> None:
    batches = [list(random_texts(200, seed=seed)) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for batch, found in zip(batches, pool.map(encoder.encode, batches), strict=True):
            for ours, theirs in zip(found, encode_with_tokenizers(backend, batch), strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_what_is_not_served_is_refused_by_name(encoder: WordEncoder) -> None:
    made = library.load(build.Target("cpu"))
    options = {"unknown": 0, "lowercase": True, "most_letters": 100}
    with pytest.raises(KernelError, match="count is 0; allowed: 1 to"):
        made.wordpiece([], [], **options)
    with pytest.raises(KernelError, match="most_letters is 129; allowed: 1 to 128"):
        made.wordpiece(["[UNK]"], [], **{**options, "most_letters": 129})
    words = made.wordpiece(["[UNK]", "a"], [], **options)
    none = np.zeros(0, np.int32)
    with pytest.raises(KernelError, match="there are 2 texts and count is 3"):
        words.encode(b"a\xffb", 3, none, -1)
    with pytest.raises(KernelError, match="there are more texts than count, 1"):
        words.encode(b"a\xffb", 1, none, -1)
    assert words.encode(b"a A\xffb", 2, none, -1)[0][:3].tolist() == [1, 1, 0]
    words.destroy()
