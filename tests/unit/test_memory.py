"""Peaks of memory: what one call takes, whatever the process held before."""

from __future__ import annotations

import os

import pytest
import torch

from tilerank.bench import memory


class Allocator:
    """In the place of torch's: a call takes ``takes`` of what is free in what is reserved, then reserves more."""

    def __init__(self, reserved: int, allocated: int, takes: int) -> None:
        self.reserved = self.most_reserved = reserved
        self.allocated = self.most_allocated = allocated
        self.takes = takes

    def call(self) -> None:
        self.most_allocated = self.allocated + self.takes
        self.most_reserved = max(self.reserved, self.most_allocated)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: self.allocated)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: self.reserved)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.most_allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: self.most_reserved)


def test_tensors_that_were_there_before_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(reserved=50_000_000, allocated=20_000_000, takes=121_000_000)
    allocator.install(monkeypatch)
    assert memory.peak_device_mb(lambda: allocator.call) == 121


def test_what_is_reserved_is_measured_where_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held has free parts, which serve and are not counted: less would be reserved than allocated."""
    held = Allocator(reserved=50_000_000, allocated=20_000_000, takes=121_000_000)
    held.install(monkeypatch)
    with pytest.raises(RuntimeError, match="holds 50000000 bytes already; measure in a process of its own"):
        memory.peak_device_memory(lambda: held.call)
    fresh = Allocator(reserved=0, allocated=0, takes=121_000_000)
    fresh.install(monkeypatch)
    assert memory.peak_device_memory(lambda: fresh.call) == memory.PeakMemory(121, 121)


def test_each_is_measured_in_a_process_of_its_own() -> None:
    processes = memory.in_own_processes(os.getpid, (), ())
    assert len({*processes, os.getpid()}) == 3
    assert memory.in_own_processes(divmod, (7, 2), (9, 2)) == [(3, 1), (4, 1)]
    with pytest.raises(ZeroDivisionError):
        memory.in_own_processes(divmod, (7, 0))
