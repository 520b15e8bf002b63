"""The one form in which every data set is stored: corpus.jsonl, queries.jsonl and qrels.tsv.

corpus.jsonl and queries.jsonl have BEIR's record layout (``_id``, ``title``, ``text``, ``metadata``, in this order,
ASCII escapes, one line feed a record); qrels.tsv has BEIR's header and holds the judgements of one split. Records
stay in the source's order, so the published SciFact files are their own canonical form, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tqdm import tqdm

from tilerank.errors import TilerankError
from tilerank.types import Dataset, Document, Query

CORPUS = "corpus.jsonl"
QUERIES = "queries.jsonl"
QRELS = "qrels.tsv"
FILES = (CORPUS, QUERIES, QRELS)

QRELS_HEADER = ("query-id", "corpus-id", "score")

_GRADE = re.compile(r"-?[0-9]{1,9}")
_NOT_IN_IDS = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]")
_FETCH_AGAIN = "mend the line or fetch the data set again"


class DocumentRecord(NamedTuple):
    """One line of corpus.jsonl."""

    document: Document
    metadata: Any


class QueryRecord(NamedTuple):
    """One line of queries.jsonl."""

    query: Query
    metadata: Any


class Judgement(NamedTuple):
    """One line of qrels.tsv; grade 0 or below: judged not relevant."""

    query_id: str
    doc_id: str
    grade: int


class Source(Protocol):
    """Where a data set comes from. Faults in it are raised as `TilerankError` while it is read."""

    def documents(self) -> Iterable[DocumentRecord]:
        """The whole corpus, ids distinct."""
        ...

    def queries(self) -> Iterable[QueryRecord]:
        """All queries, also those of other splits, ids distinct."""
        ...

    def judgements(self, query_ids: Collection[str]) -> Iterable[Judgement]:
        """The split's judgements, pairs distinct, every query among ``query_ids``."""
        ...


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """What `write` wrote."""

    documents: int
    queries: int  # with judgements in the split: those that the pipeline runs
    judgements: int
    missing_documents: int  # distinct judged documents that the corpus lacks; a relevant one counts as not found
    sha256: Mapping[str, str]  # canonical file name -> digest


def write(folder: Path, source: Source) -> DatasetSummary:
    """Write ``source`` in canonical form into the existing ``folder``."""
    doc_ids: set[str] = set()
    query_ids: set[str] = set()
    judged_queries: set[str] = set()
    judged_documents: set[str] = set()
    judgements = 0
    with (folder / CORPUS).open("w", encoding="ascii", newline="\n") as file:
        for document, metadata in tqdm(source.documents(), "documents", unit="", leave=False, disable=None):
            doc_ids.add(document.doc_id)
            fields = {"_id": document.doc_id, "title": document.title, "text": document.text, "metadata": metadata}
            file.write(json.dumps(fields) + "\n")
    with (folder / QUERIES).open("w", encoding="ascii", newline="\n") as file:
        for query, metadata in source.queries():
            query_ids.add(query.query_id)
            file.write(json.dumps({"_id": query.query_id, "text": query.text, "metadata": metadata}) + "\n")
    with (folder / QRELS).open("w", encoding="utf-8", newline="\n") as file:
        file.write("\t".join(QRELS_HEADER) + "\n")
        for query_id, doc_id, grade in source.judgements(query_ids):
            judged_queries.add(query_id)
            judged_documents.add(doc_id)
            judgements += 1
            file.write(f"{query_id}\t{doc_id}\t{grade}\n")
    return DatasetSummary(
        documents=len(doc_ids),
        queries=len(judged_queries),
        judgements=judgements,
        missing_documents=len(judged_documents - doc_ids),
        sha256={name: _sha256(folder / name) for name in FILES},
    )


def check_digests(summary: DatasetSummary, expected: Mapping[str, str], origin: str) -> None:
    """Raise `TilerankError` when a canonical file made from ``origin`` is not the one that settings expect."""
    for name, digest in expected.items():
        if name not in summary.sha256:
            raise TilerankError(f"dataset.sha256: no canonical file is named {name!r}; allowed: {', '.join(FILES)}")
        if summary.sha256[name] != digest.lower():
            raise TilerankError(
                f"{origin}: {name} has sha256 {summary.sha256[name]}, but dataset.sha256 expects {digest}; "
                "fetch the data set again, or empty dataset.sha256 to use changed data"
            )


def load(folder: Path, name: str) -> Dataset:
    """Read the canonical files in ``folder`` as the data set ``name``.

    Queries are those with judgements, in the order of queries.jsonl. Raises `TilerankError` for what is missing or
    damaged.
    """
    with _open(folder / CORPUS) as stream:
        records = tqdm(read_documents(stream, str(folder / CORPUS)), "documents", unit="", leave=False, disable=None)
        documents = tuple(record.document for record in records)
    with _open(folder / QUERIES) as stream:
        queries = tuple(record.query for record in read_queries(stream, str(folder / QUERIES)))
    judged: dict[str, dict[str, int]] = {query.query_id: {} for query in queries}
    with _open(folder / QRELS) as stream:
        for query_id, doc_id, grade in read_judgements(stream, str(folder / QRELS), judged.keys()):
            judged[query_id][doc_id] = grade
    return Dataset(
        name=name,
        documents=documents,
        queries=tuple(query for query in queries if judged[query.query_id]),
        qrels={query_id: grades for query_id, grades in judged.items() if grades},
    )


def read_documents(lines: Iterable[bytes], label: str) -> Iterator[DocumentRecord]:
    """Parse the lines of a corpus.jsonl; ``label`` is what errors call the file."""
    for record, place in _records(lines, label, required=("_id", "text")):
        document = Document(record["_id"], _text(record, "title", place), _text(record, "text", place))
        yield DocumentRecord(document, record.get("metadata", {}))


