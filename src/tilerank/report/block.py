"""The attention block's latency against length, fused and unfused, and where the picture of it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilerank.report.figures import MUTED, OURS, PEER, Picture, _picture
from tilerank.report.records import PRECISIONS, Summary, lookup
from tilerank.report.tables import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = "docs/block.md"
CHART = "block_chart"
"""The page, and the marker between which the picture is shown once there is one."""

PICTURE = "block-lengths"

_STYLES = {"fp32": "-", "fp16": "--", "bf16": ":"}


def chart_link(summary: Summary) -> str:
    """What stands between the marker's lines: the picture, or that there is none yet."""
    if not lengths_pictures(summary):
        return "*Not recorded on this machine (stage `bench_block`).*"
    return f"![Latency of the block against length, fused and unfused](pictures/{PICTURE}.svg)"


def lengths_pictures(summary: Summary) -> tuple[Picture, ...]:
    """Microseconds against tokens on logarithmic axes, a line fused and one unfused a precision; none without a
    record."""
    lines = []
    for precision in PRECISIONS:
        lengths = lookup(summary, f"block_lengths.{precision}") or {}
        timed = sorted(
            (int(tokens), each["us"], each["unfused_us"])
            for tokens, each in lengths.items()
            if "us" in each and "unfused_us" in each
        )
        if timed:
            lines.append((precision, timed))
    if not lines:
        return ()

    def paint(axes: Axes) -> None:
        for precision, timed in lines:
            tokens = [each[0] for each in timed]
            style = _STYLES.get(precision, "-")
            axes.plot(tokens, [each[1] for each in timed], style, color=OURS, marker=".", label=f"{precision} fused")
            axes.plot(tokens, [each[2] for each in timed], style, color=PEER, marker=".", label=f"{precision} unfused")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        marks = sorted({each[0] for _, timed in lines for each in timed})
        axes.set_xticks(marks, [str(mark) for mark in marks])
        axes.minorticks_off()
        axes.set(xlabel="tokens a sequence", ylabel="µs")
        axes.grid(color=MUTED, alpha=0.25, linewidth=0.5)
        axes.legend(frameon=False, fontsize=8)

    described = (
        f"{precision} {tokens} tokens {short(ours)} fused, {short(theirs)} unfused"
        for precision, timed in lines
        for tokens, ours, theirs in timed
    )
    description = "Attention block over lengths, µs: " + ", ".join(described)
    return (_picture(PICTURE, "block_lengths", description, 3.4, paint),)
