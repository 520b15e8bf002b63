"""What reranking does to quality: scorers run over the first stage's candidates, and what is recorded of each.

A scorer is anything that takes one query and its passages and returns one score a passage; this module knows nothing
of models and imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tqdm import tqdm

from tilerank.errors import TilerankError
from tilerank.evaluation import Evaluation, bootstrap_difference, compare_rankings, evaluate, ordered_run
from tilerank.types import Dataset, Pool, Qrels

Scorer: TypeAlias = Callable[[str, Sequence[str]], ArrayLike]
"""(query text, passage texts) -> scores ``[passages]``, higher is better."""

Scores: TypeAlias = Mapping[str, NDArray[Any]]
"""Query id -> scores ``[candidates]``, float64, in the first stage's order."""

NDCG, MRR, RECALL = "nDCG@10", "RR@10", "R@10"


@dataclass(frozen=True, slots=True)
class Task:
    """The queries that are reranked, with their candidates and judgements, all in canonical order."""

    qrels: Qrels  # of these queries only
    query_texts: Mapping[str, str]  # query id -> text
    candidates: Mapping[str, tuple[str, ...]]  # query id -> document ids, in the first stage's order
    passages: Mapping[str, str]  # document id -> text, the whole corpus

    def evaluate(self, scores: Scores, measures: Sequence[str]) -> Evaluation:
        """Measures of the rankings that ``scores`` make; equal scores keep the first stage's order."""
        run = {query_id: ordered_run(doc_ids, scores[query_id]) for query_id, doc_ids in self.candidates.items()}
        return evaluate(self.qrels, run, measures, corpus=self.passages)


def make_task(dataset: Dataset, pools: Iterable[Pool], queries: int) -> Task:
    """The first ``queries`` queries of ``dataset`` that have judgements; one without a pool has no candidates.

    Raises `TilerankError` when no query is judged or a pool names a document that the corpus lacks.
    """
    judged = [query for query in dataset.queries if dataset.qrels.get(query.query_id)][:queries]
    if not judged:
        raise TilerankError(f"{dataset.name} has no judged query; quality needs a split with judgements")
    passages = {document.doc_id: document.contents for document in dataset.documents}
    by_query = {pool.query_id: pool.doc_ids for pool in pools}
    candidates = {query.query_id: by_query.get(query.query_id, ()) for query in judged}
    for query_id, doc_ids in candidates.items():
        for doc_id in doc_ids:
            if doc_id not in passages:
                raise TilerankError(
                    f"query {query_id}: its candidate {doc_id} is not in the corpus of {dataset.name}; "
                    "run `dvc repro retrieve` again"
                )
    return Task(
        qrels={query.query_id: dataset.qrels[query.query_id] for query in judged},
        query_texts={query.query_id: query.text for query in judged},
        candidates=candidates,
        passages=passages,
    )


def by_pairs(predict: Callable[[list[tuple[str, str]]], ArrayLike]) -> Scorer:
    """A scorer from a function of (query, passage) pairs, such as `tilerank.Reranker.predict`."""
    return lambda query, passages: predict([(query, passage) for passage in passages])


def score_task(task: Task, scorer: Scorer, name: str) -> dict[str, NDArray[Any]]:
    """Score every candidate of every query, with a progress bar called ``name``.

    Raises `TilerankError` for a score that is not a finite number.
    """
    scores = {}
    for query_id, doc_ids in tqdm(task.candidates.items(), desc=name, unit="query", disable=None):
        passages = [task.passages[doc_id] for doc_id in doc_ids]
        values = scorer(task.query_texts[query_id], passages) if passages else []
        scores[query_id] = _checked(values, doc_ids, query_id, name)
    return scores


def score_pairs(
    task: Task, predict: Callable[[list[tuple[str, str]]], ArrayLike], name: str
) -> dict[str, NDArray[Any]]:
    """`score_task` by a function of (query, passage) pairs, such as `tilerank.Reranker.predict`, called once."""
    pairs = [
        (task.query_texts[query_id], task.passages[doc_id])
        for query_id, doc_ids in task.candidates.items()
        for doc_id in doc_ids
    ]
    values = np.asarray(predict(pairs))
    ends = np.cumsum([len(doc_ids) for doc_ids in task.candidates.values()])[:-1]
    parts = zip(task.candidates.items(), np.split(values, ends), strict=True)
    return {query_id: _checked(part, doc_ids, query_id, name) for (query_id, doc_ids), part in parts}


