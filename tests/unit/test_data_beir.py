"""Where data comes from: folder, zip and ir_datasets' zip give the same bytes; bad zips and no network one line."""

import hashlib
import socket
import zipfile
from pathlib import Path

import pytest
from beir_data import contents, dataset_settings, write_folder, write_zip

from tilerank import data
from tilerank.data import beir
from tilerank.errors import TilerankError

ADVICE = "put it there"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "source" / "tiny")


@pytest.fixture
def expected(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Canonical files made from the folder."""
    monkeypatch.setenv("TILERANK_DATA", str(folder.parent))
    data.prepare(dataset_settings(), tmp_path / "expected", tmp_path)
    monkeypatch.delenv("TILERANK_DATA")
    return contents(tmp_path / "expected")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of beir/scifact's zip in a home of ir_datasets of its own; no other data set is in reach."""
    monkeypatch.delenv("TILERANK_DATA", raising=False)
    home = tmp_path / "ir_datasets"
    home.mkdir()
    monkeypatch.setenv("IR_DATASETS_HOME", str(home))
    pytest.importorskip("ir_datasets")
    place = home / "beir" / "scifact" / "source.zip"
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("IR_DATASETS_DL_TRIES", "1")


def expect_md5(monkeypatch: pytest.MonkeyPatch, md5: str) -> None:
    from ir_datasets import util

    monkeypatch.setitem(util.DownloadConfig.contents()["beir"]["scifact"], "expected_md5", md5)


@pytest.mark.parametrize("prefix", ["", "tiny/", "a/b/", "./", "./tiny/"])
def test_a_zip_gives_the_folders_bytes(
    prefix: str, folder: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    archive = write_zip(shelf / "tiny.zip", folder, prefix)
    with zipfile.ZipFile(archive, "a") as extra:  # what macOS adds
        extra.writestr("__MACOSX/corpus.jsonl", b"\x00")
        extra.writestr(f"{prefix}backup/corpus.jsonl", b"\x00")
    monkeypatch.setenv("TILERANK_DATA", str(shelf))
    for source in ("auto", "local"):
        data.prepare(dataset_settings(source=source), tmp_path / source, tmp_path)
        assert contents(tmp_path / source) == expected


@pytest.mark.parametrize("prefix", ["../", "a/../../"])
def test_members_that_point_out_of_the_zip_are_not_read(prefix: str, folder: Path, tmp_path: Path) -> None:
    archive = write_zip(tmp_path / "tiny.zip", folder, prefix)
    with pytest.raises(TilerankError, match=r"holds no corpus.jsonl"), beir.open_source(archive, "test"):
        pass


def test_the_trees_own_shelf_is_looked_at_last(
    folder: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "tree" / "data" / "raw"
    own.mkdir(parents=True)
    write_zip(own / "tiny.zip", folder)
    assert beir.find_local("tiny", tmp_path / "tree") == own / "tiny.zip"
    data.prepare(dataset_settings(), tmp_path / "out", tmp_path / "tree")
    assert contents(tmp_path / "out") == expected
    monkeypatch.setenv("TILERANK_DATA", str(folder.parent))
    assert beir.find_local("tiny", tmp_path / "tree") == folder
    assert beir.find_local("other", tmp_path / "tree") is None


def test_bad_zips(folder: Path, tmp_path: Path) -> None:
    def error(path: Path) -> str:
        with pytest.raises(TilerankError) as caught, beir.open_source(path, "test") as source:
            list(source.documents())
        return str(caught.value)

    (tmp_path / "text.zip").write_text("not a zip")
    assert "is not a zip that can be read (File is not a zip file); fetch it again" in error(tmp_path / "text.zip")
    whole = write_zip(tmp_path / "whole.zip", folder).read_bytes()
    (tmp_path / "half.zip").write_bytes(whole[: len(whole) // 2])
    assert "half.zip is not a zip that can be read" in error(tmp_path / "half.zip")
    start = whole.index(b"corpus.jsonl") + len("corpus.jsonl")  # the member's data
    (tmp_path / "flipped.zip").write_bytes(
        whole[:start] + bytes(byte ^ 0xFF for byte in whole[start : start + 40]) + whole[start + 40 :]
    )
    assert "flipped.zip/corpus.jsonl is damaged after line" in error(tmp_path / "flipped.zip")
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    assert "empty.zip holds no corpus.jsonl; a BEIR data set has corpus.jsonl," in error(tmp_path / "empty.zip")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        for name in ("one/corpus.jsonl", "two/corpus.jsonl"):
            archive.writestr(name, "{}")
    assert "two.zip holds several data sets (one, two); make a zip of one of them" in error(tmp_path / "two.zip")
    assert "No such file" in error(tmp_path / "absent.zip")


def test_ir_datasets_zip_gives_the_folders_bytes(
    cache: Path, folder: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_zip(cache, folder, "scifact/")
    expect_md5(monkeypatch, hashlib.md5(cache.read_bytes()).hexdigest())
    for source in ("auto", "ir_datasets"):
        data.prepare(dataset_settings("scifact", source), tmp_path / source, tmp_path)
        assert contents(tmp_path / source) == expected


def test_ir_datasets_reads_the_same_records_from_that_place(
    cache: Path, folder: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """The zip lies where ir_datasets itself looks for it."""
    import subprocess
    import sys

    write_zip(cache, folder, "scifact/")
    code = (
        "import ir_datasets as i; d = i.load('beir/scifact/test');"
        "print([tuple(x) for x in d.docs_iter()]); print([tuple(x)[:3] for x in d.qrels_iter()])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    dataset = data.load(tmp_path / "expected", "tiny")
    documents, judgements = out.splitlines()
    assert documents == repr([(d.doc_id, d.text, d.title) for d in dataset.documents])
    rows = expected["qrels.tsv"].decode().splitlines()[1:]
    assert judgements == repr([(q, d, int(grade)) for q, d, grade in (row.split("\t") for row in rows)])


def test_a_damaged_cached_zip_is_refused(cache: Path, folder: Path, tmp_path: Path) -> None:
    write_zip(cache, folder, "scifact/")  # a good zip, but not the published one: ir_datasets would read it
    with pytest.raises(TilerankError) as caught:
        data.prepare(dataset_settings("scifact", "auto"), tmp_path / "out", tmp_path)
    error = str(caught.value)
    assert f"{cache} is damaged: md5 " in error
    assert "expected 5f7d1de60b170fc8027bb7898e2efca1; delete it and run again with a network, or put" in error
    assert "\n" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_network")
def test_no_network_is_one_line(cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TilerankError) as caught:
        data.prepare(dataset_settings("scifact", "ir_datasets"), tmp_path / "out", tmp_path)
    error = str(caught.value)
    assert error.startswith("ir_datasets cannot download beir/scifact (ConnectionError)")
    assert "run again with a network, or put its BEIR folder or zip at" in error
    assert "$TILERANK_DATA" in error
    assert "\n" not in error
    assert capfd.readouterr() == ("", ""), "ir_datasets' log lines must not surround the one line"
    assert not cache.exists()
    assert not (tmp_path / "out").exists()


def test_a_download_is_checked_and_kept(
    cache: Path, folder: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ir_datasets' own downloader, from a server on this machine."""
    import functools
    import http.server
    import threading

    from ir_datasets import util

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    site = tmp_path / "site"
    site.mkdir()
    archive = write_zip(site / "scifact.zip", folder, "scifact/")
    handler = functools.partial(Quiet, directory=str(site))
    entry = util.DownloadConfig.contents()["beir"]["scifact"]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setitem(entry, "url", f"http://127.0.0.1:{server.server_address[1]}/scifact.zip")
        monkeypatch.setenv("IR_DATASETS_DL_TRIES", "1")
        with pytest.raises(TilerankError, match=r"cannot download beir/scifact \(HashVerificationError"):
            beir.ir_datasets_zip("scifact", ADVICE)
        assert not cache.exists(), "a download with the wrong md5 must not be kept"
        expect_md5(monkeypatch, hashlib.md5(archive.read_bytes()).hexdigest())
        assert beir.ir_datasets_zip("scifact", ADVICE) == cache
        server.shutdown()
    data.prepare(dataset_settings("scifact", "ir_datasets"), tmp_path / "out", tmp_path)
    assert contents(tmp_path / "out") == expected


def test_names_that_ir_datasets_lacks(cache: Path) -> None:
    with pytest.raises(TilerankError, match=r"has no beir/tiny \(it has .*scifact.*\); put it there$"):
        beir.ir_datasets_zip("tiny", ADVICE)


def test_scifact_by_zip_and_by_ir_datasets(
    cache: Path, scifact_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILERANK_DATA", str(scifact_dir.parent))
    data.prepare(dataset_settings("scifact"), tmp_path / "folder", tmp_path)
    monkeypatch.delenv("TILERANK_DATA")
    write_zip(cache, scifact_dir, "scifact/")
    expect_md5(monkeypatch, hashlib.md5(cache.read_bytes()).hexdigest())
    data.prepare(dataset_settings("scifact", "auto"), tmp_path / "zip", tmp_path)
    assert contents(tmp_path / "zip") == contents(tmp_path / "folder")
