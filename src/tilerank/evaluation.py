"""Ranking measures, and how far two rankings of the same candidates agree.

The measures have trec_eval's definitions and the names that ir_measures gives them (the tests hold every value
against that library). They are computed here because they must hold for any input: trec_eval's code stops the whole
process on a cutoff of 0, reads scores as 32-bit floats and breaks ties by document id.

Conventions:

- Means run over the queries of the judgements. A query without results counts 0; `Evaluation.with_results` says how
  many had any. Queries that nobody judged are ignored.
- Ties keep the order in which the run lists the documents, which is the first stage's order for runs made by
  `ordered_run`. Document ids are only ever compared for equality, so renaming documents changes no measure, and a
  document whose id equals the query's is a document like any other.
- Judged documents that the corpus lacks stay in the judgements: a relevant one counts as relevant and not found.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tilerank.types import Qrels, Run

_ALIASES = {"NDCG": "nDCG", "MRR": "RR", "MAP": "AP", "Recall": "R", "Precision": "P"}
_NEEDS_CUTOFF = ("R", "P", "Success")
_MEASURE_NAME = re.compile(r"(?P<family>[A-Za-z]+)(?:\(rel=(?P<rel>[0-9]+)\))?(?:@(?P<cutoff>[0-9]+))?")


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation(Mapping[str, float]):
    """Mean of each measure, as a mapping from the names asked for, with what the means hide."""

    means: Mapping[str, float]
    per_query: Mapping[str, Mapping[str, float]]
    """Measure -> query id -> value, for every judged query, in the judgements' order."""
    queries: int
    """Judged queries: what the means run over."""
    with_results: int
    """Judged queries for which the run has at least one document."""
    missing_documents: int
    """Distinct judged documents that are not in the corpus (0 when no corpus was given)."""

    def __getitem__(self, measure: str) -> float:
        return self.means[measure]

    def __iter__(self) -> Iterator[str]:
        return iter(self.means)

    def __len__(self) -> int:
        return len(self.means)


@dataclass(frozen=True, slots=True)
class RankingAgreement:
    """How far a scorer's rankings agree with the baseline's over the same candidates."""

    top10_exact: float
    """Share of queries whose ordered top ten equals the baseline's. Neighbours in the baseline's ranking whose
    baseline scores differ by less than twice the largest score difference may have changed places."""
    top10_ties: int
    """Queries counted as exact only because such neighbours may change places."""
    max_abs_logit_diff: float
    """Largest absolute difference between the two scores of one candidate, over all queries."""
    kendall_tau: float
    """Mean of `kendall_tau` over the queries."""
    queries: int


