"""Every other attention that accepts a workload, as closures to time beside a variant (CUDA).

A peer that refuses the input is kept with the reason it gave. Building, compiling and the first call happen here,
never inside a timed closure.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tilerank.bench.workloads import AttentionInputs

SDPA = "sdpa"
"""The name of the peer that everybody has: torch's own choice of backend."""

PACKED_FLASH, PACKED_EFFICIENT = "varlen flash", "mem-efficient packed"
"""torch's kernels for packed input: FlashAttention-2 for 16 bit, the memory-efficient one for fp32."""

SDPA_BACKENDS = {
    "sdpa math": "MATH",
    "sdpa mem-efficient": "EFFICIENT_ATTENTION",
    "sdpa flash": "FLASH_ATTENTION",
    "sdpa cudnn": "CUDNN_ATTENTION",
}

Attention = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to compute the workload. Exactly one of ``run`` and ``refusal`` is given."""

    name: str
    layout: str  # padded: run returns [B, H, S, D]; packed: [T, H, D]
    run: Attention | None
    refusal: str | None = None


def masked_peers(inputs: AttentionInputs) -> tuple[Peer, ...]:
    """Peers that leave padding keys out: a boolean key mask, a block mask, or packed input."""
    torch._dynamo.reset()  # it compiles one function for a few kinds of input only, then stops in silence
    mask = inputs.valid[:, None, None, :]
    return tuple(
        _tried(name, layout, make)
        for name, layout, make in [
            *((name, "padded", make) for name, make in _sdpa_makers(inputs.q, inputs.k, inputs.v, mask=mask)),
            ("flex key mask", "padded", lambda: _flex(inputs, hide_queries=False)),
            ("flex key+query mask", "padded", lambda: _flex(inputs, hide_queries=True)),
            (PACKED_EFFICIENT, "packed", lambda: _efficient_packed(inputs)),
            (PACKED_FLASH, "packed", lambda: _varlen(inputs)),
            ("flash-attention-4 packed", "packed", lambda: _flash_4_packed(inputs)),
        ]
    )


def unmasked_peers(inputs: AttentionInputs) -> tuple[Peer, ...]:
    """Peers over the padded batch as if every key were valid."""
    return dense_peers(inputs.q, inputs.k, inputs.v)


def dense_peers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> tuple[Peer, ...]:
    """Peers over all keys, or over keys 0..i of query i: q ``[B, H, Sq, D]``, k and v ``[B, Hkv, Sk, D]``."""
    makers = [
        *_sdpa_makers(q, k, v, causal=causal),
        ("flash-attention-4", lambda: _flash_4(q, k, v, causal=causal)),
    ]
    return tuple(_tried(name, "padded", make) for name, make in makers)


def packed_peer(inputs: AttentionInputs) -> Peer:
    """torch's own kernel for packed input of this dtype."""
    if inputs.q.dtype == torch.float32:
        return _tried(PACKED_EFFICIENT, "packed", lambda: _efficient_packed(inputs))
    return _tried(PACKED_FLASH, "packed", lambda: _varlen(inputs))


def _tried(name: str, layout: str, make: Callable[[], Attention]) -> Peer:
    """The peer after one call, or why it refuses; torch gives its reasons as warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run = make()
            run()
            torch.cuda.synchronize()
        except (RuntimeError, NotImplementedError, ValueError, TypeError, ImportError, AttributeError) as error:
            reasons = [str(error), *(str(warning.message) for warning in caught)]
            return Peer(name, layout, None, " | ".join(" ".join(reason.split())[:200] for reason in reasons))
    return Peer(name, layout, run)


def _sdpa_makers(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None = None, causal: bool = False
) -> Iterator[tuple[str, Callable[[], Attention]]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    options = {"attn_mask": mask, "is_causal": causal, "enable_gqa": q.shape[1] != k.shape[1]}

    def default() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    yield SDPA, lambda: default

    def restricted(name: str) -> Attention:
        backend = getattr(SDPBackend, name)

        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                return default()

        return run

    for name, backend in SDPA_BACKENDS.items():
        yield name, lambda backend=backend: restricted(backend)


def _flex(inputs: AttentionInputs, *, hide_queries: bool) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    lengths, (batch, _, rows, _) = inputs.key_lengths, inputs.q.shape

    def keys(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return k < lengths[b]

    def keys_and_queries(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k < lengths[b]) & (q < lengths[b])

    rule = keys_and_queries if hide_queries else keys
    blocks = create_block_mask(rule, batch, None, rows, rows, device=inputs.q.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(inputs.q, inputs.k, inputs.v, block_mask=blocks)


def _efficient_packed(inputs: AttentionInputs) -> Attention:
    q, k, v = (packed[None] for packed in (inputs.packed_q, inputs.packed_k, inputs.packed_v))
    bounds, longest = inputs.cu_seqlens, inputs.max_length
    forward = torch.ops.aten._efficient_attention_forward

    def run() -> torch.Tensor:
        # bias, bounds and lengths of queries and keys, no dropout, mask type 0 (none)
        return forward(q, k, v, None, bounds, bounds, longest, longest, 0.0, 0)[0][0]

    return run


def _varlen(inputs: AttentionInputs) -> Attention:
    attention = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    q, k, v = inputs.packed_q, inputs.packed_k, inputs.packed_v
    bounds, longest = inputs.cu_seqlens, inputs.max_length
    return lambda: attention(q, k, v, bounds, bounds, longest, longest)


def _flash_4_packed(inputs: AttentionInputs) -> Attention:
    attention = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    q, k, v, bounds = inputs.packed_q, inputs.packed_k, inputs.packed_v, inputs.cu_seqlens
    options = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), bounds)
    options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), inputs.max_length)
    return lambda: _output(attention(q, k, v, **options))


def _flash_4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> Attention:
    attention = importlib.import_module("flash_attn.cute").flash_attn_func
    turned = [tensor.transpose(1, 2) for tensor in (q, k, v)]  # [B, S, H, D]
    return lambda: _output(attention(*turned, causal=causal)).transpose(1, 2)


def _output(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """FlashAttention-4 returns the result alone, or with the logarithms of the sums."""
    return result[0] if isinstance(result, tuple) else result
