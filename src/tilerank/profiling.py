"""Nsight Compute: run it on one command, and read what it prints. Nsight Systems: run it on one command.

`parse_ncu` reads every form the tool prints figures in: the raw page and the details page, as CSV or for
people. Units change with the size of a figure (ns, us, ms; Kbyte, Mbyte, Gbyte/second), so values are
brought to SI before anyone compares them. A tool that had no permission, or saw no kernel, is a named error:
a missing figure never becomes an empty or zero one.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilerank.errors import TilerankError


class NcuError(TilerankError):
    """Nsight Compute gave no figures that can be used; the message carries the tool's own reason."""


class NcuPermissionError(NcuError):
    """The user may not read the GPU's performance counters (ERR_NVGPUCTRPERM)."""


class NcuNoKernelsError(NcuError):
    """The profiled process launched no kernel that the tool saw."""


class NcuUnavailableError(NcuError):
    """The tool is not installed, or could not start on this machine (for example LibraryNotLoaded)."""


class NcuFormatError(NcuError):
    """A figure could not be read without guessing."""


class NsysError(TilerankError):
    """Nsight Systems gave no timeline; the message says why."""


@dataclass(frozen=True, slots=True)
class NcuMetric:
    """One figure of one kernel launch."""

    kernel: str  # demangled, as printed
    metric: str  # the tool's name: `dram__bytes_read.sum` on a raw page, `DRAM Throughput` on a details page
    value: float  # in `unit`
    unit: str  # SI where the printed unit has a size (second, byte, byte/second, Hz); `%` stays per cent
    launch: int = 0  # position of the launch in the output, so that launches of one kernel stay apart


# --- units -----------------------------------------------------------------------------------------------------

_PREFIXES = {
    "": 1.0,
    "n": 1e-9,
    "u": 1e-6,
    "µ": 1e-6,
    "m": 1e-3,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
}

# Printed name -> SI name. The tool's Kbyte is 1,000 bytes (32,768 bytes of shared memory print as 32.77).
_UNITS = {
    **dict.fromkeys(("s", "sec", "second"), "second"),
    **dict.fromkeys(("byte", "B"), "byte"),
    **dict.fromkeys(("hz", "Hz"), "Hz"),
    **{name: name for name in ("cycle", "inst", "sector", "request", "warp", "thread", "block", "register")},
}


def _one_unit(text: str) -> tuple[float, str]:
    for prefix, factor in _PREFIXES.items():
        name = _UNITS.get(text[len(prefix) :]) if text.startswith(prefix) else None
        if name is not None:
            return factor, name
    return 1.0, text


def _si_unit(text: str) -> tuple[float, str]:
    """The factor to SI and the SI unit. A unit without a size (``%``, ``SM``, none) passes through."""
    numerator, slash, denominator = text.partition("/")
    factor, unit = _one_unit(numerator)
    if slash:
        divisor, below = _one_unit(denominator)
        return factor / divisor, f"{unit}/{below}"
    return factor, unit


_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:[eE][-+]?\d+)?|[-+]?\.\d+(?:[eE][-+]?\d+)?")
_LOOKS_NUMERIC = re.compile(r"[-+]?[\d.,]*\d[\d.,]*")


def _number(text: str, metric: str) -> float | None:
    """The printed number; None for text (``CachePreferNone``) and for what the tool had no value for (``n/a``)."""
    if _NUMBER.fullmatch(text):
        return float(text.replace(",", ""))
    if _LOOKS_NUMERIC.fullmatch(text):
        raise NcuFormatError(
            f"ncu printed {text!r} for {metric!r}; allowed: digits, commas between thousands, a decimal point "
            "(run ncu with LC_ALL=C)"
        )
    return None


def _metric(kernel: str, metric: str, unit: str, text: str, launch: int) -> NcuMetric | None:
    value = _number(text, metric)
    if value is None:
        return None
    factor, si_unit = _si_unit(unit)
    return NcuMetric(kernel, metric, value * factor, si_unit, launch)


