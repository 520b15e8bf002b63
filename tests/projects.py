"""A small project to run whole pipelines in: the sources of this one, tiny data, one GPU kernel."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from ruamel.yaml import YAML

from tilerank.treecopy import source_files

TINY = """# @package _global_
defaults:
  - override /dataset: pydocs
  - override /model: all_minilm_l6
dataset:
  passages: 300
  queries: 3
workload:
  queries: 3
  candidates: 12
  max_length: 32
machine:
  rerank_queries: 2
  rerank_rounds: 1
"""

IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.org")
KEPT_VARIANTS = ("reference", "naive")


class Project:
    """A git checkout with its own settings; commands run in it as a reader of the README would type them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_TRACKING_URI": f"sqlite:///{root / 'mlflow.db'}",
            "GIT_AUTHOR_NAME": "t",
            "GIT_AUTHOR_EMAIL": "t@example.org",
            "GIT_COMMITTER_NAME": "t",
            "GIT_COMMITTER_EMAIL": "t@example.org",
        }

    def run(self, command: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run ``command`` (leading NAME=value words set the environment); its exit code is the caller's to check."""
        words = shlex.split(command)
        environment = {**self.environment, **extra}
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        return subprocess.run(words, cwd=self.root, env=environment, capture_output=True, text=True, check=False)

    def check(self, command: str, **extra: str) -> str:
        """Run ``command``, which must succeed; returns what it printed."""
        answer = self.run(command, **extra)
        assert answer.returncode == 0, f"{command}\n{answer.stdout}\n{answer.stderr}"
        return answer.stdout


def make_project(repository: Path, root: Path, keep: tuple[str, ...] = ()) -> Project:
    """Copy the sources to ``root``, make them small and commit them.

    keep: beginnings of names, of those that are left out otherwise (records, tests, pictures), to copy too.
    """
    left_out = tuple(name for name in ("metrics/", "dvc.lock", "tests/", "docs/pictures/") if name not in keep)
    for name in source_files(repository):
        if name.startswith(left_out):
            continue
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((repository / name).read_bytes())
    (root / "conf" / "experiment" / "tiny.yaml").write_text(TINY, encoding="utf-8")
    config = root / "conf" / "config.yaml"
    text = config.read_text(encoding="utf-8").replace("experiment: scifact", "experiment: tiny")
    text = text.replace("machine: h200", "machine: cpu")
    config.write_text(text, encoding="utf-8")
    registry, yaml = root / "cuda" / "registry.yaml", YAML()
    rows = yaml.load(registry.read_text(encoding="utf-8"))
    for of_operation in rows["variants"].values():
        for name in [name for name in of_operation if name not in KEPT_VARIANTS]:
            del of_operation[name]
    with registry.open("w", encoding="utf-8") as handle:
        yaml.dump(rows, handle)
    project = Project(root)
    project.check("python -m stages.compose")
    project.check("git init -q")
    project.check("git add -A")
    project.check("git commit -qm start")
    return project


def commit_tree(repository: Path, root: Path) -> None:
    """A checkout at ``root`` of everything but the tests, records included, in one commit."""
    for name in source_files(repository):
        if not name.startswith("tests/"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes((repository / name).read_bytes())
    for command in (["init", "-q"], ["add", "-A"], [*IDENTITY, "commit", "-qm", "Record the ladder"]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
