"""Replace a folder or a file of outputs as a whole, so that no process, however it ends, leaves half of one behind."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tilerank.errors import TilerankError


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``path`` that takes ``path``'s place when the body ends well.

    At every moment ``path`` is the old folder, the new one, or absent. When the body raises, the old folder stays.
    What killed processes left beside ``path`` is removed first. A ``path`` that is a file, and an operating system's
    error in the body or in the exchange (a full disk, a folder that may not be written), are a `TilerankError`.
    """
    if path.exists() and not path.is_dir():
        raise TilerankError(f"{path} is a file, but the outputs are a folder; move it away or name another folder")
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        new.mkdir()
        try:
            yield new
            if path.exists():  # a folder with files in it cannot be renamed over, so it steps aside
                os.rename(path, old)
            os.rename(new, path)
        finally:
            shutil.rmtree(new, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise TilerankError(
            f"{path} cannot be written ({error.strerror or error}); free the disk or mend its permissions"
        ) from error


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream whose file takes ``path``'s place when the body ends well.

    At every moment ``path`` is the old file, the new one, or absent; whoever has the old one open keeps it. Failures,
    and what killed processes left, are dealt with as in `whole_folder`.
    """
    if path.is_dir():
        raise TilerankError(f"{path} is a folder, but the output is a file; name another")
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        try:
            with new.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise TilerankError(
            f"{path} cannot be written ({error.strerror or error}); free the disk or mend its permissions"
        ) from error


def _remove_leftovers(path: Path) -> None:
    for left in path.parent.glob(f".{path.name}.*"):
        pid, _, state = left.name.removeprefix(f".{path.name}.").partition(".")
        if state not in ("new", "old") or not pid.isdigit() or _is_another_process(int(pid)):
            continue
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


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
