"""Build ``libtilerank.so`` into a cache folder: on first use, or ahead of it by ``python -m tilerank.kernels.build``.

A library's name in the cache is its build id: a digest of the sources, the compilers and the options. An edited
source therefore has another name and is always built, and a library of another source is never picked up.

The build tree keeps its own copy of the sources, in which a file is rewritten only when its content changed. Ninja
decides by file times; this way they follow content, and a header put back with an old date is still compiled again.

One process builds in a tree at a time. The lock is the operating system's (flock) and is shared with the compilers
it starts, so a killed build frees it as soon as nothing of that build writes any more.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tilerank.errors import TilerankError
from tilerank.kernels.registry import cuda_dir

ALL_ARCHS = "75-real;80-real;86-real;89-real;90a-real;90-virtual"
"""What ``make build`` compiles for: every architecture that a variant is tuned for, and PTX for newer ones."""

WAIT_S = 50.0
"""How long a lock may be held without a sign of life before waiting for it is given up."""

BUILD_LIMIT_S = 3600.0
"""A build that takes longer than this hangs."""

LIBRARY = "libtilerank.so"

CXX_NAMES = ("g++", "c++", "clang++")

_BACKENDS = ("cuda", "host", "cpu")
_NOT_SOURCES = ("tests", "examples", "bindings", "__pycache__")
# Variables by which compilers and CMake take options from outside: the build id could not account for them.
_FLAG_VARIABLES = (
    *(
        "CFLAGS",
        "CXXFLAGS",
        "CPPFLAGS",
        "LDFLAGS",
        "CUDAFLAGS",
        "CUDAARCHS",
        "CUDAHOSTCXX",
        "CPATH",
        "CPLUS_INCLUDE_PATH",
    ),
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CMAKE_GENERATOR", "CMAKE_BUILD_TYPE", "CMAKE_TOOLCHAIN_FILE"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """What to build: ``cuda`` for GPUs of ``archs`` (as CMAKE_CUDA_ARCHITECTURES lists them), ``host`` to run the
    CUDA sources on the CPU with ``sanitize`` (comma-separated), ``cpu`` for the reference alone."""

    backend: str
    archs: str = ""
    sanitize: str = ""

    def __post_init__(self) -> None:
        if self.backend not in _BACKENDS:
            raise ValueError(f"backend is {self.backend!r}; allowed: {', '.join(_BACKENDS)}")
        if (self.backend == "cuda") != bool(self.archs):
            raise ValueError(
                f"archs is {self.archs!r}; backend cuda needs a list such as '80-real;90a-real', others none"
            )
        if self.sanitize and self.backend != "host":
            raise ValueError(f"sanitize is {self.sanitize!r}; only backend host runs under sanitizers")


@dataclass(frozen=True, slots=True)
class Built:
    """A library in the cache."""

    path: Path
    build_id: str


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The programs a build runs, and what they say their versions are."""

    cmake: Path
    ninja: Path
    cxx: Path
    nvcc: Path | None
    versions: str


