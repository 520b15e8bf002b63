"""A BERT-family encoder over packed sequences, from token ids to logits, as few kernels as its parts can be made into.

It is built from a transformers model, whose weights are read and stay as they are, and has buffers of its own: the
three projections of a layer's attention as one matrix, matrices in the order that the kernels read. Bias, GELU, residual
and LayerNorm are the end of the product before them where a registered kernel serves, else torch's own operations.
Where only first tokens count, the last layer goes on with these alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch.nn import functional

from tilerank.errors import TilerankError
from tilerank.kernels import registry
from tilerank.packed_attention import PackedAttention

FAMILIES = frozenset({"bert", "camembert", "data2vec-text", "electra", "ernie", "roberta", "xlm-roberta"})
"""Model types whose encoder is ``encoder.layer[i].attention.{self,output}``, whose positions are a table, and whose
classifier takes the first token."""

Linear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""``[rows, in]`` -> ``[rows, out]``."""
LinearNorm: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x ``[rows, in]`` and residual ``[rows, out]``, which may be overwritten -> the normalised sum ``[rows, out]``."""
Embed: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""ids, type ids and positions, int32 ``[rows]`` -> ``[rows, width]``."""
Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

gelu: Activation = functional.gelu  # by the error function


class Parts(Protocol):
    """Makes the parts of an encoder from a model's modules, on a device and in a dtype."""

    used: dict[str, str]
    """What computes each kind of part: a registry row, or ``torch``."""

    def embed(self, embeddings: torch.nn.Module) -> Embed:
        """The sum of the embeddings, normalised."""
        ...

    def linear(self, name: str, weight: torch.Tensor, bias: torch.Tensor, activation: Activation | None) -> Linear:
        """``activation(x @ weight.T + bias)``; ``name`` is the key in `used`."""
        ...

    def linear_norm(
        self, name: str, weight: torch.Tensor, bias: torch.Tensor, norm: torch.nn.LayerNorm
    ) -> LinearNorm:
        """``norm(x @ weight.T + bias + residual)``."""
        ...


