"""What nvcc makes of a variant: registers, memory and a digest of the machine code, for every architecture.

The digest stands for the code that runs: it changes neither with the folder of the sources nor with their comments
(no line information is compiled in, and sources are named by relative paths), so a record that depends on it stays
fresh when only words changed.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tilerank.errors import TilerankError
from tilerank.kernels import build
from tilerank.kernels.registry import Row, cuda_dir

DEVICE_FLAGS = ("-std=c++17", "-O3", "-DNDEBUG")
"""What reaches the device code in ``cuda/CMakeLists.txt`` too."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel needs, as ``ptxas -v`` says it; bytes a thread, shared memory bytes a block."""

    registers: int
    shared_bytes: int  # static; dynamic shared memory is known at launch only
    stack_bytes: int  # local memory; 0 when everything is in registers
    spill_bytes: int  # stores plus loads


@dataclass(frozen=True, slots=True)
class Cubin:
    """One variant's machine code for one architecture."""

    sha256: str
    kernels: Mapping[str, Resources]  # by the kernel's name, e.g. "tilerank::naive::kernel<float>"


_ENTRY = re.compile(r"Compiling entry function '(\S+)' for")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_ptxas(text: str) -> dict[str, Resources]:
    """Read what ``ptxas -v`` printed: mangled kernel name -> resources. Device functions that were not inlined are
    listed there too and left out: their stack is part of their kernel's."""
    stacks: dict[str, tuple[int, int]] = {}
    found: dict[str, Resources] = {}
    entry = function = None
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            entry = function = match.group(1)
        elif match := _PROPERTIES.search(line):
            function = match.group(1)
        elif (match := _STACK.search(line)) and function is not None:
            stacks[function] = (int(match.group(1)), int(match.group(2)) + int(match.group(3)))
        elif (match := _USED.search(line)) and entry is not None:
            shared = _SHARED.search(line)
            stack_bytes, spill_bytes = stacks.get(entry, (0, 0))
            found[entry] = Resources(
                int(match.group(1)), int(shared.group(1)) if shared else 0, stack_bytes, spill_bytes
            )
            entry = None
    return found


def _demangle(names: list[str]) -> dict[str, str]:
    """Readable kernel names, without return type and parameters; unchanged where there is no c++filt."""
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return {name: name for name in names}
    answer = subprocess.run([tool, *names], capture_output=True, text=True, check=True)
    readable = (line.removeprefix("void ").split("(", 1)[0] for line in answer.stdout.splitlines())
    return dict(zip(names, readable, strict=True))


def architectures(row: Row, archs: str = build.ALL_ARCHS) -> tuple[str, ...]:
    """The entries of ``archs`` that ``row`` is compiled to machine code for."""
    return tuple(
        arch for arch in archs.split(";") if arch.endswith("-real") and int(re.sub(r"\D", "", arch)) >= row.min_sm
    )


def compile_cubin(row: Row, arch: str, nvcc: Path, source: Path | None = None) -> Cubin:
    """Compile a CUDA row for one architecture (``90a-real``).

    Raises:
        TilerankError: it does not compile (the first error line).
    """
    with tempfile.TemporaryDirectory(prefix="tilerank-cubin-") as folder:
        cubin = Path(folder) / "variant.cubin"
        flags = [*DEVICE_FLAGS, "-I.", "-Iinclude", *build.gencode(arch), "-Xptxas", "-v"]
        command = [str(nvcc), *flags, "-cubin", "-o", str(cubin), row.file]
        answer = subprocess.run(
            command, cwd=source or cuda_dir(), capture_output=True, text=True, check=False, env=build.environment()
        )
        said = answer.stdout + answer.stderr
        if answer.returncode != 0:
            wrong = next(
                (line for line in said.splitlines() if "error" in line or "fatal" in line), said.strip()[-200:]
            )
            raise TilerankError(f"{row.file} does not compile for {arch}: {wrong.strip()}")
        resources = parse_ptxas(said)
        if not resources:
            raise TilerankError(f"{row.file}: nvcc names no kernel in it for {arch}")
        names = _demangle(sorted(resources))
        kernels = {names[name]: resources[name] for name in sorted(resources)}
        return Cubin(hashlib.sha256(cubin.read_bytes()).hexdigest(), kernels)


_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def sources_of(row: Row, source: Path | None = None) -> tuple[str, ...]:
    """The files below ``source`` that a row is compiled from: its own and whatever it includes, by name.

    Includes are read without a preprocessor: one that only another build takes (the host's) counts too.
    """
    files = build.read_sources(source or cuda_dir())
    found: set[str] = set()
    pending = [row.file]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        for included in _INCLUDE.findall(files[name].decode(encoding="utf-8")):
            beside = posixpath.normpath(posixpath.join(posixpath.dirname(name), included))
            pending += [each for each in (beside, included, f"include/{included}") if each in files][:1]
    return tuple(sorted(found))


def source_digest(row: Row, source: Path | None = None) -> str:
    """Digest of the text that a row is compiled from, comments included: when to compile it again, and what is left to
    say of its code without a compiler."""
    files = build.read_sources(source or cuda_dir())
    digest = hashlib.sha256()
    for name in sources_of(row, source):
        digest.update(f"{name}\0{hashlib.sha256(files[name]).hexdigest()}\n".encode())
    return digest.hexdigest()


def describe(
    row: Row, nvcc: Path | None, source: Path | None = None, progress: Callable[[str], None] = lambda arch: None
) -> dict[str, object]:
    """The record of one row: ``available``, and either why not or ``nvcc``, ``cubin_sha256`` and ``archs``.

    ``progress`` is called with each architecture before it is compiled.
    """
    if row.device == "cpu":
        return {"available": False, "reason": "host code: there is nothing to compile for a GPU"}
    if nvcc is None:
        return {"available": False, "reason": "no nvcc on this machine"}
    archs: dict[str, object] = {}
    digest = hashlib.sha256()
    for arch in architectures(row):
        progress(arch)
        cubin = compile_cubin(row, arch, nvcc, source)
        name = f"sm_{arch.removesuffix('-real')}"
        digest.update(f"{name} {cubin.sha256}\n".encode())
        archs[name] = {
            "cubin_sha256": cubin.sha256,
            "kernels": {kernel: _fields(resources) for kernel, resources in cubin.kernels.items()},
            **{field: max(_fields(each)[field] for each in cubin.kernels.values()) for field in Resources.__slots__},
        }
    return {
        "available": True,
        "nvcc": build.nvcc_version(nvcc),
        "cubin_sha256": digest.hexdigest(),
        "archs": archs,
    }


def _fields(resources: Resources) -> dict[str, int]:
    return {name: getattr(resources, name) for name in Resources.__slots__}
