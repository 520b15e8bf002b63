"""The target on a CPU: against sentence-transformers as people call it, in one process, taking turns."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tilerank.bench import rerank
from tilerank.bench.rerank import CROSS_ENCODER, OURS, Call, RerankSetup
from tilerank.bench.timing import Case, WallClock, measure

TARGET = 1.7
ROUNDS = 3


@pytest.mark.slow
def test_fifty_passages_against_cross_encoder(
    cross_encoder_dir: Path, scifact_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """50 SciFact passages in fp32, against the quicker of the peer's own batch size, 32, and 8, which suits a CPU."""
    lines = (scifact_dir / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in random.Random(0).sample(lines, 50)]
    passages = tuple(f"{record.get('title', '')} {record['text']}".strip() for record in records)
    call = Call("does aspirin reduce the risk of cancer in adults", passages)
    setup = RerankSetup(cross_encoder_dir, "cross-encoder", "cpu", 512, "auto", 8)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (scores,) = rerank._score_all(setup, "fp32", [call])
        peer = rerank._peers(setup, "fp32")[CROSS_ENCODER]
        systems = {
            OURS: partial(rerank._score, rerank.make_reranker(setup, "fp32"), call),
            **{f"{CROSS_ENCODER} {size}": partial(peer, call, size) for size in (8, 32)},
        }
        cases = [Case(name, run, rerank._error_against(scores), 4e-5) for name, run in systems.items()]
        rows = {row.name: row for row in measure(cases, WallClock("cpu"), warmup=0, rounds=ROUNDS)}
    finally:
        torch.set_num_threads(before)
    assert [row.failure for row in rows.values()] == [None] * 3
    ours, *theirs = (np.array(row.seconds) for row in rows.values())
    ratios = {name: float(np.median(times / ours)) for name, times in zip(list(rows)[1:], theirs, strict=True)}
    with capsys.disabled():
        print({**{name: row.verdict for name, row in rows.items()}, **ratios})
    assert min(ratios.values()) >= TARGET
