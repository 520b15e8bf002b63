"""`make quickstart`: the whole pipeline in a copied tree, a table at the end, a clean checkout."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

TINY = ("dataset.passages=300", "dataset.queries=3", "workload.queries=3", "workload.candidates=12")
TINY += ("workload.max_length=32", "machine.rerank_queries=2", "machine.rerank_rounds=1")


def test_quickstart_ends_with_a_table_and_a_clean_tree(project) -> None:
    before = project.check("git status --porcelain")
    printed = project.check("python -m stages.quickstart " + " ".join(TINY))
    report = re.search(r"^Report: (.+)$", printed, flags=re.MULTILINE)
    assert report is not None, printed
    assert Path(report[1]).stat().st_size > 0
    assert "build/quickstart" in report[1]
    for word in ("Workload", "nDCG@10", "Left out: GPU kernels"):
        assert word in printed, printed
    assert project.check("git status --porcelain") == before
    record = json.loads((project.root / "build/quickstart/metrics/cpu/bench_rerank.json").read_text(encoding="utf-8"))
    head = project.check("git rev-parse HEAD").strip()
    assert (record["provenance"]["commit"], record["provenance"]["dirty"]) == (head, False)


def test_make_knows_its_targets(repository: Path) -> None:
    answer = subprocess.run(["make", "help"], cwd=repository, capture_output=True, text=True, check=True)
    for target in ("quickstart", "test", "test-all", "gpu", "ui", "model", "pack", "records-check", "doctor"):
        assert f"make {target} " in answer.stdout
