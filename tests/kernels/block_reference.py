"""The attention block in plain torch: in float64, which defines it, and as an unfused model computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tilerank.kernels.torch_block import FusedAttentionLayer

Inputs = dict[str, torch.Tensor | None]


def make_inputs(
    batch: int,
    tokens: int,
    width: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    mean: float = 0.0,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Everything that a call can take; x is N(mean, 1), weights are scaled so that each product is about N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    columns = heads * head_dim

    def draw(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        return (shift + scale * torch.randn(shape, generator=generator)).to(dtype=dtype, device=device)

    return {
        "x": draw(batch, tokens, width, shift=mean),
        **{name: draw(columns, width, scale=width**-0.5) for name in ("wq", "wk", "wv")},
        "wo": draw(width, columns, scale=columns**-0.5),
        "gamma": draw(width, scale=0.1, shift=1.0),
        **{name: draw(columns, scale=0.1) for name in ("bq", "bk", "bv")},
        **{name: draw(width, scale=0.1) for name in ("bo", "beta")},
        "residual": draw(batch, tokens, width),
    }


def exact(inputs: Mapping[str, torch.Tensor | None], heads: int, head_dim: int, **options: object) -> torch.Tensor:
    """`plain` in float64."""
    double = {name: None if tensor is None else tensor.double() for name, tensor in inputs.items()}
    residual = options.pop("residual", None)
    if isinstance(residual, torch.Tensor):
        options["residual"] = residual.double()
    return plain(double, heads, head_dim, **options)  # type: ignore[arg-type]


def plain(
    inputs: Mapping[str, torch.Tensor | None],
    heads: int,
    head_dim: int,
    *,
    causal: bool = False,
    pre_ln: bool = True,
    epsilon: float = 1e-5,
    residual: torch.Tensor | None = None,
    key_lengths: torch.Tensor | Sequence[int] | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The block in torch's own operators, at the dtype of the inputs."""
    functional = torch.nn.functional
    x = inputs["x"]
    assert x is not None
    batch, tokens, width = x.shape

    def normalized(rows: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(rows, (width,), inputs.get("gamma"), inputs.get("beta"), epsilon)

    rows = normalized(x) if pre_ln else x
    q, k, v = (
        functional.linear(rows, inputs[f"w{name}"], inputs.get(f"b{name}")).unflatten(-1, (heads, head_dim))
        for name in "qkv"
    )
    seen = torch.ones(batch, 1, tokens, tokens, dtype=torch.bool, device=x.device)
    if causal:
        seen = seen.tril()
    if key_lengths is not None:
        lengths = torch.as_tensor(key_lengths, device=x.device)
        seen = seen & (torch.arange(tokens, device=x.device) < lengths[:, None])[:, None, None]
    is_plain = key_lengths is None
    attended = functional.scaled_dot_product_attention(
        *(each.transpose(1, 2) for each in (q, k, v)),
        attn_mask=None if is_plain else seen,
        is_causal=causal and is_plain,
        scale=scale,
    )
    out = functional.linear(attended.transpose(1, 2).flatten(2), inputs["wo"], inputs.get("bo"))
    if residual is not None:
        out = out + residual
    return out if pre_ln else normalized(out)


def unfused(
    layer: FusedAttentionLayer,
    x: torch.Tensor,
    key_lengths: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the layer computes, by `plain`."""
    inputs = {
        "x": x,
        "gamma": layer.norm.weight,
        "beta": layer.norm.bias,
        **{f"w{name[0]}": getattr(layer, name).weight for name in ("query", "key", "value", "output")},
        **{f"b{name[0]}": getattr(layer, name).bias for name in ("query", "key", "value", "output")},
    }
    return plain(
        inputs,
        layer.num_heads,
        layer.head_dim,
        causal=layer.causal,
        pre_ln=layer.pre_ln,
        epsilon=layer.norm.eps,
        residual=residual,
        key_lengths=key_lengths,
    )
