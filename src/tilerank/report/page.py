"""The report: one HTML page that needs nothing but itself, readable on a phone, in light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tilerank.report.analysis import analyse
from tilerank.report.block import lengths_pictures
from tilerank.report.figures import DARK, LIGHT, Picture, draw_pictures
from tilerank.report.forward_parts import parts_pictures
from tilerank.report.host_path import steps_pictures
from tilerank.report.records import Record, sources
from tilerank.report.tables import (
    TABLES,
    Table,
    TableSpec,
    absent_sections,
    build_table,
    commit_text,
    headline,
    origins,
)

PROVENANCE = (
    ("commit", "commit"),
    ("device", "device"),
    ("driver", "driver"),
    ("CUDA", "cuda"),
    ("torch", "torch"),
    ("recorded", "time"),
    ("command", "command"),
)
"""Heading -> provenance key of the table of records; commit and device are put together from several."""


_LONGEST_LINE = 50  # characters of a cell


@dataclass(frozen=True, slots=True)
class Report:
    """The page, and each of its pictures as a file of its own."""

    page: str
    pictures: tuple[Picture, ...]


def build_report(records: Sequence[Record], machine: str, predictions: Mapping[str, str] | None = None) -> Report:
    """Build the page from the records of ``machine``: the same records give the same bytes.

    predictions: variant -> what was expected of it, in ladder order.
    """
    predictions = predictions or {}
    summary = analyse(records, predictions)
    pictures = (
        *draw_pictures(summary, predictions),
        *lengths_pictures(summary),
        *steps_pictures(summary),
        *parts_pictures(summary),
    )
    sections = []
    for spec in TABLES:
        table = build_table(spec, summary, tuple(predictions))
        if table is None:
            continue
        shown = [picture for picture in pictures if picture.section == spec.name]
        sections.append(_section(table, shown, sources(records, spec.section)))
    absent = absent_sections(summary)
    body = [
        f"<h1>tilerank on <code>{escape(machine)}</code></h1>",
        '<p class="lead">Every figure on this page is read from a committed record; the last table says which, and '
        "where it was measured.</p>",
        _headline(headline(summary)),
        *sections,
        _absent(absent),
        _records(records),
    ]
    title = f"tilerank on {escape(machine)}"
    html = _PAGE.format(title=title, light=_variables(LIGHT), dark=_variables(DARK), body="\n".join(filter(None, body)))
    return Report(html, pictures)


def _headline(rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return "<p>No figures are recorded on this machine yet.</p>"
    tiles = "\n".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in rows)
    return f'<dl class="tiles">\n{tiles}\n</dl>'


def _section(table: Table, pictures: Sequence[Picture], records: Sequence[Record]) -> str:
    parts = [f'<section id="{table.name}">', f"<h2>{escape(table.title)}</h2>"]
    parts += [f'<figure id="picture-{picture.name}">\n{picture.inline}\n</figure>' for picture in pictures]
    parts.append(_html_table(table.headings, table.rows))
    if table.note:
        parts.append(f"<p>{escape(table.note)}</p>")
    lines = "<br>".join(f"{escape(names)}: {escape(line)}" for names, line in origins(records))
    parts += [f'<p class="origin">{lines}</p>', "</section>"]
    return "\n".join(parts)


def _html_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(map(_cell, row[1:])) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _cell(text: str) -> str:
    """One figure or name; a sentence may take several lines."""
    kind = ' class="long"' if len(text) > _LONGEST_LINE else ""
    return f"<td{kind}>{escape(text)}</td>"


def _absent(specs: Sequence[TableSpec]) -> str:
    if not specs:
        return ""
    items = "\n".join(f"<li>{escape(spec.title)} (stage <code>{escape(spec.stage)}</code>)</li>" for spec in specs)
    return f'<section id="absent">\n<h2>Not in this record</h2>\n<ul>\n{items}\n</ul>\n</section>'


def _records(records: Sequence[Record]) -> str:
    rows = [(record.name, *(_provenance_cell(record, key) for _, key in PROVENANCE)) for record in records]
    headings = ("record", *(heading for heading, _ in PROVENANCE))
    return f'<section id="records">\n<h2>Records</h2>\n{_html_table(headings, rows)}\n</section>'


def _provenance_cell(record: Record, key: str) -> str:
    values = record.provenance
    if not values:
        return "not recorded" if key == "commit" else ""
    if key == "commit":
        return commit_text(values)
    if key == "device":
        cores = f", {values['cores']} cores" if "cores" in values and "gpu" not in values else ""
        return str(values.get("gpu") or values.get("cpu", "")) + cores
    return str(values.get(key, ""))


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; {light} }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}
body {{ margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.6rem; line-height: 1.2; }}
h2 {{ font-size: 1.2rem; margin: 2.5rem 0 0.5rem; }}
.lead, .origin, dt, section > p {{ color: var(--muted); }}
.origin, section > p {{ font-size: 0.85rem; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: 0.75rem; }}
.tiles div {{ display: flex; flex-direction: column; justify-content: space-between; padding: 0.75rem;
  background: var(--panel); border: 1px solid var(--line); border-radius: 0.5rem; }}
dt {{ font-size: 0.8rem; line-height: 1.3; }}
dd {{ margin: 0.25rem 0 0; font-size: 1.4rem; font-weight: 600; }}
figure {{ margin: 0.5rem 0 1rem; max-width: 40rem; }}
svg {{ display: block; width: 100%; height: auto; }}
svg text {{ font-family: system-ui, sans-serif !important; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.35rem 0.75rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }}
thead th {{ color: var(--muted); font-weight: 500; vertical-align: bottom; }}
td {{ white-space: nowrap; }}
td.long {{ white-space: normal; min-width: 12rem; }}
th:first-child {{ text-align: left; padding-left: 0; position: sticky; left: 0; background: var(--paper); }}
#records td {{ text-align: left; white-space: nowrap; }}
#records thead th {{ text-align: left; }}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
