"""transformers with only its attention swapped: the gain beside Amdahl's prediction, and what it does to quality, over
the first stage's pools and over the stub's.

On a machine without a GPU the attention is the reference: its scores are checked, nothing is timed or ranked.
"""

from stages._run import Stage, stage_main


def run(stage: Stage) -> None:
    from tilerank import data, models, quality, retrieval
    from tilerank.bench import drop_in, rerank
    from tilerank.machine import device_for

    settings = stage.settings
    workload, machine = settings.workload, settings.machine
    dataset = data.load(stage.path("data/canonical"), settings.dataset.name)
    pools = retrieval.read_pools(stage.path("data/candidates/pools.jsonl"))
    calls = rerank.calls_of(quality.make_task(dataset, pools, machine.rerank_queries))
    model = models.resolve(settings.model, stage.root)
    setup = rerank.RerankSetup(
        path=model.path,
        kind=model.kind,
        device=device_for(machine.name),
        max_length=workload.max_length,
        attention=settings.kernel.variant,
        batch_size=workload.batch_size,
    )
    if reason := drop_in.refusal(setup):
        records = {precision: {"timed": False, "failure": reason} for precision in workload.precisions}
        _report_failures(records)
        stage.write_metrics({"drop_in": records})
        return
    if setup.device == "cpu":
        records = {precision: drop_in.check_drop_in(setup, precision, calls[0]) for precision in workload.precisions}
        _report_failures(records)
        stage.write_metrics({"drop_in": records})
        return

    reference = rerank.reference_scores(setup, calls)
    records = {
        precision: drop_in.time_drop_in(setup, precision, calls, reference, machine.rerank_rounds)
        for precision in workload.precisions
    }
    _report_failures(records)
    stub = retrieval.stub_pools(
        dataset,
        settings.retrieval,
        workload.candidates,
        drop_self_retrieval=settings.dataset.drop_self_retrieval,
    )
    tasks = {
        name: quality.make_task(dataset, each, workload.queries)
        for name, each in (("drop_in", pools), ("drop_in_stub", stub))
    }
    ranked = drop_in.rank_tasks(setup, workload.precisions, tasks)
    stage.write_metrics({"drop_in": records, "quality": ranked})


def _report_failures(records: dict) -> None:
    for precision, record in records.items():
        if "failure" in record:
            print(f"integrate_hf: {precision}: FAIL ({record['failure']})")


if __name__ == "__main__":
    stage_main(run, belongs_to_machine=True)
