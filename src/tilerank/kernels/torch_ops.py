"""The kernels as PyTorch operators: ``torch.ops.tilerank.attention`` and ``attention_varlen`` over the C interface.

Plain ``torch.library`` operators over ctypes: nothing is compiled against torch. What is checked, is checked inside
the operator, so that ``torch.compile`` sees one opaque call and eager and compiled calls refuse alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from tilerank.errors import TilerankError
from tilerank.kernels import library, registry
from tilerank.kernels.torch_device import device_sm

_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_MASK_TYPES = {
    torch.bool: library.MASK_BOOL,
    torch.float32: library.MASK_FP32,
    torch.float16: library.MASK_FP16,
    torch.bfloat16: library.MASK_BF16,
}
_LENGTHS_TYPES = {torch.int32: library.LENGTHS_INT32, torch.int64: library.LENGTHS_INT64}
_INT64_MAX = 2**63 - 1
_FP32_MAX = torch.finfo(torch.float32).max


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    key_lengths: torch.Tensor | Sequence[int] | None = None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    variant: str = "auto",
    check: bool = False,
) -> torch.Tensor:
    """Softmax attention over a padded batch, on the CPU (variant ``reference``) or a CUDA device.

    Args:
        q: ``[B, H, Sq, D]``, float32, float16 or bfloat16, D from 1 to 256. Any strides are read in place, as long as
            the last dimension is contiguous; where it is not, that tensor is copied. So with k and v.
        k, v: ``[B, Hkv, Sk, D]``; H is a multiple of Hkv (grouped-query attention).
        key_lengths: ``[B]`` integers from 0 to Sk: key j of sequence b counts if j < key_lengths[b]. What stands
            beyond, NaN included, never reaches the result.
        mask: broadcastable to ``[B, H, Sq, Sk]``: boolean (True = may be seen), or floating, added to the scaled
            scores (minus infinity hides a key).
        causal: query i sees keys 0..i.
        scale: factor on the scores; None means 1/sqrt(D).
        variant: a row of the registry, or ``auto`` for the best one that serves the call.
        check: wait for the device and refuse key lengths that do not fit. Without it lengths on a device are clamped
            to 0..Sk; lengths on the host are always checked, before any launch.

    Returns:
        A tensor of q's shape, dtype and device. Where heads are neighbours in q's memory (``[B, S, H, D]``, as
        transformers has it) they are in the result's, else it is contiguous. A query that sees no key gets zeros.

    Raises:
        ValueError: shapes, dtypes, devices or lengths that do not fit, or a named variant that does not serve the call.
        TypeError: an argument of another kind.
        NotImplementedError: a gradient would be recorded, or a tangent (``torch.func.jvp``) would be lost; no variant
            is differentiable.

    A ``torch.func`` transform inside a function that ``torch.compile`` compiles is hidden from the operator: PyTorch
    gives zeros for its gradient, and a warning.
    """
    _check_tensors(q=q, k=k, v=v)
    if mask is not None:
        _check_tensors(mask=mask)
    _refuse_gradients(q=q, k=k, v=v, mask=mask)  # here too, because torch.func unwraps what the operator sees
    _check_options(causal, variant, check)
    if key_lengths is not None:
        key_lengths = _integers("key_lengths", key_lengths)
    return torch.ops.tilerank.attention.default(q, k, v, key_lengths, mask, causal, _scale(scale, q), variant, check)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | Sequence[int],
    cu_seqlens_k: torch.Tensor | Sequence[int],
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    variant: str = "auto",
    check: bool = False,
) -> torch.Tensor:
    """Softmax attention over sequences packed one after another, without padding.

    Args:
        q: ``[Tq, H, D]``; k and v ``[Tk, Hkv, D]``; strides, dtypes and D as in `attention`.
        cu_seqlens_q: ``[N + 1]`` integers from 0, not falling, at most Tq: sequence n has the queries
            cu_seqlens_q[n] .. cu_seqlens_q[n + 1] - 1.
        cu_seqlens_k: the same for keys, at most Tk.
        max_seqlen_q, max_seqlen_k: at least the longest sequence. Host integers, because they size the launch.
        causal: query i sees keys 0..i, both counted from the start of the sequence.
        scale, variant: as in `attention`.
        check: wait for the device and refuse bounds that do not fit. Without it bounds on a device are clamped to
            what was announced; bounds on the host are always checked.

    Returns:
        ``[Tq, H, D]`` of q's dtype and device, contiguous. Rows that no sequence covers, and queries of a sequence
        without keys, are zeros.

    Raises:
        ValueError, TypeError, NotImplementedError: as `attention`.
    """
    _check_tensors(q=q, k=k, v=v)
    _refuse_gradients(q=q, k=k, v=v)
    _check_options(causal, variant, check)
    return torch.ops.tilerank.attention_varlen.default(
        q,
        k,
        v,
        _integers("cu_seqlens_q", cu_seqlens_q),
        _integers("cu_seqlens_k", cu_seqlens_k),
        _maximum("max_seqlen_q", max_seqlen_q),
        _maximum("max_seqlen_k", max_seqlen_k),
        causal,
        _scale(scale, q),
        variant,
        check,
    )


# --- arguments -----------------------------------------------------------------------------------------------


def _check_tensors(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")


def _refuse_gradients(**tensors: torch.Tensor | None) -> None:
    records = torch.is_grad_enabled()
    has_duals = forward_ad._current_level >= 0  # asking each tensor takes a microsecond
    if not records and not has_duals:
        return
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if records and tensor.requires_grad:
            raise NotImplementedError(
                f"{name} requires a gradient, and no tilerank variant has a backward pass; call under "
                "torch.no_grad() or torch.inference_mode(), or train with SDPA"
            )
        if has_duals and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{name} carries a tangent of forward-mode differentiation, and no tilerank variant computes that "
                "gradient; call with plain tensors, or differentiate SDPA"
            )


def _check_options(causal: Any, variant: Any, check: Any) -> None:
    """The operator's schema would take any object for true or false."""
    for name, value in (("causal", causal), ("check", check)):
        if not isinstance(value, bool | torch.SymBool):
            raise TypeError(f"{name} is {value!r}; expected True or False")
    if not isinstance(variant, str):
        raise TypeError(f"variant is {variant!r}; expected the name of a variant, or 'auto'")


