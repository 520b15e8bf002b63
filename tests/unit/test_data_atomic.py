"""A folder of outputs is whole at every moment, also when the process that writes it is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from beir_data import beir_files, contents, dataset_settings, write_folder

from tilerank import data
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
        named_alike = tmp_path / ".out.backup.new"
        named_alike.mkdir()
        with data.whole_folder(tmp_path / "out"):
            pass
        assert theirs.is_dir()
        other.communicate(b"\n")
    with data.whole_folder(tmp_path / "out"):
        pass
    assert not theirs.exists()
    assert named_alike.is_dir()


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
