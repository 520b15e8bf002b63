"""Peak memory of one call, weights included."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Peaks in 10^6 bytes."""

    allocated: float  # held by tensors
    reserved: float  # held by torch's allocator, pools of CUDA graphs included


def peak_device_mb(make: Callable[[], Callable[[], Any]]) -> float:
    """`peak_device_memory`, what tensors held."""
    return peak_device_memory(make).allocated


def peak_device_memory(make: Callable[[], Callable[[], Any]]) -> PeakMemory:
    """Peak CUDA memory that ``make()`` and one call of what it returns take through torch.

    Weights and activations count; what was allocated before does not. ``make`` must build its own model, and
    everything it built is freed afterwards.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    run = make()
    run()
    torch.cuda.synchronize()
    peak = PeakMemory(
        (torch.cuda.max_memory_allocated() - allocated) / 1e6, (torch.cuda.max_memory_reserved() - reserved) / 1e6
    )
    del run
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def peak_process_mb() -> float:
    """Peak resident memory of this process so far (10^6 bytes): Python, libraries, weights and activations."""
    import resource  # POSIX only, as the stages that record it are

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
