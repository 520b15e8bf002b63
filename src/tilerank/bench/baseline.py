"""Where the unmodified pipeline's time goes, and how much a faster attention could win.

Two passes over the same calls. The first takes wall times of the steps without a profiler: tokenise, build
tensors, transfer, forward, scores to the host. The second runs the forward under torch.profiler, which says
what the forward's time is made of. Every operator belongs to one class, by the outermost operator around it
that `CLASSES` names. On a GPU an operator's time is that of the kernels it launched; on a CPU it is the
operator's own time.

Shares under ``profile`` are of the end-to-end wall time, so that ``amdahl_ceiling`` = 1 / (1 - attention_share)
bounds what an attention that takes no time would win for the caller. Shares under ``within_forward`` are of the
forward's wall time and add up to 1; ``host`` is what no operator accounts for: Python, dispatch and, on a GPU,
the device waiting for the host.

Run as a program it makes the calls of a JSON file once, for a timeline by another profiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tilerank.bench.memory import peak_device_mb, peak_process_mb
from tilerank.bench.peers import HuggingFaceScorer
from tilerank.bench.rerank import Call, RerankSetup

STEPS = ("tokenize", "tensors", "transfer", "forward", "scores")
"""The steps of one call, in order; ``tokenize`` and ``tensors`` together are the one tokenizer call."""

CLASSES: Mapping[str, frozenset[str]] = {
    "attention": frozenset({"aten::scaled_dot_product_attention"}),
    "gemm": frozenset({"aten::linear", "aten::addmm", "aten::mm", "aten::matmul", "aten::bmm"}),
    "norm": frozenset({"aten::layer_norm", "aten::native_layer_norm", "aten::rms_norm"}),
    "activation": frozenset({"aten::gelu", "aten::relu", "aten::silu", "aten::tanh", "aten::sigmoid", "aten::softmax"}),
}
"""Operator class -> the operators that define it. Anything else is ``other``: embeddings, residuals, masks, copies."""

PROFILED_CALLS = 3  # enough for stable shares, few enough for a trace that opens quickly
_FORWARD = "forward"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Wall seconds of one call, by step; ``enqueue`` is the part of ``forward`` that the host was busy with."""

    steps: Mapping[str, float]
    enqueue: float

    @property
    def total(self) -> float:
        """From raw text to scores."""
        return sum(self.steps.values())


@dataclass(frozen=True, slots=True)
class ForwardProfile:
    """What the profiler saw during the forward passes of ``calls`` calls, in seconds over all of them."""

    calls: int
    wall: float
    classes: Mapping[str, float]
    launches: int  # kernels, the few that fetch the scores included; 0 on a CPU
    operators: int  # operator calls


def make_scorer(setup: RerankSetup, precision: str = "fp32") -> HuggingFaceScorer:
    """The unmodified pipeline."""
    return HuggingFaceScorer(setup.path, setup.kind, precision, setup.device, setup.max_length, setup.batch_size)


