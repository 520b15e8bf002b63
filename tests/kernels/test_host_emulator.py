"""The host build's emulator: its operations do what a GPU's do, and each of its checks turns red on a planted fault."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
from kernels.host.programs import SANITIZERS, build, run

LAUNCH_FAILED, WRONG_RESULT, ASAN, TSAN = 3, 4, 1, 66
"""Exit statuses of planted_faults."""


@dataclass(frozen=True)
class Catch:
    """Where and how a fault must show."""

    flavour: str
    status: int
    text: str


FAULTS = {
    "read_beyond_a_partial_tile": Catch("address", ASAN, "heap-buffer-overflow"),
    "overrun_shared_memory": Catch("address", ASAN, "out of bounds for type 'float [64]'"),
    "overrun_dynamic_shared_memory": Catch("address", ASAN, "heap-buffer-overflow"),
    "take_more_shared_memory_than_launched": Catch("plain", LAUNCH_FAILED, "but the launch gave 256"),
    "no_barrier_before_use": Catch("thread", TSAN, "data race"),
    "no_barrier_before_overwrite": Catch("thread", TSAN, "data race"),
    "no_warp_barrier": Catch("thread", TSAN, "data race"),
    "shuffle_as_a_barrier": Catch("thread", TSAN, "data race"),
    "divergent_barrier": Catch("plain", LAUNCH_FAILED, "divergent barrier: __syncthreads at"),
    "early_return_before_a_barrier": Catch("plain", LAUNCH_FAILED, "returned while others wait in __syncthreads at"),
    "barrier_that_one_warp_skips": Catch("plain", LAUNCH_FAILED, "divergent barrier"),
    "barriers_that_wait_for_each_other": Catch("plain", LAUNCH_FAILED, "deadlock"),
    "shuffle_in_a_branch": Catch("plain", LAUNCH_FAILED, "returned while lanes of its warp wait for it in __shfl_xor"),
    "mask_without_the_caller": Catch("plain", LAUNCH_FAILED, "mask 0x0000ffff does not name the calling lane"),
    "shuffle_from_outside_the_mask": Catch("plain", LAUNCH_FAILED, "reads lane 16, which the mask does not name"),
    "misaligned_vector_load": Catch("plain", LAUNCH_FAILED, "is not a multiple of 16"),
    "misaligned_vector_cast": Catch("address", ASAN, "misaligned address"),
    "misaligned_vector_store": Catch("plain", LAUNCH_FAILED, "is not a multiple of 16"),
    "misaligned_ldmatrix_row": Catch("plain", LAUNCH_FAILED, "is not a multiple of 16"),
    "no_wait_for_a_copy": Catch("plain", WRONG_RESULT, "nan"),
    "no_commit_of_a_copy": Catch("plain", WRONG_RESULT, "nan"),
    "no_barrier_after_the_wait": Catch("thread", TSAN, "data race"),
    "wait_for_too_few_groups": Catch("plain", WRONG_RESULT, "nan"),
    "misaligned_copy": Catch("plain", LAUNCH_FAILED, "is not a multiple of 16"),
    "copy_to_global_memory": Catch("plain", LAUNCH_FAILED, "not in one shared array of this block"),
    "copy_from_beyond_the_end": Catch("address", ASAN, "heap-buffer-overflow"),
    "barrier_without_init": Catch("plain", LAUNCH_FAILED, "the barrier was not initialised"),
    "ring_filled_without_waiting": Catch("plain", LAUNCH_FAILED, "deadlock"),  # a turn of the ring goes unseen
    "ring_emptied_without_waiting": Catch("thread", TSAN, "data race"),
    "ring_without_arrival": Catch("plain", LAUNCH_FAILED, "deadlock"),
    "read_before_any_write": Catch("plain", WRONG_RESULT, "nan"),
    "rows_left_from_the_last_tile": Catch("plain", WRONG_RESULT, "element 0 is 6720, not 5460"),
    "two_blocks_write_one_row": Catch("thread", TSAN, "data race"),
}


@pytest.mark.parametrize("flavour", SANITIZERS)
def test_operations_do_what_a_gpu_does(flavour: str) -> None:
    done = run(flavour, "emulator_checks")
    assert done.returncode == 0, done.stdout + done.stderr
    for check in ("barriers", "shuffles", "fragments", "products", "copies", "recovery", "conversions"):
        for schedule in ("forward", "reverse", "last_in", "random"):
            assert f"passed {check} ({schedule})" in done.stdout


def test_threads_switch_without_assembly_too() -> None:
    done = run("plain", "emulator_checks_ucontext")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed barriers (random)" in done.stdout


def test_every_planted_fault_is_expected_here() -> None:
    names = run("plain", "planted_faults").stdout.splitlines()[1:]
    assert names == list(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught_and_its_absence_passes(name: str) -> None:
    catch = FAULTS[name]
    done = run(catch.flavour, "planted_faults", name, "planted")
    assert done.returncode == catch.status, done.stdout + done.stderr
    assert catch.text in done.stdout + done.stderr
    done = run(catch.flavour, "planted_faults", name, "clean")
    assert done.returncode == 0, done.stdout + done.stderr


def test_report_names_every_thread_of_a_deadlock() -> None:
    report = run("plain", "planted_faults", "barriers_that_wait_for_each_other", "planted").stdout
    assert "threads 0-15: waiting in __syncwarp at" in report
    assert "with mask 0xffffffff" in report
    assert "threads 16-63: waiting in __syncthreads at" in report


def test_library_takes_a_schedule_by_name() -> None:
    library = ctypes.CDLL(str(build("plain") / "library" / "libtilerank.so"))
    library.tilerank_backend.restype = ctypes.c_char_p
    library.tilerank_host_set_schedule.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
    assert library.tilerank_backend() == b"host"
    assert library.tilerank_host_set_schedule(b"random", 3) == 0
    assert library.tilerank_host_set_schedule(b"sideways", 0) == 1
