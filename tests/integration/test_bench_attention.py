"""The attention benchmark: verdicts without a GPU, records from rows, and (on a GPU) the closures themselves."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tilerank.bench import attention, floors
from tilerank.bench.attention import KernelCall, Timed, Truth
from tilerank.bench.attention_peers import SDPA, masked_peers, unmasked_peers
from tilerank.bench.timing import EventClock, KernelLaunch, LaunchRecord, Row, allocations, closure_faults, launches
from tilerank.bench.workloads import Workload, make_inputs, reference_attention, seed_workload
from tilerank.config import TimingSettings
from tilerank.kernels import build, library, registry

SMALL = Workload("small", (3, 0, 7), padded_length=7, heads=2, head_dim=8)


def test_the_reference_variant_passes_on_the_cpu():
    record = attention.check_variant(registry.get("reference"), "fp32")
    assert record["timed"] is False
    assert record["max_abs_error"] <= 2 * record["sdpa_max_abs_error"] + 1e-6
    assert 0 < record["sdpa_max_abs_error"] < 1e-5
    assert not {"us", "failure"} & set(record)


@pytest.mark.slow
def test_a_cuda_variant_runs_from_the_host_build():
    record = attention.check_variant(registry.get("naive"), "fp32")
    assert record["max_abs_error"] <= 2 * record["sdpa_max_abs_error"] + 1e-6
    assert not {"us", "failure"} & set(record)


@pytest.mark.parametrize(
    "damage",
    [
        lambda out: out.mul_(1.01),
        lambda out: out[..., -1:].fill_(math.nan),
        lambda out: out[-1:].zero_(),
    ],
)
def test_a_wrong_variant_fails_on_the_cpu(monkeypatch: pytest.MonkeyPatch, damage: Any):
    prepare = attention.kernel_call

    def damaged(*arguments: Any, **options: Any) -> KernelCall:
        call = prepare(*arguments, **options)

        def run() -> torch.Tensor:
            out = call.run()
            damage(out)
            return out

        return KernelCall(run, call.out, call.layout, call.inputs)

    monkeypatch.setattr(attention, "kernel_call", damaged)
    record = attention.check_variant(registry.get("reference"), "fp32")
    assert "is above" in record["failure"]
    assert "max_abs_error" not in record


def test_an_element_that_is_not_written_shows():
    lib = library.load(build.Target("cpu"))
    inputs = make_inputs(SMALL, torch.float32, "cpu")
    call = attention.kernel_call(lib, registry.get("reference"), inputs, "padded", masked=True)
    call.poison()
    assert call.out.isnan().all()
    assert not call.run().isnan().any()
    assert call.run() is call.out


@pytest.mark.parametrize("masked", [False, True])
def test_truth_judges_padded_and_packed_results(masked: bool):
    inputs = make_inputs(SMALL, torch.float32, "cpu")
    expected = attention.truth(inputs, "fp32", masked=masked)
    exact = reference_attention(inputs, masked=masked)
    assert expected.error(exact, "padded", every_row=True) == 0
    packed = exact.transpose(1, 2)[expected.valid]
    assert packed.shape[0] == (10 if masked else 21)
    assert expected.error(packed, "packed", every_row=True) == 0
    # What a peer leaves in rows of padding queries is its own business; ours are defined.
    spoilt = exact.clone()
    spoilt[0, :, 5] = math.nan
    assert math.isnan(expected.error(spoilt, "padded", every_row=True))
    assert (expected.error(spoilt, "padded", every_row=False) == 0) == masked
    assert 0 < expected.sdpa_error < 1e-5
    assert expected.tolerance(2) > 2 * expected.sdpa_error


# --- records -----------------------------------------------------------------------------------------------------

LAUNCHED = LaunchRecord((KernelLaunch("void tilerank::naive::kernel<float>(int)", (9, 1), (128,), 40, 0, 0.5),), (), ())
TRUTH = Truth(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, dtype=torch.bool), sdpa_error=1e-6, rounding=0.0)


def row(name: str, us: float, error: float = 1e-6) -> Row:
    return Row(name, tuple(us * factor / 1e6 for factor in (0.99, 1, 1.01)), error, tolerance=1e-5)


def timed(ours: Row, *peers: Row, faults: tuple[str, ...] = (), refusals: Mapping[str, str] = {}) -> Timed:
    """One call of a row that is timed padded, as naive is."""
    return Timed({"padded": ours}, peers, refusals, TRUTH, faults, LAUNCHED)


def test_rung_record():
    naive = registry.get("naive")
    slow, quick = row(SDPA, 400), row("mem-efficient packed", 200)
    broken = Row("flex key mask", (), error=math.nan, tolerance=1e-5)
    main = timed(row("naive", 100), slow, quick, broken, refusals={"sdpa flash": "no mask"})
    record = attention.rung_record(naive, "fp32", main, timed(row("naive", 150), row(SDPA, 300)), {})
    assert record["us"] == pytest.approx(100)
    assert record["unmasked_us"] == pytest.approx(150)
    assert record["speedup_vs_sdpa"] == pytest.approx(4)
    assert record["speedup_vs_sdpa_is_noise"] is False
    assert (record["best_peer"], record["best_peer_us"]) == ("mem-efficient packed", pytest.approx(200))
    assert record["sdpa_max_abs_error"] == 1e-6
    assert (record["grid"], record["block"], record["occupancy"], record["launches"]) == ("9x1", "128", 0.5, 1)
    assert record["masked"] is True
    peers = attention.peers_record(main)
    assert peers["sdpa flash"] == {"refused": "no mask"}
    assert "nan" in peers["flex key mask"]["failure"]
    assert "us" not in peers["flex key mask"]
    json.dumps([record, peers], allow_nan=False)


def test_a_variant_without_a_mask_is_compared_without_one():
    main = timed(row("naive", 150), row(SDPA, 300))
    record = attention.rung_record(registry.get("naive"), "fp32", main, main, {})
    assert record["masked"] is False
    assert record["us"] == record["unmasked_us"]
    assert record["speedup_vs_sdpa"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("main", "reason"),
    [
        (timed(Row("naive", (), math.nan, 1e-5), row(SDPA, 300)), "error nan"),
        (timed(row("naive", 1), row(SDPA, 300), faults=("launches no kernel",)), "launches no kernel"),
    ],
)
def test_a_variant_that_fails_has_no_time(main: Timed, reason: str):
    record = attention.rung_record(registry.get("naive"), "fp32", main, timed(row("naive", 150), row(SDPA, 300)), {})
    assert reason in record["failure"]
    assert not {"us", "unmasked_us", "speedup_vs_sdpa", "max_abs_error"} & set(record)


def test_a_rung_has_a_time_for_each_layout_and_the_worse_error():
    each = dataclasses.replace(registry.get("naive"), timed_layout="packed", products="fp16x3")
    both = {"packed": row("x packed", 100, error=1e-6), "padded": row("x padded", 130, error=3e-6)}
    main = dataclasses.replace(timed(row("x", 1), row(SDPA, 400)), ours=both)
    unmasked = dataclasses.replace(timed(row("x", 1)), ours={"packed": row("x packed", 150)})
    scales = {"x8": attention.scale_record(row("x packed", 110), row("varlen flash", 100))}
    record = attention.rung_record(each, "fp32", main, unmasked, scales)
    assert (record["us"], record["packed_us"], record["padded_us"]) == tuple(map(pytest.approx, (100, 100, 130)))
    assert (record["max_abs_error"], record["products"]) == (3e-6, "fp16x3")
    assert record["sdpa_us"] == pytest.approx(400)
    assert record["scales"]["x8"]["speedup_vs_peer"] == pytest.approx(0.909, rel=1e-2)
    assert "products" not in attention.rung_record(each, "fp16", main, unmasked, {})

    spoilt = dataclasses.replace(main, ours={**both, "padded": Row("x padded", (), math.nan, 1e-5)})
    wrong = attention.scale_record(Row("x packed", (), 2.0, 1e-5))
    for record, reason in (
        (attention.rung_record(each, "fp32", spoilt, unmasked, {}), "padded: error nan"),
        (attention.rung_record(each, "fp32", main, unmasked, {"x1": scales["x8"], "x8": wrong}), "inputs x8: error 2"),
    ):
        assert reason in record["failure"]
        assert not {"us", "packed_us", "scales"} & set(record)


def test_a_rung_s_floor_is_that_of_the_unit_it_uses():
    rates = floors.Rates(hbm_bytes=4.8e12, **floors.table_rates(90, 132, 1.98e9), how={})
    ffma = registry.get("naive")
    triple = dataclasses.replace(ffma, products="fp16x3")
    found = attention.floor_record(ffma, "fp32", 286.0, rates)
    assert found["floor_us"] == pytest.approx(143, rel=0.01)
    assert found["share_of_floor"] == pytest.approx(0.5, rel=0.01)
    assert found["floors"]["hbm_us"] == pytest.approx(22, rel=0.03)
    assert found["tflops"] == pytest.approx(33.4, rel=0.01)
    assert attention.floor_record(triple, "fp32", 286.0, rates)["floor_us"] < 40
    assert attention.floor_record(ffma, "fp16", 286.0, rates)["floor_bound"] == "exps"


def test_tf32_is_judged_by_what_its_mantissa_can_hold():
    """A result of fp32 products passes; one whose factors kept 8 bits of mantissa does not."""
    inputs = make_inputs(SMALL, torch.float32, "cpu")
    exact = attention.truth(inputs, "fp32", masked=True)
    lossy = attention.truth(inputs, "tf32", masked=True)
    assert 100 * exact.sdpa_error < lossy.sdpa_error < 1e-2
    coarse = [tensor.bfloat16() for tensor in (inputs.q, inputs.k, inputs.v)]
    mask = inputs.valid[:, None, None, :]
    out = torch.nn.functional.scaled_dot_product_attention(*coarse, attn_mask=mask)
    assert lossy.error(out, "padded", every_row=False) > lossy.tolerance(2)


def test_compiled_resources_are_those_of_the_kernel_that_ran():
    half = {"registers": 30, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 0}
    single = {"registers": 40, "spill_bytes": 8, "stack_bytes": 16, "shared_bytes": 0}
    kernels = {"tilerank::naive::kernel<__half>": half, "tilerank::naive::kernel<float>": single}
    built = {"available": True, "archs": {"sm_90a": {"kernels": kernels, **single}}}
    name = LAUNCHED.kernels[0].name
    assert attention.compiled_resources(built, "sm_90a", name) == {
        "registers": 40,
        "spill_bytes": 8,
        "stack_bytes": 16,
    }
    assert attention.compiled_resources(built, "sm_75", name) == {}
    assert attention.compiled_resources({"available": False, "reason": "no nvcc"}, "sm_90a", name) == {}


# --- stages ------------------------------------------------------------------------------------------------------


class FakeStage:
    """As much of a stage as these need: the machine's name, the option and what is written."""

    def __init__(self, machine: str, variant: str) -> None:
        self.settings = types.SimpleNamespace(machine=types.SimpleNamespace(name=machine))
        self.options = argparse.Namespace(variant=variant)
        self.written: dict[str, Any] = {}

    def write_metrics(self, record: Mapping[str, Any], suffix: str = "") -> Path:
        self.written[suffix] = json.loads(json.dumps(record, allow_nan=False))
        return Path(suffix)


