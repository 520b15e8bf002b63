"""Peers, the end-to-end benchmark and the baseline profile, on small random models and real tokenizers."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import merge_json, write_own_attention, write_tiny_bert

from tilerank.bench import baseline, forward, rerank
from tilerank.bench.peers import HuggingFaceScorer, SentenceTransformersScorer, TunedScorer, arithmetic
from tilerank.bench.rerank import (
    CACHED,
    CROSS_ENCODER,
    OURS,
    TUNED,
    Call,
    ErrorLimits,
    ErrorLog,
    Rerankers,
    RerankSetup,
)
from tilerank.bench.timing import Row
from tilerank.errors import TilerankError
from tilerank.profiling import NsysError, run_nsys
from tilerank.quality import Task
from tilerank.reranker import Reranker
from tilerank.token_cache import write_tokens
from tilerank.tokenization import Tokens, load_tokenizer

WORDS = ("does", "aspirin", "reduce", "fever", "in", "adults", "the", "of", "with", "infection", "heart", "risk")
QUERY = "does aspirin reduce fever"
PASSAGES = ("aspirin", "", "the heart of the infection " * 3, "fever in adults with infection risk " * 9, "risk " * 60)
SCORERS = (HuggingFaceScorer, SentenceTransformersScorer, TunedScorer)


@pytest.fixture(scope="module", params=["cross-encoder", "bi-encoder"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A random two-layer BERT of either kind; wide initial weights, so that wrong attention shows in the scores."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*special, *WORDS]))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    path = tmp_path_factory.mktemp(request.param)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{name.strip('[]').lower()}_token": name for name in special},
    ).save_pretrained(path)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.5,
        num_labels=1,
    )
    torch.manual_seed(0)
    family = BertForSequenceClassification if request.param == "cross-encoder" else BertModel
    family(config).save_pretrained(path)
    return path, request.param


def setup_of(model: tuple[Path, str], batch_size: int = 4) -> RerankSetup:
    path, kind = model
    return RerankSetup(path, kind, "cpu", max_length=48, attention="sdpa", batch_size=batch_size)


def test_all_peers_give_the_unmodified_models_scores(model: tuple[Path, str]):
    path, kind = model
    exact = HuggingFaceScorer(path, kind, "fp64", "cpu", 48, batch_size=2).score(QUERY, PASSAGES)
    assert exact.dtype == np.float64
    assert len(set(exact.round(3))) == len(PASSAGES)  # the passages can be told apart
    for scorer in SCORERS:
        scores = scorer(path, kind, "fp32", "cpu", 48, batch_size=2).score(QUERY, PASSAGES)
        assert scores.dtype == np.float32
        assert np.abs(scores - exact).max() < 1e-4, scorer.__name__
        half = scorer(path, kind, "bf16", "cpu", 48, batch_size=2).score(QUERY, PASSAGES)
        assert 1e-4 < np.abs(half - exact).max() < 1, scorer.__name__  # the dtype asked for is the one that runs
        assert scorer(path, kind, "fp32", "cpu", 48).score(QUERY, ()).shape == (0,)
    many = SentenceTransformersScorer(path, kind, "fp32", "cpu", 48)
    pairs = [*((QUERY, passage) for passage in PASSAGES), ("heart risk", PASSAGES[3])]
    expected = [*exact, *many.score("heart risk", PASSAGES[3:4])]
    np.testing.assert_allclose(many.score_pairs(pairs), expected, atol=1e-4, rtol=0)


LONG = ("risk of infection " * 30, "fever")


@pytest.mark.parametrize("passages", [PASSAGES, PASSAGES[1:2], LONG, ("\u00e9 aspirin \U0001f600", *LONG)])
@pytest.mark.parametrize("query", [QUERY, "", "heart risk " * 40])
def test_inputs_are_those_of_the_tokenizer_call(model: tuple[Path, str], query: str, passages: tuple[str, ...]):
    scorer = HuggingFaceScorer(*model, "fp32", "cpu", 48, batch_size=2)
    ours = scorer.inputs(query, passages)
    theirs = [scorer.tokenize(texts) for texts in scorer.batches(query, passages)]
    assert len(ours) == len(theirs) > 0
    for batch, expected in zip(ours, theirs, strict=True):
        assert batch.keys() == expected.keys()
        for name, values in batch.items():
            assert values.dtype == expected[name].dtype
            assert torch.equal(values, expected[name]), name


def test_inputs_are_padded_and_cut_at_the_tokenizer_s_own_side(model: tuple[Path, str], tmp_path: Path):
    shutil.copytree(model[0], tmp_path / "left")
    merge_json(tmp_path / "left" / "tokenizer_config.json", {"padding_side": "left", "truncation_side": "left"})
    scorer = HuggingFaceScorer(tmp_path / "left", model[1], "fp32", "cpu", 48)
    (ours,), (texts,) = scorer.inputs(QUERY, LONG), scorer.batches(QUERY, LONG)
    theirs = scorer.tokenize(texts)
    assert not theirs["attention_mask"][-1, 0]
    assert all(torch.equal(values, theirs[name]) for name, values in ours.items())


@pytest.mark.parametrize("family", ["MPNet", "DebertaV2"])
def test_peers_of_a_model_that_has_no_sdpa(tmp_path: Path, family: str):
    path = write_own_attention(tmp_path / "own", write_tiny_bert(tmp_path / "bert"), family)
    exact, *found = (
        scorer(path, "cross-encoder", precision, "cpu", 48, batch_size=2).score(QUERY, PASSAGES)
        for scorer, precision in [(HuggingFaceScorer, "fp64"), *((each, "fp32") for each in SCORERS)]
    )
    for scores in found:
        np.testing.assert_allclose(scores, exact, atol=5e-5, rtol=0)


def test_peers_of_a_model_that_has_sdpa_run_it(model: tuple[Path, str]):
    scorer = HuggingFaceScorer(*model, "fp32", "cpu", 48)
    assert scorer._model.config._attn_implementation == "sdpa"
    theirs = SentenceTransformersScorer(*model, "fp32", "cpu", 48)._model
    assert next(iter(theirs.modules())).transformers_model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("scorer", SCORERS)
def test_peers_refuse_what_they_cannot_run(model: tuple[Path, str], scorer: type):
    path, kind = model
    with pytest.raises(ValueError, match="int8"):
        scorer(path, kind, "int8", "cpu", 48)
    with pytest.raises(ValueError, match="batch_size"):
        scorer(path, kind, "fp32", "cpu", 48, batch_size=0)


def test_arithmetic_restores_the_process_setting():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with arithmetic("tf32"):
        assert matmul.fp32_precision == "tf32"
        with arithmetic("fp32"):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    assert matmul.fp32_precision == before


def token_cache(setup: RerankSetup, folder: Path) -> Path:
    """A cache of one of the passages, so that the others take the tokenizer."""
    tokenizer = load_tokenizer(setup.path, setup.max_length)
    write_tokens(folder / "passages.tokens", tokenizer.digest, tokenizer.encode, PASSAGES[2:4])
    return folder / "passages.tokens"


def bench_precision(setup: RerankSetup, calls: tuple[Call, ...], rounds: int) -> dict[str, Any]:
    reference = rerank.reference_scores(setup, calls)
    limits = rerank.error_limits(setup, "fp32", calls, reference)
    rerankers = Rerankers.of(setup, "fp32")
    return rerank.bench_precision(setup, "fp32", rerankers, calls, reference, limits, rounds)


def bench_steps(setup: RerankSetup, precision: str, calls: tuple[Call, ...], rounds: int) -> dict[str, Any]:
    reference = rerank.reference_scores(setup, calls)
    limits = rerank.error_limits(setup, precision, calls, reference)
    rerankers = Rerankers.of(setup, precision)
    return rerank.bench_steps(setup, precision, rerankers, calls, reference, limits, rounds)


def test_rerank_record(model: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(rerank.BATCH_SIZES, "cpu", (2, 4))
    setup = replace(setup_of(model), token_cache=token_cache(setup_of(model), tmp_path))
    calls = (Call(QUERY, PASSAGES), Call("heart risk", PASSAGES[:3]))
    record = bench_precision(setup, calls, rounds=3)
    assert "failures" not in record
    assert record["repetitions"] == 6
    assert 0 < record["p10_ms"] <= record["ms"] <= record["p90_ms"]
    assert record["cached_ms"] > 0
    for name in (OURS, CACHED, CROSS_ENCODER, TUNED):
        assert record["max_abs_error"][name] <= record["tolerance"]
        assert 0 < record["rms_error"][name] <= min(record["rms_tolerance"], record["max_abs_error"][name])
    for name in (CROSS_ENCODER, TUNED):
        assert record["batch_sizes"][name] in (2, 4)
        assert record[f"speedup_vs_{name}"] == pytest.approx(record[f"{name}_ms"] / record["ms"])
    assert (record["host_path"], record["attention"], record["tokenizer"]) == ("prepacked", "sdpa", "tokenizers")
    json.dumps(record, allow_nan=False)
    padded, alone = replace(setup, host_path="padded", token_cache=None), calls[:1]
    named = bench_precision(padded, alone, rounds=1)
    assert named["host_path"] == "padded"
    assert "cached_ms" not in named


def test_steps_of_the_host_path(model: tuple[Path, str], tmp_path: Path):
    setup = replace(setup_of(model), token_cache=token_cache(setup_of(model), tmp_path))
    calls = (Call(QUERY, PASSAGES), Call("heart risk", PASSAGES[:3]))
    steps = bench_steps(setup, "fp32", calls, rounds=2)
    assert list(steps) == ["padded", "fast_tokens", "packed", "prepacked", "cached"]
    for step in steps.values():
        assert 0 < step["p10_ms"] <= step["ms"] <= step["p90_ms"]
        assert all(step[f"{phase}_ms"] > 0 for phase in rerank.PHASES)
    forward, scores = (sum(step[f"{phase}_ms"] for step in steps.values()) for phase in ("forward", "scores"))
    assert forward > scores
    half = bench_steps(replace(setup, token_cache=None), "bf16", calls, rounds=1)
    assert list(half) == ["padded", "fast_tokens", "packed"]
    json.dumps(steps, allow_nan=False)


def test_a_wrong_step_has_no_time(model: tuple[Path, str], monkeypatch: pytest.MonkeyPatch):
    setup = setup_of(model)
    right = rerank.score
    monkeypatch.setattr(
        rerank, "score", lambda ours, call: right(ours, call) + (0.1 if ours.host_path.name == "packed" else 0)
    )
    steps = bench_steps(setup, "fp32", (Call(QUERY, PASSAGES),), rounds=1)
    assert "above" in steps["packed"]["failure"]
    assert "ms" not in steps["packed"]
    assert steps["prepacked"]["ms"] > 0


def test_many_queries_at_once(model: tuple[Path, str]):
    setup, calls = setup_of(model), (Call(QUERY, PASSAGES), Call("heart risk", PASSAGES[:3]))
    record = rerank.bench_many(setup, "fp32", Rerankers.of(setup, "fp32"), calls, 2)
    assert record["many_pairs"] == 8
    assert 0 < record["pairs_per_s"] < 1e6
    assert record["cross_encoder_pairs_per_s"] > 0
    assert record["many_batch_size"] == 32


def test_forward_record(model: tuple[Path, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forward, "SEED_LENGTHS", (40, 3, 17, 60))
    record = forward.bench_forward(setup_of(model), "fp32", warmup=0, rounds=2)
    assert "failures" not in record
    assert set(record["max_abs_error"]) == {"tilerank", "packed_library", "transformers_sdpa"}
    for name in ("packed_library", "transformers_sdpa"):
        assert record[f"speedup_vs_{name}"] == pytest.approx(record[f"{name}_ms"] / record["ms"])
    assert record["rms_error"]["tilerank"] < record["max_abs_error"]["tilerank"] < record["tolerance"]
    right = Reranker.forward_of

    def wrong_for_others(ours: Reranker, tokens: Tokens) -> Callable[[], torch.Tensor]:
        """Right for what is timed, but not for every list of ids."""
        run = right(ours, tokens)
        is_timed = np.array_equal(tokens.ids, forward.seed_tokens(17, forward.SEED_LENGTHS).ids[: len(tokens.ids)])
        return run if is_timed else lambda: run() + 1

    monkeypatch.setattr(Reranker, "forward_of", wrong_for_others)
    wrong = forward.bench_forward(setup_of(model), "fp32", warmup=0, rounds=1)
    assert set(wrong["failures"]) == {"tilerank", "packed_library"}
    assert not {"ms", "packed_library_ms", "speedup_vs_transformers_sdpa"} & set(wrong)


def test_phases_add_up_to_the_call(model: tuple[Path, str]):
    reranker = rerank.make_reranker(setup_of(model), "fp32")
    call = Call(QUERY, PASSAGES)
    start = time.perf_counter()
    phases = rerank.time_phases(reranker, call)
    total = time.perf_counter() - start
    assert list(phases) == list(rerank.PHASES)
    assert 0.5 * total < sum(phases.values()) <= total
    pairs = [(QUERY, passage) for passage in PASSAGES]
    np.testing.assert_array_equal(reranker.score_in_steps(pairs, lambda: None), reranker.score(pairs).logits)


def test_a_wrong_reranker_has_no_time(model: tuple[Path, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(rerank.BATCH_SIZES, "cpu", (4,))
    setup = setup_of(model)
    calls = (Call(QUERY, PASSAGES),)
    right = rerank.score
    monkeypatch.setattr(rerank, "score", lambda ours, call: right(ours, call)[::-1])
    record = bench_precision(setup, calls, rounds=2)
    assert "above" in record["failures"][OURS]
    assert not {"ms", "p90_ms", "speedup_vs_tuned_peer"} & set(record)
    assert record["tuned_peer_ms"] > 0


def log_of(*errors: list[float]) -> ErrorLog:
    log = ErrorLog()
    for one in errors:
        log.against(np.zeros(len(one)))(np.array(one))
    return log


def test_summarise_pools_calls_and_names_noise():
    def rows(name: str, *seconds: tuple[float, ...]) -> list[Row]:
        return [Row(name, times, error=1e-6, tolerance=1e-5) for times in seconds]

    seconds = {
        OURS: rows(OURS, (0.1, 0.1), (0.3, 0.3)),
        CROSS_ENCODER: rows(CROSS_ENCODER, (0.4, 0.4), (0.8, 0.8)),
        TUNED: rows(TUNED, (0.05, 0.2), (0.1, 0.9)),
    }
    logs = {name: log_of([1e-6, -1e-6], [0, 0]) for name in seconds}
    record = rerank.summarise(seconds, logs, ErrorLimits(1e-5, 1e-6))
    assert record["ms"] == pytest.approx(200)
    assert record["speedup_vs_cross_encoder"] == pytest.approx(3)
    assert record["noise"] == ["speedup_vs_tuned_peer"]
    assert record["rms_error"][OURS] == pytest.approx(1e-6 / 2**0.5)
    # Off everywhere, and nowhere by much.
    logs[TUNED] = log_of([4e-6] * 4)
    record = rerank.summarise(seconds, logs, ErrorLimits(1e-5, 1e-6))
    assert list(record["failures"]) == [TUNED]
    assert "4e-06 (root mean square) against float64 is above 1e-06" in record["failures"][TUNED]
    assert "tuned_peer_ms" not in record


def test_limits_are_twice_the_unmodified_model_s_errors_over_all_calls():
    exact = [np.zeros(4), np.zeros(2)]
    scores = [np.array([0.3, -0.5, 0, 0]), np.array([0, 0.1])]
    limits = ErrorLimits.of("bf16", scores, exact)
    assert limits.largest == pytest.approx(1.0)
    assert limits.rms == pytest.approx(2 * (0.35 / 6) ** 0.5)
    assert ErrorLimits.of("bf16", exact, exact) == ErrorLimits(0.1, 0.025)  # exact by luck
    log = ErrorLog()
    assert log.against(exact[1])(np.array([0.9, 0])) == pytest.approx(0.9)
    assert "above" in log.failure(limits)  # 0.9 is allowed, 0.64 on average is not
    few = log_of([0.9, *[0.0] * 9])
    assert few.failure(limits) is None
    for wrong in ([1.1, *[0.0] * 99], [float("nan"), *[0.0] * 99]):
        assert "above" in log_of(wrong).failure(limits)


def test_the_quickest_batch_size_is_taken():
    def system(call: Call, batch_size: int) -> np.ndarray:
        time.sleep(0 if batch_size == 16 else 0.02)
        return np.zeros(1, np.float32)

    assert rerank._best_batch_size("a", system, Call("q", ("p",)), (8, 16, 32), repetitions=2) == 16


def test_calls_of_leaves_out_queries_without_candidates():
    task = Task({}, {"q1": "one", "q2": "two"}, {"q1": (), "q2": ("d1",)}, {"d1": "text"})
    assert rerank.calls_of(task) == (Call("two", ("text",)),)
    with pytest.raises(TilerankError, match="nothing to time"):
        rerank.calls_of(Task({}, {"q1": "one"}, {"q1": ()}, {}))


def test_profile_accounts_for_all_of_the_time(model: tuple[Path, str], tmp_path: Path):
    trace = tmp_path / "trace.json.gz"
    calls = (Call(QUERY, PASSAGES), Call("heart risk", PASSAGES))
    record = baseline.profile_baseline(setup_of(model, batch_size=64), calls, rounds=2, trace=trace)
    within = record["within_forward"]
    assert sum(within.values()) == pytest.approx(1)
    assert all(within[name] > 0 for name in ("attention", "gemm", "norm", "activation", "other", "host"))
    assert record["tokenize_share"] > record["tensors_share"] > 0
    assert record["tokenize_share"] + record["forward_share"] < 1
    assert record["attention_share"] == pytest.approx(record["forward_share"] * within["attention"])
    assert record["amdahl_ceiling"] == pytest.approx(1 / (1 - record["attention_share"]))
    assert record["repetitions"] == 4
    assert record["process_peak_mb"] > 50
    json.dumps(record, allow_nan=False)
    with gzip.open(trace, "rt", encoding="utf-8") as stream:
        names = {event["name"] for event in json.load(stream)["traceEvents"]}
    assert {"tokenize", "tensors", "forward", "scores", "aten::scaled_dot_product_attention"} <= names


def test_operators_belong_to_the_outermost_class():
    assert baseline.operator_class(["aten::addmm", "aten::linear", "forward"]) == "gemm"
    assert baseline.operator_class(["aten::bmm", "aten::matmul", "aten::scaled_dot_product_attention"]) == "attention"
    assert baseline.operator_class(["aten::native_layer_norm", "aten::layer_norm"]) == "norm"
    assert baseline.operator_class(["aten::add", "forward"]) == "other"


def test_gpu_shares_come_from_unprofiled_wall_times():
    """On a GPU the profiler slows the host: what counts is kernel time over the forward's time without it."""
    steps = {"tokenize": 0.030, "tensors": 0.010, "transfer": 0.0, "forward": 0.060, "scores": 0.0}
    times = [baseline.StepTimes(steps, enqueue=0.055)] * 3
    classes = {"attention": 0.015, "gemm": 0.020, "norm": 0.0, "activation": 0.0, "other": 0.005}
    seen = baseline.ForwardProfile(calls=1, wall=0.500, classes=classes, launches=80, operators=400)
    record = baseline.profile_record(times, [0.060], seen, "cuda")
    assert record["within_forward"]["attention"] == pytest.approx(0.25)
    assert record["within_forward"]["host"] == pytest.approx(1 / 3)
    assert record["attention_share"] == pytest.approx(0.15)
    assert record["gemm_share"] == pytest.approx(0.20)
    assert record["tokenize_share"] == pytest.approx(0.40)
    assert record["amdahl_ceiling"] == pytest.approx(1 / 0.85)
    assert (record["launches"], record["device_ms"], record["host_ms"]) == (80, pytest.approx(40), pytest.approx(55))