def evaluate(qrels: Qrels, run: Run, measures: Sequence[str], *, corpus: Collection[str] | None = None) -> Evaluation:
    """Evaluate a run.

    qrels: query id -> document id -> grade; from 1 on a document is relevant, 0 and below it is not.
    run: query id -> document id -> score, higher first; equal scores keep the order of the mapping.
    measures: ``nDCG``, ``AP``, ``RR`` (each with or without a cutoff), ``R@k``, ``P@k``, ``Success@k``; the grade from
    which a document is relevant can be raised, as in ``AP(rel=2)`` or ``P(rel=2)@5``. nDCG takes the grade as gain.
    corpus: ids of the documents that exist, to count judged documents that are missing.

    Raises ValueError for an unknown measure, a NaN score or judgements without queries, and TypeError for anything
    but mappings of mappings, ids that are not strings, grades that are not integers, scores that are no numbers, a
    measure that is no name, or one name in place of a list of measures or of the corpus.
    """
    if isinstance(measures, str):
        raise TypeError(f"measures must be a list of names, got the string {measures!r}; pass [{measures!r}]")
    if isinstance(corpus, str):
        raise TypeError(f"corpus must be a collection of document ids, got the string {corpus!r:.80}")
    functions = {name: _parse_measure(name) for name in measures}
    _check_ids("qrels", qrels)
    _check_ids("run", run)
    if not qrels:
        raise ValueError("qrels has no queries: nothing to take a mean over")

    # All of the run is ranked, so that a NaN is found also under a query that nobody judged.
    rankings = {
        query_id: _best_first(list(results.values()), f"run[{query_id!r}]") for query_id, results in run.items()
    }
    per_query: dict[str, dict[str, float]] = {name: {} for name in functions}
    for query_id, judged in qrels.items():
        ranking = rankings.get(query_id, [])
        doc_ids = list(run.get(query_id, {}))
        grades = [_grade(grade, query_id, doc_id) for doc_id, grade in judged.items()]
        gains = [max(judged.get(doc_ids[index], 0), 0) for index in ranking]
        ideal = sorted((max(grade, 0) for grade in grades), reverse=True)
        for name, function in functions.items():
            per_query[name][query_id] = function(gains, ideal)
    judged_documents = {doc_id for judged in qrels.values() for doc_id in judged}
    return Evaluation(
        means={name: math.fsum(values.values()) / len(qrels) for name, values in per_query.items()},
        per_query=per_query,
        queries=len(qrels),
        with_results=sum(1 for query_id in qrels if run.get(query_id)),
        missing_documents=0 if corpus is None else len(judged_documents.difference(corpus)),
    )


