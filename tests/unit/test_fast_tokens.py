"""`tokie` gives the ids of `tokenizers` wherever it is asked, and is not asked elsewhere."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import write_tiny_bert

from tilerank import fast_tokens
from tilerank.fast_tokens import AGREED, SERVED, FastEncoder, encode_with_tokenizers, is_agreed
from tilerank.tokenization import load_tokenizer

tokie = pytest.importorskip("tokie", reason="tokie has no wheel for this platform")

_MIXTURE = (
    "the Protein antidisestablishmentarianism [SEP] [CLS] [UNK] [MASK] [PAD] ##ing Zürich 漢字 かな 😀 İ ﬁ ß ς Σ Ǆ "
    "3.14 p<0.05 --- 한국어 ｆｕｌｌ a\u0301 \u200b \u00ad \x00 \ufffd \t \n \u2028 \ufeff"
)
WORDS = _MIXTURE.split(" ")


@pytest.fixture(scope="module", params=["cross_encoder_dir", "cased"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tokenizers import Tokenizer

    folder = request.getfixturevalue("cross_encoder_dir")
    settings = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings["normalizer"]["lowercase"] = request.param != "cased"
    made = Tokenizer.from_str(json.dumps({**settings, "truncation": None, "padding": None}))
    return made


@pytest.fixture(scope="module")
def encoder(backend: Any) -> FastEncoder:
    return FastEncoder(backend)


def differing(encoder: FastEncoder, backend: Any, texts: Sequence[str]) -> list[str]:
    """Texts whose ids are not those of `tokenizers`."""
    found = []
    for start in range(0, len(texts), 4096):
        batch = texts[start : start + 4096]
        pairs = zip(batch, encoder.encode(batch), encode_with_tokenizers(backend, batch), strict=True)
        found += [text for text, ours, theirs in pairs if not np.array_equal(ours, theirs)]
    return found


def test_every_character_that_is_agreed_on(encoder: FastEncoder, backend: Any) -> None:
    """Beside letters, and under a combining mark: where normalisation could join it with a neighbour."""
    characters = [chr(point) for first, last in AGREED for point in range(first, last + 1)]
    assert all(map(is_agreed, characters))
    assert differing(encoder, backend, [f"a{c}b {c}\u0301" for c in characters]) == []


def random_strings(count: int, agreed_only: bool, seed: int) -> Iterator[str]:
    draw = random.Random(seed)
    ranges = [*AGREED, (0, 0x24F), (0x300, 0x36F)]
    if not agreed_only:
        ranges += [(0, 0x2FFF), (0, 0xFFFF), (0x10000, 0x10FFFF)] * 3
    for _ in range(count):
        first, last = draw.choice(ranges)
        points = (draw.randint(first, last) for _ in range(draw.randint(0, 24)))
        text = "".join(chr(point) for point in points if not 0xD800 <= point <= 0xDFFF)
        yield text if not agreed_only or is_agreed(text) else ""


def test_a_hundred_thousand_random_strings(encoder: FastEncoder, backend: Any) -> None:
    """Half of them over what `tokie` itself is asked for, half over all of Unicode."""
    count = 50_000 if json.loads(backend.to_str())["normalizer"]["lowercase"] else 10_000
    asked = list(random_strings(count, agreed_only=True, seed=0))
    assert sum(map(bool, asked)) > 0.8 * count
    anything = list(random_strings(count, agreed_only=False, seed=1))
    assert 0.1 * count < sum(map(is_agreed, anything)) < 0.9 * count
    assert differing(encoder, backend, asked + anything) == []


@pytest.mark.parametrize("way", ["encode", "_encode_mixed"])
def test_every_way_gives_the_same_ids(encoder: FastEncoder, backend: Any, way: str) -> None:
    """A combining mark first, a special token inside, nothing at all: none of it may touch a neighbour's ids."""
    odd = ["", " ", "\n", "\u0301cell", "the", "[PA", "D]", "[", "]", "##s", "a" * 101, "cell [", "[PAD"]
    tokens = ["[PAD]", "[SEP]", "x[PAD]y", "[PAD]" * 40]
    texts = [*odd, *random_strings(5000, agreed_only=True, seed=3), *odd, "the cell " * 1500, "cell"]
    assert sum(text == "" for text in texts) > 2
    for batch in (
        texts,
        texts + tokens,
        odd,
        odd + tokens,
        ["the cell " * 3000, *odd],
        [""],
        ["the"],
        ["", "the", ""],
        [],
    ):
        assert all(map(is_agreed, batch))
        found = getattr(encoder, way)(batch)
        assert len(found) == len(batch)
        for ours, theirs in zip(found, encode_with_tokenizers(backend, batch), strict=True):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.dtype == np.int32


class Counted:
    """`tokie` that notes how long the texts are that it is asked for."""

    def __init__(self, fast: Any) -> None:
        self.fast = fast
        self.lengths: list[int] = []

    def encode_batch_flat(self, texts: list[str], specials: bool) -> Any:
        self.lengths.extend(map(len, texts))
        return self.fast.encode_batch_flat(texts, specials)


