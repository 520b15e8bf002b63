"""Every rung at every precision beside what its bytes, exponentials and products take at the machine's rates.

Rungs do the same work on the same data, so a roofline over arithmetic intensity would be one column; what differs is
the unit that multiplies, and with it which floor is the highest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilerank.report.records import Record, merge, sources
from tilerank.report.tables import Column, TableSpec, build_table, keyed, keyed_twice, markdown, share, short, text

ROOFLINE = TableSpec(
    "roofline",
    "Every rung beside its floors (workload seed)",
    "bench_attention",
    "precision and variant",
    (
        Column("µs", "us", short),
        Column("products by", "products", text),
        Column("useful TFLOP/s", "tflops", short),
        Column("bytes, µs", "hbm_us", short),
        Column("exponentials, µs", "exps_us", short),
        Column("products, µs", "products_us", short),
        Column("highest floor, µs", "floor_us", short),
        Column("which is of", "floor_bound", text),
        Column("share of it", "share_of_floor", share),
    ),
    "The time is that of the ladder (packed where served). Floors count valid tokens once: q, k, v and out over the "
    "memory's rate, a score's exponential and its multiply-adds over the rates of the units that the rung uses.",
)


def roofline_table(records: Sequence[Record], order: Sequence[str] = ()) -> str:
    """The table in Markdown, for the marker ``roofline``; order: the ladder's variants from the first rung on."""
    summary = merge(records)
    ladder = {name: rung for name, rung in summary.get("ladder", {}).items() if name != "best_ffma"}
    rungs = {f"fp32 {name}": _flat(rung) for name, rung in keyed(ladder, order)}
    rungs |= {label: _flat(rung) for label, rung in keyed_twice(summary.get("rungs", {}), order)}
    timed = {label: rung for label, rung in rungs.items() if "us" in rung}
    table = build_table(ROOFLINE, {ROOFLINE.name: timed}, tuple(timed))
    if table is None:
        return f"*Not recorded on this machine (stage `{ROOFLINE.stage}`).*"
    return markdown(table, sources(records, "attention"))


def _flat(rung: Mapping[str, Any]) -> dict[str, Any]:
    """The rung with its floors among its figures, and with the unit that multiplies."""
    unit = rung.get("products", "ffma") if rung.get("precision", "fp32") in ("fp32", "tf32") else "its dtype"
    return {**rung, **rung.get("floors", {}), "products": unit}
