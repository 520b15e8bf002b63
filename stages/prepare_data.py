"""Bring the data set into its canonical form: data/canonical/{corpus.jsonl,queries.jsonl,qrels.tsv}."""

from __future__ import annotations

import dataclasses
import sys

from stages._run import Stage, stage_main
from tilerank import data


def run(stage: Stage) -> None:
    summary = data.prepare(stage.settings.dataset, stage.out("data/canonical"), stage.root)
    if summary.missing_documents:
        print(
            f"{stage.name}: {summary.missing_documents} judged documents are not in the corpus; relevant ones count "
            "as not found",
            file=sys.stderr,
        )
    stage.write_metrics({"dataset": {"name": stage.settings.dataset.name, **dataclasses.asdict(summary)}})


if __name__ == "__main__":
    stage_main(run)
