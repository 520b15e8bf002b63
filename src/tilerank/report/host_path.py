"""The host paths: what was expected of each, what was measured, and where its milliseconds go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilerank import host_path
from tilerank.report.figures import INK, LINE, MUTED, OURS, REST, Picture, _picture
from tilerank.report.records import PRECISIONS, Record, Summary, lookup, merge, sources
from tilerank.report.tables import ABSENT, FAILED, Table, markdown, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = "docs/host_path.md"
TABLE = "host_path"
"""Where the table stands, and its marker's name."""

PHASES = (
    ("tokens", "ids of the texts", MUTED),
    ("batches", "batches, to the device", LINE),
    ("forward", "model", OURS),
    ("scores", "scores, to the host", REST),
)
"""Key, label and colour of what `tilerank.bench.rerank.PHASES` are."""

_IDEAS = [
    *((path.name, path.idea, path.prediction) for path in host_path.PATHS),
    (host_path.CACHED, host_path.CACHED_IDEA, host_path.CACHED_PREDICTION),
]


def steps_table(records: Sequence[Record]) -> str:
    """Every path with its idea, its prediction and its time (or FAIL) at each precision recorded, in Markdown.

    A time is the median, and in brackets what nine of ten calls stay below.
    """
    summary = merge(records)
    measured = {p: steps for p in PRECISIONS if (steps := lookup(summary, f"rerank.{p}.steps"))}
    rows = []
    for name, idea, prediction in _IDEAS:
        rows.append((f"`{name}`", idea, prediction, *(_time(steps.get(name, {})) for steps in measured.values())))
    headings = ("path", "idea", "predicted", *(f"{precision}, ms (p90)" for precision in measured))
    table = markdown(Table(TABLE, "", headings, tuple(rows)), sources(records, "rerank") if measured else ())
    return table.replace("|---|---:|---:|", "|---|---|---|", 1)  # two columns of words


def _time(step: Mapping[str, Any]) -> str:
    if "ms" not in step:
        return FAILED if "failure" in step else ABSENT
    return short(step["ms"]) + (f" ({short(step['p90_ms'])})" if "p90_ms" in step else "")


def steps_pictures(summary: Summary) -> tuple[Picture, ...]:
    """A bar for the unmodified pipeline and for each path, cut where its time goes, with a mark at its time as it runs;
    none without a record."""
    bars: list[tuple[str, list[float]]] = []
    unmodified = lookup(summary, "profile.ms")
    if unmodified is not None:
        parts = (("tokenize",), ("tensors", "transfer"), ("forward",), ("scores",))
        bars.append(("fp32 unmodified", [sum(unmodified.get(key, 0.0) for key in keys) for keys in parts]))
    names = [name for name, _, _ in _IDEAS]
    steps = [
        (f"{precision} {name}", step)
        for precision in PRECISIONS
        for name in names
        if "ms" in (step := lookup(summary, f"rerank.{precision}.steps.{name}") or {})
    ]
    if not steps:
        return ()
    as_run = {len(bars) + row: step["ms"] for row, (_, step) in enumerate(steps)}
    bars += [(label, [step[f"{key}_ms"] for key, _, _ in PHASES]) for label, step in steps]
    totals = [sum(parts) for _, parts in bars]

    def paint(axes: Axes) -> None:
        for phase, (_, label, colour) in enumerate(PHASES):
            lefts = [sum(parts[:phase]) for _, parts in bars]
            axes.barh(range(len(bars)), [parts[phase] for _, parts in bars], left=lefts, color=colour, label=label)
        axes.plot(list(as_run.values()), list(as_run), "|", color=INK, markersize=12, label="as it runs")
        for row, total in enumerate(totals):
            end = max(total, as_run.get(row, 0.0)) + max(totals) * 0.015
            axes.text(end, row, _label(total, as_run.get(row)), va="center")
        axes.set(xlim=(0, max(totals) * 1.3), xlabel="ms, the device waited for after every part")
        axes.set_yticks(range(len(bars)), [label for label, _ in bars])
        axes.invert_yaxis()
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1), ncols=2, frameon=False, fontsize=8)

    description = "One query from text to scores, ms: " + ", ".join(
        f"{label} {_label(total, as_run.get(row))} (model {short(parts[2])})"
        for row, ((label, parts), total) in enumerate(zip(bars, totals, strict=True))
    )
    return (_picture("host-path", "rerank", description, 1.1 + 0.27 * len(bars), paint),)


def _label(total: float, as_run: float | None) -> str:
    return short(total) if as_run is None else f"{short(total)}; as it runs {short(as_run)}"
