"""What `pip install` puts on a machine that has no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tilerank.kernels import build


def test_the_wheel_holds_every_module_and_the_kernels_sources(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    tree, site = tmp_path / "tree", tmp_path / "site"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, tree)
    for name in ("src", "cuda"):
        shutil.copytree(repository / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, check=True)
    (wheel,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)

    modules = {path.relative_to(tree / "src") for path in (tree / "src").rglob("*.py")}
    sources = {Path("tilerank/_cuda", name) for name in build.read_sources(tree / "cuda") if not name.startswith(".")}
    program_of_doctor = Path("tilerank/_cuda/tests/sanity.cc")
    there = {path.relative_to(site) for path in site.rglob("*")}
    assert (modules | sources | {program_of_doctor}) - there == set()

    shutil.rmtree(tree)
    code = "from tilerank.kernels import build, registry; build.read_sources(registry.cuda_dir())['registry.yaml']"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
