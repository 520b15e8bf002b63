"""The micro benchmark: its shapes, verdicts without a GPU, records from rows, and (on a GPU) a whole shape."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import types
from typing import Any

import pytest
import torch

from tests.kernels import reference
from tilerank.bench import micro
from tilerank.bench.attention import KernelCall
from tilerank.bench.micro import EAGER, Shape
from tilerank.bench.timing import Row
from tilerank.config import TimingSettings
from tilerank.kernels import registry


def test_shapes_are_named_by_what_they_are():
    assert Shape(512, 64).name == "512x64"
    assert Shape(2048, 64, causal=True).name == "2048x64_causal"
    assert Shape(2048, 64, kv_heads=4).name == "2048x64_kv4"
    assert Shape(512, 64, keys=2048).name == "512x64_keys2048"
    for shapes in (micro.SHAPES, micro.CHECK_SHAPES):
        assert len({shape.name for shape in shapes}) == len(shapes)
        assert {shape.head_dim for shape in shapes} == {32, 64, 80, 96, 128}
        assert {shape.causal for shape in shapes} == {False, True}


@pytest.mark.parametrize("shape", micro.CHECK_SHAPES, ids=lambda shape: shape.name)
def test_results_are_those_of_the_independent_reference(shape: Shape):
    inputs = micro.make_inputs(shape, torch.float32, "cpu")
    exact = reference.attention(inputs.q, inputs.k, inputs.v, causal=shape.causal)
    assert torch.allclose(inputs.exact, exact, rtol=0, atol=1e-14)
    assert 0 < inputs.sdpa_error < 1e-5


def test_auto_says_which_row_it_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    shape = Shape(2048, 80, causal=True)
    request = registry.Request("cuda", 90, "fp16", 80, "padded", 2048, frozenset({"causal"}))
    assert micro.chosen(shape, "fp16", "cuda") == registry.select(request, registry.attention_rows()).row
    assert micro.chosen(shape, "fp16", "cpu").name == "reference"


def test_a_wrong_result_has_a_failure_and_no_error(monkeypatch: pytest.MonkeyPatch):
    shape = Shape(33, 32, batch=1, heads=2)
    assert "failure" not in micro.check_shapes("bf16", [shape])["33x32"]
    prepare = micro.dense_call

    def damaged(*arguments: Any, **options: Any) -> KernelCall:
        call = prepare(*arguments, **options)
        return dataclasses.replace(call, run=lambda: call.run().mul_(1.1))

    monkeypatch.setattr(micro, "dense_call", damaged)
    record = micro.check_shapes("bf16", [shape])["33x32"]
    assert "is above" in record["failure"]
    assert "max_abs_error" not in record


def row(name: str, us: float, error: float = 1e-6) -> Row:
    return Row(name, tuple(us * factor / 1e6 for factor in (0.99, 1, 1.01)), error, tolerance=1e-5)


def test_shape_record():
    peers = [row("sdpa", 30), row(EAGER, 400), row("sdpa cudnn", 20), Row("sdpa flash", (), math.nan, 1e-5)]
    record = micro.shape_record(row("naive", 40), peers)
    assert (record["us"], record["eager_us"]) == (pytest.approx(40), pytest.approx(400))
    assert (record["best_peer"], record["best_peer_us"]) == ("sdpa cudnn", pytest.approx(20))
    assert record["speedup_vs_best_peer"] == pytest.approx(0.5)
    json.dumps(record, allow_nan=False)
    assert set(micro.shape_record(Row("naive", (), 2.0, 1e-5), peers)) == {"failure"}
    assert "eager_us" not in micro.shape_record(row("naive", 40), peers[:1])


def test_the_stage_times_nothing_on_a_cpu():
    from stages import bench_micro

    written: dict[str, Any] = {}
    stage = types.SimpleNamespace(
        settings=types.SimpleNamespace(
            machine=types.SimpleNamespace(name="cpu"),
            workload=types.SimpleNamespace(precisions=("fp32", "tf32")),
        ),
        options=argparse.Namespace(),
        write_metrics=written.update,
    )
    bench_micro.run(stage)
    assert set(written["micro"]) == {"fp32"}
    for record in written["micro"]["fp32"].values():
        assert record["timed"] is False
        assert "us" not in record


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_shape_is_timed_by_the_rules(precision: str):
    settings = TimingSettings(protocol=1, warmup=1, rounds=2, flush_mb=256)
    shapes = [Shape(128, 64), Shape(65, 80, causal=True), Shape(65, 64, kv_heads=2, keys=33)]
    for name, record in micro.time_shapes(precision, settings, shapes).items():
        assert "failure" not in record, (name, record)
        assert record["us"] > 0
        assert record["eager_us"] > 0
        assert record["best_peer_us"] <= record["eager_us"]
