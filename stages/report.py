"""The summary, the report page with its pictures, and the README's tables, from the committed records alone."""

from __future__ import annotations

import shutil

from stages._run import Stage, stage_main, write_json
from tilerank import report
from tilerank.errors import TilerankError
from tilerank.kernels import registry


def run(stage: Stage) -> None:
    machine = stage.settings.machine.name
    records = report.read_records(stage.metrics_folder)
    if not records:
        raise TilerankError(f"metrics/{machine} holds no record; run `dvc repro` (or `make quickstart`) first")
    captions = {row.name: f"Expected: {row.prediction}" for row in registry.attention_rows()}
    summary = report.summarise(records)
    built = report.build_report(records, machine, captions)

    write_json(stage.out(f"metrics/{machine}/{report.SUMMARY_FILE}"), summary)
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

    readme = stage.root / "README.md"
    if stage.output_root == stage.root and readme.exists():  # a what-if leaves the tree's own files alone
        text = readme.read_text(encoding="utf-8")
        updated = report.update_markers(text, report.readme_tables(records, tuple(captions)))
        if updated != text:
            readme.write_text(updated, encoding="utf-8")


if __name__ == "__main__":
    stage_main(run)
