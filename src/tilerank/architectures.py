"""What NVIDIA documents of its architectures and of two devices: rates a clock, what an SM holds, memory. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

REGISTERS = 65_536
"""32-bit registers of an SM, on every architecture served; a quarter of them for each of its four schedulers."""

WARP = 32

_GUIDE = "CUDA C++ Programming Guide, table 'Throughput of Native Arithmetic Instructions'"


@dataclass(frozen=True, slots=True)
class Architecture:
    """What one streaming multiprocessor finishes in a clock and holds at a time, with where the rates are documented.

    The limits are those of the CUDA C++ Programming Guide, table 'Technical Specifications per Compute Capability'.
    """

    exps: int
    fp32_fmas: int
    fp16_mma_fmas: int  # dense, fp32 accumulators
    source: str
    max_warps: int
    max_blocks: int
    shared_kb: int
    reserved_shared: int  # bytes that the system takes for each block
    async_copies: bool  # cp.async: from memory to shared memory, past the registers

    def warps(self, registers: int, threads: int, shared_bytes: int) -> int:
        """Warps that an SM holds of a kernel: ``registers`` a thread, blocks of ``threads`` and ``shared_bytes``."""
        block_warps = -(-threads // WARP)
        warp_registers = _round_up(registers, 8) * WARP
        by_registers = REGISTERS // 4 // warp_registers * 4 // block_warps
        by_shared = self.shared_kb * 1024 // max(1, _round_up(shared_bytes + self.reserved_shared, 128))
        return block_warps * min(by_registers, by_shared, self.max_blocks, self.max_warps // block_warps)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# Compute capability times ten -> what it can do.
ARCHITECTURES: Mapping[int, Architecture] = {
    75: Architecture(16, 64, 512, f"{_GUIDE}; Turing whitepaper (T4: 65 TFLOP/s fp16)", 32, 16, 64, 0, False),
    80: Architecture(16, 64, 1024, f"{_GUIDE}; A100 whitepaper (312 TFLOP/s fp16)", 64, 32, 164, 1024, True),
    86: Architecture(
        *(16, 128, 512, f"{_GUIDE}; A10 data sheet (125 TFLOP/s fp16; GeForce cards have half)"),
        *(48, 16, 100, 1024, True),
    ),
    89: Architecture(
        *(16, 128, 512, f"{_GUIDE}; L4 data sheet (121 TFLOP/s fp16; GeForce cards have half)"),
        *(48, 24, 100, 1024, True),
    ),
    90: Architecture(16, 128, 2048, f"{_GUIDE}; H100 whitepaper (989 TFLOP/s fp16)", 64, 32, 228, 1024, True),
}


@dataclass(frozen=True, slots=True)
class Device:
    """A device as its data sheet has it."""

    name: str
    sm: int  # compute capability times ten
    multiprocessors: int
    clock_ghz: float  # boost
    memory_gb_per_s: float
    l2_mb: int
    source: str

    @property
    def architecture(self) -> Architecture:
        """What each of its multiprocessors can do."""
        return ARCHITECTURES[self.sm]


T4 = Device("T4", 75, 40, 1.59, 320, 4, "NVIDIA T4 data sheet; Turing whitepaper")
H200 = Device("H200", 90, 132, 1.98, 4800, 50, "NVIDIA H200 data sheet; H100 whitepaper")
