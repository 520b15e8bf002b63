"""The attention block in TensorFlow: right, launched as it should be, without a copy, and how long a call takes.

TensorFlow lives in an environment of its own: `tilerank.bench.tf_process` runs there and hands back what it saw as
JSON.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilerank.bench.timing import Spread, ratio
from tilerank.errors import TilerankError
from tilerank.kernel_choices import Call

PYTHON_VARIABLE = "TILERANK_TF_PYTHON"
COUNTED = 10
"""Calls whose driver calls are counted together."""

QUEUED = 50
"""Most calls that are queued one behind another for one time."""

BATCH, WIDTH, HEADS = 8, 768, 12
TOKENS = (128, 512, 2048)
CPU_SHAPE, CPU_HEADS = (2, 24, 64), 4
LIMIT_S = 300.0

TOLERANCES = {"fp32": 1e-4, "fp16": 5e-2, "bf16": 5e-2}
"""Largest error against float64: absolute at 16 bit; beyond a relative 1e-3 at fp32."""

_DEVICE_COPY = re.compile(r"cuMemcpy(2D|3D)?(DtoD|Peer|DtoA|AtoD|AtoA)")
_ALLOCATION = re.compile(r"cu(Mem(Alloc|Create|HostAlloc|HostRegister)|Array(3D)?Create)")
_WAIT = re.compile(r"cu(Stream|Event|Ctx)Synchronize")


def interpreter(root: Path) -> Path | None:
    """The Python that has TensorFlow: $TILERANK_TF_PYTHON, or `make tf-env`'s; None without one."""
    named = os.environ.get(PYTHON_VARIABLE)
    path = Path(named) if named else root / ".venv-tf" / "bin" / "python"
    if named and not path.exists():
        raise TilerankError(f"{PYTHON_VARIABLE} is {named}, which does not exist; name a Python that has TensorFlow")
    return path if path.exists() else None


