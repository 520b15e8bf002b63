"""The stage `report`: what it writes, from committed records alone, in a tree of its own."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from stages._run import Stage
from stages.report import run
from tilerank.config import load_settings
from tilerank.errors import TilerankError

PROVENANCE = {"commit": "0123456789abcdef", "dirty": False, "cpu": "Example CPU", "time": "2026-11-29T10:00:00+00:00"}
RERANK = {"rerank": {"fp32": {"ms": 812.3, "cross_encoder_ms": 1401.0, "speedup_vs_cross_encoder": 1.725}}}
README = """# Example
<!-- tilerank:rerank:begin -->
<!-- tilerank:rerank:end -->
Prose stays.
<!-- tilerank:ladder:begin -->
<!-- tilerank:ladder:end -->
"""


class Tracker:
    """Remembers what a stage logs."""

    def __init__(self):
        self.metrics, self.artifacts = [], []

    def log_metrics(self, record):
        self.metrics.append(record)

    def log_artifact(self, path):
        assert path.exists()
        self.artifacts.append(path.name)


def write_record(root, name, values):
    folder = root / "metrics" / "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({**values, "provenance": PROVENANCE}), encoding="utf-8")


@pytest.fixture
def stage(repository, tmp_path):
    settings = load_settings(repository / "params.yaml")
    settings = replace(settings, machine=replace(settings.machine, name="cpu"))
    write_record(tmp_path, "bench_rerank", RERANK)
    write_record(tmp_path, "build_kernels_naive", {"digest": "one"})
    write_record(tmp_path, "build_kernels_fused", {"digest": "two"})
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    options = argparse.Namespace()
    return Stage("report", settings, tmp_path, tmp_path, options, {"time": "now"}, Tracker())


def contents(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_writes_summary_page_pictures_and_readme(stage):
    run(stage)
    assert json.loads((stage.root / "metrics/cpu/summary.json").read_text(encoding="utf-8")) == RERANK
    page = (stage.root / "reports/index.html").read_text(encoding="utf-8")
    assert "812 ms" in page
    assert "Example CPU, commit 0123456789, 2026-11-29" in page
    assert [path.name for path in (stage.root / "reports/pictures").iterdir()] == ["rerank-times.svg"]
    readme = (stage.root / "README.md").read_text(encoding="utf-8")
    assert "| fp32 | 812 | 1,401 | 1.73× |" in readme
    assert "*Not recorded on this machine (stage `bench_attention`).*" in readme
    assert "Prose stays." in readme
    assert stage.tracker.metrics == [RERANK]
    assert set(stage.tracker.artifacts) == {"index.html", "rerank-times.svg"}


def test_running_again_changes_no_byte(stage):
    run(stage)
    before = contents(stage.root)
    run(replace(stage, provenance={"time": "later", "commit": "another"}))
    assert contents(stage.root) == before


def test_picture_of_a_record_that_is_gone_is_removed(stage):
    run(stage)
    (stage.root / "metrics/cpu/bench_rerank.json").unlink()
    run(stage)
    assert list((stage.root / "reports/pictures").iterdir()) == []
    assert json.loads((stage.root / "metrics/cpu/summary.json").read_text(encoding="utf-8")) == {}


def test_what_if_leaves_the_tree_alone(stage, tmp_path):
    before = contents(stage.root)
    elsewhere = tmp_path / "build" / "what-if"
    run(replace(stage, output_root=elsewhere))
    assert (elsewhere / "reports/index.html").exists()
    after = contents(stage.root)
    assert {name: after[name] for name in before} == before
    assert {name.split("/")[0] for name in set(after) - set(before)} == {"build"}


def test_tree_without_readme_is_served(stage):
    (stage.root / "README.md").unlink()
    run(stage)
    assert not (stage.root / "README.md").exists()


def test_no_record_is_one_line_that_says_what_to_run(stage):
    shutil.rmtree(stage.root / "metrics")
    with pytest.raises(TilerankError, match="metrics/cpu holds no record; run `dvc repro`"):
        run(stage)
    assert not (stage.root / "reports").exists()


def test_disagreeing_records_write_nothing(stage):
    write_record(stage.root, "other", {"rerank": {"fp32": {"ms": 1.0}}})
    with pytest.raises(TilerankError, match=r"bench_rerank\.json and other\.json disagree about rerank\.fp32\.ms"):
        run(stage)
    assert not (stage.root / "reports").exists()
    assert not (stage.root / "metrics/cpu/summary.json").exists()


def test_as_a_program_in_a_copied_tree(repository, tmp_path):
    for name in ("src", "stages", "cuda", "conf"):
        shutil.copytree(repository / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    parameters = (repository / "params.yaml").read_text(encoding="utf-8")
    (tmp_path / "params.yaml").write_text(parameters, encoding="utf-8")
    machine = load_settings(tmp_path / "params.yaml").machine.name
    write_record(tmp_path, "bench_rerank", RERANK)
    (tmp_path / "metrics/cpu").rename(tmp_path / "metrics" / machine)
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    answer = subprocess.run(
        [sys.executable, "-m", "stages.report"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "812 ms" in (tmp_path / "reports/index.html").read_text(encoding="utf-8")
    assert (tmp_path / "metrics" / machine / "summary.json").exists()
