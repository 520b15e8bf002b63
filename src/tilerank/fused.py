"""A BERT-family encoder over packed sequences, from token ids to logits, as few kernels as its parts can be made into.

It is built from a transformers model, whose weights are read and stay as they are, and has buffers of its own: the
three projections of a layer's attention as one matrix, matrices in the order that the kernels read. Bias, GELU,
residual and LayerNorm are the end of the product before them where a registered kernel serves, else torch's own
operations. Where only first tokens count, the last layer goes on with these alone.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch.nn import functional

from tilerank.errors import TilerankError
from tilerank.graphs import MOST_SEQUENCES
from tilerank.kernels import registry
from tilerank.kernels.torch_device import device_sm
from tilerank.packed_attention import PackedAttention
from tilerank.precision import PRECISIONS

FAMILIES = frozenset({"bert", "camembert", "data2vec-text", "electra", "ernie", "roberta", "xlm-roberta"})
"""Model types whose encoder is ``encoder.layer[i].attention.{self,output}``, whose positions are a table, and whose
classifier takes the first token."""

Linear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""``[rows, in]`` -> ``[rows, out]``."""
LinearNorm: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x ``[rows, in]`` and residual ``[rows, out]``, which may be overwritten -> the normalised sum ``[rows, out]``."""
Embed: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""ids, type ids and positions, int32 ``[rows]`` -> ``[rows, width]``."""
TokenAttention: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float], torch.Tensor]
"""q ``[sequences, heads, head_dim]`` of one token each, k and v ``[rows, heads, head_dim]``, the bounds of sequences in
these, the longest, the scale -> ``[sequences, heads, head_dim]``."""
Between: TypeAlias = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""What attention found and the layer's x, which may be overwritten, both ``[rows, width]`` -> the layer's result, and
the next product of that."""
Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

gelu: Activation = functional.gelu  # by the error function
tanh: Activation = torch.tanh

_ACTIVATIONS: dict[Activation | None, str | None] = {None: None, gelu: "gelu", tanh: "tanh"}
"""What kernels can end a product with, by their names."""

NORM = "vectorized"
"""The variant of layer normalisation behind products that do not end with it."""

FEW_ROWS_WIDTH = 1024
"""The widest row that `few_rows` normalises."""

ENCODER_ROWS = (
    ("embedding", "warp_rows"),
    ("layer", "resident_tokens"),
    ("layernorm", NORM),
    ("linear", "few_rows"),
    ("linear", "resident_rows"),
    ("linear", "row_layernorm"),
    ("linear", "split_rows"),
    ("token_attention", "warp_keys"),
)
"""(operation, row) of what the fused encoder calls by name; it calls no others."""

OWN_PRODUCTS = frozenset({"projection", "qkv", "kv", "out", "up", "down"})
"""Parts whose product a kernel here computes where one serves; the others are left to cuBLASLt."""

WHOLE_LAYERS = True
"""Whether one kernel goes from attention to attention where it serves."""

OVERLAP = True
"""Whether kernels begin while the one before them ends (from 9.0 on); the weights here and the bounds of sequences are
complete long before."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What no row of activations exceeds, whatever the text: proven from the weights that make it."""

    element: float  # of an element's absolute value
    norm: float  # of the row's Euclidean norm

    @staticmethod
    def of_norm(norm: torch.nn.LayerNorm) -> Bound:
        """Of a LayerNorm's result: before gamma and beta a row's norm is at most the root of its width."""
        root = math.sqrt(norm.weight.numel())
        gamma, beta = norm.weight.detach().double().abs(), norm.bias.detach().double().abs()
        return Bound(float((gamma * root + beta).max()), float(gamma.max() * root + beta.norm()))

    def after(self, weight: torch.Tensor, bias: torch.Tensor) -> Bound:
        """Of ``x @ weight.T + bias``, and of what GELU or averaging over rows makes of it."""
        rows = weight.detach().double().norm(dim=1) * self.norm + bias.detach().double().abs()
        return Bound(float(rows.max()), float(rows.norm()))


