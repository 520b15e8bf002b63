"""The parts of the fused forward pass: what each took, what it takes at least, and the gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilerank.report.figures import LINE, OURS, Picture, _picture
from tilerank.report.records import PRECISIONS, Record, Summary, lookup, merge, sources
from tilerank.report.tables import Table, markdown, share, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = "docs/encoder.md"
TABLE = "forward_parts"
PICTURE = "forward-parts"
"""Where the table stands, its marker's name, and the picture's."""


def _measured(summary: Summary) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Precision -> part -> its figures, where they are recorded."""
    found = {}
    for precision in PRECISIONS:
        parts = lookup(summary, f"forward.{precision}.parts") or {}
        rows = {name: row for name, row in parts.items() if isinstance(row, Mapping) and "us" in row}
        if rows:
            found[precision] = rows
    return found


def parts_table(records: Sequence[Record]) -> str:
    """Every part at every precision recorded, in Markdown: kernels, time, floor, gap and share of the pass."""
    measured = _measured(merge(records))
    rows = []
    for precision, parts in measured.items():
        total = sum(figures["us"] for figures in parts.values())
        for name, figures in parts.items():
            us, floor = figures["us"], figures["floor_us"]
            shares = (share(us / total), share(floor / us))
            rows.append(
                (precision, name, str(figures["launches"]), short(us), short(floor), short(us - floor), *shares)
            )
    if not rows:
        return "Not recorded on this machine yet."
    headings = ("precision", "part", "kernels", "µs", "floor, µs", "gap, µs", "of the pass", "floor / time")
    table = markdown(Table(TABLE, "", headings, tuple(rows)), sources(records, "forward"))
    return f"![The parts of a forward pass, measured and at least](pictures/{PICTURE}.svg)\n\n{table}"


def parts_pictures(summary: Summary) -> tuple[Picture, ...]:
    """A bar for each part, its floor in front; none without a record."""
    bars = [
        (f"{precision} {name}", figures["us"], figures["floor_us"])
        for precision, parts in _measured(summary).items()
        for name, figures in parts.items()
    ]
    if not bars:
        return ()

    def paint(axes: Axes) -> None:
        places, largest = range(len(bars)), max(us for _, us, _ in bars)
        axes.barh(places, [us for _, us, _ in bars], color=LINE, height=0.7, label="measured, one pass")
        axes.barh(places, [floor for _, _, floor in bars], color=OURS, height=0.7, label="at least")
        for row, (_, us, _) in enumerate(bars):
            axes.text(us + largest * 0.015, row, short(us), va="center")
        axes.set(xlim=(0, largest * 1.15), xlabel="µs in one forward pass, workload seed")
        axes.set_yticks(places, [label for label, _, _ in bars])
        axes.invert_yaxis()
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1), ncols=2, frameon=False, fontsize=8)

    description = "The parts of a forward pass, µs measured and at least: " + ", ".join(
        f"{label} {short(us)} and {short(floor)}" for label, us, floor in bars
    )
    return (_picture(PICTURE, "forward", description, 1.0 + 0.24 * len(bars), paint),)
