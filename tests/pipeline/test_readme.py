"""Every command and program in the README runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ELSEWHERE = {
    "make quickstart": "tests/pipeline/test_quickstart.py, through the program that the target calls",
    "make test": "is what runs this test",
    "make ui": "tests/pipeline/test_ui.py, through the program that the target calls",
}
"""Commands that another test runs."""

SLOW = ("dvc exp", "dvc queue", "TILERANK_MACHINE=")
"""Beginnings of commands that run whole experiments: `test_experiments`."""


def _blocks(repository: Path, language: str) -> list[str]:
    text = (repository / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def _commands(repository: Path) -> list[str]:
    return [line for block in _blocks(repository, "sh") for line in block.splitlines() if line.strip()]


def test_commands_run(project, repository: Path) -> None:
    commands = [line for line in _commands(repository) if line not in ELSEWHERE and not line.startswith(SLOW)]
    assert len(commands) >= 8
    for command in commands:
        if "cranfield" in command and "TILERANK_DATA" not in project.environment:
            continue  # needs a data set that is not everywhere
        project.check(command)
    assert project.check("git status --porcelain") == "", "a what-if or a table never touches a tracked file"


def test_the_targets_named_elsewhere_are_in_the_readme(repository: Path) -> None:
    assert set(ELSEWHERE) <= set(_commands(repository))


def test_experiments_run_with_what_every_reader_has(repository: Path) -> None:
    """The record's machine, data and model are not: an experiment with them would stop anywhere else."""
    experiments = [line for line in _commands(repository) if line.startswith("dvc exp run")]
    assert len(experiments) >= 2
    for command in experiments:
        assert "-S experiment=quickstart -S machine=cpu" in command, command


def test_programs_run(repository: Path) -> None:
    blocks = _blocks(repository, "python")
    assert blocks
    for block in blocks:
        answer = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
        assert answer.returncode == 0, f"{block}\n{answer.stderr}"


@pytest.mark.slow
def test_experiments(repository: Path, tmp_path: Path) -> None:
    from conftest import make_project  # type: ignore[attr-defined]

    project = make_project(repository, tmp_path / "project")
    project.check("dvc repro --quiet")
    project.check("git add -A")
    project.check("git commit -qm record")
    for command in _commands(repository):
        if command.startswith(SLOW):
            project.check(command)
            if command == "dvc queue start":
                _wait_for_queue(project)
    shown = project.check("dvc exp show --csv")
    assert len(shown.strip().splitlines()) >= 5, shown


def _wait_for_queue(project) -> None:
    import time

    for _ in range(600):
        status = project.check("dvc queue status")
        if not re.search(r"Queued|Running", status):
            assert status.count("Success") == 2, status
            return
        time.sleep(2)
    pytest.fail("the queue did not end")
