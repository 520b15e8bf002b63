"""Quality of the reranked lists: against the judgements, and against the unmodified model on the same candidates."""

from stages._run import Stage, stage_main


def run(stage: Stage) -> None:
    from tilerank import data, models, quality, retrieval
    from tilerank.bench.peers import HuggingFaceScorer
    from tilerank.machine import device_for
    from tilerank.reranker import Reranker

    settings = stage.settings
    workload = settings.workload
    dataset = data.load(stage.path("data/canonical"), settings.dataset.name)
    pools = retrieval.read_pools(stage.path("data/candidates/pools.jsonl"))
    task = quality.make_task(dataset, pools, workload.queries)
    model = models.resolve(settings.model, stage.root)
    device = device_for(settings.machine.name)

    unmodified = HuggingFaceScorer(model.path, model.kind, "fp32", device, workload.max_length, workload.batch_size)
    rerankers = {
        precision: Reranker(
            model.path,
            device=device,
            precision=precision,
            attention=settings.kernel.variant,
            max_length=workload.max_length,
            host_path=settings.host_path.path,
        )
        for precision in workload.precisions
    }
    records = {}
    with data.whole_folder(stage.out("data/scores")) as folder:
        baseline = quality.score_task(task, unmodified.score, "unmodified fp32")
        quality.write_scores(folder / "baseline_fp32.jsonl", task, baseline)
        for precision, reranker in rerankers.items():
            scores = quality.score_pairs(task, _logits(reranker), f"reranker {precision}")
            quality.write_scores(folder / f"reranker_{precision}.jsonl", task, scores)
            records[precision] = quality.quality_record(task, baseline, scores)
    stage.write_metrics({"quality": {**quality.baseline_record(task, baseline), "reranker": records}})


def _logits(reranker):
    return lambda pairs: reranker.score(pairs, show_progress_bar=True).logits


if __name__ == "__main__":
    stage_main(run, belongs_to_machine=True)
