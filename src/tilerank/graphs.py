"""CUDA graphs of one function, a graph for each bucket of shapes, replayed for whatever fits the bucket."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from tilerank import packing
from tilerank.packing import PackedBatch

TOKEN_STEP = 256
"""Tokens by which buckets differ. A batch of 6,000 wastes 2 % of its rows on average; half the step would halve that
for twice the graphs."""

MOST_SEQUENCES = 1024
MOST_GRAPHS = 64
"""The least recently used graph is dropped for a new one beyond this."""

Body: TypeAlias = Callable[[tuple[torch.Tensor, ...], int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What a `GraphCache` has done so far."""

    graphs: int  # held now
    captures: int
    replays: int
    eager: int  # batches outside every bucket
    tokens: int  # rows computed in replays
    padding: int  # of these, rows that belong to no sequence

    @property
    def waste(self) -> float:
        """Share of the replayed rows that are padding."""
        return self.padding / self.tokens if self.tokens else 0.0


class GraphCache:
    """Runs ``body(parts, longest)`` as a CUDA graph.

    A graph is captured when its bucket is first seen, after one call without it. All share one memory pool and one
    input, so that memory is that of the largest, and take turns: safe for several threads and streams. ``longest``
    (tokens of the longest sequence served) and ``most_tokens`` (of a batch) hold for every graph; what does not fit
    runs as it is. ``dtype``: of results; None leaves them in the body's.
    """

    def __init__(
        self,
        body: Body,
        device: torch.device,
        most_tokens: int,
        longest: int,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._body = body
        self._dtype = dtype
        self._device = device
        self._most_tokens = most_tokens
        self._longest = longest
        self._graphs: OrderedDict[tuple[int, int], _Graph] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None  # of the last replay
        self._holds: torch.Tensor | None = None  # values of the batch on the device that lies in the input
        largest = packing.size_of(_rounded(most_tokens + 1), MOST_SEQUENCES)
        self._input = torch.zeros(largest, dtype=torch.int32, device=device)
        self._side = torch.cuda.Stream(device)
        self._captures = self._replays = self._eager = self._tokens = self._padding = 0

    def bucket(self, tokens: int, sequences: int) -> tuple[int, int] | None:
        """Tokens and sequences of the bucket that a batch is filled up to, at least one token of it spare; None
        outside every bucket."""
        if tokens > self._most_tokens or sequences > MOST_SEQUENCES:
            return None
        return _rounded(tokens + 1), max(8, 1 << (sequences - 1).bit_length())

    def run(self, batch: PackedBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        """The body's result for a batch; one that was filled up to its bucket is replayed.

        The batch may be in pinned memory and goes from there to where the graphs read it; one on the device that ran
        last is there already, and so may not be written to. The result's first rows go into ``out`` where that is
        given, which may be in pinned memory too: the copy is enqueued, not waited for.
        """
        key = (batch.tokens, batch.sequences)
        if batch.longest > self._longest or self.bucket(batch.used_tokens, batch.used_sequences) != key:
            with self._lock:
                self._eager += 1
            batch = replace(batch, values=batch.values.to(self._device, non_blocking=True))
            result = self._body(batch.parts(), batch.longest)
            if out is None:
                return result.to(self._dtype or result.dtype)
            return out.copy_(result[: len(out)], non_blocking=True)
        with self._lock:
            stream = torch.cuda.current_stream(self._device)
            last, self._stream = self._stream, stream
            # On one stream replays are in order by themselves. (A stream calls itself equal to None and unequal to it.)
            if last is not None and last != stream:
                stream.wait_stream(last)
            if self._holds is not batch.values:
                self._input[: len(batch.values)].copy_(batch.values, non_blocking=True)
                self._holds = batch.values if batch.values.is_cuda else None
            graph = self._graphs.pop(key, None) or self._capture(batch)
            self._graphs[key] = graph
            if len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
            graph.graph.replay()
            result = graph.result
            if out is None:
                result = result.to(self._dtype or result.dtype, copy=True)  # the next replay writes there
            else:
                result = out.copy_(result[: len(out)], non_blocking=True)
            self._replays += 1
            self._tokens += batch.tokens
            self._padding += batch.tokens - batch.used_tokens
        return result

    def report(self) -> GraphReport:
        """Counts since the start."""
        with self._lock:
            return GraphReport(
                len(self._graphs), self._captures, self._replays, self._eager, self._tokens, self._padding
            )

    def _capture(self, batch: PackedBatch) -> _Graph:
        with torch.cuda.device(self._device):
            return self._captured(batch)

    def _captured(self, batch: PackedBatch) -> _Graph:
        parts = replace(batch, values=self._input).parts()
        # Libraries choose and load their kernels on the first call, which a capture must not see.
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self._body(parts, self._longest)
        current.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # On the same stream: a matrix product's workspace belongs to a stream, and one is enough.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
            result = self._body(parts, self._longest)
        self._captures += 1
        return _Graph(graph, result)


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    result: torch.Tensor  # where each replay leaves it


def _rounded(tokens: int) -> int:
    return -(-tokens // TOKEN_STEP) * TOKEN_STEP