def score_by_all(
    task: Task,
    prepare: Callable[[str, Sequence[str]], Any],
    scorers: Mapping[str, Callable[[Any], ArrayLike]],
    name: str,
) -> dict[str, dict[str, NDArray[Any]]]:
    """`score_task` by several scorers of what ``prepare`` makes of a query and its passages, once for all of them."""
    scores: dict[str, dict[str, NDArray[Any]]] = {scorer: {} for scorer in scorers}
    for query_id, doc_ids in tqdm(task.candidates.items(), desc=name, unit="query", disable=None):
        passages = [task.passages[doc_id] for doc_id in doc_ids]
        prepared = prepare(task.query_texts[query_id], passages) if passages else None
        for scorer, score in scorers.items():
            values = score(prepared) if passages else []
            scores[scorer][query_id] = _checked(values, doc_ids, query_id, f"{name} {scorer}")
    return scores


def _checked(values: ArrayLike, doc_ids: Sequence[str], query_id: str, name: str) -> NDArray[Any]:
    scores = np.asarray(values, dtype=np.float64)
    for doc_id, value in zip(doc_ids, scores, strict=True):
        if not np.isfinite(value):
            raise TilerankError(
                f"{name}: the score of document {doc_id} for query {query_id} is {value}; a ranking needs finite "
                "scores (try precision fp32, and check the model's weights)"
            )
    return scores


def quality_record(task: Task, baseline: Scores, other: Scores) -> dict[str, float | int]:
    """The keys of ``quality.<scorer>.<precision>`` in the summary contract, and ``recall10``.

    ``ndcg10_diff_*`` is the 95 % interval of other - baseline, paired over queries.
    """
    ranked, reference = (task.evaluate(scores, (NDCG, MRR, RECALL)) for scores in (other, baseline))
    low, high = bootstrap_difference(ranked.per_query[NDCG], reference.per_query[NDCG])
    agreement = compare_rankings(baseline, other)
    return {
        "ndcg10": ranked[NDCG],
        "mrr10": ranked[MRR],
        "recall10": ranked[RECALL],
        "ndcg10_diff_low": low,
        "ndcg10_diff_high": high,
        "top10_exact": agreement.top10_exact,
        "top10_ties": agreement.top10_ties,
        "queries": ranked.queries,
        "max_abs_logit_diff": agreement.max_abs_logit_diff,
        "kendall_tau": agreement.kendall_tau,
    }


def baseline_record(task: Task, baseline: Scores) -> dict[str, float | int]:
    """The unmodified model's measures, and what bounds every reranker of these candidates.

    ``candidates_recall`` is the share of relevant documents among the candidates. Of the ``queries`` that the means
    run over, ``queries_with_results`` had anything to rerank; ``missing_documents`` judged documents are not in the
    corpus.
    """
    depth = max(1, *(len(doc_ids) for doc_ids in task.candidates.values()))
    result = task.evaluate(baseline, (NDCG, MRR, RECALL, f"R@{depth}"))
    return {
        "baseline_ndcg10": result[NDCG],
        "baseline_mrr10": result[MRR],
        "baseline_recall10": result[RECALL],
        "queries": result.queries,
        "candidates_recall": result[f"R@{depth}"],
        "queries_with_results": result.with_results,
        "missing_documents": result.missing_documents,
    }


def write_scores(path: Path, task: Task, scores: Scores) -> None:
    """Write one JSON line a query: ``query_id``, ``doc_ids`` in the first stage's order and their ``scores``."""
    with path.open("w", encoding="utf-8") as lines:
        for query_id, doc_ids in task.candidates.items():
            line = {"query_id": query_id, "doc_ids": list(doc_ids), "scores": scores[query_id].tolist()}
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")
