"""The summary, the report page with its pictures, and the README's tables, from the committed records alone."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from stages._run import Stage, stage_main, write_json
from tilerank import report
from tilerank.errors import TilerankError
from tilerank.kernels import registry
from tilerank.report import block, forward_parts, host_path
from tilerank.report.roofline import roofline_table
from tilerank.report.variants import doc_tables

PAGES = (
    "README.md",
    "docs/ladder.md",
    "docs/kernels.md",
    "docs/attention.md",
    "docs/analysis.md",
    "docs/bindings.md",
    block.PAGE,
    host_path.PAGE,
    forward_parts.PAGE,
)

PICTURES = (
    *("ladder", "time-shares", "lengths-scifact", "stalls", "roofline", "predicted-times", "host-path"),
    block.PICTURE,
    forward_parts.PICTURE,
)
"""Those that README and docs show, where the records have figures for them."""

LADDER_PLOT = "ladder.csv"
"""What `dvc plots` draws."""


def run(stage: Stage) -> None:
    machine = stage.settings.machine.name
    records = report.read_records(stage.metrics_folder)
    if not records:
        raise TilerankError(f"metrics/{machine} holds no record; run `dvc repro` (or `make quickstart`) first")
    predictions = {row.name: row.prediction for row in registry.attention_rows()}
    summary = report.summarise(records)
    built = report.build_report(records, machine, predictions)

    write_json(stage.out(f"metrics/{machine}/{report.SUMMARY_FILE}"), summary)
    stage.out(f"metrics/{machine}/{LADDER_PLOT}").write_text(report.ladder_csv(records, predictions), encoding="utf-8")
    page = stage.out("reports/index.html")
    page.write_text(built.page, encoding="utf-8")
    pictures = stage.out("reports/pictures")
    shutil.rmtree(pictures, ignore_errors=True)
    pictures.mkdir()
    for picture in built.pictures:
        (pictures / f"{picture.name}.svg").write_text(picture.standalone, encoding="utf-8")
        stage.log_artifact(pictures / f"{picture.name}.svg")
    stage.log_artifact(page)
    stage.tracker.log_metrics(summary)

    if stage.output_root == stage.root:  # a what-if leaves the tree's own files alone
        _update_pages(stage, built, page_tables(records))


def page_tables(records: Sequence[report.Record]) -> dict[str, str]:
    """Marker name -> Markdown of every table in `PAGES`."""
    rows = registry.attention_rows()
    predictions = {row.name: row.prediction for row in rows}
    own = {
        "roofline": roofline_table(records, tuple(predictions)),
        host_path.TABLE: host_path.steps_table(records),
        block.CHART: block.chart_link(report.summarise(records)),
        forward_parts.TABLE: forward_parts.parts_table(records),
    }
    return report.readme_tables(records, predictions) | doc_tables(rows) | own


def _update_pages(stage: Stage, built: report.Report, tables: dict[str, str]) -> None:
    """The tables between markers and the pictures in README and docs."""
    for name in PAGES:
        page = stage.root / name
        if not page.exists():
            continue
        text = page.read_text(encoding="utf-8")
        updated = report.update_markers(text, {key: value for key, value in tables.items() if f":{key}:begin" in text})
        if updated != text:
            page.write_text(updated, encoding="utf-8")
    for picture in built.pictures:
        if picture.name in PICTURES:
            path = stage.out(f"docs/pictures/{picture.name}.svg")
            path.write_text(picture.standalone, encoding="utf-8")


if __name__ == "__main__":
    stage_main(run)
