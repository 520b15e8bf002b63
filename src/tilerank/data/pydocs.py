"""Known-item search over the docstrings of the running Python's standard library: a data set without a download.

A passage is a docstring, or several that follow one another in a module where each is short. A query is the first
sentence of a docstring; the one relevant passage is the passage that the sentence came from, and there the sentence
is left out. The sources are parsed, never imported (importing `this` prints, importing `antigravity` opens a browser).
The result depends on the Python version alone, down to the patch level.
"""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from tilerank.data.canonical import DocumentRecord, Judgement, QueryRecord
from tilerank.data.sampling import shuffled
from tilerank.errors import TilerankError
from tilerank.types import Document, Query

# Packages that distributors leave out or install separately, tests, and the codecs' generated modules.
_LEFT_OUT = {
    "antigravity",
    "distutils",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "test",
    "this",
    "tkinter",
    "turtle",
    "turtledemo",
    "venv",
}
_TEST_FOLDERS = {"test", "tests", "idle_test"}

_PASSAGE_WORDS = 45  # docstrings are joined up to this size: some 2,300 passages, half of them above 100 tokens
_QUERY_WORDS = range(6, 31)
_REMAINING_WORDS = 25  # that a query's docstring has beyond its first sentence, so that it can be found

_FIRST_SENTENCE = re.compile(r"[A-Z].*?[.!?](?=\s+[A-Z`'\"(]|$)")
_BLANK_LINE = re.compile(r"\n\s*\n")
_SEED = "pydocs"


@dataclass(frozen=True, slots=True)
class _Docstring:
    name: str  # qualified: module.Class.method
    sentence: str  # the first sentence; empty where the text does not begin with one
    rest: str

    @property
    def text(self) -> str:
        return f"{self.sentence} {self.rest}".strip()

    @property
    def can_be_asked(self) -> bool:
        words = self.sentence.split()
        prose = sum(word.strip("`'\"(),;:.").isalpha() for word in words)
        return len(words) in _QUERY_WORDS and prose >= 0.8 * len(words) and len(self.rest.split()) >= _REMAINING_WORDS


@dataclass(frozen=True, slots=True)
class PydocsSource:
    """The data set, as a `tilerank.data.canonical.Source`."""

    records: tuple[DocumentRecord, ...]
    asked: tuple[tuple[Query, str], ...]  # each with the id of its relevant passage

    @classmethod
    def collect(cls, passages: int, queries: int) -> PydocsSource:
        """Read the standard library and choose ``passages`` (fewer if it has fewer) and ``queries``.

        Raises `TilerankError` when the sources are not there or do not give so many queries.
        """
        if passages < 1 or queries < 1:
            raise TilerankError(
                f"dataset.passages and dataset.queries must be at least 1 for pydocs, found {passages} and {queries}"
            )
        found = list(_passages())
        chosen = sorted(place for place, _ in zip(shuffled(_SEED, len(found)), range(passages), strict=False))
        kept = [found[place] for place in chosen]
        questions = _questions(kept, queries)
        doc_ids = _distinct([passage[0].name for passage in kept])
        records = tuple(
            DocumentRecord(_document(doc_id, passage, questions.get(place)), {})
            for place, (doc_id, passage) in enumerate(zip(doc_ids, kept, strict=True))
        )
        asked = tuple(
            (Query(f"q{number}", docstring.sentence), doc_ids[place])
            for number, (place, docstring) in enumerate(questions.items(), start=1)
        )
        return cls(records, asked)

    def documents(self) -> Iterator[DocumentRecord]:
        return iter(self.records)

    def queries(self) -> Iterator[QueryRecord]:
        return (QueryRecord(query, {}) for query, _ in self.asked)

    def judgements(self, query_ids: Collection[str]) -> Iterator[Judgement]:
        return (Judgement(query.query_id, doc_id, 1) for query, doc_id in self.asked)