# --- pages -----------------------------------------------------------------------------------------------------

# Columns of a CSV page that describe the launch rather than measure it.
_LAUNCH_COLUMNS = (
    *("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Kernel Time", "Context", "Stream"),
    *("Block Size", "Grid Size", "Device", "CC", "Invocations"),
)
_CSV_HEADER = re.compile(r'"?ID"?,"?Process ID"?,.*Kernel Name')


def _parse_csv(lines: Sequence[str]) -> Iterator[tuple[str, NcuMetric | None]]:
    """Both CSV forms: one row a launch and one column a metric (raw), or one row a metric (details)."""
    header: list[str] = []
    units: list[str] = []
    launches: dict[tuple[str, str], int] = {}  # each process counts its launches from 0
    for line in lines:
        if _CSV_HEADER.match(line):
            header, units = next(csv.reader([line])), []
            continue
        row = next(csv.reader([line]), [])
        if not header or len(row) != len(header):
            continue  # the profiled program's own output, or a message of the tool
        cells = dict(zip(header, row, strict=True))
        if not cells["ID"]:
            units = row
            continue
        kernel = cells["Kernel Name"]
        launch = launches.setdefault((cells["Process ID"], cells["ID"]), len(launches))
        if "Metric Name" in cells:  # a row without a name holds advice, not a figure
            name = cells["Metric Name"]
            value = _metric(kernel, name, cells["Metric Unit"], cells["Metric Value"], launch) if name else None
            yield kernel, value
            continue
        yield kernel, None  # the launch was seen, also when no column holds a figure
        for column, name in enumerate(header):
            if name not in _LAUNCH_COLUMNS:
                yield kernel, _metric(kernel, name, units[column] if units else "", row[column], launch)


_LAUNCH_LINE = re.compile(
    r"\s*(?P<kernel>\S.*?)"
    r"(?:\s+\(\d+, \d+, \d+\)x\(\d+, \d+, \d+\))?"
    r"(?:, \d{4}-\w{3}-\d{2} \d{2}:\d{2}:\d{2})?"
    r", Context \d+, Stream \d+\b.*"
)
_RULER = re.compile(r"\s*(-+) (-+) (-+)\s*")


def _parse_page(lines: Sequence[str]) -> Iterator[tuple[str, NcuMetric | None]]:
    """The pages for people: a line that names the launch, then tables of name, unit and value between rulers."""
    kernel, launch = "", -1
    columns: list[slice] = []  # of the open table; none outside
    rows = 0
    for line in lines:
        found = _LAUNCH_LINE.fullmatch(line)
        if found and not line.startswith("=="):
            kernel, launch, columns, rows = found["kernel"], launch + 1, [], 0
            yield kernel, None
            continue
        if not line.strip():
            columns, rows = [], 0
            continue
        ruler = _RULER.fullmatch(line)
        if ruler:  # opens a table, stands below its headings, or closes it (advice may follow at once)
            columns = [] if rows else [slice(*ruler.span(group)) for group in (1, 2, 3)]
            rows = 0
            continue
        if launch < 0 or not columns:
            continue
        name, unit, value = _cells(line, columns)
        if name != "Metric Name":
            rows += 1
            yield kernel, _metric(kernel, name, unit, value, launch)


def _cells(line: str, columns: Sequence[slice]) -> tuple[str, str, str]:
    """Name, unit and value by the ruler's columns; by the gaps between words where a cell runs over its column."""
    edges = [columns[0].stop, columns[1].stop]
    if all(line[edge : edge + 1] in ("", " ") for edge in edges):
        name, unit = line[columns[0]].strip(), line[columns[1]].strip()
        return name, unit, line[columns[2].start :].strip()
    name, *rest = re.split(r"\s{2,}", line.strip())
    return name, rest[0] if len(rest) > 1 else "", rest[-1] if rest else ""


# --- the public reader -----------------------------------------------------------------------------------------


