"""Occupancy by the documented limits is what the profiler reported for the committed kernels."""

import json
from pathlib import Path

import pytest

from tilerank.architectures import ARCHITECTURES, H200, T4


def test_warps_of_an_sm_are_those_that_the_profiler_reports(repository: Path) -> None:
    checked = 0
    for path in (repository / "metrics" / "h200").glob("profile_kernels_*.json"):
        (values,) = json.loads(path.read_text(encoding="utf-8"))["profile_kernels"].values()
        for kernel in values.get("kernels", {}).values():
            if "theoretical_occupancy_pct" not in kernel:
                continue
            # The tool's shared memory has the system's share in it.
            own = int(kernel["shared_bytes"]) - ARCHITECTURES[90].reserved_shared
            warps = ARCHITECTURES[90].warps(int(kernel["registers"]), int(kernel["block"]), own)
            assert 100 * warps / 64 == pytest.approx(kernel["theoretical_occupancy_pct"]), path.name
            checked += 1
    assert checked >= 10


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "warps"),
    [
        (32, 128, 0, 32),  # as many warps as Turing has room for
        (128, 128, 0, 16),
        (255, 32, 0, 8),
        (32, 32, 0, 16),  # blocks run out first
        (32, 128, 33 * 1024, 4),  # one block's shared memory
        (32, 128, 65 * 1024, 0),  # does not fit at all
    ],
)
def test_each_limit_binds_on_a_t4(registers: int, threads: int, shared: int, warps: int) -> None:
    assert T4.architecture.warps(registers, threads, shared) == warps


def test_data_sheets_agree_with_rates_a_clock() -> None:
    """TFLOP/s that the data sheets name, from multiprocessors, clock and rates a clock."""
    for device, fp32, fp16 in ((T4, 8.1, 65), (H200, 67, 989)):
        clocks = device.multiprocessors * device.clock_ghz / 1e3
        assert 2 * device.architecture.fp32_fmas * clocks == pytest.approx(fp32, rel=0.02)
        assert 2 * device.architecture.fp16_mma_fmas * clocks == pytest.approx(fp16, rel=0.1)
