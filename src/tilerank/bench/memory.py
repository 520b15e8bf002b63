"""Peak memory of one call, weights included."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch


def peak_device_mb(make: Callable[[], Callable[[], Any]]) -> float:
    """Peak CUDA memory (10^6 bytes) that ``make()`` and one call of what it returns take through torch.

    Weights and activations count; what was allocated before does not. ``make`` must build its own model, and
    everything it built is freed afterwards.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run = make()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del run
    gc.collect()
    torch.cuda.empty_cache()
    return peak / 1e6


def peak_process_mb() -> float:
    """Peak resident memory of this process so far (10^6 bytes): Python, libraries, weights and activations."""
    import resource  # POSIX only, as the stages that record it are

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
