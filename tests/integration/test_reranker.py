"""The reranker against sentence-transformers, and conventions 5 and 6 of the test conventions."""

from __future__ import annotations

import json
import random
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from tiny_models import WORDS, merge_json, write_own_attention, write_tiny_bert

import tilerank
from tilerank import Reranker
from tilerank.errors import TilerankError

QUERY = "high risk of bone cancer"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _passages(count: int, longest: int = 90, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, longest))) for _ in range(count)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("cross"))


@pytest.fixture(scope="module")
def tiny_bi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("bi"), "bi-encoder")


@pytest.fixture(scope="module")
def reranker(tiny: Path) -> Reranker:
    return Reranker(tiny, device="cpu", max_length=64)


@pytest.fixture(scope="module")
def bi_reranker(tiny_bi: Path) -> Reranker:
    return Reranker(tiny_bi, device="cpu", max_length=64)


@pytest.fixture(params=["reranker", "bi_reranker"])
def either(request: pytest.FixtureRequest) -> Reranker:
    return request.getfixturevalue(request.param)


def test_the_package_s_names() -> None:
    from tilerank.kernels import huggingface, torch_ops

    assert tilerank.attention is torch_ops.attention
    assert tilerank.attention_varlen is torch_ops.attention_varlen
    assert tilerank.register is huggingface.register
    assert {"Reranker", "attention", "register", "__version__"} <= set(dir(tilerank))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = tilerank.nothing


# sentence-transformers


@pytest.mark.parametrize("precision", DTYPES)
def test_scores_and_ranking_equal_cross_encoder(tiny: Path, precision: str) -> None:
    passages = _passages(40)
    ours = Reranker(tiny, device="cpu", precision=precision, max_length=64)
    theirs = CrossEncoder(str(tiny), device="cpu", max_length=64, model_kwargs={"dtype": DTYPES[precision]})
    # The sigmoid hides nothing here: logits are compared, and their spread is wide.
    logits = ours.score([(QUERY, passage) for passage in passages]).logits
    expected = theirs.predict([(QUERY, passage) for passage in passages], activation_fn=torch.nn.Identity())
    tolerance = 2e-5 if precision == "fp32" else 64 * torch.finfo(DTYPES[precision]).eps
    assert np.ptp(expected) > 4
    np.testing.assert_allclose(logits, expected, atol=tolerance, rtol=0)
    predicted = ours.predict([(QUERY, passage) for passage in passages])
    assert predicted.dtype == np.float32
    np.testing.assert_allclose(
        predicted, theirs.predict([(QUERY, passage) for passage in passages]), atol=tolerance, rtol=0
    )
    if precision == "fp32":
        ranked, reference = (
            ours.rank(QUERY, passages, top_k=7, return_documents=True),
            theirs.rank(QUERY, passages, top_k=7, return_documents=True),
        )
        assert [(one["corpus_id"], one["text"]) for one in ranked] == [
            (one["corpus_id"], one["text"]) for one in reference
        ]
        assert list(ranked[0]) == ["corpus_id", "score", "text"]
        assert type(ranked[0]["score"]) is float


def test_a_single_pair_gives_a_single_score(reranker: Reranker, tiny: Path) -> None:
    theirs = CrossEncoder(str(tiny), device="cpu", max_length=64).predict((QUERY, "bone"))
    ours = reranker.predict((QUERY, "bone"))
    assert ours.shape == theirs.shape == ()
    assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_bi_encoder_equals_encode_and_cosine(tmp_path: Path, precision: str, pooling: str) -> None:
    folder = write_tiny_bert(tmp_path / "bi", "bi-encoder")
    saved = SentenceTransformer(str(folder), device="cpu")
    saved[1].pooling_mode = pooling
    saved.max_seq_length = 48
    saved.save_pretrained(str(folder))
    theirs = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": DTYPES[precision]})
    ours = Reranker(folder, device="cpu", precision=precision, max_length=64)
    assert ours.max_length == theirs.max_seq_length == 48
    passages = _passages(30)
    vectors = theirs.encode([QUERY, *passages]).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    tolerance = 2e-6 if precision == "fp32" else 8 * torch.finfo(DTYPES[precision]).eps
    expected = vectors[1:] @ vectors[0]
    assert np.ptp(expected) > 0.05
    scores = ours.score([(QUERY, passage) for passage in passages])
    np.testing.assert_allclose(scores.values, expected, atol=tolerance, rtol=0)
    np.testing.assert_array_equal(scores.values, scores.logits)


