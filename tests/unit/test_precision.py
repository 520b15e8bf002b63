"""The process's one setting of fp32 products: who shares it, who waits, and what a forked child has of it."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from tilerank.precision import _Products, _products


def setting() -> str:
    return torch.backends.cuda.matmul.fp32_precision


def test_a_setting_is_shared_nested_and_put_back() -> None:
    products, before = _Products(), setting()
    with products.as_wanted("tf32"):
        assert setting() == "tf32"
        with products.as_wanted("tf32"):
            assert setting() == "tf32"
        assert setting() == "tf32"
    assert setting() == before


def test_no_setting_starves() -> None:
    """Two threads whose uses overlap never leave a gap; a third that wants the other setting gets its turn."""
    products, stopped, seen = _Products(), threading.Event(), []

    def use() -> None:
        while not stopped.is_set():
            with products.as_wanted("tf32"):
                seen.append(setting())
                time.sleep(0.002)

    def ask() -> None:
        with products.as_wanted("ieee"):
            seen.append(setting())

    users = [threading.Thread(target=use) for _ in range(2)]
    for user in users:
        user.start()
        time.sleep(0.001)
    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    asker.join(10)
    had_its_turn = not asker.is_alive()
    stopped.set()
    for thread in (*users, asker):
        thread.join(10)
    assert had_its_turn
    assert {"tf32", "ieee"} == set(seen)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_the_parents_threads() -> None:
    entered, leave, before = threading.Event(), threading.Event(), setting()

    def use() -> None:
        with _products.as_wanted("tf32"):
            entered.set()
            leave.wait(30)

    user = threading.Thread(target=use)
    user.start()
    entered.wait(10)
    child = os.fork()
    if not child:
        threading.Timer(10, os._exit, [1]).start()
        is_back = setting() == before
        with _products.as_wanted("ieee"):
            os._exit(0 if is_back and setting() == "ieee" else 2)
    _, status = os.waitpid(child, 0)
    leave.set()
    user.join()
    assert os.waitstatus_to_exitcode(status) == 0
