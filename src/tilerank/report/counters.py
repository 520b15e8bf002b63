"""What Nsight Compute says about each variant: where the time of its warps went, and what that makes it bound by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilerank.report.records import Record, lookup

ISSUING = "issuing"
"""The part of a warp's time in which it issues: one cycle an instruction."""

KINDS: Mapping[str, tuple[str, ...]] = {
    "issue": ("not_selected", "dispatch_stall", "no_instruction", "branch_resolving", "imc_miss"),
    "compute": ("math_pipe_throttle", "gmma", "wait"),
    "shared memory": ("short_scoreboard", "mio_throttle"),
    "memory": ("long_scoreboard", "lg_throttle", "tex_throttle", "drain"),
    "barriers": ("barrier", "membar", "sleeping", "misc"),
}
"""Kind of limit -> the tool's stall reasons that belong to it (Nsight Compute, Profiling Guide, "Warp Stall Reasons").
issue: ready but not chosen, or held up at fetch and dispatch. compute: the arithmetic pipe is full, or a result of
fixed latency is not there yet. shared memory: its queue or its latency. memory: L1, L2 and beyond."""


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of a variant's kernel; of its longest one by instructions, where it launches several."""

    variant: str
    figures: Mapping[str, float]  # as recorded: occupancy_pct, instructions_per_cycle, dram_throughput_pct, ...
    stalls: Mapping[str, float]  # reason -> cycles that a warp waits for it an issued instruction, worst first

    @property
    def shares(self) -> Mapping[str, float]:
        """ISSUING and each of `KINDS` -> its share of a warp's time, largest kind first; they add up to 1."""
        cycles = {kind: sum(self.stalls.get(reason, 0.0) for reason in reasons) for kind, reasons in KINDS.items()}
        named = {reason for reasons in KINDS.values() for reason in reasons}
        other = sum(value for reason, value in self.stalls.items() if reason not in named)
        if other > 0:
            cycles["other"] = other
        total = 1.0 + sum(cycles.values())
        ordered = sorted(cycles.items(), key=lambda item: -item[1])
        return {ISSUING: 1.0 / total, **{kind: value / total for kind, value in ordered}}

    @property
    def bound_by(self) -> str:
        """The kind of limit that warps wait for most."""
        return next(kind for kind in self.shares if kind != ISSUING)

    @property
    def main_reasons(self) -> tuple[tuple[str, float], ...]:
        """The two worst stall reasons with their shares of a warp's time."""
        total = 1.0 + sum(self.stalls.values())
        return tuple((reason, cycles / total) for reason, cycles in list(self.stalls.items())[:2])

    @property
    def issue_slots(self) -> float | None:
        """Share of the SM's issue slots that are used: four schedulers issue one instruction a cycle each."""
        instructions = self.figures.get("instructions_per_cycle")
        return None if instructions is None else instructions / 4


def counters_of(records: Sequence[Record]) -> dict[str, Counters]:
    """Variant -> its counters, for the variants that the tool could profile."""
    found = {}
    for record in records:
        for variant, values in (lookup(record.values, "profile_kernels") or {}).items():
            kernels = [kernel for kernel in values.get("kernels", {}).values() if kernel.get("stalls")]
            if kernels:
                found[variant] = _counters(variant, max(kernels, key=lambda kernel: kernel.get("instructions", 0.0)))
    return found


def _counters(variant: str, kernel: Mapping[str, Any]) -> Counters:
    figures = {key: value for key, value in kernel.items() if isinstance(value, int | float)}
    stalls = dict(sorted(kernel["stalls"].items(), key=lambda item: (-item[1], item[0])))
    return Counters(variant, figures, stalls)
