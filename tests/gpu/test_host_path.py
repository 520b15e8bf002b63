"""The host paths on a device: packed batches, graphs, many queries at once. Scores are held to the padded model's."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import WORDS, write_tiny_bert

from tilerank import Reranker, graphs, host_path
from tilerank.bench.peers import HuggingFaceScorer
from tilerank.encoder import PackedEncoder

pytestmark = pytest.mark.gpu

QUERY = "high risk of bone cancer"
PATHS = [path.name for path in host_path.of_device("cuda")]
PRECISIONS = ["fp32", "tf32", "fp16", "bf16"]


def passages(count: int, longest: int = 90, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, longest))) for _ in range(count)]


@pytest.fixture(scope="module", params=["cross-encoder", "bi-encoder"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp(request.param), request.param, positions=128)


def reranker(folder: Path, path: str = "graphs", precision: str = "fp32", attention: str = "sdpa") -> Reranker:
    return Reranker(folder, device="cuda", precision=precision, attention=attention, max_length=128, host_path=path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_scores_are_the_padded_models(folder: Path, path: str, precision: str) -> None:
    ours = reranker(folder, path, precision)
    texts = passages(70)
    exact, unmodified = (
        HuggingFaceScorer(folder, ours.kind, dtype, "cuda", 128, batch_size=16).score(QUERY, texts)
        for dtype in ("fp64", precision)
    )
    own = np.abs(unmodified - exact).max()
    for batch_size in (None, 9):
        found = ours.score([(QUERY, text) for text in texts], batch_size).logits
        # Products of other shapes round otherwise, by about as much as rounding itself.
        assert np.abs(found - exact).max() <= 3 * own + 1e-6


@pytest.mark.parametrize("attention", ["auto", "naive"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_kernel_runs_packed_and_in_a_graph(tmp_path: Path, attention: str, precision: str) -> None:
    from tilerank.kernels import library

    library.load()
    # One head of 32, which every kernel serves.
    folder = write_tiny_bert(tmp_path / "m", positions=128, config={"num_attention_heads": 1})
    texts = passages(40)
    exact, unmodified = (
        HuggingFaceScorer(folder, "cross-encoder", dtype, "cuda", 128, batch_size=16).score(QUERY, texts)
        for dtype in ("fp64", precision)
    )
    own = np.abs(unmodified - exact)
    for path in ("packed", "graphs"):
        ours = reranker(folder, path, precision, attention)
        assert ours.attention not in ("varlen", "mem_efficient"), ours.attention
        for _ in range(2):
            error = np.abs(ours.score([(QUERY, text) for text in texts]).logits - exact)
            # One text of these weights magnifies each rounding, whichever way it falls: the largest error of 40 may be
            # several times another kernel's where their mean square is not.
            assert rms(error) <= 3 * rms(own) + 1e-6
            assert error.max() <= 8 * own.max() + 1e-6


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def encoder_of(ours: Reranker) -> PackedEncoder:
    assert isinstance(ours.encoder, PackedEncoder)
    return ours.encoder


def test_a_bucket_is_captured_once_and_filled_with_other_texts(folder: Path) -> None:
    ours, eager = reranker(folder), reranker(folder, "packed")
    cache = encoder_of(ours).graphs
    for seed in range(4):
        pairs = [(QUERY, text) for text in passages(40, seed=seed)]
        np.testing.assert_allclose(ours.score(pairs).logits, eager.score(pairs).logits, atol=2e-4, rtol=0)
    report = cache.report()
    assert report.replays == 4
    assert report.captures == report.graphs < 8
    assert report.eager == 0
    assert 0 < report.waste < graphs.TOKEN_STEP * 8 / report.tokens


def test_a_shape_outside_every_bucket_runs_without_a_graph(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_SEQUENCES", 8)
    ours, eager = reranker(folder), reranker(folder, "packed")
    pairs = [(QUERY, text) for text in passages(20)]
    np.testing.assert_allclose(ours.score(pairs).logits, eager.score(pairs).logits, atol=2e-4, rtol=0)
    report = encoder_of(ours).graphs.report()
    assert (report.replays, report.eager) == (0, 1)


def test_graphs_and_their_memory_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 3)
    ours, eager = reranker(folder), reranker(folder, "packed")
    cache = encoder_of(ours).graphs
    largest = [(QUERY, text) for text in passages(100)]
    for each in (ours, eager):  # each stream has a workspace for matrix products
        each.score(largest)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    for count in (1, 10, 20, 40, 80, 40, 1):
        pairs = [(QUERY, text) for text in passages(count)]
        np.testing.assert_allclose(ours.score(pairs).logits, eager.score(pairs).logits, atol=2e-4, rtol=0)
    assert cache.report().graphs == 3
    assert cache.report().captures > 3
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved + (8 << 20)


def test_threads_and_streams_share_a_reranker(folder: Path) -> None:
    ours, eager = reranker(folder, "overlapped"), reranker(folder, "packed")
    work = [[(QUERY, text) for text in passages(30 + 5 * seed, seed=seed)] for seed in range(6)]
    expected = [eager.score(pairs).logits for pairs in work]
    found: list[np.ndarray | None] = [None] * len(work)

    def run(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                found[number] = ours.score(work[number]).logits

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours_now, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours_now, theirs, atol=2e-4, rtol=0)


def test_rank_many_equals_rank(folder: Path) -> None:
    ours = reranker(folder, "overlapped")
    queries = [QUERY, "mouse", "the immune cell of the old page"]
    candidates = [passages(60, seed=1), [], passages(700, seed=2) + passages(700, seed=3)]
    many = ours.rank_many(queries, candidates)
    for query, texts, ranking in zip(queries, candidates, many, strict=True):
        alone = {hit["corpus_id"]: hit["score"] for hit in ours.rank(query, texts)}
        assert [hit["score"] for hit in ranking] == sorted((hit["score"] for hit in ranking), reverse=True)
        assert {hit["corpus_id"] for hit in ranking} == set(alone)
        for hit in ranking:
            assert hit["score"] == pytest.approx(alone[hit["corpus_id"]], abs=2e-4)


def test_a_piece_is_copied_once_in_and_once_out(folder: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    ours = reranker(folder, "overlapped")
    pairs = [(QUERY, text) for text in passages(40)]
    assert len(ours._pieces(len(pairs))) == 2
    ours.score(pairs)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        ours.score(pairs)
        torch.cuda.synchronize()
    copies = [event.name for event in profiler.events() if event.name.startswith("Memcpy")]
    inward = [name for name in copies if "HtoD" in name]
    outward = [name for name in copies if "DtoH" in name]
    # Logits come back piece by piece; cosines when all vectors are there, which need to know where these belong.
    is_pair = ours.kind == "cross-encoder"
    assert len(outward) == (2 if is_pair else 1), copies
    assert len(inward) == (2 if is_pair else 3), copies
    assert not [name for name in [*inward, *outward] if "Pageable" in name], copies
