"""The first stage: BM25's published figures, order under ties, the stub, and pools that are the same bytes anywhere."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from beir_data import DOCUMENTS, QRELS, QUERIES, dataset_settings

from tilerank import data, retrieval
from tilerank.config import RetrievalSettings
from tilerank.errors import TilerankError
from tilerank.types import Dataset, Document, Pool, Query

BM25 = RetrievalSettings(kind="bm25", k1=1.5, b=0.75, stopwords="en", seed=0)
STUB = replace(BM25, kind="stub")


@pytest.fixture
def tiny() -> Dataset:
    return Dataset(
        name="tiny",
        documents=tuple(Document(key, title, text) for key, (title, text) in DOCUMENTS.items()),
        queries=tuple(Query(key, QUERIES[key]) for key in ("q1", "q2", "q3")),
        qrels=QRELS["test"],
    )


@pytest.fixture(scope="module")
def scifact(scifact_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("scifact") / "canonical"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILERANK_DATA", str(scifact_dir.parent))
        data.prepare(dataset_settings("scifact"), folder, folder.parent)
    return data.load(folder, "scifact")


@pytest.fixture(scope="module")
def scifact_stage(scifact: Dataset) -> retrieval.FirstStage:
    return retrieval.first_stage(scifact, BM25, 50)


def numbered(texts: list[str], queries: list[str]) -> Dataset:
    return Dataset(
        name="numbered",
        documents=tuple(Document(f"d{place}", "", text) for place, text in enumerate(texts)),
        queries=tuple(Query(f"q{place}", text) for place, text in enumerate(queries)),
        qrels={f"q{place}": {"d0": 1} for place in range(len(queries))},
    )


def test_published_figures_on_scifact(scifact: Dataset, scifact_stage: retrieval.FirstStage) -> None:
    """Measured by an independent library over all 300 queries."""
    ir_measures = pytest.importorskip("ir_measures")
    run = {pool.query_id: {doc: 50.0 - rank for rank, doc in enumerate(pool.doc_ids)} for pool in scifact_stage.pools}
    ndcg, recall = ir_measures.nDCG @ 10, ir_measures.R @ 50
    means = ir_measures.calc_aggregate([ndcg, recall], scifact.qrels, run)
    assert len(run) == 300
    assert means[ndcg] == pytest.approx(0.66169139, abs=1e-7)
    assert means[recall] == pytest.approx(0.8686, abs=5e-5)
    assert set(scifact_stage.quality) == {"bm25_ndcg10", "bm25_recall50"}
    assert scifact_stage.quality["bm25_ndcg10"] == pytest.approx(means[ndcg], abs=1e-12)
    assert scifact_stage.quality["bm25_recall50"] == pytest.approx(means[recall], abs=1e-12)


def test_quality_does_not_depend_on_the_number_of_candidates() -> None:
    dataset = numbered(["wing " * (place + 1) for place in range(60)], ["wing"])
    dataset = replace(dataset, qrels={"q0": {"d0": 1, "d30": 1, "d59": 1}})
    stages = {count: retrieval.first_stage(dataset, BM25, count) for count in (5, 50, 60)}
    assert stages[5].quality == stages[50].quality == stages[60].quality
    assert stages[50].quality["bm25_recall50"] == pytest.approx(2 / 3)
    for count, stage in stages.items():
        assert stage.pools[0] == Pool("q0", stages[60].pools[0].doc_ids[:count], stages[60].pools[0].scores[:count])
        assert len(stage.pools[0].doc_ids) == count


def test_pools_of_scifact_are_the_recorded_bytes(
    scifact: Dataset, scifact_stage: retrieval.FirstStage, tmp_path: Path
) -> None:
    """The same on Python 3.11 to 3.13 and numpy 1.26 to 2: a digest written down on one of them holds on all."""
    retrieval.write_pools(tmp_path / "bm25", scifact_stage.pools)
    retrieval.write_pools(tmp_path / "stub", retrieval.stub_pools(scifact, STUB, 50))
    digests = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()[:16] for name in ("bm25", "stub")}
    assert digests == {"bm25": "c5db1434ef738c09", "stub": "debd1a69f841e522"}


def test_bm25_by_hand() -> None:
    """Three documents of two terms, one of four: scores worked out from the formula."""
    from math import log

    dataset = numbered(["wing lift", "wing drag", "heat flow", "wing wing wing tail"], ["wing", "the lift of a wing"])
    wing, lift = log(1 + 1.5 / 3.5), log(1 + 3.5 / 1.5)
    average = 10 / 4
    short, long = 1.5 * (0.25 + 0.75 * 2 / average), 1.5 * (0.25 + 0.75 * 4 / average)
    single, triple = 1 / (1 + short), 3 / (3 + long)
    pools = retrieval.bm25_pools(dataset, BM25, 10)
    assert pools[0].doc_ids == ("d3", "d0", "d1")
    assert pools[0].scores == pytest.approx([wing * triple, wing * single, wing * single], abs=5e-7)
    assert pools[1].doc_ids == ("d0", "d3", "d1")
    assert pools[1].scores == pytest.approx([(wing + lift) * single, wing * triple, wing * single], abs=5e-7)


def test_title_and_text_are_searched(tiny: Dataset) -> None:
    pools = {pool.query_id: pool for pool in retrieval.bm25_pools(tiny, BM25, 50)}
    assert set(pools["q1"].doc_ids) == {"d1", "q1"}
    assert pools["q2"].doc_ids == ("d2",)


def test_a_query_without_hits_has_an_empty_pool(tiny: Dataset) -> None:
    """Zero scores are no candidates; the query stays, and counts 0."""
    stage = retrieval.first_stage(tiny, BM25, 50)
    assert stage.pools[2] == Pool("q3", (), ())
    assert stage.quality["bm25_recall50"] == pytest.approx((1 + 0.5 + 0) / 3)  # q2's second document is missing
    empty = replace(tiny, documents=(Document("d1", "", ""), Document("d2", "", "the of")))
    assert {pool.doc_ids for pool in retrieval.bm25_pools(empty, BM25, 50)} == {()}
    odd = replace(tiny, queries=(Query("q1", ""), Query("q2", "the of a"), Query("q3", "?! \u2028")))
    assert [pool.doc_ids for pool in retrieval.bm25_pools(odd, BM25, 50)] == [(), (), ()]


@pytest.mark.parametrize("count", [1, 7, 50, 399, 400, 500])
def test_ties_stand_in_corpus_order(count: int) -> None:
    """Also where the cut falls between equal scores."""
    texts = ["heat" if place % 3 else "heat heat wing" for place in range(400)]
    (pool,) = retrieval.bm25_pools(numbered(texts, ["heat wing"]), BM25, count)
    best = [place for place in range(400) if place % 3 == 0]
    order = best + [place for place in range(400) if place % 3]
    assert pool.doc_ids == tuple(f"d{place}" for place in order[:count])
    assert list(pool.scores) == sorted(pool.scores, reverse=True)


def test_renamed_documents_keep_their_places(tiny: Dataset) -> None:
    names = {document.doc_id: f"z{place}" for place, document in enumerate(reversed(tiny.documents))}
    renamed = replace(tiny, documents=tuple(replace(d, doc_id=names[d.doc_id]) for d in tiny.documents))
    before = retrieval.bm25_pools(tiny, BM25, 50)
    after = retrieval.bm25_pools(renamed, BM25, 50)
    assert [pool.doc_ids for pool in after] == [tuple(names[doc] for doc in pool.doc_ids) for pool in before]


@pytest.mark.parametrize("settings", [BM25, STUB], ids=["bm25", "stub"])
def test_a_query_id_that_is_a_document_id_drops_nothing_unless_asked(
    settings: RetrievalSettings, tiny: Dataset
) -> None:
    kept = retrieval.first_stage(tiny, settings, 4).pools
    assert "q1" in kept[0].doc_ids
    dropped = retrieval.first_stage(tiny, settings, 4, drop_self_retrieval=True).pools
    assert "q1" not in dropped[0].doc_ids
    assert kept[1:] == dropped[1:]


def test_settings_that_bm25_cannot_run_with(tiny: Dataset) -> None:
    def error(**changes: object) -> str:
        candidates = changes.pop("candidates", 50)
        with pytest.raises(TilerankError) as caught:
            retrieval.first_stage(tiny, replace(BM25, **changes), candidates)
        return str(caught.value)

    assert error(kind="dense") == "retrieval.kind: no first stage 'dense'; allowed: bm25, stub"
    assert error(k1=-1.0) == "retrieval.k1 must be a finite number of at least 0, found -1.0"
    assert "found nan" in error(k1=float("nan"))
    assert error(b=1.5) == "retrieval.b must be between 0 and 1, found 1.5"
    assert "retrieval.stopwords: 'xx' is not a language that bm25s knows" in error(stopwords="xx")
    assert error(candidates=0) == "workload.candidates must be at least 1, found 0"
    assert error(candidates=-3, kind="stub") == "workload.candidates must be at least 1, found -3"


def test_the_stub_holds_the_relevant_documents_among_random_others(scifact: Dataset) -> None:
    pools = retrieval.stub_pools(scifact, STUB, 50)
    assert [pool.query_id for pool in pools] == [query.query_id for query in scifact.queries]
    for pool in pools:
        assert len(set(pool.doc_ids)) == len(pool.doc_ids) == 50
        assert set(scifact.qrels[pool.query_id]) <= set(pool.doc_ids)
        assert pool.scores == tuple(float(score) for score in range(50, 0, -1))
    fill = {doc for pool in pools for doc in pool.doc_ids}
    assert len(fill) > 4500, "every query draws anew"
    other = retrieval.stub_pools(scifact, replace(STUB, seed=1), 50)
    assert all(a.doc_ids != b.doc_ids for a, b in zip(pools, other, strict=True))
    first_only = replace(scifact, queries=scifact.queries[7:8])
    assert retrieval.stub_pools(first_only, STUB, 50) == pools[7:8], "a pool does not depend on the other queries"


def test_the_stubs_order_does_not_give_the_relevant_document_away() -> None:
    dataset = numbered(["text"] * 200, ["text"] * 100)
    places = [pool.doc_ids.index("d0") for pool in retrieval.stub_pools(dataset, STUB, 50)]
    assert 20 < sum(places) / len(places) < 29
    assert len(set(places)) > 30


def test_the_stub_at_its_limits(tiny: Dataset) -> None:
    pools = {pool.query_id: set(pool.doc_ids) for pool in retrieval.stub_pools(tiny, STUB, 50)}
    assert pools == {key: set(DOCUMENTS) for key in ("q1", "q2", "q3")}, "a small corpus is handed out whole"
    one = {pool.query_id: pool.doc_ids for pool in retrieval.stub_pools(tiny, STUB, 1)}
    assert one["q1"] == ("d1",), "the highest grade stays"
    assert one["q2"] == ("d2",), "a missing document cannot be handed out"
    assert retrieval.first_stage(tiny, STUB, 3).quality == {}


def test_pools_are_read_back_as_they_were_written(tmp_path: Path, tiny: Dataset) -> None:
    path = tmp_path / "pools.jsonl"
    pools = retrieval.bm25_pools(tiny, BM25, 50)
    odd = Pool('q"\u00e9\u2028', ("d\\1", "d 2"), (1.5, 0.000001))
    retrieval.write_pools(path, (*pools, odd, Pool("none", (), ())))
    assert retrieval.read_pools(path) == (*pools, odd, Pool("none", (), ()))
    assert path.read_text().splitlines()[-2].endswith('"doc_ids": ["d\\\\1", "d 2"], "scores": [1.500000, 0.000001]}')


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"query_id": "q", "doc_ids": ["d"], "scores": []}',
        '{"query_id": "q", "doc_ids": [1], "scores": [1]}',
    ],
)
def test_damaged_pools_name_the_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "pools.jsonl"
    path.write_text('{"query_id": "q1", "doc_ids": ["d"], "scores": [1.0]}\n' + line + "\n")
    with pytest.raises(TilerankError, match=r"pools.jsonl:2: not a pool; run `dvc repro retrieve`"):
        retrieval.read_pools(path)
    with pytest.raises(TilerankError, match=r"absent: No such file or directory; run `dvc repro retrieve`"):
        retrieval.read_pools(tmp_path / "absent")


MADE = """
import sys
from pathlib import Path
from tilerank import retrieval
from tilerank.config import RetrievalSettings
from tilerank.types import Dataset, Document, Query

words = "wing heat flow drag lift shock wave plate".split()
texts = [" ".join(words[j % 8] for j in range(i, i * i % 37)) for i in range(300)]
documents = tuple(Document(f"d{i}", words[i % 8], text) for i, text in enumerate(texts))
queries = tuple(Query(f"q{i}", f"{words[i % 8]} {words[i * 3 % 8]}") for i in range(40))
made = Dataset("made", documents, queries, {query.query_id: {"d7": 1} for query in queries})
for kind in ("bm25", "stub"):
    settings = RetrievalSettings(kind, 1.5, 0.75, "en", 3)
    retrieval.write_pools(Path(sys.argv[1] + kind), retrieval.first_stage(made, settings, 50).pools)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def test_same_bytes_in_other_processes_without_torch(tmp_path: Path) -> None:
    written = []
    for seed in ("1", "77"):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", MADE, str(tmp_path / seed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        written.append([(tmp_path / (seed + kind)).read_bytes() for kind in ("bm25", "stub")])
    assert written[0] == written[1]
    assert len(written[0][0].splitlines()) == 40
