"""Builds the programs beside this file, one tree a set of sanitizers, and runs them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent
TREES = SOURCE.parents[2] / "build" / "host-checks"
"""Kept between runs: ninja compiles again what changed."""

SANITIZERS = {"plain": "", "address": "address,undefined", "thread": "thread"}
"""Flavour -> value of -fsanitize."""

_ENVIRONMENT = {
    # Stacks left by a failed launch look like leaks.
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}


def _tool(name: str) -> str:
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        pytest.skip(f"the host build needs {name}")
    return found


def _checked(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"


def build_tree(tree: Path, flavour: str, cuda: Path | None = None) -> None:
    """Configure and build the programs of a flavour in ``tree``, from the project's ``cuda/`` or a copy of it."""
    cmake, ninja, compiler = _tool("cmake"), _tool("ninja"), _tool("g++")
    tree.mkdir(parents=True, exist_ok=True)
    with (tree / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another pytest may build here
        options = {
            "CMAKE_MAKE_PROGRAM": ninja,
            "CMAKE_CXX_COMPILER": compiler,
            "CMAKE_COMPILE_WARNING_AS_ERROR": "ON",
            "Python3_EXECUTABLE": sys.executable,
            "TILERANK_SANITIZE": SANITIZERS[flavour],
        }
        if cuda is not None:
            options["TILERANK_CUDA_DIR"] = str(cuda)
        definitions = [f"-D{name}={value}" for name, value in options.items()]
        _checked([cmake, "-S", str(SOURCE), "-B", str(tree), "-G", "Ninja", *definitions])
        # A copy of the sources is for check_variants; the other programs do not depend on it.
        _checked([ninja, "-C", str(tree), *([] if cuda is None else ["check_variants"])])


@cache
def build(flavour: str) -> Path:
    """The folder with the programs of a flavour, built from the sources as they are now."""
    build_tree(TREES / flavour, flavour)
    return TREES / flavour


def run(flavour: str, program: str, *arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a program of a flavour to its end, whatever its exit status."""
    return run_in(build(flavour), program, *arguments, timeout_s=timeout_s)


def run_in(tree: Path, program: str, *arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a program of a built tree."""
    command = [str(tree / program), *arguments]
    environment = os.environ | _ENVIRONMENT

    def attempt(prefix: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            prefix + command, capture_output=True, text=True, check=False, timeout=timeout_s, env=environment
        )

    done = attempt([])
    # ThreadSanitizer of older compilers cannot start where the kernel randomises more address bits than it knows of.
    if "unexpected memory mapping" in done.stderr and shutil.which("setarch"):
        done = attempt(["setarch", "--addr-no-randomize"])
    return done
