"""The figures of the drop-in: what the stage `integrate_hf` records on a CPU, and how times become a record."""

from __future__ import annotations

import argparse
import functools
import json
from dataclasses import replace

import numpy as np
import pytest
from tiny_models import WORDS, write_own_attention, write_tiny_bert
from transformers import AttentionInterface, AttentionMaskInterface

import tilerank
from stages._run import Stage
from stages.integrate_hf import run
from tilerank import retrieval
from tilerank.bench import drop_in
from tilerank.bench.rerank import Call, RerankSetup
from tilerank.bench.timing import Row
from tilerank.config import load_settings
from tilerank.errors import TilerankError
from tilerank.kernels import huggingface
from tilerank.quality import Task
from tilerank.types import Pool


@pytest.fixture(autouse=True)
def unregistered():
    """Leave no registration of one test to the next."""
    yield
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(drop_in.IMPLEMENTATION, None)


@pytest.fixture(params=["cross-encoder", "bi-encoder"])
def setup(request, tmp_path):
    folder = write_tiny_bert(tmp_path / request.param, request.param)
    return RerankSetup(folder, request.param, "cpu", 64, "auto", 8)


def passage(words):
    return " ".join(WORDS[index % len(WORDS)] for index in range(words, 2 * words))


CALL = Call("risk of cancer", tuple(passage(words) for words in (30, 2, 11, 5, 23, 40, 17, 3)))


def register_without_mask(name, variant):
    AttentionInterface.register(name, functools.partial(huggingface.attention_forward, variant=variant))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_check_on_a_cpu_passes_and_times_nothing(setup, precision):
    record = drop_in.check_drop_in(setup, precision, CALL)
    assert set(record) == {"timed", "pairs", "max_abs_error", "sdpa_max_abs_error"}
    assert record["timed"] is False
    assert record["pairs"] == drop_in.CHECK_PAIRS
    assert 0 < record["max_abs_error"] < 0.5


def test_check_sees_a_lost_mask(setup, monkeypatch):
    monkeypatch.setattr(tilerank, "register", register_without_mask)
    assert "above" in drop_in.check_drop_in(setup, "fp32", CALL)["failure"]


def test_only_the_attention_is_swapped(setup):
    baseline, ours = drop_in.scorers(setup, "fp32")
    for scorer, called, absent in (
        (baseline, drop_in.SDPA_OPERATOR, drop_in.OUR_OPERATOR),
        (ours, drop_in.OUR_OPERATOR, drop_in.SDPA_OPERATOR),
    ):
        forward = drop_in._forward(scorer, CALL)
        batches = len(scorer.batches(CALL.query, CALL.passages))
        assert drop_in.attention_time(forward, called).calls == 2 * batches, "one a layer and batch"
        assert drop_in.attention_time(forward, absent).calls == 0
    np.testing.assert_allclose(
        ours.score(CALL.query, CALL.passages), baseline.score(CALL.query, CALL.passages), atol=1e-4
    )


def test_the_rerank_path_may_be_sdpa(setup):
    _, ours = drop_in.scorers(replace(setup, attention="sdpa"), "fp32")
    assert drop_in.attention_time(drop_in._forward(ours, CALL), drop_in.OUR_OPERATOR).calls > 0


@pytest.mark.parametrize("lose_mask", [False, True])
def test_quality_of_every_task_beside_the_unmodified_model(setup, monkeypatch, lose_mask):
    if lose_mask:
        monkeypatch.setattr(tilerank, "register", register_without_mask)
    passages = {f"d{index}": text for index, text in enumerate(CALL.passages)}
    few = tuple(passages)[:3]
    tasks = {
        name: Task({"q": {"d1": 1}}, {"q": CALL.query}, {"q": candidates}, passages)
        for name, candidates in (("drop_in", tuple(passages)), ("drop_in_stub", few))
    }
    ranked = drop_in.rank_tasks(setup, ("fp32",), tasks)
    assert {name: set(records) for name, records in ranked.items()} == {"drop_in": {"fp32"}, "drop_in_stub": {"fp32"}}
    for record in (records["fp32"] for records in ranked.values()):
        assert record["queries"] == 1
        assert (record["max_abs_logit_diff"] > 1e-3) == lose_mask
    if not lose_mask:
        assert {records["fp32"]["top10_exact"] for records in ranked.values()} == {1.0}


def row(name, milliseconds, error=1e-6):
    return Row(name, tuple(value / 1e3 for value in milliseconds), error, 1e-5)


