"""The tracked pipeline as a whole: one command, safe against kills, guarded by machine, what-ifs kept apart."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tilerank.config import load_settings


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_every_stage_left_its_record_with_provenance(project) -> None:
    folder = project.root / "metrics" / "cpu"
    names = {path.name for path in folder.glob("*.json")}
    assert {
        "prepare_data.json",
        "retrieve.json",
        "index_passages.json",
        "profile_baseline.json",
        "evaluate_quality.json",
        "bench_rerank.json",
        "integrate_hf.json",
        "bench_attention_naive.json",
        "bench_micro.json",
        "bench_block.json",
        "build_block_reference.json",
        "build_layernorm_reference.json",
        "build_kernels_naive.json",
        "choose_kernels.json",
        "list_sources.json",
        "check_kernels_naive.json",
        "check_block_reference.json",
        "check_layernorm_reference.json",
        "summary.json",
    } <= names
    for path in folder.glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert "null" not in path.read_text(encoding="utf-8"), path
        if path.name != "summary.json":
            assert {"commit", "dirty", "command", "time"} <= set(record["provenance"]), path
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["rerank"]["fp32"]["ms"] > 0
    assert summary["ladder"]["naive"]["timed"] is False
    assert "us" not in summary["ladder"]["naive"], "a GPU kernel is never timed on a CPU"
    assert summary["checks"]["naive"] == {"available": False, "reason": "no CUDA device is used on this machine"}
    assert summary["quality"]["reranker"]["fp32"]["top10_exact"] == 1.0
    assert (project.root / "reports" / "index.html").stat().st_size > 0


def _runs(project, query: str) -> list:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=project.environment["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name(load_settings(project.root / "params.yaml").tracking.experiment)
    return client.search_runs([experiment.experiment_id], query)


def test_every_stage_logged_a_run_nested_under_the_pipelines(project) -> None:
    first = project.check("git rev-list --max-parents=0 HEAD").strip()
    at_first = f"tags.`mlflow.source.git.commit` = '{first}'"
    (parent,) = _runs(project, f"{at_first} and tags.kind = 'pipeline'")
    stages = _runs(project, f"{at_first} and tags.kind = 'stage'")
    names = {run.info.run_name for run in stages}
    assert {"prepare_data", "retrieve", "bench_rerank", "bench_attention naive", "integrate_hf", "report"} <= names
    assert {run.data.tags["mlflow.parentRunId"] for run in stages} == {parent.info.run_id}
    assert {run.info.status for run in (parent, *stages)} == {"FINISHED"}
    (timed,) = (run for run in stages if run.info.run_name == "bench_rerank")
    assert timed.data.metrics["rerank.fp32.ms"] > 0
    assert timed.data.tags["torch"]


def test_nothing_runs_twice(project) -> None:
    before = _digests(project.root / "metrics")
    project.check("dvc repro --quiet")
    assert _digests(project.root / "metrics") == before
    assert project.check("git status --porcelain") == ""


def test_a_what_if_is_kept_apart_and_another_machine_is_refused(project) -> None:
    before = _digests(project.root / "metrics") | _digests(project.root / "data" / "candidates")
    answer = project.run("python -m stages.retrieve retrieval=stub")
    assert answer.returncode == 0, answer.stderr
    (written,) = (project.root / "build" / "what-if").glob("retrieve-*/data/candidates/pools.jsonl")
    assert written.read_bytes() != (project.root / "data" / "candidates" / "pools.jsonl").read_bytes()
    refused = project.run("python -m stages.bench_rerank machine=h200")
    assert refused.returncode == 1
    assert refused.stderr.strip().splitlines()[-1].startswith("bench_rerank: this record belongs to h200")
    assert "make quickstart" in refused.stderr
    assert _digests(project.root / "metrics") | _digests(project.root / "data" / "candidates") == before


def test_an_experiment_in_a_shallow_clone_is_refused(project, tmp_path: Path) -> None:
    """DVC would run it, exit with 0 and keep nothing of it."""
    project.check(f"git clone -q --depth 1 file://{project.root} {tmp_path / 'shallow'}")
    shallow = type(project)(tmp_path / "shallow")
    answer = shallow.run("dvc exp run --temp -S dataset.passages=250 prepare_data")
    assert answer.returncode != 0
    assert "is a shallow clone" in answer.stderr + answer.stdout
    assert "git fetch --unshallow" in answer.stderr + answer.stdout


def test_a_few_steps_of_training_run_on_any_machine(project) -> None:
    """The record's settings name a machine, and the stage stops on any other."""
    assert "stages.finetune --steps 3 machine=cpu" in project.check("make -n model STEPS=3")
    assert "stages.finetune \n" in project.check("make -n model"), "all steps: as recorded"


def test_a_what_if_says_which_overrides_do_not_reach_its_inputs(project) -> None:
    refused = project.run("python -m stages.retrieve dataset.queries=2")
    assert refused.returncode == 1
    assert "made from params.yaml, and dataset.queries would change them" in refused.stderr
    assert "`dvc exp run --temp -S dataset.queries=2 retrieve`" in refused.stderr
    told = project.run("python -m stages.evaluate_quality retrieval=stub workload.queries=1")
    assert told.returncode == 0, told.stderr
    assert "the inputs are those that retrieve made from params.yaml, and retrieval.kind would" in told.stderr
    assert "the inputs are" not in project.run("python -m stages.retrieve retrieval=stub").stderr


def test_missing_input_says_which_stage_makes_it(project, tmp_path: Path) -> None:
    moved = tmp_path / "candidates"
    shutil.move(project.root / "data" / "candidates", moved)
    try:
        answer = project.run("python -m stages.bench_rerank workload.candidates=5")
    finally:
        shutil.move(moved, project.root / "data" / "candidates")
    assert answer.returncode == 1
    assert "run `dvc repro retrieve` first" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(("stage", "seconds"), [("prepare_data", 3.0), ("retrieve", 5.0)])
def test_a_killed_stage_is_simply_run_again(project, stage: str, seconds: float) -> None:
    outputs = [project.root / "data" / "canonical", project.root / "data" / "candidates"]
    before = [_digests(folder) for folder in outputs]
    running = subprocess.Popen(
        [sys.executable, "-m", "dvc", "repro", "--quiet", "--force", "--single-item", stage],
        cwd=project.root,
        env=project.environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(seconds)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    project.check("dvc repro --quiet retrieve")
    assert [_digests(folder) for folder in outputs] == before
    assert "Data and pipelines are up to date" in project.check("dvc status retrieve")
    assert _runs(project, "attributes.status = 'RUNNING'") == [], "what was killed is told as FAILED"
    project.check("git checkout --quiet .")  # the record of the run is another; other files' tests share the project