Weights: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""``[out, in]`` and the bias."""


class Parts(Protocol):
    """Makes the parts of an encoder from a model's modules, on a device and in a precision."""

    used: dict[str, str]
    """What computes each kind of part: registry rows, or ``torch``."""

    def embed(self, embeddings: torch.nn.Module) -> Embed:
        """The sum of the embeddings, normalised."""
        ...

    def token_attention(self, attention: PackedAttention, head_dim: int) -> TokenAttention:
        """Attention from one token a sequence; ``attention`` serves it where nothing was written for it."""
        ...

    def linear(
        self, name: str, weight: torch.Tensor, bias: torch.Tensor, activation: Activation | None, bound: Bound
    ) -> Linear:
        """``activation(x @ weight.T + bias)``; ``name`` is the key in `used`, ``bound`` that of x."""
        ...

    def linear_norm(
        self, name: str, weight: torch.Tensor, bias: torch.Tensor, norm: torch.nn.LayerNorm, bound: Bound
    ) -> LinearNorm:
        """``norm(x @ weight.T + bias + residual)``."""
        ...

    def between(self, layer: torch.nn.Module, following: Weights | None) -> Between | None:
        """All that stands behind a layer's attention, and the product with ``following`` behind that; None where
        nothing does it at once."""
        ...


