"""The kernels as TensorFlow operations over the C interface; `tilerank.tf` is the public face of this module.

The operations are compiled against the installed TensorFlow when this module is first imported (`tf_build`). They take
TensorFlow's own memory and stream: nothing is copied, nothing allocated outside TensorFlow's allocators, nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import gcd, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tilerank.errors import TilerankError
from tilerank.kernels import library, registry, tf_build

_DTYPES = {tf.float32: "fp32", tf.float16: "fp16", tf.bfloat16: "bf16"}
_LENGTHS = (tf.int32, tf.int64)
_OPTIONAL = ("bq", "bk", "bv", "bo", "gamma", "beta", "residual")
WEIGHT_LAYOUTS = ("in_out", "out_in")
MOST_HEADS = 1 << 20

Tensor = Any
"""What TensorFlow turns into a tensor: a ``tf.Tensor``, a variable, an array."""


# AutoGraph would rewrite these for tf.function; there is nothing in them that depends on a tensor's values.
@tf.autograph.experimental.do_not_convert
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_lengths: Tensor | Sequence[int] | None = None,
    causal: bool = False,
    scale: float | None = None,
    variant: str = "auto",
) -> tf.Tensor:
    """Softmax attention over a padded batch, on a GPU, or on the CPU with ``variant="reference"``.

    Args:
        q: ``[B, H, Sq, D]``, float32, float16 or bfloat16, D from 1 to 256 and known when the call is traced.
        k, v: ``[B, Hkv, Sk, D]`` of q's dtype; H is a multiple of Hkv (grouped-query attention).
        key_lengths: ``[B]`` integers (int32 or int64): key j of sequence b counts if j < key_lengths[b]; values are
            clamped to 0..Sk. What stands beyond never reaches the result.
        causal: query i sees keys 0..i.
        scale: factor on the scores; None means 1/sqrt(D).
        variant: a row of the registry, or ``auto`` for the best that serves the call on the visible GPUs.

    Returns:
        A tensor of q's shape and dtype. A query that sees no key gets zeros.

    Raises:
        TypeError, ValueError: arguments that do not fit, or a named variant that does not serve the call.
        tf.errors.InvalidArgumentError: shapes that do not fit, where they are only known when the operation runs.
        tf.errors.UnimplementedError: the operation runs on a CPU, and ``reference`` was not asked for.
        NotImplementedError: when a gradient is taken; no variant has a backward pass.
    """
    q, k, v = _tensors(q=q, k=k, v=v)
    head_dim = _static("q", q, 4)
    lengths = _key_lengths(key_lengths)
    masks = _masks(lengths, causal)
    row = _choose("attention", variant, _DTYPES[q.dtype], head_dim, k.shape[2] or 0, masks)
    return _operations().tilerank_attention(q, k, v, lengths, causal=causal, scale=_scale(scale), row=row)


@tf.autograph.experimental.do_not_convert
def fused_attention(
    x: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wo: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    num_heads: int,
    head_dim: int,
    causal: bool = False,
    pre_ln: bool = True,
    epsilon: float = 1e-5,
    *,
    bq: Tensor | None = None,
    bk: Tensor | None = None,
    bv: Tensor | None = None,
    bo: Tensor | None = None,
    residual: Tensor | None = None,
    key_lengths: Tensor | Sequence[int] | None = None,
    scale: float | None = None,
    weight_layout: str = "in_out",
    variant: str = "auto",
) -> tf.Tensor:
    """The attention block of an encoder layer: ``wo . attention(wq, wk, wv . LN(x))``, in place of its five launches.

    No matrix of tokens by tokens is ever in memory. All tensors have x's dtype; sums are kept in float32.

    Args:
        x: ``[B, N, C]``, float32, float16 or bfloat16; C known when the call is traced.
        wq, wk, wv: ``[C, num_heads * head_dim]``, as Keras's Dense keeps them.
        wo: ``[num_heads * head_dim, C]``.
        gamma, beta: ``[C]`` of the layer normalisation; None is ones, zeros.
        num_heads, head_dim: how the projections are cut into heads; their product need not be C.
        causal: token i sees tokens 0..i only.
        pre_ln: True normalises x; False normalises the block's result, residual included.
        epsilon: of the normalisation.
        bq, bk, bv, bo: biases, ``[num_heads * head_dim]`` and ``[C]``.
        residual: ``[B, N, C]``, added to the output projection; None: the residual stays outside.
        key_lengths: ``[B]`` as in `attention`.
        scale: factor on the scores; None means 1/sqrt(head_dim).
        weight_layout: ``in_out``, or ``out_in`` for weights as PyTorch's nn.Linear keeps them (transposed).
        variant: a row of the registry, or ``auto``.

    Returns:
        ``[B, N, C]`` of x's dtype.

    Raises:
        As `attention`.
    """
    (x,) = _tensors(x=x)
    wq, wk, wv, wo = (_like(x, name, each) for name, each in (("wq", wq), ("wk", wk), ("wv", wv), ("wo", wo)))
    num_heads = integer("num_heads", num_heads, MOST_HEADS)
    head_dim = integer("head_dim", head_dim, registry.MAX_HEAD_DIM)
    _check_block(pre_ln, epsilon, weight_layout)
    width = _static("x", x, 3)
    values = dict(zip(_OPTIONAL, (bq, bk, bv, bo, gamma, beta, residual), strict=True))
    given = [name for name in _OPTIONAL if values[name] is not None]
    lengths = _key_lengths(key_lengths)
    masks = _masks(lengths, causal)
    divisor = gcd(width, num_heads * head_dim)
    row = _choose("block", variant, _DTYPES[x.dtype], head_dim, x.shape[1] or 0, masks, divisor)
    return _operations().tilerank_fused_attention(
        *(x, wq, wk, wv, wo),
        [_like(x, name, values[name]) for name in given],
        lengths,
        given=given,
        num_heads=num_heads,
        head_dim=head_dim,
        causal=causal,
        pre_ln=pre_ln,
        epsilon=epsilon,
        scale=_scale(scale),
        weight_layout=weight_layout,
        row=row,
    )


# --- arguments -----------------------------------------------------------------------------------------------


def _tensors(**values: Tensor) -> list[tf.Tensor]:
    """Tensors of one dtype, which is one that the kernels know."""
    first, *others = values
    converted = [tf.convert_to_tensor(values[first])]
    if converted[0].dtype not in _DTYPES:
        raise TypeError(f"{first} holds {converted[0].dtype.name}; expected float32, float16 or bfloat16")
    return converted + [_like(converted[0], name, values[name]) for name in others]


def _like(first: tf.Tensor, name: str, value: Tensor) -> tf.Tensor:
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype != first.dtype:
        raise TypeError(f"{name} holds {tensor.dtype.name}; expected {first.dtype.name}, as the first tensor has")
    return tensor


def _static(name: str, tensor: tf.Tensor, rank: int) -> int:
    """The last dimension, by which a variant is chosen."""
    if tensor.shape.rank is not None and tensor.shape.rank != rank:
        expected = "[batch, heads, tokens, head_dim]" if rank == 4 else "[batch, tokens, width]"
        raise ValueError(f"{name} has shape {tensor.shape}; expected {expected}")
    last = tensor.shape[-1] if tensor.shape.rank is not None else None
    if last is None:
        raise ValueError(f"{name} has shape {tensor.shape}; its last dimension must be known when the call is traced")
    return int(last)


def _masks(lengths: list[tf.Tensor], causal: Any) -> frozenset[str]:
    if not isinstance(causal, bool):
        raise TypeError(f"causal is {causal!r}; expected True or False")
    return frozenset(["key_lengths"] * len(lengths) + ["causal"] * causal)


def _key_lengths(values: Tensor | Sequence[int] | None) -> list[tf.Tensor]:
    if values is None:
        return []
    tensor = tf.convert_to_tensor(values)
    if tensor.dtype not in _LENGTHS:
        raise TypeError(f"key_lengths holds {tensor.dtype.name}; expected integers (int32 or int64)")
    return [tensor]


def _scale(scale: float | None) -> list[float]:
    if scale is None:
        return []
    if not isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be finite")
    return [float(scale)]


def integer(name: str, value: Any, most: int) -> int:
    """``value`` as an int from 1 to ``most``; TypeError or ValueError, naming it, when it is none."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; expected an int")
    if not 1 <= value <= most:
        raise ValueError(f"{name} is {value}; allowed: 1 to {most}")
    return int(value)