def test_profile_kernels_says_why_there_is_nothing():
    from stages import profile_kernels

    stage = FakeStage("cpu", "naive")
    profile_kernels.run(stage)
    (record,) = stage.written["naive"]["profile_kernels"].values()
    assert record == {"available": False, "reason": "no CUDA device is used on this machine"}


def test_profile_kernels_records_what_the_tool_measured(monkeypatch: pytest.MonkeyPatch):
    from stages import profile_kernels
    from tilerank import machine, profiling

    stall = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    seen = {}

    def run_ncu(command: list[str], *, kernel_regex: str) -> list[profiling.NcuMetric]:
        seen.update(command=command, kernel_regex=kernel_regex)
        figures = {
            "smsp__inst_executed.sum": 1e6,
            "sm__throughput.avg.pct_of_peak_sustained_elapsed": 45.5,
            stall.format("wait"): 1.0,
            stall.format("barrier"): 2.0,
        }
        return [profiling.NcuMetric("kernel", name, value, "") for name, value in figures.items()]

    monkeypatch.setattr(machine, "device_for", lambda name: "cuda")
    monkeypatch.setattr(profiling, "run_ncu", run_ncu)
    stage = FakeStage("h200", "naive")
    profile_kernels.run(stage)
    record = stage.written["naive"]["profile_kernels"]["naive"]
    assert record["available"] is True
    assert record["kernels"]["0"] == {
        "kernel": "kernel",
        "instructions": 1e6,
        "sm_throughput_pct": 45.5,
        "stall_reasons": ["barrier", "wait"],
        "stalls": {"barrier": 2.0, "wait": 1.0},
    }
    assert seen["kernel_regex"] == "tilerank::naive::"
    assert seen["command"][1:] == ["-m", "tilerank.bench.attention", "naive"]
    other = FakeStage("h200", "ping_pong")  # a row for other head dims
    profile_kernels.run(other)
    record = other.written["ping_pong"]["profile_kernels"]["ping_pong"]
    assert record == {"available": False, "reason": "the workload's head_dim is 32; it serves: 80, 96, 128"}