class TorchParts:
    """torch's own operations: on any device, in any precision."""

    def __init__(self, device: torch.device, precision: str) -> None:
        self.used: dict[str, str] = {}
        self._device = device
        self._dtype = PRECISIONS[precision]

    def embed(self, embeddings: torch.nn.Module) -> Embed:
        """See `Parts`."""
        self.used["embedding"] = "torch"
        words, positions, types = self._tables(embeddings)
        norm = self._norm(embeddings.LayerNorm)

        def embed(ids: torch.Tensor, type_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            found = functional.embedding(ids, words)
            if types is not None:
                found = found + functional.embedding(type_ids, types)
            return norm(found + functional.embedding(places, positions))

        return embed

    def token_attention(self, attention: PackedAttention, head_dim: int) -> TokenAttention:
        """See `Parts`."""
        self.used["token_attention"] = attention.name
        # Bounds of sequences of one token each, as many as a captured batch may have.
        known = torch.arange(MOST_SEQUENCES + 1, dtype=torch.int32, device=self._device)

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float
        ) -> torch.Tensor:
            count = len(q) + 1
            own = known[:count] if count <= len(known) else torch.arange(count, dtype=known.dtype, device=known.device)
            return attention.attend(q, k, v, own, bounds, 1, longest, scale)

        return attend

    def linear(
        self, name: str, weight: torch.Tensor, bias: torch.Tensor, activation: Activation | None, bound: Bound
    ) -> Linear:
        """See `Parts`."""
        self.used[name] = "torch"
        weight, bias = self._here(weight), self._here(bias)
        if activation is None:
            return lambda x: functional.linear(x, weight, bias)
        return lambda x: activation(functional.linear(x, weight, bias))

    def linear_norm(
        self, name: str, weight: torch.Tensor, bias: torch.Tensor, norm: torch.nn.LayerNorm, bound: Bound
    ) -> LinearNorm:
        """See `Parts`."""
        self.used[name] = "torch"
        weight, bias, normalised = self._here(weight), self._here(bias), self._norm(norm)
        return lambda x, residual: normalised(functional.linear(x, weight, bias) + residual)

    def between(self, layer: torch.nn.Module, following: Weights | None) -> Between | None:
        """See `Parts`."""
        return None

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        # Weights that are on the device in this dtype are copied too: the model may be given others.
        return tensor.detach().to(self._device, self._dtype, copy=True)

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
    """The registered kernels that serve a part on this device, else torch's operations.

    few_rows: products are of some fifty rows, on which a kernel that gives each multiprocessor 128 is slow.
    """

    def __init__(self, device: torch.device, precision: str, *, few_rows: bool = False) -> None:
        super().__init__(device, precision)
        self._sm = device_sm(device)
        self._precision = precision
        self._few_rows = few_rows

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

    def token_attention(self, attention: PackedAttention, head_dim: int) -> TokenAttention:
        """See `Parts`."""
        row = registry.get("warp_keys", "token_attention")
        if not self._runs("token_attention", row.name) or head_dim not in (row.head_dims or ()):
            return super().token_attention(attention, head_dim)
        from tilerank.kernels import encoder_ops

        self.used["token_attention"] = row.name
        return lambda q, k, v, bounds, longest, scale: encoder_ops.token_attention(
            q, k, v, bounds, scale, variant=row.name, overlap=OVERLAP
        )

    def linear(
        self, name: str, weight: torch.Tensor, bias: torch.Tensor, activation: Activation | None, bound: Bound
    ) -> Linear:
        """See `Parts`."""
        from tilerank.kernels import encoder_ops

        columns, depth = weight.shape
        options: dict[str, Any] = {"activation": _ACTIVATIONS.get(activation), "overlap": OVERLAP}
        has_end = activation in (None, gelu) and self._multiplies(name)
        if activation in _ACTIVATIONS and self._serves_few(depth):
            weights = encoder_ops.plain(self._contiguous(weight))
            options["variant"] = "few_rows"
        elif has_end and self._runs("linear", "resident_rows") and columns % 128 == 0 and depth in (128, 256, 384):
            weights = encoder_ops.interleaved(self._here(weight))
            options["variant"] = "resident_rows"
        elif has_end and self._can_split(columns, depth, bound):
            weights = encoder_ops.split(self._here(weight))
            options |= {"variant": "split_rows", "x_exponent": _split_exponent(bound)}
        else:
            return super().linear(name, weight, bias, activation, bound)
        self.used[name] = options["variant"]
        bias = self._here(bias)
        return lambda x: encoder_ops.linear(x, weights, bias, **options)

    def linear_norm(
        self, name: str, weight: torch.Tensor, bias: torch.Tensor, norm: torch.nn.LayerNorm, bound: Bound
    ) -> LinearNorm:
        """See `Parts`."""
        from tilerank.kernels import encoder_ops

        columns, depth = weight.shape
        bias, gamma, beta = self._here(bias), self._here(norm.weight), self._here(norm.bias)
        own, few = self._multiplies(name), self._serves_few(depth)
        row = None
        if few and columns <= FEW_ROWS_WIDTH:
            row, weights = "few_rows", encoder_ops.plain(self._contiguous(weight))
        elif own and self._runs("linear", "row_layernorm") and columns == 384 and depth % 64 == 0:
            row, weights = "row_layernorm", encoder_ops.interleaved(self._here(weight))
        if row is not None:
            self.used[name] = row

            def in_one(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
                ends = (bias, residual, gamma, beta, norm.eps)
                return encoder_ops.linear_norm(x, weights, *ends, variant=row, overlap=OVERLAP, out=residual)

            return in_one
        if not self._runs("layernorm", NORM):
            return super().linear_norm(name, weight, bias, norm, bound)
        if own and self._can_split(columns, depth, bound):
            weights = encoder_ops.split(self._here(weight))
            options = {"variant": "split_rows", "x_exponent": _split_exponent(bound), "overlap": OVERLAP}
            multiply = functools.partial(encoder_ops.linear, weights=weights, bias=None, **options)
            self.used[name] = f"split_rows, {NORM}"
        elif few:
            weights = encoder_ops.plain(self._contiguous(weight))
            options = {"variant": "few_rows", "overlap": OVERLAP}
            multiply = functools.partial(encoder_ops.linear, weights=weights, bias=None, **options)
            self.used[name] = f"few_rows, {NORM}"
        else:
            multiply = functools.partial(functional.linear, weight=self._here(weight))
            self.used[name] = f"torch, {NORM}"

        def in_two(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            ends = (residual, bias, gamma, beta, norm.eps)
            return encoder_ops.layernorm(multiply(x), *ends, variant=NORM, out=residual)

        return in_two

    def between(self, layer: torch.nn.Module, following: Weights | None) -> Between | None:
        """See `Parts`."""
        out, up, down = layer.attention.output, layer.intermediate.dense, layer.output
        wide, width = up.weight.shape
        norms = (out.LayerNorm, down.LayerNorm)
        serves = (
            WHOLE_LAYERS
            and not self._few_rows
            and self._runs("layer", "resident_tokens")
            and width == 384
            and wide % 64 == 0
            and wide >= 128
            and _activation(layer.intermediate.intermediate_act_fn) is gelu
            and norms[0].eps == norms[1].eps
        )
        if not serves:
            return None
        from tilerank.kernels import encoder_ops

        def here(weight: torch.Tensor, bias: torch.Tensor) -> Weights:
            return self._contiguous(weight), self._here(bias)

        weights = encoder_ops.LayerWeights(
            out=here(out.dense.weight, out.dense.bias),
            up=here(up.weight, up.bias),
            down=here(down.dense.weight, down.dense.bias),
            norms=(here(norms[0].weight, norms[0].bias), here(norms[1].weight, norms[1].bias)),
            next=None if following is None else here(*following),
            epsilon=norms[0].eps,
        )
        self.used["between"] = "resident_tokens"
        options: dict[str, Any] = {"variant": "resident_tokens", "overlap": OVERLAP}
        return lambda found, x: encoder_ops.layer(found, x, weights, **options)

    def _multiplies(self, name: str) -> bool:
        """Whether the part's product is computed by a kernel here."""
        return not self._few_rows and name in OWN_PRODUCTS

    def _contiguous(self, weight: torch.Tensor) -> torch.Tensor:
        return self._here(weight).contiguous()

    def _serves_few(self, depth: int) -> bool:
        return self._few_rows and depth % 8 == 0 and self._runs("linear", "few_rows")

    def _can_split(self, columns: int, depth: int, bound: Bound) -> bool:
        return (
            self._precision == "fp32"
            and self._runs("linear", "split_rows")
            and columns % 192 == 0
            and depth % 64 == 0
            and _split_exponent(bound) >= 0
        )

    def _runs(self, operation: str, variant: str) -> bool:
        """Whether the variant, one of `ENCODER_ROWS`, runs on this device in this precision."""
        assert (operation, variant) in ENCODER_ROWS, "the records that this encoder makes depend on those rows alone"
        row = registry.get(variant, operation)
        dtype = "fp32" if self._precision == "tf32" else self._precision
        return dtype in row.dtypes and row.runs_on(self._sm, dtype)


def _split_exponent(bound: Bound) -> int:
    """The largest power of two that x may be multiplied by before it is split into fp16 terms, which end at 65,504.
    Below 0 elements near 1 would lose accuracy: what has such a bound is not split."""
    if not math.isfinite(bound.element) or bound.element <= 0:
        return -1
    return min(10, math.floor(math.log2(32768.0 / bound.element)))


def parts_for(device: torch.device, precision: str, *, few_rows: bool = False) -> Parts:
    """`KernelParts` where the library can be loaded for the device, else `TorchParts`."""
    if device.type == "cuda":
        from tilerank.kernels import library

        try:
            if library.load().backend == "cuda":
                return KernelParts(device, precision, few_rows=few_rows)
        except TilerankError:
            pass  # nothing compiles here: torch serves
    return TorchParts(device, precision)


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

    kv: Linear | None  # None: made by the layer before
    q: Linear
    out: LinearNorm
    up: Linear
    down: LinearNorm


class FusedModel:
    """The forward pass of a model that `refusal` does not refuse, over packed sequences.

    model: a transformers model of `FAMILIES`, with or without a sequence classifier on top, on any device in any dtype;
    it is only read. first_only: the result is of first tokens alone (a classifier's is anyway). attention: computes
    each layer's. Called with the parts of a `PackedBatch` and a bound of the longest sequence, it returns

    - a classifier's logits ``[sequences, labels]``,
    - else hidden states: ``[sequences, width]`` of first tokens, or ``[tokens, width]``,

    in the precision's dtype. Rows that belong to no sequence hold anything.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        precision: str,
        attention: PackedAttention,
        *,
        first_only: bool,
        parts: Parts | None = None,
    ) -> None:
        if reason := refusal(model):
            raise TilerankError(f"this model cannot be run fused: {reason}")
        base = model.base_model
        # The bounds of sequences were complete before the embeddings.
        self._attend = (attention.overlapping if OVERLAP else None) or attention.attend
        self.parts = parts_for(device, precision) if parts is None else parts
        few = parts_for(device, precision, few_rows=True) if parts is None else parts
        first = base.encoder.layer[0].attention.self
        self._heads, self._head_dim = first.num_attention_heads, first.attention_head_size
        self._embed = self.parts.embed(base.embeddings)
        bound = Bound.of_norm(base.embeddings.LayerNorm)
        projection = getattr(base, "embeddings_project", None)  # ELECTRA's, where its embeddings are narrower
        self._project = None
        if projection is not None:
            weights = (projection.weight, projection.bias)
            self._project = self.parts.linear("projection", *weights, None, bound)
            bound = bound.after(*weights)
        layers = list(base.encoder.layer)
        all_rows = layers[:-1] if first_only else layers
        self._layers: list[_Layer] = []
        self._qkv = self._between = None
        if (between := _between(self.parts, layers, first_only)) is not None:
            self._qkv, self._between = self.parts.linear("qkv", *_qkv(layers[0]), None, bound), between
        for layer in all_rows:
            if self._between is None:
                self._layers.append(_layer(self.parts, layer, bound))
            bound = Bound.of_norm(layer.output.LayerNorm)
        self._last = self._attend_tokens = None
        if first_only:
            self._last = _last_layer(self.parts, few, layers[-1], bound, has_kv=self._between is not None)
            self._attend_tokens = self.parts.token_attention(attention, self._head_dim)
        self._head = _head(model, few, device, PRECISIONS[precision])
        if few is not self.parts:
            self.parts.used.update({f"{name} of first tokens": made for name, made in few.used.items()})

    def __call__(self, batch: tuple[torch.Tensor, ...], longest: int) -> torch.Tensor:
        """See the class."""
        ids, types, positions, bounds, first = batch
        x = self._embed(ids, types, positions)
        if self._project is not None:
            x = self._project(x)
        after = None
        if self._between is not None:
            after = self._qkv(x)
            for between in self._between:
                found = self._attended(after, bounds, longest)
                del after  # whose memory the next takes
                x, after = between(found, x)
                del found
        for layer in self._layers:
            found = self._attended(layer.qkv(x), bounds, longest)
            x = layer.out(found, x)
            del found
            x = layer.down(layer.up(x), x)
        if self._last is not None:
            x = self._first_tokens(self._last, x, after, bounds, first, longest)
        return x if self._head is None else self._head(x)

    def _attended(self, qkv: torch.Tensor, bounds: torch.Tensor, longest: int) -> torch.Tensor:
        q, k, v = self._by_head(qkv, 3)
        return self._attend(q, k, v, bounds, bounds, longest, longest, self._head_dim**-0.5).flatten(1)

    def _first_tokens(
        self,
        layer: _LastLayer,
        x: torch.Tensor,
        kv: torch.Tensor | None,
        bounds: torch.Tensor,
        first: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        k, v = self._by_head(layer.kv(x) if kv is None else kv, 2)
        x = x.index_select(0, first)
        (q,) = self._by_head(layer.q(x), 1)
        found = self._attend_tokens(q, k, v, bounds, longest, self._head_dim**-0.5)
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
    if getattr(model, "base_model", None) is None:
        return "it has no base_model; served: whole models of transformers"
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


def _layer(parts: Parts, layer: torch.nn.Module, bound: Bound) -> _Layer:
    return _Layer(parts.linear("qkv", *_qkv(layer), None, bound), *_after_attention(parts, layer, bound))


def _qkv(layer: torch.nn.Module) -> Weights:
    attention = layer.attention.self
    return _stacked(attention.query, attention.key, attention.value)


def _kv(layer: torch.nn.Module) -> Weights:
    return _stacked(layer.attention.self.key, layer.attention.self.value)


def _between(parts: Parts, layers: list[torch.nn.Module], first_only: bool) -> list[Between] | None:
    """From each attention over all rows to the product in front of the next; None where ``parts`` does not do it."""
    made = []
    for number, layer in enumerate(layers[:-1] if first_only else layers):
        is_last = number + 1 == len(layers)
        is_next_last = first_only and number + 2 == len(layers)
        following = None if is_last else _kv(layers[-1]) if is_next_last else _qkv(layers[number + 1])
        between = parts.between(layer, following)
        if between is None:
            return None
        made.append(between)
    return made or None


def _last_layer(parts: Parts, few: Parts, layer: torch.nn.Module, bound: Bound, *, has_kv: bool) -> _LastLayer:
    attention = layer.attention.self
    kv = None if has_kv else parts.linear("kv", *_kv(layer), None, bound)
    q = few.linear("q", attention.query.weight, attention.query.bias, None, bound)
    return _LastLayer(kv, q, *_after_attention(few, layer, bound))


def _after_attention(parts: Parts, layer: torch.nn.Module, bound: Bound) -> tuple[LinearNorm, Linear, LinearNorm]:
    value, out = layer.attention.self.value, layer.attention.output
    up, down = layer.intermediate.dense, layer.output
    activation = _activation(layer.intermediate.intermediate_act_fn)
    mixed = bound.after(value.weight, value.bias)  # attention averages values
    states = Bound.of_norm(out.LayerNorm)
    wide = states.after(up.weight, up.bias) if activation is gelu else Bound(math.inf, math.inf)
    return (
        parts.linear_norm("out", out.dense.weight, out.dense.bias, out.LayerNorm, mixed),
        parts.linear("up", up.weight, up.bias, activation, states),
        parts.linear_norm("down", down.dense.weight, down.dense.bias, down.LayerNorm, wide),
    )


def _activation(module: Any) -> Activation:
    """`gelu` itself for any spelling of it, so that a kernel can serve; else what the model calls."""
    from transformers.activations import GELUActivation

    if isinstance(module, GELUActivation) and module.act is functional.gelu:
        return gelu
    if isinstance(module, torch.nn.GELU) and module.approximate == "none":
        return gelu
    return module


def _stacked(*linears: torch.nn.Linear) -> Weights:
    with torch.no_grad():
        return torch.cat([linear.weight for linear in linears]), torch.cat([linear.bias for linear in linears])


def _head(
    model: torch.nn.Module, few: Parts, device: torch.device, dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What makes logits ``[n, labels]`` of first tokens ``[n, width]``, from copies of the model's weights."""
    if model is model.base_model:
        return None
    pooler = getattr(model.base_model, "pooler", None)
    if (linears := _tanh_between(pooler, model.classifier)) is not None:
        unknown = Bound(math.inf, math.inf)
        pool, classify = (
            few.linear(name, linear.weight, linear.bias, activation, unknown)
            for name, linear, activation in zip(("pooler", "classifier"), linears, (tanh, None), strict=True)
        )
        return lambda x: classify(pool(x))
    modules = [
        copy.deepcopy(module).to(device, dtype).eval() for module in (pooler, model.classifier) if module is not None
    ]

    def logits(x: torch.Tensor) -> torch.Tensor:
        x = x[:, None]  # a sequence of one token each
        for module in modules:
            x = module(x)
        return x

    return logits


def _tanh_between(
    pooler: torch.nn.Module | None, classifier: torch.nn.Module
) -> tuple[torch.nn.Linear, torch.nn.Linear] | None:
    """The layers of a head of transformers that is ``second(tanh(first(x)))``, as BERT's and RoBERTa's are."""
    module = classifier if pooler is None else pooler
    if not type(module).__module__.startswith("transformers."):
        return None
    children = dict(module.named_children())
    if pooler is None:
        is_known = set(children) == {"dense", "dropout", "out_proj"}  # ELECTRA's, with GELU, has an activation too
        second = children.get("out_proj")
    else:
        is_known = set(children) == {"dense", "activation"} and type(children["activation"]) is torch.nn.Tanh
        second = classifier
    first = children.get("dense")
    linears = (first, second)
    if not is_known or any(type(one) is not torch.nn.Linear or one.bias is None for one in linears):
        return None
    return linears
