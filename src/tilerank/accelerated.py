"""A drop-in for a transformers model: the same call, the same outputs, the packed forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from tilerank import packed_attention, packing
from tilerank.errors import TilerankError
from tilerank.fused import FusedModel, refusal
from tilerank.graphs import GraphCache
from tilerank.models import FIRST_POSITION_AFTER_PAD
from tilerank.packing import PackedBatch
from tilerank.precision import PRECISIONS, arithmetic

_DEVICES = ("cpu", "cuda")

_INTEGERS = (torch.int64, torch.int32)
"""What tables are indexed by."""

_OF_DTYPE = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

_GRAPH_TOKENS = 1 << 15
"""A call with more tokens than this runs without a graph: launches are a small part of its time."""


def accelerate(
    model: torch.nn.Module, *, precision: str | None = None, attention: str = "auto", graphs: bool | None = None
) -> Accelerated:
    """What gives a transformers encoder's outputs sooner: padding is left out, and each layer is a few kernels.

    Args:
        model: a BERT-family encoder (`tilerank.fused.FAMILIES`) in evaluation mode, bare or with a sequence classifier,
            on the CPU or a CUDA device. It is read now and not changed; change its weights and this must be called
            again. The weights are copied, on a device too where the model itself is.
        precision: fp32, tf32, fp16 or bf16, in which weights are kept and computed; None: the model's own dtype.
            Outputs have the model's dtype.
        attention: as `tilerank.Reranker` takes it.
        graphs: replay a CUDA graph for each bucket of tokens, on a CUDA device alone; None: there.

    Raises:
        TilerankError: a model that is not served, by name, or an attention that does not serve it.
        ValueError: an unknown precision or attention, or graphs for a model that is not on a CUDA device.
    """
    if reason := refusal(model):
        raise TilerankError(f"{type(model).__name__} is not served: {reason}")
    if model.training:
        raise TilerankError(f"{type(model).__name__} is in training mode; call model.eval() first")
    device, dtype = model.device, model.dtype
    elsewhere = {weight.device.type for weight in model.parameters()}.difference(_DEVICES)
    if elsewhere:
        raise TilerankError(
            f"the model is on {', '.join(sorted(elsewhere))}; served: {', '.join(_DEVICES)}; load its weights there"
        )
    if graphs and device.type != "cuda":
        raise ValueError(
            f"graphs is {graphs} for a model on {device}; allowed: False or None, or a model on a CUDA device"
        )
    if precision is None:
        if dtype not in _OF_DTYPE:
            raise TilerankError(f"the model is {dtype}; served: {', '.join(map(str, _OF_DTYPE))}")
        precision = _OF_DTYPE[dtype]
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; allowed: {', '.join(PRECISIONS)}, or None for the model's own")
    longest = model.base_model.embeddings.position_embeddings.num_embeddings
    head_dim = model.base_model.encoder.layer[0].attention.self.attention_head_size
    chosen = packed_attention.choose(attention, device, PRECISIONS[precision], head_dim, longest)
    if chosen is None:
        raise TilerankError(f"attention {attention!r} serves no packed batches here; use auto or sdpa")
    return Accelerated(model, chosen, precision, device.type == "cuda" if graphs is None else graphs)


class Accelerated(torch.nn.Module):
    """What `accelerate` returns. ``attention`` and ``parts`` name what computes it; ``config`` is the model's own.

    Safe for several threads. A sequence's outputs do not depend on the other sequences, up to float noise. It stays on
    the device and in the dtype that it was made for, and is not pickled: move, cast or save the model.
    """

    def __init__(
        self, model: torch.nn.Module, attention: packed_attention.PackedAttention, precision: str, graphs: bool
    ) -> None:
        super().__init__()
        self.config = model.config
        self.precision = precision
        self.attention = attention.name
        self.device, self.dtype = model.device, model.dtype
        self._is_classifier = model is not model.base_model
        embeddings = model.base_model.embeddings
        self._longest = embeddings.position_embeddings.num_embeddings
        types = getattr(embeddings, "token_type_embeddings", None)
        self._rows = {"input_ids": embeddings.word_embeddings.num_embeddings, "position_ids": self._longest}
        if types is not None:
            self._rows["token_type_ids"] = types.num_embeddings
        after_pad = self.config.model_type in FIRST_POSITION_AFTER_PAD
        self._pad_id = embeddings.word_embeddings.padding_idx if after_pad else None
        dtype = PRECISIONS[precision]
        # Plain attributes: what is registered would show up among this module's parameters.
        body = FusedModel(model, self.device, precision, attention, first_only=self._is_classifier)
        pooler = None if self._is_classifier else getattr(model.base_model, "pooler", None)
        self._pooler = (None if pooler is None else _copy(pooler, self.device, dtype),)
        self.parts = dict(body.parts.used)
        self._body = body
        self._graphs = GraphCache(body, self.device, _GRAPH_TOKENS, self._longest) if graphs else None

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """As the model's: tensors ``[batch, sequence]``, a mask of ones (tokens) and zeros (padding).

        Hidden states of padding are zeros. Outputs are ordinary tensors without gradients.

        Raises ValueError for arguments that are not served (labels, embeddings, attentions and hidden states of layers
        among the outputs, whether the call or the config asks for these), for a mask of another shape, for a sequence
        whose first token is masked and for ids, types and positions beyond the model's tables; TypeError for what is no
        tensor, and for ids, types and positions that are not int64 or int32; `TilerankError` for outputs that are not
        finite. Ids and types on a CUDA device are taken as they are, modulo 2^32, since looking at them would hold up
        the call: one beyond the tables gives any result or an error of the device.
        """
        asked = sorted(name for name, value in others.items() if value is not None and value is not False)
        if asked:
            raise ValueError(f"{', '.join(asked)}: not served by an accelerated model; call the model itself")
        for name in ("output_attentions", "output_hidden_states"):
            if others.get(name) is None and getattr(self.config, name, False):
                raise ValueError(
                    f"{name} is True in the model's config: not served by an accelerated model; call the model itself "
                    f"or pass {name}=False"
                )
        with arithmetic(self.precision, self.device):
            batch, places = self._packed(input_ids, attention_mask, token_type_ids, position_ids)
            graphs = self._graphs
            found = self._body(batch.parts(), batch.longest) if graphs is None else graphs.run(batch)
            used = batch.used_sequences if self._is_classifier else batch.used_tokens
            found = found[:used]
            if not bool(torch.isfinite(found).all()):
                raise TilerankError(
                    f"an output is not finite: weights may be damaged, or values too large for {self.precision}"
                )
            # What is made in inference mode nobody could train a head on, or write to.
            with torch.inference_mode(False), torch.no_grad():
                return self._outputs(found, places, tuple(input_ids.shape), return_dict)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Accelerated:
        """Under half(), to() and their like, also of a module that holds this one: refuses to become another."""
        sample = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if (sample.dtype, sample.device) != (self.dtype, self.device):
            raise TilerankError(
                f"an accelerated model stays on {self.device} in {self.dtype}; asked for: {sample.device} in "
                f"{sample.dtype}; change the model and call accelerate() again"
            )
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an accelerated model is not pickled; pickle the model and call accelerate() on what is read")

    def __copy__(self) -> Accelerated:
        return self  # nothing of it changes

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerated:
        return self

    def _packed(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        types: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> tuple[PackedBatch, torch.Tensor]:
        """The batch, and the place of each of its tokens in ``ids``, flattened."""
        if not isinstance(ids, torch.Tensor):
            raise TypeError(f"input_ids is a {type(ids).__name__}; expected a tensor [batch, sequence]")
        for name, tensor in (("attention_mask", mask), ("token_type_ids", types), ("position_ids", positions)):
            if tensor is not None and not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} is a {type(tensor).__name__}; expected a tensor or None")
        if ids.dim() != 2 or 0 in ids.shape:
            raise ValueError(f"input_ids has shape {tuple(ids.shape)}; expected [batch, sequence], neither 0")
        rows, columns = ids.shape
        for name, tensor in (("attention_mask", mask), ("token_type_ids", types)):
            if tensor is not None and tensor.shape != ids.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {(rows, columns)}")
        for name, tensor in (("input_ids", ids), ("token_type_ids", types), ("position_ids", positions)):
            if tensor is not None:
                _check_numbers(name, tensor, self._rows.get(name))
        if positions is None:
            positions = self._positions(ids)
        positions = positions.expand(rows, columns)
        keeps = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(self.device) != 0
        counts = torch.cat([keeps.sum(1), keeps[:, 0], positions.amax()[None]]).tolist()  # the host waits here, once
        lengths, starts, last = counts[:rows], counts[rows:-1], counts[-1]
        if not all(starts):
            raise ValueError(
                f"the first token of sequence {starts.index(0)} is masked; served: sequences that begin with a token "
                "(pad on the right)"
            )
        if last >= self._longest:
            raise ValueError(f"position {last} is beyond the model's table of {self._longest} positions")
        used = sum(lengths)
        bucket = None if self._graphs is None else self._graphs.bucket(used, rows)
        tokens, sequences = bucket or (used, rows)
        places = keeps.flatten().nonzero()[:, 0]
        values = torch.zeros(packing.size_of(tokens, sequences), dtype=torch.int32, device=self.device)
        batch = PackedBatch(values, tokens, sequences, used, rows, max(lengths))
        parts = batch.parts()
        for part, source in zip(parts, (ids, types, positions), strict=False):
            if source is not None:
                part[:used] = source.to(self.device).flatten()[places]
        _, _, _, bounds, first = parts
        ends = keeps.sum(1).cumsum(0)
        bounds[1 : rows + 1], bounds[rows + 1 :] = ends, used
        first[1:rows], first[rows:] = ends[:-1], tokens - 1
        return batch, places

    def _positions(self, ids: torch.Tensor) -> torch.Tensor:
        if self._pad_id is None:
            return torch.arange(ids.shape[1], device=self.device)[None]
        real = ids.to(self.device) != self._pad_id
        return real.cumsum(1) * real + self._pad_id

    def _outputs(
        self, found: torch.Tensor, places: torch.Tensor, shape: tuple[int, int], return_dict: bool | None
    ) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput

        as_tuple = not (self.config.return_dict if return_dict is None else return_dict)
        if self._is_classifier:
            # A tensor of this mode; where the dtype stays it has the memory of the other, which nobody else has.
            logits = torch.empty(0, dtype=found.dtype, device=found.device).set_(found).to(self.dtype)
            return (logits,) if as_tuple else SequenceClassifierOutput(logits=logits)
        width = found.shape[1]
        hidden = found.new_zeros(shape[0] * shape[1], width).index_copy_(0, places, found).view(*shape, width)
        pooler = self._pooler[0]
        pooled = None if pooler is None else pooler(hidden).to(self.dtype)
        hidden = hidden.to(self.dtype)
        if as_tuple:
            return (hidden,) if pooled is None else (hidden, pooled)
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)


def _check_numbers(name: str, numbers: torch.Tensor, rows: int | None) -> None:
    """Refuse what does not index a table of so many rows, None for any; the host does not wait for a device."""
    if numbers.dtype not in _INTEGERS:
        raise TypeError(f"{name} is {numbers.dtype}; allowed: {', '.join(map(str, _INTEGERS))}")
    if rows is None or numbers.device.type != "cpu" or not numbers.numel():
        return
    # Before they become int32: what is beyond that would be another number.
    least, most = (int(end) for end in numbers.aminmax())
    if least < 0 or most >= rows:
        wrong = least if least < 0 else most
        raise ValueError(f"{name} holds {wrong}; allowed: 0 to {rows - 1}, the rows of the model's table")


def _copy(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    import copy

    return copy.deepcopy(module).to(device, dtype).eval()
