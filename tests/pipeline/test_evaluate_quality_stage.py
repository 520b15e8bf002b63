"""The stage `evaluate_quality`, with real models on a corpus of a few sentences."""

import argparse
import json
from dataclasses import replace

import pytest

from stages._run import Stage
from stages.evaluate_quality import run
from tilerank import retrieval
from tilerank.config import load_settings
from tilerank.errors import TilerankError
from tilerank.types import Pool

DOCUMENTS = {
    "cats": "Cats are small animals that hunt mice.",
    "stars": "A star is a ball of plasma held together by gravity.",
    "bread": "Bread is baked from flour, water and yeast.",
    "rain": "Rain falls when drops of water in a cloud become heavy.",
}
QUERIES = {
    "q1": "What do cats hunt?",
    "q2": "How is bread made?",
    "q3": "Why does it rain?",
    "q4": "not judged in time",
}
JUDGED = {"q1": "cats", "q2": "bread", "q3": "rain"}


class Tracker:
    def log_metrics(self, record):
        pass


@pytest.fixture
def tree(tmp_path):
    """Canonical files and pools as the earlier stages write them; q3 has no candidates."""
    canonical, candidates = tmp_path / "data" / "canonical", tmp_path / "data" / "candidates"
    canonical.mkdir(parents=True)
    candidates.mkdir()

    def write(name, lines):
        (canonical / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    write("corpus.jsonl", (json.dumps({"_id": key, "title": "", "text": text}) for key, text in DOCUMENTS.items()))
    write("queries.jsonl", (json.dumps({"_id": key, "text": text}) for key, text in QUERIES.items()))
    write("qrels.tsv", ["query-id\tcorpus-id\tscore", *(f"{query}\t{doc}\t1" for query, doc in JUDGED.items())])
    pools = [Pool(query, tuple(DOCUMENTS), (4.0, 3.0, 2.0, 1.0)) for query in ("q1", "q2")]
    retrieval.write_pools(candidates / "pools.jsonl", [*pools, Pool("q3", (), ())])
    return tmp_path


def make_stage(repository, tree, model, precisions=("fp32",), queries=20):
    settings = load_settings(repository / "params.yaml")
    settings = replace(
        settings,
        model=replace(settings.model, name=model, sha256=None),
        kernel=replace(settings.kernel, variant="sdpa"),
        workload=replace(settings.workload, queries=queries, max_length=64, precisions=precisions),
        machine=replace(settings.machine, name="cpu"),
    )
    return Stage("evaluate_quality", settings, tree, tree, argparse.Namespace(), {"commit": "abc"}, Tracker())


@pytest.mark.parametrize("fixture", ["bi_encoder_dir", "cross_encoder_dir"])
def test_reranker_ranks_as_the_unmodified_model_does(request, repository, tree, fixture):
    folder = request.getfixturevalue(fixture)
    name = "all-minilm-l6" if fixture == "bi_encoder_dir" else folder.name
    run(make_stage(repository, tree, name))
    record = json.loads((tree / "metrics/cpu/evaluate_quality.json").read_text(encoding="utf-8"))
    quality = record["quality"]
    assert record["provenance"] == {"commit": "abc"}
    assert (quality["queries"], quality["queries_with_results"], quality["missing_documents"]) == (3, 2, 0)
    assert quality["candidates_recall"] == pytest.approx(2 / 3)
    ours = quality["reranker"]["fp32"]
    assert (ours["queries"], ours["top10_exact"], ours["ndcg10"]) == (3, 1.0, quality["baseline_ndcg10"])
    # Logits are compared, not what an activation makes of them: float noise of sums in another order.
    assert 0 <= ours["max_abs_logit_diff"] < 2e-5
    if fixture == "bi_encoder_dir":  # any sentence encoder finds these: a wrong text order would not
        assert quality["baseline_ndcg10"] == pytest.approx(2 / 3)
    scores = [json.loads(line) for line in (tree / "data/scores/reranker_fp32.jsonl").read_text().splitlines()]
    assert [line["query_id"] for line in scores] == ["q1", "q2", "q3"]
    assert scores[0]["doc_ids"] == list(DOCUMENTS)
    assert scores[2]["scores"] == []
    assert len((tree / "data/scores/baseline_fp32.jsonl").read_text().splitlines()) == 3


def test_every_precision_is_recorded_beside_the_fp32_baseline(repository, tree, bi_encoder_dir):
    run(make_stage(repository, tree, "all-minilm-l6", precisions=("fp32", "bf16"), queries=1))
    record = json.loads((tree / "metrics/cpu/evaluate_quality.json").read_text(encoding="utf-8"))
    reranker = record["quality"]["reranker"]
    assert set(reranker) == {"fp32", "bf16"}
    assert reranker["fp32"]["max_abs_logit_diff"] < 2e-5 < reranker["bf16"]["max_abs_logit_diff"] < 0.05
    assert reranker["bf16"]["queries"] == 1


def test_candidates_of_another_corpus_are_refused(repository, tree):
    retrieval.write_pools(tree / "data/candidates/pools.jsonl", [Pool("q1", ("elsewhere",), (1.0,))])
    with pytest.raises(TilerankError, match="candidate elsewhere is not in the corpus"):
        run(make_stage(repository, tree, "all-minilm-l6"))
    assert not (tree / "metrics").exists()