def parse_ncu(text: str) -> list[NcuMetric]:
    """Read what ``ncu`` printed: ``--page raw`` or ``--page details``, with or without ``--csv``.

    Lines of the profiled program and of the tool (``==PROF==``) may stand around the figures. Returns one
    record a figure, in the order printed; text values and values the tool calls ``n/a`` are left out.

    Raises `NcuPermissionError` (ERR_NVGPUCTRPERM), `NcuNoKernelsError` (no kernels were profiled, or no output),
    `NcuUnavailableError` (any other ``==ERROR==``, as LibraryNotLoaded), `NcuFormatError` (a number that could
    be read in two ways) or `NcuError` (kernels, but no figure).
    """
    lines = text.splitlines()
    _raise_for_messages(lines)
    is_csv = any(_CSV_HEADER.match(line) for line in lines)
    kernels: set[str] = set()
    metrics: list[NcuMetric] = []
    for kernel, metric in _parse_csv(lines) if is_csv else _parse_page(lines):
        kernels.add(kernel)
        if metric is not None:
            metrics.append(metric)
    if metrics:
        return metrics
    messages = [line.strip() for line in lines if line.startswith(("==WARNING==", "==PROF=="))]
    reason = next((line for line in messages if "No kernels were profiled" in line), " ".join(messages[-1:]))
    if kernels:
        raise NcuError(f"ncu saw {sorted(kernels)} and printed no figure for it {reason}".strip())
    raise NcuNoKernelsError(f"ncu profiled no kernel: {reason or 'its output holds no launch'}")


def _raise_for_messages(lines: Sequence[str]) -> None:
    for line in lines:
        if line.startswith(("==ERROR==", "==WARNING==")) and "ERR_NVGPUCTRPERM" in line:
            raise NcuPermissionError(
                f"ncu may not read the performance counters: {line.strip()} (an administrator can allow it: "
                "NVreg_RestrictProfilingToAdminUsers=0, or run as root)"
            )
    for line in lines:
        if line.startswith("==ERROR=="):
            raise NcuUnavailableError(f"ncu failed: {line.strip()}")


# --- running the tools -----------------------------------------------------------------------------------------

NCU_SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "InstructionStats",
    "SchedulerStats",
    "WarpStateStats",
    "LaunchStats",
    "Occupancy",
)


def run_ncu(command: Sequence[str], *, kernel_regex: str, timeout: float = 300.0) -> list[NcuMetric]:
    """Profile the kernels of ``command`` whose name matches ``kernel_regex`` and return their figures.

    The clocks are left alone (``--clock-control none``), so durations are not comparable with timed ones and
    are nobody's figure. Raises the errors of `parse_ncu`; `NcuUnavailableError` also when there is no ``ncu``,
    the command fails or ``timeout`` seconds pass.
    """
    tool = shutil.which("ncu")
    if tool is None:
        raise NcuUnavailableError("ncu is not on the PATH; it comes with the CUDA toolkit (Nsight Compute)")
    sections = [argument for name in NCU_SECTIONS for argument in ("--section", name)]
    options = ["--csv", "--page", "raw", "--clock-control", "none", "--kernel-name-base", "demangled"]
    arguments = [tool, *options, "--kernel-name", f"regex:{kernel_regex}", *sections, *command]
    try:
        answer = run_tool(arguments, timeout)
    except subprocess.TimeoutExpired as error:
        raise NcuUnavailableError(f"ncu did not end within {timeout:.0f} s") from error
    _raise_for_messages([*answer.stdout.splitlines(), *answer.stderr.splitlines()])
    if answer.returncode != 0:
        raise NcuUnavailableError(f"ncu ended with exit code {answer.returncode}: {last_line(answer)}")
    return parse_ncu(f"{answer.stdout}\n{answer.stderr}")