def test_texts_are_encoded_a_few_calls_at_a_time(encoder: FastEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = copy.copy(encoder)
    counted._fast = fast = Counted(encoder._fast)
    monkeypatch.setattr(fast_tokens, "threads", lambda: 8)
    assert len(counted.encode(["the cell " * 200] * 36)) == 36
    assert sum(fast.lengths) == 36 * (1800 + len("[PAD]"))
    assert len(fast.lengths) == 8, "a call for each thread"
    assert max(fast.lengths) < 1.5 * min(fast.lengths)
    fast.lengths.clear()
    assert len(counted.encode(["the cell " * 200] * 400)) == 400
    assert max(fast.lengths) < fast_tokens.LONGEST / 4
    fast.lengths.clear()
    assert len(counted.encode(["the cell " * 200] * 36 + ["a\x7fb"])) == 37
    assert fast.lengths[-36:] == [1800] * 36, "text by text where one is left to tokenizers"
    fast.lengths.clear()
    assert [len(row) for row in counted.encode(["the", "", "cell"])] == [1, 0, 1]
    assert fast.lengths == [len("the[PAD][PAD]cell[PAD]")], "too little to be spread"
    counted._separator = None  # no special token is known to keep texts apart
    fast.lengths.clear()
    assert [len(row) for row in counted.encode(["the", "", "cell"])] == [1, 0, 1]
    assert sorted(fast.lengths) == [0, 3, 4]


def test_texts_that_are_agreed_on_together() -> None:
    def are_agreed(*texts: str) -> bool:
        return fast_tokens.are_agreed(texts, ["[PAD]".join([*texts[:2], ""]), "[PAD]".join([*texts[2:], ""])])

    assert are_agreed("the", "", "Zürich 漢字", "a" * 9000)
    assert are_agreed("the", "a" * 9000)
    for other in ("a\x7fb", "a\u0378b", "cell \ud83d", "é\x7f"):
        assert not are_agreed("the", "Zürich", other, "cell")
        assert not are_agreed("the", other)
        assert not is_agreed(other)
    # Neither half of a surrogate pair is agreed on; side by side in two texts they are not one character either.
    assert not are_agreed("\ud83d", "\ude00")
    for other in ("the", "é"):
        assert not are_agreed(other, "a" * fast_tokens.LONGEST)
        assert not are_agreed(other, "é" * (fast_tokens.LONGEST // 2))


def test_helpers_are_left_nothing_but_tokie(encoder: FastEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else they did would be done by one after the other, under the interpreter's lock."""
    given: list[object] = []
    own = fast_tokens.start
    monkeypatch.setattr(fast_tokens, "start", lambda function, *rest: given.append(function) or own(function, *rest))
    encoder.encode(["the cell", "Zürich"])
    assert given == [encoder._ids]
    encoder.encode(["the cell", "a\u0378b"])
    assert given == [encoder._ids], "texts are looked at before helpers are asked"


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (["[PAD]", "[SEP]"], "[PAD]"),
        (["x", "[unused_one]", "[CLS]"], "[CLS]"),
        (["[PAD]", "a[PAD"], None),  # it would win over a token that follows an a
        (["[PAD]", "]b"], None),
        (["<s>", "</s>"], None),
        ([], None),
    ],
)
def test_the_special_token_between_texts(contents: list[str], expected: str | None) -> None:
    added = [{"content": content, "id": number} for number, content in enumerate(contents)]
    found = fast_tokens._separator(added)
    assert found == (None if expected is None else (expected, contents.index(expected)))


def test_long_texts(encoder: FastEncoder, backend: Any) -> None:
    """`tokie` cuts texts of `LONGEST` bytes into pieces, in the middle of a word where there is no blank."""
    below, above = fast_tokens.LONGEST - 1, fast_tokens.LONGEST
    long = [
        "a" * below,
        "é" * (below // 2),
        "漢" * (below // 3),
        "😀" * (below // 4),
        "cell\u0301 " * 9000,
        " " * below,
    ]
    assert all(map(is_agreed, long))
    too_long = ["a" * above, "é" * (above // 2), "漢" * (above // 3 + 1), "😀" * (above // 4), "x" * 400_000]
    assert not any(map(is_agreed, too_long))
    assert differing(encoder, backend, [*long, *too_long, *long]) == []
    for text in long:
        assert differing(encoder, backend, [text]) == []
    assert len(encoder._ids("a" * above)) > 1, "tokie serves longer texts by now: raise LONGEST"


def test_threads_may_encode_at_once(encoder: FastEncoder, backend: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    batches = [list(random_strings(300, agreed_only=True, seed=seed)) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for batch, found in zip(batches, pool.map(encoder.encode, batches), strict=True):
            for ours, theirs in zip(found, encode_with_tokenizers(backend, batch), strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_words_special_tokens_and_blanks(encoder: FastEncoder, backend: Any) -> None:
    draw = random.Random(2)
    words = [*WORDS, *("x" * count for count in (99, 100, 101)), "é" * 100, "e\u0301" * 51]
    texts = [
        "".join(draw.choice(words) + draw.choice(["", " "]) for _ in range(draw.randint(0, 12))) for _ in range(8000)
    ]
    assert sum(map(is_agreed, texts)) > 7000
    assert differing(encoder, backend, texts) == []


@pytest.mark.parametrize("folder", ["scifact_dir", "cranfield_dir"])
def test_every_passage_of_a_data_set(
    folder: str, encoder: FastEncoder, backend: Any, request: pytest.FixtureRequest
) -> None:
    lines = (request.getfixturevalue(folder) / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    texts = [f"{record.get('title', '')} {record['text']}".strip() for record in records]
    assert np.mean([is_agreed(text) for text in texts]) > 0.999
    assert differing(encoder, backend, texts) == []


def test_characters_that_the_two_treat_otherwise_are_left_to_tokenizers(encoder: FastEncoder) -> None:
    """If this fails `tokie` and `tokenizers` agree on more than they did: the ranges may be widened."""
    assert not any(is_agreed(text) for text in ("a\x7fb", "a\u0378b", "\ue000", "cell \ud83d", "\U0010ffff"))
    raw = [encoder._ids(text).tolist() for text in ("a\x7fb", "a\u0378b")]
    exact = encode_with_tokenizers(encoder._backend, ["a\x7fb", "a\u0378b"])
    assert any(ours != theirs.tolist() for ours, theirs in zip(raw, exact, strict=True))


def test_a_vocabulary_that_is_served(cross_encoder_dir: Path) -> None:
    tokenizer = load_tokenizer(cross_encoder_dir, 64)
    assert (tokenizer.engine, tokenizer.engine_reason) == ("tokie", "it serves this vocabulary")
    plain = load_tokenizer(cross_encoder_dir, 64, fast=False)
    assert (plain.engine, plain.engine_reason) == ("tokenizers", "asked for")


@pytest.mark.parametrize(
    ("section", "values", "reason"),
    [
        ("normalizer", {"strip_accents": True}, "normalizer.strip_accents is True; tokie serves None"),
        ("normalizer", {"handle_chinese_chars": False}, "normalizer.handle_chinese_chars is False"),
        ("model", {"max_input_chars_per_word": 50}, "model.max_input_chars_per_word is 50; tokie serves 100"),
        (
            "pre_tokenizer",
            {"type": "Whitespace"},
            "pre_tokenizer.type is 'Whitespace'; tokie serves 'BertPreTokenizer'",
        ),
    ],
)
def test_settings_that_are_passed_over_are_refused_by_name(
    section: str, values: dict, reason: str, backend: Any, encoder: FastEncoder
) -> None:
    from tokenizers import Tokenizer

    settings = json.loads(backend.to_str())
    settings[section] = {"type": values["type"]} if "type" in values else {**settings[section], **values}
    with pytest.raises(ValueError, match=reason):
        FastEncoder(Tokenizer.from_str(json.dumps(settings)))
    # What is refused would be wrong, or `SERVED` is too strict.
    assert set(SERVED) == {"model", "normalizer", "pre_tokenizer"}


def test_an_added_word_is_refused(cross_encoder_dir: Path) -> None:
    from tokenizers import AddedToken

    tokenizer = load_tokenizer(cross_encoder_dir, 64, fast=False)
    tokenizer._backend.add_tokens([AddedToken("zz", normalized=True)])
    with pytest.raises(ValueError, match="the added token 'zz' has special=False; tokie serves True"):
        FastEncoder(tokenizer._backend)


def test_a_vocabulary_with_gaps_is_refused(tmp_path: Path) -> None:
    """The small vocabulary has a word twice, so that an id has no word."""
    tokenizer = load_tokenizer(write_tiny_bert(tmp_path / "m"), 64)
    assert tokenizer.engine == "tokenizers"
    assert "ids of the vocabulary leave gaps" in tokenizer.engine_reason


def test_another_algorithm_is_left_to_tokenizers_by_name() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    from tilerank.tokenization import TextTokenizer

    backend = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = TextTokenizer(backend, 8)
    assert tokenizer.engine == "tokenizers"
    assert tokenizer.engine_reason == "model.type is 'WordLevel'; tokie serves 'WordPiece'"


def test_without_tokie(cross_encoder_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokie", None)
    tokenizer = load_tokenizer(cross_encoder_dir, 64)
    assert (tokenizer.engine, tokenizer.engine_reason) == ("tokenizers", "tokie is not installed")
    assert tokenizer.pairs(["the"], ["cell"]).lengths.tolist() == [5]


def test_a_vocabulary_read_wrong_is_seen_when_it_is_loaded(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the file that tokie reads has two words exchanged."""
    dumps = json.dumps

    def exchanged(settings: dict, **options: Any) -> str:
        vocabulary = dict(settings["model"]["vocab"])
        vocabulary["the"], vocabulary["cell"] = vocabulary["cell"], vocabulary["the"]
        return dumps({**settings, "model": {**settings["model"], "vocab": vocabulary}}, **options)

    monkeypatch.setattr(fast_tokens.json, "dumps", exchanged)
    monkeypatch.setattr(fast_tokens, "_PROBES", 10_000)
    with pytest.raises(ValueError, match="otherwise than tokenizers"):
        FastEncoder(backend)
