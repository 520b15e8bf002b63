"""Stage retrieve: pools, token lengths and figures from canonical files."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
from beir_data import contents, dataset_settings, write_folder

from stages import retrieve
from stages._run import Stage
from tilerank import data
from tilerank.config import ModelSettings, load_settings
from tilerank.errors import TilerankError
from tilerank.retrieval import read_pools
from tilerank.token_lengths import read_lengths


class Tracker:
    def log_metrics(self, record: object) -> None:
        pass


@pytest.fixture
def stage(repository: Path, cross_encoder_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """The stage in a tree whose canonical files are the small data set's."""
    monkeypatch.setenv("TILERANK_DATA", str(tmp_path / "shelf"))
    monkeypatch.setenv("TILERANK_MODELS", str(cross_encoder_dir.parent))
    write_folder(tmp_path / "shelf" / "tiny")
    data.prepare(dataset_settings(), tmp_path / "data" / "canonical", tmp_path)
    settings = load_settings(repository / "params.yaml")
    settings = replace(
        settings,
        dataset=dataset_settings(),
        model=ModelSettings(cross_encoder_dir.name, None, None),
        retrieval=replace(settings.retrieval, kind="bm25"),
        workload=replace(settings.workload, candidates=4, max_length=32),
    )
    return Stage(
        name="retrieve",
        settings=settings,
        root=tmp_path,
        output_root=tmp_path,
        options=argparse.Namespace(),
        provenance={},
        tracker=Tracker(),
    )


def record(tmp_path: Path) -> dict:
    (path,) = (tmp_path / "metrics").glob("*/retrieve.json")
    return json.loads(path.read_text())


def test_outs_and_record(stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    retrieve.run(stage)
    first = contents(tmp_path / "data" / "candidates")
    assert set(first) == {"pools.jsonl", "lengths.json"}
    pools = read_pools(tmp_path / "data" / "candidates" / "pools.jsonl")
    lengths = read_lengths(tmp_path / "data" / "candidates" / "lengths.json")
    assert [pool.query_id for pool in pools] == ["q1", "q2", "q3"]
    assert {query_id: len(row) for query_id, row in lengths.lengths.items()} == {
        pool.query_id: len(pool.doc_ids) for pool in pools
    }
    figures = record(tmp_path)
    assert set(figures) == {"workload", "quality", "provenance"}
    workload = figures["workload"]["tiny"]
    histogram = workload.pop("histogram")
    assert set(workload) == {"sequences", "tokens", "mean_tokens", "padded_rows", "square_ratio"}
    assert workload["sequences"] == 1.0  # three candidates for three queries
    assert sum(histogram["rows"]) == 3
    assert histogram["edges"] == [0, 16, 32]
    assert figures["quality"]["bm25_recall50"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert "1 of 3 queries have no candidates and count 0" in capsys.readouterr().err
    retrieve.run(stage)
    assert contents(tmp_path / "data" / "candidates") == first


def test_the_stub_records_no_quality(stage: Stage, tmp_path: Path) -> None:
    stub = replace(stage.settings, retrieval=replace(stage.settings.retrieval, kind="stub"))
    retrieve.run(replace(stage, settings=stub))
    assert set(record(tmp_path)) == {"workload", "provenance"}
    assert all(len(pool.doc_ids) == 4 for pool in read_pools(tmp_path / "data" / "candidates" / "pools.jsonl"))


def test_no_candidates_at_all_leave_no_figure(stage: Stage, tmp_path: Path) -> None:
    """A key without a measurement is absent."""
    (tmp_path / "data" / "canonical" / "corpus.jsonl").write_text('{"_id": "d1", "text": ""}\n')
    retrieve.run(stage)
    assert record(tmp_path) == {"provenance": {}, "quality": {"bm25_ndcg10": 0.0, "bm25_recall50": 0.0}}


def test_a_failure_leaves_the_old_outs(stage: Stage, tmp_path: Path) -> None:
    retrieve.run(stage)
    before = contents(tmp_path / "data" / "candidates")
    too_long = replace(stage.settings, workload=replace(stage.settings.workload, max_length=4096))
    with pytest.raises(TilerankError, match="max_length is 4096, but the position table"):
        retrieve.run(replace(stage, settings=too_long))
    assert contents(tmp_path / "data" / "candidates") == before
    with (tmp_path / "data" / "canonical" / "corpus.jsonl").open("a") as file:
        file.write("{")
    with pytest.raises(TilerankError, match=r"corpus.jsonl:6: not JSON"):
        retrieve.run(stage)
    assert contents(tmp_path / "data" / "candidates") == before
