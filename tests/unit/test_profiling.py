"""Reading Nsight Compute's output: every page, units that change with size, and the errors that must not pass."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tilerank.errors import TilerankError
from tilerank.profiling import (
    NcuError,
    NcuFormatError,
    NcuMetric,
    NcuNoKernelsError,
    NcuPermissionError,
    NcuUnavailableError,
    kernel_profiles,
    parse_ncu,
    run_ncu,
)

LAUNCH = '"{id}","77","python3","127.0.0.1","{kernel}","1","7","(128, 1, 1)","(600, 4, 1)","0","9.0"'
COLUMNS = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream",'
    '"Block Size","Grid Size","Device","CC"'
)


def raw_csv(metrics: dict[str, tuple[str, list[str]]], kernels: list[str]) -> str:
    """A raw CSV page: metric -> (unit, one printed value a kernel)."""
    names = "".join(f',"{name}"' for name in metrics)
    units = '"",' * 10 + '""' + "".join(f',"{unit}"' for unit, _ in metrics.values())
    rows = [
        LAUNCH.format(id=index, kernel=kernel) + "".join(f',"{values[index]}"' for _, values in metrics.values())
        for index, kernel in enumerate(kernels)
    ]
    return "\n".join(["==PROF== Connected to process 77 (/usr/bin/python3)", COLUMNS + names, units, *rows, ""])


def only(metrics: list[NcuMetric], name: str) -> NcuMetric:
    (found,) = [metric for metric in metrics if metric.metric == name]
    return found


def test_raw_csv_gives_si_values_a_kernel():
    text = raw_csv(
        {
            "dram__bytes_read.sum": ("Mbyte", ["1,234.56", "2.00"]),
            "dram__bytes_read.sum.per_second": ("Gbyte/second", ["987.60", "1.5"]),
            "gpu__time_duration.sum": ("us", ["12.5", "1,000"]),
            "smsp__inst_executed.sum": ("inst", ["12,345,678", "9"]),
            "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("%", ["45.34", "0"]),
            "launch__func_cache_config": ("", ["CachePreferNone", "CachePreferNone"]),
        },
        ["attention<float, 32>(const float *, int)", "softmax"],
    )
    metrics = parse_ncu(text)
    first = [metric for metric in metrics if metric.launch == 0]
    assert {metric.kernel for metric in first} == {"attention<float, 32>(const float *, int)"}
    assert only(first, "dram__bytes_read.sum") == NcuMetric(first[0].kernel, "dram__bytes_read.sum", 1.23456e9, "byte")
    assert only(first, "dram__bytes_read.sum.per_second").value == pytest.approx(9.876e11)
    assert only(first, "dram__bytes_read.sum.per_second").unit == "byte/second"
    assert only(first, "gpu__time_duration.sum").value == pytest.approx(12.5e-6)
    assert only(first, "smsp__inst_executed.sum").value == 12_345_678
    assert only(first, "sm__throughput.avg.pct_of_peak_sustained_elapsed").value == 45.34
    second = [metric for metric in metrics if metric.kernel == "softmax"]
    assert only(second, "gpu__time_duration.sum").value == pytest.approx(1e-3)
    assert only(second, "sm__throughput.avg.pct_of_peak_sustained_elapsed").value == 0  # measured as zero
    assert not [metric for metric in metrics if metric.metric == "launch__func_cache_config"]  # text, no figure


@pytest.mark.parametrize(
    ("unit", "printed", "value", "si_unit"),
    [
        ("nsecond", "1,500", 1.5e-6, "second"),
        ("ns", "1,500.5", 1.5005e-6, "second"),
        ("usecond", "3", 3e-6, "second"),
        ("ms", "2.5", 2.5e-3, "second"),
        ("msecond", "2.5", 2.5e-3, "second"),
        ("second", "1.25", 1.25, "second"),
        ("byte", "96", 96, "byte"),
        ("Kbyte", "32.77", 32_770, "byte"),
        ("Gbyte", "1.5", 1.5e9, "byte"),
        ("byte/second", "5", 5, "byte/second"),
        ("Tbyte/s", "2.96", 2.96e12, "byte/second"),
        ("Mbyte/second", "1,024", 1.024e9, "byte/second"),
        ("Kbyte/block", "8.19", 8_190, "byte/block"),
        ("cycle/nsecond", "1.78", 1.78e9, "cycle/second"),
        ("Ghz", "1.78", 1.78e9, "Hz"),
        ("hz", "3,201,000,000", 3.201e9, "Hz"),
        ("%", "99.9", 99.9, "%"),
        ("inst/cycle", "1.31", 1.31, "inst/cycle"),
        ("register/thread", "128", 128, "register/thread"),
        ("", "1e-3", 1e-3, ""),
        ("", "-1,000.5", -1000.5, ""),
    ],
)
def test_units_and_thousands_separators(unit: str, printed: str, value: float, si_unit: str):
    (metric,) = parse_ncu(raw_csv({"m": (unit, [printed])}, ["kernel"]))
    assert metric.value == pytest.approx(value)
    assert metric.unit == si_unit


@pytest.mark.parametrize("printed", ["12,34", "1.234,5", "1,23,456", "1.2.3"])
def test_a_number_that_could_be_read_in_two_ways_is_refused(printed: str):
    with pytest.raises(NcuFormatError, match="m"):
        parse_ncu(raw_csv({"m": ("us", [printed])}, ["kernel"]))


def test_values_the_tool_does_not_have_are_left_out():
    metrics = parse_ncu(raw_csv({"a": ("", ["n/a"]), "b": ("", ["nan"]), "c": ("", [""]), "d": ("", ["4"])}, ["k"]))
    assert [metric.metric for metric in metrics] == ["d"]


def test_program_output_around_the_figures_is_skipped():
    text = raw_csv({"m": ("us", ["1,000"])}, ["kernel"])
    noisy = f'scores: 1,2,3\n{text}\n"quoted, program output"\n==PROF== Disconnected from process 77\n'
    assert parse_ncu(noisy) == parse_ncu(text)


def test_processes_that_count_their_launches_alike_stay_apart():
    text = raw_csv({"launch__grid_size": ("", ["1", "2"])}, ["parent", "child"])
    metrics = parse_ncu(text.replace('"1","77"', '"0","78"'))
    assert [(metric.kernel, metric.launch, metric.value) for metric in metrics] == [("parent", 0, 1), ("child", 1, 2)]


def test_only_the_tool_reports_missing_permission():
    text = raw_csv({"launch__grid_size": ("", ["1"])}, ["softmax"])
    assert len(parse_ncu("the program says ERR_NVGPUCTRPERM\n" + text)) == 1
    with pytest.raises(NcuPermissionError):
        parse_ncu("==WARNING== ERR_NVGPUCTRPERM\n" + text)


def test_details_csv():
    header = COLUMNS + ',"Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Description"'
    launch = LAUNCH.format(id=0, kernel="kernel")
    text = "\n".join(
        [
            header,
            launch + ',"Speed Of Light","Duration","msecond","1,250.00","",""',
            launch + ',"Speed Of Light","","","","SOLBottleneck","The kernel uses 1,000 of 2,000"',
            launch + ',"Memory","Memory Throughput","Gbyte/second","1,001.5","",""',
        ]
    )
    assert parse_ncu(text) == [
        NcuMetric("kernel", "Duration", pytest.approx(1.25), "second"),
        NcuMetric("kernel", "Memory Throughput", pytest.approx(1.0015e12), "byte/second"),
    ]


DETAILS = """\
==PROF== Connected to process 4242 (/usr/bin/python3)
==PROF== Profiling "fused" - 0: 0%....50%....100% - 9 passes
scores  1,234  5
  void tilerank::fused<32>(const float *, int) (600, 4, 1)x(128, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Section: GPU Speed Of Light Throughput
    ----------------------- ----------- ------------
    Metric Name             Metric Unit Metric Value
    ----------------------- ----------- ------------
    DRAM Frequency                  Ghz         3.20
    Elapsed Cycles                cycle    1,004,321
    Memory Throughput                 %        45.34
    Duration                         us       562.43
    ----------------------- ----------- ------------

    OPT   Memory is more heavily utilized than Compute: 12  34  56

    Section: Launch Statistics
    -------------------------------- --------------- ---------------
    Metric Name                          Metric Unit    Metric Value
    -------------------------------- --------------- ---------------
    Block Size                                                   128
    Function Cache Configuration                     CachePreferNone
    Registers Per Thread             register/thread              40
    Waves Per SM                                                1.49
    # SMs                                         SM             132
    -------------------------------- --------------- ---------------

  softmax (1, 1, 1)x(32, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Section: GPU Speed Of Light Throughput
    ----------------------- ----------- ------------
    Metric Name             Metric Unit Metric Value
    ----------------------- ----------- ------------
    Duration                         ms         1.50
    Memory Throughput           Kbyte/s        12.50
    ----------------------- ----------- ------------
==PROF== Disconnected from process 4242
"""


def test_details_page():
    metrics = parse_ncu(DETAILS)
    assert [(metric.metric, metric.unit, metric.launch) for metric in metrics] == [
        ("DRAM Frequency", "Hz", 0),
        ("Elapsed Cycles", "cycle", 0),
        ("Memory Throughput", "%", 0),
        ("Duration", "second", 0),
        ("Block Size", "", 0),
        ("Registers Per Thread", "register/thread", 0),
        ("Waves Per SM", "", 0),
        ("# SMs", "SM", 0),
        ("Duration", "second", 1),
        ("Memory Throughput", "byte/second", 1),
    ]
    assert metrics[0].kernel == "void tilerank::fused<32>(const float *, int)"
    assert [metric.value for metric in metrics] == pytest.approx(
        [3.2e9, 1_004_321, 45.34, 562.43e-6, 128, 40, 1.49, 132, 1.5e-3, 12_500]
    )


def test_details_page_of_older_releases():
    text = """\
  fused, 2021-Aug-05 18:19:00, Context 1, Stream 7
    Section: GPU Speed Of Light
    ---------------------------------------------- --------------- ------------------------------
    SM Frequency                                     cycle/nsecond                           1.35
    Memory [%]                                                   %                           1.37
    ---------------------------------------------- --------------- ------------------------------
    WRN   This kernel grid is too small: waves  per SM  12
"""
    assert parse_ncu(text) == [
        NcuMetric("fused", "SM Frequency", pytest.approx(1.35e9), "cycle/second"),
        NcuMetric("fused", "Memory [%]", 1.37, "%"),
    ]


def test_a_cell_that_runs_over_its_column():
    text = """\
  fused (1, 1, 1)x(32, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    --------- ---- -----
    A Name Longer Than Its Column     msecond      1,500.00
    Short One                1.00
    --------- ---- -----
"""
    assert parse_ncu(text) == [
        NcuMetric("fused", "A Name Longer Than Its Column", pytest.approx(1.5), "second"),
        NcuMetric("fused", "Short One", 1.0, ""),
    ]


PERMISSION = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters "
    "on the target device 0."
)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"==PROF== Connected to process 5\n{PERMISSION}\n", NcuPermissionError),
        (f"{PERMISSION}\n{raw_csv({'m': ('us', ['0'])}, ['kernel'])}", NcuPermissionError),
        ("==PROF== Disconnected from process 5\n==WARNING== No kernels were profiled.\n", NcuNoKernelsError),
        ("", NcuNoKernelsError),
        ("hello from the program\n", NcuNoKernelsError),
        (COLUMNS + "\n", NcuNoKernelsError),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n", NcuUnavailableError),
        (raw_csv({"m": ("", ["n/a"])}, ["kernel"]), NcuError),
    ],
)
def test_no_figures_is_a_named_error(text: str, error: type[NcuError]):
    with pytest.raises(error) as caught:
        parse_ncu(text)
    assert type(caught.value) is error
    assert isinstance(caught.value, TilerankError)
    assert "\n" not in str(caught.value)


def test_the_reason_is_the_tools_own():
    with pytest.raises(NcuUnavailableError, match="LibraryNotLoaded"):
        parse_ncu("==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n")
    with pytest.raises(NcuNoKernelsError, match="No kernels were profiled"):
        parse_ncu("==PROF== Disconnected\n==WARNING== No kernels were profiled.\n")


def test_kernel_profiles_orders_stalls_and_leaves_absent_figures_out():
    stall = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    text = raw_csv(
        {
            "smsp__inst_executed.sum": ("inst", ["1,000,000"]),
            "launch__registers_per_thread": ("register/thread", ["128"]),
            stall.format("long_scoreboard"): ("inst", ["0.50"]),
            stall.format("wait"): ("inst", ["1.25"]),
            stall.format("barrier"): ("inst", ["0.50"]),
            stall.format("selected"): ("inst", ["9.00"]),
        },
        ["kernel"],
    )
    (profile,) = kernel_profiles(parse_ncu(text))
    assert profile.kernel == "kernel"
    assert profile.figures == {"instructions": 1_000_000, "registers": 128}
    assert profile.stalls == (("wait", 1.25), ("barrier", 0.5), ("long_scoreboard", 0.5))


def fake_ncu(folder: Path, body: str) -> None:
    script = folder / "ncu"
    script.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


def test_run_ncu_asks_for_untouched_clocks_and_reads_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = tmp_path / "page.csv"
    page.write_text(raw_csv({"m": ("us", ["1,500"])}, ["fused"]), encoding="utf-8")
    fake_ncu(tmp_path, f'echo "$LC_ALL $*" > {tmp_path}/called\ncat {page}')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (metric,) = run_ncu(["python3", "driver.py"], kernel_regex="fused")
    assert metric.value == pytest.approx(1.5e-3)
    called = (tmp_path / "called").read_text(encoding="utf-8")
    assert called.startswith("C ")
    assert "--clock-control none" in called
    assert "regex:fused" in called
    assert called.rstrip().endswith("python3 driver.py")


@pytest.mark.parametrize(
    ("body", "error", "reason"),
    [
        ("echo '==WARNING== No kernels were profiled.' >&2", NcuNoKernelsError, "No kernels were profiled"),
        ("echo '==ERROR== ERR_NVGPUCTRPERM - no' >&2; exit 1", NcuPermissionError, "ERR_NVGPUCTRPERM"),
        ("echo 'ImportError: no torch' >&2; exit 3", NcuUnavailableError, "exit code 3: ImportError: no torch"),
        ("exec sleep 30", NcuUnavailableError, "did not end"),
    ],
)
def test_run_ncu_reports_what_went_wrong(tmp_path, monkeypatch, body: str, error: type[NcuError], reason: str):
    fake_ncu(tmp_path, body)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(error, match=reason):
        run_ncu(["true"], kernel_regex="x", timeout=2)


def test_run_ncu_without_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NcuUnavailableError, match="not on the PATH"):
        run_ncu(["true"], kernel_regex="x")
