"""What a precision means: the dtype of weights and activations, and how fp32 products are computed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator

import torch

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Precision -> dtype of the weights. tf32 lets fp32 products run on TF32 tensor cores; elsewhere it equals fp32."""


class _Products:
    """What fp32 products mean. It is one setting of the whole process: threads that want different ones take turns."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._line: deque[object] = deque()  # who waits, in the order they came: no setting is kept from the others
        self._mine = threading.local()  # depth: users that are this thread, which need not wait for themselves
        self._users = 0
        self._wanted = ""
        self._before = ("", "")  # what the process had set: cuda, cpu

    @contextlib.contextmanager
    def as_wanted(self, wanted: str) -> Iterator[None]:
        """``wanted`` ("tf32" or "ieee") on CUDA, exact on the CPU, until the last user leaves."""
        cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
        depth = getattr(self._mine, "depth", 0)
        with self._turn:
            if not (depth and self._wanted == wanted):
                self._wait(wanted)
            if not self._users:
                self._wanted, self._before = wanted, (cuda.fp32_precision, cpu.fp32_precision)
                cuda.fp32_precision, cpu.fp32_precision = wanted, "ieee"
            self._users += 1
        self._mine.depth = depth + 1
        try:
            yield
        finally:
            self._mine.depth = depth
            with self._turn:
                self._users -= 1
                if not self._users:
                    self._put_back()
                    self._turn.notify_all()

    def _wait(self, wanted: str) -> None:
        """Until this thread is the first in the line and the setting is free, or the one that it wants."""
        ticket = object()
        self._line.append(ticket)
        try:
            self._turn.wait_for(lambda: self._line[0] is ticket and (not self._users or self._wanted == wanted))
        finally:
            self._line.remove(ticket)
            self._turn.notify_all()  # the next in line may want the same

    def _put_back(self) -> None:
        torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = self._before

    def forget(self) -> None:
        """In a forked child, which has none of the threads that use the setting."""
        depth = getattr(self._mine, "depth", 0)
        if self._users and not depth:
            self._put_back()
        self._turn, self._users = threading.Condition(), depth
        self._line.clear()


_products = _Products()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_products.forget)
_AS_IT_IS = contextlib.nullcontext()  # switching off what is off takes longer than some kernels


@contextlib.contextmanager
def arithmetic(precision: str, device: torch.device) -> Iterator[None]:
    """Fix what fp32 products mean, whatever the process has set (an autocast around the call included). In 16 bits
    there are none, and nothing to fix: the setting takes longer than some kernels."""
    has_fp32 = PRECISIONS[precision] == torch.float32
    with (
        _products.as_wanted("tf32" if precision == "tf32" else "ieee") if has_fp32 else _AS_IT_IS,
        torch.inference_mode(),
        torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else _AS_IT_IS,
    ):
        yield
