"""``attn_implementation="tilerank"`` for transformers: an attention function and the mask function that belongs to it.

transformers looks both up under one name. Without a mask function it passes no mask at all, and padding is attended
to in silence, so `register` always makes both registrations.

The mask that travels through the model is complete by itself: boolean, ``[B, 1, Sq, Sk]``, True where a key may be
seen. When padding stands on the right only, the mask also carries the key lengths; the attention function then hands
these to the kernel instead, which skips padded keys. A model that slices or copies the mask loses the lengths, never
the masking.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tilerank.kernels import registry, torch_ops

_KEY_LENGTHS = "_tilerank_key_lengths"
_PACKED_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Arguments by which some models ask for another operation than softmax attention.
_OTHER_OPERATIONS = ("softcap", "s_aux", "sinks", "indices", "block_indices")


def register(name: str = "tilerank", variant: str = "auto") -> None:
    """Make ``attn_implementation=name`` available to transformers, computed by ``variant`` (a registry row or auto).

    Registering a name again replaces its variant. Padded input works as usual; for packed input (batch 1) give the
    model ``attention_mask=None`` and ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q``, ``max_length_k``,
    ``position_ids``. Some models, such as DeBERTa and XLNet, take any name and go on computing attention by
    themselves: `calls_interface` tells.

    Raises:
        ValueError: an unknown variant, or a name that transformers treats in a way of its own.
        TypeError: a name that is no string.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}; expected a string")
    if variant != "auto":
        registry.get(variant)
    # "flash" anywhere in a name changes which masks transformers prepares; / : @ | make it look on the hub.
    reserved = {"eager", "sdpa", "flex_attention"}
    if not name or name in reserved or "flash" in name or set(name) & set("/:@|"):
        raise ValueError(
            f"name={name!r} has a meaning in transformers; choose one without 'flash', '/', ':', '@' or '|' "
            f"that is not one of {sorted(reserved)}"
        )
    AttentionInterface.register(name, functools.partial(attention_forward, variant=variant))
    AttentionMaskInterface.register(name, attention_mask)


