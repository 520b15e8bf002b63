"""A figure knows the source it came from, in a checkout and in a packed copy."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from stages import pack
from tilerank import provenance
from tilerank.errors import TilerankError


def _git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "src").mkdir(parents=True)
    (folder / "metrics").mkdir()
    (folder / "src" / "a.py").write_text("x = 1\n", encoding="utf-8")
    (folder / "metrics" / "a.json").write_text("{}\n", encoding="utf-8")
    _git(folder, "init", "-q")
    _git(folder, "add", "-A")
    _git(folder, "commit", "-qm", "first")
    return folder


def test_a_record_does_not_make_the_source_dirty_an_edit_does(checkout: Path) -> None:
    clean = provenance.source_state(checkout)
    assert clean.commit is not None
    assert len(clean.commit) == 40
    assert not clean.dirty
    (checkout / "metrics" / "a.json").write_text('{"new": 1}\n', encoding="utf-8")
    assert not provenance.source_state(checkout).dirty
    (checkout / "src" / "a.py").write_text("x = 2\n", encoding="utf-8")
    edited = provenance.source_state(checkout)
    assert edited.dirty
    assert edited.commit == clean.commit
    assert edited.source_hash != clean.source_hash


def test_a_packed_copy_knows_its_commit_and_notices_an_edit(checkout: Path, tmp_path: Path) -> None:
    state = provenance.source_state(checkout)
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    assert provenance.source_state(copy) == provenance.SourceState(None, True, state.source_hash)
    provenance.write_source_file(provenance.source_state(checkout), copy)
    assert provenance.source_state(copy) == state
    _git(copy, "init", "-q")
    assert provenance.source_state(copy) == state, "a repository without a commit knows no better"
    (copy / "src" / "b.py").write_text("", encoding="utf-8")
    assert provenance.source_state(copy).dirty
    (copy / provenance.SOURCE_FILE).write_text("{", encoding="utf-8")
    with pytest.raises(TilerankError, match="make pack"):
        provenance.source_state(copy)


def test_nothing_is_packed_without_a_commit(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    monkeypatch.setattr(pack, "ROOT", copy)
    assert pack.main() == 1
    assert f"pack: {copy} is no git checkout with a commit to name" in capsys.readouterr().err
    assert not (copy / provenance.SOURCE_FILE).exists()


def test_a_library_built_ahead_of_time_is_not_source(checkout: Path, tmp_path: Path) -> None:
    provenance.write_source_file(provenance.source_state(checkout), tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    shutil.copy(tmp_path / provenance.SOURCE_FILE, copy)
    built = copy / "src" / "tilerank" / "_lib"
    built.mkdir(parents=True)
    (built / "libtilerank.so").write_bytes(b"machine code")
    assert not provenance.source_state(copy).dirty


def test_a_packed_copy_over_another_commit_is_what_was_packed(checkout: Path) -> None:
    first = provenance.source_state(checkout)
    (checkout / "src" / "a.py").write_text("x = 2\n", encoding="utf-8")
    _git(checkout, "commit", "-qam", "second")
    second = provenance.source_state(checkout)
    provenance.write_source_file(provenance.source_state(checkout), checkout)
    _git(checkout, "reset", "-q", "--soft", str(first.commit))
    assert provenance.source_state(checkout) == second
    (checkout / "src" / "a.py").write_text("x = 3\n", encoding="utf-8")
    edited = provenance.source_state(checkout)
    assert (edited.commit, edited.dirty) == (first.commit, True)


def test_a_copy_inside_another_checkout_is_not_taken_for_it(checkout: Path) -> None:
    inner = checkout / "build" / "copy"
    (inner / "src").mkdir(parents=True)
    assert provenance.source_state(inner).commit is None


def test_collect_has_what_a_record_needs_and_no_nulls(repository: Path) -> None:
    record = provenance.collect(repository, ["python", "-m", "stages.x"], use_cuda=False)
    assert {"dirty", "source_hash", "command", "time", "python", "cpu", "cores", "torch", "transformers"} <= set(record)
    assert None not in record.values()
    assert "gpu" not in record
    json.dumps(record)
