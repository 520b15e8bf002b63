"""The library's parts of an encoder beside attention, for PyTorch tensors: embeddings, and linear layers with what
follows them.

Plain functions that queue a kernel on the current stream; each can be captured in a CUDA graph. They take what the
library takes (``cuda/include/tilerank.h`` documents each field) and check shapes, dtypes and devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tilerank.kernels import library, registry, torch_ops

_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_ACTIVATIONS = {None: library.ACTIVATION_NONE, "gelu": library.ACTIVATION_GELU, "tanh": library.ACTIVATION_TANH}


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The weights of a linear layer as the library takes them: `plain`, `interleaved` or `split` make it."""

    values: torch.Tensor
    format: int  # library.FORMAT_...
    columns: int  # outputs
    depth: int  # inputs
    dtype: torch.dtype  # of the layer
    exponent: int = 0  # split: what was multiplied by 2^exponent


def plain(weight: torch.Tensor) -> Weights:
    """``weight`` ``[out, in]`` itself, as `torch.nn.Linear` keeps it."""
    return Weights(weight, library.FORMAT_PLAIN, *weight.shape, weight.dtype)


def interleaved(weight: torch.Tensor) -> Weights:
    """A copy of ``weight`` ``[out, in]`` that lies as matrix products take it; both are multiples of 32."""
    columns, depth = weight.shape
    if depth % 32:
        raise ValueError(f"weight has {depth} inputs; interleaving takes a multiple of 32")
    # Factor 8 t + 4 s + 2 h + e goes to place 16 s + 8 h + 2 t + e.
    factors = _interleaved(weight).view(columns, depth // 32, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5)
    values = factors.reshape(columns, depth)
    return Weights(values, library.FORMAT_INTERLEAVED, columns, depth, weight.dtype)


def split(weight: torch.Tensor) -> Weights:
    """``weight`` ``[out, in]`` in fp32 as the sum of two fp16 terms, after a power of two that brings its largest
    element to 2^14: 22 bits of each element that is not much smaller. out is a multiple of 32, in of 16."""
    columns, depth = weight.shape
    if weight.dtype != torch.float32 or depth % 16:
        raise ValueError(
            f"weight is {weight.dtype} with {depth} inputs; splitting takes torch.float32, multiples of 16"
        )
    largest = float(weight.abs().max())
    if not math.isfinite(largest):
        raise ValueError("weight holds values that are not finite")
    exponent = 14 - math.frexp(largest)[1] + 1 if largest else 0
    exponent = max(-126, min(126, exponent))
    scaled = torch.ldexp(_interleaved(weight), torch.tensor(exponent, device=weight.device))
    high = scaled.half()
    terms = torch.stack([high, (scaled - high.float()).half()], dim=1)  # [out, 2, in]
    # Factor 4 t + 2 h + e goes to place 8 h + 2 t + e.
    terms = terms.view(columns, 2, depth // 16, 4, 2, 2).transpose(3, 4).reshape(columns, 2 * depth)
    return Weights(terms.contiguous(), library.FORMAT_SPLIT, columns, depth, weight.dtype, exponent)


def _interleaved(weight: torch.Tensor) -> torch.Tensor:
    """Within each 32 rows, row 8 j + 2 t + e has the factors of output 8 t + 2 j + e."""
    rows, depth = weight.shape
    if rows % 32:
        raise ValueError(f"weight has {rows} rows; interleaving takes a multiple of 32")
    return weight.view(rows // 32, 4, 4, 2, depth).transpose(1, 2).reshape(rows, depth)


def linear(
    x: torch.Tensor,
    weights: Weights,
    bias: torch.Tensor | None,
    *,
    variant: str,
    activation: str | None = None,
    x_exponent: int = 0,
    overlap: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``activation(x @ weight.T + bias)``: ``[rows, in]`` -> ``[rows, out]``.

    activation: None, "gelu" (by the error function) or "tanh". x_exponent: with split weights x is multiplied by
    2^x_exponent before it is split; nothing in it may then exceed 65,504. overlap: weights, bias, gamma and beta were
    complete before the work in front of this call on the stream, and may be read while that ends. Raises `KernelError`
    for what the variant does not serve, ValueError for tensors that do not fit.
    """
    return _linear(x, weights, bias, None, None, None, 0.0, variant, activation, x_exponent, overlap, out)


def linear_norm(
    x: torch.Tensor,
    weights: Weights,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float,
    *,
    variant: str,
    x_exponent: int = 0,
    overlap: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``layer_norm(x @ weight.T + bias + residual)``; ``out`` may be ``residual`` itself. Otherwise as `linear`."""
    return _linear(x, weights, bias, residual, gamma, beta, epsilon, variant, None, x_exponent, overlap, out)


def layernorm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float,
    *,
    variant: str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``layer_norm(x + bias + residual)`` of rows ``[rows, width]``; ``out`` may be x or residual.

    Raises as `linear` does.
    """
    rows, width = x.shape
    out = x.new_empty(rows, width) if out is None else out
    for name, tensor in (("x", x), ("residual", residual), ("out", out)):
        if tensor is not None:
            _check(name, tensor, x, (rows, width))
    for name, tensor in (("bias", bias), ("gamma", gamma), ("beta", beta)):
        if tensor is not None:
            _check(name, tensor, x, (width,), packed=True)
    params = library.LayernormParams(
        x=x.data_ptr(),
        residual=_pointer(residual),
        bias=_pointer(bias),
        gamma=gamma.data_ptr(),
        beta=beta.data_ptr(),
        out=out.data_ptr(),
        dtype=_dtype_code(x.dtype),
        epsilon=epsilon,
        rows=rows,
        width=width,
        x_stride=x.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        out_stride=out.stride(0),
    )
    torch_ops._call(registry.get(variant, "layernorm"), params, x.device)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """What `layer` multiplies by: weights ``[out, in]`` and biases as `torch.nn.Linear` keeps them, of one dtype."""

    out: tuple[torch.Tensor, torch.Tensor]
    up: tuple[torch.Tensor, torch.Tensor]
    down: tuple[torch.Tensor, torch.Tensor]
    norms: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # gamma and beta
    next: tuple[torch.Tensor, torch.Tensor] | None
    epsilon: float


def layer(
    found: torch.Tensor, x: torch.Tensor, weights: LayerWeights, *, variant: str, overlap: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What stands between two attentions: of what attention ``found`` in ``x``, both ``[rows, width]``, the layer's
    result and what its ``next`` product makes of it, whose rows may lie apart. x may not be used any more: the result
    takes its place.

    ``x1 = LN(out(found) + x)``, ``LN(down(gelu(up(x1))) + x1)``. overlap: as in `linear`. Raises as `linear` does.
    """
    rows, width = x.shape
    wide = weights.up[0].shape[0]
    _check("found", found, x, (rows, width))
    _check("x", x, x, (rows, width))
    shapes = {"out": (width, width), "up": (wide, width), "down": (width, wide)}
    if weights.next is not None:
        shapes["next"] = (weights.next[0].shape[0], width)
    pointers: dict[str, int] = {}
    for name, shape in shapes.items():
        weight, bias = getattr(weights, name)
        _check(f"{name} weight", weight, x, shape, packed=True)
        _check(f"{name} bias", bias, x, shape[:1], packed=True)
        pointers |= {f"{name}_weight": weight.data_ptr(), f"{name}_bias": bias.data_ptr()}
    for gamma, beta in weights.norms:
        _check("gamma", gamma, x, (width,), packed=True)
        _check("beta", beta, x, (width,), packed=True)
    row, after, workspace = registry.get(variant, "layer"), None, None
    if weights.next is not None:
        columns = shapes["next"][0]
        if row.workspace and columns <= wide:
            # In the rows of what is wide, which are used up where the next product's are made.
            workspace = x.new_empty(rows, wide)
            after = workspace[:, :columns]
        else:
            after = x.new_empty(rows, columns)
    params = library.LayerParams(
        found=found.data_ptr(),
        x=x.data_ptr(),
        out=x.data_ptr(),
        next=_pointer(after),
        gammas=tuple(gamma.data_ptr() for gamma, _ in weights.norms),
        betas=tuple(beta.data_ptr() for _, beta in weights.norms),
        dtype=_dtype_code(x.dtype),
        overlap=overlap,
        epsilon=weights.epsilon,
        rows=rows,
        width=width,
        wide=wide,
        next_columns=0 if after is None else after.shape[1],
        found_stride=found.stride(0),
        x_stride=x.stride(0),
        out_stride=x.stride(0),
        next_stride=0 if after is None else after.stride(0),
        **pointers,
    )
    torch_ops._call(row, params, x.device, workspace)
    return x, after


def token_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    *,
    variant: str,
    overlap: bool = False,
) -> torch.Tensor:
    """Attention from one token of each packed sequence: q ``[N, H, D]``, k and v ``[T, H, D]`` -> ``[N, H, D]``.

    cu_seqlens_k: int32 ``[N + 1]``, sequence s has keys cu_seqlens_k[s] to cu_seqlens_k[s + 1] - 1; clamped to what
    there is. A sequence without keys gives zeros. overlap: cu_seqlens_k was complete before the work in front of
    this call on the stream. Raises as `linear` does.
    """
    _, heads, head_dim = q.shape
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check(name, tensor, q, (q.shape[0] if name == "q" else k.shape[0], heads, head_dim))
    expected = (q.shape[0] + 1,)
    if cu_seqlens_k.dtype != torch.int32 or cu_seqlens_k.shape != expected or not cu_seqlens_k.is_contiguous():
        given = f"{cu_seqlens_k.dtype} {tuple(cu_seqlens_k.shape)}"
        raise ValueError(f"cu_seqlens_k is {given}; expected torch.int32 {expected}")
    out = q.new_empty(q.shape)
    params = library.TokenAttentionParams(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        out=out.data_ptr(),
        cu_seqlens_k=cu_seqlens_k.data_ptr(),
        dtype=_dtype_code(q.dtype),
        overlap=overlap,
        scale=scale,
        batch=q.shape[0],
        heads=heads,
        head_dim=head_dim,
        total_k=k.shape[0],
        q_strides=(q.stride(1), q.stride(0)),
        k_strides=(k.stride(1), k.stride(0)),
        v_strides=(v.stride(1), v.stride(0)),
        out_strides=(out.stride(1), out.stride(0)),
    )
    torch_ops._call(registry.get(variant, "token_attention"), params, q.device)
    return out


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
    """``layer_norm(words[ids] + positions[places] + types[type_ids])``, ``[rows, width]``.

    Indices are int32 ``[rows]``; those beyond a table are clamped to it. Raises as `linear` does.
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
        dtype=_dtype_code(words.dtype),
        epsilon=epsilon,
        rows=ids.shape[0],
        width=width,
        word_count=words.shape[0],
        position_count=positions.shape[0],
        type_count=0 if types is None else types.shape[0],
        out_stride=width,
    )
    torch_ops._call(registry.get(variant, "embedding"), params, words.device)
    return out


def _linear(
    x: torch.Tensor,
    weights: Weights,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    epsilon: float,
    variant: str,
    activation: str | None,
    x_exponent: int,
    overlap: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    rows, columns = x.shape[0], weights.columns
    like = weights.values.new_empty(0, dtype=weights.dtype)
    out = x.new_empty(rows, columns) if out is None else out
    _check("weight", weights.values, weights.values, tuple(weights.values.shape))
    _check("x", x, like, (rows, weights.depth))
    _check("out", out, like, (rows, columns))
    if residual is not None:
        _check("residual", residual, like, (rows, columns))
    for name, vector in (("bias", bias), ("gamma", gamma), ("beta", beta)):
        if vector is not None:
            _check(name, vector, like, (columns,), packed=True)
    params = library.LinearParams(
        x=x.data_ptr(),
        weight=weights.values.data_ptr(),
        bias=_pointer(bias),
        residual=_pointer(residual),
        gamma=_pointer(gamma),
        beta=_pointer(beta),
        out=out.data_ptr(),
        dtype=_dtype_code(weights.dtype),
        activation=_ACTIVATIONS[activation],
        weight_format=weights.format,
        weight_exponent=weights.exponent,
        x_exponent=x_exponent,
        overlap=overlap,
        epsilon=epsilon,
        rows=rows,
        columns=columns,
        depth=weights.depth,
        x_stride=x.stride(0),
        weight_stride=weights.values.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        out_stride=out.stride(0),
    )
    torch_ops._call(registry.get(variant, "linear"), params, x.device)
    return out


def _check(
    name: str, tensor: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...], *, packed: bool = False
) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}; expected {like.dtype} on {like.device}")
    if not (tensor.is_contiguous() if packed else tensor.stride(-1) == 1 or tensor.shape[-1] == 1):
        raise ValueError(
            f"{name} has strides {tensor.stride()}; its {'memory' if packed else 'rows'} must be contiguous"
        )
    if tensor.is_neg():
        raise ValueError(f"{name} is a view that negates what its memory holds; call resolve_neg() first")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name} requires a gradient; no variant is differentiable: use torch.inference_mode()"
        )


def _dtype_code(dtype: torch.dtype) -> int:
    if dtype not in _DTYPES:
        raise ValueError(f"tensors are {dtype}; served: {', '.join(map(str, _DTYPES))}")
    return library.DTYPE_CODES[_DTYPES[dtype]]


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
