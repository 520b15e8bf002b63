"""The least time an attention call can take on a machine: its bytes, exps and products over the machine's rates.

Rates are measured on the machine where a small microbenchmark can (`measured_rates`); `ARCHITECTURES` fills in
the rest per streaming multiprocessor and clock, so that a figure always says which of the two it rests on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tilerank.architectures import ARCHITECTURES
from tilerank.bench.workloads import Workload

BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
"""Size of an element by precision."""


@dataclass(frozen=True, slots=True)
class Rates:
    """A machine's rates a second. ``how`` says for each whether it was measured here or comes from the table."""

    hbm_bytes: float
    exps: float
    fp32_fmas: float
    fp16_fmas: float
    how: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Floor:
    """Lower bounds of one call, in seconds. ``seconds`` is the largest, ``bound`` what it belongs to."""

    hbm: float
    exps: float
    products: float

    @property
    def seconds(self) -> float:
        """No correct kernel takes less."""
        return max(self.hbm, self.exps, self.products)

    @property
    def bound(self) -> str:
        """Which of the three binds: hbm, exps or products."""
        return max(("hbm", "exps", "products"), key=lambda name: getattr(self, name))


def attention_floor(workload: Workload, precision: str, rates: Rates, *, ffma_only: bool = False) -> Floor:
    """The floor of one packed call: q, k, v read once and out written once, valid tokens only.

    precision: fp32 | tf32 | fp16 | bf16. fp32 products run on the FMA pipe, or as three fp16 products on the
    matrix unit, whichever is sooner; ``ffma_only`` leaves the matrix unit out. tf32 runs at half the fp16 rate.
    """
    if precision not in BYTES:
        raise ValueError(f"precision must be one of {sorted(BYTES)}, found {precision!r}")
    elements = workload.tokens * workload.heads * workload.head_dim
    fmas = 2 * workload.scores * workload.head_dim  # Q K^T and P V
    if precision == "fp32":
        ffma, triple = fmas / rates.fp32_fmas, 3 * fmas / rates.fp16_fmas
        products = ffma if ffma_only else min(ffma, triple)
    else:
        products = fmas * (2 if precision == "tf32" else 1) / rates.fp16_fmas
    return Floor(4 * elements * BYTES[precision] / rates.hbm_bytes, workload.scores / rates.exps, products)


def table_rates(sm: int, multiprocessors: int, clock_hz: float) -> dict[str, float]:
    """A whole device's rates a second by `ARCHITECTURES`; the nearest older one stands in for one not listed."""
    known = max((entry for entry in ARCHITECTURES if entry <= sm), default=min(ARCHITECTURES))
    row, clocks = ARCHITECTURES[known], multiprocessors * clock_hz
    return {
        "exps": row.exps * clocks,
        "fp32_fmas": row.fp32_fmas * clocks,
        "fp16_fmas": row.fp16_mma_fmas * clocks,
    }


def _median_seconds(run: Callable[[], object], repetitions: int = 10) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _copy_bytes_per_second() -> float:
    source = torch.randn(1 << 29, device="cuda")  # 2 GiB: many times any L2
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / _median_seconds(lambda: target.copy_(source))


def _matmul_fmas_per_second() -> float:
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in range(2))
    out = torch.empty_like(a)
    return size**3 / _median_seconds(lambda: torch.matmul(a, b, out=out))


def _clock_hz() -> float:
    cycles = 50_000_000
    return cycles / _median_seconds(lambda: torch.cuda._sleep(cycles), repetitions=3)


def measured_rates() -> Rates:
    """Measure this machine's rates (CUDA): memory by a large copy, fp16 products by a large library product.

    No library call is bound by the exp or the FMA pipe, so those two come from the table, at the SM clock that
    a spinning kernel sees. It runs at the highest clock, so the floor errs to the low side.
    """
    device = torch.cuda.get_device_properties(0)
    clock = _clock_hz()
    table = table_rates(device.major * 10 + device.minor, device.multi_processor_count, clock)
    from_table = f"table of rates a clock, at the {clock / 1e6:.0f} MHz measured"
    return Rates(
        hbm_bytes=_copy_bytes_per_second(),
        exps=table["exps"],
        fp32_fmas=table["fp32_fmas"],
        fp16_fmas=_matmul_fmas_per_second(),
        how={
            "hbm_bytes": "measured: device-to-device copy of 2 GiB, read + written",
            "exps": from_table,
            "fp32_fmas": from_table,
            "fp16_fmas": "measured: 8192^3 fp16 matrix product",
        },
    )