def test_the_timeline_driver_makes_the_calls_it_is_given(
    model: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = tmp_path / "calls.json"
    setup, call = setup_of(model), Call(QUERY, PASSAGES)
    baseline.write_calls(calls, setup, [call, call])
    made = []
    monkeypatch.setattr(baseline, "time_steps", lambda scorer, call, device: made.append((call, device)))
    monkeypatch.setattr(baseline, "make_scorer", lambda given: made.append(given))
    monkeypatch.setattr(sys, "argv", ["baseline", str(calls)])
    baseline.main()
    assert made == [setup, (call, "cpu"), (call, "cpu")]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('for a in "$@"; do case $a in --output=*) touch "${a#--output=}.nsys-rep";; esac; done', None),
        ('for a in "$@"; do case $a in --output=*) touch "${a#--output=}.qdstrm";; esac; done; echo sorry', "sorry"),
        ("echo 'no permission' >&2; exit 2", "exit code 2: no permission"),
        (None, "not on the PATH"),
    ],
)
def test_a_timeline_or_the_reason_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str | None, reason: str | None
):
    if body is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        tool = tmp_path / "nsys"
        tool.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    if reason is None:
        assert run_nsys(["true"], tmp_path / "timeline") == tmp_path / "timeline.nsys-rep"
    else:
        with pytest.raises(NsysError, match=reason):
            run_nsys(["true"], tmp_path / "timeline")
