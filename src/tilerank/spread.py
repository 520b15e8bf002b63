"""Work of well below a millisecond spread over threads, without starting any for it. Imports nothing of the project.

A pool of `concurrent.futures` takes some 30 us of the caller's time for each part, and threads that are started for a
call another 50 each. Here the caller wakes helpers that wait since the first call, and takes parts itself from the
moment that it has: where no helper wakes in time it does all the work alone, no later than without them.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Part = TypeVar("Part")
Found = TypeVar("Found")

MOST_HELPERS = 7
"""Beside the caller, and no more than there are cores: each costs the others a turn at the interpreter's lock."""


def threads() -> int:
    """How many threads `spread` works with, the caller's included."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 + min(MOST_HELPERS, cores - 1)


def spread(function: Callable[[Part], Found], parts: Sequence[Part]) -> list[Found]:
    """``function`` of each part, in order, by the calling thread and helpers; it gains where ``function`` gives up the
    interpreter's lock. Raises what ``function`` raised on the first part of those that failed."""
    return start(function, parts, min(len(parts), threads()) - 1).wait()


def start(function: Callable[[Part], Found], parts: Sequence[Part], helpers: int) -> Work[Part, Found]:
    """The same, begun by as many helpers while the caller does something else until it waits for it."""
    work = Work(function, parts)
    if helpers > 0:
        _helpers.ask(work, helpers)
    return work


class Work(Generic[Part, Found]):
    """Parts, of which every thread takes the next that none has taken."""

    def __init__(self, function: Callable[[Part], Found], parts: Sequence[Part]) -> None:
        self._function = function
        self._parts = parts
        self._next = itertools.count()
        self._left = itertools.count(len(parts) - 1, -1)
        self._found: list[Any] = [None] * len(parts)
        self._errors: dict[int, BaseException] = {}
        self._busy = threading.Lock()  # until the last part is done: whoever waits is woken once
        if parts:
            self._busy.acquire()

    def help(self) -> None:
        """Work until no part is left to take."""
        while (number := next(self._next)) < len(self._parts):
            try:
                self._found[number] = self._function(self._parts[number])
            except BaseException as error:  # the caller's to see, whichever thread it came up in
                self._errors[number] = error
            if not next(self._left):
                self._busy.release()

    def wait(self) -> list[Found]:
        """What was found, once every part is done; the caller does those that nobody has taken."""
        self.help()
        with self._busy:
            pass
        if self._errors:
            raise self._errors[min(self._errors)]
        return self._found


class _Helpers:
    """Threads that wait for work; as many as were ever asked for, and never fewer."""

    def __init__(self) -> None:
        # One for each: those that wait at the same queue are woken by one another, one after the other.
        self._asked: list[SimpleQueue[Work[Any, Any]]] = []
        self._starting = threading.Lock()

    def ask(self, work: Work[Any, Any], count: int) -> None:
        """Let ``count`` of them help with ``work``."""
        if len(self._asked) < count:
            self._start(count)
        for asked in self._asked[:count]:
            asked.put(work)

    def _start(self, count: int) -> None:
        with self._starting:
            while (number := len(self._asked)) < count:
                asked: SimpleQueue[Work[Any, Any]] = SimpleQueue()
                # Daemons: they hold nothing that must be given back, and a program does not wait for them to end.
                thread = threading.Thread(target=_serve, args=(asked,), name=f"tilerank-{number}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no further thread: those that there are do it, and the caller
                    return
                self._asked.append(asked)


def _serve(asked: SimpleQueue[Work[Any, Any]]) -> None:
    while True:
        asked.get().help()


_helpers = _Helpers()


def _forget_helpers() -> None:
    global _helpers
    _helpers = _Helpers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)  # the child has none of the threads
