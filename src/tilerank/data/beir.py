"""Data sets in BEIR's layout: a folder, a zip, or the zip that ir_datasets downloads.

The layout is corpus.jsonl, queries.jsonl and qrels/<split>.tsv. A zip may hold them at its top or in one folder, as
BEIR's own zips do. ir_datasets serves as the downloader with its mirrors, retries and cache; the zip's members are
read here, because the records that it makes of them have lost the queries' metadata.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

from tilerank.data.canonical import (
    CORPUS,
    QUERIES,
    DocumentRecord,
    Judgement,
    QueryRecord,
    read_documents,
    read_judgements,
    read_queries,
)
from tilerank.errors import TilerankError

DATA_VARIABLE = "TILERANK_DATA"

_LAYOUT = "corpus.jsonl, queries.jsonl and qrels/<split>.tsv"


class Files(Protocol):
    """The files of one data set, by their names in BEIR's layout."""

    def label(self, name: str) -> str:
        """What errors call the file."""
        ...

    def names(self) -> Collection[str]:
        """The files that exist."""
        ...

    def open(self, name: str) -> IO[bytes]:
        """The file's bytes."""
        ...


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """Files in a folder."""

    path: Path

    def label(self, name: str) -> str:
        return str(self.path / name)

    def names(self) -> Collection[str]:
        files = (*self.path.glob("*.jsonl"), *self.path.glob("qrels/*.tsv"))
        return [file.relative_to(self.path).as_posix() for file in files if file.is_file()]

    def open(self, name: str) -> IO[bytes]:
        return (self.path / name).open("rb")


@dataclass(frozen=True, slots=True)
class ZipFiles:
    """Members of an open zip, below the folder ``prefix`` ("" or ending in a slash)."""

    path: Path
    archive: zipfile.ZipFile
    prefix: str
    members: Mapping[str, str]
    """Plain name -> the name that the zip has for it; see `_members`."""

    def label(self, name: str) -> str:
        return f"{self.path}/{self.prefix}{name}"

    def names(self) -> Collection[str]:
        return [member.removeprefix(self.prefix) for member in self.members if member.startswith(self.prefix)]

    def open(self, name: str) -> IO[bytes]:
        return self.archive.open(self.members[self.prefix + name])


@dataclass(frozen=True, slots=True)
class BeirSource:
    """One split of a data set in BEIR's layout, as a `tilerank.data.canonical.Source`."""

    files: Files
    split: str

    def documents(self) -> Iterator[DocumentRecord]:
        with self._open(CORPUS) as stream:
            yield from read_documents(stream, self.files.label(CORPUS))

    def queries(self) -> Iterator[QueryRecord]:
        with self._open(QUERIES) as stream:
            yield from read_queries(stream, self.files.label(QUERIES))

    def judgements(self, query_ids: Collection[str]) -> Iterator[Judgement]:
        name = f"qrels/{self.split}.tsv"
        with self._open(name) as stream:
            yield from read_judgements(stream, self.files.label(name), query_ids)

    def check(self) -> None:
        """Raise `TilerankError` for a file that is missing."""
        names = self.files.names()
        for name in (CORPUS, QUERIES):
            if name not in names:
                raise TilerankError(f"{self.files.label(name)} is missing; a BEIR data set has {_LAYOUT}")
        if f"qrels/{self.split}.tsv" not in names:
            splits = sorted(name[6:-4] for name in names if name.startswith("qrels/") and name.endswith(".tsv"))
            found = f"allowed for dataset.split: {', '.join(splits)}" if splits else f"a BEIR data set has {_LAYOUT}"
            raise TilerankError(f"{self.files.label(f'qrels/{self.split}.tsv')} is missing; {found}")

    def _open(self, name: str) -> IO[bytes]:
        try:
            return self.files.open(name)
        except (OSError, RuntimeError, zipfile.BadZipFile) as error:  # RuntimeError: an encrypted member
            reason = getattr(error, "strerror", None) or error
            raise TilerankError(f"{self.files.label(name)} cannot be read: {reason}") from error


