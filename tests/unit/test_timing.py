"""The timing protocol, without a GPU: turns, checks before and after, spreads, noise and what a trace says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilerank.bench.floors import Rates, attention_floor, table_rates
from tilerank.bench.timing import (
    AllocationRecord,
    Case,
    KernelLaunch,
    LaunchRecord,
    Ratio,
    Row,
    Spread,
    WallClock,
    faults,
    measure,
    ratio,
    read_trace,
)
from tilerank.bench.workloads import (
    SEED_LENGTHS,
    Workload,
    make_inputs,
    max_abs_error,
    pool_workloads,
    reference_attention,
    seed_workload,
)
from tilerank.errors import TilerankError


class ScriptedClock:
    """Gives each call the next of a list of seconds, and notes what happened in which order."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = list(seconds)
        self.log: list[str] = []

    def measure(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        self.log.append("time")
        output, seconds = run(), self.seconds.pop(0)
        return output, lambda: seconds

    def settle(self) -> None:
        self.log.append("settle")


def case(name: str, clock: ScriptedClock, outputs: list[float], *, poison: bool = False) -> Case:
    """A case whose successive outputs are given; the last one repeats. Its error is the output itself."""
    remaining = list(outputs)

    def run() -> float:
        clock.log.append(name)
        return remaining.pop(0) if len(remaining) > 1 else remaining[0]

    mark = (lambda: clock.log.append(f"poison {name}")) if poison else None
    return Case(name, run, error=lambda output: output, tolerance=0.5, poison=mark)


def test_cases_take_turns_and_warm_up_is_thrown_away():
    clock = ScriptedClock([9.0, 9.0, 1.0, 10.0, 2.0, 20.0, 3.0, 30.0])
    cases = [case("a", clock, [0.1], poison=True), case("b", clock, [0.2])]
    a, b = measure(cases, clock, warmup=1, rounds=3)
    assert a.seconds == (1.0, 2.0, 3.0)
    assert b.seconds == (10.0, 20.0, 30.0)
    timed = [entry for entry in clock.log if entry in ("a", "b")][2:]  # after the two checks
    assert timed == ["a", "b"] * 4
    # Poisoned before the first check, and before the very repetition whose output is checked last.
    assert clock.log.index("poison a") < clock.log.index("a")
    last_poison = len(clock.log) - 1 - clock.log[::-1].index("poison a")
    assert clock.log[last_poison + 1 : last_poison + 3] == ["time", "a"]
    assert clock.log.count("poison a") == 2


@pytest.mark.parametrize("wrong", [0.6, math.nan, math.inf])
def test_a_wrong_output_has_no_time(wrong: float):
    clock = ScriptedClock([1.0] * 10)
    before, fine = measure([case("bad", clock, [wrong]), case("fine", clock, [0.0])], clock, warmup=0, rounds=2)
    assert before.verdict == "FAIL"
    assert before.spread is None
    assert before.seconds == ()
    assert "above 0.5" in before.failure
    assert clock.log.count("bad") == 1  # checked, never timed
    assert fine.failure is None
    assert fine.verdict.endswith("us [1000000.0, 1000000.0]")


@pytest.mark.parametrize("wrong", [0.6, math.nan])
def test_an_output_that_goes_wrong_while_timed_fails(wrong: float):
    clock = ScriptedClock([1.0] * 10)
    # The check and two repetitions are right, the last one is not.
    (row,) = measure([case("drifts", clock, [0.0, 0.0, 0.0, wrong])], clock, warmup=0, rounds=3)
    assert row.verdict == "FAIL"
    assert row.error == pytest.approx(wrong, nan_ok=True)


def test_measure_refuses_what_it_cannot_do():
    clock = ScriptedClock([])
    with pytest.raises(ValueError, match="must differ"):
        measure([case("a", clock, [0.0]), case("a", clock, [0.0])], clock, warmup=0, rounds=1)
    with pytest.raises(ValueError, match="rounds=0"):
        measure([case("a", clock, [0.0])], clock, warmup=0, rounds=0)


def test_spread_and_noise():
    spread = Spread.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert spread == Spread(3.0, pytest.approx(1.4), pytest.approx(4.6), 5)
    with pytest.raises(ValueError, match="finite"):
        Spread.of([])
    with pytest.raises(ValueError, match="finite"):
        Spread.of([1.0, math.nan])
    narrow = Spread(10.0, 9.9, 10.1, 5)
    assert ratio(narrow, Spread(20.0, 19.0, 21.0, 5)) == Ratio(2.0, is_noise=False)
    assert ratio(narrow, Spread(11.0, 10.0, 12.0, 5)) == Ratio(1.1, is_noise=True)
    assert ratio(narrow, Spread(5.0, 4.9, 5.1, 5)) == Ratio(0.5, is_noise=False)


def test_wall_clock_times_the_closure_and_returns_its_output():
    clock = WallClock("cpu")
    output, read = clock.measure(lambda: sum(range(200_000)))
    assert output == sum(range(200_000))
    assert 0 < read() < 60
    row = Row("a", (read(),), error=0.0, tolerance=0.0)
    assert row.spread.repetitions == 1


# --- what the profiler saw ---------------------------------------------------------------------------------------


def event(category: str, name: str, start: float, **facts: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": 5.0, "args": facts}


def kernel_event(name: str, start: float) -> dict[str, Any]:
    facts = {"grid": [600, 4, 1], "block": [128, 1, 1], "registers per thread": 40, "shared memory": 8192}
    return event("kernel", name, start, **facts, **{"est. achieved occupancy %": 50})


REGION = {"ph": "X", "cat": "user_annotation", "name": "tilerank.timed_closure", "ts": 100.0, "dur": 50.0}


def test_read_trace_counts_only_what_the_closure_did():
    record = read_trace(
        [
            {"ph": "M", "name": "process_name"},
            event("cuda_runtime", "cudaDeviceSynchronize", 10.0),  # before the closure
            REGION,
            event("gpu_user_annotation", "tilerank.timed_closure", 120.0),
            event("cuda_runtime", "cudaLaunchKernel", 110.0),
            event("cuda_runtime", "cudaMalloc", 112.0),
            event("cuda_runtime", "cudaStreamSynchronize", 113.0),
            event("cuda_runtime", "cudaMemcpyAsync", 114.0),
            event("gpu_memset", "Memset (Device)", 160.0),
            kernel_event("void tilerank::fused::kernel<32>(int)", 170.0),  # runs after the host has moved on
            event("cuda_runtime", "cudaDeviceSynchronize", 180.0),  # after the closure
        ]
    )
    launch = KernelLaunch("void tilerank::fused::kernel<32>(int)", (600, 4, 1), (128, 1, 1), 40, 8192, 0.5)
    assert record == LaunchRecord((launch,), ("cudaStreamSynchronize",), ("cudaMalloc",))


def test_faults_of_a_closure():
    clean = AllocationRecord(0, 0)
    launch = read_trace([REGION, kernel_event("void tilerank::fused::kernel<32>(int)", 110.0)])
    assert faults(clean, launch, "tilerank::fused::") == ()
    assert "allocates 512 bytes" in faults(AllocationRecord(1, 512), launch, "tilerank::fused::")[0]
    assert "expected names matching 'tilerank::naive::'" in faults(clean, launch, "tilerank::naive::")[0]
    assert faults(clean, LaunchRecord((), (), ()), "x") == ("launches no kernel",)
    waits = LaunchRecord(launch.kernels, ("cudaStreamSynchronize",), ("cudaMalloc",))
    assert len(faults(clean, waits, "tilerank::fused::")) == 2


# --- workloads ---------------------------------------------------------------------------------------------------


def test_the_seed_workload_is_the_published_one():
    workload = seed_workload()
    assert (workload.sequences, workload.tokens, workload.padded_rows) == (50, 16_830, 43)
    assert workload.square_ratio == pytest.approx(0.474, abs=5e-4)
    assert workload.scores == pytest.approx(74.6e6, rel=1e-3)
    assert SEED_LENGTHS[:3] == (254, 233, 350)
    assert SEED_LENGTHS[-3:] == (108, 343, 373)


def test_a_length_above_the_padded_one_is_refused():
    with pytest.raises(ValueError, match=r"\[9\]"):
        Workload("bad", (3, 9), padded_length=8)


def test_inputs_are_the_same_numbers_padded_packed_and_every_time():
    workload = Workload("small", (3, 0, 5), padded_length=5, heads=2, head_dim=4)
    inputs, again = make_inputs(workload, torch.float32, "cpu"), make_inputs(workload, torch.float32, "cpu")
    assert torch.equal(inputs.q, again.q)
    assert inputs.q.shape == (3, 2, 5, 4)
    assert inputs.q.transpose(1, 2).is_contiguous()  # as transformers passes it
    assert inputs.packed_v.shape == (8, 2, 4)
    assert torch.equal(inputs.packed_v[:3], inputs.v.transpose(1, 2)[0, :3])
    assert torch.equal(inputs.packed_v[3:], inputs.v.transpose(1, 2)[2])
    assert inputs.cu_seqlens.tolist() == [0, 3, 3, 8]
    assert not torch.equal(inputs.q, inputs.k)


def test_reference_attention_by_hand():
    inputs = make_inputs(Workload("one", (1, 2, 0), padded_length=2, heads=1, head_dim=2), torch.float32, "cpu")
    masked = reference_attention(inputs, masked=True)
    v = inputs.v.double()
    assert torch.equal(masked[0, 0], v[0, 0, :1].expand(2, 2))  # one key: its value, for every query
    scores = (inputs.q[1, 0, 0].double() * inputs.k[1, 0].double()).sum(-1) / math.sqrt(2)
    weight = math.exp(scores[0]) / (math.exp(scores[0]) + math.exp(scores[1]))
    assert torch.allclose(masked[1, 0, 0], weight * v[1, 0, 0] + (1 - weight) * v[1, 0, 1])
    assert torch.equal(masked[2], torch.zeros_like(masked[2]))  # no key
    unmasked = reference_attention(inputs, masked=False)
    assert torch.equal(unmasked[1], masked[1])
    assert not torch.equal(unmasked[0], masked[0])


def test_max_abs_error_lets_nan_through():
    exact = torch.zeros(2, 2, dtype=torch.float64)
    assert max_abs_error(torch.tensor([[0.0, -3.0], [1.0, 0.0]]), exact) == 3.0
    assert math.isnan(max_abs_error(torch.tensor([[0.0, math.nan], [1.0, 0.0]]), exact))
    with pytest.raises(ValueError, match="shapes differ"):
        max_abs_error(torch.zeros(2), exact)


def test_pool_workloads_reads_the_recorded_lengths(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text(
        '{"kind": "cross-encoder", "max_length": 512, "cut_passages": 0, "cut_queries": 0,'
        ' "queries": {"q1": [5, 9, 7], "q2": [], "q3": [4]}}',
        encoding="utf-8",
    )
    first, second = pool_workloads(path, "scifact")
    assert first == Workload("scifact/q1", (5, 9, 7), padded_length=9)
    assert second == Workload("scifact/q3", (4,), padded_length=4)
    with pytest.raises(TilerankError, match="dvc repro retrieve"):
        pool_workloads(tmp_path / "absent.json", "scifact")


# --- floors ------------------------------------------------------------------------------------------------------

H200 = Rates(hbm_bytes=4.8e12, **table_rates(90, 132, 1.98e9), how={})


def test_floors_of_the_seed_workload_on_an_h200():
    workload = seed_workload()
    fp16 = attention_floor(workload, "fp16", H200)
    assert fp16.hbm == pytest.approx(11e-6, rel=0.03)
    assert fp16.exps == pytest.approx(18e-6, rel=0.03)
    assert (fp16.seconds, fp16.bound) == (fp16.exps, "exps")
    ffma = attention_floor(workload, "fp32", H200, ffma_only=True)
    assert ffma.hbm == pytest.approx(22e-6, rel=0.03)
    assert ffma.seconds == pytest.approx(143e-6, rel=0.01)
    assert ffma.bound == "products"
    # Three fp16 products stand in for fp32 where the matrix unit is that much quicker; tf32 costs two.
    assert attention_floor(workload, "fp32", H200).products == pytest.approx(3 * fp16.products)
    assert attention_floor(workload, "tf32", H200).products == pytest.approx(2 * fp16.products)
    with pytest.raises(ValueError, match="int8"):
        attention_floor(workload, "int8", H200)


def test_table_rates_of_an_unlisted_architecture_are_the_next_older_ones():
    assert table_rates(87, 10, 1e9) == table_rates(86, 10, 1e9)
    assert table_rates(120, 10, 1e9) == table_rates(90, 10, 1e9)
    assert table_rates(70, 10, 1e9) == table_rates(75, 10, 1e9)
