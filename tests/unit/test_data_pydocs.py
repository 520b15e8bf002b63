"""Known-item search over the standard library: deterministic, importing nothing, with queries that can be answered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from beir_data import contents, dataset_settings

from tilerank import data
from tilerank.data import pydocs
from tilerank.data.pydocs import PydocsSource
from tilerank.data.sampling import shuffled
from tilerank.errors import TilerankError
from tilerank.types import Dataset

PREPARE = """
import sys
from pathlib import Path
from beir_data import dataset_settings
from tilerank import data
out = Path(sys.argv[1])
data.prepare(dataset_settings("pydocs", "pydocs", passages=2000, queries=20), out, out.parent)
print(*sorted({"this", "antigravity", "torch", "idlelib", "tkinter", "turtle"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def library() -> list[tuple[pydocs._Docstring, ...]]:
    """The standard library, parsed once."""
    return list(pydocs._passages())


@pytest.fixture
def parsed(library: list[tuple[pydocs._Docstring, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pydocs, "_passages", lambda: iter(library))


@pytest.fixture(scope="module")
def canonical(library: list[tuple[pydocs._Docstring, ...]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pydocs") / "canonical"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pydocs, "_passages", lambda: iter(library))
        data.prepare(dataset_settings("pydocs", "pydocs", passages=2000, queries=20), folder, folder.parent)
    return folder


@pytest.fixture(scope="module")
def dataset(canonical: Path) -> Dataset:
    return data.load(canonical, "pydocs")


def test_sizes(dataset: Dataset) -> None:
    assert len(dataset.documents) == 2000
    assert [query.query_id for query in dataset.queries] == [f"q{number}" for number in range(1, 21)]
    words = sorted(len(document.contents.split()) for document in dataset.documents)
    assert words[0] >= pydocs._PASSAGE_WORDS / 2 - 2
    assert words[1000] >= 60
    assert words[1900] >= 150
    assert all(document.title and document.text == " ".join(document.text.split()) for document in dataset.documents)


def test_each_query_has_one_answer_that_does_not_hold_the_sentence(dataset: Dataset) -> None:
    texts = {document.doc_id: document.contents.lower() for document in dataset.documents}
    for query in dataset.queries:
        ((doc_id, grade),) = dataset.qrels[query.query_id].items()
        assert grade == 1
        assert 6 <= len(query.text.split()) <= 30
        assert len(texts[doc_id].split()) >= pydocs._REMAINING_WORDS
        assert not any(query.text.lower() in text for text in texts.values())


@pytest.mark.usefixtures("parsed")
def test_the_sentence_is_the_docstrings_first(dataset: Dataset) -> None:
    import inspect
    import textwrap

    source = PydocsSource.collect(5000, 40)
    answers = {doc_id for _, doc_id in source.asked}
    sentences = {query.text for query, _ in source.asked}
    assert {query.text for query in dataset.queries} != sentences, "more passages, other queries"
    wrap = inspect.cleandoc(textwrap.TextWrapper.wrap.__doc__ or "")
    entry = pydocs._split("textwrap.TextWrapper.wrap", wrap)
    assert entry.text == " ".join(wrap.split())
    by_id = {record.document.doc_id: record.document for record in source.records}
    assert len(by_id) == len(source.records)
    assert all(by_id[doc_id].text for doc_id in answers)


@pytest.mark.parametrize(
    ("docstring", "sentence", "rest"),
    [
        ("Wrap it. Then go.", "Wrap it.", "Then go."),
        ("Wrap\n    it.\n\nThen go.", "Wrap it.", "Then go."),
        ("Use os.path e.g. this one. `Then` go.", "Use os.path e.g. this one.", "`Then` go."),
        ("No full stop here\n\nSecond. Third.", "", "No full stop here Second. Third."),
        ("wrap(text) -> list. Wrap it.", "", "wrap(text) -> list. Wrap it."),
        ("All there is.", "All there is.", ""),
    ],
)
def test_first_sentences(docstring: str, sentence: str, rest: str) -> None:
    entry = pydocs._split("name", docstring)
    assert (entry.sentence, entry.rest) == (sentence, rest)


def test_same_bytes_in_another_process_and_nothing_imported(canonical: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "4242", "LC_ALL": "C"}
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PREPARE, str(out)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
    assert contents(out) == contents(canonical)


@pytest.mark.usefixtures("parsed")
def test_more_queries_keep_the_first_ones(dataset: Dataset) -> None:
    more = PydocsSource.collect(2000, 25)
    assert [query for query, _ in more.asked][:20] == list(dataset.queries)


@pytest.mark.usefixtures("parsed")
def test_settings_that_cannot_be_served() -> None:
    with pytest.raises(TilerankError, match="must be at least 1 for pydocs, found 0 and 20"):
        PydocsSource.collect(0, 20)
    with pytest.raises(TilerankError, match=r"300 passages give \d+ queries, dataset.queries asks for 300; lower it"):
        PydocsSource.collect(300, 300)


def test_a_python_without_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pydocs.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(TilerankError, match=r"sources are not in .*; use a Python that has them"):
        PydocsSource.collect(2000, 20)
    (tmp_path / "abc.py").write_text("def broken(:\n")
    with pytest.raises(TilerankError, match=r"abc.py cannot be parsed \(.*\); mend the Python installation"):
        PydocsSource.collect(2000, 20)


def test_shuffled_is_a_permutation_that_stays_the_same() -> None:
    assert sorted(shuffled("seed", 1000)) == list(range(1000))
    assert list(shuffled("seed", 0)) == []
    # Written down once: another sequence would change every stub pool and every pydocs corpus.
    assert list(shuffled("0 fill q1", 10)) == [6, 1, 7, 4, 5, 3, 9, 0, 2, 8]
    draws = shuffled("seed", 10**12)
    assert len({next(draws) for _ in range(100)}) == 100