def _maximum(name: str, value: Any) -> int:
    """A sequence length that sizes the launch, so that the host must know it."""
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name} is {value!r}; expected an int (it sizes the launch, so the host must know it)")
    if value > _INT64_MAX or value < -_INT64_MAX:
        raise ValueError(f"{name} is {value}; allowed: 0 to 2**63 - 1")
    return value


def _integers(name: str, values: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Lengths or bounds as an int32 or int64 tensor, where they already are; sequences become CPU tensors."""
    if not isinstance(values, torch.Tensor):
        if isinstance(values, str | bytes) or not hasattr(values, "__len__") or getattr(values, "shape", None) == ():
            raise TypeError(f"{name} is {values!r}; expected a tensor or a sequence of integers")
        try:
            # On the CPU whatever the default device is, so that they are checked; copied, as arrays may be read-only.
            values = torch.tensor(values, device="cpu") if len(values) else torch.empty(0, dtype=torch.int64)
        except (OverflowError, RuntimeError, ValueError) as error:
            too_large = [x for x in values if isinstance(x, int) and not -_INT64_MAX <= x <= _INT64_MAX]
            if too_large:
                raise ValueError(f"{name} holds {too_large[0]}; no length is beyond 64 bits") from error
            raise TypeError(f"{name} is {values!r}; expected integers ({error})") from error
    if values.dtype in _LENGTHS_TYPES:
        return values
    if values.dtype in (torch.int8, torch.int16, torch.uint8):
        return values.to(torch.int32)
    raise TypeError(f"{name} holds {values.dtype}; expected integers (int32 or int64)")


def _scale(scale: Any, q: torch.Tensor) -> float:
    if scale is not None:
        try:
            if isinstance(scale, bool | str | bytes):
                raise TypeError("not a number")
            return float(scale)
        except OverflowError:
            raise ValueError(f"scale is {scale}; it must be finite in float32") from None
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"scale is {scale!r}; expected a number, or None for 1/sqrt(D)") from error
    return 1.0 / math.sqrt(q.shape[-1]) if q.dim() and q.shape[-1] else 1.0


def _check_common(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dimensions: str, scale: float) -> None:
    """What padded and packed calls have in common. ``dimensions`` names the shape, for messages."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != dimensions.count(",") + 1:
            raise ValueError(f"{name} has {tensor.dim()} dimensions; expected {dimensions}")
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}; served: torch.float32, torch.float16, torch.bfloat16")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype} but q is {q.dtype}; convert them to one dtype")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} but q is on {q.device}; move them to one device")
    if v.shape != k.shape:
        raise ValueError(f"k has shape {tuple(k.shape)} but v has {tuple(v.shape)}; they must be equal")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head dimension {k.shape[-1]} but q has {q.shape[-1]}; they must be equal")
    if not 1 <= q.shape[-1] <= registry.MAX_HEAD_DIM:
        raise ValueError(f"q has head dimension {q.shape[-1]}; served: 1 to {registry.MAX_HEAD_DIM}")
    heads, kv_heads = (x.shape[1] for x in (q, k))
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads; expected a multiple of the {kv_heads} of k and v, at least 1")
    if not abs(scale) <= _FP32_MAX:
        raise ValueError(f"scale is {scale}; it must be finite in float32, in which kernels compute")