def test_summary_of_times():
    rows = {
        "sdpa": [row("sdpa", [10, 12, 11]), row("sdpa", [21, 21, 21])],
        "tilerank": [row("tilerank", [9, 8, 7]), row("tilerank", [12, 12, 90])],
    }
    record = drop_in.summarise(rows, {"sdpa": 16e-3, "tilerank": 4e-3}, {"void tilerank::naive::kernel<float>(int)"})
    assert record["variants"] == ["naive"]
    assert (record["baseline_ms"], record["ms"]) == (pytest.approx(16), pytest.approx(10))
    assert record["speedup"] == pytest.approx(1.6)
    assert record["attention_share"] == pytest.approx(0.5)
    assert record["kernel_speedup"] == pytest.approx(4)
    assert record["predicted_speedup"] == pytest.approx(1.6)
    assert (record["queries"], record["repetitions"]) == (2, 6)


@pytest.mark.parametrize("error", [3.0, float("nan")])
def test_a_wrong_result_has_no_time(error):
    rows = {"sdpa": [row("sdpa", [10])] * 2, "tilerank": [row("tilerank", [9]), row("tilerank", [], error)]}
    record = drop_in.summarise(rows, {"sdpa": 1e-3, "tilerank": 1e-3}, set())
    assert "is above" in record["failure"]
    assert record["timed"] is False
    assert not {"ms", "speedup", "predicted_speedup"} & set(record)


def test_amdahl():
    assert drop_in.amdahl(0.0, 7.0) == 1
    assert drop_in.amdahl(1.0, 7.0) == pytest.approx(7)
    assert drop_in.amdahl(0.33, 1e9) == pytest.approx(1 / 0.67)


class Tracker:
    def log_metrics(self, record):
        pass


@pytest.fixture
def stage(repository, tmp_path, monkeypatch):
    """The stage on machine `cpu`, with canonical files and pools as the earlier stages write them."""
    monkeypatch.setenv("TILERANK_MODELS", str(tmp_path / "models"))
    write_tiny_bert(tmp_path / "models" / "tiny")
    canonical, candidates = tmp_path / "data" / "canonical", tmp_path / "data" / "candidates"
    canonical.mkdir(parents=True)
    candidates.mkdir()
    documents = {f"d{index}": text for index, text in enumerate(CALL.passages)}
    (canonical / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": key, "title": "", "text": text}) + "\n" for key, text in documents.items())
    )
    (canonical / "queries.jsonl").write_text(json.dumps({"_id": "q1", "text": CALL.query}) + "\n")
    (canonical / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td3\t1\n")
    pool = Pool("q1", tuple(documents), tuple(float(8 - index) for index in range(8)))
    retrieval.write_pools(candidates / "pools.jsonl", [pool])
    settings = load_settings(repository / "params.yaml")
    settings = replace(
        settings,
        model=replace(settings.model, name="tiny", sha256=None),
        workload=replace(settings.workload, precisions=("fp32",)),
        machine=replace(settings.machine, name="cpu"),
    )
    return Stage("integrate_hf", settings, tmp_path, tmp_path, argparse.Namespace(), {"commit": "abc"}, Tracker())


def recorded(stage):
    return json.loads((stage.root / "metrics/cpu/integrate_hf.json").read_text())


def test_stage_records_correctness_and_no_time(stage, capsys):
    run(stage)
    record = recorded(stage)
    assert record["provenance"] == {"commit": "abc"}
    assert set(record) == {"drop_in", "provenance"}, "no ranking and no time from a machine without a GPU"
    assert record["drop_in"]["fp32"]["timed"] is False
    assert "failure" not in record["drop_in"]["fp32"]
    assert "FAIL" not in capsys.readouterr().out


@pytest.mark.parametrize("family", ["MPNet", "DebertaV2"])
def test_a_model_that_computes_attention_by_itself_is_no_drop_in(setup, stage, capsys, tmp_path, family):
    """transformers keeps its own attention when another is set: it must not be recorded as ours."""
    folder = write_own_attention(tmp_path / "models" / "tiny", setup.path, family)
    own = replace(setup, path=folder, kind="cross-encoder", max_length=64)
    reason = f"{family}ForSequenceClassification computes attention by itself: there is nothing to swap"
    assert drop_in.refusal(own) == reason
    with pytest.raises(TilerankError, match=reason):
        drop_in.scorers(own, "fp32")
    run(stage)
    assert recorded(stage)["drop_in"] == {"fp32": {"timed": False, "failure": reason}}
    assert f"integrate_hf: fp32: FAIL ({reason})" in capsys.readouterr().out


def test_a_model_whose_attention_is_called(setup):
    assert drop_in.refusal(setup) is None


def test_stage_tells_a_failure(stage, monkeypatch, capsys):
    monkeypatch.setattr(tilerank, "register", register_without_mask)
    run(stage)
    assert "failure" in recorded(stage)["drop_in"]["fp32"]
    assert "integrate_hf: fp32: FAIL" in capsys.readouterr().out
