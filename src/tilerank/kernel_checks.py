"""Is a variant right beyond its result: clean under compute-sanitizer, and right when compiled for older GPUs?

The driver (`tilerank.kernels.driver`) runs the variant on lengths that straddle its tiles: all that it serves at every
length, from the GPU's own code and from PTX of each architecture in `PTX_ARCHS`, and a sample of it under each tool,
which is slow. Nothing is timed, so all of them run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tilerank.errors import TilerankError
from tilerank.kernels import build, driver
from tilerank.kernels.driver import Tally
from tilerank.kernels.registry import Row
from tilerank.sanitizer import TOOLS, Findings, run_sanitizer

PTX_ARCHS = (75, 80)
"""Compute capabilities times ten whose code is checked on newer GPUs: those of the T4 and the A100."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check found, or why there is nothing to say."""

    check: str  # a tool, native or ptx_75
    reason: str = ""  # why the check is not available; then nothing else is set
    findings: Findings | None = None  # a tool's
    tally: Tally | None = None  # None also where a finding stopped the program before its end


def check_variant(row: Row, capabilities: tuple[int, ...], operation: str = "attention") -> dict[str, Any]:
    """The record of a CUDA row of that operation on GPUs of these compute capabilities (times ten); see `record_of`.

    Raises:
        TilerankError: the library or the driver cannot be built.
    """
    program = driver.build_driver(build.Target("cuda", build.archs_for(capabilities)), operation)
    jobs: dict[str, Callable[[str], Outcome]] = {tool: partial(_under, program, row, operation) for tool in TOOLS}
    jobs["native"] = lambda check: Outcome(check, tally=driver.run_driver(program, row.name, operation))
    jobs |= {f"ptx_{arch}": partial(_from_ptx, row, operation, arch, min(capabilities)) for arch in PTX_ARCHS}
    with ThreadPoolExecutor(len(jobs)) as pool:
        outcomes = list(pool.map(_outcome, jobs, jobs.values()))
    return record_of([_without_verdict(outcome) for outcome in outcomes] if row.products == "tf32" else outcomes)


def _without_verdict(outcome: Outcome) -> Outcome:
    """What is left to say of a lossy row: the driver holds every fp32 row to fp32's bound. tests/gpu judges it."""
    if outcome.tally is None:
        return outcome
    if outcome.findings is None:
        return Outcome(outcome.check, reason="the row is lossy, and the driver's bound is that of rows that are not")
    return replace(outcome, tally=replace(outcome.tally, wrong=0))


def _outcome(check: str, job: Callable[[str], Outcome]) -> Outcome:
    try:
        return job(check)
    except TilerankError as error:
        return Outcome(check, reason=str(error))


def _under(program: Path, row: Row, operation: str, tool: str) -> Outcome:
    findings, printed = run_sanitizer(tool, [*driver.command(program, row.name, operation), "--sample"])
    try:
        return Outcome(tool, findings=findings, tally=driver.parse_tally(printed, row.name))
    except TilerankError:
        if findings.count == 0:  # clean, but of what?
            raise
        return Outcome(tool, findings=findings)


def _from_ptx(row: Row, operation: str, arch: int, device: int, check: str) -> Outcome:
    reason = driver.refusal(row, arch, device)
    if reason is not None:
        raise TilerankError(reason)
    program = driver.build_driver(build.Target("cuda", f"{arch}-virtual"), operation)
    return Outcome(check, tally=driver.run_driver(program, row.name, operation))


def record_of(outcomes: list[Outcome]) -> dict[str, Any]:
    """What the summary keeps of a variant's checks.

    ``<tool>_findings`` counts errors and warnings in ``sampled_cases``; ``native_wrong`` and ``ptx_75_wrong`` count,
    out of ``cases``, those whose result is wrong. A check without an answer is absent and has its reason in
    ``not_available``; ``failure`` says what was found, where something was.
    """
    record: dict[str, Any] = {}
    reasons, failures = {}, []
    for outcome in outcomes:
        if outcome.reason:
            reasons[outcome.check] = outcome.reason
        if outcome.findings is not None:
            record[f"{outcome.check}_findings"] = outcome.findings.count
            if outcome.findings.count:
                failures.append(f"{outcome.check}: {outcome.findings.count}, the first: {outcome.findings.first}")
        if outcome.tally is not None:
            cases = "cases" if outcome.findings is None else "sampled_cases"
            record[cases] = max(outcome.tally.cases, record.get(cases, 0))
            if outcome.findings is None:
                record[f"{outcome.check}_wrong"] = outcome.tally.wrong
            if outcome.tally.wrong:
                failures.append(f"{outcome.check}: {outcome.tally.wrong} of {outcome.tally.cases} cases wrong")
    if reasons:
        record["not_available"] = reasons
    return record | ({"failure": "; ".join(failures)} if failures else {})
