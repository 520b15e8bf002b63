"""A copied tree follows its source and keeps its own state."""

import subprocess
from pathlib import Path

import pytest

from tilerank.errors import TilerankError
from tilerank.treecopy import copy_tree


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for name in ("src/a.py", "src/b.py", "metrics/cpu/a.json", "dvc.lock", "README.md", "ignored/x"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")
    (folder / ".gitignore").write_text("/ignored/\n/copy/\n", encoding="utf-8")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


def test_the_copy_follows_and_keeps_its_own(source: Path) -> None:
    copy = source / "copy"
    copy_tree(source, copy)
    present = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert present == {"src/a.py", "src/b.py", "README.md", ".gitignore", ".copied-files", ".dvc/config.local"}
    assert "no_scm = true" in (copy / ".dvc/config.local").read_text(encoding="utf-8")

    (copy / "dvc.lock").write_text("own", encoding="utf-8")
    (copy / "data").mkdir()
    (copy / "data" / "own").write_text("own", encoding="utf-8")
    untouched = (copy / "src/a.py").stat().st_mtime_ns
    (source / "src/b.py").unlink()
    (source / "README.md").write_text("edited", encoding="utf-8")
    copy_tree(source, copy)
    assert not (copy / "src/b.py").exists()
    assert (copy / "README.md").read_text(encoding="utf-8") == "edited"
    assert (copy / "src/a.py").stat().st_mtime_ns == untouched
    assert (copy / "dvc.lock").read_text(encoding="utf-8") == "own"
    assert (copy / "data" / "own").exists()


def test_outside_git_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(TilerankError, match="not a git checkout"):
        copy_tree(tmp_path, tmp_path / "copy")
