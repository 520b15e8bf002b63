"""What `tilerank.bench.tensorflow` runs in TensorFlow's own environment: the block eagerly, in a graph and as a layer.

    python -m tilerank.bench.tf_process --out calls.json

Imports TensorFlow and no torch. On a GPU it runs what ``auto`` chooses, counts the CUDA driver calls of a few calls,
and takes times beside Keras's own block; without one it runs the reference, untimed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tilerank.tf
from tilerank.bench.driver_calls import DriverCalls
from tilerank.errors import TilerankError
from tilerank.kernels import library

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
QUEUE_S, FEWEST = 0.03, 5
"""Calls that are queued for one time: as many as take QUEUE_S, and no fewer than FEWEST."""

Block = Callable[[tf.Tensor], tf.Tensor]


def cublas_version() -> str:
    """Of the library that TensorFlow's own products run on; where a CUDA 12 one is absent, another may stand in."""
    try:
        version = ctypes.CDLL("libcublas.so.12").cublasGetProperty
    except (OSError, AttributeError):
        return "none"
    parts = (ctypes.c_int(), ctypes.c_int(), ctypes.c_int())
    for kind, part in enumerate(parts):
        version(kind, ctypes.byref(part))
    return ".".join(str(part.value) for part in parts)


# ---- The blocks ----


def inputs_of(batch: int, tokens: int, width: int, columns: int, dtype: str) -> dict[str, np.ndarray]:
    """x, weights and biases, rounded to ``dtype``, in float64: what every block and the check start from."""
    random = np.random.default_rng(0)
    shapes = {name: (width, columns) for name in ("wq", "wk", "wv")} | {"wo": (columns, width)}
    shapes |= {"bq": (columns,), "bk": (columns,), "bv": (columns,), "bo": (width,)}
    values = {name: random.normal(0, shape[0] ** -0.5, shape) for name, shape in shapes.items()}
    values |= {"gamma": 1 + random.normal(0, 0.1, width), "beta": random.normal(0, 0.1, width)}
    values["x"] = random.normal(0, 1, (batch, tokens, width))
    with tf.device("CPU:0"):
        return {name: tf.cast(tf.cast(tf.constant(value), dtype), tf.float64).numpy() for name, value in values.items()}


def exact_block(values: Mapping[str, np.ndarray], heads: int, head_dim: int) -> np.ndarray:
    """The first sequence (it knows nothing of others) through TensorFlow's own operations, in float64 on the CPU."""
    with tf.device("CPU:0"):
        x = tf.constant(values["x"][:1])
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        rows = tf.nn.batch_normalization(x, mean, variance, values["beta"], values["gamma"], 1e-5)

        def split(name: str) -> tf.Tensor:
            projected = rows @ values[f"w{name}"] + values[f"b{name}"]
            return tf.transpose(tf.reshape(projected, (1, -1, heads, head_dim)), (0, 2, 1, 3))

        q, k, v = split("q"), split("k"), split("v")
        attended = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / np.sqrt(head_dim)) @ v
        rows = tf.reshape(tf.transpose(attended, (0, 2, 1, 3)), (1, -1, heads * head_dim))
        return (rows @ values["wo"] + values["bo"]).numpy()


def blocks_of(
    values: Mapping[str, np.ndarray], heads: int, head_dim: int, dtype: str, variant: str
) -> dict[str, Block]:
    """The block called eagerly, in a graph and as a layer; and what a Keras encoder has in its place."""
    given = {name: tf.cast(tf.constant(value), dtype) for name, value in values.items() if name != "x"}

    def eager(x: tf.Tensor) -> tf.Tensor:
        return tilerank.tf.fused_attention(x, **given, num_heads=heads, head_dim=head_dim, variant=variant)

    layer = tilerank.tf.FusedAttentionLayer(heads, head_dim, dtype=dtype, variant=variant)
    layer.build(values["x"].shape)
    layer.set_weights([values[weight.name] for weight in layer.weights])
    norm = keras.layers.LayerNormalization(epsilon=1e-5, dtype=dtype)
    attention = keras.layers.MultiHeadAttention(heads, head_dim, dtype=dtype)
    norm.build(values["x"].shape)
    attention.build(values["x"].shape, values["x"].shape)
    norm.set_weights([values["gamma"], values["beta"]])
    split = [(values[f"w{name}"].reshape(-1, heads, head_dim), values[f"b{name}"].reshape(heads, -1)) for name in "qkv"]
    out = (values["wo"].reshape(heads, head_dim, -1), values["bo"])
    attention.set_weights([each for pair in (*split, out) for each in pair])

    def stock(x: tf.Tensor) -> tf.Tensor:
        rows = norm(x)
        return attention(rows, rows)

    def graph(call: Block) -> Block:
        return tf.function(call, autograph=False)

    return {"eager": eager, "graph": graph(eager), "layer": layer, "stock_eager": stock, "stock_graph": graph(stock)}


# ---- One case ----