def _passages() -> Iterator[tuple[_Docstring, ...]]:
    """All passages, in the order of module names and source lines."""
    library = Path(sysconfig.get_path("stdlib"))
    files = list(_source_files(library))
    if not files:
        raise TilerankError(
            f"the standard library's sources are not in {library}; use a Python that has them, or another dataset"
        )
    for module, file in tqdm(files, "standard library", unit=" files", leave=False, disable=None):
        pending: list[_Docstring] = []
        words = 0
        for docstring in _docstrings(module, file):
            pending.append(docstring)
            words += len(docstring.text.split())
            if words >= _PASSAGE_WORDS:
                yield tuple(pending)
                pending, words = [], 0
        if words >= _PASSAGE_WORDS / 2:
            yield tuple(pending)


def _source_files(library: Path) -> Iterator[tuple[str, Path]]:
    """(dotted module name, file) of the standard library's Python modules.

    `sys.stdlib_module_names` is the same on every platform, unlike the folder, where site-packages, a distributor's
    additions and the build's own configuration lie too.
    """
    for name in sorted(sys.stdlib_module_names - _LEFT_OUT):
        module = library / f"{name}.py"
        if module.is_file():
            yield name, module
            continue
        for file in sorted((library / name).rglob("*.py")):
            parts = file.relative_to(library).with_suffix("").parts
            if not _TEST_FOLDERS.intersection(parts):
                yield ".".join(parts).removesuffix(".__init__"), file


def _docstrings(module: str, file: Path) -> Iterator[_Docstring]:
    """Docstrings of a module, its classes, functions and methods, in source order."""
    try:
        with tokenize.open(file) as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old modules
            tree = ast.parse(stream.read())
    except (OSError, SyntaxError, ValueError) as error:
        raise TilerankError(f"{file} cannot be parsed ({error}); mend the Python installation") from error
    yield from _docstrings_below(tree, module)


def _docstrings_below(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[_Docstring]:
    docstring = ast.get_docstring(node)
    if docstring and docstring.strip():
        yield _split(name, docstring)
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings_below(child, f"{name}.{child.name}")


def _split(name: str, docstring: str) -> _Docstring:
    """Part a docstring into first sentence and rest, each on one line. The sentence ends within the first paragraph."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in _BLANK_LINE.split(docstring.strip())]
    match = _FIRST_SENTENCE.match(paragraphs[0])
    sentence = match.group() if match else ""
    paragraphs[0] = paragraphs[0][len(sentence) :].strip()
    return _Docstring(name, sentence, " ".join(filter(None, paragraphs)))


def _questions(passages: Sequence[tuple[_Docstring, ...]], count: int) -> dict[int, _Docstring]:
    """Choose ``count`` passages with a docstring each that can be asked for: place -> docstring, in drawing order."""
    texts = [" ".join(docstring.text for docstring in passage).lower() for passage in passages]
    questions: dict[int, _Docstring] = {}
    for place in shuffled(f"{_SEED} queries", len(passages)):
        if len(questions) == count:
            break
        askable = [docstring for docstring in passages[place] if docstring.can_be_asked]
        if not askable:
            continue
        longest = max(askable, key=lambda docstring: len(docstring.rest))
        if sum(text.count(longest.sentence.lower()) for text in texts) == 1:  # copied docstrings have no one answer
            questions[place] = longest
    if len(questions) < count:
        raise TilerankError(
            f"the standard library's {len(passages)} passages give {len(questions)} queries, dataset.queries asks for "
            f"{count}; lower it or raise dataset.passages"
        )
    return questions


def _document(doc_id: str, passage: tuple[_Docstring, ...], question: _Docstring | None) -> Document:
    """The passage as it is searched: titled with its first docstring's name, the others' names before their texts."""
    texts = []
    for docstring in passage:
        text = docstring.rest if docstring is question else docstring.text
        own_name = docstring.name.rpartition(".")[2]
        texts.append(text if docstring is passage[0] else f"{own_name}: {text}")
    return Document(doc_id, title=passage[0].name, text=" ".join(texts))


def _distinct(names: Sequence[str]) -> list[str]:
    """Names that occur again (a property's setter, a function defined twice) get a number."""
    seen: dict[str, int] = {}
    ids = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        ids.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return ids