def _find_program(name: str) -> Path | None:
    """``name`` beside this Python (where wheels put programs), else on the PATH."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    return Path(found) if found else None


def find_nvcc() -> Path | None:
    """nvcc from the PATH, $CUDA_HOME or $CUDA_PATH, the wheel ``nvidia-cuda-nvcc``, or /usr/local/cuda."""
    candidates = [shutil.which("nvcc")]
    candidates += [
        os.path.join(os.environ[name], "bin", "nvcc") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)
    ]
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        candidates += [str(path) for path in sorted(Path(folder).glob("nvidia/*/bin/nvcc"), reverse=True)]
    candidates.append("/usr/local/cuda/bin/nvcc")
    return next((Path(path) for path in candidates if path and os.access(path, os.X_OK)), None)


def _version(program: Path) -> str:
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise TilerankError(f"{program} does not run ({error.strerror}); mend it or take it off the PATH") from error
    if answer.returncode != 0:
        raise TilerankError(f"{program} --version failed: {(answer.stderr or answer.stdout).strip()[:200]}")
    return answer.stdout.strip()


@cache
def nvcc_version(nvcc: Path) -> str:
    """The version of an nvcc, e.g. ``13.0.88``."""
    text = _version(nvcc)
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    if match is None:
        raise TilerankError(f"{nvcc} --version names no version: {text[:200]!r}")
    return match.group(1)


@cache
def cxx_compiler() -> tuple[Path, str]:
    """The C++ compiler and its version; `TilerankError` with what to install when there is none."""
    compiler = next(filter(None, map(_find_program, CXX_NAMES)), None)
    if compiler is None:
        raise TilerankError("there is no C++ compiler: the system's package manager brings one (apt install g++)")
    return compiler, _version(compiler).splitlines()[0]


@cache
def toolchain(needs_nvcc: bool) -> Toolchain:
    """The programs found on this machine; `TilerankError` with what to install when one is missing."""
    programs = {name: _find_program(name) for name in ("cmake", "ninja")}
    programs["c++"] = next(filter(None, map(_find_program, CXX_NAMES)), None)
    missing = [name for name, path in programs.items() if path is None]
    if missing:
        raise TilerankError(
            f"building the kernel library needs {', '.join(missing)}: `pip install cmake ninja` brings these two, "
            "the system's package manager (apt install g++) the compiler c++"
        )
    nvcc = find_nvcc() if needs_nvcc else None
    if needs_nvcc and nvcc is None:
        raise TilerankError(
            "building for CUDA needs nvcc: put the CUDA toolkit's bin folder on PATH, set CUDA_HOME, "
            "or `pip install nvidia-cuda-nvcc nvidia-cuda-cccl`"
        )
    versions = [_version(programs["c++"]).splitlines()[0], *([f"nvcc {nvcc_version(nvcc)}"] if nvcc else [])]
    return Toolchain(programs["cmake"], programs["ninja"], programs["c++"], nvcc, "; ".join(versions))


def cache_dir() -> Path:
    """Where built libraries are kept: $TILERANK_CACHE, else tilerank below the user's cache folder."""
    if os.environ.get("TILERANK_CACHE"):
        return Path(os.environ["TILERANK_CACHE"]).expanduser().resolve()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "tilerank"
    try:
        return Path.home() / ".cache" / "tilerank"
    except RuntimeError as error:  # no $HOME, and a user without an entry, as containers have
        raise TilerankError("there is no home folder to keep the library in; set TILERANK_CACHE to a folder") from error


def read_sources(source: Path) -> dict[str, bytes]:
    """Every file below a ``cuda/`` folder that a library is made of: relative path -> content. Hidden files (the
    formatter's settings) are none, and a wheel would leave them behind."""
    files = {}
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if path.is_file() and not set(relative.parts) & set(_NOT_SOURCES) and not path.name.startswith("."):
            files[relative.as_posix()] = path.read_bytes()
    return files