def test_the_real_cross_encoder_equals_cross_encoder(cross_encoder_dir: Path, scifact_dir: Path) -> None:
    query, passages = _scifact(scifact_dir, 4)
    ours = Reranker(cross_encoder_dir, device="cpu")
    theirs = CrossEncoder(str(cross_encoder_dir), device="cpu", model_kwargs={"dtype": torch.float32})
    pairs = [(query, passage) for passage in passages]
    np.testing.assert_allclose(ours.predict(pairs), theirs.predict(pairs), atol=2e-6, rtol=0)
    logits = theirs.predict(pairs, activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(ours.score(pairs).logits, logits, atol=2e-5, rtol=0)
    reference = theirs.rank(query, passages)
    assert [one["corpus_id"] for one in ours.rank(query, passages)] == [one["corpus_id"] for one in reference]


def test_the_packaged_encoder_equals_encode_and_cosine(bi_encoder_dir: Path, scifact_dir: Path) -> None:
    query, passages = _scifact(scifact_dir, 4)
    theirs = SentenceTransformer(str(bi_encoder_dir), device="cpu", model_kwargs={"dtype": torch.float32})
    vectors = theirs.encode([query, *passages], normalize_embeddings=True)
    ours = Reranker("all-minilm-l6", device="cpu")
    np.testing.assert_allclose(
        ours.predict([(query, passage) for passage in passages]), vectors[1:] @ vectors[0], atol=2e-6, rtol=0
    )


def _scifact(folder: Path, count: int) -> tuple[str, list[str]]:
    """A query and documents, the longest of which no pair can hold whole."""
    with (folder / "corpus.jsonl").open(encoding="utf-8") as lines:
        texts = ["{title} {text}".format(**json.loads(line)) for line, _ in zip(lines, range(400), strict=False)]
    with (folder / "queries.jsonl").open(encoding="utf-8") as lines:
        query = json.loads(next(lines))["text"]
    return query, [*texts[: count - 1], max(texts, key=len)]


@pytest.mark.parametrize(
    "config",
    [
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
        {},
    ],
)
def test_the_activation_of_the_model_s_configuration(tmp_path: Path, config: dict) -> None:
    folder = write_tiny_bert(tmp_path / "m", config=config)
    pairs = [(QUERY, passage) for passage in _passages(5)]
    ours = Reranker(folder, device="cpu", max_length=64)
    theirs = CrossEncoder(str(folder), device="cpu", max_length=64)
    np.testing.assert_allclose(ours.predict(pairs), theirs.predict(pairs), atol=1e-5)
    replaced = ours.predict(pairs, activation_fn=torch.nn.Identity())
    np.testing.assert_array_equal(replaced, ours.score(pairs).logits)


def test_an_activation_gets_a_column_of_logits(reranker: Reranker, tiny: Path) -> None:
    pairs = [(QUERY, passage) for passage in _passages(5)]
    theirs = CrossEncoder(str(tiny), device="cpu", max_length=64)
    softmax = torch.nn.Softmax(dim=1)  # over one label: 1, whatever the logit
    expected = theirs.predict(pairs, activation_fn=softmax)
    np.testing.assert_array_equal(reranker.predict(pairs, activation_fn=softmax), expected)
    layer = torch.nn.Linear(1, 1)  # its result would ask for a gradient
    scores = reranker.score(pairs, activation_fn=layer)
    np.testing.assert_allclose(scores.values, scores.logits * layer.weight.item() + layer.bias.item(), atol=1e-5)
    clipped = reranker.score(pairs, activation_fn=torch.nn.ReLU(inplace=True))
    np.testing.assert_array_equal(clipped.logits, scores.logits)
    with pytest.raises(ValueError, match=r"activation_fn gave the shape \(\) for 5 pairs"):
        reranker.predict(pairs, activation_fn=torch.mean)


def test_an_activation_may_give_an_array(reranker: Reranker) -> None:
    scores = reranker.score([(QUERY, "bone"), (QUERY, "cell")], activation_fn=lambda logits: logits.numpy())
    np.testing.assert_array_equal(scores.values, scores.logits)


def test_a_saved_cross_encoder_s_activation(tiny: Path, tmp_path: Path) -> None:
    saved = CrossEncoder(str(tiny), device="cpu", activation_fn=torch.nn.Tanh())
    saved.save_pretrained(str(tmp_path / "saved"))
    pairs = [(QUERY, passage) for passage in _passages(5)]
    ours = Reranker(tmp_path / "saved", device="cpu", max_length=64)
    np.testing.assert_allclose(ours.predict(pairs), saved.predict(pairs), atol=1e-5)


def test_an_activation_from_elsewhere_is_not_run(tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path / "m", config={"sbert_ce_default_activation_function": "os.getcwd"})
    with pytest.warns(UserWarning, match=r"'os\.getcwd' is not one of torch\.nn"):
        ours = Reranker(folder, device="cpu", max_length=64)
    scores = ours.score([(QUERY, "bone")])
    np.testing.assert_allclose(scores.values, 1 / (1 + np.exp(-scores.logits)), rtol=1e-6)


# A score belongs to its pair


def test_a_score_does_not_depend_on_its_neighbours(either: Reranker) -> None:
    pairs = [(query, passage) for query in (QUERY, "old data") for passage in _passages(20)]
    together = either.score(pairs).logits
    alone = np.array([either.score([pair]).logits[0] for pair in pairs])
    order = random.Random(3).sample(range(len(pairs)), len(pairs))
    shuffled = either.score([pairs[index] for index in order]).logits
    assert np.ptp(alone) > 0.05
    np.testing.assert_allclose(together, alone, atol=2e-5, rtol=0)
    np.testing.assert_allclose(shuffled, together[order], atol=2e-5, rtol=0)
    for batch_size in (1, 7, 1000):
        np.testing.assert_allclose(either.score(pairs, batch_size=batch_size).logits, together, atol=2e-5, rtol=0)


def test_many_pairs_are_scored_in_chunks(either: Reranker, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(QUERY, passage) for passage in _passages(23)]
    whole = either.score(pairs)
    monkeypatch.setattr("tilerank.reranker._CHUNK", 5)
    parts = either.score(pairs)
    np.testing.assert_allclose(parts.logits, whole.logits, atol=2e-5, rtol=0)
    np.testing.assert_array_equal(parts.truncated, whole.truncated)


def test_doubles_tie_exactly_and_keep_their_order(either: Reranker) -> None:
    passages = [*_passages(9), "bone cell", *_passages(9), "bone   cell"]  # the same tokens
    ranked = either.rank(QUERY, passages, batch_size=4)
    assert sorted(one["corpus_id"] for one in ranked) == list(range(20))
    place = {one["corpus_id"]: rank for rank, one in enumerate(ranked)}
    score = {one["corpus_id"]: one["score"] for one in ranked}
    for first, second in [*((index, index + 10) for index in range(9)), (9, 19)]:
        assert score[first] == score[second]
        assert place[second] == place[first] + 1
    assert [one["score"] for one in ranked] == sorted(score.values(), reverse=True)


# Convention 6: empty and odd inputs


def test_nothing_in_nothing_out(either: Reranker) -> None:
    assert either.rank(QUERY, []) == []
    assert either.predict([]).shape == (0,)
    assert either.predict([]).dtype == np.float32
    assert either.rank(QUERY, ["bone"], top_k=0) == []


def test_empty_and_blank_passages_keep_their_index(either: Reranker) -> None:
    passages = ["bone cancer", "", "   ", "\t\n", "cell"]
    ranked = either.rank(QUERY, passages, return_documents=True)
    assert sorted(one["corpus_id"] for one in ranked) == [0, 1, 2, 3, 4]
    assert all(one["text"] == passages[one["corpus_id"]] for one in ranked)
    assert all(np.isfinite(one["score"]) for one in ranked)
    assert len(either.rank("", ["", "bone"])) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda ranker: ranker.rank(QUERY, "a bare string"),
        lambda ranker: ranker.rank(QUERY, None),
        lambda ranker: ranker.rank(QUERY, ["bone", None]),
        lambda ranker: ranker.rank(QUERY, ["bone", 3]),
        lambda ranker: ranker.rank(QUERY, [b"bone"]),
        lambda ranker: ranker.rank(QUERY, {"a": "bone"}),
        lambda ranker: ranker.rank(QUERY, {"bone"}),
        lambda ranker: ranker.rank(None, ["bone"]),
        lambda ranker: ranker.rank([QUERY], ["bone"]),
        lambda ranker: ranker.predict("a bare string"),
        lambda ranker: ranker.predict(None),
        lambda ranker: ranker.predict([None]),
        lambda ranker: ranker.predict([(QUERY, None)]),
        lambda ranker: ranker.predict([(None, "bone")]),
        lambda ranker: ranker.predict([(QUERY, "bone"), "qd"]),
        lambda ranker: ranker.predict([(QUERY, "bone", "cell")]),
        lambda ranker: ranker.predict([QUERY, "bone", "cell"]),
        lambda ranker: ranker.predict([(QUERY, "bone"), None]),
    ],
)
def test_what_is_not_a_list_of_strings_is_a_type_error(reranker: Reranker, call: Callable) -> None:
    with pytest.raises(TypeError):
        call(reranker)