def attention_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of one forward pass, as transformers asks for it once before the first layer.

    attention_mask: ``[B, Sk]`` boolean, or None. Returns None when every key may be seen (or all of a causal pattern:
    the attention function applies that), else a boolean ``[B, 1, Sq, Sk]``.

    Causal, windowed, chunked and combined patterns are expanded as for SDPA. Plain padding costs no memory: its mask
    is a view of the 2-D one. Looking at it takes one wait for the device a forward pass, which SDPA's mask takes too;
    under ``torch.compile`` and stream capture, where nothing can be looked at, the mask is used as it is.

    Raises ValueError for a model that computes attention by itself, which would read a boolean mask as numbers.
    """
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask
    from transformers.utils.import_utils import is_tracing

    if not torch.compiler.is_compiling():
        _check_interface(type(kwargs.get("config")))
    plain_padding = (
        attention_mask is not None
        and mask_function is bidirectional_mask_function
        and kwargs.get("allow_is_bidirectional_skip", False)
        and attention_mask.shape == (batch_size, kv_length)
    )
    if not plain_padding or is_tracing(attention_mask):
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
    padding = attention_mask.bool()
    key_lengths = padding.sum(-1, dtype=torch.int32)
    padded_right = torch.arange(kv_length, device=padding.device) < key_lengths[:, None]
    all_seen, lengths_suffice = torch.stack([padding.all(), (padding == padded_right).all()]).tolist()
    if all_seen:
        return None
    mask = padding[:, None, None, :].expand(-1, -1, q_length, -1)
    if lengths_suffice:
        setattr(mask, _KEY_LENGTHS, key_lengths)
    return mask


def calls_interface(model: type[torch.nn.Module]) -> bool:
    """Whether this transformers class calls the registered attention, as most do; MPNet and others do not."""
    return model._can_set_attn_implementation()


@functools.cache
def _check_interface(config: type) -> None:
    from transformers import MODEL_MAPPING

    if config not in MODEL_MAPPING:
        return  # a model from elsewhere: its own code knows
    models = MODEL_MAPPING[config]
    for model in models if isinstance(models, tuple) else (models,):
        if not calls_interface(model):
            raise ValueError(
                f"{model.__name__} computes attention by itself and would not call the registered one; "
                "load it with attn_implementation='eager'"
            )


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_bias: torch.Tensor | None = None,
    *,
    variant: str = "auto",
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What every attention layer of a model calls: query ``[B, H, Sq, D]``, key and value ``[B, Hkv, Sk, D]``, as
    views of ``[B, S, H, D]`` memory -> (``[B, Sq, H, D]``, None).

    A mask is complete by itself; without one, a causal module sees keys 0..i. Whatever would change the result and is
    not served is refused.

    Raises:
        ValueError: dropout, attention weights asked for, an operation other than softmax attention, a sliding window
            without its mask, incomplete packed arguments, or what `tilerank.attention` refuses.
    """
    if dropout:
        raise ValueError(f"dropout={dropout} in the attention is not served; call model.eval() or set it to 0")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions=True: attention weights are never formed; use attn_implementation='eager'")
    for name in _OTHER_OPERATIONS:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} is not served; use attn_implementation='eager' for {type(module).__name__}")

    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # As SDPA's integration: a mask says everything, and a single query (decoding) sees every key.
    causal = bool(is_causal) and attention_mask is None and query.shape[2] > 1

    packed = {name: kwargs.get(name) for name in _PACKED_ARGUMENTS}
    if any(value is not None for value in packed.values()):
        return _packed(
            query, key, value, attention_mask, causal, scaling, sliding_window, position_bias, variant, packed
        )

    if attention_mask is None:
        _check_window(sliding_window, key.shape[2])
        lengths = None
    else:
        if attention_mask.dim() != 4:
            raise ValueError(f"attention_mask has {attention_mask.dim()} dimensions; allowed: 4 ([B, 1 or H, Sq, Sk])")
        lengths = None if torch.compiler.is_compiling() else getattr(attention_mask, _KEY_LENGTHS, None)
    mask = attention_mask if lengths is None else None
    if position_bias is not None:
        mask = _with_bias(position_bias, mask)
    out = torch_ops.attention(
        query, key, value, key_lengths=lengths, mask=mask, causal=causal, scale=scaling, variant=variant
    )
    return out.transpose(1, 2).contiguous(), None


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    sliding_window: int | None,
    position_bias: torch.Tensor | None,
    variant: str,
    packed: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Several sequences one after another in a batch of one."""
    missing = [name for name, value in packed.items() if value is None]
    if missing:
        raise ValueError(f"packed input needs {', '.join(_PACKED_ARGUMENTS)}; missing: {', '.join(missing)}")
    if query.shape[0] != 1:
        raise ValueError(f"packed input has batch 1, found {query.shape[0]}; concatenate the sequences")
    if position_bias is not None:
        raise ValueError("position_bias is not served for packed input; pad the batch instead")
    cu_q, cu_k = packed["cu_seq_lens_q"], packed["cu_seq_lens_k"]
    if mask is not None:
        # transformers made a mask of its own (position ids that restart, a sliding window): sequences still end
        # where cu_seq_lens says.
        same = _segments(cu_q, query.shape[2])[:, None] == _segments(cu_k, key.shape[2])[None, :]
        mask = mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, float("-inf"))
        out = torch_ops.attention(query, key, value, mask=mask, scale=scale, variant=variant)
        return out.transpose(1, 2).contiguous(), None
    _check_window(sliding_window, int(packed["max_length_k"]))
    out = torch_ops.attention_varlen(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_q,
        cu_k,
        int(packed["max_length_q"]),
        int(packed["max_length_k"]),
        causal=causal,
        scale=scale,
        variant=variant,
    )
    return out[None], None


def _segments(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """The index of each token's sequence: ``[tokens]``."""
    positions = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)


def _check_window(sliding_window: int | None, keys: int) -> None:
    if sliding_window is not None and keys > sliding_window:
        raise ValueError(
            f"sliding_window={sliding_window} over {keys} keys came without its mask; give the model a padding mask, "
            "or use attn_implementation='sdpa'"
        )


def _with_bias(position_bias: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """A learned bias on the scores (T5) together with the mask, as one additive mask."""
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return torch.where(mask, position_bias, float("-inf"))
    return position_bias + mask
