"""The TensorFlow binding: operations, functions and Keras layer, through the reference. Runs in an environment of its
own (`make tf-test`); TensorFlow is never in the main one."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not in this environment; `make tf-test` runs these in its own", allow_module_level=True)

import keras
import tensorflow as tf

import tilerank.tf
from stages import wheel
from tilerank.bench import tf_process
from tilerank.bench.driver_calls import DriverCalls
from tilerank.errors import TilerankError
from tilerank.kernels import build, registry, tf_build, tf_ops
from tilerank.tf import FusedAttentionLayer, attention, fused_attention

HEADS, DIM, WIDTH = 3, 16, 24
ROUNDING = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Twice the relative error of rounding once, which is all that the reference may add."""


on_gpu = pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="TensorFlow sees no GPU")


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    """The reference runs on the CPU; where there is a GPU, TensorFlow would take that."""
    with tf.device("GPU:0" if "test_gpu" in request.node.name else "CPU:0"):
        yield


def draw(seed: int, *shape: int, dtype: str = "float32") -> tf.Tensor:
    values = np.random.default_rng(seed).normal(size=shape)
    return tf.cast(tf.constant(values, tf.float32), dtype)


def block_inputs(dtype: str = "float32", batch: int = 2, tokens: int = 7) -> dict[str, tf.Tensor]:
    columns = HEADS * DIM
    shapes = {"x": (batch, tokens, WIDTH), "wq": (WIDTH, columns), "wk": (WIDTH, columns), "wv": (WIDTH, columns)}
    shapes |= {"wo": (columns, WIDTH), "gamma": (WIDTH,), "beta": (WIDTH,)}
    return {name: draw(seed, *shape, dtype=dtype) for seed, (name, shape) in enumerate(shapes.items())}


def block_extras(dtype: str = "float32") -> dict[str, tf.Tensor]:
    shapes = {
        "bq": (HEADS * DIM,),
        "bk": (HEADS * DIM,),
        "bv": (HEADS * DIM,),
        "bo": (WIDTH,),
        "residual": (2, 7, WIDTH),
    }
    return {name: draw(100 + seed, *shape, dtype=dtype) for seed, (name, shape) in enumerate(shapes.items())}


def visible(tokens: int, causal: bool, lengths: Any) -> tf.Tensor:
    """[batch or 1, 1, tokens, tokens]: which keys a query may see."""
    seen = tf.ones((1, 1, tokens, tokens), tf.bool)
    if causal:
        seen = tf.linalg.band_part(seen, -1, 0)
    return seen if lengths is None else seen & tf.sequence_mask(lengths, tokens)[:, None, None, :]


def tf_attention(q: Any, k: Any, v: Any, seen: Any = True) -> tf.Tensor:
    """TensorFlow's own softmax(QK^T)V, in float64; rows that see nothing are zeros."""
    q, k, v = (tf.cast(each, tf.float64) for each in (q, k, v))
    scores = tf.matmul(q, k, transpose_b=True) / np.sqrt(q.shape[-1])
    weights = tf.nn.softmax(tf.where(seen, scores, -1e300))
    return tf.where(tf.reduce_any(tf.broadcast_to(seen, tf.shape(scores)), -1, True), weights, 0.0) @ v


def tf_block(
    x: Any,
    wq: Any,
    wk: Any,
    wv: Any,
    wo: Any,
    gamma: Any,
    beta: Any,
    causal: bool,
    pre_ln: bool,
    lengths: Any = None,
    **extras: Any,
) -> tf.Tensor:
    """TensorFlow's own LN + softmax(QK^T)V block, in float64."""
    x, wq, wk, wv, wo, gamma, beta = (tf.cast(each, tf.float64) for each in (x, wq, wk, wv, wo, gamma, beta))
    added = {name: tf.cast(each, tf.float64) for name, each in extras.items()}

    def normalised(rows: tf.Tensor) -> tf.Tensor:
        mean, variance = tf.nn.moments(rows, -1, keepdims=True)
        return tf.nn.batch_normalization(rows, mean, variance, beta, gamma, float(np.float32(1e-5)))

    def heads(weights: tf.Tensor, bias: str) -> tf.Tensor:
        projected = inputs @ weights + added.get(bias, 0.0)
        return tf.transpose(tf.reshape(projected, (*x.shape[:2], HEADS, DIM)), (0, 2, 1, 3))

    inputs = normalised(x) if pre_ln else x
    attended = tf_attention(heads(wq, "bq"), heads(wk, "bk"), heads(wv, "bv"), visible(x.shape[1], causal, lengths))
    rows = tf.reshape(tf.transpose(attended, (0, 2, 1, 3)), (*x.shape[:2], HEADS * DIM))
    out = rows @ wo + added.get("bo", 0.0) + added.get("residual", 0.0)
    return out if pre_ln else normalised(out)


