"""Replace a folder of outputs as a whole, so that no process, however it ends, leaves half of one behind."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

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


def _remove_leftovers(path: Path) -> None:
    for folder in path.parent.glob(f".{path.name}.*"):
        pid, _, state = folder.name.removeprefix(f".{path.name}.").partition(".")
        if state in ("new", "old") and pid.isdigit() and not _is_another_process(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


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