def time_steps(scorer: HuggingFaceScorer, call: Call, device: str) -> StepTimes:
    """Run one call step by step; the device is idle at every boundary."""
    seconds = dict.fromkeys(STEPS, 0.0)
    enqueue = 0.0

    @contextmanager
    def step(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        _synchronize(device)
        seconds[name] += time.perf_counter() - start

    outputs = []
    for texts in scorer.batches(call.query, call.passages):
        with step("tokenize"):
            encoding = scorer.tokenize(texts, return_tensors=None)
        with step("tensors"):
            encoding.convert_to_tensors("pt")
        with step("transfer"):
            inputs = scorer.transfer(encoding)
        with step("forward"):
            start = time.perf_counter()
            outputs.append(scorer.forward(inputs))
            enqueue += time.perf_counter() - start
    with step("scores"):
        scorer.finish(outputs)
    return StepTimes(seconds, enqueue)


def profile_forward(scorer: HuggingFaceScorer, calls: Sequence[Call], device: str, trace: Path) -> ForwardProfile:
    """Profile ``calls`` from text to scores and write the trace (Chrome, Perfetto; gzip when it ends in .gz)."""
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as profiler:
        for call in calls:
            outputs = []
            for texts in scorer.batches(call.query, call.passages):
                with record_function("tokenize"):
                    encoding = scorer.tokenize(texts, return_tensors=None)
                with record_function("tensors"):
                    encoding.convert_to_tensors("pt")
                with record_function("transfer"):
                    inputs = scorer.transfer(encoding)
                with record_function(_FORWARD):
                    outputs.append(scorer.forward(inputs))
                    _synchronize(device)
            with record_function("scores"):
                scorer.finish(outputs)
    profiler.export_chrome_trace(str(trace))
    return _read_profile(profiler.events(), len(calls), device)


def _read_profile(events: Sequence[Any], calls: int, device: str) -> ForwardProfile:
    from torch.autograd import DeviceType

    classes = dict.fromkeys((*CLASSES, "other"), 0.0)
    wall, operators, launches = 0.0, 0, 0
    for event in events:
        if event.device_type != DeviceType.CPU:
            is_work = not event.name.startswith(("Memcpy", "Memset")) and event.name not in (*STEPS, "ProfilerStep*")
            launches += is_work
        elif event.name == _FORWARD:
            wall += event.cpu_time_total / 1e6
        elif event.name.startswith("aten::"):
            parents = _ancestors(event)
            if parents[-1] == _FORWARD:
                own = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
                classes[operator_class([event.name, *parents])] += own / 1e6
                operators += 1
    return ForwardProfile(calls, wall, classes, launches, operators)


def _ancestors(event: Any) -> list[str]:
    """Names of the events around ``event``, innermost first; [""] when there is none."""
    names = []
    while event.cpu_parent is not None:
        event = event.cpu_parent
        names.append(event.name)
    return names or [""]


def operator_class(names: Sequence[str]) -> str:
    """The class of an operator from its name and those around it, innermost first: the outermost that has one."""
    for name in reversed(names):
        for label, members in CLASSES.items():
            if name in members:
                return label
    return "other"


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def profile_record(
    times: Sequence[StepTimes], forward_walls: Sequence[float], forward: ForwardProfile, device: str
) -> dict[str, Any]:
    """The record ``profile``, less what the caller adds (memory, files).

    times: unprofiled repetitions over all calls. forward_walls: the unprofiled forward seconds of the calls that
    ``forward`` profiled.
    """
    ms = {name: 1e3 * statistics.median(one.steps[name] for one in times) for name in STEPS}
    end_to_end = sum(one.total for one in times)
    share = {name: sum(one.steps[name] for one in times) / end_to_end for name in STEPS}
    # A profiler slows the host, not the kernels: on a GPU the forward's wall time comes from the unprofiled pass.
    # On a CPU both come from the profiled one, so that what the profiler adds to operators cancels.
    measured = sum(forward_walls) if device == "cuda" else forward.wall
    device_seconds = sum(forward.classes.values())
    wall = max(measured, device_seconds)
    within = {name: seconds / wall for name, seconds in forward.classes.items()}
    within["host"] = 1.0 - sum(within.values())
    attention_share = share["forward"] * within["attention"]
    record: dict[str, Any] = {
        "tokenize_share": share["tokenize"] + share["tensors"],
        "tensors_share": share["tensors"],
        "forward_share": share["forward"],
        "attention_share": attention_share,
        "gemm_share": share["forward"] * within["gemm"],
        "amdahl_ceiling": 1.0 / (1.0 - attention_share),
        "within_forward": within,
        "ms": {**ms, "total": 1e3 * statistics.median(one.total for one in times)},
        "device_ms": 1e3 * device_seconds / forward.calls,
        "operators": forward.operators / forward.calls,
        "repetitions": len(times),
    }
    if device == "cuda":
        record["host_ms"] = 1e3 * statistics.median(one.enqueue for one in times)
        record["launches"] = forward.launches / forward.calls
    else:
        record["host_ms"] = 1e3 * max(0.0, forward.wall - device_seconds) / forward.calls
    return record


def profile_baseline(setup: RerankSetup, calls: Sequence[Call], rounds: int, trace: Path) -> dict[str, Any]:
    """Profile the unmodified fp32 pipeline over ``calls``; writes the trace and returns the record ``profile``."""
    scorer = make_scorer(setup)
    profiled = calls[:PROFILED_CALLS]
    time_steps(scorer, calls[0], setup.device)  # warm-up
    times: list[StepTimes] = []
    forward_walls: list[float] = []
    with tqdm(total=rounds * len(calls), desc="unmodified pipeline", unit="query", disable=None) as bar:
        for _ in range(rounds):
            for number, call in enumerate(calls):
                times.append(time_steps(scorer, call, setup.device))
                if number < len(profiled):
                    forward_walls.append(times[-1].steps["forward"] / rounds)
                bar.update()
    forward = profile_forward(scorer, profiled, setup.device, trace)
    record = profile_record(times, forward_walls, forward, setup.device)
    del scorer
    if setup.device == "cuda":
        record["peak_mb"] = peak_device_mb(lambda: _prepared(setup, calls[0]))
    else:
        record["process_peak_mb"] = peak_process_mb()
    return record


def _prepared(setup: RerankSetup, call: Call) -> Callable[[], Any]:
    scorer = make_scorer(setup)
    return lambda: scorer.score(call.query, call.passages)


def write_calls(path: Path, setup: RerankSetup, calls: Sequence[Call]) -> None:
    """Write what `main` reads."""
    record = {**asdict(setup), "path": str(setup.path), "calls": [asdict(call) for call in calls]}
    path.write_text(json.dumps(record), encoding="utf-8")


def main() -> None:
    """Make the calls of a file that `write_calls` wrote."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("calls", type=Path)
    record = json.loads(parser.parse_args().calls.read_text(encoding="utf-8"))
    calls = [Call(call["query"], tuple(call["passages"])) for call in record.pop("calls")]
    setup = RerankSetup(**{**record, "path": Path(record["path"])})
    scorer = make_scorer(setup)
    for call in calls:
        time_steps(scorer, call, setup.device)


if __name__ == "__main__":
    main()