def test_the_faulty_place_is_named(reranker: Reranker) -> None:
    with pytest.raises(TypeError, match=r"documents\[1\] must be a string, got NoneType"):
        reranker.rank(QUERY, ["bone", None])
    with pytest.raises(TypeError, match=r"pairs\[1\]"):
        reranker.predict([(QUERY, "bone"), (QUERY, None)])


def test_other_sequences_of_strings_are_taken(reranker: Reranker) -> None:
    passages = _passages(4)
    expected = reranker.rank(QUERY, passages)
    assert reranker.rank(QUERY, tuple(passages)) == expected
    assert reranker.rank(QUERY, (passage for passage in passages)) == expected
    assert reranker.rank(QUERY, np.array(passages)) == expected
    pairs = np.array([[QUERY, passage] for passage in passages])
    np.testing.assert_array_equal(reranker.predict(pairs), reranker.predict([tuple(pair) for pair in pairs]))
    assert reranker.predict(pairs[0]) == reranker.predict(tuple(pairs[0]))


def test_arguments_out_of_range_are_value_errors(reranker: Reranker) -> None:
    with pytest.raises(ValueError, match="top_k is -1"):
        reranker.rank(QUERY, ["bone"], top_k=-1)
    with pytest.raises(ValueError, match="batch_size is 0"):
        reranker.predict([(QUERY, "bone")], batch_size=0)
    with pytest.raises(TypeError, match="top_k must be an integer, got float"):
        reranker.rank(QUERY, ["bone"], top_k=1.5)
    with pytest.raises(TypeError, match="batch_size must be an integer, got str"):
        reranker.predict([(QUERY, "bone")], batch_size="8")