def _check_padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float,
) -> None:
    _refuse_gradients(q=q, k=k, v=v, mask=mask)
    _check_common(q, k, v, "[B, H, S, D]", scale)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k has batch {k.shape[0]} but q has batch {q.shape[0]}; they must be equal")
    if key_lengths is not None:
        _check_key_lengths(key_lengths, q)
    if mask is not None:
        full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        if mask.dtype not in _MASK_TYPES:
            raise ValueError(
                f"mask is {mask.dtype}; served: torch.bool (True = may be seen), torch.float32, torch.float16, "
                "torch.bfloat16 (added to the scores)"
            )
        if mask.device != q.device:
            raise ValueError(f"mask is on {mask.device} but q is on {q.device}; move them to one device")
        pairs = zip(reversed(mask.shape), reversed(full), strict=False)
        if mask.dim() > 4 or any(size not in (1, wanted) for size, wanted in pairs):
            raise ValueError(f"mask has shape {tuple(mask.shape)}; expected one that broadcasts to {full}")


def _check_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
) -> None:
    _refuse_gradients(q=q, k=k, v=v)
    _check_common(q, k, v, "[T, H, D]", scale)
    for name, bounds in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_device_of(name, bounds, q)
        if bounds.dim() != 1 or bounds.shape[0] < 1:
            raise ValueError(f"{name} has shape {tuple(bounds.shape)}; expected (N + 1,) for N sequences")
    if cu_seqlens_q.shape[0] != cu_seqlens_k.shape[0]:
        raise ValueError(
            f"cu_seqlens_q has {cu_seqlens_q.shape[0]} entries but cu_seqlens_k has {cu_seqlens_k.shape[0]}; "
            "both must have one more than there are sequences"
        )
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if value < 0:
            raise ValueError(f"{name} is {value}; it must be at least 0")


def _check_key_lengths(key_lengths: torch.Tensor, data: torch.Tensor) -> None:
    """One a sequence of ``data``, whose first dimension is the batch."""
    _check_device_of("key_lengths", key_lengths, data)
    if tuple(key_lengths.shape) != (data.shape[0],):
        raise ValueError(
            f"key_lengths has shape {tuple(key_lengths.shape)}; expected ({data.shape[0]},), one a sequence"
        )


def _check_device_of(name: str, lengths: torch.Tensor, data: torch.Tensor) -> None:
    """Lengths lie on the host or with the data; with any other PyTorch would call the operator of that device."""
    if lengths.device.type not in ("cpu", data.device.type):
        raise ValueError(f"{name} is on {lengths.device}; expected the CPU or {data.device}, where the data is")


def _host_values(values: torch.Tensor, check: bool) -> list[int] | None:
    """The values where the host knows them, or must (``check``); None where only the device does."""
    return values.tolist() if check or values.device.type == "cpu" else None


def _check_lengths(values: list[int], limit: int) -> None:
    for index, value in enumerate(values):
        if not 0 <= value <= limit:
            raise ValueError(f"key_lengths[{index}] is {value}; allowed: 0 to {limit}, the keys there are")


