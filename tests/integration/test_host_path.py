"""Every path from text to scores gives the padded model's scores, or says why it does not serve."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import WORDS, merge_json, write_tiny_bert

from tilerank import Reranker, host_path, packed_attention, packing
from tilerank.bench.peers import HuggingFaceScorer
from tilerank.encoder import Head, PackedEncoder, PaddedEncoder, PrepackedLinear, can_prepack
from tilerank.errors import TilerankError
from tilerank.models import ModelDescription
from tilerank.tokenization import Tokens

QUERY = "high risk of bone cancer"
PATHS = [path.name for path in host_path.of_device("cpu")]
CPU = torch.device("cpu")


def passages(count: int, longest: int = 90, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, longest))) for _ in range(count)]


def tokens_of(lengths: list[int], vocabulary: int = 90) -> Tokens:
    generator = np.random.default_rng(0)
    total = sum(lengths)
    types = np.concatenate([np.arange(length) >= length // 3 for length in lengths]).astype(np.int32)
    ids = generator.integers(5, vocabulary, total, dtype=np.int32)
    return Tokens(ids, types, np.array(lengths), np.zeros(len(lengths), bool))


# The reranker


@pytest.fixture(scope="module", params=["cross-encoder", "mean", "cls"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = "cross-encoder" if request.param == "cross-encoder" else "bi-encoder"
    made = write_tiny_bert(tmp_path_factory.mktemp(request.param), kind)
    if request.param == "cls":
        (made / "modules.json").write_text(
            '[{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]', encoding="utf-8"
        )
        (made / "1_Pooling").mkdir()
        merge_json(made / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    return made


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_scores_are_the_padded_models(folder: Path, path: str, precision: str) -> None:
    if path == "prepacked" and precision in ("fp16", "bf16"):
        with pytest.raises(TilerankError, match="'prepacked' does not serve this model here: torch"):
            Reranker(folder, device="cpu", precision=precision, host_path=path, max_length=64)
        return
    ours = Reranker(folder, device="cpu", precision=precision, host_path=path, max_length=64)
    assert ours.host_path.name == path
    texts = passages(24)
    exact, unmodified = (
        HuggingFaceScorer(folder, ours.kind, dtype, "cpu", 64, batch_size=7).score(QUERY, texts)
        for dtype in ("fp64", precision)
    )
    own = np.abs(unmodified - exact).max()
    assert np.ptp(exact) > 5 * own, "wrong attention would show"
    for batch_size in (None, 1, 5):
        found = ours.score([(QUERY, text) for text in texts], batch_size).logits
        # Products of other shapes round otherwise, by about as much as rounding itself.
        assert np.abs(found - exact).max() <= 3 * own + 1e-6


def test_the_real_cross_encoder_on_every_path(cross_encoder_dir: Path, scifact_dir: Path) -> None:
    lines = (scifact_dir / "corpus.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    pairs = [("does aspirin reduce the risk of cancer", line) for line in lines]
    exact = HuggingFaceScorer(cross_encoder_dir, "cross-encoder", "fp64", "cpu", 512).score(pairs[0][0], lines)
    for path in PATHS:
        ours = Reranker(cross_encoder_dir, device="cpu", host_path=path)
        np.testing.assert_allclose(ours.score(pairs).logits, exact, atol=2e-5, rtol=0)


def test_auto_takes_the_last_path_that_serves(folder: Path) -> None:
    auto = Reranker(folder, device="cpu", max_length=64)
    assert (auto.host_path.name, auto.attention) == ("prepacked", "sdpa")
    half = Reranker(folder, device="cpu", precision="bf16", max_length=64)
    assert half.host_path.name == "packed"
    assert half.host_path_reason == "torch.bfloat16 on cpu has no prepacked layers"
    eager = Reranker(folder, device="cpu", attention="eager", max_length=64)
    assert (eager.host_path.name, eager.attention) == ("fast_tokens", "eager")
    assert eager.host_path_reason == "attention 'eager' serves no packed batches here"


def test_paths_that_do_not_serve_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="host_path is 'quick'; allowed: auto, padded, fast_tokens, packed"):
        Reranker(folder, device="cpu", host_path="quick", max_length=64)
    with pytest.raises(TilerankError, match="host_path 'graphs' runs on cuda, not on cpu"):
        Reranker(folder, device="cpu", host_path="graphs", max_length=64)
    with pytest.raises(TilerankError, match="'packed' does not serve this model here: attention 'eager'"):
        Reranker(folder, device="cpu", host_path="packed", attention="eager", max_length=64)


def test_another_family_is_padded_by_name(tmp_path: Path) -> None:
    from transformers import DistilBertConfig, DistilBertModel

    folder = write_tiny_bert(tmp_path / "m", "bi-encoder")
    config = DistilBertConfig(
        vocab_size=120, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=64, initializer_range=0.5
    )
    DistilBertModel(config).save_pretrained(folder)
    ours = Reranker(folder, device="cpu", max_length=64)
    assert ours.host_path.name == "fast_tokens"
    assert ours.host_path_reason.startswith("model_type is 'distilbert'; packed batches serve bert, camembert")
    exact = HuggingFaceScorer(folder, "bi-encoder", "fp64", "cpu", 64).score(QUERY, passages(9))
    np.testing.assert_allclose(ours.score([(QUERY, text) for text in passages(9)]).logits, exact, atol=1e-5, rtol=0)
    with pytest.raises(TilerankError, match="'packed' does not serve this model here: model_type is 'distilbert'"):
        Reranker(folder, device="cpu", host_path="packed", max_length=64)


# Many queries


def test_rank_many_equals_rank(folder: Path) -> None:
    ours = Reranker(folder, device="cpu", max_length=64)
    queries = [QUERY, "mouse", QUERY]
    candidates = [passages(9, seed=1), [], (text for text in [*passages(7, seed=2), "", "bone"])]
    lists = [passages(9, seed=1), [], [*passages(7, seed=2), "", "bone"]]
    many = ours.rank_many(queries, candidates, top_k=4, return_documents=True)
    for query, texts, ranking in zip(queries, lists, many, strict=True):
        alone = ours.rank(query, texts, top_k=4, return_documents=True)
        assert [(hit["corpus_id"], hit["text"]) for hit in ranking] == [
            (hit["corpus_id"], hit["text"]) for hit in alone
        ]
        assert ranking.truncated == alone.truncated
        np.testing.assert_allclose([h["score"] for h in ranking], [h["score"] for h in alone], atol=2e-6, rtol=0)
    assert ours.rank_many([], []) == []


def test_rank_many_works_through_more_pairs_than_it_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilerank import reranker

    ours = Reranker(folder, device="cpu", max_length=64)
    pairs = [(QUERY, text) for text in passages(23, longest=30)]
    expected = ours.score(pairs).logits
    held = []
    own = ours._score_chunk
    monkeypatch.setattr(reranker, "_CHUNK", 5)
    monkeypatch.setattr(ours, "_score_chunk", lambda chunk, *rest: held.append(len(chunk)) or own(chunk, *rest))
    np.testing.assert_allclose(ours.score(pairs).logits, expected, atol=1e-5, rtol=0)
    assert held == [5, 5, 5, 5, 3]


def test_a_chunk_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU gets it: doubles in different pieces still tie exactly, and what is cut is told in order."""
    ours = Reranker(folder, device="cpu", max_length=64)
    texts = [*passages(9), *passages(9)[::-1], "bone " * 99, "bone"]
    pairs = [(QUERY, text) for text in texts]
    expected = ours.score(pairs)
    monkeypatch.setattr(ours, "_pieces", lambda count: [9, 9, 1, count - 19])
    found = ours.score(pairs)
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(found.logits[:9], found.logits[9:18][::-1])
    np.testing.assert_array_equal(found.truncated, expected.truncated)
    assert found.truncated[18]