@contextlib.contextmanager
def open_source(path: Path, split: str) -> Iterator[BeirSource]:
    """Open the split of the BEIR folder or zip ``path``; `TilerankError` when files are missing or no zip it is."""
    if path.is_dir():
        source = BeirSource(FolderFiles(path), split)
        source.check()
        yield source
        return
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or error
        raise TilerankError(f"{path} is not a zip that can be read ({reason}); fetch it again") from error
    with archive:
        members = _members(archive)
        source = BeirSource(ZipFiles(path, archive, _prefix(path, members), members), split)
        source.check()
        yield source


def find_local(name: str, root: Path) -> Path | None:
    """The folder or zip of the data set ``name``: in ``$TILERANK_DATA``, then in ``root``/data/raw."""
    for place in _places(name, root):
        if place.is_dir():
            return place
        if (archive := place.with_name(f"{place.name}.zip")).is_file():
            return archive
    return None


def where_to_put(name: str, root: Path) -> str:
    """What to tell someone whose data set ``name`` was not found."""
    places = " or ".join(f"{place}[.zip]" for place in _places(name, root))
    variable = "" if os.environ.get(DATA_VARIABLE) else f", or point ${DATA_VARIABLE} to the folder that holds it"
    return f"put its BEIR folder or zip at {places}{variable}"


def ir_datasets_zip(name: str, advice: str) -> Path:
    """The zip of ``beir/<name>`` in ir_datasets' cache, downloaded if it is not there, its md5 checked.

    Raises `TilerankError`, ending in ``advice``, for a name that ir_datasets lacks, a failed download or a damaged
    zip (which ir_datasets itself would read without a look at its md5).
    """
    try:
        from ir_datasets import util

        known = util.DownloadConfig.contents()["beir"]
        if name not in known:
            raise TilerankError(f"ir_datasets has no beir/{name} (it has {', '.join(sorted(known))}); {advice}")
        download = util.DownloadConfig.context("beir", util.home_path() / "beir")[name]
        with _quiet_logging():
            path = Path(download.path())
    except ImportError as error:
        raise TilerankError(f"ir_datasets is not installed; pip install 'tilerank[pipeline]', or {advice}") from error
    except (OSError, RuntimeError) as error:  # requests' and ir_datasets' own errors are kinds of these two
        reason = " ".join(str(error).split())
        kind = type(error).__name__
        raise TilerankError(
            f"ir_datasets cannot download beir/{name} ({kind if len(reason) > 120 else f'{kind}: {reason}'}); "
            f"run again with a network, or {advice}"
        ) from error
    try:
        with path.open("rb") as stream:
            md5 = hashlib.file_digest(stream, "md5").hexdigest()
    except OSError as error:
        raise TilerankError(f"{path} cannot be read: {error.strerror}") from error
    if download.expected_md5 is not None and md5 != download.expected_md5:
        raise TilerankError(
            f"{path} is damaged: md5 {md5}, expected {download.expected_md5}; "
            f"delete it and run again with a network, or {advice}"
        )
    return path


def _places(name: str, root: Path) -> list[Path]:
    places = [root / "data" / "raw" / name]
    if shelf := os.environ.get(DATA_VARIABLE):
        places.insert(0, Path(shelf).expanduser() / name)
    return places


def _members(archive: zipfile.ZipFile) -> dict[str, str]:
    """Plain name -> the zip's own name: ``./corpus.jsonl`` is corpus.jsonl. Names with ``..`` are left out."""
    return {str(path): member for member in archive.namelist() if ".." not in (path := PurePosixPath(member)).parts}


def _prefix(path: Path, members: Collection[str]) -> str:
    """The folder inside the zip that holds corpus.jsonl: the one nearest to the top."""
    paths = [PurePosixPath(member) for member in members]
    found = [member.parent for member in paths if member.name == CORPUS and "__MACOSX" not in member.parts]
    if not found:
        raise TilerankError(f"{path} holds no {CORPUS}; a BEIR data set has {_LAYOUT}")
    depth = min(len(folder.parts) for folder in found)
    nearest = sorted({str(folder) for folder in found if len(folder.parts) == depth})
    if len(nearest) > 1:
        raise TilerankError(f"{path} holds several data sets ({', '.join(nearest)}); make a zip of one of them")
    return "" if nearest[0] == "." else f"{nearest[0]}/"


@contextlib.contextmanager
def _quiet_logging() -> Iterator[None]:
    """Hold back ir_datasets' log lines, which would surround the one line that an error is; its bar stays."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