def assert_rounded_once(found: tf.Tensor, exact: tf.Tensor) -> None:
    tolerance = ROUNDING[found.dtype.name]
    np.testing.assert_allclose(tf.cast(found, tf.float64), exact, rtol=tolerance, atol=tolerance * 1e-2)


# ---- Building and loading ----


@pytest.fixture(scope="module")
def operations() -> Path:
    """The shared object with the operations, loaded by TensorFlow, which notes them when it loads the file first."""
    tf_ops._operations()
    return tf_build.build_operations(tf_ops.installed())


def test_the_operations_are_compiled_once_and_again_for_other_sources(operations: Path, tmp_path: Path) -> None:
    age = operations.stat().st_mtime_ns
    assert tf_build.build_operations(tf_ops.installed()) == operations
    assert operations.stat().st_mtime_ns == age
    for name in ("bindings/tf_op.cc", "include/tilerank.h", "exports.map"):
        source = tmp_path / name.replace("/", "-")
        shutil.copytree(registry.cuda_dir(), source, ignore=shutil.ignore_patterns("__pycache__"))
        with (source / name).open("a") as file:
            file.write("/* edited */\n")
        assert tf_build.operations_path(tf_ops.installed(), source=source) != operations, name


def test_a_compile_error_is_one_line(tmp_path: Path) -> None:
    source = tmp_path / "cuda"
    shutil.copytree(registry.cuda_dir(), source, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "bindings" / "tf_op.cc").write_text("int broken = nonsense;\n", encoding="utf-8")
    with pytest.raises(TilerankError, match=r"do not compile: .*tf_op\.cc:1:14: error: .*nonsense.*") as error:
        tf_build.build_operations(tf_ops.installed(), source=source, cache_folder=tmp_path / "cache")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").iterdir())


