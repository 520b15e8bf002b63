"""Replace a folder or a file of outputs as a whole, so that no process, however it ends, leaves half of one behind."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tilerank.errors import TilerankError

_TEMPORARY = re.compile(r"([0-9]{1,9})\.(?:[0-9a-f]{8}\.)?(?:new|old)")
"""Number of the process, and what tells its writes apart."""
_in_work: set[str] = set()
"""Names of what this process is writing, in any thread: no leftovers."""


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``path`` that takes ``path``'s place when the body ends well.

    At every moment ``path`` is the old folder, the new one, or absent. When the body raises, the old folder stays.
    What killed processes left beside ``path`` is removed first. A ``path`` that is a file, and an operating system's
    error in the body or in the exchange (a full disk, a folder that may not be written), are a `TilerankError`.
    """
    if path.exists() and not path.is_dir():
        raise TilerankError(f"{path} is a file, but the outputs are a folder; move it away or name another folder")
    with _errors_in_one_line(path), _temporaries(path, "new", "old") as (new, old):
        new.mkdir()
        yield new
        if path.exists():  # a folder with files in it cannot be renamed over, so it steps aside
            os.rename(path, old)
        os.rename(new, path)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream whose file takes ``path``'s place when the body ends well.

    At every moment ``path`` is the old file, the new one, or absent; whoever has the old one open keeps it. Several
    threads may write at once: the last one's file stays. Failures, and what killed processes left, are dealt with as in
    `whole_folder`; what `check_place` refuses is refused.
    """
    check_place(path)
    with _errors_in_one_line(path), _temporaries(path, "new") as (new,):
        with new.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(new, path)


def check_place(path: Path) -> None:
    """Raise `TilerankError` where ``path`` is neither free nor a regular file.

    A symbolic link is refused too: replacing it would leave the file it points to as it is, and replacing that file
    is not what every user of a link expects.
    """
    with _errors_in_one_line(path):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return
        if stat.S_ISLNK(mode):
            raise TilerankError(f"{path} is a symbolic link to {path.readlink()}; name the file itself, or another")
        if stat.S_ISDIR(mode):
            raise TilerankError(f"{path} is a folder, but the output is a file; name another")
        if not stat.S_ISREG(mode):
            raise TilerankError(f"{path} is no regular file, and is not replaced by one; name another")


@contextlib.contextmanager
def _errors_in_one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TilerankError(
            f"{path} cannot be written ({error.strerror or error}); free the disk or mend its permissions"
        ) from error


@contextlib.contextmanager
def _temporaries(path: Path, *states: str) -> Iterator[list[Path]]:
    """Paths beside ``path`` that no other write uses; whatever is there in the end, or was left there, is removed."""
    write = f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}"
    own = [path.with_name(f"{write}.{state}") for state in states]
    _in_work.update(file.name for file in own)  # before they exist, so that no other thread takes them for leftovers
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        yield own
    finally:
        for file in own:
            _remove(file)
        _in_work.difference_update(file.name for file in own)


def _remove_leftovers(path: Path) -> None:
    for left in path.parent.glob(f".{path.name}.*"):
        named = _TEMPORARY.fullmatch(left.name.removeprefix(f".{path.name}."))
        # This process's number may have been a killed one's: in containers every first process has the same.
        if named and left.name not in _in_work and not _is_another_process(int(named[1])):
            _remove(left)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # it was a folder, or is gone; what cannot be removed disturbs nobody
        path.unlink()


def _is_another_process(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
