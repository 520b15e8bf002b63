"""One query's passages, raw text in and scores out: the reranker beside sentence-transformers and a tuned peer, and
its host paths beside each other."""

from stages._run import Stage, stage_main


def run(stage: Stage) -> None:
    from tilerank import data, models, quality, retrieval
    from tilerank.bench import forward, rerank
    from tilerank.machine import device_for

    settings = stage.settings
    workload, machine = settings.workload, settings.machine
    dataset = data.load(stage.path("data/canonical"), settings.dataset.name)
    pools = retrieval.read_pools(stage.path("data/candidates/pools.jsonl"))
    calls = rerank.calls_of(quality.make_task(dataset, pools, machine.rerank_queries))
    model = models.resolve(settings.model, stage.root)
    device = device_for(machine.name)
    setup = rerank.RerankSetup(
        path=model.path,
        kind=model.kind,
        device=device,
        max_length=workload.max_length,
        attention=settings.kernel.variant,
        batch_size=workload.batch_size,
        host_path=settings.host_path.path,
        token_cache=stage.path("data/tokens/passages.tokens"),
    )
    reference = rerank.reference_scores(setup, calls)
    record = {}
    for precision in workload.precisions:
        limits = rerank.error_limits(setup, precision, calls, reference)
        rerankers = rerank.Rerankers.of(setup, precision)
        judged = (calls, reference, limits, machine.rerank_rounds)
        times = rerank.bench_precision(setup, precision, rerankers, *judged)
        many_rounds = 1 if device == "cuda" else min(machine.rerank_rounds, 2)
        times |= rerank.bench_many(setup, precision, rerankers, calls, many_rounds)
        times["steps"] = rerank.bench_steps(setup, precision, rerankers, *judged)
        del rerankers  # what follows measures memory
        record.setdefault("rerank", {})[precision] = {**times, "queries": len(calls)}
        if device == "cuda":
            record.setdefault("forward", {})[precision] = forward.bench_forward(setup, precision)
            record.setdefault("memory", {})[precision] = rerank.memory_record(setup, precision, calls)
    stage.write_metrics(record)


if __name__ == "__main__":
    stage_main(run, belongs_to_machine=True)