def settle(result: tf.Tensor) -> None:
    """Wait for the device: one number of the last result."""
    result[0, 0, 0].numpy()


def seconds_of(run: Callable[[], tf.Tensor], queued: int) -> float:
    """Seconds a call, the host's share included, of calls that are queued one behind another."""
    start = time.perf_counter()
    for _ in range(queued - 1):
        run()
    settle(run())
    return (time.perf_counter() - start) / queued


def repeat(run: Callable[[], tf.Tensor], count: int) -> None:
    """Call it, keeping no result: one that is kept would have the allocator take more memory."""
    for _ in range(count):
        run()


def queue_of(run: Callable[[], tf.Tensor], most: int) -> int:
    """How many calls to queue for one time: the wait at the end is to be a small share of it, however fast they are."""
    return max(FEWEST, min(most, round(QUEUE_S / seconds_of(run, FEWEST))))


def run_case(
    shape: Sequence[int], precision: str, options: argparse.Namespace, on_gpu: bool, calls: DriverCalls | None
) -> dict[str, Any]:
    """Every block at one size: result against float64, driver calls, times in turns."""
    dtype, (batch, tokens, width), heads = DTYPES[precision], shape, options.heads
    head_dim = width // heads
    values = inputs_of(batch, tokens, width, heads * head_dim, dtype)
    exact = exact_block(values, heads, head_dim)
    x = tf.cast(tf.constant(values["x"]), dtype)
    blocks = blocks_of(values, heads, head_dim, dtype, "auto" if on_gpu else "reference")
    record: dict[str, Any] = {}
    for name, block in blocks.items():
        if name.startswith("stock") and options.without_stock:
            record[name] = {"unavailable": options.without_stock}
            continue
        try:
            block(x)
            found = block(x)
        except tf.errors.OpError as error:
            if not name.startswith("stock"):
                raise
            record[name] = {"unavailable": str(error).strip().splitlines()[0][:300]}
            continue
        error = np.abs(found[:1].numpy().astype(np.float64) - exact)
        record[name] = {
            "device": found.device,
            "max_abs_error": float(error.max()),
            "max_excess": float((error - 1e-3 * np.abs(exact)).max()),  # beyond a relative error of 1e-3
        }
        if calls is not None:
            repeat(lambda block=block: block(x), 2)  # beside the result that is kept
            record[name] |= asdict(calls.of(lambda block=block: repeat(lambda: block(x), options.counted)))
    if on_gpu:
        runs = {name: block for name, block in blocks.items() if "unavailable" not in record[name]}
        for name, block in runs.items():
            record[name] |= {"seconds": [], "queued": queue_of(lambda block=block: block(x), options.queued)}
        for index in range(options.rounds + 2):
            for name, block in runs.items():
                taken = seconds_of(lambda block=block: block(x), record[name]["queued"])
                if index >= 2:
                    record[name]["seconds"].append(taken)
    return record


def main() -> None:
    """Run every case and write what was seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--precisions", nargs="+", choices=tuple(DTYPES), default=list(DTYPES))
    parser.add_argument("--shapes", nargs="+", required=True, help="batch x tokens x width, e.g. 8x512x768")
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--counted", type=int, default=10, help="calls whose driver calls are counted together")
    parser.add_argument("--queued", type=int, default=50, help="most calls queued one behind another for one time")
    parser.add_argument("--rounds", type=int, default=11, help="times taken of each block, in turns")
    parser.add_argument("--without-stock", metavar="REASON", help="leave Keras's own block out")
    parser.add_argument("--cpu", action="store_true", help="the reference, though there may be a GPU")
    options = parser.parse_args()
    if options.cpu:
        tf.config.set_visible_devices([], "GPU")
    tf.config.experimental.enable_tensor_float_32_execution(False)  # Keras's own fp32 is held to fp32's limit
    gpus = tf.config.get_visible_devices("GPU")
    record: dict[str, Any] = {"tensorflow": tf.__version__, "keras": keras.__version__, "on_gpu": bool(gpus)}
    record |= {"build_id": library.load().build_id, "cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        calls = None
        if gpus:
            record["cublas"] = cublas_version()
            record["gpu"] = tf.config.experimental.get_device_details(gpus[0]).get("device_name")
            try:
                calls = DriverCalls(Path(folder))
            except TilerankError as error:
                record["counter"] = str(error)
            else:  # a counter that sees no copy where there is one would be no witness
                tensor = tf.ones((4,)) + 1  # the first call loads the kernel
                record["counter"] = "available"
                record["control"] = asdict(calls.of(lambda: (tensor + 1).numpy()))
        for shape in options.shapes:
            sizes = [int(size) for size in shape.split("x")]
            record["cases"][shape] = {}
            for precision in options.precisions:
                record["cases"][shape][precision] = run_case(sizes, precision, options, bool(gpus), calls)
                print(f"tf_process: {shape} {precision} done", file=sys.stderr, flush=True)
    options.out.write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main()
