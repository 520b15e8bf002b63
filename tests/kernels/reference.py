"""What attention means, in float64 torch: written from the interface alone, independent of the library's own reference.

Nothing here shares code with what it checks: scores are formed for all pairs, keys are hidden by selection (never by
adding a large number), and a hidden value is replaced before the product, so that NaN there cannot leak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def visible_keys(
    shape: tuple[int, int, int, int],
    key_lengths: Sequence[int] | torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Which key each query may see: boolean ``[B, H, Sq, Sk]`` on ``device``."""
    batch, heads, q_len, k_len = shape
    seen = torch.ones(shape, dtype=torch.bool, device=device)
    keys = torch.arange(k_len, device=device)
    if key_lengths is not None:
        seen &= (keys[None, :] < torch.as_tensor(key_lengths).to(device)[:, None])[:, None, None, :]
    if causal:
        seen &= keys[None, :] <= torch.arange(q_len, device=device)[:, None]
    if mask is not None:
        mask = mask.detach().to(device).expand(batch, heads, q_len, k_len)
        seen &= mask if mask.dtype == torch.bool else mask != -math.inf
    return seen


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    key_lengths: Sequence[int] | torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention in float64 on the inputs' device, ``[B, H, Sq, D]``: q of that shape, k and v ``[B, Hkv, Sk, D]``.

    A query that sees no key gives zeros; one that sees a NaN or an infinity gives NaN.
    """
    batch, heads, q_len, head_dim = q.shape
    group, k_len = heads // k.shape[1], k.shape[2]
    q, k, v = (x.detach().double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    seen = visible_keys((batch, heads, q_len, k_len), key_lengths, mask, causal, q.device)

    scores = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(head_dim) if scale is None else scale)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.detach().double().to(q.device)
    hidden = scores.new_tensor(-math.inf)
    scores = torch.where(seen, scores, hidden)
    top = scores.amax(-1, keepdim=True) if k_len else scores.new_zeros(batch, heads, q_len, 1)
    weights = torch.where(seen, (scores - torch.where(top == hidden, 0.0, top)).exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total == 0, 1.0, total)

    finite = v.isfinite()
    out = weights @ torch.where(finite, v, 0.0)
    touched = seen.double() @ (~finite).double() > 0
    return torch.where(touched, math.nan, out)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    *,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """The packed form in float64: each sequence on its own; rows of no sequence are zeros. Tensors ``[T, H, D]``."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    bounds_q, bounds_k = (torch.as_tensor(cu).tolist() for cu in (cu_seqlens_q, cu_seqlens_k))
    for index in range(len(bounds_q) - 1):
        rows = slice(bounds_q[index], bounds_q[index + 1])
        keys = slice(bounds_k[index], bounds_k[index + 1])
        one = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        out[rows] = attention(*one, causal=causal, scale=scale)[0].transpose(0, 1)
    return out


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    key_lengths: Sequence[int] | torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """torch's own answer at the inputs' dtype, the yardstick of every tolerance. Rows that see no key are zeros.

    Without cuDNN, which compiles a plan for every new shape: up to a second for each call of a test.
    """
    batch, heads, q_len, _ = q.shape
    group, k_len = heads // k.shape[1], k.shape[2]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    seen = visible_keys((batch, heads, q_len, k_len), key_lengths, mask, causal, q.device)
    k, v = (torch.where(seen.any(2).unsqueeze(-1), x, torch.zeros((), dtype=x.dtype, device=x.device)) for x in (k, v))
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
    if mask is not None and mask.dtype != torch.bool:
        # Clamped: a finite mask value must stay finite at the narrower dtype.
        bias = bias + mask.to(q.device).float().clamp(min=torch.finfo(q.dtype).min).to(q.dtype)
    # A row without a key would be NaN in some backends: let it see everything and clear it afterwards.
    empty = ~seen.any(-1, keepdim=True)
    bias = bias.masked_fill(~(seen | empty), -math.inf).masked_fill(empty, 0.0)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    return out.masked_fill(empty, 0.0)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference, in float64; NaN anywhere gives infinity. Empty tensors give 0."""
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.numel() == 0:
        return 0.0
    worst = (actual.double().cpu() - expected.double().cpu()).abs().max().item()
    return worst if math.isfinite(worst) else math.inf


def sum_floor(head_dim: int, keys: int = 0) -> float:
    """Error allowed where SDPA is nearly exact by luck, for sums kept in fp32: their last two bits, and the rounding of
    a score of ``head_dim`` terms and of a row of ``keys`` weights that are summed one after another, which grows with
    the square root of the terms (SDPA sums in blocks)."""
    return torch.finfo(torch.float32).eps * (2 + math.sqrt(head_dim) / 2 + math.sqrt(keys) / 4)


def assert_close(
    actual: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lossy: bool = False,
    strict: bool = False,
    **arguments: Any,
) -> None:
    """Fail unless ``actual`` is at most twice as far from float64 as SDPA is at the same dtype.

    On top, one rounding of each value to its dtype and `sum_floor`, which shrinks with values below 1 and is left out
    where ``strict``. ``lossy``: fp32 tensors multiplied as TF32, which keeps as many bits as fp16: SDPA is given fp16
    tensors.
    """
    assert actual.dtype == q.dtype
    assert actual.device == q.device
    expected = attention(q, k, v, **arguments)
    given = (x.half() for x in (q, k, v)) if lossy else (q, k, v)
    own = error(sdpa(*given, **arguments), expected)
    assert actual.shape == expected.shape
    if actual.numel() == 0:
        return
    largest = torch.where(v.isfinite(), v, 0.0).abs().max().item() if v.numel() else 0.0
    floor = 0.0 if strict else sum_floor(q.shape[-1], k.shape[-2]) * min(1.0, largest)
    allowed = 2 * own + torch.finfo(q.dtype).eps * expected.abs() + floor
    excess = ((actual.double() - expected).abs() - allowed).max().item()
    found = error(actual, expected)
    assert excess <= 0, f"error {found:.3g} is more than twice SDPA's own {own:.3g} for {q.dtype}"


def slack(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lossy: bool = False, **arguments: Any) -> torch.Tensor:
    """What a right kernel may be off by where SDPA happens to be exact, as on a handful of keys: ``[B, H, Sq, D]``.

    Weights are rounded to the dtype, and a score of size s is off by s times `sum_floor` (by s roundings of its
    factors where lossy); both move the result by that share of the values that it mixes.
    """
    hiding = {name: value for name, value in arguments.items() if name != "scale"}
    seen = visible_keys((*q.shape[:3], k.shape[2]), **hiding, device=q.device)
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scale = arguments.get("scale") or 1 / math.sqrt(q.shape[-1])
    scores = torch.where(seen, (q.double() @ keys.double().transpose(-1, -2)).abs() * scale, 0.0)
    largest = scores.amax(-1, keepdim=True) if k.shape[2] else scores.new_zeros(*q.shape[:3], 1)
    of_weights = torch.finfo(torch.half if lossy else q.dtype).eps
    of_scores = of_weights if lossy else sum_floor(q.shape[-1])
    return (of_weights + of_scores * largest.clamp(min=1.0)) * attention(q, k, v.abs(), **arguments)


def assert_close_varlen(
    actual: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    **arguments: Any,
) -> None:
    """`assert_close` for packed tensors: each sequence against SDPA on that sequence; rows of no sequence are zeros."""
    assert actual.shape == q.shape
    bounds_q, bounds_k = (torch.as_tensor(cu).tolist() for cu in (cu_seqlens_q, cu_seqlens_k))
    covered = torch.zeros(q.shape[0], dtype=torch.bool)
    for index in range(len(bounds_q) - 1):
        rows = slice(bounds_q[index], bounds_q[index + 1])
        keys = slice(bounds_k[index], bounds_k[index + 1])
        covered[rows] = True
        one = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        assert_close(actual[rows].transpose(0, 1)[None], *one, **arguments)
    assert error(actual[~covered], torch.zeros_like(actual[~covered])) == 0, "rows of no sequence must be zeros"
