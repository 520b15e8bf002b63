"""Scorers over candidates and the quality record made from their scores."""

import json
import math

import numpy as np
import pytest

from tilerank.errors import TilerankError
from tilerank.quality import (
    baseline_record,
    by_pairs,
    make_task,
    quality_record,
    score_by_all,
    score_pairs,
    score_task,
    write_scores,
)
from tilerank.types import Dataset, Document, Pool, Query

DATASET = Dataset(
    name="toy",
    documents=tuple(Document(doc_id, f"title {doc_id}", f"text {doc_id}") for doc_id in "abcdef"),
    queries=(Query("q0", "unjudged"), Query("q1", "first"), Query("q2", "second"), Query("q3", "third")),
    qrels={"q1": {"a": 2, "b": 1}, "q2": {"gone": 1}, "q3": {"e": 1, "f": 1}},
)
POOLS = (
    Pool("q0", ("a",), (1.0,)),
    Pool("q1", ("c", "a", "b"), (3.0, 2.0, 1.0)),
    Pool("q3", ("f", "e", "d"), (3.0, 2.0, 1.0)),
)


def test_task_takes_the_first_judged_queries_in_canonical_order():
    task = make_task(DATASET, POOLS, 2)
    assert task.query_texts == {"q1": "first", "q2": "second"}
    assert task.candidates == {"q1": ("c", "a", "b"), "q2": ()}
    assert task.qrels == {"q1": {"a": 2, "b": 1}, "q2": {"gone": 1}}
    assert task.passages["a"] == "title a text a"


def test_more_queries_than_there_are_takes_all_judged_ones():
    assert list(make_task(DATASET, POOLS, 300).candidates) == ["q1", "q2", "q3"]


def test_dataset_without_judgements_is_refused():
    bare = Dataset("bare", DATASET.documents, DATASET.queries, {})
    with pytest.raises(TilerankError, match="bare has no judged query"):
        make_task(bare, POOLS, 5)


def test_candidate_outside_the_corpus_is_refused_by_name():
    with pytest.raises(TilerankError, match="query q1: its candidate zz is not in the corpus of toy"):
        make_task(DATASET, (Pool("q1", ("zz",), (1.0,)),), 5)


def test_scorer_gets_query_and_passages_and_is_not_called_for_an_empty_pool():
    calls = []

    def predict(pairs):
        calls.append(pairs)
        return [float(len(calls))] * len(pairs)

    scores = score_task(make_task(DATASET, POOLS, 3), by_pairs(predict), "toy")
    assert calls == [
        [("first", "title c text c"), ("first", "title a text a"), ("first", "title b text b")],
        [("third", "title f text f"), ("third", "title e text e"), ("third", "title d text d")],
    ]
    assert {query_id: values.tolist() for query_id, values in scores.items()} == {
        "q1": [1.0] * 3,
        "q2": [],
        "q3": [2.0] * 3,
    }


def test_all_pairs_at_once_are_scored_as_one_query_after_another():
    def predict(pairs):
        return [float(len(query) * 10 + ord(passage[6])) for query, passage in pairs]

    task = make_task(DATASET, POOLS, 3)
    expected = score_task(task, by_pairs(predict), "toy")
    found = score_pairs(task, predict, "toy")
    assert list(found) == list(expected)
    for query_id, values in expected.items():
        np.testing.assert_array_equal(found[query_id], values)
    with pytest.raises(TilerankError, match="toy: the score of document a for query q1 is nan"):
        score_pairs(task, lambda pairs: [math.nan if "text a" in passage else 0.0 for _, passage in pairs], "toy")
    with pytest.raises(ValueError, match="shorter"):
        score_pairs(task, lambda pairs: [0.0] * (len(pairs) - 1), "toy")