def test_bench_attention_on_a_cpu_times_nothing():
    from stages import bench_attention

    stage = FakeStage("cpu", "reference")
    bench_attention.run(stage)
    (record,) = stage.written["reference"]["ladder"].values()
    assert record["timed"] is False
    assert "us" not in record
    assert set(stage.written["reference"]) == {"ladder", "rungs"}


@pytest.mark.parametrize(
    ("change", "sections", "precisions"),
    [
        ({"dtypes": ("fp16", "bf16")}, {"rungs"}, {"fp16", "bf16"}),
        ({"dtypes": ("fp32", "bf16")}, {"ladder", "rungs"}, {"bf16"}),
        ({"dtypes": ("fp32",), "products": "tf32"}, {"rungs"}, {"tf32"}),
    ],
)
def test_the_ladder_is_fp32_and_other_precisions_stand_beside_it(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], sections: set[str], precisions: set[str]
):
    from stages import bench_attention

    each = dataclasses.replace(registry.get("reference"), **change)
    monkeypatch.setattr(registry, "get", lambda name: each)
    stage = FakeStage("cpu", "reference")
    bench_attention.run(stage)
    assert set(stage.written["reference"]) == sections
    rungs = stage.written["reference"]["rungs"]
    assert set(rungs) == precisions
    for precision in precisions:
        assert rungs[precision]["reference"]["precision"] == precision
        assert "failure" not in rungs[precision]["reference"]


