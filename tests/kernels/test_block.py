"""Layer normalisation and the attention block: references against numpy, variants in the host build, stability."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from kernels.host.programs import run

from tilerank.kernels import build, library, registry
from tilerank.kernels.registry import Row

ROWS = [
    (operation, row.name)
    for operation in ("layernorm", "block")
    for row in registry.rows_of(operation)
    if row.device == "cuda" and row.host_exempt is None
]

SCHEDULES = ("forward", "reverse", "last_in", "random")


@pytest.fixture(scope="module")
def cpu() -> library.Library:
    return library.load(build.Target("cpu"))


# ---- The references ----


def layernorm_params(x: np.ndarray, out: np.ndarray, **arrays: np.ndarray) -> library.LayernormParams:
    params = library.LayernormParams(
        x=x.ctypes.data,
        out=out.ctypes.data,
        dtype=library.DTYPE_CODES["fp32" if x.dtype == np.float32 else "fp16"],
        epsilon=1e-5,
        rows=x.shape[0],
        width=x.shape[1],
        x_stride=x.strides[0] // x.itemsize,
        out_stride=out.strides[0] // x.itemsize,
    )
    for name, array in arrays.items():
        setattr(params, name, array.ctypes.data)
        if array.ndim == 2:
            setattr(params, f"{name}_stride", array.strides[0] // array.itemsize)
    return params


def normalized(rows: np.ndarray, gamma: np.ndarray | float = 1.0, beta: np.ndarray | float = 0.0) -> np.ndarray:
    rows = rows.astype(np.float64)
    centred = rows - rows.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gamma + beta


def test_layernorm_means_what_numpy_says(cpu: library.Library) -> None:
    rng = np.random.default_rng(0)
    x, residual, out, total = (rng.standard_normal((5, 12)).astype(np.float32) for _ in range(4))
    bias, gamma, beta = (rng.standard_normal(12).astype(np.float32) for _ in range(3))
    cpu.run("reference", layernorm_params(x, out))
    np.testing.assert_allclose(out, normalized(x), atol=1e-6)
    cpu.run("reference", layernorm_params(x, out, residual=residual, bias=bias, gamma=gamma, beta=beta, sum=total))
    exact = x.astype(np.float64) + bias + residual
    np.testing.assert_allclose(out, normalized(exact, gamma, beta), atol=1e-6)
    np.testing.assert_array_equal(total, exact.astype(np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": -1}, "rows is -1; it must be 0 or more"),
        ({"width": 0}, "width is 0; it must be 1 or more"),
        ({"dtype": 7}, "dtype is 7; allowed"),
        ({"epsilon": -1.0}, "epsilon is -1; it must be finite and 0 or more"),
        ({"out_stride": 11}, "out_stride is 11; its rows must not overlap: at least width, 12"),
        ({"x": 0}, "x is NULL"),
        ({"x": 2}, "x is 0x2; it must be a multiple of 4 bytes"),
    ],
)
def test_layernorm_refuses_by_name(cpu: library.Library, change: dict[str, float], message: str) -> None:
    x = np.zeros((5, 12), np.float32)
    params = layernorm_params(x, x.copy())
    for name, value in change.items():
        setattr(params, name, value)
    with pytest.raises(library.KernelError, match=re.escape(message)) as error:
        cpu.run("reference", params)
    assert error.value.status == library.INVALID_ARGUMENT


def block_params(**change: object) -> tuple[library.FusedAttentionParams, list[np.ndarray]]:
    """A valid call over zeros, with some fields changed; and the memory behind it."""
    sizes = {"x": (2, 5, 12), "out": (2, 5, 12)} | {name: (12, 12) for name in ("wq", "wk", "wv", "wo")}
    arrays = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    params = library.FusedAttentionParams(
        **{name: array.ctypes.data for name, array in arrays.items()},
        epsilon=1e-5,
        scale=0.5,
        batch=2,
        tokens=5,
        width=12,
        num_heads=3,
        head_dim=4,
        x_strides=(60, 12),
        out_strides=(60, 12),
        wq_stride=12,
        wk_stride=12,
        wv_stride=12,
        wo_stride=12,
    )
    for name, value in change.items():
        setattr(params, name, value)
    return params, list(arrays.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": -1}, "batch is -1"),
        ({"tokens": -1}, "tokens is -1"),
        ({"width": 0}, "width is 0"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"head_dim": 257}, "head_dim is 257; allowed: 1 to 256"),
        ({"dtype": 3}, "dtype is 3"),
        ({"causal": 2}, "causal is 2; allowed: 0, 1"),
        ({"pre_ln": 2}, "pre_ln is 2; allowed: 0, 1"),
        ({"weight_layout": 2}, "weight_layout is 2; allowed: 0 (rows of outputs), 1 (rows of inputs)"),
        ({"epsilon": float("nan")}, "epsilon is nan"),
        ({"scale": float("inf")}, "scale is inf"),
        ({"batch": 2**40, "tokens": 2**40}, "is above what 64 bits hold"),
        ({"out_strides": (60, 11)}, "out_strides[1] is 11; rows of out must not overlap: at least width, 12"),
        ({"wv_stride": 0}, "wv_stride is 0; it must be the elements between the 12 rows of that matrix"),
        ({"wo": 0}, "wo is NULL"),
        ({"gamma": 2}, "gamma is 0x2; it must be a multiple of 4 bytes"),
        ({"key_lengths": 8}, "key_lengths is given but key_lengths_type is 0 (none)"),
        ({"key_lengths_type": 3}, "key_lengths_type is 3"),
    ],
)
def test_the_block_refuses_by_name(cpu: library.Library, change: dict[str, object], message: str) -> None:
    params, memory = block_params(**change)
    memory[1][:] = 7.0
    with pytest.raises(library.KernelError, match=re.escape(message)) as error:
        cpu.run("reference", params)
    assert error.value.status == library.INVALID_ARGUMENT
    assert (memory[1] == 7.0).all(), "a refused call writes nothing"


def test_the_workspace_grows_with_the_tokens_not_with_their_square() -> None:
    """Of every row, as far as 65,536 tokens: four tensors and a counter or two a block of rows."""
    host = library.load(build.Target("host"))
    for row in registry.rows_of("block"):
        if row.device == "cpu" or row.host_exempt is not None:
            continue
        sizes = {}
        for tokens in (1024, 16384, 65536):
            params, _ = block_params(tokens=tokens, batch=1, num_heads=16, head_dim=64, width=1024)
            params.dtype = library.DTYPE_CODES[row.dtypes[0]]
            params.out_strides[:] = params.x_strides[:] = (tokens * 1024, 1024)
            sizes[tokens] = host.workspace_size(row.name, params)
        element = 4 if row.dtypes[0] == "fp32" else 2
        assert sizes[65536] <= 4 * 65536 * 1024 * element * 1.01, row.name
        assert sizes[65536] <= 64 * sizes[1024] * 1.01, row.name


# ---- The rows ----


@pytest.mark.parametrize("operation", ["layernorm", "block"])
def test_rungs_are_distinct_and_predict_something(operation: str) -> None:
    rows: tuple[Row, ...] = registry.rows_of(operation)
    rungs = [row.rung for row in rows]
    assert rungs == sorted(set(rungs))
    for row in rows:
        assert len(row.prediction) > 20, row.name
        if row.device == "cuda":
            assert row.file == f"{operation}/{row.rung:02d}_{row.name}.cu"


def check(flavour: str, operation: str, row: str, *arguments: str) -> dict:
    """Run check_block for one row; its summary, once all cases were right."""
    done = run(flavour, "check_block", "--operation", operation, "--variant", row, *arguments)
    cases = re.findall(r"^case (.*)$", done.stderr, re.MULTILINE)
    under_way = cases[-1] if cases else "none"
    assert done.returncode == 0, f"case under way: {under_way}\n{done.stdout}\n{done.stderr[-6000:]}"
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["variant"] == row
    assert summary["failed"] == 0
    assert summary["cases"] == len(cases) > summary["refused"]
    assert 0 < summary["worst"] <= 1
    return summary


@pytest.mark.parametrize(("operation", "row"), ROWS)
def test_agrees_with_the_reference_in_every_order_of_its_threads(operation: str, row: str) -> None:
    digests = {
        check("plain", operation, row, "--schedule", schedule, "--seed", "1")["digest"] for schedule in SCHEDULES
    }
    assert len(digests) == 1, "the results depend on the order in which threads run"


@pytest.mark.parametrize(("operation", "row"), ROWS)
def test_stays_in_bounds_and_aligned(operation: str, row: str) -> None:
    check("address", operation, row)


@pytest.mark.parametrize(("operation", "row"), ROWS)
def test_threads_do_not_race(operation: str, row: str) -> None:
    # A race does not depend on the length as a bound does.
    check("thread", operation, row, "--tokens", "33,130", "--schedule", "random")


# ---- Stability ----


@pytest.mark.parametrize("row", [name for operation, name in ROWS if operation == "layernorm"])
def test_a_large_mean_costs_no_accuracy_in_fp16(row: str) -> None:
    """Rows around 1,000 with a spread of 1: what the fp16 input says of them is normalised as float64 does it, while
    the variance as mean of squares less square of the mean, in fp32, loses it."""
    host = library.load(build.Target("host"))
    rng = np.random.default_rng(0)
    x = (1000 + rng.standard_normal((8, 1024))).astype(np.float16)
    out = np.full_like(x, np.nan)
    host.run(row, layernorm_params(x, out))
    exact = normalized(x)
    assert np.abs(out - exact).max() <= 1.01 * np.spacing(np.float16(4)) / 2, "one rounding of the result"

    single = x.astype(np.float32)
    naive = (single**2).mean(-1) - single.mean(-1) ** 2
    two_pass = single.astype(np.float64).var(-1)
    assert np.abs(naive / two_pass - 1).max() > 0.01, "the inputs tell the methods apart"