def test_scorers_share_what_is_prepared():
    prepared = []

    def prepare(query, passages):
        prepared.append(query)
        return [float(len(query)), *range(1, len(passages))]

    task = make_task(DATASET, POOLS, 3)
    found = score_by_all(task, prepare, {"plain": list, "doubled": lambda each: [2 * x for x in each]}, "toy")
    assert prepared == ["first", "third"]
    assert {name: scores["q1"].tolist() for name, scores in found.items()} == {
        "plain": [5.0, 1.0, 2.0],
        "doubled": [10.0, 2.0, 4.0],
    }
    assert all(scores["q2"].shape == (0,) for scores in found.values())
    with pytest.raises(TilerankError, match="toy wrong: the score of document"):
        score_by_all(task, prepare, {"wrong": lambda each: [math.inf] * len(each)}, "toy")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_score_that_cannot_be_ranked_is_refused_and_located(bad):
    with pytest.raises(TilerankError, match="toy: the score of document a for query q1 is"):
        score_task(make_task(DATASET, POOLS, 3), lambda query, passages: [0.0, bad, 0.0], "toy")


def test_scorer_that_loses_a_passage_is_an_error():
    with pytest.raises(ValueError, match="shorter"):
        score_task(make_task(DATASET, POOLS, 3), lambda query, passages: [0.0] * (len(passages) - 1), "toy")


def test_records_have_the_contract_keys_and_the_values_worked_out():
    task = make_task(DATASET, POOLS, 3)
    # Baseline: q1 c, a, b and q3 f, e, d. Better: q1 a, b, c; q3 the same.
    baseline = score_task(task, lambda query, passages: [0.9, 0.5, 0.1], "baseline")
    better = score_task(
        task, lambda query, passages: [0.2, 0.6, 0.4] if query == "first" else [0.9, 0.5, 0.1], "better"
    )
    # q1 baseline: gains 0, 2, 1: (2 x 0.630930 + 0.5) / (2 + 0.630930) = 0.669672; q2 0; q3 ideal.
    assert baseline_record(task, baseline) == {
        "baseline_ndcg10": pytest.approx((0.669672 + 1) / 3, abs=1e-6),
        "baseline_mrr10": pytest.approx((0.5 + 1) / 3),
        "baseline_recall10": pytest.approx(2 / 3),
        "queries": 3,
        "candidates_recall": pytest.approx(2 / 3),
        "queries_with_results": 2,
        "missing_documents": 1,
    }
    record = quality_record(task, baseline, better)
    assert (
        record.pop("ndcg10_diff_low") == 0.0
    )  # of three queries one gained: most resamples are between 0 and its gain
    assert record.pop("ndcg10_diff_high") == pytest.approx(1 - 0.669672, abs=1e-6)
    # q1 has c last instead of first: two of its three pairs are turned round, tau -1/3; q2 and q3 1.
    assert record == {
        "ndcg10": pytest.approx(2 / 3),
        "mrr10": pytest.approx(2 / 3),
        "recall10": pytest.approx(2 / 3),
        "top10_exact": pytest.approx(2 / 3),
        "top10_ties": 0,
        "queries": 3,
        "max_abs_logit_diff": pytest.approx(0.7),
        "kendall_tau": pytest.approx((-1 / 3 + 1 + 1) / 3),
    }


def test_recall_of_the_candidates_counts_the_whole_pool():
    documents = tuple(Document(f"d{number}", "", "text") for number in range(20))
    dataset = Dataset("deep", documents, (Query("q", "query"),), {"q": {"d19": 1}})
    pool = Pool("q", tuple(document.doc_id for document in documents), tuple(20.0 - n for n in range(20)))
    task = make_task(dataset, (pool,), 1)
    record = baseline_record(task, score_task(task, lambda query, passages: list(range(20, 0, -1)), "falling"))
    assert (record["candidates_recall"], record["baseline_recall10"]) == (1.0, 0.0)


def test_written_scores_read_back_exactly(tmp_path):
    task = make_task(DATASET, POOLS, 3)
    scores = score_task(task, lambda query, passages: [0.1, 1 / 3, -2.5e-8], "toy")
    write_scores(tmp_path / "scores.jsonl", task, scores)
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines == [
        {"query_id": "q1", "doc_ids": ["c", "a", "b"], "scores": [0.1, 1 / 3, -2.5e-8]},
        {"query_id": "q2", "doc_ids": [], "scores": []},
        {"query_id": "q3", "doc_ids": ["f", "e", "d"], "scores": [0.1, 1 / 3, -2.5e-8]},
    ]