def digest_of(*parts: bytes) -> str:
    """One digest, in hexadecimal, of several pieces whose borders count."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _build_id(target: Target, versions: str, files: Mapping[str, bytes]) -> str:
    sources = [item for name in sorted(files) for item in (name.encode(), files[name])]
    options = (target.backend, target.archs, target.sanitize, versions)
    return digest_of(*(text.encode() for text in options), *sources)[:32]


def build_id(target: Target, source: Path | None = None) -> str:
    """The id that a library built now from ``source`` (this installation's ``cuda/``) would carry."""
    files = read_sources(source or cuda_dir())
    return _build_id(target, toolchain(target.backend == "cuda").versions, files)


def library_path(identity: str, cache_folder: Path | None = None) -> Path:
    """Where the library with that build id is kept."""
    return (cache_folder or cache_dir()) / f"libtilerank-{identity}.so"


# ---- The library that a wheel brings ----

MANIFEST = "manifest.json"


def packaged_dir() -> Path:
    """Where a wheel keeps what was built ahead of time (`python -m stages.wheel`); absent in a checkout."""
    return Path(__file__).resolve().parent.parent / "_lib"


@dataclass(frozen=True, slots=True)
class Packaged:
    """A library that came with the package, built from the very sources that came with it."""

    built: Built
    target: Target

    def serves(self, target: Target) -> bool:
        """Whether it does what a build for ``target`` would: it holds the reference, and the architectures' code."""
        if target.backend == "cpu":
            return True
        return self.target.backend == target.backend and set(target.archs.split(";")) <= set(
            self.target.archs.split(";")
        )


def write_package(folder: Path, target: Target, *, source: Path | None = None) -> Packaged:
    """Build the library for ``target`` into ``folder``, with a manifest that `packaged` reads. Raises as `build`."""
    built = build(target, source=source)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LIBRARY
    keep(built.path.read_bytes(), path)
    record = {
        "backend": target.backend,
        "archs": target.archs,
        "build_id": built.build_id,
        "compilers": toolchain(target.backend == "cuda").versions,
    }
    (folder / MANIFEST).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return Packaged(Built(path, built.build_id), target)


def packaged() -> Packaged | None:
    """The library that came with the package; None without one, and when the sources beside it are not those that it
    was built from (someone edited them: then the edit is what is built and run)."""
    folder = packaged_dir()
    if not (folder / MANIFEST).is_file():
        return None
    record = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    target = Target(record["backend"], record["archs"])
    identity = _build_id(target, record["compilers"], read_sources(cuda_dir()))
    return Packaged(Built(folder / LIBRARY, identity), target) if identity == record["build_id"] else None


_PROBE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
count, device, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
    for index in range(count.value):
        cuda.cuDeviceGet(ctypes.byref(device), index)
        capability = 0
        for attribute, factor in ((75, 10), (76, 1)):  # compute capability major, minor
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            capability += factor * value.value
        print(capability)
"""


@cache
def present_capabilities() -> tuple[int, ...]:
    """Compute capabilities (times ten) of the CUDA devices that this process could use; empty without any.

    Asked in a process of its own: initialising CUDA here would break callers that fork later.
    """
    answer = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    return tuple(sorted({int(line) for line in answer.stdout.split()})) if answer.returncode == 0 else ()


def archs_for(capabilities: tuple[int, ...]) -> str:
    """The architectures to compile for so that devices of these capabilities run at their best."""
    too_old = [capability for capability in capabilities if capability < 75]
    if too_old:
        raise TilerankError(
            f"compute capability {too_old[0] / 10} is not supported: nvcc 13 compiles for 7.5 (Turing) and newer"
        )
    # 90a has Hopper's own instructions; what is newer than any tuned variant compiles the PTX when it loads it.
    names = {90: "90a-real"} | {c: f"{c}-real" if c < 90 else "90-virtual" for c in capabilities if c != 90}
    return ";".join(dict.fromkeys(names[capability] for capability in capabilities))


def _check_archs(archs: str) -> None:
    for arch in archs.split(";"):
        number = re.fullmatch(r"(\d+)[a-z]?(?:-real|-virtual)?", arch)
        if number is None or int(number.group(1)) < 75:
            raise TilerankError(
                f"--archs names {arch!r}; allowed: all, native, or numbers from 75 (nvcc 13 knows no older GPU), "
                "each with -real, -virtual or nothing behind it, separated by ';'"
            )


def gencode(arch: str) -> list[str]:
    """nvcc's flags for one entry of a list such as ALL_ARCHS: ``90a-real`` is machine code, ``90-virtual`` PTX."""
    number, _, kind = arch.partition("-")
    codes = {"real": f"sm_{number}", "virtual": f"compute_{number}", "": f"[compute_{number},sm_{number}]"}
    if kind not in codes:
        raise TilerankError(f"architecture {arch!r}: expected a number with -real, -virtual or nothing behind it")
    return [f"-gencode=arch=compute_{number},code={codes[kind]}"]


def default_target() -> Target:
    """What this machine can run: its own GPUs where there are some and an nvcc, else the reference."""
    capabilities = present_capabilities()
    if capabilities and find_nvcc() is not None:
        return Target("cuda", archs_for(capabilities))
    return Target("cpu")


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say what to do when the cache is a read-only folder, a full disk or no folder at all."""
    try:
        yield
    except OSError as error:
        raise TilerankError(
            f"{folder} cannot be written ({error.strerror or error}); set TILERANK_CACHE to a writable folder"
        ) from error


@contextlib.contextmanager
def _locked(path: Path, sign_of_life: Path, wait_s: float) -> Iterator[int]:
    """Hold the lock file ``path``; yields its descriptor, which children may inherit.

    Whoever builds touches ``sign_of_life``. `TilerankError` naming the lock when it stays held and silent.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        last_seen, last_sign = time.monotonic(), None
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                sign = sign_of_life.stat().st_mtime_ns if sign_of_life.exists() else None
                if sign != last_sign:
                    last_seen, last_sign = time.monotonic(), sign
                if time.monotonic() - last_seen > wait_s:
                    holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
                    raise TilerankError(
                        f"{path} is locked by process {holder}, which has built nothing for {wait_s:.0f} s; "
                        "end that process (or what it started), or set TILERANK_CACHE to another folder"
                    ) from None
                time.sleep(0.1)
            except OSError as error:
                raise TilerankError(
                    f"{path} cannot be locked ({error.strerror}); set TILERANK_CACHE to a local folder"
                ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _settled(tree: Path) -> Iterator[None]:
    """Start from nothing when the last build here was killed; a compile error leaves the rest of a tree usable."""
    mark = tree / "settled"
    if not mark.exists():
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir()
    mark.unlink(missing_ok=True)
    try:
        yield
    finally:
        mark.touch()


def _sync(files: Mapping[str, bytes], folder: Path) -> None:
    """Make ``folder`` hold exactly ``files``, touching only what differs in content."""
    for path in sorted(folder.rglob("*"), reverse=True):
        relative = path.relative_to(folder).as_posix()
        if path.is_dir():
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
        elif relative not in files:
            path.unlink()
    for name, content in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def environment(nvcc: Path | None = None) -> dict[str, str]:
    """The environment that compilers run in: without variables that would add options of their own.

    nvcc: links against what lies beside it. The wheel has these libraries in ``lib``, where nvcc does not look.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _FLAG_VARIABLES}
    if nvcc is not None and (libraries := nvcc.parent.parent / "lib").joinpath("libcudart_static.a").exists():
        kept["LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(libraries), kept.get("LIBRARY_PATH")]))
    return kept


def _run_logged(command: list[str | Path], nvcc: Path | None, log: Path, lock: int, bar: _Bar) -> None:
    """Run one build program, appending its output to ``log``; `TilerankError` with its first error line."""
    with (
        log.open("a", encoding="utf-8") as output,
        subprocess.Popen(
            [str(item) for item in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=environment(nvcc),
            pass_fds=(lock,),
        ) as process,
    ):
        deadline = threading.Timer(BUILD_LIMIT_S, process.kill)
        deadline.start()
        try:
            lines = []
            for line in process.stdout or ():
                lines.append(line)
                output.write(line)
                output.flush()
                bar.show(line)
            code = process.wait()
        finally:
            deadline.cancel()
            if process.poll() is None:  # interrupted: leave no compiler behind
                process.terminate()
    if code != 0:
        wrong = next((line for line in lines if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)), "")
        raise TilerankError(
            f"building the kernel library failed (exit code {code}): {(wrong or ''.join(lines[-1:])).strip()[:300]} "
            f"(whole log: {log})"
        )


class _Bar:
    """Ninja's ``[3/8]`` lines as a progress bar on a terminal's stderr."""

    def __init__(self, label: str) -> None:
        from tqdm import tqdm

        self._bar = tqdm(desc=label, unit="file", disable=None, leave=False)

    def show(self, line: str) -> None:
        match = re.match(r"\[(\d+)/(\d+)\]", line)
        if match:
            self._bar.total = int(match.group(2))
            self._bar.update(int(match.group(1)) - self._bar.n)

    def close(self) -> None:
        self._bar.close()


@contextlib.contextmanager
def _heartbeat(path: Path) -> Iterator[None]:
    """Touch ``path`` every second: one source file can take longer than others are willing to wait."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(1.0):
            path.touch()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def build(
    target: Target,
    *,
    source: Path | None = None,
    cache_folder: Path | None = None,
    wait_s: float = WAIT_S,
) -> Built:
    """The library for ``target``, built unless the cache has it.

    Args:
        target: what to build.
        source: the ``cuda/`` folder to build; this installation's by default.
        cache_folder: where to keep the result; `cache_dir()` by default.
        wait_s: seconds to wait for another builder that shows no sign of life.

    Raises:
        TilerankError: a missing tool, a compile error (its first line, and where the log is), or a held lock.
    """
    source = (source or cuda_dir()).resolve()
    folder = cache_folder or cache_dir()
    tools = toolchain(target.backend == "cuda")
    files = read_sources(source)
    identity = _build_id(target, tools.versions, files)
    result = library_path(identity, folder)
    if result.exists():
        return Built(result, identity)

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    where = (
        str(source),
        target.backend,
        target.archs,
        target.sanitize,
        tools.versions,
        str(tools.cxx),
        str(tools.nvcc),
    )
    tree = folder / f"tree-{digest_of(*map(str.encode, where))[:16]}"
    log = tree.with_suffix(".log")
    with writing(folder), _locked(tree.with_suffix(".lock"), log, wait_s) as lock:
        if result.exists():  # the builder we waited for made it
            return Built(result, identity)
        log.write_text(f"{target} {identity}\n", encoding="utf-8")
        with _settled(tree):
            _sync(files, tree / "src")
            bar = _Bar(f"building the kernel library ({target.backend} {target.archs.replace(';', ' ')})".strip())
            with contextlib.closing(bar), _heartbeat(log):
                _run_logged(_configure_command(tools, target, identity, tree), tools.nvcc, log, lock, bar)
                _run_logged([tools.ninja, "-C", tree / "build", "tilerank"], tools.nvcc, log, lock, bar)
        keep((tree / "build" / LIBRARY).read_bytes(), result)
    return Built(result, identity)


def keep(content: bytes, result: Path) -> None:
    """Write a shared object to where it is kept: under a name of this process first, and on disk before it is renamed.
    Loading half of one is a crash."""
    temporary = result.with_name(f".{result.name}.{os.getpid()}")
    with temporary.open("wb") as output:
        output.write(content)
        output.flush()
        os.fsync(output.fileno())
    os.replace(temporary, result)


def _configure_command(tools: Toolchain, target: Target, identity: str, tree: Path) -> list[str | Path]:
    definitions = {
        "TILERANK_BACKEND": target.backend,
        "TILERANK_SANITIZE": target.sanitize,
        "TILERANK_BUILD_ID": identity,
        "CMAKE_MAKE_PROGRAM": tools.ninja,
        "CMAKE_CXX_COMPILER": tools.cxx,
        "Python3_EXECUTABLE": sys.executable,
    }
    if target.backend == "cuda":
        definitions["TILERANK_ARCHS"] = target.archs
        definitions["CMAKE_CUDA_COMPILER"] = tools.nvcc
        definitions["CMAKE_CUDA_HOST_COMPILER"] = tools.cxx
    options = [f"-D{name}={value}" for name, value in definitions.items()]
    return [tools.cmake, "-G", "Ninja", "-S", tree / "src", "-B", tree / "build", *options]


def main(arguments: list[str] | None = None) -> None:
    """``python -m tilerank.kernels.build``: build ahead of first use and print where the library is."""
    parser = argparse.ArgumentParser(prog="python -m tilerank.kernels.build", description=main.__doc__)
    parser.add_argument("--backend", choices=_BACKENDS, help="default: cuda where there is an nvcc, else cpu")
    parser.add_argument(
        "--archs", default="all", help=f"cuda only: all ({ALL_ARCHS}), native (this machine's GPUs), or a list like it"
    )
    options = parser.parse_args(arguments)
    backend = options.backend or ("cuda" if find_nvcc() else "cpu")
    archs = ""
    try:
        if backend == "cuda":
            archs = ALL_ARCHS if options.archs == "all" else options.archs
            if archs == "native":
                archs = archs_for(present_capabilities())
                if not archs:
                    raise TilerankError("--archs native: this machine has no CUDA device; name the architectures")
            _check_archs(archs)
        elif options.archs != "all":
            raise TilerankError(f"--archs {options.archs}: backend {backend} compiles for no GPU; leave it out")
        print(build(Target(backend, archs)).path)
    except TilerankError as error:
        print(f"build: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
