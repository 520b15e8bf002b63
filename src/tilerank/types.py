"""Frozen records that cross module boundaries. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Qrels: TypeAlias = Mapping[str, Mapping[str, int]]
"""Judgements: query id -> document id -> relevance grade (0 = judged not relevant)."""

Run: TypeAlias = Mapping[str, Mapping[str, float]]
"""A ranking: query id -> document id -> score, higher first."""


@dataclass(frozen=True, slots=True)
class Document:
    """One passage of a corpus."""

    doc_id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """What is indexed and what the model reads: title and text, one space between."""
        return f"{self.title} {self.text}".strip()


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a dataset's split."""

    query_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """A corpus with the queries and judgements of one split, each in canonical order."""

    name: str
    documents: tuple[Document, ...]
    queries: tuple[Query, ...]
    qrels: Qrels


@dataclass(frozen=True, slots=True)
class Pool:
    """The first stage's candidates for one query, best first: what the reranker is given."""

    query_id: str
    doc_ids: tuple[str, ...]
    scores: tuple[float, ...]
