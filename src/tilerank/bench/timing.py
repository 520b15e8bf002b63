"""How every figure of this project is timed.

The protocol (raise ``timing.protocol`` in conf/ whenever it changes meaning):

1. Only a closure is timed. Building inputs, loading weights and compiling happen before.
2. Each case is checked against float64 before anything is timed, on an output that was poisoned first, and
   again after the last repetition, on the output that this repetition wrote. A case that fails either check
   has no time: its row says FAIL. NaN fails.
3. Cases take turns in one process, A B A B ..., so that clocks, temperature and neighbours are shared.
   The first ``warmup`` rounds are thrown away.
4. Before each repetition a buffer of ``flush_mb`` is written, so that the closure finds a cold L2. The device
   is then kept spinning while the host queues the closure: the cost of a launch on the host is not in a
   kernel's time (it is in an end-to-end time, which `WallClock` takes).
5. A row holds the median, p10, p90 and the number of repetitions. A difference smaller than the larger
   p10-to-p90 spread is called noise.
6. `closure_faults` looks at the closure itself: it must allocate nothing, synchronise nothing and launch the
   kernel it names.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated times, in seconds."""

    median: float
    p10: float
    p90: float
    repetitions: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Summarise at least one time; raises ValueError without any or when one is not finite."""
        values = np.asarray(seconds, dtype=np.float64)
        if values.size == 0 or not np.isfinite(values).all():
            raise ValueError(f"expected one or more finite times, found {seconds!r}")
        p10, median, p90 = np.percentile(values, [10, 50, 90])
        return cls(float(median), float(p10), float(p90), int(values.size))

    @property
    def width(self) -> float:
        """p90 - p10."""
        return self.p90 - self.p10


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times sooner ``ours`` is than ``theirs``: theirs / ours, above 1 is better."""

    value: float
    is_noise: bool  # the medians differ by less than the larger spread


def ratio(ours: Spread, theirs: Spread) -> Ratio:
    """Compare two rows of one `measure` call."""
    difference = abs(theirs.median - ours.median)
    return Ratio(theirs.median / ours.median, is_noise=difference < max(ours.width, theirs.width))


@dataclass(frozen=True, slots=True)
class Case:
    """One row to be: a closure and how its output is judged."""

    name: str
    run: Callable[[], Any]  # what is timed; returns the output
    error: Callable[[Any], float]  # largest absolute error of an output against float64
    tolerance: float
    poison: Callable[[], None] | None = None  # fills a preallocated output with NaN; None: run allocates its own


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case."""

    name: str
    seconds: tuple[float, ...]  # in the order taken; empty when a check failed
    error: float  # the worse of the checks before and after timing
    tolerance: float

    @property
    def failure(self) -> str | None:
        """Why there is no time, or None."""
        if self.error <= self.tolerance:
            return None
        return f"error {self.error:.3g} against float64 is above {self.tolerance:.3g}"

    @property
    def spread(self) -> Spread | None:
        """The times summarised, or None when a check failed."""
        return Spread.of(self.seconds) if self.failure is None else None

    @property
    def verdict(self) -> str:
        """The median in microseconds with its spread, or FAIL."""
        spread = self.spread
        if spread is None:
            return "FAIL"
        return f"{spread.median * 1e6:.1f} us [{spread.p10 * 1e6:.1f}, {spread.p90 * 1e6:.1f}]"


class Clock(Protocol):
    """Times one closure at a time."""

    def measure(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """Call ``run`` once. Returns its output and a function that gives the seconds, valid after `settle`."""
        ...

    def settle(self) -> None:
        """Wait until everything measured has finished."""
        ...


class WallClock:
    """Host time from call to finished result: for end-to-end closures, on any device."""

    def __init__(self, device: str) -> None:
        self._synchronize = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None

    def measure(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """Time ``run`` with perf_counter; the device is idle before and finished after."""
        self._synchronize()
        start = time.perf_counter()
        output = run()
        self._synchronize()
        seconds = time.perf_counter() - start
        return output, lambda: seconds

    def settle(self) -> None:
        """Nothing is pending."""


class EventClock:
    """Device time between two CUDA events on the current stream, cold L2."""

    # About 0.5 ms at Hopper's clock: longer than the host takes to queue any closure here, a compiled one too.
    SPIN_CYCLES = 1_000_000

    def __init__(self, flush_mb: int) -> None:
        self._buffer = torch.empty(flush_mb << 20, dtype=torch.uint8, device="cuda")

    def measure(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """Flush, spin, then time ``run`` between two events."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._buffer.zero_()
        torch.cuda._sleep(self.SPIN_CYCLES)
        start.record()
        output = run()
        end.record()
        return output, lambda: start.elapsed_time(end) / 1e3

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()


def measure(
    cases: Sequence[Case], clock: Clock, *, warmup: int, rounds: int, description: str = "timing"
) -> tuple[Row, ...]:
    """Check, time and check again, by the protocol of this module. Rows come in the order of ``cases``.

    warmup: rounds thrown away; rounds: repetitions recorded, at least 1. Raises ValueError when two cases share
    a name. A closure that raises is a fault of the caller and passes through.
    """
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        raise ValueError(f"case names must differ, found {names}")
    if rounds < 1 or warmup < 0:
        raise ValueError(f"expected rounds >= 1 and warmup >= 0, found rounds={rounds}, warmup={warmup}")
    errors = {case.name: _checked_run(case, clock) for case in cases}
    timed = [case for case in cases if errors[case.name] <= case.tolerance]
    seconds: dict[str, list[float]] = {case.name: [] for case in timed}
    for index in tqdm(range(warmup + rounds), desc=description, unit="round", leave=False, disable=None):
        is_last = index == warmup + rounds - 1
        pending = []
        for case in timed:
            if is_last and case.poison is not None:
                case.poison()
            output, read = clock.measure(case.run)
            pending.append((case, read))
            if is_last:
                clock.settle()
                errors[case.name] = _worse(errors[case.name], case.error(output))
            del output  # back to the allocator before the next case runs
        clock.settle()
        for case, read in pending:
            if index >= warmup:
                seconds[case.name].append(read())
    rows = []
    for case in cases:
        passed = errors[case.name] <= case.tolerance
        rows.append(Row(case.name, tuple(seconds[case.name]) if passed else (), errors[case.name], case.tolerance))
    return tuple(rows)