def _check_bounds(name: str, values: list[int], total: int, maximum: int) -> None:
    if values[0] != 0:
        raise ValueError(f"cu_seqlens_{name}[0] is {values[0]}; it must be 0")
    for index in range(1, len(values)):
        low, high = values[index - 1], values[index]
        if not low <= high <= total:
            raise ValueError(
                f"cu_seqlens_{name}[{index}] is {high}; allowed: {low} (the entry before) to {total} (rows of {name})"
            )
        if high - low > maximum:
            raise ValueError(
                f"max_seqlen_{name} is {maximum}, but sequence {index - 1} of cu_seqlens_{name} has {high - low} tokens"
            )


def _to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A contiguous tensor on ``device``. Host values cannot be part of a CUDA graph: it would keep replaying them."""
    if values.device != device:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"lengths on {values.device} cannot be captured in a CUDA graph; pass a tensor on {device}"
            )
        values = values.to(device)
    return values.contiguous()


# --- choosing and calling a variant --------------------------------------------------------------------------


@cache
def _library() -> library.Library:
    return library.load()


sm_of = cache(device_sm)  # asked with every call


@lru_cache(maxsize=4096)
def _choose(variant: str, request: registry.Request, operation: str = "attention") -> registry.Row:
    """The operation's row that a call runs; ValueError when the named one, or any, does not serve it."""
    if request.device == "cuda" and _library().backend != "cuda":
        raise TilerankError(
            "the kernels were built for the CPU only, because no nvcc was found: put the CUDA toolkit's bin folder on "
            "PATH, set CUDA_HOME, or `pip install nvidia-cuda-nvcc nvidia-cuda-cccl`, and start again"
        )
    if variant == "auto":
        rows = registry.attention_rows() if operation == "attention" else registry.rows_of(operation)
        return registry.select(request, rows).row
    row = registry.get(variant, operation)
    reason = registry.refusal(row, request)
    if reason is not None:
        raise ValueError(f"variant {variant!r} does not serve this call: {reason}; variant='auto' takes one that does")
    return row


def _request(q: torch.Tensor, layout: str, k_len: int, masks: frozenset[str]) -> registry.Request:
    device = q.device
    return registry.Request(device.type, sm_of(device), _DTYPES[q.dtype], q.shape[-1], layout, k_len, masks)


def _call(
    row: registry.Row, params: library.Params, device: torch.device, workspace: torch.Tensor | None = None
) -> None:
    """Queue the call on the device's current stream, with the workspace it needs, or the caller's."""
    if device.type != "cuda":
        _library().run(row.name, params)
        return
    # The library launches on the current device, which need not be the tensors'.
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        if workspace is None and row.workspace and (size := _library().workspace_size(row.name, params)):
            workspace = torch.empty(size, dtype=torch.uint8, device=device)
        memory = (0, 0) if workspace is None else (workspace.data_ptr(), workspace.nbytes)
        _library().run(row.name, params, *memory, stream)


def _rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy where its last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _new_output(q: torch.Tensor) -> torch.Tensor:
    """``[B, H, S, D]`` of q's kind: token-major memory where q's heads are nearer to each other than its tokens."""
    batch, heads, tokens, head_dim = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)
    return q.new_empty(batch, heads, tokens, head_dim)


# --- the operators -------------------------------------------------------------------------------------------

_operators = torch.library.Library("tilerank", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_operators.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? key_lengths, Tensor? mask, bool causal, float scale, "
    "str variant, bool check) -> Tensor",
    tags=_TAGS,
)
_operators.define(
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, bool causal, float scale, str variant, bool check) -> Tensor",
    tags=_TAGS,
)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor | None,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    variant: str,
    check: bool,
) -> torch.Tensor:
    _check_padded(q, k, v, key_lengths, mask, scale)
    batch, heads, q_len, head_dim = q.shape
    k_len = k.shape[2]
    restrictions = set()
    if key_lengths is not None:
        restrictions.add("key_lengths")
        known = _host_values(key_lengths, check)
        if known is not None:
            _check_lengths(known, k_len)
    if mask is not None:
        restrictions.add("boolean" if mask.dtype == torch.bool else "additive")
    if causal:
        restrictions.add("causal")
    row = _choose(variant, _request(q, "padded", k_len, frozenset(restrictions)))

    out = _new_output(q)
    if out.numel() == 0:
        return out
    if k_len == 0:
        return out.zero_()
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    params = library.AttentionParams(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        out=out.data_ptr(),
        dtype=library.DTYPE_CODES[_DTYPES[q.dtype]],
        causal=causal,
        scale=scale,
        batch=batch,
        heads=heads,
        kv_heads=k.shape[1],
        q_len=q_len,
        k_len=k_len,
        head_dim=head_dim,
        q_strides=q.stride()[:3],
        k_strides=k.stride()[:3],
        v_strides=v.stride()[:3],
        out_strides=out.stride()[:3],
    )
    if key_lengths is not None:
        key_lengths = _to_device(key_lengths, q.device)
        params.key_lengths = key_lengths.data_ptr()
        params.key_lengths_type = _LENGTHS_TYPES[key_lengths.dtype]
    if mask is not None:
        mask = mask.expand(batch, heads, q_len, k_len)
        params.mask = mask.data_ptr()
        params.mask_type = _MASK_TYPES[mask.dtype]
        params.mask_strides = mask.stride()
    _call(row, params, q.device)
    return out


