"""A copied tree: where runs that are not the record happen, so that the checkout stays clean."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tilerank.errors import TilerankError

_NOT_COPIED = ("metrics/", "dvc.lock")
_KEPT = (".dvc/cache", ".dvc/tmp", ".dvc/config.local", ".source.json", "dvc.lock")


def source_files(root: Path) -> tuple[str, ...]:
    """Files of the checkout that git tracks or does not ignore, as they are in the working tree, sorted."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        answer = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise TilerankError("git is not installed; it lists the files to copy") from error
    if answer.returncode != 0:
        reason = answer.stderr.decode(errors="replace").strip()
        raise TilerankError(f"{root} is not a git checkout ({reason}); clone the project to run this")
    names = sorted({name.decode() for name in answer.stdout.split(b"\0") if name})
    return tuple(name for name in names if (root / name).is_file())


def copy_tree(root: Path, destination: Path) -> None:
    """Bring ``destination`` up to date with the checkout ``root``, without records (metrics/, dvc.lock).

    Unchanged files are left alone, files gone from the source are deleted; the copy's own DVC cache, lock and
    outputs are kept, so that a second run does only what changed.
    """
    names = [name for name in source_files(root) if not name.startswith(_NOT_COPIED)]
    manifest = destination / ".copied-files"
    before = manifest.read_text(encoding="utf-8").splitlines() if manifest.exists() else []
    for name in set(before) - set(names):
        if not name.startswith(_KEPT):
            (destination / name).unlink(missing_ok=True)
    destination.mkdir(parents=True, exist_ok=True)
    manifest.write_text("\n".join(names) + "\n", encoding="utf-8")
    for name in names:
        source, target = root / name, destination / name
        if target.exists() and target.read_bytes() == source.read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.copying")
        shutil.copy2(source, temporary)
        os.replace(temporary, target)
    config = destination / ".dvc" / "config.local"
    config.parent.mkdir(exist_ok=True)
    config.write_text("[core]\n    no_scm = true\n    analytics = false\n", encoding="utf-8")
