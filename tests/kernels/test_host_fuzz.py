"""The fuzz over the host build: the kernels on the CPU, judged as on a device (see `tests/kernels/fuzz.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.kernels import fuzz
from tilerank.kernels import build, library, registry, torch_ops

pytestmark = pytest.mark.slow

# On the CPU the operators pass no workspace.
ROWS = [
    row for row in registry.attention_rows() if row.device == "cuda" and row.host_exempt is None and not row.workspace
]
LONGEST = 130  # the emulator takes a second for what a device does in no time


@pytest.fixture(scope="module")
def emulated() -> Iterator[None]:
    """`tilerank.attention` takes the rows of the host build for CPU tensors."""
    with pytest.MonkeyPatch.context() as patch:
        built = library.load(build.Target("host"))
        rows = tuple(replace(row, device="cpu", min_sm=0, dtype_min_sm={}) for row in ROWS)
        patch.setattr(torch_ops, "_library", lambda: built)
        patch.setattr(registry, "attention_rows", lambda: rows)
        torch_ops._choose.cache_clear()
        yield
    torch_ops._choose.cache_clear()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_random_calls(emulated: None, row: registry.Row) -> None:
    drawn = (fuzz.draw_case(row, seed) for seed in range(200))
    fuzz.check([case for case in drawn if max(*case.q_lengths, *case.k_lengths) < LONGEST][:40], "cpu")