def _attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    scale: float,
    variant: str,
    check: bool,
    *,
    clear: bool = True,
    overlap: bool = False,
) -> torch.Tensor:
    """``clear``: rows of no sequence are zeros, else left as the allocator gave them. ``overlap``: the bounds were
    complete before the work in front of this call on the stream, so a kernel may begin while that work ends."""
    _check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale)
    total_q, heads, head_dim = q.shape
    total_k = k.shape[0]
    # No sequence is longer than all rows; without this a generous announcement would size the launch.
    max_seqlen_q, max_seqlen_k = min(max_seqlen_q, total_q), min(max_seqlen_k, total_k)
    known_q, known_k = _host_values(cu_seqlens_q, check), _host_values(cu_seqlens_k, check)
    if known_q is not None:
        _check_bounds("q", known_q, total_q, max_seqlen_q)
    if known_k is not None:
        _check_bounds("k", known_k, total_k, max_seqlen_k)
    masks = frozenset({"causal"} if causal else ())
    row = _choose(variant, _request(q, "packed", max_seqlen_k, masks))

    # Kernels leave rows of no sequence as they were, so the result starts as zeros unless all are known to be covered.
    is_covered = known_q is not None and known_q[-1] == total_q
    shape = (total_q, heads, head_dim)
    out = q.new_empty(shape) if is_covered or not clear else q.new_zeros(shape)
    if out.numel() == 0:
        return out
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    bounds = [
        _to_device(x if x.dtype == torch.int32 else x.clamp(0, total).to(torch.int32), q.device)
        for x, total in ((cu_seqlens_q, total_q), (cu_seqlens_k, total_k))
    ]
    params = library.AttentionVarlenParams(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        out=out.data_ptr(),
        dtype=library.DTYPE_CODES[_DTYPES[q.dtype]],
        causal=causal,
        scale=scale,
        batch=cu_seqlens_q.shape[0] - 1,
        heads=heads,
        kv_heads=k.shape[1],
        head_dim=head_dim,
        total_q=total_q,
        total_k=total_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        q_strides=(q.stride(1), q.stride(0)),
        k_strides=(k.stride(1), k.stride(0)),
        v_strides=(v.stride(1), v.stride(0)),
        out_strides=(out.stride(1), out.stride(0)),
        cu_seqlens_q=bounds[0].data_ptr(),
        cu_seqlens_k=bounds[1].data_ptr(),
        # Bounds that had to be converted are themselves the work in front.
        overlap=overlap and bounds[0] is cu_seqlens_q and bounds[1] is cu_seqlens_k,
    )
    _call(row, params, q.device)
    return out


def _fake_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor | None,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    variant: str,
    check: bool,
) -> torch.Tensor:
    _check_padded(q, k, v, key_lengths, mask, scale)
    return _new_output(q)


def _fake_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    scale: float,
    variant: str,
    check: bool,
) -> torch.Tensor:
    _check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale)
    return q.new_empty(q.shape)


for _device in ("CPU", "CUDA"):
    _operators.impl("attention", _attention, _device)
    _operators.impl("attention_varlen", _attention_varlen, _device)
torch.library.register_fake("tilerank::attention", _fake_attention, lib=_operators)
torch.library.register_fake("tilerank::attention_varlen", _fake_attention_varlen, lib=_operators)