def test_peers_of_each_precision_are_kept_apart():
    from stages.bench_attention import _sections

    benched = {
        "fp32": {"rung": {"us": 2.0}, "peers": {"masked": {"a": {"us": 1.0}}}},
        "fp16": {"rung": {"us": 1.0}, "peers": {"masked": {"b": {"us": 3.0}}}},
    }
    assert _sections("naive", benched) == {
        "ladder": {"naive": {"us": 2.0}},
        "rungs": {"fp16": {"naive": {"us": 1.0}}},
        "peers": {"naive": {"masked": {"a": {"us": 1.0}}, "fp16": {"masked": {"b": {"us": 3.0}}}}},
    }


def test_a_variant_that_this_gpu_cannot_run_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    hopper = dataclasses.replace(registry.get("naive"), min_sm=90)
    records = attention.bench_variant(hopper, TimingSettings(protocol=1, warmup=1, rounds=1, flush_mb=1))
    assert set(records) == {"fp32", "fp16", "bf16"}
    for record in records.values():
        assert set(record) == {"rung"}
        assert record["rung"]["timed"] is False
        assert "sm is 75" in record["rung"]["reason"]


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_closure_faults_sees_what_a_closure_does():
    a, b = torch.randn(2, 256, 256, device="cuda")
    out = torch.empty_like(a)

    def clean() -> None:
        torch.add(a, b, out=out)

    def allocates() -> torch.Tensor:
        return a + b

    def waits() -> None:
        torch.add(a, b, out=out)
        torch.cuda.synchronize()

    assert closure_faults(clean, "elementwise") == ()
    assert allocations(clean).count == 0
    assert allocations(allocates).count == 1
    assert "allocates" in closure_faults(allocates, "elementwise")[0]
    assert "waits for the device" in closure_faults(waits, "elementwise")[0]
    assert "expected names matching" in closure_faults(clean, "tilerank::")[0]
    assert closure_faults(lambda: None, "x") == ("launches no kernel",)
    (launch,) = launches(clean).kernels
    assert launch.registers > 0
    assert math.prod(launch.block) >= 32


