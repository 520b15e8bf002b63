"""The side stage `finetune`: its groups, two steps on a tiny model, and what it refuses."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import WORDS, write_own_attention, write_tiny_bert

import stages.finetune as stage_module
from stages._run import Stage
from tilerank import finetune
from tilerank.config import load_settings
from tilerank.errors import TilerankError
from tilerank.finetune import Recipe
from tilerank.models import describe, file_sha256
from tilerank.reranker import Reranker
from tilerank.types import Dataset, Document, Pool, Query

RECIPE = Recipe(epochs=2, groups=2, hard_negatives=3, max_length=24, learning_rate=1e-3)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("encoder"), "bi-encoder")


def _dataset(queries: int = 5, documents: int = 12) -> tuple[Dataset, tuple[Pool, ...]]:
    """Query i is word i; document i holds it and is relevant; every pool is the whole corpus."""
    texts = tuple(Document(f"d{i}", WORDS[i], f"{WORDS[i + 1]} {WORDS[i + 2]}") for i in range(documents))
    asked = tuple(Query(f"q{i}", WORDS[i]) for i in range(queries))
    qrels = {query.query_id: {f"d{i}": 1, "gone": 1} for i, query in enumerate(asked)}
    ids = tuple(document.doc_id for document in texts)
    pools = tuple(Pool(query.query_id, ids, (1.0,) * documents) for query in asked)
    return Dataset("tiny", texts, asked, qrels), pools


def test_a_group_is_a_relevant_passage_then_others() -> None:
    dataset, pools = _dataset()
    groups = finetune.training_groups(dataset, pools, RECIPE, epoch=0)
    texts = {document.contents for document in dataset.documents}
    assert sorted(group.query for group in groups) == sorted(query.text for query in dataset.queries)
    for group in groups:
        assert group.passages[0].split()[0] == group.query  # the relevant one
        assert len(group.passages) == len(set(group.passages)) == 1 + 3 + 1
        assert set(group.passages) <= texts


def test_groups_follow_from_seed_and_epoch() -> None:
    dataset, pools = _dataset()
    first = finetune.training_groups(dataset, pools, RECIPE, epoch=0)
    assert first == finetune.training_groups(dataset, pools, RECIPE, epoch=0)
    assert first != finetune.training_groups(dataset, pools, RECIPE, epoch=1)
    assert first != finetune.training_groups(dataset, pools, Recipe(epochs=2, hard_negatives=3, seed=1), epoch=0)


def test_small_pools_are_made_up_and_lost_documents_are_no_group() -> None:
    dataset, pools = _dataset()
    short = tuple(Pool(pool.query_id, pool.doc_ids[:1], pool.scores[:1]) for pool in pools)
    assert {len(group.passages) for group in finetune.training_groups(dataset, short, RECIPE, epoch=0)} == {5}
    lost = Dataset("tiny", dataset.documents, dataset.queries, {**dataset.qrels, "q0": {"gone": 1}, "q1": {"d1": 0}})
    assert len(finetune.training_groups(lost, pools, RECIPE, epoch=0)) == 3
    small, small_pools = _dataset(queries=2, documents=4)
    with pytest.raises(TilerankError, match="tiny has 4 documents; a group takes 4 that are irrelevant"):
        finetune.training_groups(small, small_pools, RECIPE, epoch=0)


def test_the_number_of_steps() -> None:
    dataset, _ = _dataset()
    assert finetune.steps_of(dataset, RECIPE) == 2 * 3  # five queries, two a step
    with pytest.raises(TilerankError, match="no training query"):
        finetune.steps_of(Dataset("none", dataset.documents, dataset.queries, {"q0": {"d0": 0}}), RECIPE)


def test_the_learning_rate_rises_then_falls() -> None:
    rate = finetune._rate(20, 0.1)
    assert [rate(step) for step in (0, 1, 2, 11, 19, 20)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 1 / 18, 0.0])


def test_mantissas_are_rounded_to_nearest_even() -> None:
    unit = 2.0**-7  # of a number in [1, 2) with 7 mantissa bits
    values = torch.tensor(
        [1.0, 1 + unit / 2, 1 + 1.5 * unit, 1 + 0.625 * unit, -1 - 1.5 * unit, 0.0, -0.0, 2 - unit / 4]
    )
    expected = [1.0, 1.0, 1 + 2 * unit, 1 + unit, -1 - 2 * unit, 0.0, -0.0, 2.0]
    assert finetune.round_mantissa(values.half(), 7).tolist() == expected
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(0)).half()
    rounded = finetune.round_mantissa(weights, 7)
    assert ((rounded - weights).float().abs() <= weights.float().abs() * 2.0**-8).all()
    assert (rounded.view(torch.int16) & 0b111 == 0).all()
    assert torch.equal(finetune.round_mantissa(weights, 10), weights)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_steps_make_a_cross_encoder_and_the_same_bytes_again(encoder: Path, tmp_path: Path, device: str) -> None:
    dataset, pools = _dataset()
    digests = []
    state = torch.random.get_rng_state()
    for name in ("first", "second"):
        torch.manual_seed(len(digests))  # what the process drew before must not matter
        model = finetune.train(encoder, dataset, pools, RECIPE, device, steps=2)
        (tmp_path / name).mkdir()
        digests.append(finetune.save(model, encoder, tmp_path / name, RECIPE))
    torch.random.set_rng_state(state)
    assert digests[0] == digests[1]
    assert not torch.are_deterministic_algorithms_enabled()
    assert describe(tmp_path / "first").kind == "cross-encoder"
    assert json.loads((tmp_path / "first" / "config.json").read_text())["dtype"] == "float16"
    ranked = Reranker(tmp_path / "first", device="cpu", max_length=24).rank("cell", ["cell mouse", "old data"])
    assert len(ranked) == 2
    other = finetune.train(encoder, dataset, pools, Recipe(epochs=2, groups=2, hard_negatives=3, seed=1), device, 2)
    (tmp_path / "other").mkdir()
    assert finetune.save(other, encoder, tmp_path / "other", RECIPE) != digests[0]


def test_training_learns_what_tells_relevant_passages_apart(encoder: Path) -> None:
    dataset, pools = _dataset()
    documents = tuple(
        Document(document.doc_id, document.title, "high " * 5 if index < 5 else "low " * 5)
        for index, document in enumerate(dataset.documents)
    )
    marked = Dataset("marked", documents, dataset.queries, dataset.qrels)
    irrelevant = tuple(Pool(pool.query_id, pool.doc_ids[5:], pool.scores[5:]) for pool in pools)
    rates = {"learning_rate": 0.02, "head_learning_rate": 0.02}  # the tiny encoder's weights are wide
    recipe = Recipe(groups=5, hard_negatives=4, random_negatives=0, max_length=24, **rates)
    tokenizer = finetune.load_tokenizer(encoder, 24)
    groups = finetune.training_groups(marked, irrelevant, recipe, epoch=99)

    def loss(steps: int) -> float:
        model = finetune.train(encoder, marked, irrelevant, recipe, "cpu", steps)
        with torch.no_grad():
            return finetune._loss(model, tokenizer, groups, recipe, "cpu").item()

    assert loss(40) < 0.3 < loss(1)


def test_gradients_do_not_depend_on_how_many_groups_are_computed_at_once(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, pools = _dataset()
    tokenizer = finetune.load_tokenizer(encoder, 24)
    groups = finetune.training_groups(dataset, pools, RECIPE, epoch=0)[:4]
    model = finetune.load_model(encoder, "cross-encoder", torch.float32, "sdpa", new_head=True)
    total = finetune._step(model, tokenizer, groups, RECIPE, "cpu")
    apart = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    together = finetune._loss(model, tokenizer, groups, RECIPE, "cpu")
    together.backward()
    assert total == pytest.approx(together.item(), rel=1e-5)
    for parameter, gradient in zip(model.parameters(), apart, strict=True):
        np.testing.assert_allclose(gradient, parameter.grad, atol=1e-5 * float(parameter.grad.abs().max() + 1))


@pytest.mark.parametrize("family", ["MPNet", "DebertaV2"])
def test_an_encoder_that_has_no_sdpa_can_be_trained(encoder: Path, tmp_path: Path, family: str) -> None:
    dataset, pools = _dataset()
    folder = write_own_attention(tmp_path / family, encoder, family)
    before = finetune.load_model(folder, "cross-encoder", torch.float32, None)
    after = finetune.train(folder, dataset, pools, RECIPE, "cpu", steps=1)
    changed = [not torch.equal(*pair) for pair in zip(before.parameters(), after.parameters(), strict=True)]
    assert np.mean(changed) > 0.8


def test_a_loss_that_is_no_number_stops(encoder: Path) -> None:
    dataset, pools = _dataset()
    wild = Recipe(groups=2, hard_negatives=3, max_length=24, learning_rate=1e30, head_learning_rate=1e30)
    with pytest.raises(TilerankError, match=r"the loss is .* at step"):
        finetune.train(encoder, dataset, pools, wild, "cpu", steps=8)


def test_only_matrices_decay_and_the_head_has_its_own_rate(encoder: Path) -> None:
    model = finetune.load_model(encoder, "cross-encoder", torch.float32, "sdpa", new_head=True)
    groups = finetune._parameter_groups(model, Recipe())
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    for group in groups:
        assert {parameter.dim() > 1 for parameter in group["params"]} == {group["weight_decay"] > 0}
    head = [group for group in groups if group["lr"] == Recipe().head_learning_rate]
    assert sum(parameter.numel() for group in head for parameter in group["params"]) == 32 + 1


# The stage


def _stage(repository: Path, folder: Path, **options: Any) -> Stage:
    """The stage on a small BEIR data set, as `stages._run` would hand it over, on the CPU."""
    settings = load_settings(repository / "params.yaml")
    settings = replace(
        settings,
        dataset=replace(settings.dataset, name="tiny", source="local", split="test", sha256={}),
        workload=replace(settings.workload, queries=2, candidates=5, max_length=24),
        machine=replace(settings.machine, name="cpu"),
    )
    asked = argparse.Namespace(**{"steps": None, "name": None, "seed": 0, "verify": False, **options})
    tracker = SimpleNamespace(log_metrics=lambda record: None)
    return Stage("finetune", settings, folder, folder, asked, {}, tracker)


@pytest.fixture
def beir(tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`tiny` as a BEIR folder with a training and a test split; the tiny encoder takes the packaged one's place."""
    folder = tmp_path / "data" / "tiny"
    (folder / "qrels").mkdir(parents=True)
    dataset, _ = _dataset(queries=6, documents=30)
    corpus = [{"_id": one.doc_id, "title": one.title, "text": one.text} for one in dataset.documents]
    queries = [{"_id": one.query_id, "text": one.text} for one in dataset.queries]
    for name, records in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    for split, numbers in (("train", range(4)), ("test", range(4, 6))):
        rows = "".join(f"q{number}\td{number}\t1\n" for number in numbers)
        (folder / "qrels" / f"{split}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{rows}")
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / "all-minilm-l6").symlink_to(encoder)
    monkeypatch.setenv("TILERANK_DATA", str(folder.parent))
    monkeypatch.setenv("TILERANK_MODELS", str(tmp_path / "shelf"))
    return folder