def test_pieces_for_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Reranker(folder, device="cpu", max_length=64)
    assert [ours._pieces(count) for count in (1, 50, 4096)] == [[1], [50], [4096]]
    monkeypatch.setattr(ours, "device", torch.device("cuda"))
    assert [ours._pieces(count) for count in (1, 50, 1024)] == [[1], [50], [1024]]
    assert ours._pieces(2058) == [686, 686, 686]
    monkeypatch.setattr(ours, "host_path", host_path.find("overlapped"))
    assert [ours._pieces(count) for count in (1, 23, 24, 51)] == [[1], [23], [12, 12], [25, 26]]
    assert [ours._pieces(count) for count in (1024, 3072, 4096)] == [[512] * 2, [1024] * 3, [1024] * 4]
    monkeypatch.setattr(ours, "host_path", host_path.find("fused"))
    assert [ours._pieces(count) for count in (50, 1024, 2048)] == [[50], [1024], [1024] * 2]


def test_rank_many_refuses_what_rank_refuses(folder: Path) -> None:
    ours = Reranker(folder, device="cpu", max_length=64)
    with pytest.raises(ValueError, match="there are 2 queries and 1 lists of candidates"):
        ours.rank_many(["a", "b"], [["c"]])
    with pytest.raises(TypeError, match=r"candidates\[1\]\[0\] must be a string, got NoneType"):
        ours.rank_many(["a", "b"], [["c"], [None]])
    with pytest.raises(TypeError, match=r"candidates\[0\] must be a list, got str"):
        ours.rank_many(["a"], ["bone"])
    with pytest.raises(TypeError, match="queries must be a list, got str"):
        ours.rank_many("a", [["c"]])
    with pytest.raises(TypeError, match="query must be a string, got int"):
        ours.rank_many([1], [["c"]])
    with pytest.raises(ValueError, match="top_k is -1"):
        ours.rank_many(["a"], [["c"]], top_k=-1)


