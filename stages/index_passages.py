"""Token ids of every passage of the corpus, data/tokens/passages.tokens: what `tilerank index` writes."""

from __future__ import annotations

from dataclasses import asdict

from stages._run import Stage, stage_main
from tilerank import data, models, tokenization
from tilerank.token_cache import write_tokens


def run(stage: Stage) -> None:
    settings = stage.settings
    model = models.resolve(settings.model, stage.root)
    dataset = data.load(stage.path("data/canonical"), settings.dataset.name)
    tokenizer = tokenization.load_tokenizer(model.path, settings.workload.max_length)
    passages = [document.contents for document in dataset.documents]
    report = write_tokens(stage.out("data/tokens/passages.tokens"), tokenizer.digest, tokenizer.encode, passages)
    stage.write_metrics({"index": {**asdict(report), "tokenizer": tokenizer.digest, "engine": tokenizer.engine}})


if __name__ == "__main__":
    stage_main(run)
