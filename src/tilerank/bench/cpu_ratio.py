"""How many times sooner than sentence-transformers a query is reranked on this machine's CPU, in fp32.

Both take turns in one process, so that what else the machine does falls on both; the ratio is the median of the turns'.
sentence-transformers is timed at its own batch size, 32, and at 8, which suits a CPU; scores are compared first.

    python -m tilerank.bench.cpu_ratio MODEL CORPUS.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilerank.bench import rerank
from tilerank.bench.timing import Case, WallClock, measure
from tilerank.errors import TilerankError
from tilerank.models import describe, resolve_path

BATCH_SIZES = (8, 32)
THREADS = 2
TOLERANCE = 2 * rerank.ERROR_FLOORS["fp32"]  # ours and the unmodified model's may each be off by the floor
QUERY = "does aspirin reduce the risk of cancer in adults"


def read_passages(corpus: Path, count: int, seed: int = 0) -> tuple[str, ...]:
    """``count`` passages of a BEIR corpus, drawn by ``seed``: title and text."""
    try:
        records = [json.loads(line) for line in corpus.read_text(encoding="utf-8").splitlines()]
        drawn = random.Random(seed).sample(records, min(count, len(records)))
        return tuple(f"{record.get('title') or ''} {record['text']}".strip() for record in drawn)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise TilerankError(f"{corpus} is no BEIR corpus.jsonl ({error})") from error


def measure_ratios(model: Path, passages: Sequence[str], max_length: int = 512, rounds: int = 3) -> dict[str, Any]:
    """``{ms, host_path, cross_encoder: {batch size: {ms, ratio, rows}}}``: medians, ratios theirs / ours by turn, and
    how many rows theirs computes for each token, padding included.

    Raises `TilerankError` when a score differs by more than `TOLERANCE` from the unmodified model's.
    """
    call = rerank.Call(QUERY, tuple(passages))
    kind = describe(model).kind
    setup = rerank.RerankSetup(model, kind, "cpu", max_length, "auto", batch_size=BATCH_SIZES[0])
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        (unmodified,) = rerank.score_all(setup, "fp32", [call])
        ours = rerank.make_reranker(setup, "fp32")
        peer = rerank.peers(setup, "fp32")[rerank.CROSS_ENCODER]
        systems = {rerank.OURS: partial(rerank.score, ours, call)}
        systems |= {str(size): partial(peer, call, size) for size in BATCH_SIZES}
        cases = [Case(name, run, rerank.error_against(unmodified), TOLERANCE) for name, run in systems.items()]
        rows = {row.name: row for row in measure(cases, WallClock("cpu"), warmup=0, rounds=rounds)}
    finally:
        torch.set_num_threads(threads)
    for row in rows.values():
        if row.failure:
            raise TilerankError(f"{row.name}: {row.failure}")
    lengths = ours.tokenizer.pairs([call.query] * len(passages), call.passages).lengths
    seconds = {name: np.array(row.seconds) for name, row in rows.items()}
    mine = seconds.pop(rerank.OURS)
    return {
        "ms": 1e3 * float(np.median(mine)),
        "host_path": ours.host_path.name,
        "cross_encoder": {
            size: {
                "ms": 1e3 * float(np.median(theirs)),
                "ratio": float(np.median(theirs / mine)),
                "rows": _rows(lengths, int(size)),
            }
            for size, theirs in seconds.items()
        },
    }


def _rows(lengths: np.ndarray, batch_size: int) -> float:
    """Rows a token of batches sorted by length, as sentence-transformers makes them, each as long as its longest."""
    descending = np.sort(lengths)[::-1]
    starts = range(0, len(descending), batch_size)
    return float(sum(descending[at] * len(descending[at : at + batch_size]) for at in starts) / descending.sum())


def main() -> None:
    """Print the ratios as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="model folder, or a known model's name")
    parser.add_argument("corpus", type=Path, help="corpus.jsonl of a BEIR data set")
    parser.add_argument("--passages", type=int, default=50)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    passages = read_passages(options.corpus, options.passages)
    print(
        json.dumps(measure_ratios(resolve_path(options.model), passages, options.max_length, options.rounds), indent=2)
    )


if __name__ == "__main__":
    main()
