"""What follows from the records: steps and their gains, limits, predictions held or not, Amdahl's accounting.

`analyse` adds these to the summary's sections for tables and pictures; the summary itself holds what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tilerank.amdahl import amdahl
from tilerank.architectures import H200, T4, Device
from tilerank.report.counters import Counters, counters_of
from tilerank.report.predictions import predicted_time
from tilerank.report.records import PRECISIONS, Record, Summary, lookup, merge

HEAD_DIM = 32
"""Of the model and of workload seed: what the comparison of devices counts a score's work for."""

KEYS_PER_QUERY = 369
"""Scores over tokens of workload seed, a head: how many scores share the bytes of one token."""


def analyse(records: Sequence[Record], predictions: Mapping[str, str]) -> dict[str, Any]:
    """The summary's sections, and those that follow from them.

    predictions: variant -> what was expected of it, in ladder order. Added are, where the records allow:
    ``ladder.<variant>.{gain_over_rung_before, rung_before, bound_by, commit}``
    ``predicted.<variant>.{predicted_us, measured_us, case, ratio}``
    ``counters.<variant>``: figures as shares of one, a warp's time by kind of wait, bound_by
    ``amdahl.<part>.{ms, share, ceiling}``
    ``architectures.<variant>.{shared_bytes, t4_registers, h200_registers, ...}``: spill_bytes and warps likewise
    """
    summary = merge(records)
    ladder = summary.get("ladder", {})
    for name, before in rungs_before(ladder, predictions).items():
        ladder[name]["rung_before"] = before
        ladder[name]["gain_over_rung_before"] = gain(ladder[before], ladder[name])
    for record in records:
        for name in lookup(record.values, "ladder") or {}:
            commit = str(record.provenance.get("commit") or "")[:10]
            if commit:
                ladder[name]["commit"] = commit + (" with changes" if record.provenance.get("dirty") else "")
    counters = counters_of(records)
    for name, found in counters.items():
        if name in ladder:
            ladder[name]["bound_by"] = found.bound_by
    measured = measurements(records)
    derived = {
        "predicted": dict(_predicted(measured, predictions)),
        "counters": {name: _limits(found, measured.get(name, {})) for name, found in counters.items()},
        "amdahl": _amdahl(summary),
        "architectures": dict(_architectures(records, measured, counters)),
    }
    return {**summary, **{name: section for name, section in derived.items() if section}}


def measurements(records: Sequence[Record]) -> dict[str, Mapping[str, Any]]:
    """Variant -> what bench_attention measured of it: in the ladder, else at the first precision that it serves."""
    found: dict[str, Mapping[str, Any]] = {}
    for rungs in reversed(measured_by_precision(records).values()):
        found |= rungs
    return found


