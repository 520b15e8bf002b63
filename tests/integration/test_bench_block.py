"""The attention block's benchmark: verdicts without a GPU, records from rows, the chart, and BERT with the block in."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from tests.kernels import block_reference
from tilerank.bench import bert_large, block
from tilerank.bench.block import CHECK_SHAPES, UNFUSED, Shape
from tilerank.bench.timing import Row
from tilerank.kernels import registry


def row(name: str, us: float, error: float = 1e-6) -> Row:
    return Row(name, tuple(us * factor / 1e6 for factor in (0.99, 1, 1.01)), error, tolerance=1e-5)


def test_shapes_checked_without_a_gpu_see_every_option() -> None:
    assert {shape.head_dim for shape in CHECK_SHAPES} == {32, 64, 80, 96, 128}
    for option in ("causal", "pre_ln"):
        assert {getattr(shape, option) for shape in CHECK_SHAPES} == {False, True}


@pytest.mark.parametrize("shape", CHECK_SHAPES, ids=str)
def test_the_unfused_block_is_the_independent_reference(shape: Shape) -> None:
    inputs = block.make_inputs(shape, torch.float32, "cpu")
    exact = block_reference.exact(inputs.tensors, shape.heads, shape.head_dim, causal=shape.causal, pre_ln=shape.pre_ln)
    torch.testing.assert_close(inputs.exact, exact, rtol=0, atol=1e-12)
    assert 0 < inputs.unfused_error < 1e-5


def test_a_wrong_result_has_a_failure_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = CHECK_SHAPES[0]
    assert "failure" not in block.check_precision("bf16", [shape])
    prepare = block.block_call

    def damaged(*arguments: Any) -> Any:
        run, out = prepare(*arguments)
        return (lambda: run().mul_(1.1)), out

    monkeypatch.setattr(block, "block_call", damaged)
    record = block.check_precision("bf16", [shape])
    assert "is above" in record["failure"]
    assert "max_abs_error" not in record


def test_shape_record() -> None:
    peers = [row(UNFUSED, 60), row("unfused, sdpa flash", 50), Row("unfused, sdpa math", (), math.nan, 1e-5)]
    record = block.shape_record(row("naive", 40), peers)
    assert (record["us"], record["unfused_us"]) == (pytest.approx(40), pytest.approx(60))
    assert record["speedup_vs_unfused"] == pytest.approx(1.5)
    assert (record["best_peer"], record["best_peer_us"]) == ("unfused, sdpa flash", pytest.approx(50))
    json.dumps(record, allow_nan=False)
    assert set(block.shape_record(Row("naive", (), 2.0, 1e-5), peers)) == {"failure"}


def test_auto_says_which_row_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    names = {row.name: row for row in registry.rows_of("block")}
    assert block.chosen(Shape(512), "fp16", "cuda") == names["wide_tiles"]
    assert block.chosen(Shape(512, head_dim=128), "fp16", "cuda") == names["warpgroup_block"]
    assert block.chosen(Shape(512), "fp32", "cuda") == names["split_groups"]
    assert block.chosen(Shape(512, head_dim=128), "fp32", "cuda") == names["split_tf32"]
    assert block.chosen(Shape(512, width=1020), "fp16", "cuda") == names["two_launches"]
    assert block.passed_over(Shape(512), "fp16", "cuda") == (names["two_launches"], names["warpgroup_block"])
    assert block.passed_over(Shape(512), "fp32", "cuda") == (names["split_tf32"],)
    assert block.passed_over(Shape(512, head_dim=128), "fp32", "cuda") == ()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert block.chosen(Shape(512), "bf16", "cuda") == names["two_launches"]


def test_rows_record() -> None:
    lengths = {
        128: {"variant": "quick", "us": 20.0, "other_rows_us": {"slow": 40.0}},
        512: {"variant": "quick", "failure": "no", "other_rows_us": {"slow": 90.0}},
        4096: {"variant": "quick", "us": 700.0},
    }
    assert block.rows_record(lengths) == {
        "quick": {"tokens_128_us": 20.0, "tokens_4096_us": 700.0},
        "slow": {"tokens_128_us": 40.0, "tokens_512_us": 90.0},
    }


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_chart_draws_what_was_timed(tmp_path: Any, suffix: str) -> None:
    records = {
        "fp16": {128: {"us": 20.0, "unfused_us": 40.0}, 256: {"us": 30.0, "unfused_us": 50.0}, 512: {"failure": "no"}},
        "fp32": {128: {"failure": "no"}},
    }
    path = tmp_path / f"chart.{suffix}"
    block.draw_chart(records, path)
    assert path.stat().st_size > 1000


# --- BERT ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_bert_with_the_block_swapped_in_is_the_same_model() -> None:
    ids = torch.arange(14).reshape(2, 7)
    plain = bert_large.make_model(2, 32, 4, "sdpa")
    swapped = bert_large.swap_attention(bert_large.make_model(2, 32, 4, "sdpa"))
    expected = plain(input_ids=ids).last_hidden_state
    torch.testing.assert_close(swapped(input_ids=ids).last_hidden_state, expected, atol=2e-5, rtol=2e-5)
    torch.nn.init.normal_(swapped.encoder.layer[0].attention.self.value.bias)
    assert not torch.allclose(swapped(input_ids=ids).last_hidden_state, expected, atol=1e-3)


@torch.no_grad()
def test_what_is_timed_is_the_model() -> None:
    ids = torch.arange(14).reshape(2, 7)
    for implementation in ("eager", "sdpa"):
        model = bert_large.make_model(2, 32, 4, implementation)
        assert torch.equal(bert_large._forward(model, ids)(), model(input_ids=ids).last_hidden_state)


def test_a_mask_is_refused() -> None:
    swapped = bert_large.swap_attention(bert_large.make_model(1, 32, 4, "sdpa"))
    mask = torch.tensor([[1, 1, 0]])
    with pytest.raises(ValueError, match="attention_mask is given"), torch.no_grad():
        swapped(input_ids=torch.tensor([[1, 2, 3]]), attention_mask=mask)


def test_length_record() -> None:
    rows = [
        row("eager", 400),
        row("sdpa", 300),
        row("sdpa in a graph", 200),
        row("tilerank", 250),
        row("tilerank in a graph", 100),
    ]
    record = bert_large.length_record(rows, 1000)
    assert record["system"] == "tilerank in a graph"
    assert record["tokens_per_s"] == pytest.approx(1000 / 100e-6)
    assert record["best_peer"] == "sdpa in a graph"
    assert record["speedup_vs_best_peer"] == pytest.approx(2.0)
    assert record["eager_tokens_per_s"] == pytest.approx(1000 / 400e-6)
    failed = [Row(name, (), 2.0, 1e-5) for name in ("tilerank", "tilerank in a graph")]
    assert set(bert_large.length_record([*rows[:3], *failed], 1000)) == {"failure"}
