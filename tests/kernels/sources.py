"""Copies of the kernels' sources that a test may edit and build."""

from __future__ import annotations

import shutil
from pathlib import Path

from ruamel.yaml import YAML

from tilerank.kernels import registry


def copy_with_rows(folder: Path, *names: str, **more: str) -> Path:
    """Copy ``cuda/`` into ``folder``, its registry cut down to the attention rows ``names`` and the references of other
    operations: quick to build. more: one row beside its reference, by its operation."""
    source = folder / "cuda"
    shutil.copytree(registry.cuda_dir(), source, ignore=shutil.ignore_patterns("__pycache__"))
    path = source / "registry.yaml"
    rows = YAML(typ="safe").load(path.read_text(encoding="utf-8"))["variants"]
    others = [operation for operation in registry.OPERATIONS if operation != "attention"]
    kept = {operation: {"reference": rows[operation]["reference"]} for operation in others}
    for operation, name in more.items():
        kept[operation][name] = rows[operation][name]
    kept["attention"] = {name: rows["attention"][name] for name in names}  # last: a test appends its row
    with path.open("w", encoding="utf-8") as file:
        YAML().dump({"variants": kept}, file)
    return source
