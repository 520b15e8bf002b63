"""Truncation by convention 5 of the test conventions, held against transformers' own tokenizer call."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from tiny_models import merge_json, write_tiny_bert

from tilerank.errors import TilerankError
from tilerank.tokenization import TextTokenizer, Tokens, load_tokenizer

_MIXTURE = (
    "the protein's cell [SEP] Zürich naïve 漢字かな 😀 antidisestablishmentarianism "
    "p<0.05 a\u0301 \u200b İ 3.14 . , - (x)"
)
WORDS = _MIXTURE.split(" ")


def _text(draw: random.Random, longest: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(0, longest)))


@pytest.fixture(scope="module", params=["cross_encoder_dir", "bi_encoder_dir"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def reference(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return load_tokenizer(folder, 40)


def _rows(tokens) -> list[list[int]]:
    return [row.tolist() for row in np.split(tokens.ids, np.cumsum(tokens.lengths)[:-1])]


def _types(tokens) -> list[list[int]]:
    return [row.tolist() for row in np.split(tokens.type_ids, np.cumsum(tokens.lengths)[:-1])]


def test_a_pair_whose_query_fits_equals_only_second(tokenizer: TextTokenizer, reference) -> None:
    draw = random.Random(0)
    pairs = [(_text(draw, 12), _text(draw, 30)) for _ in range(600)]
    pairs = [pair for pair in pairs if len(reference(pair[0], add_special_tokens=False)["input_ids"]) < 37]
    queries, passages = [query for query, _ in pairs], [passage for _, passage in pairs]
    tokens = tokenizer.pairs(queries, passages)
    expected = reference(queries, passages, truncation="only_second", max_length=40)
    assert _rows(tokens) == expected["input_ids"]
    assert _types(tokens) == expected["token_type_ids"]
    whole = reference(queries, passages)["input_ids"]
    assert tokens.truncated.tolist() == [len(ids) > 40 for ids in whole]
    assert 100 < tokens.truncated.sum() < 500


def test_a_query_that_does_not_fit_is_cut_as_longest_first_and_named(tokenizer: TextTokenizer, reference) -> None:
    draw = random.Random(1)
    found = 0
    for _ in range(300):
        query, passage = _text(draw, 40), _text(draw, 40)
        count = len(reference(query, add_special_tokens=False)["input_ids"])
        total = count + len(reference(passage, add_special_tokens=False)["input_ids"])
        if count < 37 or total <= 37:
            continue
        found += 1
        with pytest.warns(UserWarning, match=f"has {count} tokens"):
            tokens = tokenizer.pairs([query], [passage])
        expected = reference([query], [passage], truncation="longest_first", max_length=40)
        assert _rows(tokens) == expected["input_ids"]
        assert _types(tokens) == expected["token_type_ids"]
        assert _rows(tokens)[0].count(102) >= 2
    assert found > 20


def test_one_long_query_warns_once(tokenizer: TextTokenizer) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokenizer.pairs(["the " * 50] * 3 + ["the"], ["cell"] * 4)
    assert len(caught) == 1


def test_a_query_that_fits_is_never_cut_nor_warned_of(tokenizer: TextTokenizer, reference) -> None:
    query = "the " * 36  # with the three special tokens, room for one token of the passage
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens = tokenizer.pairs([query, query], ["cell protein", ""])
    assert tokens.lengths.tolist() == [40, 39]
    assert tokens.truncated.tolist() == [True, False]
    the, cell = reference("the cell", add_special_tokens=False)["input_ids"]
    assert _rows(tokens)[0] == [101, *[the] * 36, 102, cell, 102]


def test_single_texts_equal_transformers(tokenizer: TextTokenizer, reference) -> None:
    draw = random.Random(2)
    texts = [_text(draw, 40) for _ in range(200)] + ["", "   "]
    tokens = tokenizer.texts([], texts)
    assert _rows(tokens) == reference(texts, truncation=True, max_length=40)["input_ids"]
    assert tokens.truncated.tolist() == [len(ids) > 40 for ids in reference(texts)["input_ids"]]
    with pytest.warns(UserWarning, match="has 50 tokens"):
        tokenizer.texts(["the " * 50], [])


def test_what_the_file_says_of_padding_and_truncation_is_ignored(folder: Path) -> None:
    text = '"truncation":{"max_length":128'
    assert text in (folder / "tokenizer.json").read_text(encoding="utf-8")[:200]
    lengths = load_tokenizer(folder, 512).pairs(["the"], ["cell " * 300]).lengths
    assert lengths.tolist() == [304]


def test_half_a_surrogate_pair_is_encoded(tokenizer: TextTokenizer) -> None:
    tokens = tokenizer.pairs(["the", "the"], ["cell \ud83d", "cell \ufffd"])
    assert _rows(tokens)[0] == _rows(tokens)[1]


def test_texts_may_be_cut_from_the_left(folder: Path) -> None:
    from transformers import AutoTokenizer

    text = "a b c d e f g h i j k l m"
    reference = AutoTokenizer.from_pretrained(folder, local_files_only=True, truncation_side="left")
    expected = reference(["the"], [text], truncation="only_second", max_length=12)["input_ids"]
    assert expected != reference(["the"], ["a b c d e f g h"])["input_ids"]
    assert _rows(TextTokenizer(reference.backend_tokenizer, 12, cut_from="left").pairs(["the"], [text])) == expected


def test_padded_batches_and_distinct_rows(tokenizer: TextTokenizer) -> None:
    tokens = tokenizer.pairs(["the"] * 4, ["cell", "", "cell protein", "cell"])
    rows, inverse = tokens.distinct()
    assert rows.tolist() == [0, 1, 2]
    assert inverse.tolist() == [0, 1, 2, 0]
    ids, types, mask = tokens.padded(np.array([2, 1]), pad_id=7)
    assert mask.tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert ids[1].tolist() == [*_rows(tokens)[1], 7, 7]
    assert ids[0].tolist() == _rows(tokens)[2]
    assert types.tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 0, 0]]


@pytest.mark.parametrize("seed", range(20))
def test_distinct_sequences_are_told_apart_wherever_they_differ(seed: int) -> None:
    """In the first token or in the last, in length or in a type alone; with places of earlier calls or without."""
    draw = np.random.default_rng(seed)
    rows = [draw.integers(0, 2, draw.integers(1, (6, 80)[seed % 2])) for _ in range(30)]
    rows += [np.concatenate([row[:1] ^ 1, row[1:]]) for row in rows[:9]] + rows[5:12]
    lengths = np.array([len(row) for row in rows])
    types = draw.integers(0, 2, lengths.sum(), dtype=np.int32) if seed % 3 == 0 else np.zeros(lengths.sum(), np.int32)
    tokens = Tokens(np.concatenate(rows).astype(np.int32), types, lengths, np.zeros(len(rows), bool))
    ends = np.cumsum(lengths)
    sequences = [(tuple(row), tuple(types[end - len(row) : end])) for row, end in zip(rows, ends, strict=True)]
    firsts = [sequences.index(sequence) for sequence in sequences]
    for found, inverse in (tokens.distinct(), tokens.distinct({})):
        assert found.tolist() == sorted(set(firsts))
        assert found[inverse].tolist() == firsts
    seen: dict[bytes, int] = {}
    tokens.distinct(seen)
    rows_now, places = tokens.distinct(seen)
    assert not len(rows_now)
    assert places.tolist() == tokens.distinct()[1].tolist()


def test_no_texts(tokenizer: TextTokenizer) -> None:
    tokens = tokenizer.pairs([], [])
    assert (len(tokens.ids), len(tokens.lengths), len(tokens.truncated)) == (0, 0, 0)


def test_a_pair_needs_room(folder: Path) -> None:
    assert load_tokenizer(folder, 5).pairs(["the"], ["the cell"]).lengths.tolist() == [5]
    with pytest.raises(ValueError, match="max_length is 4; a pair of one token each takes 5"):
        load_tokenizer(folder, 4)


def test_a_text_by_itself_needs_less_room(folder: Path) -> None:
    assert load_tokenizer(folder, 3, texts=1).texts(["the"], ["the cell"]).lengths.tolist() == [3, 3]
    with pytest.raises(ValueError, match="max_length is 2; a text of one token takes 3"):
        load_tokenizer(folder, 2, texts=1)


def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path / "whole")
    assert load_tokenizer(folder, 16).max_length == 16
    bare = Path(shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer.json", "vocab.*")))
    with pytest.raises(TilerankError, match=r"bare: no usable tokenizer \(the folder has none of tokenizer\.json"):
        load_tokenizer(bare, 16)
    merge_json(folder / "config.json", {"vocab_size": 500})
    with pytest.raises(TilerankError, match=r"whole: no usable tokenizer \(it has \d+ tokens, the model 500\)"):
        load_tokenizer(folder, 16)


def test_another_separator_scheme() -> None:
    """RoBERTa's pair: <s> A </s></s> B </s>, one token type."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokens = TextTokenizer(backend, 8, pad_id=1).pairs(["a", "a a"], ["b b b b", "b"])
    assert _rows(tokens) == [[0, 4, 2, 2, 5, 5, 5, 2], [0, 4, 4, 2, 2, 5, 2]]
    assert not tokens.type_ids.any()
    assert tokens.truncated.tolist() == [True, False]
