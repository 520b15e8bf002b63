"""The attention block as a PyTorch operator and module: ``torch.ops.tilerank.fused_attention`` over the C interface.

Like `torch_ops` a plain ``torch.library`` operator over ctypes, opaque to ``torch.compile``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tilerank.kernels import library, registry, torch_ops

_WEIGHTS = ("wq", "wk", "wv", "wo")
_ALIGNMENT = 16  # bytes, of what rows with a `width_multiple` read


def fused_attention(
    x: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    wo: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    num_heads: int,
    head_dim: int,
    causal: bool = False,
    pre_ln: bool = True,
    epsilon: float = 1e-5,
    *,
    bq: torch.Tensor | None = None,
    bk: torch.Tensor | None = None,
    bv: torch.Tensor | None = None,
    bo: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    key_lengths: torch.Tensor | Sequence[int] | None = None,
    scale: float | None = None,
    variant: str = "auto",
    check: bool = False,
) -> torch.Tensor:
    """The attention block of an encoder layer: normalisation, projections, attention, output projection.

    With y = layer_norm(x) where ``pre_ln``, else y = x: q, k, v = y wq^T + bq, y wk^T + bk, y wv^T + bv; attention over
    ``num_heads`` heads of them; o = attended wo^T + bo (+ residual). The result is o where ``pre_ln``, else
    layer_norm(o). No matrix of N x N numbers is ever in memory. On the CPU (variant ``reference``) or a CUDA device.

    Args:
        x: ``[B, N, C]``, float32, float16 or bfloat16. Rows are read in place at any batch and token strides.
        wq, wk, wv: ``[num_heads * head_dim, C]``, as ``nn.Linear.weight``; transposed views of ``[C, num_heads *
            head_dim]`` memory are read in place too, where all four weights are so.
        wo: ``[C, num_heads * head_dim]``.
        gamma, beta: ``[C]``, of the normalisation; None: ones and zeros.
        num_heads, head_dim: head_dim from 1 to 256 on the CPU; what CUDA rows serve stands in docs/block.md.
        causal: token i sees tokens 0..i.
        pre_ln: normalise x (True), or the result (False, as BERT does).
        epsilon: of the normalisation.
        bq, bk, bv: ``[num_heads * head_dim]``; bo: ``[C]``.
        residual: ``[B, N, C]``, added to the output projection, before a normalisation of the result.
        key_lengths: ``[B]`` integers from 0 to N: token j of sequence b is attended to if j < key_lengths[b].
        scale: factor on the scores; None means 1/sqrt(head_dim).
        variant: a row of the registry's ``block``, or ``auto`` for the best one that serves the call.
        check: wait for the device and refuse key lengths that do not fit, as in `tilerank.attention`.

    Under ``torch.autocast`` every tensor is converted to the autocast dtype first.

    Returns:
        ``[B, N, C]`` of x's dtype (or autocast's) and device, contiguous.

    Raises:
        ValueError: shapes, dtypes, devices or lengths that do not fit, or a named variant that does not serve the call.
        TypeError: an argument of another kind.
        NotImplementedError: a gradient would be recorded, or a tangent lost; no variant is differentiable.
    """
    tensors: dict[str, torch.Tensor | None] = {"x": x, "wq": wq, "wk": wk, "wv": wv, "wo": wo}
    optional = {"gamma": gamma, "beta": beta, "bq": bq, "bk": bk, "bv": bv, "bo": bo, "residual": residual}
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    torch_ops._check_tensors(**tensors)
    torch_ops._refuse_gradients(**tensors)  # here too, because torch.func unwraps what the operator sees
    for name, value in (("causal", causal), ("pre_ln", pre_ln), ("check", check)):
        if not isinstance(value, bool | torch.SymBool):
            raise TypeError(f"{name} is {value!r}; expected True or False")
    if not isinstance(variant, str):
        raise TypeError(f"variant is {variant!r}; expected the name of a variant, or 'auto'")
    num_heads, head_dim = torch_ops._maximum("num_heads", num_heads), torch_ops._maximum("head_dim", head_dim)
    if key_lengths is not None:
        key_lengths = torch_ops._integers("key_lengths", key_lengths)
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim) if head_dim > 0 else 1.0
    scale, epsilon = _number("scale", scale), _number("epsilon", epsilon)
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items() if tensor is not None}
    return torch.ops.tilerank.fused_attention.default(
        *(tensors.get(name) for name in ("x", *_WEIGHTS, *optional)),
        key_lengths,
        num_heads,
        head_dim,
        causal,
        pre_ln,
        epsilon,
        scale,
        variant,
        check,
    )


class FusedAttentionLayer(torch.nn.Module):
    """`fused_attention` with its weights: in place of a block's LayerNorm, three projections, attention and output
    projection. Forward only: call it under ``torch.no_grad()`` or ``torch.inference_mode()``.

    Args:
        width: C, of the tokens.
        num_heads, head_dim: head_dim None means width / num_heads.
        causal, pre_ln, epsilon, variant: as in `fused_attention`.
        bias: whether the four projections have biases.
        device, dtype: of the parameters.

    Raises:
        ValueError: width is no multiple of num_heads and head_dim is not given.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        causal: bool = False,
        pre_ln: bool = True,
        epsilon: float = 1e-5,
        bias: bool = True,
        variant: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None:
            if num_heads < 1 or width % num_heads:
                raise ValueError(f"width is {width}; without head_dim it must be a multiple of num_heads, {num_heads}")
            head_dim = width // num_heads
        self.num_heads, self.head_dim = num_heads, head_dim
        self.causal, self.pre_ln, self.variant = causal, pre_ln, variant
        columns = num_heads * head_dim
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm = torch.nn.LayerNorm(width, eps=epsilon, **options)
        self.query = torch.nn.Linear(width, columns, bias=bias, **options)
        self.key = torch.nn.Linear(width, columns, bias=bias, **options)
        self.value = torch.nn.Linear(width, columns, bias=bias, **options)
        self.output = torch.nn.Linear(columns, width, bias=bias, **options)

    def forward(
        self,
        x: torch.Tensor,
        key_lengths: torch.Tensor | Sequence[int] | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[B, N, C]`` -> ``[B, N, C]``; arguments and errors as `fused_attention`."""
        return fused_attention(
            x,
            self.query.weight,
            self.key.weight,
            self.value.weight,
            self.output.weight,
            self.norm.weight,
            self.norm.bias,
            self.num_heads,
            self.head_dim,
            self.causal,
            self.pre_ln,
            self.norm.eps,
            bq=self.query.bias,
            bk=self.key.bias,
            bv=self.value.bias,
            bo=self.output.bias,
            residual=residual,
            key_lengths=key_lengths,
            variant=self.variant,
        )

    def extra_repr(self) -> str:
        """What the repr of the module adds to its parts."""
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, causal={self.causal}, pre_ln={self.pre_ln}, "
            f"variant={self.variant!r}"
        )


# --- arguments -----------------------------------------------------------------------------------------------


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymFloat | torch.SymInt):
        raise TypeError(f"{name} is {value!r}; expected a number")
    return float(value)


def _check(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    vectors: dict[str, torch.Tensor | None],
    residual: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    num_heads: int,
    head_dim: int,
    epsilon: float,
    scale: float,
) -> None:
    named = dict(zip(_WEIGHTS, weights, strict=True))
    torch_ops._refuse_gradients(x=x, residual=residual, **named, **vectors)
    if x.dim() != 3:
        raise ValueError(f"x has {x.dim()} dimensions; expected [B, N, C]")
    if x.dtype not in torch_ops._DTYPES:
        raise ValueError(f"x is {x.dtype}; served: torch.float32, torch.float16, torch.bfloat16")
    if num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}; it must be at least 1")
    if not 1 <= head_dim <= registry.MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; served: 1 to {registry.MAX_HEAD_DIM}")
    width, columns = x.shape[2], num_heads * head_dim
    if width < 1:
        raise ValueError("x has no channels; C must be at least 1")
    shapes: dict[str, tuple[Any, ...]] = {name: (columns, width) for name in _WEIGHTS} | {"wo": (width, columns)}
    shapes |= {name: (columns,) if name in ("bq", "bk", "bv") else (width,) for name in vectors}
    shapes["residual"] = tuple(x.shape)
    for name, tensor in {**named, **vectors, "residual": residual}.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; expected {shapes[name]} for C = {width}, "
                f"{num_heads} heads of {head_dim}"
            )
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} is {tensor.dtype} but x is {x.dtype}; convert them to one dtype")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} but x is on {x.device}; move them to one device")
    if key_lengths is not None:
        torch_ops._check_key_lengths(key_lengths, x)
    if not abs(scale) <= torch_ops._FP32_MAX:
        raise ValueError(f"scale is {scale}; it must be finite in float32, in which kernels compute")
    if not 0 <= epsilon <= torch_ops._FP32_MAX:
        raise ValueError(f"epsilon is {epsilon}; it must be finite and 0 or more")


def _matrices(weights: Sequence[torch.Tensor]) -> tuple[int, list[torch.Tensor]]:
    """The weights as they lie in memory, and their layout; copies where their rows are not contiguous or lie on each
    other (a broadcast), or where they do not all lie alike."""
    transposed = [weight.t() for weight in weights]
    if all(map(_has_rows, transposed)) and not all(map(_has_rows, weights)):
        return library.WEIGHTS_IN_OUT, transposed
    contiguous = torch.contiguous_format
    return library.WEIGHTS_OUT_IN, [
        weight if _has_rows(weight) else weight.clone(memory_format=contiguous) for weight in weights
    ]


def _has_rows(matrix: torch.Tensor) -> bool:
    """Its rows lie one behind the other, each in one piece."""
    columns = matrix.shape[1]
    return (matrix.stride(1) == 1 or columns == 1) and matrix.stride(0) >= columns


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy where a row of it does not begin at a multiple of 16 bytes, or where the rows of a
    batch are not equally far from each other."""
    element = tensor.element_size()
    strides = tensor.stride()[:-1]
    is_even = tensor.dim() < 3 or tensor.shape[0] == 1 or strides[0] == tensor.shape[1] * strides[1]
    is_spread = tensor.dim() < 2 or strides[-1] >= tensor.shape[-1]  # not broadcast, not reversed
    starts = tensor.data_ptr() % _ALIGNMENT == 0 and all(stride * element % _ALIGNMENT == 0 for stride in strides)
    return tensor if starts and is_even and is_spread else tensor.clone(memory_format=torch.contiguous_format)


# --- the operator --------------------------------------------------------------------------------------------

torch_ops._operators.define(
    "fused_attention(Tensor x, Tensor wq, Tensor wk, Tensor wv, Tensor wo, Tensor? gamma, Tensor? beta, Tensor? bq, "
    "Tensor? bk, Tensor? bv, Tensor? bo, Tensor? residual, Tensor? key_lengths, int num_heads, int head_dim, "
    "bool causal, bool pre_ln, float epsilon, float scale, str variant, bool check) -> Tensor",
    tags=torch_ops._TAGS,
)


def _fused_attention(
    x: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    wo: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    bq: torch.Tensor | None,
    bk: torch.Tensor | None,
    bv: torch.Tensor | None,
    bo: torch.Tensor | None,
    residual: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    num_heads: int,
    head_dim: int,
    causal: bool,
    pre_ln: bool,
    epsilon: float,
    scale: float,
    variant: str,
    check: bool,
) -> torch.Tensor:
    vectors = {"gamma": gamma, "beta": beta, "bq": bq, "bk": bk, "bv": bv, "bo": bo}
    _check(x, (wq, wk, wv, wo), vectors, residual, key_lengths, num_heads, head_dim, epsilon, scale)
    batch, tokens, width = x.shape
    restrictions = {"causal"} if causal else set()
    if key_lengths is not None:
        restrictions.add("key_lengths")
        known = torch_ops._host_values(key_lengths, check)
        if known is not None:
            torch_ops._check_lengths(known, tokens)
    request = registry.Request(
        x.device.type,
        torch_ops.sm_of(x.device),
        torch_ops._DTYPES[x.dtype],
        head_dim,
        "padded",
        tokens,
        frozenset(restrictions),
        math.gcd(width, num_heads * head_dim),
    )
    row = torch_ops._choose(variant, request, "block")
    out = x.new_empty(x.shape)
    if out.numel() == 0:
        return out

    layout, matrices = _matrices((wq, wk, wv, wo))
    x = torch_ops._rows_contiguous(x)
    residual = None if residual is None else torch_ops._rows_contiguous(residual)
    vectors = {name: None if vector is None else vector.contiguous() for name, vector in vectors.items()}
    if row.width_multiple > 1:
        x, matrices = _aligned(x), [_aligned(matrix) for matrix in matrices]
        residual = None if residual is None else _aligned(residual)
        vectors = {name: None if vector is None else _aligned(vector) for name, vector in vectors.items()}
    params = library.FusedAttentionParams(
        x=x.data_ptr(),
        out=out.data_ptr(),
        dtype=library.DTYPE_CODES[torch_ops._DTYPES[x.dtype]],
        causal=causal,
        pre_ln=pre_ln,
        weight_layout=layout,
        epsilon=epsilon,
        scale=scale,
        batch=batch,
        tokens=tokens,
        width=width,
        num_heads=num_heads,
        head_dim=head_dim,
        x_strides=x.stride()[:2],
        out_strides=out.stride()[:2],
    )
    for name, matrix in zip(_WEIGHTS, matrices, strict=True):
        setattr(params, name, matrix.data_ptr())
        setattr(params, f"{name}_stride", matrix.stride(0))
    for name, vector in vectors.items():
        if vector is not None:
            setattr(params, name, vector.data_ptr())
    if residual is not None:
        params.residual, params.residual_strides = residual.data_ptr(), residual.stride()[:2]
    if key_lengths is not None:
        key_lengths = torch_ops._to_device(key_lengths, x.device)
        params.key_lengths = key_lengths.data_ptr()
        params.key_lengths_type = torch_ops._LENGTHS_TYPES[key_lengths.dtype]
    torch_ops._call(row, params, x.device)
    return out


def _fake_fused_attention(
    x: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    wo: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    bq: torch.Tensor | None,
    bk: torch.Tensor | None,
    bv: torch.Tensor | None,
    bo: torch.Tensor | None,
    residual: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    num_heads: int,
    head_dim: int,
    causal: bool,
    pre_ln: bool,
    epsilon: float,
    scale: float,
    variant: str,
    check: bool,
) -> torch.Tensor:
    vectors = {"gamma": gamma, "beta": beta, "bq": bq, "bk": bk, "bv": bv, "bo": bo}
    _check(x, (wq, wk, wv, wo), vectors, residual, key_lengths, num_heads, head_dim, epsilon, scale)
    return x.new_empty(x.shape)


for _device in ("CPU", "CUDA"):
    torch_ops._operators.impl("fused_attention", _fused_attention, _device)
torch.library.register_fake("tilerank::fused_attention", _fake_fused_attention, lib=torch_ops._operators)
