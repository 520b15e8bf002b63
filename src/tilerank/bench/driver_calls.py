"""What a process asks of the CUDA driver: calls by name, and the kernels launched, whoever makes them.

``cuda/tests/driver_calls.c`` does the counting through CUPTI's callbacks, in any process, whatever framework and
CUDA runtime it has. Imports no framework.
"""

from __future__ import annotations

import ctypes
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilerank.errors import TilerankError
from tilerank.kernels import build, registry


@dataclass(frozen=True, slots=True)
class Calls:
    """Driver calls of a stretch of a process."""

    counts: Mapping[str, int]  # by name, e.g. cuLaunchKernel, cuMemcpyHtoDAsync_v2
    kernels: Sequence[str]  # mangled, in launch order
    streams: Sequence[str]  # of each launch, a handle


def cupti_candidates() -> Iterator[Path]:
    """Where CUPTI may be: packages of this Python (torch brings one), then toolkits."""
    for folder in dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")):
        yield from sorted(Path(folder).glob("nvidia/*/lib/libcupti.so.*"), reverse=True)
    for pattern in ("cuda*/extras/CUPTI/lib64", "cuda*/lib*", "cuda*/targets/*/lib"):
        yield from sorted(Path("/usr/local").glob(f"{pattern}/libcupti.so.*"), reverse=True)


class DriverCalls:
    """The counter of this process. No other profiler may run beside it.

    Args:
        folder: where it is compiled and keeps its file.
        candidates: libraries to try as CUPTI.

    Raises:
        TilerankError: there is no C compiler or no CUPTI that takes a subscriber; the message has the last reason.
    """

    def __init__(self, folder: Path, candidates: Iterator[Path] | Sequence[Path] | None = None) -> None:
        self._file = folder / "calls.txt"
        path = folder / "driver_calls.so"
        source = registry.cuda_dir() / "tests" / "driver_calls.c"
        command = ["cc", "-shared", "-fPIC", "-o", path, source, "-ldl", "-lpthread"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, check=False, env=build.environment())
        except OSError as error:
            raise TilerankError(f"driver calls are not counted: there is no C compiler ({error})") from error
        if answer.returncode != 0:
            raise TilerankError(f"driver calls are not counted: {source.name} does not compile: {answer.stderr[:300]}")
        self._library = ctypes.CDLL(str(path))
        for name in ("driver_calls_start", "driver_calls_stop"):
            getattr(self._library, name).restype = ctypes.c_char_p
        reason = "there is no CUPTI (libcupti.so)"
        for candidate in cupti_candidates() if candidates is None else candidates:
            self._cupti = candidate
            try:
                self.of(lambda: None)
            except TilerankError as error:
                reason = str(error)
                continue
            return
        raise TilerankError(f"driver calls are not counted: {reason}")

    def of(self, run: Callable[[], Any]) -> Calls:
        """The calls of this process while ``run`` runs, other threads' included."""
        self._check(self._library.driver_calls_start(str(self._cupti).encode()))
        try:
            run()
        finally:
            refused = self._library.driver_calls_stop(str(self._file).encode())
        self._check(refused)
        return read_calls(self._file.read_text(encoding="utf-8"))

    def _check(self, reason: bytes | None) -> None:
        if reason is not None:
            raise TilerankError(f"{self._cupti.name}: {reason.decode(errors='replace')}")


def read_calls(text: str) -> Calls:
    """The lines that the counter writes: ``call COUNT NAME`` and ``kernel STREAM NAME``."""
    counts: dict[str, int] = {}
    kernels: list[str] = []
    streams: list[str] = []
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        first, name = rest.split(" ", 1)
        if kind == "kernel":
            streams.append(first)
            kernels.append(name)
        else:
            counts[name] = counts.get(name, 0) + int(first)
    return Calls(counts, tuple(kernels), tuple(streams))
