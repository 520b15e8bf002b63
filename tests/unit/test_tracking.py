"""Runs in MLflow: nested by pipeline, honest about processes that died, safe with several writers."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tilerank import tracking
from tilerank.config import Settings, load_settings
from tilerank.errors import TilerankError


@pytest.fixture(scope="module")
def settings(repository: Path) -> Settings:
    return load_settings(repository / "params.yaml")


@pytest.fixture(autouse=True)
def _local_store(monkeypatch: pytest.MonkeyPatch, empty_store: Path, tmp_path: Path) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_store, tmp_path)


def _runs(root: Path, settings: Settings) -> list:
    client = tracking.open_client(root)
    experiment = client.get_experiment_by_name(settings.tracking.experiment)
    return [] if experiment is None else client.search_runs([experiment.experiment_id], max_results=1000)


def _program(root: Path, repository: Path, body: str) -> list[str]:
    code = f"""
        import os, pathlib, signal, sys
        from tilerank import tracking
        from tilerank.config import load_settings
        settings = load_settings(pathlib.Path({str(repository / "params.yaml")!r}))
        root = pathlib.Path({str(root)!r})
        with tracking.stage_run(root, settings, "stage" + sys.argv[1], "abc", {{}}) as run:
            {body}
    """
    return [sys.executable, "-c", textwrap.dedent(code)]


def test_metric_names_are_allowed_ones() -> None:
    assert tracking.metric_name("quality.nDCG@10") == "quality.nDCG_10"
    assert tracking.flatten({"a": {"b": 1, "c": {"d": [1]}}}) == {"a.b": 1, "a.c.d": [1]}


def test_stages_nest_under_one_parent(tmp_path: Path, settings: Settings) -> None:
    picture = tmp_path / "picture.svg"
    picture.write_text("<svg/>", encoding="utf-8")
    for stage in ("one", "two"):
        with tracking.stage_run(tmp_path, settings, stage, "abc", {"gpu": None, "torch": "2"}) as run:
            run.log_metrics({"rerank": {"fp32": {"ms": 3, "timed": True, "name": "x", "bad": float("nan")}}})
            run.log_artifact(picture)
            run_id = run.run_id
    runs = _runs(tmp_path, settings)
    parents = [run for run in runs if run.data.tags["kind"] == "pipeline"]
    stages = [run for run in runs if run.data.tags["kind"] == "stage"]
    assert len(parents) == 1
    assert {run.info.run_name for run in stages} == {"one", "two"}
    assert {run.data.tags["mlflow.parentRunId"] for run in stages} == {parents[0].info.run_id}
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert stages[0].data.metrics == {"rerank.fp32.ms": 3.0}
    assert stages[0].data.params["retrieval.kind"] == settings.retrieval.kind
    assert "gpu" not in stages[0].data.tags
    assert [item.path for item in tracking.open_client(tmp_path).list_artifacts(run_id)] == ["picture.svg"]
    assert "compare-runs" not in tracking.comparison_page(tmp_path, settings.tracking.experiment, None)
    with tracking.stage_run(tmp_path, settings, "one", "def", {}):
        pass
    assert "compare-runs" in tracking.comparison_page(tmp_path, settings.tracking.experiment, None)
    with pytest.raises(TilerankError, match="no finished run of three"):
        tracking.comparison_page(tmp_path, settings.tracking.experiment, "three")


def test_an_error_and_a_killed_process_end_failed(tmp_path: Path, settings: Settings, repository: Path) -> None:
    with pytest.raises(RuntimeError), tracking.stage_run(tmp_path, settings, "raises", "abc", {}):
        raise RuntimeError
    killed = subprocess.run([*_program(tmp_path, repository, "os.kill(os.getpid(), signal.SIGKILL)"), "K"], check=False)
    assert killed.returncode == -signal.SIGKILL
    status = {run.info.run_name: run.info.status for run in _runs(tmp_path, settings)}
    assert status["raises"] == "FAILED"
    assert status["stageK"] == "RUNNING", "nobody could mark it yet"
    with tracking.stage_run(tmp_path, settings, "next", "abc", {}):
        pass
    status = {run.info.run_name: run.info.status for run in _runs(tmp_path, settings)}
    assert (status["stageK"], status["next"]) == ("FAILED", "FINISHED")


def test_a_living_process_is_not_failed(tmp_path: Path, settings: Settings) -> None:
    with (
        tracking.stage_run(tmp_path, settings, "outer", "abc", {}),
        tracking.stage_run(tmp_path, settings, "inner", "abc", {}),
    ):
        status = {run.info.run_name: run.info.status for run in _runs(tmp_path, settings)}
        assert (status["outer"], status["inner"]) == ("RUNNING", "RUNNING")


def test_eight_writers_lose_nothing(tmp_path: Path, settings: Settings, repository: Path) -> None:
    # Forked after the slow import of MLflow and before it opens the store: eight real processes, started at once.
    code = f"""
        import os, pathlib, sys
        import mlflow
        from tilerank import tracking
        from tilerank.config import load_settings
        root = pathlib.Path({str(tmp_path)!r})
        settings = load_settings(pathlib.Path({str(repository / "params.yaml")!r}))
        children = []
        for index in range(8):
            pid = os.fork()
            if pid == 0:
                with tracking.stage_run(root, settings, f"stage{{index}}", "abc", {{}}) as run:
                    for step in range(5):
                        run.log_metrics({{"value": {{str(step): step + index}}}})
                os._exit(0)
            children.append(pid)
        sys.exit(sum(os.waitpid(pid, 0)[1] != 0 for pid in children))
    """
    answer = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert answer.returncode == 0, f"{answer.returncode} of 8 writers failed"
    runs = _runs(tmp_path, settings)
    assert len([run for run in runs if run.data.tags["kind"] == "pipeline"]) == 1
    for index in range(8):
        (run,) = [run for run in runs if run.info.run_name == f"stage{index}"]
        assert run.info.status == "FINISHED"
        assert run.data.metrics == {f"value.{step}": float(step + index) for step in range(5)}


def test_an_unreachable_server_is_one_line_before_any_work(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with (
        pytest.raises(TilerankError, match=r"127\.0\.0\.1:9 cannot be used .* unset MLFLOW_TRACKING_URI") as caught,
        tracking.stage_run(tmp_path, settings, "one", "abc", {}),
    ):
        pytest.fail("the body must not run")
    assert "\n" not in str(caught.value)


def test_a_reused_process_id_counts_as_gone() -> None:
    here = tracking._process_tag()
    assert not tracking._is_gone(here)
    assert tracking._is_gone(here.rsplit(":", 1)[0] + ":1")
    assert not tracking._is_gone("another-host:1:1")
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    tag = f"{here.split(':')[0]}:{child.pid}:{tracking._start_time(child.pid)}"
    child.wait()
    assert tracking._is_gone(tag)
    assert os.getpid() != child.pid
