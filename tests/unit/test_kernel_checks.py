"""What is recorded of a variant's checks: counts where there are any, reasons where there are none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages import check_kernels
from tilerank import kernel_checks, machine
from tilerank.errors import TilerankError
from tilerank.kernel_checks import Outcome, record_of
from tilerank.kernels import build, driver, registry
from tilerank.kernels.driver import Tally
from tilerank.sanitizer import TOOLS, Findings, SanitizerError

CLEAN = Findings(0, 0, "")
RACES = Findings(1, 2, "Error: Race reported")


def test_a_clean_variant_is_counts_alone() -> None:
    outcomes = [Outcome(tool, findings=CLEAN, tally=Tally(12, 0)) for tool in TOOLS]
    assert record_of([*outcomes, *(Outcome(check, tally=Tally(44, 0)) for check in ("native", "ptx_75"))]) == {
        **{f"{tool}_findings": 0 for tool in TOOLS},
        "sampled_cases": 12,
        "cases": 44,
        "native_wrong": 0,
        "ptx_75_wrong": 0,
    }


def test_a_check_without_an_answer_is_absent_and_says_why() -> None:
    record = record_of([Outcome("memcheck", reason="not on the PATH"), Outcome("ptx_80", tally=Tally(9, 0))])
    assert record == {"cases": 9, "ptx_80_wrong": 0, "not_available": {"memcheck": "not on the PATH"}}


def test_findings_and_wrong_results_are_failures() -> None:
    record = record_of(
        [
            Outcome("memcheck", findings=CLEAN, tally=Tally(12, 2)),
            Outcome("racecheck", findings=RACES),
            Outcome("native", tally=Tally(44, 1)),
        ]
    )
    assert (record["native_wrong"], record["memcheck_findings"], record["racecheck_findings"]) == (1, 0, 3)
    assert record["failure"] == (
        "memcheck: 2 of 12 cases wrong; racecheck: 3, the first: Error: Race reported; native: 1 of 44 cases wrong"
    )


NAIVE = registry.get("naive")
LINE = "naive: 44 cases, 0 wrong, largest difference from the reference: fp32 1e-06, fp16 0, bf16 0\n"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Findings, str] | Exception]:
    """What each tool answers; the driver is built and right."""
    answers: dict[str, tuple[Findings, str] | Exception] = dict.fromkeys(TOOLS, (CLEAN, LINE))

    def run_sanitizer(tool: str, command: list[object]) -> tuple[Findings, str]:
        answer = answers[tool]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(kernel_checks, "run_sanitizer", run_sanitizer)
    monkeypatch.setattr(driver, "build_driver", lambda target, operation: Path(target.archs))
    monkeypatch.setattr(driver, "run_driver", lambda program, *_: Tally(44, int(program == Path("80-virtual"))))
    return answers


def test_a_stage_says_what_failed_by_its_own_name(
    tools: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "device_for", lambda _: "cuda")
    monkeypatch.setattr(build, "present_capabilities", lambda: (90,))
    stage = SimpleNamespace(name="check_block", settings=SimpleNamespace(machine=SimpleNamespace(name="h200")))
    check_kernels.check(stage, NAIVE, "block")
    assert capsys.readouterr().out == "check_block: naive: FAIL (ptx_80: 1 of 44 cases wrong)\n"


def test_every_tool_and_architecture_is_asked(tools: dict[str, object]) -> None:
    record = kernel_checks.check_variant(NAIVE, (90,))
    assert {key for key in record if key != "failure"} == {
        *("cases", "native_wrong", "ptx_75_wrong", "ptx_80_wrong", "sampled_cases"),
        *(f"{tool}_findings" for tool in TOOLS),
    }
    assert record["failure"] == "ptx_80: 1 of 44 cases wrong"


def test_a_lossy_row_is_not_held_to_the_bound_of_the_others(
    tools: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "run_driver", lambda *_: Tally(44, 40))
    lossy = dataclasses.replace(NAIVE, products="tf32", auto=False)
    record = kernel_checks.check_variant(lossy, (90,))
    assert "failure" not in record
    assert record["sampled_cases"] > 0
    assert set(record["not_available"]) == {"native", "ptx_75", "ptx_80"}
    tools["racecheck"] = (RACES, f"{NAIVE.name}: 12 cases, 3 wrong, ")
    assert kernel_checks.check_variant(lossy, (90,))["failure"].startswith("racecheck: 3")


def test_one_tool_that_cannot_run_leaves_the_others(tools: dict[str, object]) -> None:
    tools["racecheck"] = SanitizerError("Device not supported")
    record = kernel_checks.check_variant(NAIVE, (90,))
    assert record["not_available"] == {"racecheck": "Device not supported"}
    assert record["memcheck_findings"] == 0


def test_clean_without_a_case_is_not_clean(tools: dict[str, object]) -> None:
    """A tool can print a clean summary of a program that it never started."""
    tools["memcheck"] = (CLEAN, "========= ERROR SUMMARY: 0 errors\n")
    record = kernel_checks.check_variant(NAIVE, (90,))
    assert "memcheck_findings" not in record
    assert record["not_available"]["memcheck"].startswith("the driver ran no case of naive")


def test_findings_that_stop_the_program_count(tools: dict[str, object]) -> None:
    tools["memcheck"] = (Findings(5, 0, "Invalid __global__ read"), "driver: cudaMemcpy: unspecified launch failure\n")
    record = kernel_checks.check_variant(NAIVE, (90,))
    assert record["memcheck_findings"] == 5
    assert "memcheck: 5, the first: Invalid __global__ read" in record["failure"]


def test_code_that_the_variant_or_the_device_lacks_is_told(tools: dict[str, object]) -> None:
    newer = dataclasses.replace(NAIVE, min_sm=80)
    assert kernel_checks.check_variant(newer, (90,))["not_available"] == {
        "ptx_75": "the variant needs compute capability 8.0"
    }
    assert kernel_checks.check_variant(NAIVE, (75,))["not_available"] == {
        "ptx_80": "this device has compute capability 7.5, below 8.0"
    }


def test_a_driver_that_cannot_be_built_stops_the_stage(
    tools: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(target: object, operation: str) -> Path:
        raise TilerankError("needs nvcc")

    monkeypatch.setattr(driver, "build_driver", fails)
    with pytest.raises(TilerankError, match="needs nvcc"):
        kernel_checks.check_variant(NAIVE, (90,))
