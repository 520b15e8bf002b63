"""Which row serves the calls that a stage makes, most of them `auto`'s choice, and that row's machine code.

A stage that runs whatever `auto` takes depends on this, not on every kernel: a new row that it does not take changes
nothing, and neither does an edit after which the row's machine code is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilerank.fused import ENCODER_ROWS
from tilerank.kernels import build, cubins
from tilerank.kernels.registry import Request, Row, select


@dataclass(frozen=True, slots=True)
class Call:
    """A kind of call of one operation of the registry, which a stage makes at each of its precisions."""

    operation: str
    layout: str
    head_dim: int | None = None  # None: the model's
    masks: frozenset[str] = frozenset()
    width: int = 0  # as `Request` has it
    variant: str | None = None  # the row, where the caller names it; None: what `auto` takes

    def request(self, sm: int, dtype: str, head_dim: int, k_len: int) -> Request:
        """What it asks for on a device of this compute capability (times ten; 0: the CPU)."""
        device = "cuda" if sm else "cpu"
        return Request(device, sm, dtype, self.head_dim or head_dim, self.layout, k_len, self.masks, self.width)


_ENCODER = (
    Call("attention", "packed"),
    *(Call(operation, "packed", variant=variant) for operation, variant in ENCODER_ROWS),
)

CALLS: Mapping[str, tuple[Call, ...]] = {
    "evaluate_quality": _ENCODER,
    "bench_rerank": _ENCODER,
    # transformers' batches have padding or not.
    "integrate_hf": (Call("attention", "padded"), Call("attention", "padded", masks=frozenset({"key_lengths"}))),
}
"""Stage -> what its model calls, operation by operation; stages with shapes of their own say so themselves (`calls` of
`tilerank.bench.micro`, `tilerank.bench.block` and `tilerank.bench.tf_block`)."""


def choices(
    calls: Iterable[Call],
    rows: Mapping[str, Sequence[Row]],
    *,
    variant: str,
    sm: int,
    dtypes: Iterable[str],
    head_dim: int,
    k_len: int,
    digest: Callable[[Row], str],
) -> dict[str, str]:
    """Call, described in words -> the row that serves it and the digest of its code.

    Args:
        calls: what a stage calls.
        rows: the registry's rows by operation.
        variant: the attention that is asked for: auto, a row's name, or sdpa (then no row is taken).
        sm: compute capability of the device, times ten; 0: the CPU.
        dtypes: of the tensors, fp32, fp16 and bf16.
        head_dim: the model's.
        k_len: keys of the longest sequence.
        digest: what to say of a row's code.

    Raises:
        ValueError: no row serves one of the calls.
    """
    found = {}
    for call in calls:
        named = variant if call.operation == "attention" and variant != "auto" else call.variant
        for dtype in dtypes:
            request = call.request(sm, dtype, head_dim, k_len)
            of_operation = rows[call.operation]
            if named is None:
                row = select(request, of_operation).row
                masks = "".join(f" {mask}" for mask in sorted(call.masks))
                width = f" width {call.width}" if call.width else ""
                words = f"{call.operation} {dtype} {call.layout} head_dim {request.head_dim}{width}{masks}"
            else:
                row = next((row for row in of_operation if row.name == named and dtype in row.dtypes), None)
                words = f"{call.operation} {dtype} {named}"
            if row is not None:
                found[words] = f"{row.name} {digest(row)}"
    return found


def code_digest(row: Row, sm: int) -> str:
    """What a row's code on a device of this compute capability is known by: the digest of its machine code, or of its
    sources where that is a CPU or there is no nvcc.

    Raises:
        TilerankError: it does not compile.
    """
    nvcc = build.find_nvcc()
    if row.device == "cpu" or not sm or nvcc is None:
        return f"source:{cubins.source_digest(row)}"
    return f"cubin:{cubins.compile_cubin(row, build.archs_for((sm,)), nvcc).sha256}"
