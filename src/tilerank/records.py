"""Are the committed records still those of the tree's compiled kernels, data, weights and settings?

Python code is not compared: every edit would make all records stale. Each names the commit that it was made by.

A record is a stage of dvc.yaml with an entry in dvc.lock. `dvc status` compares it with the tree; what git
ignores (data, weights, reports) may be absent on a machine that only reads records, anything else that differs
is stale. Stages without an entry in dvc.lock have no record yet and are not stale.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilerank.errors import TilerankError
from tilerank.report import update_markers

STALE_FILE = "STALE.md"
MARKER = "freshness"

_ABSENT = ("deleted", "not in cache")  # not in the tree; and not in DVC's cache either


@dataclass(frozen=True, slots=True)
class StaleRecord:
    """A recorded stage that no longer matches the tree, and why."""

    stage: str
    reasons: tuple[str, ...]


def find_stale(status: Mapping[str, Any], recorded: frozenset[str], ignored: frozenset[str]) -> tuple[StaleRecord, ...]:
    """Read the answer of `dvc status --json`.

    recorded: stages with an entry in dvc.lock. ignored: paths in the answer that git ignores.
    A stage whose metrics lie in the tree without an entry in the lock is stale too: nothing vouches for them.
    """
    stale = []
    for stage in sorted(status):
        reasons = []
        for change in status[stage]:
            if isinstance(change, str):  # for example "changed command"
                reasons.append(change)
                continue
            for kind, paths in change.items():
                reasons += _reasons(kind, paths, ignored)
        if stage not in recorded:
            # Outs that exist although the lock does not know the stage show as "modified" or "new".
            reasons = [reason for reason in reasons if reason.startswith("changed outs") and "deleted" not in reason]
        if reasons:
            stale.append(StaleRecord(stage, tuple(reasons)))
    return tuple(stale)


def _reasons(kind: str, paths: Mapping[str, Any], ignored: frozenset[str]) -> list[str]:
    reasons = []
    for path, state in sorted(paths.items()):
        if isinstance(state, Mapping):  # parameters: {key: state}
            reasons += [f"{kind}: {path}: {key} {value}" for key, value in sorted(state.items())]
        elif not (state in _ABSENT and path in ignored):
            reasons.append(f"{kind}: {path} {state}")
    return reasons


def _run(root: Path, *command: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=root, input=stdin, capture_output=True, text=True, check=False)


def check(root: Path) -> tuple[StaleRecord, ...]:
    """The stale records of the tree ``root`` (a git checkout)."""
    from ruamel.yaml import YAML

    answer = _run(root, sys.executable, "-m", "dvc", "status", "--json")
    if answer.returncode != 0:
        raise TilerankError(f"dvc status failed: {' '.join((answer.stderr or answer.stdout).split())}")
    status = json.loads(answer.stdout)
    lock = root / "dvc.lock"
    recorded = YAML(typ="safe").load(lock.read_text(encoding="utf-8"))["stages"] if lock.exists() else {}
    paths = sorted({path for changes in status.values() for path in _paths(changes)})
    ignored = _run(root, "git", "check-ignore", "--stdin", stdin="\n".join(paths)) if paths else None
    if ignored is not None and ignored.returncode > 1:
        raise TilerankError(f"records are checked in a git checkout: {ignored.stderr.strip()}")
    return find_stale(status, frozenset(recorded), frozenset(ignored.stdout.split("\n") if ignored else ()))


def _paths(changes: Sequence[Any]) -> list[str]:
    return [path for change in changes if isinstance(change, Mapping) for paths in change.values() for path in paths]


def stale_page(machine: str, stale: Sequence[StaleRecord]) -> str:
    """The text of metrics/<machine>/STALE.md."""
    lines = [f"# Stale records of {machine}", "", "These records do not match the tree any more; their figures stay"]
    lines[-1] += " as they were measured until the stage is run again."
    lines.append("")
    for record in stale:
        lines.append(f"- `{record.stage}`")
        lines += [f"  - {reason}" for reason in record.reasons]
    return "\n".join(lines) + "\n"


def freshness_line(machine: str, stale: Sequence[StaleRecord]) -> str:
    """The README's sentence about the records."""
    if not stale:
        return (
            f"Every record of `{machine}` matches the kernels, data, weights and settings of the tree "
            "(`make records-check`); Python code is not compared, each record names its commit."
        )
    names = ", ".join(f"`{record.stage}`" for record in stale)
    return f"Stale records of `{machine}`: {names}; see [STALE.md](metrics/{machine}/{STALE_FILE})."


def apply(root: Path, machine: str, stale: Sequence[StaleRecord], write: bool) -> tuple[str, ...]:
    """Bring STALE.md and the README's line up to date; return the files that were (or, unwritten, are) untrue."""
    page = root / "metrics" / machine / STALE_FILE
    readme = root / "README.md"
    wanted = {
        page: stale_page(machine, stale) if stale else None,
        readme: update_markers(readme.read_text(encoding="utf-8"), {MARKER: freshness_line(machine, stale)}),
    }
    untrue = []
    for path, text in wanted.items():
        present = path.read_text(encoding="utf-8") if path.exists() else None
        if present == text:
            continue
        untrue.append(path.relative_to(root).as_posix())
        if write and text is None:
            path.unlink()
        elif write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return tuple(untrue)