def _check_block(pre_ln: Any, epsilon: Any, weight_layout: Any) -> None:
    if not isinstance(pre_ln, bool):
        raise TypeError(f"pre_ln is {pre_ln!r}; expected True or False")
    if not isfinite(epsilon) or epsilon < 0:
        raise ValueError(f"epsilon is {epsilon}; it must be finite and 0 or more")
    if weight_layout not in WEIGHT_LAYOUTS:
        raise ValueError(f"weight_layout is {weight_layout!r}; allowed: {', '.join(WEIGHT_LAYOUTS)}")


# --- choosing a variant, loading the operations --------------------------------------------------------------


@cache
def _capabilities() -> tuple[int, ...]:
    """Compute capabilities, times ten, of the GPUs that TensorFlow sees."""
    details = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.get_visible_devices("GPU")]
    return tuple(sorted({10 * major + minor for major, minor in (each["compute_capability"] for each in details)}))


@lru_cache(maxsize=4096)
def _choose(
    operation: str, variant: str, dtype: str, head_dim: int, k_len: int, masks: frozenset[str], width: int = 0
) -> str:
    """The row that the operation asks the library for. Where the operation will run is not known yet: on a CPU it
    refuses every row but ``reference``, with its own words."""
    if not isinstance(variant, str):
        raise TypeError(f"variant is {variant!r}; expected the name of a variant, or 'auto'")
    named = None if variant == "auto" else registry.get(variant, operation)
    device = "cuda" if named is None else named.device
    capabilities = _capabilities() if device == "cuda" else (0,)
    if not capabilities:
        return variant
    if device == "cuda" and library.load().backend != "cuda":
        raise TilerankError(
            "the kernels were built for the CPU only, because no nvcc was found: put the CUDA toolkit's bin folder on "
            "PATH, set CUDA_HOME, or `pip install nvidia-cuda-nvcc nvidia-cuda-cccl`, and start again"
        )
    chosen = set()
    for sm in capabilities:
        request = registry.Request(device, sm, dtype, head_dim, "padded", k_len, masks, width=width)
        if named is None:
            chosen.add(registry.select(request, registry.rows_of(operation)).row.name)
        elif (reason := registry.refusal(named, request)) is not None:
            raise ValueError(
                f"variant {variant!r} does not serve this call: {reason}; variant='auto' takes one that does"
            )
        else:
            chosen.add(variant)
    if len(chosen) > 1:
        raise ValueError(
            f"the visible GPUs (compute capabilities {', '.join(str(sm / 10) for sm in capabilities)}) are served best "
            f"by different variants; name one of {', '.join(sorted(chosen))}, or make GPUs of one kind visible"
        )
    return chosen.pop()


