"""The pictures: drawn by matplotlib as SVG, the same bytes for the same figures.

Colours are drawn as placeholders and replaced afterwards: by CSS variables of the page, so that a picture follows
its light or dark scheme, or by fixed colours on white for a file of its own.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, TypeAlias

from tilerank.report.analysis import time_parts
from tilerank.report.records import PRECISIONS, Summary, lookup
from tilerank.report.tables import ratio, share, short, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Placeholder -> name of the page's CSS variable. No picture draws these near-black shades for their own sake.
INK, MUTED, LINE, OURS, PEER, REST, PAPER = (f"#01010{digit}" for digit in range(1, 8))
ISSUE, COMPUTE, SHARED, MEMORY = (f"#01020{digit}" for digit in range(1, 5))
_VARIABLES = {INK: "ink", MUTED: "muted", LINE: "line", OURS: "ours", PEER: "peer", REST: "rest", PAPER: "paper"}
_VARIABLES |= {ISSUE: "issue", COMPUTE: "compute", SHARED: "shared", MEMORY: "memory"}

LIGHT = {
    "ink": "#1c2128",
    "muted": "#59636e",
    "line": "#d1d9e0",
    "ours": "#0a66c2",
    "peer": "#8b949e",
    "rest": "#c3ccd5",
    "paper": "#ffffff",
    "panel": "#f6f8fa",
    "issue": "#bf8700",
    "compute": "#1a7f37",
    "shared": "#8250df",
    "memory": "#cf222e",
}
DARK = {
    "ink": "#e6edf3",
    "muted": "#9aa4af",
    "line": "#3d444d",
    "ours": "#5aa9ff",
    "peer": "#8b949e",
    "rest": "#57606a",
    "paper": "#0d1117",
    "panel": "#161b22",
    "issue": "#d4a72c",
    "compute": "#4ac26b",
    "shared": "#b083f0",
    "memory": "#ff7b72",
}
"""CSS variable -> colour, one set for each scheme."""

_WIDTH = 5.0  # inches, 480 CSS pixels: small enough that the text stays readable on a phone

_STYLE = {
    "svg.fonttype": "none",  # text stays text: it is found, read aloud and set in the page's font
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": False,
    "ytick.major.size": 0.0,
    "savefig.transparent": True,
}


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture. ``inline`` goes into the page, ``standalone`` is a file of its own."""

    name: str
    section: str  # the table that it stands above
    description: str  # what it shows, for readers who do not see it
    inline: str
    standalone: str


def draw_pictures(summary: Summary, predictions: Mapping[str, str]) -> tuple[Picture, ...]:
    """Every picture that the records have figures for.

    summary: as `analyse` gives it. predictions: variant -> what it was expected to do and why, in ladder order.
    """
    drawn = [
        *_length_histograms(summary),
        _time_shares(summary),
        _ladder(summary, predictions),
        _predicted_times(summary, predictions),
        _stalls(summary, predictions),
        _roofline(summary, predictions),
        _floors(summary),
        _rungs(summary),
        _predictions(summary),
        _rerank_times(summary),
        _quality_intervals(summary),
    ]
    return tuple(picture for picture in drawn if picture is not None)


def _length_histograms(summary: Summary) -> Iterator[Picture]:
    """One for each ``workload.<name>.histogram`` {edges: [n + 1], rows: [n]}."""
    for name, values in sorted(summary.get("workload", {}).items()):
        histogram = lookup(values, "histogram")
        if histogram is not None and any(histogram["rows"]):
            yield _length_histogram(name, histogram["edges"], histogram["rows"], values.get("mean_tokens"))


def _length_histogram(name: str, edges: Sequence[int], rows: Sequence[int], mean: float | None) -> Picture:
    def paint(axes: Axes) -> None:
        axes.stairs(rows, edges, fill=True, color=OURS)
        if mean is not None:
            axes.axvline(mean, color=INK, linewidth=1)
            axes.text(mean - edges[-1] / 60, max(rows) * 1.06, f"mean {short(mean)}", color=INK, ha="right")
        axes.set(xlim=(0, edges[-1]), ylim=(0, max(rows) * 1.18), xlabel="tokens a row", ylabel="rows")

    description = f"Histogram of tokens a row, workload {name}, {sum(rows)} rows of at most {edges[-1]} tokens"
    return _picture(f"lengths-{name}", "workload", description, 2.3, paint)