def ordered_run(doc_ids: Sequence[str], scores: ArrayLike) -> dict[str, float]:
    """One query's run, best first, with strictly falling scores (the number of documents down to 1).

    doc_ids: candidates in the first stage's order; scores ``[len(doc_ids)]``: the reranker's, in the same order.
    Equal scores keep the first stage's order, so no measure can break a tie in its own way.
    Raises ValueError for lengths that differ, a repeated document or a NaN score.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.shape != (len(doc_ids),):
        raise ValueError(f"scores must have shape ({len(doc_ids)},), one a document, got {values.shape}")
    if len(set(doc_ids)) != len(doc_ids):
        repeated = next(doc_id for index, doc_id in enumerate(doc_ids) if doc_id in doc_ids[:index])
        raise ValueError(f"doc_ids must be distinct, got {repeated!r} more than once")
    ranking = _best_first(values.tolist(), "scores")
    return {doc_ids[index]: float(len(doc_ids) - rank) for rank, index in enumerate(ranking)}


def compare_rankings(baseline: Mapping[str, ArrayLike], other: Mapping[str, ArrayLike]) -> RankingAgreement:
    """Compare two scorers of the same candidates.

    Each maps query id -> scores ``[candidates]`` in the first stage's order, which also breaks ties.
    Raises ValueError when queries or candidate counts differ, a score is not finite, or there is no candidate at all.
    """
    if set(baseline) != set(other):
        odd = sorted(set(baseline) ^ set(other))[0]
        raise ValueError(f"both must score the same queries; {odd!r} is in only one of them")
    pairs = {
        query_id: (_finite(scores, "baseline", query_id), _finite(other[query_id], "other", query_id))
        for query_id, scores in baseline.items()
    }
    for query_id, (ours, theirs) in pairs.items():
        if ours.shape != theirs.shape:
            raise ValueError(f"query {query_id!r}: {ours.size} baseline scores but {theirs.size} other scores")
    differences = [np.abs(ours - theirs).max() for ours, theirs in pairs.values() if ours.size]
    if not differences:
        raise ValueError("there is no candidate to compare")
    largest = float(max(differences))
    verdicts = [_top_ten_verdict(ours, theirs, 2 * largest) for ours, theirs in pairs.values()]
    return RankingAgreement(
        top10_exact=sum(verdict is not None for verdict in verdicts) / len(pairs),
        top10_ties=sum(verdict == "swapped" for verdict in verdicts),
        max_abs_logit_diff=largest,
        kendall_tau=math.fsum(kendall_tau(ours, theirs) for ours, theirs in pairs.values()) / len(pairs),
        queries=len(pairs),
    )


def kendall_tau(first: ArrayLike, second: ArrayLike) -> float:
    """Kendall's tau-b of two score lists of one length: 1 = same order, -1 = reversed, ties corrected for.

    Where tau-b is undefined (fewer than two distinct scores) the answer is 1 if neither list prefers anything and 0
    if only one does. Quadratic in memory, which is nothing for the few hundred candidates of a reranker.
    Raises ValueError for lists of two lengths.
    """
    signs = []
    for scores in (first, second):
        values = np.asarray(scores, dtype=np.float64)
        above = values[:, None] > values[None, :]
        signs.append(above.astype(np.int64) - above.T)
    ordered_first, ordered_second = (int(np.abs(sign).sum()) for sign in signs)
    if signs[0].shape != signs[1].shape:
        raise ValueError(f"both must score the same candidates, got {len(signs[0])} and {len(signs[1])}")
    if not ordered_first and not ordered_second:
        return 1.0
    if not ordered_first or not ordered_second:
        return 0.0
    return int((signs[0] * signs[1]).sum()) / math.sqrt(ordered_first * ordered_second)


def bootstrap_difference(
    first: Mapping[str, float], second: Mapping[str, float], *, seed: int = 0, resamples: int = 10_000
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of mean(first) - mean(second), paired over queries.

    Each maps query id -> value of one measure. The same seed gives the same interval, whatever the order of the
    queries. Raises ValueError when the queries differ or there are none.
    """
    if set(first) != set(second) or not first:
        raise ValueError(f"both must hold the same queries, at least one; got {len(first)} and {len(second)}")
    differences = np.array([first[query_id] - second[query_id] for query_id in sorted(first)])
    drawn = np.random.default_rng(seed).integers(len(differences), size=(resamples, len(differences)))
    low, high = np.percentile(differences[drawn].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def _best_first(scores: Sequence[float], where: str) -> list[int]:
    """Indices from the highest score down. Python's sort is stable, reversed too, so equal scores keep their order."""
    for index, score in enumerate(scores):
        try:
            is_nan = math.isnan(score)
        except (TypeError, OverflowError) as error:
            raise TypeError(f"{where}: the score of document number {index} is {score!r:.80}; not a float") from error
        if is_nan:
            raise ValueError(f"{where}: the score of document number {index} is NaN; a ranking needs comparable scores")
    return sorted(range(len(scores)), key=scores.__getitem__, reverse=True)


def _top_ten_verdict(baseline: NDArray[Any], other: NDArray[Any], tolerance: float) -> str | None:
    """ "same" or "swapped" when the top tens agree, None when they do not."""
    expected, actual = _best_first(baseline.tolist(), "baseline"), _best_first(other.tolist(), "other")
    depth = min(10, len(expected))
    verdict, rank = "same", 0
    while rank < depth:
        if actual[rank] == expected[rank]:
            rank += 1
            continue
        if baseline[expected[rank]] - baseline[expected[rank + 1]] >= tolerance:
            return None
        exchanged = [expected[rank + 1], expected[rank]]
        # At the last rank only half of the exchange is inside the top ten.
        if actual[rank : min(rank + 2, depth)] != exchanged[: depth - rank]:
            return None
        verdict, rank = "swapped", rank + 2
    return verdict


def _finite(scores: ArrayLike, name: str, query_id: str) -> NDArray[Any]:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"{name}[{query_id!r}] must be one score a candidate, got shape {values.shape}")
    if not np.isfinite(values).all():
        position = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"{name}[{query_id!r}][{position}] is {values[position]}; scores must be finite numbers")
    return values