def installed() -> tf_build.TensorFlow:
    """The TensorFlow of this process, as its compiler needs it; `TilerankError` when it is not one that is served."""
    tf_build.check_version(tf.__version__)
    return tf_build.TensorFlow(
        version=f"{tf.__version__} {tf.version.GIT_VERSION} {tf.version.COMPILER_VERSION}",
        include=Path(tf.sysconfig.get_include()),
        library=Path(tf.sysconfig.get_lib()),
        defines=tuple(flag for flag in tf.sysconfig.get_compile_flags() if flag.startswith("-D")),
        link=next(flag for flag in tf.sysconfig.get_link_flags() if flag.startswith("-l")),
    )


def load_operations() -> None:
    """Make the operations known to TensorFlow, which a SavedModel with them needs before it is loaded. Everything else
    here does so by itself. Compiles them where need be (some seconds, once).

    Raises:
        TilerankError: another TensorFlow than is served, no C++ compiler, or a kernel library that does not load.
    """
    _operations()


@cache
def _operations() -> Any:
    """The operations, calling the library of this installation."""
    path = tf_build.build_operations(installed())
    operations = tf.load_op_library(str(path))
    tf_build.use_library(path, library.load().path)
    return operations


def _refuse_gradient(operation: tf.Operation, *_: Tensor) -> None:
    raise NotImplementedError(
        f"{operation.type} has no gradient: no tilerank variant has a backward pass. Call it outside of a "
        "GradientTape, or train with TensorFlow's own layers and swap the block in afterwards"
    )


for _name in ("TilerankAttention", "TilerankFusedAttention"):
    tf.RegisterGradient(_name)(_refuse_gradient)