class TorchParts:
    """torch's own operations: on any device, in any dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.used: dict[str, str] = {}
        self._device = device
        self._dtype = dtype

    def embed(self, embeddings: torch.nn.Module) -> Embed:
        """See `Parts`. The tables are not copied where they are on the device in this dtype."""
        self.used["embedding"] = "torch"
        words, positions, types = self._tables(embeddings)
        norm = self._norm(embeddings.LayerNorm)

        def embed(ids: torch.Tensor, type_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            found = functional.embedding(ids, words)
            if types is not None:
                found = found + functional.embedding(type_ids, types)
            return norm(found + functional.embedding(places, positions))

        return embed

    def linear(self, name: str, weight: torch.Tensor, bias: torch.Tensor, activation: Activation | None) -> Linear:
        """See `Parts`."""
        self.used[name] = "torch"
        weight, bias = self._here(weight), self._here(bias)
        if activation is None:
            return lambda x: functional.linear(x, weight, bias)
        return lambda x: activation(functional.linear(x, weight, bias))

    def linear_norm(
        self, name: str, weight: torch.Tensor, bias: torch.Tensor, norm: torch.nn.LayerNorm
    ) -> LinearNorm:
        """See `Parts`."""
        self.used[name] = "torch"
        weight, bias, normalised = self._here(weight), self._here(bias), self._norm(norm)
        return lambda x, residual: normalised(functional.linear(x, weight, bias) + residual)

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._device, self._dtype)

    def _tables(self, embeddings: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        types = getattr(embeddings, "token_type_embeddings", None)
        return (
            self._here(embeddings.word_embeddings.weight),
            self._here(embeddings.position_embeddings.weight),
            None if types is None else self._here(types.weight),
        )

    def _norm(self, norm: torch.nn.LayerNorm) -> Callable[[torch.Tensor], torch.Tensor]:
        weight, bias = self._here(norm.weight), self._here(norm.bias)
        return lambda x: functional.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


class KernelParts(TorchParts):
    """The registered kernels that serve a part on this device, else torch's operations."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        major, minor = torch.cuda.get_device_capability(device)
        self._sm = 10 * major + minor
        self._dtype_name = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]

    def embed(self, embeddings: torch.nn.Module) -> Embed:
        """See `Parts`."""
        if not self._runs("embedding", "warp_rows"):
            return super().embed(embeddings)
        from tilerank.kernels import encoder_ops

        self.used["embedding"] = "warp_rows"
        words, positions, types = self._tables(embeddings)
        gamma, beta = self._here(embeddings.LayerNorm.weight), self._here(embeddings.LayerNorm.bias)
        epsilon = embeddings.LayerNorm.eps

        def embed(ids: torch.Tensor, type_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            tables = (words, positions, types, gamma, beta)
            return encoder_ops.embedding(ids, places, type_ids, *tables, epsilon, variant="warp_rows")

        return embed

    def linear(self, name: str, weight: torch.Tensor, bias: torch.Tensor, activation: Activation | None) -> Linear:
        """See `Parts`."""
        columns, depth = weight.shape
        serves = columns % 128 == 0 and depth % 64 == 0 and depth <= 512
        if not self._runs("linear", "resident_rows") or not serves or activation not in (None, gelu):
            return super().linear(name, weight, bias, activation)
        from tilerank.kernels import encoder_ops

        self.used[name] = "resident_rows"
        weight, bias = encoder_ops.interleaved(self._here(weight)), self._here(bias)
        options = {"variant": "resident_rows", "gelu": activation is gelu, "is_interleaved": True}
        return lambda x: encoder_ops.linear(x, weight, bias, **options)

    def linear_norm(
        self, name: str, weight: torch.Tensor, bias: torch.Tensor, norm: torch.nn.LayerNorm
    ) -> LinearNorm:
        """See `Parts`."""
        columns, depth = weight.shape
        if not self._runs("linear", "row_layernorm") or columns != 384 or depth % 64:
            return super().linear_norm(name, weight, bias, norm)
        from tilerank.kernels import encoder_ops

        self.used[name] = "row_layernorm"
        weight, bias = encoder_ops.interleaved(self._here(weight)), self._here(bias)
        gamma, beta = self._here(norm.weight), self._here(norm.bias)
        options = {"variant": "row_layernorm", "is_interleaved": True}

        def run(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return encoder_ops.linear_norm(x, weight, bias, residual, gamma, beta, norm.eps, out=residual, **options)

        return run

    def _runs(self, operation: str, variant: str) -> bool:
        """Whether the variant runs on this device in this dtype."""
        row = registry.get(variant, operation)
        return (
            self._dtype_name in row.dtypes
            and row.lowest_sm(self._dtype_name) <= self._sm
            and (row.max_sm is None or self._sm <= row.max_sm)
        )


def parts_for(device: torch.device, dtype: torch.dtype) -> Parts:
    """`KernelParts` where the library can be loaded for the device, else `TorchParts`."""
    if device.type == "cuda":
        from tilerank.kernels import library

        try:
            if library.load().backend == "cuda":
                return KernelParts(device, dtype)
        except TilerankError:
            pass  # nothing compiles here: torch serves
    return TorchParts(device, dtype)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer over all rows."""

    qkv: Linear
    out: LinearNorm
    up: Linear
    down: LinearNorm


@dataclass(frozen=True, slots=True)
class _LastLayer:
    """The last layer where only first tokens count: keys and values of all rows, the rest for first tokens."""

    kv: Linear
    q: Linear
    out: LinearNorm
    up: Linear
    down: LinearNorm


class FusedModel:
    """The forward pass of a model that `refusal` does not refuse, over packed sequences.

    model: a transformers model of `FAMILIES`, with or without a sequence classifier on top, on any device in any dtype;
    it is only read. first_only: the result is of first tokens alone (a classifier's is anyway). attention: computes each
    layer's. Called with the parts of a `PackedBatch` and a bound of the longest sequence, it returns

    - a classifier's logits ``[sequences, labels]``,
    - else hidden states: ``[sequences, width]`` of first tokens, or ``[tokens, width]``,

    in ``dtype``. Rows that belong to no sequence hold anything.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        attention: PackedAttention,
        *,
        first_only: bool,
        parts: Parts | None = None,
    ) -> None:
        if reason := refusal(model):
            raise TilerankError(f"this model cannot be run fused: {reason}")
        base = model.base_model
        self._attend = attention.attend
        self.parts = parts or parts_for(device, dtype)
        first = base.encoder.layer[0].attention.self
        self._heads, self._head_dim = first.num_attention_heads, first.attention_head_size
        few = TorchParts(device, dtype)  # a kernel that gives each multiprocessor 128 rows is slow on some fifty
        self._embed = self.parts.embed(base.embeddings)
        projection = getattr(base, "embeddings_project", None)  # ELECTRA's, where its embeddings are narrower
        self._project = None
        if projection is not None:
            self._project = self.parts.linear("projection", projection.weight, projection.bias, None)
        layers = list(base.encoder.layer)
        self._layers = [_layer(self.parts, layer) for layer in (layers[:-1] if first_only else layers)]
        self._last = _last_layer(self.parts, few, layers[-1]) if first_only else None
        self._head = _head(model, device, dtype)

    def __call__(self, batch: tuple[torch.Tensor, ...], longest: int) -> torch.Tensor:
        """See the class."""
        ids, types, positions, bounds, first = batch
        x = self._embed(ids, types, positions)
        if self._project is not None:
            x = self._project(x)
        for layer in self._layers:
            q, k, v = self._by_head(layer.qkv(x), 3)
            found = self._attend(q, k, v, bounds, bounds, longest, longest, self._head_dim**-0.5)
            del q, k, v  # whose memory the wide activations below can take
            x = layer.out(found.flatten(1), x)
            del found
            x = layer.down(layer.up(x), x)
        if self._last is not None:
            x = self._first_tokens(self._last, x, bounds, first, longest)
        return x if self._head is None else self._head(x)

    def _first_tokens(
        self, layer: _LastLayer, x: torch.Tensor, bounds: torch.Tensor, first: torch.Tensor, longest: int
    ) -> torch.Tensor:
        k, v = self._by_head(layer.kv(x), 2)
        x = x.index_select(0, first)
        (q,) = self._by_head(layer.q(x), 1)
        single = torch.arange(len(first) + 1, dtype=torch.int32, device=x.device)
        found = self._attend(q, k, v, single, bounds, 1, longest, self._head_dim**-0.5)
        x = layer.out(found.flatten(1), x)
        return layer.down(layer.up(x), x)

    def _by_head(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        """``[rows, count * heads * head_dim]`` -> count views ``[rows, heads, head_dim]``."""
        return x.view(-1, count, self._heads, self._head_dim).unbind(1)


def refusal(model: torch.nn.Module) -> str | None:
    """Why `FusedModel` does not serve a model, or None when it does."""
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        return f"model_type is {family!r}; served: {', '.join(sorted(FAMILIES))}"
    name = type(model).__name__
    if model is not model.base_model and not name.endswith("ForSequenceClassification"):
        return f"{name} has a head of its own; served: ...ForSequenceClassification, and models without a head"
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        return "it is a decoder; served: encoders"
    if getattr(config, "use_task_id", False):
        return "use_task_id is set; served: embeddings of words, positions and types"
    kind = getattr(config, "position_embedding_type", "absolute") or "absolute"
    if kind != "absolute":
        return f"position_embedding_type is {kind!r}; served: absolute"
    linears = [module for module in model.base_model.encoder.modules() if "Linear" in type(module).__name__]
    odd = next((module for module in linears if type(module) is not torch.nn.Linear or module.bias is None), None)
    if odd is not None:
        return f"a layer is {odd}; served: torch.nn.Linear with a bias"
    return None


def _layer(parts: Parts, layer: torch.nn.Module) -> _Layer:
    attention = layer.attention.self
    weight, bias = _stacked(attention.query, attention.key, attention.value)
    return _Layer(parts.linear("qkv", weight, bias, None), *_after_attention(parts, layer))


def _last_layer(parts: Parts, few: Parts, layer: torch.nn.Module) -> _LastLayer:
    attention = layer.attention.self
    weight, bias = _stacked(attention.key, attention.value)
    kv = parts.linear("kv", weight, bias, None)
    q = few.linear("q", attention.query.weight, attention.query.bias, None)
    return _LastLayer(kv, q, *_after_attention(few, layer))


def _after_attention(parts: Parts, layer: torch.nn.Module) -> tuple[LinearNorm, Linear, LinearNorm]:
    out, up, down = layer.attention.output, layer.intermediate.dense, layer.output
    return (
        parts.linear_norm("out", out.dense.weight, out.dense.bias, out.LayerNorm),
        parts.linear("up", up.weight, up.bias, _activation(layer.intermediate.intermediate_act_fn)),
        parts.linear_norm("down", down.dense.weight, down.dense.bias, down.LayerNorm),
    )


def _activation(module: Any) -> Activation:
    """`gelu` itself for any spelling of it, so that a kernel can serve; else what the model calls."""
    from transformers.activations import GELUActivation

    if isinstance(module, GELUActivation) and module.act is functional.gelu:
        return gelu
    if isinstance(module, torch.nn.GELU) and module.approximate == "none":
        return gelu
    return module


def _stacked(*linears: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return torch.cat([linear.weight for linear in linears]), torch.cat([linear.bias for linear in linears])


def _head(
    model: torch.nn.Module, device: torch.device, dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What makes logits ``[n, labels]`` of first tokens ``[n, width]``: copies of the model's own modules."""
    if model is model.base_model:
        return None
    pooler = getattr(model.base_model, "pooler", None)
    modules = [copy.deepcopy(module).to(device, dtype).eval() for module in (pooler, model.classifier) if module is not None]

    def logits(x: torch.Tensor) -> torch.Tensor:
        x = x[:, None]  # a sequence of one token each
        for module in modules:
            x = module(x)
        return x

    return logits