def measured_by_precision(records: Sequence[Record]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Precision -> variant -> what bench_attention measured; fp32 is the ladder."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for precision in PRECISIONS:
        for record in records:
            rungs = lookup(record.values, "ladder" if precision == "fp32" else f"rungs.{precision}")
            if rungs:
                found.setdefault(precision, {}).update(rungs)
    return found


def rungs_before(measured: Mapping[str, Any], order: Iterable[str]) -> dict[str, str]:
    """Variant -> the timed one below it on the ladder at the same precision; absent for the first.

    order: variants in ladder order; only these are rungs.
    """
    last: dict[str, str] = {}  # precision -> the latest rung
    before = {}
    for name in order:
        if "us" in measured.get(name, {}):
            precision = measured[name].get("precision", "fp32")
            if precision in last:
                before[name] = last[precision]
            last[precision] = name
    return before


def gain(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    """Time of one rung over the other's on the same case: without a mask where only one of the two masks."""
    same = before.get("masked") == after.get("masked") or not all("unmasked_us" in rung for rung in (before, after))
    case = "us" if same else "unmasked_us"
    return before[case] / after[case]


def time_parts(profile: Mapping[str, Any]) -> dict[str, float]:
    """Part of one query -> its share of the time, the forward pass by operator class first; they add up to 1.

    Empty when the profile has no forward pass.
    """
    if "forward_share" not in profile:
        return {}
    within = profile.get("within_forward", {})
    forward = {
        "attention": profile.get("attention_share", 0.0),
        "matrix products": profile.get("gemm_share", 0.0),
        "norms": profile["forward_share"] * within.get("norm", 0.0),
        "activations": profile["forward_share"] * within.get("activation", 0.0),
    }
    tokenizer, tensors = profile.get("tokenize_share", 0.0), profile.get("tensors_share", 0.0)
    parts = {
        **forward,
        "rest of the forward pass": profile["forward_share"] - sum(forward.values()),
        "tokenising": tokenizer - tensors,
        "building tensors": tensors,
        "everything else": 1 - profile["forward_share"] - tokenizer,
    }
    return {label: size for label, size in parts.items() if size > 0}


def _predicted(measured: Mapping[str, Any], predictions: Mapping[str, str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, prediction in predictions.items():
        found = predicted_time(prediction, measured.get(name, {}))
        if found is not None:
            yield (
                name,
                {
                    "predicted_us": found.us,
                    "measured_us": found.measured,
                    "case": found.case,
                    "ratio": found.measured / found.us,
                },
            )


def _limits(counters: Counters, rung: Mapping[str, Any]) -> dict[str, Any]:
    """The counters that a limit is read from, as shares of one, and the point of the roofline."""
    figures = counters.figures
    percent = ("sm_throughput", "dram_throughput", "l1_hit", "l2_hit", "occupancy")
    limits: dict[str, Any] = {key: figures[f"{key}_pct"] / 100 for key in percent if f"{key}_pct" in figures}
    if "instructions" in figures:
        limits["instructions_m"] = figures["instructions"] / 1e6
    if counters.issue_slots is not None:
        limits["issue_slots"] = counters.issue_slots
    useful, memory = rung.get("share_of_floor"), limits.get("dram_throughput")
    # The floor is that of useful arithmetic: a roofline needs it, and counted traffic. Both are shares of this
    # machine's rates, so their ratio is the intensity in units of the ridge, where the two roofs meet.
    if useful is not None and memory and rung.get("floor_bound") != "hbm":
        limits |= {"useful_arithmetic": useful, "intensity": useful / memory}
    waits = ", ".join(f"{reason} {100 * part:.0f} %" for reason, part in counters.main_reasons)
    return {**limits, "shares": dict(counters.shares), "bound_by": counters.bound_by, "waits": waits}


def _amdahl(summary: Summary) -> dict[str, Any]:
    """Each part of one query with what it could gain at most; and what the kernel gained, predicted and measured."""
    profile = summary.get("profile", {})
    total = lookup(profile, "ms.total")
    parts: dict[str, Any] = {}
    for label, part in time_parts(profile).items():
        parts[label] = {"share": part, "ceiling": 1 / (1 - part)}
        if total is not None:
            parts[label]["ms"] = part * total
    kernel = lookup(summary, "drop_in.fp32.kernel_speedup")
    if parts and kernel is not None and "attention" in parts:
        attention = parts["attention"]["share"]
        parts["kernel_speedup"] = kernel
        parts["predicted_speedup"] = amdahl(attention, kernel)
        measured = lookup(summary, "rerank.fp32.speedup_vs_cross_encoder")
        if measured is not None:
            parts["rerank_speedup"] = measured
    return parts


def _architectures(
    records: Sequence[Record], measured: Mapping[str, Any], counters: Mapping[str, Counters]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What each variant's kernel takes of a T4's multiprocessor and of an H200's, by the compiler's word."""
    for record in records:
        for name, built in (lookup(record.values, "build_kernels") or {}).items():
            block = str(lookup(measured, f"{name}.block") or "").split("x")[0]
            if not block and name in counters:
                block = f"{counters[name].figures.get('block', 0):.0f}"
            archs = built.get("archs", {})
            if not block.isdecimal() or int(block) == 0 or not {"sm_75", "sm_90a"} <= set(archs):
                continue
            shared = _launched_shared(measured.get(name, {}), counters.get(name))
            row: dict[str, Any] = {} if shared is None else {"shared_bytes": shared}
            for key, arch, limits in (("t4", "sm_75", T4.architecture), ("h200", "sm_90a", H200.architecture)):
                kernel = _kernel(archs[arch], str(lookup(measured, f"{name}.kernel") or ""))
                row |= {f"{key}_{figure}": kernel[figure] for figure in ("registers", "spill_bytes")}
                held = kernel["shared_bytes"] if shared is None else shared
                row[f"{key}_warps"] = limits.warps(kernel["registers"], int(block), held)
            yield name, row


def _kernel(arch: Mapping[str, Any], launched: str) -> Mapping[str, Any]:
    """The kernel that was launched, else the one for `HEAD_DIM`, else the largest of the file."""
    kernels = arch["kernels"]
    named = next((values for name, values in kernels.items() if name in launched), None)
    return named or next((values for name, values in kernels.items() if name.endswith(f"<{HEAD_DIM}>")), arch)


def _launched_shared(rung: Mapping[str, Any], counters: Counters | None) -> int | None:
    """Bytes of shared memory a block was launched with, what is asked for at the launch included."""
    if "shared_bytes" in rung:
        return int(rung["shared_bytes"])
    if counters is None or "shared_bytes" not in counters.figures:
        return None
    return int(counters.figures["shared_bytes"]) - H200.architecture.reserved_shared  # the tool counts that too


# --- devices ---------------------------------------------------------------------------------------------------


def score_clocks(device: Device) -> dict[str, float]:
    """Clocks that one score (q k and p v of one head, `HEAD_DIM` wide) takes of one multiprocessor, by resource.

    Memory counts q, k, v and out once, in fp32; the resources work beside each other, so the largest is the floor.
    """
    limits = device.architecture
    bytes_per_clock = device.memory_gb_per_s / (device.multiprocessors * device.clock_ghz)
    return {
        "fp32 products": 2 * HEAD_DIM / limits.fp32_fmas,
        "fp16 products": 2 * HEAD_DIM / limits.fp16_mma_fmas,
        "exponentials": 1 / limits.exps,
        "memory, fp32": 4 * HEAD_DIM * 4 / KEYS_PER_QUERY / bytes_per_clock,
        "memory, fp16": 4 * HEAD_DIM * 2 / KEYS_PER_QUERY / bytes_per_clock,
    }


def devices_table() -> str:
    """A T4 beside an H200 in Markdown: what the data sheets say, and what one score costs on each."""
    rows: list[tuple[str, float, float, str]] = [
        ("multiprocessors", T4.multiprocessors, H200.multiprocessors, ",.0f"),
        ("clock, GHz", T4.clock_ghz, H200.clock_ghz, ".2f"),
        ("fp32 without tensor cores, TFLOP/s", *(_tera(device, "fp32_fmas") for device in (T4, H200)), ".1f"),
        ("fp16 on tensor cores, TFLOP/s", *(_tera(device, "fp16_mma_fmas") for device in (T4, H200)), ".0f"),
        ("exponentials, 10^12 a second", *(_tera(device, "exps") / 2 for device in (T4, H200)), ".2f"),
        ("memory, GB/s", T4.memory_gb_per_s, H200.memory_gb_per_s, ",.0f"),
        ("L2, MB", T4.l2_mb, H200.l2_mb, ".0f"),
        ("shared memory of an SM, KB", T4.architecture.shared_kb, H200.architecture.shared_kb, ".0f"),
        ("warps an SM holds", T4.architecture.max_warps, H200.architecture.max_warps, ".0f"),
    ]
    ours, theirs = score_clocks(T4), score_clocks(H200)
    rows += [(f"clocks of an SM a score, {name}", ours[name], theirs[name], ".3f") for name in ours]
    lines = ["| | T4 | H200 | H200 / T4 |", "|---|---:|---:|---:|"]
    lines += [f"| {name} | {old:{style}} | {new:{style}} | {new / old:.2f}× |" for name, old, new, style in rows]
    sources = "; ".join(device.source for device in (T4, H200))
    note = f"A score is one query row and key of one head, {HEAD_DIM} wide; memory counts q, k, v and out once."
    return "\n".join([*lines, "", note, "", f"<sub>{sources}; CUDA C++ Programming Guide</sub>"])


def _tera(device: Device, rate: str) -> float:
    return 2 * getattr(device.architecture, rate) * device.multiprocessors * device.clock_ghz / 1e3
