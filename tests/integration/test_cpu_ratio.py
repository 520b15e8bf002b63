"""The benchmark against sentence-transformers on a CPU, and its target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import write_tiny_bert

from tilerank.bench import cpu_ratio
from tilerank.errors import TilerankError

TARGET = 1.7
"""At sentence-transformers' own batch size. At 8 its sorted batches hold next to no padding: docs/host_path.md has what
bounds the ratio there."""
DEFAULT_BATCH_SIZE = "32"


def test_ratios_of_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_bert(tmp_path / "m")
    ratios = cpu_ratio.measure_ratios(model, ["bone cancer", "the heart of a mouse " * 9, ""], max_length=64, rounds=2)
    assert ratios["host_path"] == "prepacked"
    assert list(ratios["cross_encoder"]) == ["8", "32"]
    for figures in ratios["cross_encoder"].values():
        assert figures["ms"] > 0
        assert figures["ratio"] > 0
        assert figures["rows"] >= 1
    right = cpu_ratio.rerank.score
    monkeypatch.setattr(cpu_ratio.rerank, "score", lambda ours, call: right(ours, call) + 1e-3)
    with pytest.raises(TilerankError, match=r"tilerank: error (0\.00099|0\.001)"):
        cpu_ratio.measure_ratios(model, ["bone cancer"], max_length=64, rounds=1)


def test_passages_of_a_corpus(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"_id": "1", "title": "A", "text": "b"}\n{"_id": "2", "text": "c "}\n', encoding="utf-8")
    assert sorted(cpu_ratio.read_passages(corpus, 50)) == ["A b", "c"]
    assert len(cpu_ratio.read_passages(corpus, 1)) == 1
    corpus.write_text('{"title": "A"}\n', encoding="utf-8")
    with pytest.raises(TilerankError, match="is no BEIR corpus"):
        cpu_ratio.read_passages(corpus, 1)


@pytest.mark.slow
def test_fifty_passages_against_cross_encoder(
    cross_encoder_dir: Path, scifact_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own: threads that wait for each other must not spin where others want the cores."""
    answer = subprocess.run(
        [sys.executable, "-m", "tilerank.bench.cpu_ratio", str(cross_encoder_dir), str(scifact_dir / "corpus.jsonl")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": str(cpu_ratio.THREADS),
            "OMP_WAIT_POLICY": "passive",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    ratios = json.loads(answer.stdout)
    with capsys.disabled():
        print(answer.stdout)
    assert ratios["host_path"] == "prepacked"
    assert ratios["cross_encoder"][DEFAULT_BATCH_SIZE]["ratio"] >= TARGET
    for size, figures in ratios["cross_encoder"].items():
        assert figures["ratio"] > figures["rows"], f"batch size {size}: no sooner than its padding would make it"