def _time_shares(summary: Summary) -> Picture | None:
    """The whole as a staircase of bars: the forward pass by operator class, the tokenizer call, everything else."""
    profile = summary.get("profile", {})
    colours = {"attention": OURS, "matrix products": PEER, "tokenising": MUTED, "building tensors": MUTED}
    colours["everything else"] = LINE
    total = lookup(profile, "ms.total")
    parts = [
        (label + (f" {short(size * total)} ms" if total is not None else ""), size, colours.get(label, REST))
        for label, size in time_parts(profile).items()
    ]
    if not parts:
        return None

    def paint(axes: Axes) -> None:
        start = 0.0
        for row, (_, size, colour) in enumerate(parts):
            axes.barh(row, size, left=start, color=colour, height=0.7)
            start += size
        axes.set(xlim=(0, 1), xlabel="share of one query's time", yticks=range(len(parts)))
        axes.set_yticklabels([f"{label}  {share(size)}" for label, size, _ in parts])
        axes.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
        axes.invert_yaxis()

    description = "Shares of the time: " + ", ".join(f"{label} {share(size)}" for label, size, _ in parts)
    return _picture("time-shares", "profile", description, 0.6 + 0.27 * len(parts), paint)


def _ladder(summary: Summary, predictions: Mapping[str, str]) -> Picture | None:
    """A bar a rung on a logarithmic axis; below it the cause (what was expected) and the effect (what came)."""
    ladder = summary.get("ladder", {})
    timed = [name for name, values in ladder.items() if name != "best_ffma" and "us" in values]
    if not timed:
        return None
    order = _in_order(timed, predictions, key=lambda name: -ladder[name]["us"])
    times = [ladder[name]["us"] for name in order]
    notes = [_rung_notes(ladder[name], predictions.get(name)) for name in order]
    heights = [2.0 + 0.8 * len(note) for note in notes]  # in lines of text: name, bar, note

    def paint(axes: Axes) -> None:
        left, top = min(times) / 3, 0.0
        for name, us, note, height in zip(order, times, notes, heights, strict=True):
            speedup = ladder[name].get("speedup_vs_sdpa")
            value = f"{short(us)} µs" + (f", {ratio(speedup)} SDPA" if speedup is not None else "")
            axes.text(left, top + 0.5, f"{name}: {value}", color=INK, va="center")
            axes.barh(top + 1.25, us - left, left=left, height=0.6, color=OURS)
            for line, words in enumerate(note):
                axes.text(left, top + 2.05 + 0.8 * line, words, color=MUTED, va="center", fontsize=8)
            top += height
        axes.set(xscale="log", xlim=(left, max(times) * 1.3), ylim=(top, 0), yticks=[], xlabel="µs, logarithmic")
        axes.spines["left"].set_visible(False)
        _plain_logarithm(axes)

    description = "The ladder: " + ", ".join(f"{name} {short(us)} µs" for name, us in zip(order, times, strict=True))
    return _picture("ladder", "ladder", description, 0.5 + 0.17 * sum(heights), paint)


def _rung_notes(rung: Mapping[str, Any], prediction: str | None) -> list[str]:
    """Lines below a rung's bar."""
    lines = textwrap.wrap(f"Expected: {prediction}", 74) if prediction else []
    effect = []
    if "gain_over_rung_before" in rung:
        effect.append(f"{ratio(rung['gain_over_rung_before'])} over {rung['rung_before']}")
    if "bound_by" in rung:
        effect.append(f"now bound by {rung['bound_by']}")
    return [*lines, *([f"Came: {'; '.join(effect)}"] if effect else [])]


def _in_order(
    names: Iterable[str], predictions: Mapping[str, str], key: Callable[[str], Any] | None = None
) -> list[str]:
    """Variants in ladder order; those that the ladder does not know follow, by ``key``."""
    listed = [name for name in predictions if name in names]
    return listed + sorted((name for name in names if name not in listed), key=key)


