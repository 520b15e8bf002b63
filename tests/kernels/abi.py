"""Calls through the C interface on numpy arrays, and what attention means for one row, written with numpy alone."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilerank.kernels import library as lib

Array = np.ndarray

MASK_TYPES = {
    np.dtype(np.bool_): lib.MASK_BOOL,
    np.dtype(np.float32): lib.MASK_FP32,
    np.dtype(np.float16): lib.MASK_FP16,
    np.dtype(np.uint16): lib.MASK_BF16,  # bf16 travels as its bits
}
LENGTHS_TYPES = {np.dtype(np.int32): lib.LENGTHS_INT32, np.dtype(np.int64): lib.LENGTHS_INT64}
DTYPES = {np.dtype(np.float32): "fp32", np.dtype(np.float16): "fp16", np.dtype(np.uint16): "bf16"}


def round_to_bf16(values: Array) -> Array:
    """The nearest bf16 (ties to even), as float64. Normal numbers and zero only."""
    fraction, exponent = np.frexp(np.asarray(values, np.float64))
    return np.ldexp(np.rint(fraction * 256) / 256, exponent)


def to_bits(values: Array) -> Array:
    """bf16 bits of numbers that are bf16 already."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bits(bits: Array) -> Array:
    """float32 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def element_strides(array: Array, axes: int) -> tuple[int, ...]:
    """Strides of the leading axes, counted in elements."""
    return tuple(stride // array.itemsize for stride in array.strides[:axes])


def padded_params(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    *,
    key_lengths: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> lib.AttentionParams:
    """Parameters for ``[B, H, S, D]`` arrays of any strides. The caller keeps the arrays alive."""
    batch, heads, q_len, head_dim = q.shape
    params = lib.AttentionParams(
        q=q.ctypes.data,
        k=k.ctypes.data,
        v=v.ctypes.data,
        out=out.ctypes.data,
        dtype=lib.DTYPE_CODES[DTYPES[q.dtype]],
        causal=causal,
        scale=1 / math.sqrt(head_dim) if scale is None else scale,
        batch=batch,
        heads=heads,
        kv_heads=k.shape[1],
        q_len=q_len,
        k_len=k.shape[2],
        head_dim=head_dim,
    )
    for field, array in (("q", q), ("k", k), ("v", v), ("out", out)):
        getattr(params, f"{field}_strides")[:] = element_strides(array, 3)
    if key_lengths is not None:
        params.key_lengths = key_lengths.ctypes.data
        params.key_lengths_type = LENGTHS_TYPES[key_lengths.dtype]
    if mask is not None:
        wide = np.broadcast_to(mask, (batch, heads, q_len, k.shape[2]))
        params.mask = mask.ctypes.data
        params.mask_type = MASK_TYPES[mask.dtype]
        params.mask_strides[:] = element_strides(wide, 4)
    return params


def packed_params(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
) -> lib.AttentionVarlenParams:
    """Parameters for ``[T, H, D]`` arrays and int32 offsets."""
    total_q, heads, head_dim = q.shape
    params = lib.AttentionVarlenParams(
        q=q.ctypes.data,
        k=k.ctypes.data,
        v=v.ctypes.data,
        out=out.ctypes.data,
        dtype=lib.DTYPE_CODES[DTYPES[q.dtype]],
        causal=causal,
        scale=1 / math.sqrt(head_dim),
        batch=len(cu_seqlens_q) - 1,
        heads=heads,
        kv_heads=k.shape[1],
        head_dim=head_dim,
        total_q=total_q,
        total_k=k.shape[0],
        max_seqlen_q=int(np.diff(cu_seqlens_q).max(initial=0)) if max_seqlen_q is None else max_seqlen_q,
        max_seqlen_k=int(np.diff(cu_seqlens_k).max(initial=0)) if max_seqlen_k is None else max_seqlen_k,
        cu_seqlens_q=cu_seqlens_q.ctypes.data,
        cu_seqlens_k=cu_seqlens_k.ctypes.data,
    )
    for field, array in (("q", q), ("k", k), ("v", v), ("out", out)):
        token, head = element_strides(array, 2)
        getattr(params, f"{field}_strides")[:] = (head, token)
    return params


def values_of(array: Array) -> Array:
    """float64 values of an array in one of the library's element types."""
    with np.errstate(invalid="ignore"):  # signalling NaNs among all bit patterns
        return (from_bits(array) if array.dtype == np.uint16 else array).astype(np.float64)


def expected_rows(
    q: Array,
    k: Array,
    v: Array,
    sees: Callable[[int, int, int, int], bool],
    bias: Callable[[int, int, int, int], float] = lambda b, h, i, j: 0.0,
    scale: float | None = None,
) -> Array:
    """Attention in float64, one row at a time over the keys that ``sees(b, h, i, j)`` lets through."""
    q, k, v = values_of(q), values_of(k), values_of(v)
    batch, heads, q_len, head_dim = q.shape
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    out = np.zeros(q.shape)
    for b in range(batch):
        for h in range(heads):
            group = h // (heads // k.shape[1])
            for i in range(q_len):
                keys = [j for j in range(k.shape[2]) if sees(b, h, i, j)]
                if keys:
                    scores = k[b, group, keys] @ q[b, h, i] * factor + [bias(b, h, i, j) for j in keys]
                    weights = np.exp(scores - scores.max())
                    out[b, h, i] = weights @ v[b, group, keys] / weights.sum()
    return out


@dataclass(frozen=True, slots=True)
class Field:
    """Where a member of a struct lies."""

    offset: int
    size: int


def layout_of(kind: type[ctypes.Structure]) -> dict[str, Field]:
    """Offsets and sizes of a ctypes structure's members, and its own size under the empty name."""
    members = {name: getattr(kind, name) for name, *_ in kind._fields_}
    return {"": Field(0, ctypes.sizeof(kind))} | {name: Field(m.offset, m.size) for name, m in members.items()}


def compile_c(compiler: str, source: Path, program: Path, include: Path, *libraries: str) -> list[str]:
    """The command that compiles a C program as strictly as it goes."""
    warnings = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    return [compiler, *warnings, f"-I{include}", str(source), "-o", str(program), *libraries]
