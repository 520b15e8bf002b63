"""The committed records at every commit of git history that touched them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tilerank.errors import TilerankError
from tilerank.report import Record, Report, build_report, summarise
from tilerank.report.records import PER_VARIANT, SUMMARY_FILE, lookup, parse_record


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit that touched records."""

    id: str
    subject: str
    body: str


class Moment:
    """The records of one machine as a commit holds them, and what that commit's tree says about them."""

    def __init__(self, root: Path, commit: Commit, machine: str, blobs: Mapping[str, str]) -> None:
        self.root, self.commit, self.machine = root, commit, machine
        self.blobs = blobs  # record name -> git's name of its content

    @cached_property
    def records(self) -> tuple[Record, ...]:
        """Every record but the summary, by name."""
        names = sorted(self.blobs)
        texts = _contents(self.root, [self.blobs[name] for name in names])
        return tuple(
            parse_record(f"{self.commit.id[:10]}:metrics/{self.machine}/{name}.json", name, text)
            for name, text in zip(names, texts, strict=True)
        )

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """The summary contract's sections, without lists."""
        return summarise(self.records)

    @cached_property
    def report(self) -> Report:
        """The page and pictures that these records make."""
        return build_report(self.records, self.machine, self.predictions)

    @cached_property
    def variants(self) -> Mapping[str, Mapping[str, Any]]:
        """The registry's attention rows, in ladder order, as far as this commit knew them."""
        text = self.file("cuda/registry.yaml")
        rows = _yaml(text).get("variants", {}).get("attention", {}) if text else {}
        return dict(sorted(rows.items(), key=lambda item: item[1].get("rung", 0)))

    @cached_property
    def predictions(self) -> Mapping[str, str]:
        """Variant -> what was expected of it, in ladder order."""
        return {name: row["prediction"] for name, row in self.variants.items() if "prediction" in row}

    @property
    def pipeline(self) -> Mapping[str, str]:
        """`blobs` without the records that belong to one variant."""
        return {name: blob for name, blob in self.blobs.items() if not name.startswith(PER_VARIANT)}

    @cached_property
    def figures(self) -> Mapping[str, Any]:
        """The summary without the ladder's variants: what a step of the pipeline is compared by."""
        ladder = self.summary.get("ladder", {})
        kept = {"ladder": {"best_ffma": ladder["best_ffma"]}} if "best_ffma" in ladder else {}
        return {**{section: values for section, values in self.summary.items() if section != "ladder"}, **kept}

    @property
    def dataset(self) -> str | None:
        """The data set of the commit's settings."""
        text = self.file("params.yaml")
        return lookup(_yaml(text), "dataset.name") if text else None

    def file(self, path: str) -> str | None:
        """A tracked file's text, or None when the commit has no such file."""
        return _git(self.root, "show", f"{self.commit.id}:{path}")

    def record(self, name: str) -> Record | None:
        """The record called ``name``."""
        return next((record for record in self.records if record.name == name), None)


def _yaml(text: str) -> Mapping[str, Any]:
    from ruamel.yaml import YAML

    values = YAML(typ="safe").load(text)
    return values if isinstance(values, Mapping) else {}


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    except FileNotFoundError:
        return None
    return answer.stdout if answer.returncode == 0 else None


def _contents(root: Path, blobs: Sequence[str]) -> list[str]:
    """The texts of git's objects, in one process."""
    command = ["git", "-C", str(root), "cat-file", "--batch"]
    answer = subprocess.run(command, input="\n".join(blobs).encode(), capture_output=True, check=True).stdout
    texts, position = [], 0
    for _ in blobs:
        end = answer.index(b"\n", position)
        size = int(answer[position:end].split()[2])
        texts.append(answer[end + 1 : end + 1 + size].decode())
        position = end + size + 2
    return texts


def is_shallow(root: Path) -> bool:
    """Whether the clone lacks the older part of history."""
    return (_git(root, "rev-parse", "--is-shallow-repository") or "").strip() == "true"


def read_moments(root: Path) -> Iterator[Moment]:
    """Every commit that touched records, oldest first, a moment for each machine that it holds records of.

    Raises `TilerankError` outside a git checkout.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()).resolve() != root.resolve():
        raise TilerankError(f"{root} is no git checkout: the history of its records cannot be read; clone the project")
    listed = _git(root, "log", "--reverse", "--topo-order", "--format=%H%x1f%s%x1f%b%x1e", "--", "metrics") or ""
    for entry in filter(None, (entry.strip("\n") for entry in listed.split("\x1e"))):
        commit = Commit(*(part.strip("\n") for part in entry.split("\x1f")))
        machines: dict[str, dict[str, str]] = {}
        for line in (_git(root, "ls-tree", "-r", "-z", commit.id, "--", "metrics") or "").split("\0"):
            found = re.fullmatch(r"\d+ blob (\w+)\tmetrics/([^/]+)/([^/]+)\.json", line)
            if found is not None and f"{found[3]}.json" != SUMMARY_FILE:
                machines.setdefault(found[2], {})[found[3]] = found[1]
        for machine, blobs in machines.items():
            yield Moment(root, commit, machine, blobs)
