"""Where a figure comes from: source state, machine, versions, command and time."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilerank.errors import TilerankError
from tilerank.machine import describe_machine

SOURCE_PATHS = ("src", "stages", "cuda", "conf", "dvc.yaml", "pyproject.toml")
"""What a figure can depend on: the paths whose state counts as clean or dirty, and the source hash's input."""

SOURCE_FILE = ".source.json"
"""Written by ``make pack`` (and by the quickstart) for a tree that travels without its git folder."""

_IGNORED = ("__pycache__", ".egg-info", "src/tilerank/_lib/")
"""What is made from the source: a library built ahead of time knows the sources that it was built from itself."""


@dataclass(frozen=True, slots=True)
class SourceState:
    """The source a process runs from. ``commit`` is None in a repository without commits or a tree without git."""

    commit: str | None
    dirty: bool
    source_hash: str


def source_hash(root: Path) -> str:
    """sha256 over path and content of every source file under ``root`` (see `SOURCE_PATHS`)."""
    digest = hashlib.sha256()
    for name in SOURCE_PATHS:
        top = root / name
        files = [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file())
        for path in files:
            relative = path.relative_to(root).as_posix()
            if any(part in relative for part in _IGNORED):
                continue
            digest.update(f"{relative}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def source_state(root: Path) -> SourceState:
    """The commit and whether the source differs from it, from git or from a packed tree's `SOURCE_FILE`."""
    here = source_hash(root)
    packed = root / SOURCE_FILE
    top = _git(root, "rev-parse", "--show-toplevel")
    commit = _git(root, "rev-parse", "HEAD") if top is not None and Path(top).resolve() == root.resolve() else None
    dirty = commit is None or bool(_git(root, "status", "--porcelain", "--", *SOURCE_PATHS))
    if dirty and packed.exists():  # a copy may have been put into a repository without a commit, or over another one
        try:
            record = json.loads(packed.read_text(encoding="utf-8"))
            stated = SourceState(record["commit"], bool(record["dirty"]) or record["source_hash"] != here, here)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise TilerankError(f"{packed} is damaged ({error}); write it again with `make pack`") from error
        if commit is None or not stated.dirty:
            return stated
    return SourceState(commit, dirty=dirty, source_hash=here)


def write_source_file(state: SourceState, destination: Path) -> None:
    """Record the `source_state` of a tree in ``destination``/`SOURCE_FILE`, for a copy of it there."""
    record = {"commit": state.commit, "dirty": state.dirty, "source_hash": state.source_hash}
    (destination / SOURCE_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def collect(root: Path, command: Sequence[str], use_cuda: bool, build_id: str | None = None) -> dict[str, Any]:
    """The provenance that every metrics file carries. Keys without a value are absent."""
    source = source_state(root)
    machine = describe_machine(use_cuda)
    record: dict[str, Any] = {
        "commit": source.commit,
        "dirty": source.dirty,
        "source_hash": source.source_hash,
        "command": " ".join(command),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.system() + " " + platform.machine(),
        "cpu": machine.cpu,
        "cores": machine.cores,
        "gpu": machine.gpu,
        "driver": machine.driver,
        "cuda": machine.cuda,
        "build_id": build_id,
    }
    for package in ("torch", "transformers", "tokenizers", "sentence-transformers", "bm25s", "numpy"):
        record[package.replace("-", "_")] = _version(package)
    return {key: value for key, value in record.items() if value is not None}