def read_queries(lines: Iterable[bytes], label: str) -> Iterator[QueryRecord]:
    """Parse the lines of a queries.jsonl."""
    for record, place in _records(lines, label, required=("_id", "text")):
        yield QueryRecord(Query(record["_id"], _text(record, "text", place)), record.get("metadata", {}))


def read_judgements(lines: Iterable[bytes], label: str, query_ids: Collection[str]) -> Iterator[Judgement]:
    """Parse the lines of a qrels file. A judged document may be missing from the corpus, a query may not."""
    numbered = _lines(lines, label)
    number, header = next(numbered, (1, ""))
    if tuple(header.split("\t")) != QRELS_HEADER:
        raise TilerankError(
            f"{label}:{number}: the header must be {_shown(chr(9).join(QRELS_HEADER))}, found {_shown(header)}; "
            "put it first (BEIR's layout has three columns with tabs between)"
        )
    seen: dict[tuple[str, str], int] = {}
    for number, line in numbered:
        place = f"{label}:{number}"
        columns = line.split("\t")
        if len(columns) != len(QRELS_HEADER):
            raise TilerankError(
                f"{place}: expected query id, document id and score with tabs between, found {_shown(line)}; "
                f"{_FETCH_AGAIN}"
            )
        query_id, doc_id, grade = columns
        if not _GRADE.fullmatch(grade):
            raise TilerankError(
                f"{place}: the score must be an integer of at most nine digits, found {_shown(grade)}; {_FETCH_AGAIN}"
            )
        _check_id(query_id, "the query id", place)
        _check_id(doc_id, "the document id", place)
        if query_id not in query_ids:
            raise TilerankError(
                f"{place}: query {_shown(query_id)} is judged but is not in {QUERIES}; add it there or drop the line"
            )
        if (query_id, doc_id) in seen:
            raise TilerankError(
                f"{place}: document {_shown(doc_id)} is judged for query {_shown(query_id)} on line "
                f"{seen[query_id, doc_id]} already; keep one of the two lines"
            )
        seen[query_id, doc_id] = number
        yield Judgement(query_id, doc_id, int(grade))
    if not seen:
        raise TilerankError(f"{label} holds no judgements; fetch the data set again or choose another dataset.split")


def _records(lines: Iterable[bytes], label: str, required: Collection[str]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Parse JSON lines into objects with distinct ids and the ``required`` fields, each with its place."""
    seen: dict[str, int] = {}
    for number, line in _lines(lines, label):
        place = f"{label}:{number}"
        try:
            record = json.loads(line, parse_float=_finite, parse_constant=_finite)
        except json.JSONDecodeError as error:
            raise TilerankError(f"{place}: not JSON ({error.msg} at column {error.colno}); {_FETCH_AGAIN}") from error
        except (ValueError, RecursionError) as error:  # NaN, a number of thousands of digits, nesting without end
            raise TilerankError(f"{place}: JSON that cannot be read ({error}); {_FETCH_AGAIN}") from error
        if not isinstance(record, dict):
            raise TilerankError(f"{place}: expected a JSON object, found {_shown(record)}; {_FETCH_AGAIN}")
        for field in required:
            if field not in record:
                raise TilerankError(f'{place}: the record has no "{field}"; {_FETCH_AGAIN}')
        _check_id(record["_id"], '"_id"', place)
        if record["_id"] in seen:
            raise TilerankError(
                f'{place}: "_id" {_shown(record["_id"])} stands on line {seen[record["_id"]]} already; '
                "give every record an id of its own"
            )
        seen[record["_id"]] = number
        yield record, place
    if not seen:
        raise TilerankError(f"{label} is empty; fetch the data set again")


def _lines(lines: Iterable[bytes], label: str) -> Iterator[tuple[int, str]]:
    """Decode lines and drop their ends; yields (number from 1, text). Blank lines are passed over."""
    number = 0
    try:
        for raw in lines:
            number += 1
            text = raw.decode("utf-8").rstrip("\r\n")
            if number == 1:
                text = text.removeprefix("\ufeff")  # the mark that some Windows programs put first
            if text and not text.isspace():
                yield number, text
    except UnicodeDecodeError as error:
        raise TilerankError(
            f"{label}:{number}: not UTF-8 (byte 0x{error.object[error.start]:02x} at column {error.start + 1}); "
            "save the file as UTF-8 or fetch the data set again"
        ) from error
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise TilerankError(f"{label} is damaged after line {number} ({error}); fetch the data set again") from error


def _finite(number: str) -> float:
    """The number, unless JSON could not hold it again: Python reads NaN, Infinity and 1e999 and writes no JSON then."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{_shown(number)} is not a finite number")
    return value


def _text(record: Mapping[str, Any], field: str, place: str) -> str:
    """The record's text; a title may be absent."""
    value = record.get(field, "")
    if not isinstance(value, str):
        raise TilerankError(f'{place}: "{field}" must be a string, found {_shown(value)}; {_FETCH_AGAIN}')
    if not _is_unicode(value):
        raise TilerankError(f'{place}: "{field}" holds half of a surrogate pair, which is no character; {_FETCH_AGAIN}')
    return value


def _check_id(value: Any, what: str, place: str) -> None:
    # Ids become columns of a tab-separated file, so they must come out of one as they went in.
    if not isinstance(value, str) or not value or value != value.strip() or _NOT_IN_IDS.search(value):
        raise TilerankError(
            f"{place}: {what} must be a string that is not empty, without control characters or blanks at its ends, "
            f"found {_shown(value)}; rename it in all three files"
        )


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    """``value`` on one line and short enough for an error."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise TilerankError(f"{path}: {error.strerror}; run `dvc repro prepare_data` to make it") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