def _checked_run(case: Case, clock: Clock) -> float:
    if case.poison is not None:
        case.poison()
    output = case.run()
    clock.settle()
    return float(case.error(output))


def _worse(first: float, second: float) -> float:
    """The larger error; NaN, which no comparison finds, is the worst."""
    return float(np.maximum(first, second))


# --- what a closure does besides its work ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AllocationRecord:
    """What torch's CUDA allocator was asked for during one call."""

    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One kernel as the profiler saw it launched."""

    name: str  # demangled
    grid: tuple[int, ...]
    block: tuple[int, ...]
    registers: int  # a thread
    shared_bytes: int  # a block, static and dynamic
    occupancy: float | None  # estimated share of the warps an SM can hold, where the profiler gives one


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """What the profiler saw during one call."""

    kernels: tuple[KernelLaunch, ...]  # in launch order
    synchronisations: tuple[str, ...]  # host calls that wait for the device
    allocations: tuple[str, ...]  # CUDA allocations past torch's allocator


def allocations(run: Callable[[], Any]) -> AllocationRecord:
    """Allocations that one call of ``run`` makes through torch, freed or not (CUDA only)."""

    def counters() -> tuple[int, int]:
        stats = torch.cuda.memory_stats()
        return stats["allocation.all.allocated"], stats["allocated_bytes.all.allocated"]

    count, size = counters()
    run()
    count_after, size_after = counters()
    torch.cuda.synchronize()
    return AllocationRecord(count_after - count, size_after - size)


_REGION = "tilerank.timed_closure"
_SYNCHRONISES = re.compile(r"cu(da)?(Device|Stream|Event|Ctx)Synchronize|cudaMemcpy|cuMemcpy(HtoD|DtoH|DtoD)(_v2)?")
_ALLOCATES = re.compile(r"cu(da)?(Malloc|MemAlloc|HostAlloc|Free|MemFree)\w*")


def launches(run: Callable[[], Any]) -> LaunchRecord:
    """Kernels, waits and driver allocations of one call of ``run``, as the profiler sees them (CUDA only)."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        with record_function(_REGION):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def read_trace(events: Sequence[Mapping[str, Any]]) -> LaunchRecord:
    """Read a Chrome trace of one call inside the region that `launches` marks."""
    spans = sorted((event for event in events if event.get("ph") == "X"), key=lambda event: event["ts"])
    region = next(event for event in spans if event["name"] == _REGION and event.get("cat") == "user_annotation")
    start, end = region["ts"], region["ts"] + region["dur"]
    host_calls = [
        event["name"]
        for event in spans
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and start <= event["ts"] <= end
    ]
    return LaunchRecord(
        tuple(_kernel_launch(event) for event in spans if event.get("cat") == "kernel"),
        tuple(name for name in host_calls if _SYNCHRONISES.fullmatch(name)),
        tuple(name for name in host_calls if _ALLOCATES.fullmatch(name)),
    )


def _kernel_launch(event: Mapping[str, Any]) -> KernelLaunch:
    facts = event["args"]
    occupancy = facts.get("est. achieved occupancy %")
    return KernelLaunch(
        name=event["name"],
        grid=tuple(facts["grid"]),
        block=tuple(facts["block"]),
        registers=int(facts["registers per thread"]),
        shared_bytes=int(facts["shared memory"]),
        occupancy=occupancy / 100 if occupancy else None,  # 0: a block's shared memory is beyond what it knows of
    )


def closure_faults(run: Callable[[], Any], kernel: str) -> tuple[str, ...]:
    """What disqualifies ``run`` from being timed as the kernel whose name matches ``kernel`` (CUDA only).

    kernel: regular expression that every launched kernel's name must contain. Empty when there is no fault.
    """
    return faults(*look_at(run), kernel)


def look_at(run: Callable[[], Any]) -> tuple[AllocationRecord, LaunchRecord]:
    """What one call of ``run`` asks of the allocator and launches, once its first call is over (CUDA only)."""
    run()  # first-call work (module load, workspace) is not the closure's
    torch.cuda.synchronize()
    return allocations(run), launches(run)


def faults(allocated: AllocationRecord, launched: LaunchRecord, kernel: str) -> tuple[str, ...]:
    """`closure_faults` from what was seen of one call."""
    found = []
    if allocated.count:
        found.append(f"allocates {allocated.bytes} bytes in {allocated.count} pieces")
    if launched.allocations:
        found.append(f"calls {', '.join(launched.allocations)}")
    if launched.synchronisations:
        found.append(f"waits for the device: {', '.join(launched.synchronisations)}")
    others = [launch.name for launch in launched.kernels if not re.search(kernel, launch.name)]
    if not launched.kernels:
        found.append("launches no kernel")
    elif others:
        found.append(f"launches {others}, expected names matching {kernel!r}")
    return tuple(found)
