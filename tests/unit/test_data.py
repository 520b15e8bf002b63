"""Canonical form: what is written, what is read back, and the one-line error for every kind of damage."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from beir_data import DOCUMENTS, HEADER, beir_files, contents, dataset_settings, write_folder, write_zip

from tilerank import data
from tilerank.errors import TilerankError
from tilerank.types import Document, Query

SCIFACT = {
    "corpus.jsonl": "dec31c8182f3d744c7d2c09423756fd1d17cbef75808db13ba01cc0aab4d1ac6",
    "queries.jsonl": "8ff84a7c903f722981cd8d595c022660140c51867b27608a6d4910db86080313",
}


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$TILERANK_DATA, empty."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("TILERANK_DATA", str(folder))
    return folder


def prepare(settings, tmp_path: Path) -> data.DatasetSummary:
    return data.prepare(settings, tmp_path / "canonical", tmp_path)


def test_files_are_canonical_and_read_back(shelf: Path, tmp_path: Path) -> None:
    write_folder(shelf / "tiny")
    summary = prepare(dataset_settings(), tmp_path)
    assert (summary.documents, summary.queries, summary.judgements, summary.missing_documents) == (5, 3, 6, 1)
    files = contents(tmp_path / "canonical")
    assert {name: hashlib.sha256(body).hexdigest() for name, body in files.items()} == dict(summary.sha256)
    source = beir_files()
    assert files["corpus.jsonl"].decode() == source["corpus.jsonl"]
    assert files["queries.jsonl"].decode() == source["queries.jsonl"]  # all four, not the split's three
    assert files["qrels.tsv"].decode() == source["qrels/test.tsv"]

    dataset = data.load(tmp_path / "canonical", "tiny")
    assert dataset.name == "tiny"
    assert dataset.documents == tuple(Document(key, title, text) for key, (title, text) in DOCUMENTS.items())
    assert [query.query_id for query in dataset.queries] == ["q1", "q2", "q3"]  # the order of queries.jsonl
    assert dataset.queries[0] == Query("q1", "lift of a wing in a propeller slipstream")
    assert dataset.qrels == {"q1": {"d1": 2, "q1": 1, "d2": 0}, "q2": {"d2": 1, "gone": 1}, "q3": {"d3": 1}}
    assert list(dataset.qrels) == ["q1", "q2", "q3"]


def test_spelling_of_the_source_does_not_matter(shelf: Path, tmp_path: Path) -> None:
    """CR line ends, key order, raw UTF-8, a byte order mark, blank lines and a missing last line feed."""
    write_folder(shelf / "tiny")
    prepare(dataset_settings(), tmp_path)
    expected = contents(tmp_path / "canonical")
    respelled = {}
    for name, text in beir_files().items():
        if name.endswith(".jsonl"):
            lines = [dict(reversed(json.loads(line).items())) for line in text.split("\n")[:-1]]
            text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
        respelled[name] = "\ufeff" + text.replace("\n", "\r\n")
    write_folder(shelf / "odd", respelled)
    data.prepare(dataset_settings("odd"), tmp_path / "odd", tmp_path)
    assert contents(tmp_path / "odd") == expected


def test_optional_fields_may_be_absent(shelf: Path, tmp_path: Path) -> None:
    files = beir_files()
    files["corpus.jsonl"] = '{"_id": "d1", "text": "only text", "url": "dropped"}\n'
    write_folder(shelf / "tiny", files)
    prepare(dataset_settings(), tmp_path)
    written = (tmp_path / "canonical" / "corpus.jsonl").read_text()
    assert written == '{"_id": "d1", "title": "", "text": "only text", "metadata": {}}\n'


def test_the_split_chooses_the_queries(shelf: Path, tmp_path: Path) -> None:
    write_folder(shelf / "tiny")
    prepare(dataset_settings(split="train"), tmp_path)
    assert [query.query_id for query in data.load(tmp_path / "canonical", "tiny").queries] == ["q0"]


LINE = '{"_id": "d9", "title": "t", "text": "x", "metadata": {}}\n'
DAMAGE = [
    ("corpus.jsonl", LINE + '{"_id": "d1", "te', ":2: not JSON (Unterminated string"),
    ("corpus.jsonl", LINE + "[1, 2]\n", ":2: expected a JSON object, found [1, 2]"),
    ("corpus.jsonl", LINE + "[" * 100_000, ":2: JSON that cannot be read"),
    ("corpus.jsonl", LINE + LINE, ":2: \"_id\" 'd9' stands on line 1 already"),
    ("corpus.jsonl", '{"title": "t", "text": "x"}\n', ':1: the record has no "_id"'),
    ("corpus.jsonl", '{"_id": "d1", "title": "t"}\n', ':1: the record has no "text"'),
    ("corpus.jsonl", '{"_id": 7, "text": "x"}\n', ':1: "_id" must be a string'),
    ("corpus.jsonl", '{"_id": "", "text": "x"}\n', ':1: "_id" must be a string that is not empty'),
    ("corpus.jsonl", '{"_id": "a\\tb", "text": "x"}\n', r"found 'a\tb'"),
    ("corpus.jsonl", '{"_id": "a ", "text": "x"}\n', "blanks at its ends, found 'a '"),
    ("corpus.jsonl", '{"_id": "d1", "text": null}\n', ':1: "text" must be a string, found None'),
    (
        "corpus.jsonl",
        '{"_id": "d1", "title": NaN, "text": "x"}\n',
        ":1: JSON that cannot be read ('NaN' is not a finite",
    ),
    (
        "corpus.jsonl",
        LINE.replace("{}", '{"year": NaN}'),
        ":1: JSON that cannot be read ('NaN' is not a finite number)",
    ),
    ("queries.jsonl", '{"_id": "q1", "text": "x", "metadata": [1e999]}\n', ":1: JSON that cannot be read ('1e999'"),
    ("corpus.jsonl", '{"_id": "d1", "text": "\\ud83d"}\n', ':1: "text" holds half of a surrogate pair'),
    ("corpus.jsonl", LINE.encode() + b'{"_id": "d1", "text": "caf\xe9"}\n', ":2: not UTF-8 (byte 0xe9 at column 27)"),
    ("corpus.jsonl", LINE.encode("utf-16"), ":1: not UTF-8 (byte 0xff at column 1)"),
    ("corpus.jsonl", "", "corpus.jsonl is empty"),
    ("queries.jsonl", '{"_id": "q1", "text": "x"}\n{"_id": "q1", "text": "y"}\n', ":2: \"_id\" 'q1' stands on line 1"),
    ("queries.jsonl", "\n\n", "queries.jsonl is empty"),
    ("qrels/test.tsv", "q1\td1\t1\n", r":1: the header must be 'query-id\tcorpus-id\tscore', found 'q1\td1\t1'"),
    ("qrels/test.tsv", "", ":1: the header must be"),
    ("qrels/test.tsv", HEADER, "test.tsv holds no judgements"),
    ("qrels/test.tsv", HEADER + "q1 d1 1\n", ":2: expected query id, document id and score with tabs between"),
    ("qrels/test.tsv", HEADER + "q1\t0\td1\t1\n", ":2: expected query id"),
    (
        "qrels/test.tsv",
        HEADER + "q1\td1\t1.0\n",
        ":2: the score must be an integer of at most nine digits, found '1.0'",
    ),
    ("qrels/test.tsv", HEADER + "q1\td1\t1_0\n", "found '1_0'"),
    ("qrels/test.tsv", HEADER + "q1\td1\t" + "9" * 5000 + "\n", "at most nine digits"),
    ("qrels/test.tsv", HEADER + "q1\t\t1\n", ":2: the document id must be a string that is not empty"),
    (
        "qrels/test.tsv",
        HEADER + "q1\td1\t1\nq1\td1\t2\n",
        ":3: document 'd1' is judged for query 'q1' on line 2 already",
    ),
    ("qrels/test.tsv", HEADER + "q9\td1\t1\n", ":2: query 'q9' is judged but is not in queries.jsonl"),
]


@pytest.mark.parametrize(("name", "text", "message"), DAMAGE, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(DAMAGE)])
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "zip"])
def test_damage_is_one_line_that_names_file_and_line(
    shelf: Path, tmp_path: Path, name: str, text: str | bytes, message: str, packed: bool
) -> None:
    folder = write_folder((tmp_path if packed else shelf) / "tiny", {**beir_files(), name: text})
    if packed:
        write_zip(shelf / "tiny.zip", folder, "tiny/")
    with pytest.raises(TilerankError) as caught:
        prepare(dataset_settings(), tmp_path)
    error = str(caught.value)
    assert message in error
    assert name in error
    assert "\n" not in error
    assert len(error) < 500 + len(str(tmp_path))
    assert not (tmp_path / "canonical").exists()
    assert not list(tmp_path.glob(".canonical*")), "a temporary folder was left behind"


def test_negative_grades_and_ids_with_blanks_inside_are_data(shelf: Path, tmp_path: Path) -> None:
    rows = HEADER + "q1\td1\t-1\nq1\ta document\t3\n"
    write_folder(shelf / "tiny", {**beir_files(), "qrels/test.tsv": rows})
    assert prepare(dataset_settings(), tmp_path).missing_documents == 1
    assert data.load(tmp_path / "canonical", "tiny").qrels == {"q1": {"d1": -1, "a document": 3}}


@pytest.mark.parametrize("missing", ["corpus.jsonl", "queries.jsonl"])
def test_a_missing_file_is_named(shelf: Path, tmp_path: Path, missing: str) -> None:
    write_folder(shelf / "tiny", {name: text for name, text in beir_files().items() if name != missing})
    with pytest.raises(TilerankError, match=rf"{missing} is missing; a BEIR data set has corpus.jsonl"):
        prepare(dataset_settings(), tmp_path)


def test_a_missing_split_names_those_that_exist(shelf: Path, tmp_path: Path) -> None:
    write_folder(shelf / "tiny")
    with pytest.raises(TilerankError, match=r"dev.tsv is missing; allowed for dataset.split: test, train$"):
        prepare(dataset_settings(split="dev"), tmp_path)


def test_a_wrong_digest_writes_nothing_and_says_both(shelf: Path, tmp_path: Path) -> None:
    write_folder(shelf / "tiny")
    right = prepare(dataset_settings(), tmp_path).sha256
    before = contents(tmp_path / "canonical")
    prepare(dataset_settings(sha256={name: digest.upper() for name, digest in right.items()}), tmp_path)
    write_folder(shelf / "tiny", {**beir_files(), "corpus.jsonl": LINE})
    with pytest.raises(TilerankError, match=rf"corpus.jsonl has sha256 [0-9a-f]{{64}}, but .* {right['corpus.jsonl']}"):
        prepare(dataset_settings(sha256=right), tmp_path)
    assert contents(tmp_path / "canonical") == before, "the old files must stay whole"
    with pytest.raises(TilerankError, match=r"no canonical file is named 'corpus'; allowed: corpus.jsonl, queries"):
        prepare(dataset_settings(sha256={"corpus": right["corpus.jsonl"]}), tmp_path)


def test_unknown_source_and_unknown_data_set(shelf: Path, tmp_path: Path) -> None:
    with pytest.raises(TilerankError, match=r"no source 'hub'; allowed: auto, ir_datasets, local, pydocs"):
        prepare(dataset_settings(source="hub"), tmp_path)
    with pytest.raises(
        TilerankError, match=r"no data set 'tiny' is here; put its BEIR folder or zip at .*tiny\[.zip\]"
    ):
        prepare(dataset_settings(), tmp_path)


def test_loading_without_prepare_names_the_stage(tmp_path: Path) -> None:
    with pytest.raises(TilerankError, match=r"corpus.jsonl: No such file or directory; run `dvc repro prepare_data`"):
        data.load(tmp_path, "tiny")


def test_scifact_is_its_own_canonical_form(scifact_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILERANK_DATA", str(scifact_dir.parent))
    settings = dataset_settings("scifact", "auto", sha256=SCIFACT)
    summary = prepare(settings, tmp_path)
    assert (summary.documents, summary.queries, summary.judgements, summary.missing_documents) == (5183, 300, 339, 0)
    assert {name: summary.sha256[name] for name in SCIFACT} == SCIFACT
    assert len((tmp_path / "canonical" / "queries.jsonl").read_text().splitlines()) == 1109
    assert data.prepare(replace(settings, split="train"), tmp_path / "train", tmp_path).queries == 809


def test_graded_judgements_of_cranfield(cranfield_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: (cranfield_dir / name).read_bytes() for name in ("corpus.jsonl", "queries.jsonl")}
    graded = (cranfield_dir / "qrels_graded" / "test.tsv").read_bytes()
    write_folder(tmp_path / "shelf" / "cranfield", {**files, "qrels/test.tsv": graded})
    monkeypatch.setenv("TILERANK_DATA", str(tmp_path / "shelf"))
    summary = prepare(dataset_settings("cranfield"), tmp_path)
    assert (summary.documents, summary.queries, summary.judgements) == (1400, 225, 1837)
    dataset = data.load(tmp_path / "canonical", "cranfield")
    assert {grade for grades in dataset.qrels.values() for grade in grades.values()} == {0, 1, 2, 3, 4}
    assert [d.doc_id for d in dataset.documents if not d.contents] == ["471", "995"]  # empty documents are kept