def _predicted_times(summary: Summary, predictions: Mapping[str, str]) -> Picture | None:
    """For each rung the time that was predicted and the one that was measured, on a logarithmic axis."""
    rows = summary.get("predicted", {})
    order = _in_order(rows, predictions)
    if not order:
        return None
    pairs = [(rows[name]["predicted_us"], rows[name]["measured_us"]) for name in order]

    def paint(axes: Axes) -> None:
        for row, (predicted, measured) in enumerate(pairs):
            axes.plot([predicted, measured], [row, row], color=LINE, linewidth=3, zorder=1)
            axes.plot(predicted, row, marker="o", color=PEER, markersize=6, zorder=2)
            axes.plot(measured, row, marker="o", color=OURS, markersize=6, zorder=3)
        ends = [end for pair in pairs for end in pair]
        axes.set(xscale="log", xlim=(min(ends) / 1.3, max(ends) * 1.3), ylim=(len(order) - 0.5, -1.2))
        axes.set(xlabel="µs, logarithmic", yticks=range(len(order)), yticklabels=order)
        axes.text(0.0, 1.0, "● predicted", color=PEER, transform=axes.transAxes, va="top")
        axes.text(0.25, 1.0, "● measured", color=OURS, transform=axes.transAxes, va="top")
        _plain_logarithm(axes)

    description = "Predicted and measured, µs: " + ", ".join(
        f"{name} {short(predicted)} and {short(measured)}"
        for name, (predicted, measured) in zip(order, pairs, strict=True)
    )
    return _picture("predicted-times", "predicted", description, 0.7 + 0.24 * (len(order) + 1), paint)


def _plain_logarithm(axes: Axes) -> None:
    """Ticks as whole numbers, at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


_KIND_COLOURS = {
    "issuing": OURS,
    "issue": ISSUE,
    "compute": COMPUTE,
    "shared memory": SHARED,
    "memory": MEMORY,
    "barriers": MUTED,
    "other": LINE,
}


def _stalls(summary: Summary, predictions: Mapping[str, str]) -> Picture | None:
    """A bar a variant: where the time of its warps goes, by kind of wait."""
    rows = summary.get("counters", {})
    order = _in_order(rows, predictions)
    if not order:
        return None
    kinds = [kind for kind in _KIND_COLOURS if any(rows[name]["shares"].get(kind, 0) >= 0.005 for name in order)]

    def paint(axes: Axes) -> None:
        for row, name in enumerate(order):
            start = 0.0
            for kind in kinds:
                size = rows[name]["shares"].get(kind, 0.0)
                axes.barh(row, size, left=start, color=_KIND_COLOURS[kind], height=0.7)
                start += size
        axes.set(xlim=(0, 1), ylim=(len(order) - 0.5, -2.1), xlabel="share of a warp's time")
        axes.set(yticks=range(len(order)), yticklabels=order)
        axes.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
        for place, kind in enumerate(kinds):
            axes.text(place % 4 / 4, -1.75 + 0.75 * (place // 4), f"■ {kind}", color=_KIND_COLOURS[kind], va="center")

    description = "What warps wait for: " + "; ".join(
        f"{name} " + ", ".join(f"{kind} {share(rows[name]['shares'].get(kind, 0.0))}" for kind in kinds)
        for name in order
    )
    return _picture("stalls", "counters", description, 0.7 + 0.24 * (len(order) + 1.6), paint)


def _roofline(summary: Summary, predictions: Mapping[str, str]) -> Picture | None:
    """Every profiled kernel below the two roofs, both axes in units of the ridge, where the roofs meet."""
    rows = {name: row for name, row in summary.get("counters", {}).items() if "intensity" in row}
    order = _in_order(rows, predictions)
    if not order:
        return None
    points = {name: (rows[name]["intensity"], rows[name]["useful_arithmetic"]) for name in order}

    def paint(axes: Axes) -> None:
        right = 1.5 * max(2.0, *(x for x, _ in points.values()))
        left, low = 0.15 * min(1.0, *(x for x, _ in points.values())), 0.6 * min(y for _, y in points.values())
        axes.plot([low, 1.0, right], [low, 1.0, 1.0], color=PEER, linewidth=1.5)
        axes.text(right, 1.15, "arithmetic", color=MUTED, ha="right", va="bottom")
        axes.text(0.35, 0.14, "memory", color=MUTED)
        kinds = [kind for kind in _KIND_COLOURS if any(row["bound_by"] == kind for row in rows.values())]
        for place, kind in enumerate(kinds):
            axes.text(
                0.04, 0.05 + 0.055 * place, f"● bound by {kind}", color=_KIND_COLOURS[kind], transform=axes.transAxes
            )
        places = _spread([math.log(y) for _, y in points.values()], math.log(2.0 / low) / 22)
        for (name, (x, y)), place in zip(points.items(), places, strict=True):
            label = (right * 1.25, math.exp(place))
            axes.plot([x, label[0] * 0.97], [y, label[1]], color=LINE, linewidth=0.7, clip_on=False, zorder=1)
            axes.plot(x, y, marker="o", color=_KIND_COLOURS[rows[name]["bound_by"]], markersize=6, zorder=2)
            axes.text(*label, f"{name} {share(y)}", color=INK, va="center", fontsize=8)
        axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, 2.0))
        axes.set(xlabel="useful products a byte of memory traffic, in units of the ridge")
        axes.set(ylabel="share of the arithmetic rate")
        axes.set_yticks([tick for tick in (0.001, 0.01, 0.1, 1.0) if tick >= low])
        axes.set_yticklabels([share(tick) for tick in (0.001, 0.01, 0.1, 1.0) if tick >= low])
        axes.set_xticks([tick for tick in (0.1, 1, 10, 100) if left <= tick <= right])
        axes.set_xticklabels([f"{tick:g}" for tick in (0.1, 1, 10, 100) if left <= tick <= right])
        axes.minorticks_off()

    description = "Roofline, share of the arithmetic rate and intensity over the ridge's: " + ", ".join(
        f"{name} {share(y)} at {short(x)}" for name, (x, y) in points.items()
    )
    return _picture("roofline", "counters", description, 3.6, paint)


def _spread(values: Sequence[float], gap: float) -> list[float]:
    """``values`` moved apart so that neighbours are at least ``gap`` from each other, in their order of size."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    places = [values[index] for index in order]
    for _ in range(200):
        for lower in range(len(places) - 1):
            missing = gap - (places[lower + 1] - places[lower])
            if missing > 1e-9:
                places[lower] -= missing / 2
                places[lower + 1] += missing / 2
    moved = [0.0] * len(values)
    for index, place in zip(order, places, strict=True):
        moved[index] = place
    return moved


