"""compute-sanitizer: run one of its tools on a program, and read what it printed.

A tool that is missing, was not allowed or did not see the program is a named error: no finding is not the same as no
error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilerank.errors import TilerankError
from tilerank.kernels.build import find_nvcc
from tilerank.profiling import last_line, run_tool

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


class SanitizerError(TilerankError):
    """A tool gave no verdict; the message carries its own reason."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What one tool found in one program."""

    errors: int
    warnings: int  # hazards between accesses that may be meant (racecheck)
    first: str  # the first finding in the tool's words; "" without any

    @property
    def count(self) -> int:
        """Errors and warnings: a clean program has neither."""
        return self.errors + self.warnings


_MARK = "========="
_ERRORS = re.compile(rf"{_MARK} ERROR SUMMARY: (?P<errors>[\d,]+) errors?\b")
_HAZARDS = re.compile(
    rf"{_MARK} RACECHECK SUMMARY: [\d,]+ hazards? displayed "
    r"\((?P<errors>[\d,]+) errors?, (?P<warnings>[\d,]+) warnings?\)"
)
# With one of these a summary, if there is one, does not speak of the whole program.
_BLIND = re.compile(
    rf"{_MARK}.*(terminated before first instrumented API call|[Dd]evice not supported|might go undetected"
    r"|Sanitizer will be disabled|No attachable process found)"
)
_FINDING = re.compile(rf"{_MARK} (?!COMPUTE-SANITIZER|[A-Z]+ SUMMARY)(?P<text>\S.*)")


def parse_findings(text: str) -> Findings:
    """Read what a tool printed, the program's own lines among it.

    Raises `SanitizerError` when there is no summary, or when the tool says that it did not see everything.
    """
    lines = text.splitlines()
    blind = next((line for line in lines if _BLIND.match(line)), None)
    if blind is not None:
        raise SanitizerError(f"compute-sanitizer did not see the program: {blind.removeprefix(_MARK).strip()}")
    summary = next((found for line in lines if (found := _HAZARDS.match(line) or _ERRORS.match(line))), None)
    if summary is None:
        said = [line.removeprefix(_MARK).strip() for line in lines if line.startswith(_MARK)]
        raise SanitizerError(f"compute-sanitizer printed no summary: {said[-1] if said else 'nothing of its own'}")
    counts = {name: int(value.replace(",", "")) for name, value in summary.groupdict().items()}
    first = next((found["text"] for line in lines if (found := _FINDING.match(line))), "")
    return Findings(counts["errors"], counts.get("warnings", 0), first if any(counts.values()) else "")


def _find_tool() -> str | None:
    """compute-sanitizer from the PATH, or beside nvcc."""
    nvcc = find_nvcc()
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=nvcc and str(nvcc.parent))


def run_sanitizer(tool: str, command: Sequence[str | Path], *, timeout: float = 300.0) -> tuple[Findings, str]:
    """Run ``command`` under a tool of `TOOLS`; its findings, and all that was printed.

    Raises the errors of `parse_findings`; `SanitizerError` also when there is no compute-sanitizer, or ``timeout``
    seconds pass. An exit code of the program is not one: errors found make it fail.
    """
    program = _find_tool()
    if program is None:
        raise SanitizerError(
            "compute-sanitizer is not on the PATH; it comes with the CUDA toolkit (or `pip install "
            "nvidia-cuda-sanitizer-api`)"
        )
    try:
        answer = run_tool([program, "--tool", tool, "--print-limit", "5", *map(str, command)], timeout)
    except subprocess.TimeoutExpired as error:
        raise SanitizerError(f"compute-sanitizer --tool {tool} did not end within {timeout:.0f} s") from error
    printed = f"{answer.stdout}\n{answer.stderr}"
    try:
        return parse_findings(printed), printed
    except SanitizerError as error:
        raise SanitizerError(f"{error} (exit code {answer.returncode}: {last_line(answer)})") from error
