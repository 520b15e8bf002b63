"""The drivers, ``cuda/tests/*driver.cc``: every variant against the reference in one small program, without Python.

compute-sanitizer runs it. By itself it also runs on libraries that hold nothing but PTX of an older architecture, which
CUDA compiles for the GPU at hand: code of that architecture, checked without a GPU of that age.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tilerank.errors import TilerankError
from tilerank.kernels import build, registry

RUN_LIMIT_S = 300.0
"""A run of one variant takes seconds."""

OPERATIONS = {"attention": "driver.cc", "block": "block_driver.cc", "layernorm": "block_driver.cc"}
"""The operations that have one, and where it is."""

_FOLDER = Path("tests")
_TALLY = re.compile(r"^(?P<variant>\w+): (?P<cases>\d+) cases, (?P<wrong>\d+) wrong, ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Tally:
    """What the driver found of one variant."""

    cases: int
    wrong: int  # cases whose result is not the reference's, or that the variant refused


def parse_tally(text: str, variant: str) -> Tally:
    """Read the driver's line about ``variant``; `TilerankError` when it ran no case of it."""
    for found in _TALLY.finditer(text):
        if found["variant"] == variant and int(found["cases"]) > 0:
            return Tally(int(found["cases"]), int(found["wrong"]))
    said = text.strip().splitlines()
    raise TilerankError(f"the driver ran no case of {variant}: {said[-1] if said else 'it printed nothing'}")


def build_driver(
    target: build.Target,
    operation: str = "attention",
    *,
    source: Path | None = None,
    cache_folder: Path | None = None,
) -> Path:
    """The driver of an operation over the library for ``target``, built unless the cache has it.

    Args:
        target: the library that it calls.
        operation: one of `OPERATIONS`.
        source: the ``cuda/`` folder to build; this installation's by default.
        cache_folder: where to keep the result; `build.cache_dir()` by default.

    Raises:
        TilerankError: as `build.build`, or the first error line when the driver does not compile.
    """
    source = (source or registry.cuda_dir()).resolve()
    library = build.build(target, source=source, cache_folder=cache_folder)
    code = source / _FOLDER / OPERATIONS[operation]
    shared = (source / _FOLDER / "driver.h").read_bytes()
    digest = build.digest_of(code.read_bytes(), shared, library.build_id.encode())
    folder = library.path.parent / f"driver-{digest[:16]}"
    program = folder / "driver"
    if program.exists():
        return program
    with tempfile.TemporaryDirectory(prefix=".driver-", dir=library.path.parent) as temporary:
        made = Path(temporary) / "driver"
        made.mkdir()
        (made / build.LIBRARY).symlink_to(library.path)
        tools = build.toolchain(target.backend == "cuda")
        if target.backend == "cuda":
            compiler = [tools.nvcc, "-x", "cu", "-ccbin", tools.cxx, "-DTILERANK_DRIVER_CUDA"]
        else:
            compiler = [tools.cxx, *([f"-fsanitize={target.sanitize}"] if target.sanitize else [])]
        options = ["-std=c++17", "-O2", "-I", source / "include", "-L", made, "-ltilerank"]
        # Beside the program, wherever that is; -Xlinker is how both compilers hand it on.
        options += ["-Xlinker", "-rpath", "-Xlinker", "$ORIGIN"]
        answer = subprocess.run(
            [*compiler, "-o", made / program.name, code, *options],
            capture_output=True,
            text=True,
            check=False,
            env=build.environment(tools.nvcc),
        )
        if answer.returncode != 0:
            said = (answer.stdout + answer.stderr).splitlines()
            wrong = next((line for line in said if "error" in line or "fatal" in line), "".join(said[-1:]))
            raise TilerankError(f"the driver does not compile: {wrong.strip()}")
        try:
            made.rename(folder)
        except OSError:  # another process was quicker
            if not program.exists():
                raise
    return program


def command(program: Path, variant: str, operation: str = "attention") -> list[str | Path]:
    """What runs every case of ``variant``."""
    which = [] if operation == "attention" else ["--operation", operation]
    return [program, *which, "--variant", variant]


def run_driver(program: Path, variant: str, operation: str = "attention") -> Tally:
    """Run every case of ``variant``; `TilerankError` with the program's last line when it did not get that far."""
    try:
        answer = subprocess.run(
            command(program, variant, operation), capture_output=True, text=True, check=False, timeout=RUN_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise TilerankError(f"the driver did not end within {RUN_LIMIT_S:.0f} s") from error
    return parse_tally(f"{answer.stderr}\n{answer.stdout}", variant)


def refusal(row: registry.Row, arch: int, device: int) -> str | None:
    """Why code of ``row`` for compute capability ``arch`` (times ten) cannot run on ``device``, or None when it can."""
    if row.min_sm > arch:
        return f"the variant needs compute capability {row.min_sm / 10}"
    if device < arch:
        return f"this device has compute capability {device / 10}, below {arch / 10}"
    return None
