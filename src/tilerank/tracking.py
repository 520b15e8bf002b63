"""MLflow: one parent run a pipeline run, one nested run a stage (and variant).

Each stage is a process of its own, so the parent is found, or created, by a tag: the hash of commit and
params. SIGKILL cannot be caught: every stage start sets runs whose process is gone from RUNNING to FAILED.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilerank.config import Settings
from tilerank.errors import TilerankError

STORE_FILE = "mlflow.db"
ARTIFACT_FOLDER = "mlartifacts"
UI_VIEW = "workflowType=machine_learning"
"""The part of an address that makes MLflow's UI show runs; otherwise it opens on traces of language models."""

_TAG_PIPELINE = "tilerank.pipeline"
_TAG_STAGE = "tilerank.stage"
_TAG_PROCESS = "tilerank.process"
_NAME_NOT_ALLOWED = re.compile(r"[^\w\-. /:]")


@dataclass(frozen=True, slots=True)
class StageRun:
    """An open MLflow run of one stage."""

    run_id: str
    client: Any  # mlflow.MlflowClient

    def log_metrics(self, record: Mapping[str, Any]) -> None:
        """Log every number of a nested record under its dotted key."""
        import math
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = {
            metric_name(key): float(value)
            for key, value in flatten(record).items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        metrics = [Metric(key, value, now, 0) for key, value in numbers.items()]
        for start in range(0, len(metrics), 1000):  # the limit of one batch
            self.client.log_batch(self.run_id, metrics=metrics[start : start + 1000])

    def log_artifact(self, path: Path) -> None:
        """Attach a file (a picture, a report) to the run."""
        self.client.log_artifact(self.run_id, str(path))

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags; values that are None are left out."""
        for key, value in tags.items():
            if value is not None:
                self.client.set_tag(self.run_id, key, str(value))


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings into one with dotted keys; lists are left whole."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            flat.update(flatten(value, name))
        else:
            flat[name] = value
    return flat


def metric_name(key: str) -> str:
    """``key`` with every character that MLflow does not allow in a metric's name replaced by ``_``
    (`nDCG@10` becomes `nDCG_10`)."""
    return _NAME_NOT_ALLOWED.sub("_", key)


def tracking_uri(root: Path) -> str:
    """``MLFLOW_TRACKING_URI``, or the sqlite store in ``root``."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root.resolve() / STORE_FILE}"


def _process_tag() -> str:
    """Names this process: host, pid and start time, so that a reused pid is not taken for the same process."""
    return f"{socket.gethostname()}:{os.getpid()}:{_start_time(os.getpid())}"


def _start_time(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        return text.rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return "unknown"


def _is_gone(process_tag: str) -> bool:
    """Whether the process named by ``process_tag`` ran on this host and has ended."""
    host, _, rest = process_tag.partition(":")
    pid, _, started = rest.partition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return started != "unknown" and _start_time(int(pid)) != started


def _lock_file(root: Path) -> Path:
    """Beside the local store, which copied trees share; stages of one tree that use a server share its root."""
    uri = tracking_uri(root)
    store = Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else root / STORE_FILE
    return store.with_name(f"{store.name}.lock")


@contextlib.contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Be the only one that looks for runs and makes them; the system frees the lock when the process ends, however
    it ends."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system: stages of one pipeline then must not start at the same moment
        yield
        return
    with open(_lock_file(root), "w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def open_client(root: Path) -> Any:
    """A client of the store of `tracking_uri`, quick to give up on a server that does not answer."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # A server that cannot be reached must fail a stage within seconds, not after MLflow's minutes of retries.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    import logging

    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=tracking_uri(root))


def unusable(root: Path, error: Exception) -> TilerankError:
    """The one-line error for a store that MLflow cannot work with."""
    reason = str(error).splitlines()[0]
    return TilerankError(
        f"MLflow at {tracking_uri(root)} cannot be used ({reason}); start the server, "
        "or unset MLFLOW_TRACKING_URI to use the local store"
    )


def ensure_experiment(client: Any, root: Path, name: str) -> str:
    """The id of the experiment ``name``, which is made if there is none."""
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return experiment.experiment_id
    uri = tracking_uri(root)
    location = None
    if uri.startswith("sqlite:///"):
        location = (Path(uri.removeprefix("sqlite:///")).parent / ARTIFACT_FOLDER).as_uri()
    return client.create_experiment(name, artifact_location=location)


def search(client: Any, experiment_id: str, query: str) -> list[Any]:
    """Every run of the experiment that ``query`` finds, page by page."""
    runs, token = [], None
    while True:
        page = client.search_runs([experiment_id], query, max_results=1000, page_token=token)
        runs.extend(page)
        token = page.token
        if not token:
            return runs


def _fail_dead_runs(client: Any, experiment_id: str) -> None:
    for run in search(client, experiment_id, "attributes.status = 'RUNNING'"):
        if _is_gone(run.data.tags.get(_TAG_PROCESS, "")):
            client.set_terminated(run.info.run_id, status="FAILED")


def pipeline_key(commit: str | None, settings: Settings) -> str:
    """What makes two stages belong to the same pipeline run: the same commit and the same settings."""
    return hashlib.sha256(f"{commit}\n{settings!r}".encode()).hexdigest()[:16]


@contextlib.contextmanager
def stage_run(
    root: Path, settings: Settings, stage: str, commit: str | None, tags: Mapping[str, Any]
) -> Iterator[StageRun]:
    """Open a nested run for ``stage``; it ends FINISHED, or FAILED when the body raises.

    Raises `TilerankError` when the tracking store cannot be reached, before the body runs.
    """
    from mlflow.entities import Param
    from mlflow.exceptions import MlflowException

    params = [Param(name, str(value)) for name, value in flatten(asdict(settings)).items()]
    key = pipeline_key(commit, settings)
    own = {_TAG_PROCESS: _process_tag(), _TAG_PIPELINE: key, **{k: str(v) for k, v in tags.items() if v is not None}}
    try:
        with exclusive(root):
            client = open_client(root)
            experiment_id = ensure_experiment(client, root, settings.tracking.experiment)
            _fail_dead_runs(client, experiment_id)
            parents = search(client, experiment_id, f"tags.`{_TAG_PIPELINE}` = '{key}' and tags.kind = 'pipeline'")
            if parents:
                parent_id = parents[0].info.run_id
            else:
                name = f"{settings.dataset.name} {settings.model.name} {settings.retrieval.kind} {key[:6]}"
                parent = client.create_run(experiment_id, run_name=name, tags={**own, "kind": "pipeline"})
                parent_id = parent.info.run_id
                client.log_batch(parent_id, params=params)
        client.set_tag(parent_id, _TAG_PROCESS, own[_TAG_PROCESS])
        client.update_run(parent_id, status="RUNNING")
        nested = client.create_run(
            experiment_id,
            run_name=stage,
            tags={**own, "kind": "stage", _TAG_STAGE: stage, "mlflow.parentRunId": parent_id},
        )
        client.log_batch(nested.info.run_id, params=params)
    except MlflowException as error:
        raise unusable(root, error) from error
    status = "FAILED"
    try:
        yield StageRun(nested.info.run_id, client)
        status = "FINISHED"
    finally:
        client.set_terminated(nested.info.run_id, status=status)
        client.set_terminated(parent_id, status=status)


def comparison_page(root: Path, experiment: str, stage: str | None) -> str:
    """The address, below the server's, that compares the latest two finished runs of a stage.

    stage: its run's name; None: the stage that ran last and ran at least twice, else the last run alone.
    """
    import json
    from urllib.parse import quote

    client = open_client(root)
    found = client.get_experiment_by_name(experiment)
    runs = [] if found is None else search(client, found.experiment_id, "tags.kind = 'stage'")
    runs = [run for run in runs if run.info.status == "FINISHED" and stage in (None, run.info.run_name)]
    if not runs:
        what = f"finished run of {stage}" if stage else "finished run"
        raise TilerankError(f"no {what} in {tracking_uri(root)}; `make quickstart` makes some")
    by_name: dict[str, list[str]] = {}
    for run in sorted(runs, key=lambda run: run.info.start_time, reverse=True):
        by_name.setdefault(run.info.run_name, []).append(run.info.run_id)
    chosen = next((ids[:2] for ids in by_name.values() if len(ids) > 1), next(iter(by_name.values()))[:1])
    if len(chosen) == 1:
        return f"#/experiments/{found.experiment_id}/runs/{chosen[0]}?{UI_VIEW}"
    compared = f"runs={quote(json.dumps(chosen))}&experiments={quote(json.dumps([found.experiment_id]))}"
    return f"#/compare-runs?{compared}&{UI_VIEW}"