def test_operations_that_came_with_the_package_need_no_compiler(
    operations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler() -> None:
        raise TilerankError("there is no C++ compiler")

    monkeypatch.setattr(build, "packaged_dir", lambda: tmp_path)
    monkeypatch.setattr(build, "cxx_compiler", no_compiler)
    with pytest.raises(TilerankError, match="there is no C"):
        tf_build.build_operations(tf_ops.installed())
    packaged = Path(shutil.copy(operations, tf_build.packaged_path(tf_ops.installed())))
    assert tf_build.build_operations(tf_ops.installed()) == packaged
    other = replace(tf_ops.installed(), version="2.21.0 of another build")
    with pytest.raises(TilerankError, match="there is no C"):
        tf_build.build_operations(other)


def test_a_wheel_carries_the_operations(tmp_path: Path) -> None:
    """What `make wheel` puts into it is what an installed wheel finds, without a compiler."""
    wheel.copy_sources(tmp_path)
    carried = wheel.add_operations(Path(sys.executable), tmp_path)
    assert carried.parent == tmp_path / "src" / "tilerank" / "_lib"
    code = "from tilerank.kernels import tf_build, tf_ops; print(tf_build.build_operations(tf_ops.installed()))"
    installed = environment() | {"PATH": str(tmp_path / "nothing")}
    installed["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "src"), installed["PYTHONPATH"]])
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, env=installed
    )
    assert answer.stdout == f"{carried}\n", answer.stderr


def symbols(path: Path, *options: str) -> list[str]:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("there is no nm (binutils)")
    answer = subprocess.run([nm, "-D", *options, path], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in answer.stdout.splitlines()]


def test_the_binding_copies_and_allocates_nothing_of_its_own(operations: Path, repository: Path) -> None:
    text = (repository / "cuda" / "bindings" / "tf_op.cc").read_text(encoding="utf-8")
    code = re.sub(r"//.*", "", text)
    assert not re.search(r"cudaM|cuMem|memcpy|malloc|CopyTensor|flat<|SynchronousMem|BlockHost", code)
    assert not re.search(r"#include\s+[<\"].*cuda", code), "no CUDA header"
    assert {"allocate_output", "allocate_temp", "platform_specific_handle"} <= set(re.findall(r"\w+", code))
    assert symbols(operations, "--defined-only") == ["tilerank_tf_use_library"]
    needed = symbols(operations, "--undefined-only")
    assert len(needed) > 20
    assert not [name for name in needed if re.match(r"cuda[A-Z]|cu[A-Z]|tilerank", name)]


def test_another_tensorflow_is_refused_by_name() -> None:
    for version in ("2.20.0", "2.22.0-rc1", "3.0.1"):
        with pytest.raises(TilerankError, match=rf"TensorFlow is {re.escape(version)}; .*2\.21.*pip install"):
            tf_build.check_version(version)
    tf_build.check_version("2.21.1")


def test_the_page_says_which_tensorflow_is_served_and_what_it_is_built_for(repository: Path) -> None:
    text = (repository / "docs" / "bindings.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in row.split("|")] for row in re.findall(r"^\|(\s*2\.\d.*)\|$", text, re.MULTILINE)]
    (served,) = [row for row in rows if row[-1].startswith("served")]
    assert served[0] == ".".join(map(str, tf_build.SERVED))
    built = tf.sysconfig.get_build_info()
    if built["is_cuda_build"]:
        assert served[1] == f"CUDA {built['cuda_version'].rsplit('.', 1)[0]}, cuDNN {built['cudnn_version']}"
    package = next(each for each in distributions() if each.name in ("tensorflow", "tensorflow_cpu", "tensorflow-cpu"))
    (needed,) = [each for each in package.requires if each.startswith("keras")]
    assert served[2] == f"{needed.removeprefix('keras>=').removesuffix('.0')} or newer"


def test_what_is_no_kernel_library_is_refused(operations: Path, tmp_path: Path) -> None:
    with pytest.raises(TilerankError, match=r"cannot use .*missing\.so: .*missing\.so"):
        tf_build.use_library(operations, tmp_path / "missing.so")
    with pytest.raises(TilerankError, match=r"cannot use .*: it is no kernel library"):
        tf_build.use_library(operations, operations)
    inputs = block_inputs()  # the library that was loaded before is still there
    assert_rounded_once(
        fused_attention(**inputs, num_heads=HEADS, head_dim=DIM, variant="reference"),
        tf_block(**inputs, causal=False, pre_ln=True),
    )


# ---- The block ----


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(("causal", "pre_ln"), list(product([False, True], repeat=2)))
def test_the_block_is_tensorflows_own(dtype: str, causal: bool, pre_ln: bool) -> None:
    inputs, extras = block_inputs(dtype), block_extras(dtype)
    for given in ({}, extras, {"bo": extras["bo"]}):
        out = fused_attention(
            **inputs, num_heads=HEADS, head_dim=DIM, causal=causal, pre_ln=pre_ln, variant="reference", **given
        )
        assert out.dtype == inputs["x"].dtype
        assert_rounded_once(out, tf_block(**inputs, causal=causal, pre_ln=pre_ln, **given))


@pytest.mark.parametrize("name", ["bq", "bk", "bv", "bo", "gamma", "beta", "residual"])
def test_each_optional_tensor_reaches_its_place(name: str) -> None:
    """Given alone, so that no other one could stand in for it."""
    inputs = block_inputs()
    given = {"gamma": inputs.pop("gamma"), "beta": inputs.pop("beta"), **block_extras()}
    others = {"gamma": None, "beta": None} | {name: given[name]}
    out = fused_attention(**inputs, num_heads=HEADS, head_dim=DIM, variant="reference", **others)
    expected = {"gamma": tf.ones(WIDTH), "beta": tf.zeros(WIDTH), name: given[name]}
    assert_rounded_once(out, tf_block(**inputs, **expected, causal=False, pre_ln=True))


def test_weights_as_pytorch_keeps_them() -> None:
    inputs = block_inputs()
    expected = tf_block(**inputs, causal=False, pre_ln=True)
    for name in ("wq", "wk", "wv", "wo"):
        inputs[name] = tf.transpose(inputs[name])
    out = fused_attention(**inputs, num_heads=HEADS, head_dim=DIM, weight_layout="out_in", variant="reference")
    assert_rounded_once(out, expected)


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_tokens_beyond_the_length_never_leak(dtype: tf.DType) -> None:
    inputs = block_inputs()
    lengths = tf.constant([7, 3], dtype)
    expected = tf_block(**inputs, causal=False, pre_ln=True, lengths=lengths)
    inputs["x"] = tf.where(tf.sequence_mask(lengths, 7)[:, :, None], inputs["x"], np.nan)
    out = fused_attention(**inputs, num_heads=HEADS, head_dim=DIM, key_lengths=lengths, variant="reference")
    assert_rounded_once(out[0], expected[0])
    assert_rounded_once(out[1, :3], expected[1, :3])


def test_a_scale_of_ones_own() -> None:
    inputs = block_inputs()
    out = fused_attention(**inputs, num_heads=HEADS, head_dim=DIM, scale=0.5, variant="reference")
    inputs["wq"] *= 0.5 * DIM**0.5
    assert_rounded_once(out, tf_block(**inputs, causal=False, pre_ln=True))


@pytest.mark.parametrize("shape", [(0, 7), (2, 0)])
def test_nothing_in_gives_nothing_out(shape: tuple[int, int]) -> None:
    out = fused_attention(
        **block_inputs(batch=shape[0], tokens=shape[1]), num_heads=HEADS, head_dim=DIM, variant="reference"
    )
    assert out.shape == (*shape, WIDTH)


# ---- Attention ----


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_attention_is_tensorflows_own(dtype: str) -> None:
    q, k, v = (draw(seed, 2, 4, 5, 8, dtype=dtype) for seed in range(3))
    for causal, lengths in product([False, True], [None, [5, 2]]):
        out = attention(q, k, v, causal=causal, key_lengths=lengths, variant="reference")
        assert_rounded_once(out, tf_attention(q, k, v, visible(5, causal, lengths)))


def test_grouped_heads_share_keys() -> None:
    q, k, v = draw(1, 2, 4, 3, 8), draw(2, 2, 2, 6, 8), draw(3, 2, 2, 6, 8)
    out = attention(q, k, v, variant="reference")
    assert_rounded_once(out, tf_attention(q, *(tf.repeat(each, 2, axis=1) for each in (k, v))))


# ---- Shapes, graphs, gradients ----


def test_shapes_are_inferred() -> None:
    weights = {name: each for name, each in block_inputs().items() if name != "x"}

    for shape in ([None, None, WIDTH], [4, None, WIDTH], [4, 9, WIDTH]):
        block = tf.function(
            lambda x: fused_attention(x, **weights, num_heads=HEADS, head_dim=DIM, variant="reference"), autograph=False
        )
        assert block.get_concrete_function(tf.TensorSpec(shape)).output_shapes.as_list() == shape

    @tf.function(input_signature=[tf.TensorSpec([None, 4, None, 8]), tf.TensorSpec([3, None, None, 8])])
    def attended(q: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
        return attention(q, k, k, variant="reference")

    assert attended.get_concrete_function().output_shapes.as_list() == [3, 4, None, 8]


def test_a_graph_gives_what_eager_gives_for_any_batch_without_tracing_again() -> None:
    inputs = block_inputs()
    weights = {name: each for name, each in inputs.items() if name != "x"}

    @tf.function(input_signature=[tf.TensorSpec([None, None, WIDTH])])
    def block(x: tf.Tensor) -> tf.Tensor:
        return fused_attention(x, **weights, num_heads=HEADS, head_dim=DIM, variant="reference")

    for batch, tokens in ((2, 7), (1, 3), (3, 1)):
        x = draw(9, batch, tokens, WIDTH)
        eager = fused_attention(x, **weights, num_heads=HEADS, head_dim=DIM, variant="reference")
        np.testing.assert_array_equal(block(x), eager)
    assert block.experimental_get_tracing_count() == 1


def gradient(call: Any, x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        return tape.gradient(call(x), x)


def test_a_gradient_is_refused_by_name() -> None:
    inputs = block_inputs()
    calls = {
        "TilerankFusedAttention": lambda x: fused_attention(
            **{**inputs, "x": x}, num_heads=HEADS, head_dim=DIM, variant="reference"
        ),
        "TilerankAttention": lambda x: attention(x[None], x[None], x[None], variant="reference"),
    }
    for (name, call), traced in product(calls.items(), [False, True]):
        call = tf.function(call) if traced else call
        with pytest.raises(NotImplementedError, match=f"{name} has no gradient: .*backward"):
            gradient(call, inputs["x"])


def test_xla_says_that_it_has_no_kernel() -> None:
    inputs = block_inputs()
    compiled = tf.function(
        lambda x: fused_attention(**{**inputs, "x": x}, num_heads=HEADS, head_dim=DIM, variant="reference"),
        jit_compile=True,
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"unsupported operations.*TilerankFusedAttention"):
        compiled(inputs["x"])


# ---- Refusals ----


@pytest.mark.parametrize("variant", ["auto", "naive"])
def test_a_cpu_is_told_instead_of_running_slowly(variant: str) -> None:
    q = draw(1, 1, 1, 3, 8)
    # Where there is a GPU, auto has become the row that serves the call there before the operation runs.
    asked = r"\w+" if variant == "auto" and tf.config.list_physical_devices("GPU") else variant
    message = (
        f"TilerankAttention was asked for variant '{asked}' on a CPU, where tilerank has no kernels; put its inputs "
        "on a GPU, or ask for variant 'reference'"
    )
    with pytest.raises(tf.errors.UnimplementedError, match=message):
        attention(q, q, q, variant=variant)
    with pytest.raises(tf.errors.UnimplementedError, match=message):
        tf.function(lambda: attention(q, q, q, variant=variant))()
    with pytest.raises(tf.errors.UnimplementedError, match=r"TilerankFusedAttention was asked for .* on a CPU"):
        fused_attention(**wide_inputs("float32", 3, 32), num_heads=HEADS, head_dim=32)


BLOCK_REFUSALS = [
    ({"num_heads": 0}, ValueError, "num_heads is 0; allowed: 1 to"),
    ({"num_heads": 2.0}, TypeError, "num_heads is 2.0; expected an int"),
    ({"head_dim": 257}, ValueError, "head_dim is 257; allowed: 1 to 256"),
    ({"causal": 1}, TypeError, "causal is 1; expected True or False"),
    ({"pre_ln": "yes"}, TypeError, "pre_ln is 'yes'; expected True or False"),
    ({"epsilon": -1.0}, ValueError, "epsilon is -1.0; it must be finite and 0 or more"),
    ({"scale": float("nan")}, ValueError, "scale is nan; it must be finite"),
    ({"weight_layout": "keras"}, ValueError, "weight_layout is 'keras'; allowed: in_out, out_in"),
    ({"variant": "fastest"}, ValueError, "no block variant is called 'fastest'; there are: reference, "),
    ({"variant": 3}, TypeError, "variant is 3; expected the name of a variant, or 'auto'"),
    ({"x": tf.zeros((2, 7, WIDTH), tf.float64)}, TypeError, "x holds float64; expected float32, float16 or bfloat16"),
    ({"wk": tf.zeros((WIDTH, 48), tf.float16)}, TypeError, "wk holds float16; expected float32"),
    ({"x": tf.zeros((7, WIDTH))}, ValueError, r"x has shape \(7, 24\); expected \[batch, tokens, width\]"),
    ({"key_lengths": [1.0, 2.0]}, TypeError, "key_lengths holds float32; expected integers"),
    ({"wv": tf.zeros((WIDTH, 47))}, tf.errors.InvalidArgumentError, r"wv has shape \[24,47\]; expected \[24,48\]"),
    ({"wo": tf.zeros((WIDTH, 48))}, tf.errors.InvalidArgumentError, r"wo has shape \[24,48\]; expected \[48,24\]"),
    ({"beta": tf.zeros(7)}, tf.errors.InvalidArgumentError, r"beta has shape \[7\]; expected \[24\]"),
    ({"bq": tf.zeros(24)}, tf.errors.InvalidArgumentError, r"bq has shape \[24\]; expected \[48\]"),
    (
        {"residual": tf.zeros((2, 8, 24))},
        tf.errors.InvalidArgumentError,
        r"residual has shape \[2,8,24\]; expected \[2,7",
    ),
    ({"key_lengths": [7]}, tf.errors.InvalidArgumentError, r"key_lengths has shape \[1\]; expected \[2\]"),
]


@pytest.mark.parametrize(("change", "kind", "message"), BLOCK_REFUSALS, ids=[m[:24] for _, _, m in BLOCK_REFUSALS])
def test_refusals_name_field_value_and_what_is_allowed(change: dict[str, Any], kind: type, message: str) -> None:
    call = {**block_inputs(), "num_heads": HEADS, "head_dim": DIM, "variant": "reference", **change}
    with pytest.raises(kind, match=message):
        fused_attention(**call)
    if kind is tf.errors.InvalidArgumentError:  # while tracing, where shapes are known by then
        with pytest.raises(ValueError, match=r"expected \[|must be equal"):
            tf.function(lambda: fused_attention(**call)).get_concrete_function()


def test_a_width_that_is_not_known_is_refused() -> None:
    call = block_inputs()
    del call["x"]
    traced = tf.function(lambda x: fused_attention(x, **call, num_heads=HEADS, head_dim=DIM, variant="reference"))
    with pytest.raises(ValueError, match="its last dimension must be known when the call is traced"):
        traced.get_concrete_function(tf.TensorSpec([None, None, None]))


@pytest.mark.parametrize(
    "shapes", [((1, 2, 3, 8), (1, 2, 5, 9)), ((1, 2, 3, 8), (2, 2, 5, 8)), ((1, 2, 3, 8), (2, 5, 8))]
)
def test_attention_of_shapes_that_do_not_fit_is_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    q, k = (tf.zeros(shape) for shape in shapes)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"q, k and v have shapes .* k and v alike, with q's batch"
    ):
        attention(q, k, k, variant="reference")


def test_heads_that_share_no_keys_evenly_are_refused_by_the_library() -> None:
    q, k = tf.zeros((1, 3, 4, 8)), tf.zeros((1, 2, 4, 8))
    with pytest.raises(tf.errors.InvalidArgumentError, match="heads is 3; it must be a multiple of kv_heads, 2"):
        attention(q, k, k, variant="reference")


# ---- The Keras layer ----


def layer(**options: Any) -> FusedAttentionLayer:
    return FusedAttentionLayer(HEADS, DIM, variant="reference", **options)


def randomise(made: Any) -> None:
    """Weights unlike those that initialisers give: biases that are not zero."""
    random = np.random.default_rng(5)
    made.set_weights([random.normal(size=weight.shape) for weight in made.get_weights()])


def of(made: FusedAttentionLayer, dtype: str) -> dict[str, tf.Tensor]:
    """The layer's weights as it computes with them."""
    return {weight.name: tf.cast(tf.convert_to_tensor(weight.numpy()), dtype) for weight in made.weights}


@pytest.mark.parametrize("policy", ["float32", "float16", "bfloat16", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("add_residual", [False, True])
def test_the_layer_computes_as_its_policy_says(policy: str, add_residual: bool) -> None:
    made = layer(dtype=policy, add_residual=add_residual)
    x = draw(1, 2, 7, WIDTH)
    made.build(x.shape)
    randomise(made)
    out = made(x)
    kept = "float32" if policy.startswith("mixed") else policy
    assert {weight.dtype for weight in made.weights} == {kept}
    assert out.dtype.name == policy.removeprefix("mixed_")
    x = tf.cast(x, out.dtype)
    expected = tf_block(
        x, **of(made, out.dtype.name), causal=False, pre_ln=True, **({"residual": x} if add_residual else {})
    )
    assert_rounded_once(out, expected)


def test_a_global_policy_is_followed() -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        assert layer()(draw(1, 1, 2, WIDTH)).dtype == tf.float16
    finally:
        keras.config.set_dtype_policy(before)


def test_the_configuration_makes_the_same_layer() -> None:
    assert FusedAttentionLayer(np.int64(2), np.int32(8)).get_config()["num_heads"].__class__ is int, (
        "JSON knows no other"
    )
    made = layer(
        causal=True, pre_ln=False, dtype="mixed_bfloat16", epsilon=1e-3, use_bias=False, add_residual=True, name="block"
    )
    again = FusedAttentionLayer.from_config(made.get_config())
    assert again.get_config() == made.get_config()
    for name in ("num_heads", "head_dim", "causal", "pre_ln", "epsilon", "use_bias", "add_residual", "variant", "name"):
        assert getattr(again, name) == getattr(made, name), name
    assert again.dtype_policy.name == "mixed_bfloat16"
    assert len(again(draw(1, 1, 2, WIDTH)).shape) == 3
    assert len(again.weights) == 6, "no biases"


def test_a_saved_and_an_exported_model_are_loaded_in_another_process(tmp_path: Path) -> None:
    """A SavedModel holds operations and no code: they must be known before it is loaded."""
    inputs = keras.Input((None, WIDTH))
    first, second = layer(dtype="mixed_float16"), layer(causal=True, pre_ln=False, add_residual=True)
    model = keras.Model(inputs, second(first(inputs)))
    randomise(model)
    x = draw(1, 2, 7, WIDTH)
    model.save(tmp_path / "model.keras")
    model.export(tmp_path / "exported", verbose=False)
    np.save(tmp_path / "x.npy", x)
    code = """
import keras, numpy, tensorflow as tf, tilerank.tf
x = numpy.load("x.npy")
tilerank.tf.load_operations()
exported = tf.saved_model.load("exported")
numpy.save("exported.npy", exported.serve(tf.constant(x)))
numpy.save("saved.npy", keras.models.load_model("model.keras").predict(x, verbose=0))
"""
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment())
    assert answer.returncode == 0, answer.stderr
    for name in ("saved.npy", "exported.npy"):
        np.testing.assert_array_equal(np.load(tmp_path / name), model(x), err_msg=name)


def environment() -> dict[str, str]:
    """Of a process that sees no GPU."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}


def test_key_lengths_reach_the_block() -> None:
    made, x = layer(), draw(1, 2, 7, WIDTH)
    full = made(x)
    short = made(x, key_lengths=tf.constant([7, 2]))
    np.testing.assert_array_equal(short[0], full[0])
    assert_rounded_once(short, tf_block(x, **of(made, "float32"), causal=False, pre_ln=True, lengths=[7, 2]))
    assert np.abs(short[1] - full[1]).max() > 1e-3


def test_a_keras_mask_is_refused_not_dropped() -> None:
    embedding = keras.layers.Embedding(10, WIDTH, mask_zero=True)
    with pytest.raises(ValueError, match=r"carries a Keras mask.*pass key_lengths"):
        layer()(embedding(np.array([[0, 1, 2]])))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0; allowed: 1 to"),
        ({"head_dim": "64"}, "head_dim is '64'; expected an int"),
        ({"head_dim": 257}, "head_dim is 257; allowed: 1 to 256"),
        ({"dtype": "float64"}, "computes in float64; allowed: float32, float16, bfloat16"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        FusedAttentionLayer(**{"num_heads": HEADS, "head_dim": DIM, **options})


def test_training_through_the_layer_is_refused() -> None:
    model = keras.Sequential([keras.Input((None, WIDTH)), layer()])
    model.compile("sgd", "mse")
    x = np.zeros((2, 3, WIDTH), np.float32)
    assert model.predict(x, verbose=0).shape == x.shape
    with pytest.raises(NotImplementedError, match="TilerankFusedAttention has no gradient"):
        model.fit(x, x, verbose=0)


def test_the_encoder_example_runs_and_its_two_encoders_agree(repository: Path) -> None:
    script = repository / "docs" / "example" / "keras_encoder.py"
    answer = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, env=environment())
    assert answer.returncode == 0, answer.stdout + answer.stderr
    lines = answer.stdout.splitlines()
    assert lines[0].startswith("12 layers, [2, 24, 64], 4 heads, ")
    largest, difference = (float(number) for number in re.findall(r"[\d.e+-]+\d", lines[1]))
    assert 0 < difference < 1e-4 * largest
    assert lines[2].startswith("stock: ")
    assert lines[3].startswith("fused: ")


def test_the_program_of_the_page_runs(repository: Path, tmp_path: Path) -> None:
    """As it stands but for the variant and fewer tokens: a CPU has the reference only."""
    text = (repository / "docs" / "bindings.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    for stands, runs in (("head_dim=64,", "head_dim=64, variant='reference',"), ("(8, 512, 768)", "(1, 4, 768)")):
        assert stands in program
        program = program.replace(stands, runs)
    command = [sys.executable, "-c", program + "print(y.shape, y.dtype.name)"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment())
    assert answer.stdout == "(1, 4, 768) float16\n", answer.stderr
    assert (tmp_path / "block.keras").exists()


def test_the_package_gives_the_module_when_asked() -> None:
    code = (
        "import sys, tilerank; assert 'tensorflow' not in sys.modules; "
        "print(tilerank.tf.FusedAttentionLayer.__name__); sys.exit('torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment()
    )
    assert (answer.returncode, answer.stdout) == (0, "FusedAttentionLayer\n"), answer.stderr
    assert tilerank.tf.__all__ == ["FusedAttentionLayer", "attention", "fused_attention", "load_operations"]


# ---- What the record is taken from ----


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_way_of_calling_and_keras_own_block_compute_one_thing(precision: str) -> None:
    """Weights that differ in every place: one that went into the wrong one would show."""
    case = tf_process.run_case((2, 5, 24), precision, Namespace(heads=3, without_stock=None), on_gpu=False, calls=None)
    assert list(case) == ["eager", "graph", "layer", "stock_eager", "stock_graph"]
    for way, seen in case.items():
        assert 0 < seen["max_abs_error"] < {"fp32": 2e-6, "fp16": 1e-2}[precision], way
        assert seen["device"].endswith("CPU:0"), way
        assert "seconds" not in seen, "a CPU is not timed"
    alone = tf_process.run_case((2, 5, 24), precision, Namespace(heads=3, without_stock="why"), False, None)
    assert [way for way, seen in alone.items() if "max_abs_error" in seen] == ["eager", "graph", "layer"]
    assert alone["stock_eager"] == alone["stock_graph"] == {"unavailable": "why"}


@pytest.mark.parametrize(("seconds", "queued"), [(1e-5, 50), (2e-3, 15), (1e-1, tf_process.FEWEST)])
def test_slow_calls_are_queued_in_smaller_number(seconds: float, queued: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf_process, "seconds_of", lambda run, count: seconds)
    assert tf_process.queue_of(lambda: tf.zeros(1), most=50) == queued


# ---- On a GPU ----

LIMITS = {"float32": (1e-4, 1e-3), "float16": (5e-2, 0.0), "bfloat16": (5e-2, 0.0)}
"""Largest error, absolute and relative, of a block whose sums are kept in float32."""


def wide_inputs(dtype: str, tokens: int, head_dim: int) -> dict[str, tf.Tensor]:
    """A block of HEADS heads whose products are of size one."""
    width, columns = 96, HEADS * head_dim
    shapes = {"x": (2, tokens, width), "wq": (width, columns), "wk": (width, columns), "wv": (width, columns)}
    shapes |= {"wo": (columns, width), "gamma": (width,), "beta": (width,)}
    scales = {"wo": columns**-0.5} | dict.fromkeys(("wq", "wk", "wv"), width**-0.5)
    return {
        name: tf.cast(draw(seed, *shape) * scales.get(name, 1.0), dtype)
        for seed, (name, shape) in enumerate(shapes.items())
    }


@on_gpu
@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128])
def test_gpu_block_is_the_reference(dtype: str, head_dim: int) -> None:
    absolute, relative = LIMITS[dtype]
    for tokens, causal, pre_ln in ((1, False, True), (65, True, True), (130, False, False), (257, True, False)):
        inputs = wide_inputs(dtype, tokens, head_dim)
        lengths = tf.constant([tokens, tokens // 2 + 1])
        call = {"num_heads": HEADS, "head_dim": head_dim, "causal": causal, "pre_ln": pre_ln, "key_lengths": lengths}
        with tf.device("CPU:0"):
            on_cpu = {name: tf.identity(each) for name, each in inputs.items()}
            expected = fused_attention(**on_cpu, **call, variant="reference")
        eager = fused_attention(**inputs, **call)
        graph = tf.function(partial(fused_attention, **call), autograph=False)(**inputs)
        assert "GPU:0" in eager.device
        np.testing.assert_allclose(
            tf.cast(eager, tf.float32), tf.cast(expected, tf.float32), rtol=relative, atol=absolute
        )
        np.testing.assert_array_equal(tf.cast(graph, tf.float32), tf.cast(eager, tf.float32))


@on_gpu
@pytest.mark.parametrize("dtype", list(LIMITS))
def test_gpu_attention_is_the_reference(dtype: str) -> None:
    q, k, v = (draw(seed, 2, 4, 130, 32, dtype=dtype) for seed in range(3))
    with tf.device("CPU:0"):
        expected = attention(*(tf.identity(each) for each in (q, k, v)), key_lengths=[130, 31], variant="reference")
    out = attention(q, k, v, key_lengths=[130, 31])
    assert "GPU:0" in out.device
    np.testing.assert_allclose(tf.cast(out, tf.float32), tf.cast(expected, tf.float32), atol=LIMITS[dtype][0])


@on_gpu
def test_gpu_layer_follows_its_policy_and_survives_saving(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((None, 96)), FusedAttentionLayer(HEADS, 32, dtype="mixed_float16")])
    randomise(model)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    x = draw(1, 2, 65, 96)
    out = model(x)
    assert out.dtype == tf.float16
    np.testing.assert_array_equal(again(x), out)
    np.testing.assert_array_equal(model.predict(x, verbose=0), out)


@on_gpu
def test_gpu_call_copies_nothing_waits_for_nothing_and_launches_on_tensorflows_stream(tmp_path: Path) -> None:
    inputs = wide_inputs("float16", 130, 32)
    x = inputs["x"]
    try:
        calls = DriverCalls(tmp_path)
    except TilerankError as error:
        pytest.skip(str(error))
    for _ in range(2):  # the first time kernels are loaded and memory is taken
        fused_attention(**inputs, num_heads=HEADS, head_dim=32)
        (x + x).numpy()
    tensorflows = calls.of(lambda: (x + x).numpy())
    assert any(name.startswith("cuMemcpyDtoH") for name in tensorflows.counts), "the counter sees copies"
    seen = calls.of(lambda: fused_attention(**inputs, num_heads=HEADS, head_dim=32))
    assert any("tilerank" in name for name in seen.kernels)
    assert len(set(seen.streams)) == 1
    assert set(seen.streams) == set(tensorflows.streams)
    assert not [name for name in seen.counts if re.match(r"cuMem(cpy|Alloc|Host)|cu(Stream|Event|Ctx)Synch", name)]


@on_gpu
def test_gpu_refuses_the_reference() -> None:
    with pytest.raises(tf.errors.UnimplementedError, match=r"'reference' on a GPU; .* under tf.device\('CPU:0'\)"):
        fused_attention(**block_inputs(), num_heads=HEADS, head_dim=DIM, variant="reference")
