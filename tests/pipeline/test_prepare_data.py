"""Stage prepare_data: its outs, its record, and what it leaves when it fails."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
from beir_data import beir_files, contents, dataset_settings, write_folder

from stages import prepare_data
from stages._run import Stage
from tilerank.config import DatasetSettings, load_settings
from tilerank.errors import TilerankError


class Tracker:
    def log_metrics(self, record: object) -> None:
        pass


@pytest.fixture
def stage_for(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stage of a tree in ``tmp_path``, with the given data set."""
    monkeypatch.setenv("TILERANK_DATA", str(tmp_path / "shelf"))
    settings = load_settings(repository / "params.yaml")

    def make(dataset: DatasetSettings) -> Stage:
        return Stage(
            name="prepare_data",
            settings=replace(settings, dataset=dataset),
            root=tmp_path,
            output_root=tmp_path,
            options=argparse.Namespace(),
            provenance={},
            tracker=Tracker(),
        )

    return make


def record(tmp_path: Path) -> dict:
    (path,) = (tmp_path / "metrics").glob("*/prepare_data.json")
    return json.loads(path.read_text())


def test_outs_and_record(stage_for, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "shelf" / "tiny")
    stage = stage_for(dataset_settings())
    prepare_data.run(stage)
    first = contents(tmp_path / "data")
    assert set(first) == {"canonical/corpus.jsonl", "canonical/queries.jsonl", "canonical/qrels.tsv"}
    figures = record(tmp_path)["dataset"]
    sizes = {key: figures[key] for key in ("name", "documents", "queries", "judgements", "missing_documents")}
    assert sizes == {"name": "tiny", "documents": 5, "queries": 3, "judgements": 6, "missing_documents": 1}
    assert "1 judged documents are not in the corpus" in capsys.readouterr().err
    prepare_data.run(stage)
    assert contents(tmp_path / "data") == first


def test_a_failure_leaves_outs_and_record_alone(stage_for, tmp_path: Path) -> None:
    write_folder(tmp_path / "shelf" / "tiny", {**beir_files(), "queries.jsonl": '{"_id": "q1"}\n'})
    with pytest.raises(TilerankError, match=r'queries.jsonl:1: the record has no "text"'):
        prepare_data.run(stage_for(dataset_settings()))
    assert contents(tmp_path / "data") == {}
    assert not (tmp_path / "metrics").exists()
