"""The packed forward pass that a user builds in an afternoon from a library's parts: the peer of the fused encoder.

torch's operations on tokens back to back, its variable-length attention, `torch.compile`, a CUDA graph around all.
Nothing of this project is in it but the way tokens are packed. The compiler's default mode is the strong one here: it
leaves matrix products to cuBLASLt, where `max-autotune` takes a minute to choose slower ones of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from tilerank.packing import PackedBatch


class PackedLibrary(torch.nn.Module):
    """A BERT sequence classifier over one packed batch. model: transformers' own, on the device, in its dtype.

    first_only: the last layer goes on with first tokens alone, as a careful user would have it too.
    """

    def __init__(self, model: torch.nn.Module, *, first_only: bool) -> None:
        super().__init__()
        base = model.base_model
        self.embeddings = base.embeddings
        self.layers = base.encoder.layer
        self.pooler, self.classifier = base.pooler, model.classifier
        self.heads = base.encoder.layer[0].attention.self.num_attention_heads
        self.first_only = first_only
        with torch.no_grad():
            for number, layer in enumerate(self.layers):
                parts = [getattr(layer.attention.self, name) for name in ("query", "key", "value")]
                self.register_buffer(f"weight{number}", torch.cat([part.weight for part in parts]))
                self.register_buffer(f"bias{number}", torch.cat([part.bias for part in parts]))

    def forward(
        self,
        ids: torch.Tensor,
        types: torch.Tensor,
        positions: torch.Tensor,
        bounds: torch.Tensor,
        single: torch.Tensor,
        first: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        """Logits ``[sequences]``; single: 0, 1, ... ``[sequences + 1]``, the bounds where a sequence is one token."""
        tables = self.embeddings
        x = tables.word_embeddings(ids) + tables.token_type_embeddings(types) + tables.position_embeddings(positions)
        x = tables.LayerNorm(x)
        for number, layer in enumerate(self.layers):
            qkv = functional.linear(x, getattr(self, f"weight{number}"), getattr(self, f"bias{number}"))
            q, k, v = qkv.view(len(x), 3, self.heads, -1).unbind(1)
            if self.first_only and number == len(self.layers) - 1:
                q, x = q[first], x[first]
                found = _attention(q, k, v, single, bounds, 1, longest)
            else:
                found = _attention(q, k, v, bounds, bounds, longest, longest)
            out = layer.attention.output
            x = out.LayerNorm(out.dense(found.flatten(1)) + x)
            wide = functional.gelu(layer.intermediate.dense(x))
            x = layer.output.LayerNorm(layer.output.dense(wide) + x)
        x = x if self.first_only else x[first]
        return self.classifier(self.pooler(x[:, None]))[:, 0].float()


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds_q: torch.Tensor,
    bounds_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
) -> torch.Tensor:
    """torch's own: FA2 with variable lengths; in fp32, which that does not serve, memory-efficient attention."""
    if q.dtype != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q, k, v, bounds_q, bounds_k, longest_q, longest_k)
    forward = torch.ops.aten._efficient_attention_forward
    rows = (x[None] for x in (q, k, v))
    return forward(*rows, None, bounds_q, bounds_k, longest_q, longest_k, 0.0, 0)[0][0]


class CapturedLibrary:
    """The model for batches of the shape, and the bounds, of ``batch``: compiled (``is_compiled``; as it is where the
    compiler fails) and captured as a CUDA graph; on a CPU neither."""

    @torch.inference_mode()
    def __init__(self, model: torch.nn.Module, batch: PackedBatch, *, first_only: bool = False) -> None:
        self._input = batch.values.clone()
        self._holds = batch
        ids, types, positions, bounds, first = replace(batch, values=self._input).parts()
        single = torch.arange(batch.sequences + 1, dtype=torch.int32, device=bounds.device)
        arguments = (ids, types, positions, bounds, single, first.long(), batch.longest)
        body = PackedLibrary(model, first_only=first_only).eval()
        self.is_compiled = False
        if self._input.is_cuda:
            self._capture(body, arguments)
        else:
            self._result = body(*arguments)
            self._replay: Callable[[], Any] = lambda: self._result.copy_(body(*arguments))

    @torch.inference_mode()
    def run(self, batch: PackedBatch) -> torch.Tensor:
        """Logits ``[sequences]``, until the next call. A batch that ran last is in place already."""
        if batch is not self._holds:
            self._input.copy_(batch.values)
            self._holds = batch
        self._replay()
        return self._result

    def _capture(self, plain: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        body = torch.compile(plain)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            try:
                for _ in range(3):
                    body(*arguments)
                self.is_compiled = True
            except Exception as error:  # the compiler's own kinds, and those of what it runs
                reason = " ".join(str(error).split())[:200]
                warnings.warn(f"torch.compile does not serve the packed library ({reason})", stacklevel=3)
                body = plain
                body(*arguments)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            self._result = body(*arguments)
        self._replay = graph.replay
        # The graph holds nothing of what it reads: first tokens, bounds, weights that were put together for it.
        self._reads = (body, plain, arguments)
