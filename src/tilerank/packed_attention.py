"""Attention over packed sequences inside a transformers model: torch's own parts, or a registered kernel.

An attention takes q ``[Tq, H, D]``, k and v ``[Tk, H, D]``, int32 bounds ``[N + 1]`` of the queries and of the keys on
the tensors' device, the longest of each (host integers) and the scale, and returns ``[Tq, H, D]``. Rows that no
sequence covers may hold anything: nothing in an encoder mixes rows but attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tilerank.errors import TilerankError
from tilerank.kernels import registry
from tilerank.kernels.torch_device import device_sm

Attend: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, float], torch.Tensor
]

_SERVES_ANYTHING = "naive"
"""What ``auto`` falls back on among the kernels; slower than torch's own parts on every shape measured."""

_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """A chosen attention. ``name``: a registry row, or torch's part: varlen (flash attention), mem_efficient, sdpa.

    overlapping: ``attend`` for bounds that were complete before the work in front of the call on the stream: it may
    begin while that work ends. None: nothing begins sooner by that.
    """

    name: str
    attend: Attend
    reason: str
    overlapping: Attend | None = None


def choose(
    attention: str, device: torch.device, dtype: torch.dtype, head_dim: int, max_length: int
) -> PackedAttention | None:
    """What serves packed sequences under ``attention`` (auto, sdpa, eager or a row's name); None when nothing does.

    ``auto`` takes the preferred kernel that serves the call on a CUDA device, and torch's own part where that would be
    the one that serves anything, or where the library cannot be built.
    """
    if attention == "eager":
        return None
    if attention == "sdpa":
        return _torch_part(device, dtype, head_dim, "asked for")
    request = registry.Request(device.type, device_sm(device), _DTYPE_NAMES[dtype], head_dim, "packed", max_length)
    if attention != "auto":
        row = registry.get(attention)
        return None if registry.refusal(row, request) else _kernel(row.name, "asked for")
    if device.type != "cuda":
        return _torch_part(device, dtype, head_dim, "no kernel is meant for this device")
    selection = registry.select(request, registry.attention_rows())
    if selection.row.name == _SERVES_ANYTHING:
        return _torch_part(device, dtype, head_dim, f"of the kernels only {_SERVES_ANYTHING} serves this call")
    from tilerank.kernels import library

    try:
        if library.load().backend != "cuda":
            return _torch_part(device, dtype, head_dim, "the kernels were built without CUDA")
    except TilerankError as error:
        return _torch_part(device, dtype, head_dim, f"the kernels cannot be built ({error})")
    return _kernel(selection.row.name, selection.reason)


def implementation(chosen: PackedAttention) -> str:
    """Make ``chosen`` an attention implementation of transformers and return its name there.

    A model that runs it takes one row ``[1, T]``, ``position_ids``, and ``cu_seq_lens_q``, ``cu_seq_lens_k``,
    ``max_length_q``, ``max_length_k``; a mask is refused.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"tilerank_packed_{chosen.name}"
    if "flash" in name:  # transformers would look for a package of that name
        raise ValueError(f"the attention's name is {chosen.name!r}; it must not contain 'flash'")
    AttentionInterface.register(name, functools.partial(_forward, attend=chosen.attend))
    AttentionMaskInterface.register(name, _no_mask)
    return name


FIRST_TOKENS = "tilerank_first_tokens"
"""Attribute of the last layer's attention module: a function that gives the index ``[N]`` of the rows whose result is
used, or None for all of them."""


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    attend: Attend,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    max_length_q: int,
    max_length_k: int,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """``[1, H, T, D]`` views of ``[1, T, H, D]`` memory -> (``[1, T, H, D]``, None)."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    first = getattr(module, FIRST_TOKENS, lambda: None)()
    if first is None:
        return attend(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, scale)[None], None
    # One query a sequence. The model goes on with all rows, so the others stay as the allocator left them.
    single = torch.arange(len(first) + 1, dtype=torch.int32, device=q.device)
    found = attend(q[first], k, v, single, cu_seq_lens_k, 1, max_length_k, scale)
    return q.new_empty(q.shape).index_copy_(0, first, found)[None], None


def _no_mask(*, attention_mask: torch.Tensor | None = None, **_: Any) -> None:
    if attention_mask is not None:
        raise ValueError("packed input takes no attention_mask: the bounds of the sequences say everything")


def _torch_part(device: torch.device, dtype: torch.dtype, head_dim: int, reason: str) -> PackedAttention:
    if device.type != "cuda":
        return PackedAttention("sdpa", _by_sequence, reason)
    has_flash = device_sm(device) >= 80
    if dtype != torch.float32 and has_flash and head_dim % 8 == 0 and head_dim <= 256:
        return PackedAttention("varlen", _flash, reason)
    return PackedAttention("mem_efficient", _efficient, reason)


def _by_sequence(q, k, v, bounds_q, bounds_k, longest_q, longest_k, scale):
    """SDPA for one sequence after another: on a CPU its blocks are what fits the caches anyway."""
    ends_q, ends_k = bounds_q.tolist(), bounds_k.tolist()
    parts = []
    for q_start, q_end, k_start, k_end in zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True):
        heads = (x.transpose(0, 1)[None] for x in (q[q_start:q_end], k[k_start:k_end], v[k_start:k_end]))
        found = torch.nn.functional.scaled_dot_product_attention(*heads, scale=scale)
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)


def _flash(q, k, v, bounds_q, bounds_k, longest_q, longest_k, scale):
    forward = torch.ops.aten._flash_attention_forward
    return forward(q, k, v, bounds_q, bounds_k, longest_q, longest_k, 0.0, False, False, scale=scale)[0]


def _efficient(q, k, v, bounds_q, bounds_k, longest_q, longest_k, scale):
    forward = torch.ops.aten._efficient_attention_forward
    # No bias, no dropout, mask type 0 (none).
    rows = (x[None] for x in (q, k, v))
    return forward(*rows, None, bounds_q, bounds_k, longest_q, longest_k, 0.0, 0, scale=scale)[0][0]


def _kernel(variant: str, reason: str) -> PackedAttention:
    from tilerank.kernels import torch_ops

    def attend(q, k, v, bounds_q, bounds_k, longest_q, longest_k, scale, *, overlap=False):
        # Not the public function, which clears the rows that no sequence covers.
        arguments = (q, k, v, bounds_q, bounds_k, longest_q, longest_k, False, scale, variant, False)
        return torch_ops._attention_varlen(*arguments, clear=False, overlap=overlap)

    return PackedAttention(variant, attend, reason, functools.partial(attend, overlap=True))
