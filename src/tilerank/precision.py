"""What a precision means: the dtype of weights and activations, and how fp32 products are computed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Precision -> dtype of the weights. tf32 lets fp32 products run on TF32 tensor cores; elsewhere it equals fp32."""


class _Products:
    """What fp32 products mean. It is one setting of the whole process: threads that want different ones take turns."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._users = 0
        self._wanted = ""
        self._before = ("", "")  # what the process had set: cuda, cpu

    @contextlib.contextmanager
    def as_wanted(self, wanted: str) -> Iterator[None]:
        """``wanted`` ("tf32" or "ieee") on CUDA, exact on the CPU, until the last user leaves."""
        cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
        with self._turn:
            self._turn.wait_for(lambda: not self._users or self._wanted == wanted)
            if not self._users:
                self._wanted, self._before = wanted, (cuda.fp32_precision, cpu.fp32_precision)
                cuda.fp32_precision, cpu.fp32_precision = wanted, "ieee"
            self._users += 1
        try:
            yield
        finally:
            with self._turn:
                self._users -= 1
                if not self._users:
                    cuda.fp32_precision, cpu.fp32_precision = self._before
                    self._turn.notify_all()


_products = _Products()
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