def test_the_stage_writes_a_model_and_its_record(repository: Path, beir: Path, tmp_path: Path) -> None:
    stage_module.run(_stage(repository, tmp_path, steps=1, verify=True))
    folder = tmp_path / "models" / "minilm-l6-tiny-1-steps"
    record = json.loads((folder / "finetune.json").read_text())
    assert record["sha256"] == file_sha256(folder / "model.safetensors")
    assert record["encoder_sha256"] == file_sha256(tmp_path / "shelf" / "all-minilm-l6" / "model.safetensors")
    assert record["same_bytes_again"] is True
    assert record["steps"] == 1
    assert record["queries"] == 2
    assert 0 <= record["ndcg10"] <= 1
    assert (record["recipe"]["hard_negatives"], record["recipe"]["groups"]) == (14, 1)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [folder.name]  # nothing half-written
    assert not (tmp_path / "metrics").exists()  # a model cut short is no record
    assert len(Reranker(folder, device="cpu", max_length=24).rank("cell", ["cell", "data"])) == 2


def test_what_the_stage_refuses(repository: Path, beir: Path, tmp_path: Path) -> None:
    with pytest.raises(TilerankError, match="--steps N"):
        stage_module.run(_stage(repository, tmp_path))
    with pytest.raises(TilerankError, match="without a path"):
        stage_module.run(_stage(repository, tmp_path, steps=1, name="../elsewhere"))
    stage = _stage(repository, tmp_path, steps=1)
    pydocs = replace(stage.settings, dataset=replace(stage.settings.dataset, source="pydocs"))
    with pytest.raises(TilerankError, match="pydocs has no training split"):
        stage_module.run(replace(stage, settings=pydocs))
    (beir / "qrels" / "train.tsv").unlink()
    with pytest.raises(TilerankError, match=r"train\.tsv is missing"):
        stage_module.run(stage)
    assert not (tmp_path / "models").exists()