@pytest.mark.gpu
def test_event_clock_sees_a_cold_cache():
    """A copy that fits in the L2 is slower after the flush than without one."""
    source = torch.randn(4 << 20, device="cuda")
    target = torch.empty_like(source)

    def run() -> torch.Tensor:
        return target.copy_(source)

    def median(clock: EventClock) -> float:
        reads = [clock.measure(run)[1] for _ in range(20)]
        clock.settle()
        return sorted(read() for read in reads)[10]

    warm, cold = EventClock(flush_mb=0), EventClock(flush_mb=256)
    median(warm)
    assert median(cold) > 1.1 * median(warm)


@pytest.mark.gpu
def test_every_peer_is_right_or_says_why_it_refuses():
    inputs = make_inputs(Workload("gpu", (5, 64, 33), padded_length=64, heads=2, head_dim=32), torch.float16, "cuda")
    for masked, peers in ((True, masked_peers(inputs)), (False, unmasked_peers(inputs))):
        expected = attention.truth(inputs, "fp16", masked=masked)
        assert peers[0].name == SDPA
        for peer in peers:
            assert (peer.run is None) != (peer.refusal is None), peer.name
            if peer.run is not None:
                assert expected.error(peer.run(), peer.layout, every_row=False) <= expected.tolerance(8), peer.name
        assert sum(peer.run is not None for peer in peers) >= 3


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [each.name for each in registry.attention_rows() if each.device == "cuda"])
def test_every_variant_is_timed_by_the_rules(name: str):
    settings = TimingSettings(protocol=1, warmup=1, rounds=3, flush_mb=256)
    each = registry.get(name)
    for precision, record in attention.bench_variant(each, settings).items():
        rung = record["rung"]
        assert "failure" not in rung, (precision, rung)
        if each.head_dims and seed_workload().head_dim not in each.head_dims:
            assert not rung["timed"]
            assert "head_dim" in rung["reason"]
            continue
        assert rung["us"] > 0
        assert 0 < rung["share_of_floor"] < 1
        assert SDPA in record["peers"]["unmasked"]
        if precision != "fp32" and "packed" in each.layouts:
            assert set(rung["scales"]) == set(attention.INPUT_SCALES[precision])
