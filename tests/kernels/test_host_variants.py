"""Every CUDA row of the registry, run on the CPU against the reference: plainly under several orders of its threads,
and under AddressSanitizer with UBSan, and ThreadSanitizer."""

from __future__ import annotations

import json
import re

import pytest
from kernels.host.programs import run

from tilerank.kernels import registry

ROWS = [row.name for row in registry.attention_rows() if row.device == "cuda" and row.host_exempt is None]

SCHEDULES = ("forward", "reverse", "last_in", "random")


def check(flavour: str, *arguments: str, timeout_s: float = 300) -> dict:
    """Run check_variants for one row; its summary, once all cases were right."""
    done = run(flavour, "check_variants", *arguments, timeout_s=timeout_s)
    cases = re.findall(r"^case (.*)$", done.stderr, re.MULTILINE)
    under_way = cases[-1] if cases else "none"
    assert done.returncode == 0, f"case under way: {under_way}\n{done.stdout}\n{done.stderr[-6000:]}"
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failed"] == 0
    assert summary["cases"] > summary["refused"]
    assert summary["cases"] == len(cases)
    return summary


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("row", ROWS)
def test_agrees_with_the_reference(row: str, schedule: str) -> None:
    summary = check("plain", "--variant", row, "--schedule", schedule, "--seed", "1")
    assert summary["variant"] == row
    assert 0 < summary["worst"] <= 1


@pytest.mark.parametrize("row", ROWS)
def test_stays_in_bounds_and_aligned(row: str) -> None:
    check("address", "--variant", row)


@pytest.mark.parametrize("row", ROWS)
def test_threads_do_not_race(row: str) -> None:
    # A race does not depend on the length as a bound does: fewer lengths, two head dims.
    check("thread", "--variant", row, "--lengths", "1,33,65", "--head-dims", "2", "--schedule", "random")


def test_unknown_variant_is_an_error() -> None:
    done = run("plain", "check_variants", "--variant", "no_such_row")
    assert done.returncode == 2
    assert "no variant to check: no_such_row" in done.stderr
