"""A folder of outputs is whole at every moment, also when the process that writes it is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from beir_data import beir_files, contents, dataset_settings, write_folder

from tilerank import data
from tilerank.data.atomic import whole_file
from tilerank.errors import TilerankError

# Kills itself with SIGKILL at one moment of `prepare`.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from beir_data import dataset_settings
from tilerank import data
from tilerank.data import atomic, canonical

def die(*arguments, **keywords):
    os.kill(os.getpid(), signal.SIGKILL)

moment, out = sys.argv[1], Path(sys.argv[2])
if moment == "corpus":
    read = canonical.json.dumps
    canonical.json.dumps = lambda fields: die() if fields["_id"] == "d5" else read(fields)
elif moment == "digests":
    canonical.check_digests = die
elif moment == "exchange":
    rename = os.rename
    os.rename = lambda source, target: die() if Path(target) == out else rename(source, target)
elif moment == "clean-up":
    shutil.rmtree = die
data.prepare(dataset_settings(), out, out.parent)
print("not killed")
"""


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILERANK_DATA", str(tmp_path / "shelf"))
    return write_folder(tmp_path / "shelf" / "tiny")


@pytest.mark.parametrize("existing", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("moment", ["corpus", "digests", "exchange", "clean-up"])
def test_sigkill_leaves_nothing_half_written(moment: str, existing: bool, shelf: Path, tmp_path: Path) -> None:
    out = tmp_path / "canonical"
    data.prepare(dataset_settings(), tmp_path / "expected", tmp_path)
    new = contents(tmp_path / "expected")
    old: dict[str, bytes] = {}
    if existing:
        write_folder(shelf, {**beir_files(), "corpus.jsonl": '{"_id": "old", "text": "old"}\n'})
        data.prepare(dataset_settings(), out, tmp_path)
        old = contents(out)
        write_folder(shelf)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, moment, str(out)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    after = contents(out) if out.exists() else {}
    allowed = {"corpus": [old], "digests": [old], "exchange": [{}], "clean-up": [new]}[moment]
    assert after in allowed
    if existing or moment != "clean-up":
        assert list(tmp_path.glob(".canonical.*")), "the kill came too late to test anything"
    data.prepare(dataset_settings(), out, tmp_path)
    assert contents(out) == new
    assert not list(tmp_path.glob(".canonical.*"))


def test_leftovers_of_living_processes_stay(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        theirs = tmp_path / f".out.{other.pid}.new"
        theirs.mkdir()
        their_file = tmp_path / f".out.{other.pid}.0123abcd.new"
        their_file.touch()
        named_alike = [tmp_path / ".out.backup.new", tmp_path / f".out.{other.pid}.backup.new"]
        for folder in named_alike:
            folder.mkdir()
        with data.whole_folder(tmp_path / "out"):
            pass
        assert theirs.is_dir()
        assert their_file.is_file()
        other.communicate(b"\n")
    with data.whole_folder(tmp_path / "out"):
        pass
    assert not theirs.exists()
    assert not their_file.exists()
    assert all(folder.is_dir() for folder in named_alike)


def test_two_writes_of_one_file_in_one_process_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "out"
    # A killed process that had this one's number, as the first process of every container has.
    (tmp_path / f".out.{os.getpid()}.0123abcd.new").touch()
    with whole_file(path) as first:
        first.write(b"first")
        with whole_file(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "out is no regular file, and is not replaced by one; name another"),
        (lambda path: path.symlink_to("there"), "out is a symbolic link to there; name the file itself, or another"),
        (lambda path: path.symlink_to("absent"), "out is a symbolic link to absent; name the file itself, or another"),
        (Path.mkdir, "out is a folder, but the output is a file; name another"),
    ],
    ids=["pipe", "link", "dangling", "folder"],
)
def test_what_is_no_regular_file_is_refused_and_kept(
    make: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    (tmp_path / "there").write_text("mine")
    make(path)
    before = path.lstat()
    with pytest.raises(TilerankError, match=message), whole_file(path) as stream:
        stream.write(b"new")
    assert path.lstat() == before
    assert (tmp_path / "there").read_text() == "mine"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "there"]


def test_an_exception_keeps_the_old_folder(tmp_path: Path) -> None:
    out = write_folder(tmp_path / "out", {"old.txt": "old"})

    def fail() -> None:
        with data.whole_folder(out) as folder:
            (folder / "new.txt").write_text("new")
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        fail()
    assert contents(out) == {"old.txt": b"old"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_in_the_folders_place_is_refused_and_kept(shelf: Path, tmp_path: Path) -> None:
    out = tmp_path / "canonical"
    out.write_text("mine")
    with pytest.raises(TilerankError, match=r"canonical is a file.*move it away"):
        data.prepare(dataset_settings(), out, tmp_path)
    assert out.read_text() == "mine"
    assert not list(tmp_path.glob(".canonical.*"))


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TilerankError, match=r"out cannot be written \(.*\); free the disk or mend its permissions"):  # noqa: SIM117
        with data.whole_folder(tmp_path / "file" / "out"):
            pass
