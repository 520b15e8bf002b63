"""Side stage: fine-tune the packaged encoder into a cross-encoder, models/<name>/ (not part of `dvc repro`)."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from stages._run import Stage, stage_main
from tilerank.errors import TilerankError

if TYPE_CHECKING:
    from tilerank.types import Dataset

ENCODER = "all-minilm-l6"


def run(stage: Stage) -> None:
    import torch

    from tilerank import data, finetune, models, retrieval
    from tilerank.config import ModelSettings
    from tilerank.machine import device_for

    settings, options = stage.settings, stage.options
    device = device_for(settings.machine.name)
    if options.steps is None and device == "cpu":
        raise TilerankError(
            "a CPU is too slow for the whole recipe; say how many steps to make (--steps N, or STEPS=N with make), "
            "or run where there is a CUDA device (machine=auto)"
        )
    if settings.dataset.source == "pydocs":
        raise TilerankError("pydocs has no training split; take dataset=scifact or another BEIR data set with one")
    recipe = finetune.Recipe(seed=options.seed)
    if device == "cpu":  # a step of 256 pairs would take minutes
        recipe = dataclasses.replace(recipe, groups=1)
    name = options.name or f"minilm-l6-{settings.dataset.name}" + (f"-{options.steps}-steps" if options.steps else "")
    if Path(name).name != name:
        raise TilerankError(f"--name is {name!r}; it names a folder under models/, without a path")
    encoder = models.resolve(ModelSettings(ENCODER, None, None), stage.root)
    dataset = _load(stage, "train")
    pools = retrieval.bm25_pools(dataset, settings.retrieval, recipe.pool)

    def make(folder: Path) -> str:
        model = finetune.train(encoder.path, dataset, pools, recipe, device, options.steps)
        return finetune.save(model, encoder.path, folder, recipe)

    with data.whole_folder(stage.out(f"models/{name}")) as folder:
        sha256 = make(folder)
        record = {
            "name": name,
            "sha256": sha256,
            "encoder_sha256": encoder.sha256,
            "dataset": settings.dataset.name,
            "steps": options.steps or finetune.steps_of(dataset, recipe),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            **_quality(stage, folder, device),
        }
        if options.verify:
            with tempfile.TemporaryDirectory() as second:
                record["same_bytes_again"] = make(Path(second)) == sha256
        record = finetune.write_record(folder, recipe, **record)
    if options.steps is None:
        stage.write_metrics({"finetune": record})
    print(f"{stage.name}: models/{name}, sha256 {sha256}, nDCG@10 {record['ndcg10']:.4f}", file=sys.stderr)


def _quality(stage: Stage, folder: Path, device: str) -> dict[str, float]:
    """Measures of the saved model in fp32 on the evaluated split's first ``workload.queries`` queries."""
    from tilerank import quality, retrieval
    from tilerank.reranker import Reranker

    settings = stage.settings
    dataset = _load(stage, settings.dataset.split)
    pools = retrieval.first_stage(dataset, settings.retrieval, settings.workload.candidates).pools
    task = quality.make_task(dataset, pools, settings.workload.queries)
    reranker = Reranker(folder, device=device, max_length=settings.workload.max_length)
    scores = quality.score_task(task, quality.by_pairs(lambda pairs: reranker.score(pairs).logits), "quality")
    result = task.evaluate(scores, (quality.NDCG, quality.MRR))
    return {"ndcg10": result[quality.NDCG], "mrr10": result[quality.MRR], "queries": result.queries}


def _load(stage: Stage, split: str) -> Dataset:
    """One split of the data set that the settings name, in memory; nothing of it is kept on disk."""
    from tilerank import data

    settings = stage.settings.dataset
    # The digests that settings give are those of the evaluated split; corpus and queries are the same for all.
    digests = {name: digest for name, digest in settings.sha256.items() if name != "qrels.tsv"}
    with tempfile.TemporaryDirectory() as folder:
        canonical = Path(folder) / "canonical"
        data.prepare(dataclasses.replace(settings, split=split, sha256=digests), canonical, stage.root)
        return data.load(canonical, settings.name)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=_positive, metavar="N", help="stop after N steps (needed on a CPU, where a step is one group)"
    )
    parser.add_argument("--name", help="folder under models/ (default: minilm-l6-<dataset>, and the number of steps)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling, head and dropout (default: %(default)s)")
    parser.add_argument("--verify", action="store_true", help="train a second time and record whether the bytes agree")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


if __name__ == "__main__":
    stage_main(run, belongs_to_machine=True, options=_options)