def _floors(summary: Summary) -> Picture | None:
    """Measured attention beside the best peer, and beside the least time that this machine's rates allow."""
    parts = (("best peer", "best_peer_us", PEER), ("tilerank", "us", OURS), ("floor", "floor_us", REST))
    return _bars("floors", "attention", "Attention alone", _bars_of(summary, "attention", parts), "µs", short)


def _rungs(summary: Summary) -> Picture | None:
    """Every rung at the precisions other than fp32, from its first to its last, between best peer and floor."""
    bars = []
    for precision in PRECISIONS:
        rungs = summary.get("rungs", {}).get(precision, {})
        timed = {name: rung for name, rung in rungs.items() if "us" in rung}
        if timed:
            quickest = min(timed.values(), key=lambda rung: rung["us"])
            bars += [(f"{precision} best peer", quickest["best_peer_us"], PEER)] if "best_peer_us" in quickest else []
            ordered = sorted(timed.items(), key=lambda item: -item[1]["us"])
            bars += [(f"{precision} {name}", rung["us"], OURS) for name, rung in ordered]
            bars += [(f"{precision} floor", quickest["floor_us"], REST)] if "floor_us" in quickest else []
    return _bars("rungs", "rungs", "Attention at other precisions", bars, "µs", short)


def _predictions(summary: Summary) -> Picture | None:
    """Speed-up of the drop-in as Amdahl's law predicts it, and as it was measured."""
    parts = (("predicted", "predicted_speedup", PEER), ("measured", "speedup", OURS))
    bars = _bars_of(summary, "drop_in", parts)
    return _bars("predicted-and-measured", "drop_in", "Speed-up by the drop-in", bars, "times", ratio)


def _rerank_times(summary: Summary) -> Picture | None:
    """One query end to end: sentence-transformers, the tuned peer, tilerank."""
    peers = (("sentence-transformers", "cross_encoder_ms", PEER), ("tuned peer", "tuned_peer_ms", PEER))
    bars = _bars_of(summary, "rerank", (*peers, ("tilerank", "ms", OURS)))
    return _bars("rerank-times", "rerank", "One query, raw text to scores", bars, "ms", short)


Bar: TypeAlias = tuple[str, float, str]
"""(label, length, colour)"""


def _bars_of(summary: Summary, section: str, parts: Sequence[tuple[str, str, str]]) -> list[Bar]:
    """A bar for every precision of ``section`` and every part (label, key, colour) that was recorded."""
    rows = summary.get(section, {})
    return [
        (f"{precision} {label}", rows[precision][key], colour)
        for precision in PRECISIONS
        for label, key, colour in parts
        if key in rows.get(precision, {})
    ]


