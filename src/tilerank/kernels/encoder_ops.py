"""The library's parts of an encoder beside attention, for PyTorch tensors: embeddings, and linear layers with what
follows them.

Plain functions that queue a kernel on the current stream; each can be captured in a CUDA graph. They take what the
library takes (``cuda/include/tilerank.h`` documents each field) and check shapes, dtypes and devices.
"""

from __future__ import annotations

from functools import cache

import torch

from tilerank.errors import TilerankError
from tilerank.kernels import library, registry, torch_ops

_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@cache
def _order_of_32() -> torch.Tensor:
    """Which output the factors in each of 32 interleaved rows belong to: TILERANK_ROWS_INTERLEAVED."""
    block, thread, element = torch.meshgrid(torch.arange(4), torch.arange(4), torch.arange(2), indexing="ij")
    return (8 * thread + 2 * block + element).reshape(-1)


def interleaved(weight: torch.Tensor) -> torch.Tensor:
    """A copy of ``weight`` ``[out, in]`` whose rows lie as the kernels take them; out is a multiple of 32."""
    rows = weight.shape[0]
    if rows % 32:
        raise ValueError(f"weight has {rows} rows; interleaving takes a multiple of 32")
    order = (torch.arange(0, rows, 32)[:, None] + _order_of_32()).reshape(-1)
    return weight.index_select(0, order.to(weight.device))


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    variant: str,
    gelu: bool = False,
    is_interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias``, through GELU (by the error function) where ``gelu``: ``[rows, in]`` -> ``[rows, out]``.

    weight: ``[out, in]``, or where ``is_interleaved`` what `interleaved` made of it. Raises `KernelError` for what the
    variant does not serve, ValueError for tensors that do not fit.
    """
    return _linear(x, weight, bias, None, None, None, 0.0, variant, gelu, is_interleaved, out)


def linear_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float,
    *,
    variant: str,
    is_interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``layer_norm(x @ weight.T + bias + residual)``; ``out`` may be ``residual`` itself. Otherwise as `linear`."""
    return _linear(x, weight, bias, residual, gamma, beta, epsilon, variant, False, is_interleaved, out)


def embedding(
    ids: torch.Tensor,
    places: torch.Tensor,
    type_ids: torch.Tensor | None,
    words: torch.Tensor,
    positions: torch.Tensor,
    types: torch.Tensor | None,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float,
    *,
    variant: str,
) -> torch.Tensor:
    """``layer_norm(words[ids] + positions[places] + types[type_ids])``, ``[rows, width]``; indices are int32 ``[rows]``.

    Indices beyond a table are clamped to it. Raises as `linear` does.
    """
    if types is None:
        type_ids = None
    for name, indices in (("ids", ids), ("places", places), ("type_ids", type_ids)):
        if indices is not None and (indices.dtype != torch.int32 or not indices.is_contiguous()):
            raise ValueError(f"{name} is {indices.dtype}, strides {indices.stride()}; expected contiguous torch.int32")
        if indices is not None and indices.shape != ids.shape:
            raise ValueError(f"{name} has shape {tuple(indices.shape)} but ids has {tuple(ids.shape)}")
    width = words.shape[1]
    tables = {"words": words, "positions": positions, "types": types, "gamma": gamma, "beta": beta}
    for name, table in tables.items():
        if table is not None:
            _check(name, table, words, (width,) if name in ("gamma", "beta") else (table.shape[0], width), packed=True)
    out = words.new_empty(ids.shape[0], width)
    params = library.EmbeddingParams(
        ids=ids.data_ptr(),
        places=places.data_ptr(),
        type_ids=_pointer(type_ids),
        words=words.data_ptr(),
        positions=positions.data_ptr(),
        types=_pointer(types),
        gamma=gamma.data_ptr(),
        beta=beta.data_ptr(),
        out=out.data_ptr(),
        dtype=_dtype_code(words),
        epsilon=epsilon,
        rows=ids.shape[0],
        width=width,
        word_count=words.shape[0],
        position_count=positions.shape[0],
        type_count=0 if types is None else types.shape[0],
        out_stride=width,
    )
    torch_ops._call(torch_ops._library().embedding, registry.get(variant, "embedding"), params, words.device)
    return out


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    epsilon: float,
    variant: str,
    gelu: bool,
    is_interleaved: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    columns, depth = weight.shape
    rows = x.shape[0]
    _check("x", x, weight, (rows, depth))
    _check("weight", weight, weight, (columns, depth))
    for name, vector in (("bias", bias), ("gamma", gamma), ("beta", beta)):
        if vector is not None:
            _check(name, vector, weight, (columns,), packed=True)
    if residual is not None:
        _check("residual", residual, weight, (rows, columns))
    if out is None:
        out = x.new_empty(rows, columns)
    _check("out", out, weight, (rows, columns))
    params = library.LinearParams(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=_pointer(bias),
        residual=_pointer(residual),
        gamma=_pointer(gamma),
        beta=_pointer(beta),
        out=out.data_ptr(),
        dtype=_dtype_code(weight),
        activation=library.ACTIVATION_GELU if gelu else library.ACTIVATION_NONE,
        weight_rows=library.ROWS_INTERLEAVED if is_interleaved else library.ROWS_PLAIN,
        epsilon=epsilon,
        rows=rows,
        columns=columns,
        depth=depth,
        x_stride=x.stride(0),
        weight_stride=weight.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        out_stride=out.stride(0),
    )
    torch_ops._call(torch_ops._library().linear, registry.get(variant, "linear"), params, weight.device)
    return out


def _check(
    name: str, tensor: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...], *, packed: bool = False
) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}; expected {like.dtype} on {like.device}")
    if not (tensor.is_contiguous() if packed else tensor.stride(-1) == 1 or tensor.shape[-1] == 1):
        raise ValueError(f"{name} has strides {tensor.stride()}; its {'memory' if packed else 'rows'} must be contiguous")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{name} requires a gradient; no variant is differentiable: use torch.inference_mode()")


def _dtype_code(tensor: torch.Tensor) -> int:
    if tensor.dtype not in _DTYPES:
        raise TilerankError(f"tensors are {tensor.dtype}; served: {', '.join(map(str, _DTYPES))}")
    return library.DTYPE_CODES[_DTYPES[tensor.dtype]]


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
