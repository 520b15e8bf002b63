"""Peak memory of one call, weights included."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Peaks in 10^6 bytes."""

    allocated: float  # held by tensors
    reserved: float  # held by torch's allocator, pools of CUDA graphs included


def peak_device_mb(make: Callable[[], Callable[[], Any]]) -> float:
    """Peak CUDA memory of tensors that ``make()`` and one call of what it returns take, in 10^6 bytes.

    Weights and activations count; what was allocated before does not. ``make`` must build its own model, and
    everything it built is freed afterwards.
    """
    _release()
    before = torch.cuda.memory_allocated()
    return _peak(make).allocated - before / 1e6


def peak_device_memory(make: Callable[[], Callable[[], Any]]) -> PeakMemory:
    """The same, and what torch's allocator reserved for it, in a process that has reserved nothing yet: else the free
    parts of what it holds would serve, and not be counted."""
    _release()
    if held := torch.cuda.memory_reserved():
        raise RuntimeError(f"torch's allocator holds {held} bytes already; measure in a process of its own")
    return _peak(make)


def _release() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()


def _peak(make: Callable[[], Callable[[], Any]]) -> PeakMemory:
    torch.cuda.reset_peak_memory_stats()
    run = make()
    run()
    torch.cuda.synchronize()
    peak = PeakMemory(torch.cuda.max_memory_allocated() / 1e6, torch.cuda.max_memory_reserved() / 1e6)
    del run
    _release()
    return peak


def in_own_processes(function: Callable[..., Result], *arguments: tuple[Any, ...]) -> list[Result]:
    """``function`` of each ``arguments``, at once, each in a process that is started for it. All must be picklable."""
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(len(arguments), mp_context=spawn, max_tasks_per_child=1) as pool:
        return [found.result() for found in [pool.submit(function, *each) for each in arguments]]


def peak_process_mb() -> float:
    """Peak resident memory of this process so far (10^6 bytes): Python, libraries, weights and activations."""
    import resource  # POSIX only, as the stages that record it are

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
