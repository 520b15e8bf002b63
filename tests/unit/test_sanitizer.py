"""Reading what compute-sanitizer prints: clean, with findings, and without a verdict. The texts are those of release
2025.3.1 on an H200, on programs with one planted fault each, addresses shortened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tilerank import sanitizer
from tilerank.sanitizer import Findings, SanitizerError, parse_findings, run_sanitizer

CLEAN = """\
========= COMPUTE-SANITIZER
program ended: no error
========= ERROR SUMMARY: 0 errors
"""
NO_HAZARD = """\
========= COMPUTE-SANITIZER
program ended: no error
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""
OUT_OF_BOUNDS = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at oob(float *, int)+0x80
=========     by thread (32,0,0) in block (0,0,0)
=========     Access to 0x7f8e2a800100 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f8e2a800000 of size 256 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: main [0x8d6f] in faults
========= 
program ended: unspecified launch failure
========= ERROR SUMMARY: 33 errors
========= ERROR SUMMARY: 31 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
BAD_CALL = """\
========= COMPUTE-SANITIZER
========= Program hit cudaErrorInvalidValue (error 1) due to "invalid argument" on CUDA API call to cudaMemcpy.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: main [0x9068] in faults
========= 
program ended: no error
========= ERROR SUMMARY: 1 error
"""
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at race(float *)+0xc0
=========     and Read access at race(float *)+0xd0 [256 hazards]
========= 
program ended: no error
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
UNINITIALIZED = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at uninit(float *, float *)+0x60
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f55a2800000
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: main [0x8e86] in faults
========= 
program ended: no error
========= ERROR SUMMARY: 64 errors
========= ERROR SUMMARY: 62 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
DIVERGENT = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in warp.
=========     at divergent(float *)+0x70
=========     by thread (0,0,0) in block (0,0,0)
========= 
program ended: unspecified launch failure
========= ERROR SUMMARY: 16 errors
========= ERROR SUMMARY: 14 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
NOT_STARTED = """\
========= COMPUTE-SANITIZER
========= Error: Target application terminated before first instrumented API call
========= Error: couldn't find exit code.
"""
NO_PROGRAM = """\
========= COMPUTE-SANITIZER
========= Target application doesn't exist or is not a valid executable
"""
NOT_TRACKED = """\
========= COMPUTE-SANITIZER
========= Internal Sanitizer Error: The Sanitizer encountered an error while launching kernel and didn't track the \
launch. Errors might go undetected. (Unable to allocate enough memory to perform the requested operation)
========= ERROR SUMMARY: 0 errors
"""


@pytest.mark.parametrize(
    ("text", "findings"),
    [
        (CLEAN, Findings(0, 0, "")),
        (NO_HAZARD, Findings(0, 0, "")),
        (OUT_OF_BOUNDS, Findings(33, 0, "Invalid __global__ write of size 4 bytes")),
        (
            BAD_CALL,
            Findings(
                1,
                0,
                'Program hit cudaErrorInvalidValue (error 1) due to "invalid argument" on CUDA API call to cudaMemcpy.',
            ),
        ),
        (RACE, Findings(1, 0, "Error: Race reported between Write access at race(float *)+0xc0")),
        (
            RACE.replace(
                "1 hazard displayed (1 error, 0 warnings)", "1,203 hazards displayed (1,200 errors, 3 warnings)"
            ),
            Findings(1200, 3, "Error: Race reported between Write access at race(float *)+0xc0"),
        ),
        (UNINITIALIZED, Findings(64, 0, "Uninitialized __global__ memory read of size 4 bytes")),
        (DIVERGENT, Findings(16, 0, "Barrier error detected. Divergent thread(s) in warp.")),
    ],
)
def test_findings(text: str, findings: Findings) -> None:
    assert parse_findings(text) == findings
    assert findings.count == findings.errors + findings.warnings


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (NOT_STARTED, "terminated before first instrumented API call"),
        (NO_PROGRAM, "printed no summary: Target application doesn't exist"),
        (NOT_TRACKED, "Errors might go undetected"),
        (CLEAN.replace("program ended: no error", "========= Error: Device not supported."), "Device not supported"),
        (CLEAN.replace("errors", "error"), None),
        (OUT_OF_BOUNDS.split("program ended")[0], "printed no summary"),
        ("ERROR SUMMARY: 0 errors\n", "printed no summary: nothing of its own"),
        ("", "printed no summary: nothing of its own"),
    ],
)
def test_no_verdict_is_an_error_with_the_tools_reason(text: str, reason: str | None) -> None:
    if reason is None:
        assert parse_findings(text).count == 0
        return
    with pytest.raises(SanitizerError, match=reason) as caught:
        parse_findings(text)
    assert "\n" not in str(caught.value)


# ---- Running it ----


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a compute-sanitizer that prints what `answer` holds and notes how it was called."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/called\n. {tmp_path}/answer\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_the_tool_is_run_on_the_program(tool: Path) -> None:
    (tool / "text").write_text(RACE, encoding="utf-8")
    (tool / "answer").write_text(f"cat {tool}/text; exit 1", encoding="utf-8")
    findings, printed = run_sanitizer("racecheck", [Path("driver"), "--variant", "naive"])
    assert (findings.count, "program ended" in printed) == (1, True)
    called = (tool / "called").read_text(encoding="utf-8").split()
    assert called[:2] == ["--tool", "racecheck"]
    assert called[-3:] == ["driver", "--variant", "naive"]


def test_what_the_tool_could_not_do_is_told_with_its_exit_code(tool: Path) -> None:
    (tool / "answer").write_text("echo 'libcuda.so.1: cannot open' >&2; exit 255", encoding="utf-8")
    with pytest.raises(SanitizerError, match=r"no summary: .* \(exit code 255: libcuda\.so\.1: cannot open\)"):
        run_sanitizer("memcheck", ["driver"])


def test_a_program_that_hangs_ends(tool: Path) -> None:
    (tool / "answer").write_text("exec sleep 30", encoding="utf-8")
    with pytest.raises(SanitizerError, match="--tool memcheck did not end within 0 s"):
        run_sanitizer("memcheck", ["driver"], timeout=0.2)


def test_the_tool_may_stand_beside_nvcc_only(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sanitizer, "find_nvcc", lambda: tool / "nvcc")
    (tool / "answer").write_text("echo '========= ERROR SUMMARY: 0 errors'", encoding="utf-8")
    assert run_sanitizer("memcheck", ["driver"])[0].count == 0
    monkeypatch.setattr(sanitizer, "find_nvcc", lambda: None)
    with pytest.raises(SanitizerError, match="compute-sanitizer is not on the PATH"):
        run_sanitizer("memcheck", ["driver"])