# Packed batches


@pytest.mark.parametrize("family", ["bert", "camembert", "data2vec-text", "electra", "ernie", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("pool", ["logit", "first", "mean"])
@pytest.mark.parametrize("fused", [False, True])
def test_every_family_that_is_served(family: str, pool: str, fused: bool) -> None:
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    torch.manual_seed(0)
    after_pad = family in ("camembert", "data2vec-text", "roberta", "xlm-roberta")
    config = AutoConfig.for_model(
        family,
        vocab_size=90,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=48,
        type_vocab_size=1 if after_pad else 2,
        pad_token_id=1 if after_pad else 0,
        initializer_range=0.5,
        num_labels=1,
        **({"embedding_size": 16} if family == "electra" else {}),
    )
    kind = AutoModelForSequenceClassification if pool == "logit" else AutoModel
    model = kind.from_config(config, attn_implementation="sdpa").eval()
    description = ModelDescription("cross-encoder", 46, None, "mean", None, not after_pad, 90, family, 2 * after_pad)
    head = Head(pool == "logit", "mean" if pool == "mean" else "first")
    tokens = tokens_of([40, 3, 17, 17, 29, 1, 5])
    tokens.ids[[7, 30, 31, 43, 60]] = 1 if after_pad else 0  # "<pad>" that stands in a text: RoBERTa does not count it
    with torch.inference_mode():
        padded = PaddedEncoder(model, description, head, 1 if after_pad else 0, CPU)
        expected = run(padded, tokens)
        chosen = packed_attention.choose("sdpa", CPU, torch.float32, 16, 40)
        packed = PackedEncoder(model, description, head, CPU, chosen, max_length=40, fused=fused)
        found = run(packed, tokens)
    assert np.ptp(expected) > 0.5
    np.testing.assert_allclose(found, expected, atol=5e-5 * max(1.0, float(np.abs(expected).max())), rtol=0)


def run(encoder, tokens: Tokens) -> np.ndarray:
    plan = encoder.plan(tokens.lengths, 3)
    parts = [encoder.forward(batch) for batch in encoder.upload(tokens, plan)]
    return torch.cat(parts).numpy()[np.argsort(np.concatenate(plan))]


def test_only_first_tokens_go_on_from_the_last_attention(tmp_path: Path) -> None:
    ours = Reranker(write_tiny_bert(tmp_path / "m"), device="cpu", max_length=64, host_path="packed")
    seen = []
    for layer in ours.model.bert.encoder.layer:
        layer.intermediate.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    tokens = ours.tokenizer.pairs(["bone"] * 5, passages(5))
    ours.predict([("bone", text) for text in passages(5)])
    assert seen == [tokens.lengths.sum(), 5]


def test_a_mask_is_refused(tmp_path: Path) -> None:
    ours = Reranker(write_tiny_bert(tmp_path / "m"), device="cpu", max_length=64, host_path="packed")
    ids = torch.full((2, 8), 5)
    with pytest.raises(ValueError, match="packed input takes no attention_mask"):
        ours.model(input_ids=ids, attention_mask=torch.ones_like(ids).tril())


@pytest.mark.parametrize(("budget", "most"), [(100, None), (1, None), (10_000, None), (100, 2), (10_000, 3)])
def test_a_plan_holds_every_sequence_once(budget: int, most: int | None) -> None:
    lengths = np.array([50, 3, 40, 40, 7, 60, 50, 12, 90, 1])
    batches = packing.plan(lengths, budget, most)
    assert sorted(np.concatenate(batches)) == list(range(10))
    totals = [int(lengths[batch].sum()) for batch in batches]
    assert max(totals) <= budget + lengths.max()
    assert max(map(len, batches)) <= (most or 10)
    if most is None and budget < 10_000:
        assert len(batches) == min(10, -(-int(lengths.sum()) // budget))
    assert packing.plan(np.zeros(0, np.int64), budget, most) == []


def test_a_batch_that_is_filled_up() -> None:
    tokens = tokens_of([4, 2, 3])
    values = np.full(packing.size_of(8, 4), -1, dtype=np.int32)
    packing.fill(values, tokens, np.array([2, 0]), (8, 4), with_types=True, positions_from=2)
    batch = packing.PackedBatch(torch.from_numpy(values), 8, 4, 7, 2, 4)
    ids, types, positions, bounds, first = (part.tolist() for part in batch.parts())
    assert ids == [*tokens.ids[6:], *tokens.ids[:4], 0]
    assert types == [*tokens.type_ids[6:], *tokens.type_ids[:4], 0]
    assert positions == [2, 3, 4, 2, 3, 4, 5, 0]
    assert bounds == [0, 3, 7, 7, 7]
    assert first == [0, 3, 7, 7]
    tokens.ids[[1, 2, 6]] = 1
    packing.fill(values, tokens, np.array([2, 0]), (8, 4), with_types=True, positions_from=2)
    assert batch.parts()[2].tolist() == [1, 2, 3, 2, 1, 1, 3, 0]
    with pytest.raises(ValueError, match="7 tokens in 2 sequences do not fit 7 tokens in 4"):
        packing.fill(values, tokens, np.array([2, 0]), (7, 4), with_types=True, positions_from=0)


def test_prepacked_layers_are_linear_layers() -> None:
    assert can_prepack(CPU, torch.float32)
    assert not can_prepack(CPU, torch.bfloat16)
    torch.manual_seed(0)
    for bias in (True, False):
        layer = torch.nn.Linear(48, 24, bias=bias)
        x = torch.randn(1, 33, 48)
        with torch.inference_mode():
            exact = layer.double()(x.double())
            own = (layer.float()(x) - exact).abs().max()
            assert (PrepackedLinear(layer.float())(x) - exact).abs().max() <= 2 * own + 1e-7


# What was expected


def test_every_path_is_one_idea_more() -> None:
    switches = ("fast_tokens", "packed", "prepacked", "graphs", "overlapped", "fused")
    for device in ("cpu", "cuda"):
        paths = host_path.of_device(device)
        on = [{name for name in switches if getattr(path, name)} for path in paths]
        assert all(len(after - before) == 1 and before < after for before, after in itertools.pairwise(on))
    assert all(path.prediction and path.idea for path in host_path.PATHS)
