"""The first stage: for each query the candidates that the reranker is given. Imports no torch.

BM25 (bm25s) is the real one. The stub hands out the relevant documents among random others: a pool without a
ranker's opinion, whose recall is 1 as far as the candidates go.

Pools are the same bytes on every Python and numpy version: BM25 is computed in float64, and its scores are rounded
to six decimals before they are compared, so that the last bits of a logarithm decide nothing. Equal scores stand in
corpus order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from tilerank.config import RetrievalSettings
from tilerank.data.sampling import shuffled
from tilerank.errors import TilerankError
from tilerank.evaluation import evaluate, ordered_run
from tilerank.types import Dataset, Pool

if TYPE_CHECKING:
    from numpy.typing import NDArray

KINDS = ("bm25", "stub")

_DECIMALS = 6
_RECALL_DEPTH = 50


@dataclass(frozen=True, slots=True)
class FirstStage:
    """Pools for every query, and the quality of the ranking that they come from."""

    pools: tuple[Pool, ...]
    quality: Mapping[str, float]  # keys of the summary's ``quality``; empty for the stub, whose order means nothing


def first_stage(
    dataset: Dataset, settings: RetrievalSettings, candidates: int, *, drop_self_retrieval: bool = False
) -> FirstStage:
    """Run the first stage that ``settings.kind`` names.

    BM25's recall is that of its 50 best documents, however many ``candidates`` are handed on.
    """
    if settings.kind == "stub":
        return FirstStage(stub_pools(dataset, settings, candidates, drop_self_retrieval=drop_self_retrieval), {})
    if settings.kind != "bm25":
        raise TilerankError(f"retrieval.kind: no first stage {settings.kind!r}; allowed: {', '.join(KINDS)}")
    _check_candidates(candidates)
    depth = max(candidates, _RECALL_DEPTH)
    pools = bm25_pools(dataset, settings, depth, drop_self_retrieval=drop_self_retrieval)
    run = {pool.query_id: ordered_run(pool.doc_ids, pool.scores) for pool in pools}
    means = evaluate(dataset.qrels, run, ("nDCG@10", f"R@{_RECALL_DEPTH}"))
    quality = {"bm25_ndcg10": means["nDCG@10"], f"bm25_recall{_RECALL_DEPTH}": means[f"R@{_RECALL_DEPTH}"]}
    cut = (Pool(pool.query_id, pool.doc_ids[:candidates], pool.scores[:candidates]) for pool in pools)
    return FirstStage(tuple(cut), quality)


def bm25_pools(
    dataset: Dataset, settings: RetrievalSettings, candidates: int, *, drop_self_retrieval: bool = False
) -> tuple[Pool, ...]:
    """The ``candidates`` best documents by BM25 (Lucene's variant) for each query of ``dataset``, in its order.

    Documents that share no term with the query are no candidates, so a pool may be shorter, or empty.
    ``drop_self_retrieval`` leaves out the document whose id is the query's.
    Raises `TilerankError` for settings that BM25 cannot run with.
    """
    _check_candidates(candidates)
    if not 0 <= settings.k1 < float("inf"):
        raise TilerankError(f"retrieval.k1 must be a finite number of at least 0, found {settings.k1}")
    if not 0 <= settings.b <= 1:
        raise TilerankError(f"retrieval.b must be between 0 and 1, found {settings.b}")
    import bm25s

    corpus_tokens = _tokenize([document.contents for document in dataset.documents], settings.stopwords)
    query_tokens = _tokenize([query.text for query in dataset.queries], settings.stopwords)
    index = bm25s.BM25(
        k1=settings.k1, b=settings.b, method="lucene", dtype="float64", backend="numpy", csc_backend="numpy"
    )
    has_terms = bool(corpus_tokens.vocab)
    if has_terms:
        index.index(corpus_tokens, show_progress=sys.stderr.isatty())
    terms = list(query_tokens.vocab)
    doc_ids = [document.doc_id for document in dataset.documents]
    place_of = {doc_id: place for place, doc_id in enumerate(doc_ids)} if drop_self_retrieval else {}
    pools = []
    progress = tqdm(dataset.queries, "BM25", unit=" queries", leave=False, disable=None)
    for query, token_ids in zip(progress, query_tokens.ids, strict=True):
        known = index.get_tokens_ids([terms[token] for token in token_ids]) if has_terms else []
        scores = index.get_scores_from_ids(known) if known else np.zeros(len(doc_ids))
        if query.query_id in place_of:
            scores[place_of[query.query_id]] = 0.0
        best = _best_places(scores, candidates)
        pools.append(
            Pool(
                query.query_id,
                tuple(doc_ids[place] for place in best),
                tuple(np.round(scores[best], _DECIMALS).tolist()),
            )
        )
    return tuple(pools)


def stub_pools(
    dataset: Dataset, settings: RetrievalSettings, candidates: int, *, drop_self_retrieval: bool = False
) -> tuple[Pool, ...]:
    """For each query its relevant documents and random others, ``candidates`` in all (the corpus, if it is smaller).

    The order is random too, so that it tells a reranker nothing; scores fall by 1 to 1. A query's pool depends on
    ``settings.seed``, the query's id and the corpus alone. Relevant documents that the corpus lacks are left out;
    of more than ``candidates`` the highest grades stay, then the earliest in the corpus.
    """
    _check_candidates(candidates)
    doc_ids = [document.doc_id for document in dataset.documents]
    place_of = {doc_id: place for place, doc_id in enumerate(doc_ids)}
    pools = []
    for query in dataset.queries:
        dropped = place_of.get(query.query_id) if drop_self_retrieval else None
        grades = {
            place_of[doc_id]: grade
            for doc_id, grade in dataset.qrels[query.query_id].items()
            if grade > 0 and doc_id in place_of and place_of[doc_id] != dropped
        }
        chosen = sorted(grades, key=lambda place: (-grades[place], place))[:candidates]
        taken = {*chosen, dropped}
        fill = shuffled(f"{settings.seed} fill {query.query_id}", len(doc_ids))
        while len(chosen) < candidates and (place := next(fill, None)) is not None:
            if place not in taken:
                chosen.append(place)
        order = shuffled(f"{settings.seed} order {query.query_id}", len(chosen))
        ids = tuple(doc_ids[chosen[place]] for place in order)
        pools.append(Pool(query.query_id, ids, tuple(float(len(ids) - rank) for rank in range(len(ids)))))
    return tuple(pools)


def write_pools(path: Path, pools: Sequence[Pool]) -> None:
    """Write one JSON object a line: query_id, doc_ids (best first) and scores with six decimals."""
    with path.open("w", encoding="ascii", newline="\n") as file:
        for pool in pools:
            scores = ", ".join(f"{score:.{_DECIMALS}f}" for score in pool.scores)
            file.write(
                f'{{"query_id": {json.dumps(pool.query_id)}, "doc_ids": {json.dumps(list(pool.doc_ids))}, '
                f'"scores": [{scores}]}}\n'
            )


def read_pools(path: Path) -> tuple[Pool, ...]:
    """Read what `write_pools` wrote; `TilerankError` when the file is missing or damaged."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise TilerankError(f"{path}: {reason}; run `dvc repro retrieve` to make it") from error
    pools = []
    for number, line in enumerate(lines, start=1):
        try:
            pools.append(_pool(json.loads(line)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TilerankError(f"{path}:{number}: not a pool; run `dvc repro retrieve` to make the file") from error
    return tuple(pools)


def _pool(record: Any) -> Pool:
    pool = Pool(record["query_id"], tuple(record["doc_ids"]), tuple(map(float, record["scores"])))
    ids = (pool.query_id, *pool.doc_ids)
    if len(pool.doc_ids) != len(pool.scores) or not all(isinstance(identifier, str) for identifier in ids):
        raise ValueError
    return pool


def _check_candidates(candidates: int) -> None:
    if candidates < 1:
        raise TilerankError(f"workload.candidates must be at least 1, found {candidates}")


def _tokenize(texts: list[str], stopwords: str) -> Any:
    """bm25s' tokens: lower-case words of two characters and more that are no stop words, not stemmed."""
    import bm25s

    try:
        return bm25s.tokenize(texts, stopwords=stopwords, stemmer=None, show_progress=sys.stderr.isatty())
    except ValueError as error:
        raise TilerankError(f"retrieval.stopwords: {stopwords!r} is not a language that bm25s knows; use en") from error


def _best_places(scores: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Places of the ``count`` highest positive scores ``[documents]``, best first, equal ones in rising place."""
    places = np.flatnonzero(scores > 0)
    rounded = np.round(scores[places], _DECIMALS)
    if len(places) > count:  # a sort of the few that can make it, with all that tie for the last place
        last = np.partition(rounded, len(rounded) - count)[len(rounded) - count]
        places, rounded = places[rounded >= last], rounded[rounded >= last]
    return places[np.argsort(-rounded, kind="stable")[:count]]