def run_nsys(command: Sequence[str], output: Path, *, timeout: float = 300.0) -> Path:
    """Record a timeline of ``command`` as ``output``.nsys-rep and return that path; `NsysError` says why not."""
    tool = shutil.which("nsys")
    if tool is None:
        raise NsysError("nsys is not on the PATH; it comes with Nsight Systems")
    report = output.with_name(output.name + ".nsys-rep")
    arguments = [tool, "profile", "--trace=cuda,nvtx,osrt", "--force-overwrite=true", f"--output={output}", *command]
    try:
        answer = run_tool(arguments, timeout)
    except subprocess.TimeoutExpired as error:
        raise NsysError(f"nsys did not end within {timeout:.0f} s") from error
    if answer.returncode != 0:
        raise NsysError(f"nsys ended with exit code {answer.returncode}: {last_line(answer)}")
    if not report.exists():
        raise NsysError(f"nsys wrote no {report.name}: {last_line(answer)}")
    return report


def run_tool(arguments: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a tool on a command that imports this very package; on a timeout it ends with everything it started."""
    paths = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "LC_ALL": "C",  # a locale with decimal commas would change every number
        "PYTHONPATH": os.pathsep.join(paths),
    }
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the profiled program outlives the tool otherwise
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def last_line(answer: subprocess.CompletedProcess[str]) -> str:
    lines = (answer.stderr.strip() or answer.stdout.strip()).splitlines()
    return lines[-1] if lines else "it printed nothing"


# --- what a record keeps ---------------------------------------------------------------------------------------

# Record key -> the tool's names for it, newest first (names moved between releases).
KERNEL_FIGURES: Mapping[str, tuple[str, ...]] = {
    "sm_throughput_pct": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    "dram_throughput_pct": (
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "instructions": ("smsp__inst_executed.sum", "sm__inst_executed.sum"),
    "cycles_per_instruction": ("smsp__average_warp_latency_per_inst_issued.ratio",),
    "instructions_per_cycle": ("sm__inst_executed.avg.per_cycle_active",),
    "issue_slots_busy_pct": (
        "sm__inst_issued.avg.pct_of_peak_sustained_active",
        "sm__issue_active.avg.pct_of_peak_sustained_active",
        "smsp__issue_active.avg.pct",
    ),
    "l1_hit_pct": ("l1tex__t_sector_hit_rate.pct",),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct",),
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "theoretical_occupancy_pct": ("sm__maximum_warps_per_active_cycle_pct",),
    "registers": ("launch__registers_per_thread",),
    "grid": ("launch__grid_size",),
    "block": ("launch__block_size",),
    "shared_bytes": ("launch__shared_mem_per_block",),
}

_STALL = re.compile(r"smsp__average_warps_issue_stalled_(?P<reason>\w+?)_per_issue_active\.ratio")
_NOT_A_STALL = ("selected",)  # a warp that issues is not waiting


@dataclass(frozen=True, slots=True)
class KernelProfile:
    """The figures of one kernel that a record keeps."""

    kernel: str
    figures: Mapping[str, float]  # keys of KERNEL_FIGURES; what the tool did not report is absent
    stalls: tuple[tuple[str, float], ...]  # (reason, warps waiting for it an issued instruction), worst first


def kernel_profiles(metrics: Sequence[NcuMetric]) -> tuple[KernelProfile, ...]:
    """Pick the recorded figures of each launch on a raw page, in launch order."""
    launches: dict[int, dict[str, NcuMetric]] = {}
    for metric in metrics:
        launches.setdefault(metric.launch, {})[metric.metric] = metric
    return tuple(_kernel_profile(launches[launch]) for launch in sorted(launches))


def _kernel_profile(metrics: Mapping[str, NcuMetric]) -> KernelProfile:
    figures = {}
    for key, names in KERNEL_FIGURES.items():
        name = next((name for name in names if name in metrics), None)
        if name is not None:
            figures[key] = metrics[name].value
    stalls = []
    for name, metric in metrics.items():
        found = _STALL.fullmatch(name)
        if found and found["reason"] not in _NOT_A_STALL:
            stalls.append((found["reason"], metric.value))
    stalls.sort(key=lambda stall: (-stall[1], stall[0]))
    return KernelProfile(next(iter(metrics.values())).kernel, figures, tuple(stalls))