def _check_ids(name: str, table: Mapping[str, Mapping[str, Any]]) -> None:
    """An id read as a number matches nothing and silently scores 0, so only strings are taken."""
    if not isinstance(table, Mapping):
        raise TypeError(f"{name} must map query ids to mappings of document ids, got {table!r}")
    for query_id, documents in table.items():
        if not isinstance(documents, Mapping):
            raise TypeError(f"{name}[{query_id!r}] must map document ids to numbers, got {documents!r}")
        for identifier in (query_id, *documents):
            if not isinstance(identifier, str):
                raise TypeError(f"{name}: ids must be strings, got {identifier!r} in query {query_id!r}")


def _grade(grade: Any, query_id: str, doc_id: str) -> int:
    if not isinstance(grade, (int, np.integer)):
        raise TypeError(f"qrels[{query_id!r}][{doc_id!r}] must be an integer grade, got {grade!r}")
    return int(grade)


Measure = Callable[[Sequence[int], Sequence[int]], float]
"""(grades down the ranking, judged grades best first), neither below 0 -> value for one query."""


def _parse_measure(name: str) -> Measure:
    if not isinstance(name, str):
        raise TypeError(f"a measure must be named by a string such as 'nDCG@10', got {name!r}")
    match = _MEASURE_NAME.fullmatch(name)
    family = _ALIASES.get(match["family"], match["family"]) if match else None
    allowed = "nDCG, AP, RR (each with or without @k), R@k, P@k, Success@k, all but nDCG also as AP(rel=2)"
    if match is None or family not in _FAMILIES:
        raise ValueError(f"unknown measure {name!r}; allowed: {allowed}")
    if match["cutoff"] is None and family in _NEEDS_CUTOFF:
        raise ValueError(f"measure {name!r} needs a cutoff, as in {family}@10")
    if match["cutoff"] is not None and int(match["cutoff"]) == 0:
        raise ValueError(f"measure {name!r}: the cutoff must be at least 1")
    if match["rel"] is not None and (family == "nDCG" or int(match["rel"]) == 0):
        raise ValueError(f"measure {name!r}: rel must be at least 1 and is not for nDCG, whose gain is the grade")
    cutoff = None if match["cutoff"] is None else int(match["cutoff"])
    level = int(match["rel"] or 1)
    formula = _FAMILIES[family]

    def measure(gains: Sequence[int], ideal: Sequence[int]) -> float:
        if family == "nDCG":
            return formula(gains[:cutoff], ideal[:cutoff], cutoff)
        hits = [int(grade >= level) for grade in gains[:cutoff]]
        return formula(hits, [1 for grade in ideal if grade >= level], cutoff)

    return measure


def _ndcg(gains: Sequence[int], ideal: Sequence[int], cutoff: int | None) -> float:
    best = _discounted(ideal)
    return _discounted(gains) / best if best else 0.0


def _discounted(gains: Sequence[int]) -> float:
    return math.fsum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains))


def _average_precision(hits: Sequence[int], relevant: Sequence[int], cutoff: int | None) -> float:
    found, precisions = 0, []
    for rank, hit in enumerate(hits, start=1):
        if hit:
            found += 1
            precisions.append(found / rank)
    return math.fsum(precisions) / len(relevant) if relevant else 0.0


def _reciprocal_rank(hits: Sequence[int], relevant: Sequence[int], cutoff: int | None) -> float:
    return 1 / (hits.index(1) + 1) if 1 in hits else 0.0


def _recall(hits: Sequence[int], relevant: Sequence[int], cutoff: int | None) -> float:
    return sum(hits) / len(relevant) if relevant else 0.0


def _precision(hits: Sequence[int], relevant: Sequence[int], cutoff: int | None) -> float:
    assert cutoff is not None
    return sum(hits) / cutoff


def _success(hits: Sequence[int], relevant: Sequence[int], cutoff: int | None) -> float:
    return float(1 in hits)


_FAMILIES: dict[str, Callable[[Sequence[int], Sequence[int], int | None], float]] = {
    "nDCG": _ndcg,
    "AP": _average_precision,
    "RR": _reciprocal_rank,
    "R": _recall,
    "P": _precision,
    "Success": _success,
}