def calls(on_cpu: bool) -> tuple[Call, ...]:
    """What `run` calls, as far as choosing a row goes."""
    width, heads = (CPU_SHAPE[2], CPU_HEADS) if on_cpu else (WIDTH, HEADS)
    return (Call("block", "padded", width // heads, width=width),)


def run(python: Path, root: Path, precisions: Sequence[str], on_cpu: bool) -> dict[str, Any]:
    """What `tilerank.bench.tf_process` saw; on a CPU the reference at a small size.

    Raises:
        TilerankError: it ended with an error (its last line), or not at all. Where a signal ended it, it runs once more
            without Keras's own block.
    """
    shapes = ["x".join(map(str, CPU_SHAPE))] if on_cpu else [f"{BATCH}x{tokens}x{WIDTH}" for tokens in TOKENS]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "calls.json"
        command = [str(python), "-m", "tilerank.bench.tf_process", "--out", str(out), "--precisions", *precisions]
        command += [
            "--heads",
            str(CPU_HEADS if on_cpu else HEADS),
            "--shapes",
            *shapes,
            "--counted",
            str(COUNTED),
            "--queued",
            str(QUEUED),
            *(["--cpu"] if on_cpu else []),
        ]
        path = os.pathsep.join(filter(None, [str(root / "src"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}
        answer = _answer(command, environment)
        if answer.returncode < 0:  # without its libraries a product of TensorFlow's own may end the process
            reason = f"TensorFlow's process ended by signal {-answer.returncode} where it was called"
            answer = _answer([*command, "--without-stock", reason], environment)
        if answer.returncode != 0:
            said = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
            raise TilerankError(f"TensorFlow's process failed: {said[-1][:500]}")
        return json.loads(out.read_text(encoding="utf-8"))


def _answer(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise TilerankError(f"TensorFlow's process did not end within {LIMIT_S:.0f} s") from error


def record_of(seen: Mapping[str, Any]) -> dict[str, Any]:
    """The record's section `tensorflow`: precision -> tokens -> way of calling -> figures."""
    record: dict[str, Any] = {
        "available": True,
        "version": seen["tensorflow"],
        "keras": seen["keras"],
        "timed": seen["on_gpu"],
    }
    record |= {key: seen[key] for key in ("gpu", "cublas", "build_id", "counter") if key in seen}
    own_streams: set[str] = set()
    if "control" in seen:
        record["control_host_copies"] = _driver_figures(seen["control"], 1)["host_copies"]
        own_streams = set(seen["control"]["streams"])  # of a launch of TensorFlow's own
    for shape, precisions in seen["cases"].items():
        tokens = shape.split("x")[1]
        for precision, ways in precisions.items():
            rows = {way: _row(precision, each, own_streams) for way, each in ways.items()}
            for way, row in rows.items():
                stock = f"stock_{'eager' if way == 'layer' else way}"
                if way.startswith("stock") or not ("us" in row and "us" in rows.get(stock, {})):
                    continue
                against = ratio(Spread.of(ways[way]["seconds"]), Spread.of(ways[stock]["seconds"]))
                row["speedup_vs_stock"] = against.value
                row["speedup_vs_stock_is_noise"] = against.is_noise
            record.setdefault(precision, {})[tokens] = rows
    return record


def verdict(record: Mapping[str, Any]) -> str:
    """One line about a record: what failed, or that nothing did."""
    if not record["available"]:
        return record["reason"]
    rows = [
        (f"{precision} {tokens} {way}", row)
        for precision in TOLERANCES
        for tokens, ways in record.get(precision, {}).items()
        for way, row in ways.items()
    ]
    failed = [f"{name} ({row['failure']})" for name, row in rows if "failure" in row]
    return f"FAIL: {'; '.join(failed)}" if failed else f"{len(rows)} ways of calling it, all that ran are right"


def _row(precision: str, seen: Mapping[str, Any], own_streams: set[str]) -> dict[str, Any]:
    if "unavailable" in seen:
        return {"available": False, "reason": seen["unavailable"]}
    error = seen["max_excess"] if precision == "fp32" else seen["max_abs_error"]
    tolerance = TOLERANCES[precision]
    row: dict[str, Any] = {"right": bool(error <= tolerance)}
    if math.isfinite(seen["max_abs_error"]):  # a record holds no NaN
        row["max_abs_error"] = seen["max_abs_error"]
    if "counts" in seen:
        row |= _driver_figures(seen, COUNTED)
        row["on_own_stream"] = bool(own_streams) and set(seen["streams"]) == own_streams
    if not row["right"]:
        row["failure"] = f"error {error:.3g} against float64 is above {tolerance:.3g}"
    elif "seconds" in seen:
        spread = Spread.of(seen["seconds"])
        row |= {"us": spread.median * 1e6, "p10_us": spread.p10 * 1e6, "p90_us": spread.p90 * 1e6}
        row["repetitions"] = spread.repetitions
        row["queued_calls"] = seen["queued"]
    return row


def _driver_figures(seen: Mapping[str, Any], count: int) -> dict[str, Any]:
    """What one of ``count`` calls asked of the driver. A copy whose direction its name does not tell counts as the
    host's."""
    calls: Mapping[str, int] = seen["counts"]

    def each(matches: Any) -> float | int:
        total = sum(number for name, number in calls.items() if matches(name))
        return total // count if total % count == 0 else total / count

    return {
        "launches": each(lambda name: name.startswith("cuLaunch")),
        "host_copies": each(lambda name: name.startswith("cuMemcpy") and not _DEVICE_COPY.match(name)),
        "device_copies": each(_DEVICE_COPY.match),
        "allocations": each(_ALLOCATION.match),
        "waits": each(_WAIT.match),
        "kernels": sorted({kernel_name(name) for name in seen["kernels"]}),
    }


def kernel_name(symbol: str) -> str:
    """``namespace::kernel`` of a mangled name, its parameters left out; what is not mangled stays."""
    if not symbol.startswith("_Z"):
        return symbol
    names, rest = [], symbol[2:].lstrip("NK")
    while (match := re.match(r"(\d+)", rest)) is not None:
        length, rest = int(match[1]), rest[match.end() :]
        names.append(rest[:length])
        rest = rest[length:]
    return "::".join(names)
