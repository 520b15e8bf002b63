"""What is recorded of the block in TensorFlow, without TensorFlow: driver calls, verdicts, the stage's line."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tilerank.bench import tf_block
from tilerank.bench.driver_calls import Calls, DriverCalls, cupti_candidates, read_calls
from tilerank.errors import TilerankError
from tilerank.report.records import SECTIONS

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")

FAKE_CUPTI = """
#include <stdint.h>
#include <stddef.h>
#include <string.h>
struct data { int site; const char* function; const void* parameters; void* result; const char* symbol; };
typedef void (*callback)(void*, int, uint32_t, const struct data*);
static callback note;
int cuptiSubscribe(void** subscriber, callback function, void* user) {
    (void)user;
    *subscriber = (void*)1;
    note = function;
    return 0;
}
int cuptiUnsubscribe(void* subscriber) { (void)subscriber; note = NULL; return 0; }
int cuptiEnableDomain(uint32_t on, void* subscriber, int domain) { (void)on; (void)subscriber; return domain != 1; }
int cuptiGetCallbackName(int domain, uint32_t call, const char** name) {
    static const char* names[] = {"cuLaunchKernel", "cuMemcpyHtoDAsync_v2"};
    (void)domain;
    if (call > 1) return 1;
    *name = names[call];
    return 0;
}
struct launch { void* function; unsigned sizes[7]; void* stream; };
struct config { unsigned sizes[7]; void* stream; };
void call_driver(int domain, int site, uint32_t call, const char* function, const char* symbol, size_t stream) {
    const struct config config = {{1, 1, 1, 1, 1, 1, 0}, (void*)stream};
    const struct launch launch = {NULL, {1, 1, 1, 1, 1, 1, 0}, (void*)stream};
    const struct { const struct config* config; void* function; } extended = {&config, NULL};
    const void* parameters = strcmp(function, "cuLaunchKernelEx") ? (void*)&launch : (void*)&extended;
    struct data data = {site, function, parameters, NULL, symbol};
    if (note != NULL) note(NULL, domain, call, &data);
}
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A library with CUPTI's interface, whose driver calls a test makes up."""
    source, path = tmp_path / "fake.c", tmp_path / "libcupti.so.13"
    source.write_text(FAKE_CUPTI, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    return path


# ---- Driver calls ----


@needs_compiler
def test_driver_calls_are_counted_by_name_and_kernels_kept_in_order(tmp_path: Path, fake: Path) -> None:
    library = ctypes.CDLL(str(fake))

    def run() -> None:
        driver, runtime, enter, leave = 1, 2, 0, 1
        for stream, (call, kernel) in enumerate(
            ((b"cuLaunchKernel", b"first"), (b"cuLaunchKernelEx", b"second"), (b"cuLaunchKernel_ptsz", b"first")), 16
        ):
            library.call_driver(driver, enter, 0, call, kernel, stream)
            library.call_driver(driver, leave, 0, call, kernel, stream)
        library.call_driver(driver, enter, 1, b"cuMemcpyHtoDAsync_v2", b"not a kernel", 0)
        library.call_driver(driver, enter, 7, b"cuSomethingNew", None, 0)
        library.call_driver(runtime, enter, 0, b"cudaLaunchKernel", b"first", 0)

    counter = DriverCalls(tmp_path, [tmp_path / "missing.so", fake])
    counts = {"cuLaunchKernel": 3, "cuMemcpyHtoDAsync_v2": 1, "unknown": 1}
    expected = Calls(counts, ("first", "second", "first"), ("0x10", "0x11", "0x12"))
    assert counter.of(run) == expected
    run()
    assert counter.of(lambda: None) == Calls({}, (), ()), "what is outside does not count, and nothing stays"


@needs_compiler
def test_the_counter_compiles_without_a_warning(repository: Path, tmp_path: Path) -> None:
    source = repository / "cuda" / "tests" / "driver_calls.c"
    command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", tmp_path / "calls.so", source]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


@needs_compiler
def test_what_is_no_cupti_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(TilerankError, match=r"not counted: there is no CUPTI"):
        DriverCalls(tmp_path, [])
    with pytest.raises(TilerankError, match=r"not counted: missing\.so: .*missing\.so"):
        DriverCalls(tmp_path, [tmp_path / "missing.so"])
    shutil.copy(tmp_path / "driver_calls.so", tmp_path / "other.so")
    with pytest.raises(TilerankError, match=r"not counted: other\.so: it has no callback interface"):
        DriverCalls(tmp_path, [tmp_path / "other.so"])


def test_newer_libraries_are_tried_first() -> None:
    names = [path.name for path in cupti_candidates() if path.parent.parent.name.startswith("cuda")]
    assert names == sorted(names, reverse=True)


def test_unknown_calls_are_added_up() -> None:
    assert read_calls("call 2 unknown\ncall 3 unknown\nkernel 0x10 a b\n") == Calls({"unknown": 5}, ("a b",), ("0x10",))


# ---- The record ----


def seen(**changes: Any) -> dict[str, Any]:
    """One way of calling the block, all well: two launches a call."""
    counts = {"cuLaunchKernel": 20, "cuMemsetD8Async": 10, "cuMemcpyDtoDAsync_v2": 10, "cuStreamIsCapturing": 10}
    kernels = ["_ZN8tilerank12two_launches6secondIfEEvNS_9BlockArgsE", "plain"] * 10
    return {
        "max_abs_error": 1e-3,
        "max_excess": 5e-4,
        "counts": counts,
        "kernels": kernels,
        "streams": ["0x10"] * len(kernels),
        "seconds": [2e-5, 1e-5, 3e-5],
        "queued": 50,
        **changes,
    }


def record(precision: str = "fp16", **ways: Any) -> dict[str, Any]:
    control = {"counts": {"cuMemcpyDtoHAsync_v2": 1, "cuLaunchKernel": 1}, "kernels": ["add"], "streams": ["0x10"]}
    process = {"tensorflow": "2.21.0", "keras": "3.15.1", "on_gpu": True, "counter": "available", "control": control}
    return tf_block.record_of({**process, "cases": {"8x512x768": {precision: ways}}})


def test_a_row_says_launches_copies_and_times() -> None:
    found = record(eager=seen())
    assert (found["available"], found["timed"], found["control_host_copies"]) == (True, True, 1)
    row = found["fp16"]["512"]["eager"]
    assert row["right"] is True
    counted = ("launches", "host_copies", "device_copies", "allocations", "waits")
    assert [row[name] for name in counted] == [2, 0, 1, 0, 0]
    assert row["kernels"] == ["plain", "tilerank::two_launches::second"]
    assert row["on_own_stream"] is True
    assert (row["us"], row["repetitions"], row["queued_calls"]) == (pytest.approx(20), 3, 50)


@pytest.mark.parametrize(
    ("call", "figure"),
    [
        ("cuMemcpyHtoDAsync_v2", "host_copies"),
        ("cuMemcpyDtoHAsync_v2_ptsz", "host_copies"),
        ("cuMemcpyAsync", "host_copies"),
        ("cuMemcpy2DAsync_v2", "host_copies"),
        ("cuMemcpyDtoD_v2", "device_copies"),
        ("cuMemAllocAsync", "allocations"),
        ("cuMemAlloc_v2", "allocations"),
        ("cuMemHostAlloc", "allocations"),
        ("cuStreamSynchronize", "waits"),
        ("cuLaunchKernelEx", "launches"),
    ],
)
def test_each_driver_call_counts_as_what_it_is(call: str, figure: str) -> None:
    row = record(eager=seen(counts={call: 10}))["fp16"]["512"]["eager"]
    counted = ("launches", "host_copies", "device_copies", "allocations", "waits")
    assert {name: row[name] for name in counted} == {**dict.fromkeys(counted, 0), figure: 1}


@pytest.mark.parametrize("streams", [["0x20"] * 20, ["0x10"] * 19 + ["(nil)"], []])
def test_a_launch_on_another_stream_than_tensorflows_shows(streams: list[str]) -> None:
    assert record(eager=seen(streams=streams))["fp16"]["512"]["eager"]["on_own_stream"] is False


def test_a_call_that_is_not_made_each_time_shows_as_a_fraction() -> None:
    assert record(eager=seen(counts={"cuMemAlloc_v2": 1}))["fp16"]["512"]["eager"]["allocations"] == 0.1


@pytest.mark.parametrize(
    ("precision", "changes", "fails"),
    [
        ("fp32", {"max_abs_error": 0.1, "max_excess": 1e-4}, False),
        ("fp32", {"max_abs_error": 2e-4, "max_excess": 1.1e-4}, True),
        ("bf16", {"max_abs_error": 5e-2, "max_excess": 1.0}, False),
        ("bf16", {"max_abs_error": 5.1e-2, "max_excess": 0.0}, True),
        ("fp16", {"max_abs_error": float("nan")}, True),
        ("fp32", {"max_abs_error": float("inf"), "max_excess": float("nan")}, True),
    ],
)
def test_a_wrong_result_has_a_reason_instead_of_a_time(precision: str, changes: dict[str, float], fails: bool) -> None:
    found = record(precision, eager=seen(**changes))
    row = found[precision]["512"]["eager"]
    assert (row["right"], "us" in row, "failure" in row) == (not fails, not fails, fails)
    json.dumps(found, allow_nan=False)
    assert tf_block.verdict(found).startswith(f"FAIL: {precision} 512 eager (error" if fails else "1 ways")


def test_keras_own_block_is_compared_where_it_runs() -> None:
    slow = seen(seconds=[1e-4, 1e-4, 1e-4])
    ways = record(eager=seen(), graph=seen(), layer=seen(), stock_eager=slow, stock_graph=seen())["fp16"]["512"]
    assert ways["eager"]["speedup_vs_stock"] == pytest.approx(5)
    assert ways["layer"]["speedup_vs_stock"] == pytest.approx(5), "a layer is called eagerly"
    assert ways["eager"]["speedup_vs_stock_is_noise"] is False
    assert ways["graph"]["speedup_vs_stock_is_noise"] is True
    assert "speedup_vs_stock" not in ways["stock_eager"]
    ways = record(eager=seen(), stock_eager={"unavailable": "no cuBLAS"})["fp16"]["512"]
    assert ways["stock_eager"] == {"available": False, "reason": "no cuBLAS"}
    assert "speedup_vs_stock" not in ways["eager"]


def test_the_summary_takes_the_section() -> None:
    assert "tensorflow" in SECTIONS


# ---- Where TensorFlow is ----


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is in this environment")
def test_without_tensorflow_the_module_says_where_to_get_it() -> None:
    with pytest.raises(ImportError, match=r"tilerank\.tf needs TensorFlow 2\.21 .*make tf-env"):
        importlib.import_module("tilerank.tf")


def test_the_environment_is_found_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tf_block.PYTHON_VARIABLE, raising=False)
    assert tf_block.interpreter(tmp_path) is None
    made = tmp_path / ".venv-tf" / "bin" / "python"
    made.parent.mkdir(parents=True)
    made.touch()
    assert tf_block.interpreter(tmp_path) == made
    monkeypatch.setenv(tf_block.PYTHON_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(TilerankError, match="nowhere, which does not exist; name a Python that has TensorFlow"):
        tf_block.interpreter(tmp_path)


def test_a_process_that_fails_is_told_by_its_last_line(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: tensorflow' >&2\nexit 3\n", encoding="utf-8")
    python.chmod(0o755)
    with pytest.raises(TilerankError, match="TensorFlow's process failed: ModuleNotFoundError: tensorflow"):
        tf_block.run(python, tmp_path, ["fp32"], on_cpu=True)


def test_a_process_that_a_signal_ends_runs_again_without_keras_own_block(tmp_path: Path) -> None:
    python = tmp_path / "python"
    text = """#!/bin/sh
case "$*" in *--without-stock*) for last; do :; done; echo "[\\"$last\\"]" >"$4" ;; *) kill -TRAP $$ ;; esac
"""
    python.write_text(text, encoding="utf-8")
    python.chmod(0o755)
    (reason,) = tf_block.run(python, tmp_path, ["fp32"], on_cpu=False)
    assert reason == "TensorFlow's process ended by signal 5 where it was called"