def _bars(
    name: str, section: str, what: str, bars: Sequence[Bar], unit: str, show: Callable[[float], str]
) -> Picture | None:
    """Horizontal bars from zero with their values, in the order given."""
    if not bars:
        return None

    def paint(axes: Axes) -> None:
        largest = max(value for _, value, _ in bars)
        for row, (_, value, colour) in enumerate(bars):
            axes.barh(row, value, color=colour, height=0.7)
            axes.text(value + largest * 0.015, row, show(value), color=INK, va="center")
        axes.set(xlim=(0, largest * 1.15), xlabel=unit, yticks=range(len(bars)))
        axes.set_yticklabels([label for label, _, _ in bars])
        axes.invert_yaxis()

    description = f"{what}, {unit}: " + ", ".join(f"{label} {show(value)}" for label, value, _ in bars)
    return _picture(name, section, description, 0.6 + 0.27 * len(bars), paint)


def _quality_intervals(summary: Summary) -> Picture | None:
    """The interval of each scorer's nDCG@10 difference from the unmodified model."""
    quality = summary.get("quality", {})
    rows = [
        (f"{scorer.replace('_', '-')} {precision}", values)
        for scorer in ("drop_in", "reranker")
        for precision in PRECISIONS
        if "ndcg10_diff_low" in (values := lookup(quality, f"{scorer}.{precision}") or {})
    ]
    if not rows:
        return None
    baseline = quality.get("baseline_ndcg10")
    ends = [(values["ndcg10_diff_low"], values["ndcg10_diff_high"]) for _, values in rows]
    # Without a spread the axis would be drawn on the scale of rounding errors.
    reach = 1.2 * max(0.002, *(abs(end) for pair in ends for end in pair))

    def paint(axes: Axes) -> None:
        for row, ((_, values), pair) in enumerate(zip(rows, ends, strict=True)):
            axes.plot(pair, [row, row], color=OURS, linewidth=3)
            if baseline is not None:
                axes.plot(values["ndcg10"] - baseline, row, marker="o", color=OURS, markersize=6)
        axes.axvline(0, color=MUTED, linewidth=1)
        axes.set(xlim=(-reach, reach), xlabel="nDCG@10 less the unmodified model's")
        axes.set(ylim=(len(rows) - 0.5, -0.5), yticks=range(len(rows)), yticklabels=[label for label, _ in rows])
        axes.locator_params(axis="x", nbins=5)

    description = "95 % interval of the nDCG@10 difference from the unmodified model: " + ", ".join(
        f"{label} {signed(low)} to {signed(high)}" for (label, _), (low, high) in zip(rows, ends, strict=True)
    )
    return _picture("quality-intervals", "quality", description, 0.75 + 0.3 * len(rows), paint)


def _picture(name: str, section: str, description: str, height: float, paint: Callable[[Axes], None]) -> Picture:
    """Draw what ``paint`` puts on one pair of axes, ``height`` inches high."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    name = re.sub(r"[^a-z0-9]+", "-", name.lower())
    with rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        paint(figure.add_subplot())
        content = _svg_content(figure, name)
    view = (
        f'viewBox="0 0 {72 * _WIDTH:g} {72 * height:g}" role="img" aria-label="{escape(description)}" '
        'stroke-linejoin="round" stroke-linecap="butt"'
    )
    inline = f"<svg {view}>{content}</svg>"
    size = f'width="{96 * _WIDTH:g}" height="{96 * height:g}"'  # without one an img in a flexible box has no width
    standalone = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} style="background: {PAPER}">{content}</svg>\n'
    for placeholder, variable in _VARIABLES.items():
        inline = inline.replace(placeholder, f"var(--{variable})")
        standalone = standalone.replace(placeholder, LIGHT[variable])
    return Picture(name, section, description, inline, standalone)


def _svg_content(figure: Figure, name: str) -> str:
    """What is inside the svg element: no metadata (it has the date), and ids that are the picture's own."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    text = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    # The style element would hold for the whole page; what it says stands on the svg element instead.
    text = re.sub(r"\s*<(metadata|defs)>.*?</\1>", "", text, count=2, flags=re.DOTALL)
    text = text.replace("xlink:href", "href")
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
