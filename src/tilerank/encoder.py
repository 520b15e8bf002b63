"""From token sequences to one vector or logit each: the padded forward pass, and the packed one.

An encoder works in three steps, public so that a benchmark can time each: `plan` groups sequences into batches,
`stage` makes them ready or `upload` puts them on the device, `forward` runs the model over one batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from tilerank import packed_attention, packing
from tilerank.fused import FAMILIES, FusedModel
from tilerank.graphs import TOKEN_STEP, GraphCache
from tilerank.models import ModelDescription
from tilerank.packing import PackedBatch
from tilerank.tokenization import Tokens

BATCH_TOKENS = {"cpu": 4096, "cuda": 8192}
"""Tokens that a packed batch is filled up to, before its last sequence: on a CPU what the caches hold and threads are
worth waking for, on a GPU enough to keep it busy while activations stay small."""

FUSED_BATCH_TOKENS = 76 * TOKEN_STEP - 1
"""The same for `FusedModel` on a GPU. A bucket has one spare token. What a batch of this size holds is less than
half of what 50 padded passages of 512 tokens do."""

Pool: TypeAlias = str  # first | mean: what becomes of a sequence's hidden states


class Encoder(Protocol):
    """See the module's docstring."""

    def plan(self, lengths: np.ndarray, batch_size: int | None) -> list[np.ndarray]:
        """Group sequences of ``lengths`` into batches: indices into them, each in exactly one batch."""
        ...

    def upload(self, tokens: Tokens, batches: Sequence[np.ndarray]) -> Iterable[Any]:
        """What `forward` takes of each batch (rows of ``tokens``), on the device."""
        ...

    def stage(self, tokens: Tokens, batches: Sequence[np.ndarray]) -> Iterable[Any]:
        """The same, in pinned memory where `forward` itself copies a batch to where it is read."""
        ...

    def forward(self, batch: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits ``[n]`` or vectors ``[n, d]`` of one batch, float32, on the device; or in ``out``, which may be in
        pinned memory: then the copy is enqueued, not waited for."""
        ...


@dataclass(frozen=True, slots=True)
class Head:
    """What is taken from the model's output."""

    is_classifier: bool  # logits, else the pooled hidden states
    pool: Pool


class PaddedEncoder:
    """Batches of like lengths, longest first: little padding, and too little memory shows at once."""

    def __init__(
        self, model: torch.nn.Module, description: ModelDescription, head: Head, pad_id: int, device: torch.device
    ) -> None:
        self._model = model
        self._uses_types = description.uses_token_types
        self._head = head
        self._pad_id = pad_id
        self._device = device
        # On a CPU more sequences gain nothing and are padded more; on a GPU a small forward is bound by launches.
        self._batch_size = 8 if device.type == "cpu" else 64

    def plan(self, lengths: np.ndarray, batch_size: int | None) -> list[np.ndarray]:
        """Slices of the order by falling length."""
        order = np.argsort(-lengths, kind="stable")
        size = batch_size or self._batch_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def upload(self, tokens: Tokens, batches: Sequence[np.ndarray]) -> Iterator[tuple[dict[str, torch.Tensor], Any]]:
        """The model's arguments and the mask ``[b, s]``, one batch at a time."""
        for rows in batches:
            ids, types, mask = torch.from_numpy(tokens.padded(rows, self._pad_id)).to(self._device)
            inputs = {"input_ids": ids}
            if self._uses_types:
                inputs["token_type_ids"] = types
            if tokens.lengths[rows].min() < ids.shape[1]:
                inputs["attention_mask"] = mask
            yield inputs, mask

    stage = upload

    def forward(
        self, batch: tuple[dict[str, torch.Tensor], torch.Tensor], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits or vectors of one batch."""
        result = self._run(*batch)
        return result if out is None else out.copy_(result, non_blocking=True)

    def _run(self, inputs: dict[str, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        output = self._model(**inputs)
        if self._head.is_classifier:
            return output.logits[:, 0].float()
        hidden = output.last_hidden_state.float()
        if self._head.pool == "first":
            return hidden[:, 0]
        weights = mask[:, :, None].float()  # every text has special tokens
        return (hidden * weights).sum(1) / weights.sum(1)


class PackedEncoder:
    """Sequences without padding, for the models that `packed_refusal` does not refuse.

    fused: a `FusedModel` runs in ``precision``, and ``model`` is left as it is, wherever it is. Else the model itself
    runs, on ``device``, and is changed for good: its attention becomes ``attention``; where only first tokens count,
    its last layer goes on with these alone after its attention (the same scores for a seventh less work).

    ``description.positions_from``: the first position's number (RoBERTa and its kin do not start at 0). graphs: replay
    one CUDA graph for each bucket of tokens. Safe for several threads.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        description: ModelDescription,
        head: Head,
        device: torch.device,
        attention: packed_attention.PackedAttention,
        *,
        max_length: int,
        prepacked: bool = False,
        graphs: bool = False,
        fused: bool = False,
        precision: str = "fp32",
    ) -> None:
        self._device = device
        self._uses_types = description.uses_token_types
        self._positions_from = description.positions_from
        self._budget = FUSED_BATCH_TOKENS if fused and device.type == "cuda" else BATCH_TOKENS[device.type]
        self.fused: FusedModel | None = None
        if fused:
            self.fused = FusedModel(model, device, precision, attention, first_only=head.pool == "first")
            self._body = _pooled(self.fused, head)
        else:
            self._body = _UnpaddedModel(model, head, attention)
            if prepacked:
                prepack_linears(model.base_model.encoder.layer)
        self.graphs: GraphCache | None = None
        if graphs:
            self.graphs = GraphCache(self._body, device, self._budget + max_length, max_length, dtype=torch.float32)

    def plan(self, lengths: np.ndarray, batch_size: int | None) -> list[np.ndarray]:
        """Batches of nearly as many tokens each."""
        return packing.plan(lengths, self._budget, batch_size)

    def upload(self, tokens: Tokens, batches: Sequence[np.ndarray]) -> list[PackedBatch]:
        """All batches in one copy, from pinned memory where the device is a GPU."""
        staged, made = self._packed(tokens, batches)
        # The allocator keeps the pinned memory until the copy has ended.
        parts = staged.to(self._device, non_blocking=True).split([len(batch.values) for batch in made])
        return [replace(batch, values=values) for batch, values in zip(made, parts, strict=True)]

    def stage(self, tokens: Tokens, batches: Sequence[np.ndarray]) -> list[PackedBatch]:
        """All batches in pinned memory where they are run as graphs, else on the device."""
        return self.upload(tokens, batches) if self.graphs is None else self._packed(tokens, batches)[1]

    def _packed(self, tokens: Tokens, batches: Sequence[np.ndarray]) -> tuple[torch.Tensor, list[PackedBatch]]:
        """Memory of the host for all batches, and each of them as a part of it."""
        counts = [(int(tokens.lengths[rows].sum()), len(rows)) for rows in batches]
        shapes = [self._shape(*count) for count in counts]
        sizes = [packing.size_of(*shape) for shape in shapes]
        staged = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        made = []
        parts = (staged,) if len(sizes) == 1 else staged.split(sizes)
        for rows, shape, count, values in zip(batches, shapes, counts, parts, strict=True):
            packing.fill(
                values.numpy(),
                tokens,
                rows,
                shape,
                with_types=self._uses_types,
                positions_from=self._positions_from,
            )
            made.append(PackedBatch(values, *shape, *count, int(tokens.lengths[rows].max())))
        return staged, made

    def forward(self, batch: PackedBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits or vectors of one batch, float32."""
        if self.graphs is not None:
            return self.graphs.run(batch, out)[: batch.used_sequences]
        result = self._body(batch.parts(), batch.longest)[: batch.used_sequences]
        return result.float() if out is None else out.copy_(result, non_blocking=True)

    def _shape(self, tokens: int, sequences: int) -> tuple[int, int]:
        bucket = None if self.graphs is None else self.graphs.bucket(tokens, sequences)
        return bucket or (tokens, sequences)


def _pooled(model: FusedModel, head: Head) -> Callable[[tuple[torch.Tensor, ...], int], torch.Tensor]:
    """Logits ``[n]`` or vectors ``[n, d]`` of what ``model`` gives, in its dtype: who takes them away converts them."""

    def body(parts: tuple[torch.Tensor, ...], longest: int) -> torch.Tensor:
        found = model(parts, longest)
        if head.is_classifier:
            return found[:, 0]
        return found if head.pool == "first" else _mean(found, parts[3])

    return body


def _mean(hidden: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """``[tokens, d]`` -> the mean of each sequence ``[n, d]``, float32."""
    return torch.segment_reduce(hidden.float(), "mean", offsets=bounds.long(), unsafe=True, axis=0)


class _UnpaddedModel:
    """A transformers model, changed to take sequences back to back: see `PackedEncoder`."""

    def __init__(self, model: torch.nn.Module, head: Head, attention: packed_attention.PackedAttention) -> None:
        self._model = model
        self._head = head
        self._call = threading.local()
        model.set_attn_implementation(packed_attention.implementation(attention))
        if head.pool == "first":
            self._keep_first_tokens(model.base_model.encoder.layer[-1], model.base_model.encoder)

    def __call__(self, parts: tuple[torch.Tensor, ...], longest: int) -> torch.Tensor:
        ids, types, positions, bounds, first = parts
        self._call.first = first.long()
        output = self._model(
            input_ids=ids[None],
            token_type_ids=types[None],
            position_ids=positions[None],
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            max_length_q=longest,
            max_length_k=longest,
        )
        if self._head.is_classifier:
            return output.logits[:, 0].float()
        if self._head.pool == "first":
            return output.last_hidden_state[:, 0].float()
        return _mean(output.last_hidden_state[0], bounds)

    def _keep_first_tokens(self, last: torch.nn.Module, encoder: torch.nn.Module) -> None:
        def gather(module: torch.nn.Module, states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return tuple(state.index_select(1, self._call.first) for state in states)

        def one_row_each(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
            # [1, sequences, d] -> [sequences, 1, d]: pooler and classifier take the first token of each row.
            output.last_hidden_state = output.last_hidden_state.transpose(0, 1)
            return output

        setattr(last.attention.self, packed_attention.FIRST_TOKENS, lambda: self._call.first)
        last.attention.output.register_forward_pre_hook(gather)
        encoder.register_forward_hook(one_row_each)


def packed_refusal(description: ModelDescription) -> str | None:
    """Why the packed forward pass does not serve a model, or None when it does."""
    if description.family not in FAMILIES:
        return f"model_type is {description.family!r}; packed batches serve {', '.join(sorted(FAMILIES))}"
    return None


class PrepackedLinear(torch.nn.Module):
    """A linear layer by oneDNN, in fp32; its weight is kept only in the layout that oneDNN's kernels read."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` -> ``[..., out]``."""
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `prepack_linears` serves: fp32 on a CPU, and a torch whose oneDNN has these operators."""
    operators = torch.ops.mkldnn
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and all(hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    )


def prepack_linears(module: torch.nn.Module) -> None:
    """Replace every linear layer below ``module`` by a `PrepackedLinear`."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear):
            setattr(module, name, PrepackedLinear(child))
        else:
            prepack_linears(child)