def test_a_score_that_is_no_number_is_an_error(tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_tiny_bert(tmp_path / "nan")
    weights = load_file(folder / "model.safetensors")
    bone = Reranker(tiny, device="cpu", max_length=64).tokenizer.texts([], ["bone"]).ids[1]
    weights["bert.embeddings.word_embeddings.weight"][bone] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    damaged = Reranker(folder, device="cpu", max_length=64)
    with pytest.raises(TilerankError, match="pair 1 is nan"):
        damaged.rank("cell", ["heart", "bone", "cell"])
    assert len(damaged.rank("cell", ["heart", "cell"])) == 2
    with pytest.raises(TilerankError, match=r"score of pair 0 is nan; the activation made it of the logit -?[0-9]"):
        damaged.predict([("cell", "heart")], activation_fn=lambda logits: logits * float("nan"))


# Convention 5: truncation


def test_how_many_passages_were_cut_is_told(either: Reranker) -> None:
    passages = ["bone " * 10, "bone " * 200, "bone " * 300]
    assert either.rank(QUERY, passages, top_k=1).truncated == 2
    assert either.score([(QUERY, passage) for passage in passages]).truncated.tolist() == [False, True, True]


def test_the_cut_is_in_tokens_on_the_passage_side(reranker: Reranker) -> None:
    room = 64 - 3 - len(QUERY.split())
    kept, cut = reranker.score([(QUERY, "bone " * room), (QUERY, "bone " * room + "heart " * 50)]).logits
    assert kept == cut
    assert reranker.score([(QUERY, "bone " * (room - 1))]).logits[0] != pytest.approx(kept, abs=1e-4)


def test_a_query_too_long_is_cut_with_a_warning(either: Reranker) -> None:
    with pytest.warns(UserWarning, match="has 500 tokens"):
        ranked = either.rank("bone " * 500, ["cell", "heart of a mouse"])
    assert len({one["score"] for one in ranked}) == 2  # the passages still count
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        either.rank(QUERY, ["bone " * 500])


def test_max_length_above_the_position_table_is_refused_at_start(tiny: Path) -> None:
    with pytest.raises(ValueError, match="max_length is 65; the model's position table serves at most 64"):
        Reranker(tiny, device="cpu", max_length=65)
    with pytest.raises(ValueError, match="max_length is 4"):
        Reranker(tiny, device="cpu", max_length=4)
    with pytest.raises(TypeError, match="max_length must be an integer, got NoneType"):
        Reranker(tiny, device="cpu", max_length=None)
    with pytest.raises(TypeError, match="max_length must be an integer, got bool"):
        Reranker(tiny, device="cpu", max_length=True)


def test_max_length_may_be_numpy_s_and_as_short_as_the_kind_allows(tiny: Path, tiny_bi: Path) -> None:
    for folder, shortest in ((tiny, 5), (tiny_bi, 3)):
        ours = Reranker(folder, device="cpu", max_length=np.int64(shortest))
        assert (ours.max_length, type(ours.max_length)) == (shortest, int)
        assert len(ours.rank("bone", ["cell heart", "bone"])) == 2
        with pytest.raises(ValueError, match=f"max_length is {shortest - 1}"):
            Reranker(folder, device="cpu", max_length=shortest - 1)


# Precision, attention, device


def test_the_precision_is_what_was_asked_for(tiny: Path) -> None:
    for precision, dtype in [*DTYPES.items(), ("tf32", torch.float32)]:
        ours = Reranker(tiny, device="cpu", precision=precision, max_length=64)
        assert {parameter.dtype for parameter in ours.model.parameters()} == {dtype}
    with pytest.raises(ValueError, match="precision is 'int8'; allowed: fp32, tf32, fp16, bf16"):
        Reranker(tiny, device="cpu", precision="int8", max_length=64)


def test_a_half_precision_file_is_read_as_fp32(tmp_path: Path, tiny: Path) -> None:
    from transformers import BertForSequenceClassification

    folder = write_tiny_bert(tmp_path / "half")
    BertForSequenceClassification.from_pretrained(folder, dtype=torch.float16).save_pretrained(folder)
    ours = Reranker(folder, device="cpu", max_length=64)
    assert {parameter.dtype for parameter in ours.model.parameters()} == {torch.float32}


def test_the_process_s_switches_do_not_matter_and_are_left_alone(reranker: Reranker) -> None:
    pairs = [(QUERY, passage) for passage in _passages(6)]
    expected = reranker.score(pairs).logits
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            np.testing.assert_allclose(reranker.score(pairs).logits, expected, atol=2e-5, rtol=0)
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.is_grad_enabled()


def test_threads_of_different_precisions_do_not_meet_and_leave_the_switches_alone(tiny: Path) -> None:
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    rankers = {
        precision: Reranker(tiny, device="cpu", precision=precision, max_length=64) for precision in ("fp32", "tf32")
    }
    seen: set[tuple[str, str]] = set()

    def work(precision: str) -> None:
        def note(logits: torch.Tensor) -> torch.Tensor:
            seen.add((precision, switch.fp32_precision))
            time.sleep(0.002)
            seen.add((precision, switch.fp32_precision))
            return logits

        for _ in range(10):
            rankers[precision].predict([(QUERY, "bone")], activation_fn=note)

    threads = [threading.Thread(target=work, args=(precision,)) for precision in ("fp32", "tf32", "fp32", "tf32")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {("fp32", "ieee"), ("tf32", "tf32")}
    assert switch.fp32_precision == before


def test_attention_implementations_agree(tiny: Path, reranker: Reranker) -> None:
    pairs = [(QUERY, passage) for passage in _passages(6)]
    eager = Reranker(tiny, device="cpu", attention="eager", max_length=64)
    assert eager.model.config._attn_implementation == "eager"
    assert reranker.attention == "sdpa"
    np.testing.assert_allclose(eager.score(pairs).logits, reranker.score(pairs).logits, atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match=r"attention is 'flash'; allowed: auto, sdpa, eager, .*naive"):
        Reranker(tiny, device="cpu", attention="flash", max_length=64)


def test_a_registered_variant_is_used(tiny: Path, reranker: Reranker) -> None:
    from tilerank.kernels import library

    try:
        library.load()
    except TilerankError as error:
        pytest.skip(f"the kernel library cannot be built here: {error}")
    pairs = [(QUERY, passage) for passage in _passages(6)]
    ours = Reranker(tiny, device="cpu", attention="reference", max_length=64)
    assert ours.attention == "reference"
    np.testing.assert_allclose(ours.score(pairs).logits, reranker.score(pairs).logits, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["MPNet", "DebertaV2"])
def test_a_model_that_computes_attention_by_itself(tiny: Path, tmp_path: Path, family: str) -> None:
    write_own_attention(tmp_path, tiny, family)
    pairs = [(QUERY, passage) for passage in [*_passages(6), ""]]
    theirs = CrossEncoder(str(tmp_path), device="cpu", max_length=64)
    expected = theirs.predict(pairs, activation_fn=torch.nn.Identity())
    logits = Reranker(tmp_path, device="cpu", max_length=64).score(pairs).logits
    np.testing.assert_allclose(logits, expected, atol=2e-5, rtol=0)
    with pytest.raises(TilerankError, match=f"'naive' does not serve {family}For.* by itself; use auto or eager"):
        Reranker(tmp_path, device="cpu", max_length=64, attention="naive")


def test_devices(tiny: Path) -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert Reranker(tiny, max_length=64).device.type == expected
    with pytest.raises(TilerankError, match="CUDA devices"):
        Reranker(tiny, device="cuda:99", max_length=64)
    for device in ("abacus", "mps", "meta", "cpu:7", torch.device("meta")):
        with pytest.raises(TilerankError, match=f"device is {device}; allowed: cpu, cuda, cuda:<number>"):
            Reranker(tiny, device=device, max_length=64)


def test_a_variant_that_cannot_run_there_is_refused_at_start(tiny: Path) -> None:
    with pytest.raises(TilerankError, match="attention 'naive' does not serve this model here: device is cpu"):
        Reranker(tiny, device="cpu", attention="naive", max_length=64)


# Folders that do not hold what they claim


def test_a_head_that_the_file_lacks_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path / "m", "bi-encoder")
    merge_json(folder / "config.json", {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "x"}})
    with pytest.raises(TilerankError, match=r"lacks 2 of the model's weights, first classifier\.bias"):
        Reranker(folder, device="cpu", max_length=64)


def test_damaged_folders_are_one_line(tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(TilerankError, match="cannot be loaded") as failure:
        Reranker(folder, device="cpu", max_length=64)
    assert "\n" not in str(failure.value)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(TilerankError, match="no usable tokenizer") as failure:
        Reranker(folder, device="cpu", max_length=64)
    assert "\n" not in str(failure.value)


def test_loading_prints_nothing(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Reranker(tiny, device="cpu", max_length=64).rank(QUERY, ["bone"])
    assert capfd.readouterr() == ("", "")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_the_gpu_s_scores(tiny: Path, tiny_bi: Path, reranker: Reranker, bi_reranker: Reranker, precision: str) -> None:
    pairs = [(QUERY, passage) for passage in _passages(50)]
    tolerance = {"fp32": 2e-4, "tf32": 0.05, "fp16": 0.1, "bf16": 0.6}[precision]
    for folder, reference in ((tiny, reranker), (tiny_bi, bi_reranker)):
        ours = Reranker(folder, device="cuda", precision=precision, max_length=64)
        np.testing.assert_allclose(ours.score(pairs).logits, reference.score(pairs).logits, atol=tolerance, rtol=0)
