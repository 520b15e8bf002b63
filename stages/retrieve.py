"""First stage: candidates of every query and their token lengths, data/candidates/{pools.jsonl,lengths.json}."""

from __future__ import annotations

import sys

from stages._run import Stage, stage_main
from tilerank import data, models, retrieval, token_lengths


def run(stage: Stage) -> None:
    settings = stage.settings
    model = models.resolve(settings.model, stage.root)
    dataset = data.load(stage.path("data/canonical"), settings.dataset.name)
    first = retrieval.first_stage(
        dataset,
        settings.retrieval,
        settings.workload.candidates,
        drop_self_retrieval=settings.dataset.drop_self_retrieval,
    )
    lengths = token_lengths.pool_lengths(dataset, first.pools, model, settings.workload.max_length)
    with data.whole_folder(stage.out("data/candidates")) as folder:
        retrieval.write_pools(folder / "pools.jsonl", first.pools)
        token_lengths.write_lengths(folder / "lengths.json", lengths)
    empty = sum(not pool.doc_ids for pool in first.pools)
    if empty:
        print(f"{stage.name}: {empty} of {len(first.pools)} queries have no candidates and count 0", file=sys.stderr)
    if lengths.cut_queries:
        print(
            f"{stage.name}: {lengths.cut_queries} queries leave no room for a passage in {lengths.max_length} tokens "
            "and are cut",
            file=sys.stderr,
        )
    workload = token_lengths.workload_record(lengths)
    if workload:
        counts = (count for row in lengths.lengths.values() for count in row)
        edges, rows = token_lengths.histogram(counts, lengths.max_length)
        workload = {**workload, "histogram": {"edges": edges, "rows": rows}}
    record = {"workload": {settings.dataset.name: workload} if workload else {}, "quality": first.quality}
    stage.write_metrics({section: figures for section, figures in record.items() if figures})


if __name__ == "__main__":
    stage_main(run)
