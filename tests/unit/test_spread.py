"""Parts of one call on several threads: in order, whoever does them, and no later than alone."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tilerank import spread as module
from tilerank.spread import spread


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "threads", lambda: 4)


def test_results_are_in_order() -> None:
    def slow_first(number: int) -> int:
        time.sleep(0.02 if number == 0 else 0)
        return number * number

    assert spread(slow_first, range(50)) == [number * number for number in range(50)]
    assert spread(slow_first, []) == []
    assert spread(slow_first, [3]) == [9]


def test_parts_are_done_by_several_threads_at_once() -> None:
    together = threading.Barrier(4)
    names = spread(lambda _: together.wait(timeout=10) >= 0 and threading.current_thread().name, range(4))
    assert len(set(names)) == 4
    assert threading.current_thread().name in names


def test_the_caller_does_all_where_no_helper_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_serve", lambda asked: None)
    monkeypatch.setattr(module, "_helpers", module._Helpers())
    here = threading.current_thread()
    assert spread(lambda _: threading.current_thread() is here, range(9)) == [True] * 9


def test_the_caller_does_all_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(module, "_helpers", module._Helpers())
    assert spread(lambda number: -number, range(9)) == [-number for number in range(9)]


def test_what_was_found_can_be_asked_for_again() -> None:
    work = module.start(lambda number: number + 1, range(5), helpers=2)
    assert work.wait() == work.wait() == [1, 2, 3, 4, 5]


def test_the_first_failure_is_raised_once_all_have_ended() -> None:
    ended = []

    def fails(number: int) -> int:
        if number in (2, 5):
            raise ValueError(f"part {number}")
        time.sleep(0.005)
        ended.append(number)
        return number

    with pytest.raises(ValueError, match="part 2"):
        spread(fails, range(8))
    assert sorted(ended) == [0, 1, 3, 4, 6, 7]
    assert spread(abs, [-1, -2, -3]) == [1, 2, 3], "helpers go on after a failure"


def test_callers_in_several_threads_and_inside_each_other() -> None:
    found: dict[int, list[int]] = {}

    def call(seed: int) -> None:
        found[seed] = [sum(row) for row in spread(lambda n: spread(lambda m: seed + n + m, range(6)), range(6))]

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=30)
    assert found == {seed: [6 * (seed + n) + 15 for n in range(6)] for seed in range(8)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_helpers_of_its_own() -> None:
    spread(abs, range(8))
    child = os.fork()
    if child == 0:
        together = threading.Barrier(4)
        try:
            os._exit(0 if len(spread(lambda _: together.wait(timeout=10), range(4))) == 4 else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
