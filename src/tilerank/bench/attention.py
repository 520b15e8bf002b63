"""One attention variant on the workload ``seed``, at each precision that it serves: right, and beside every peer.

Where there is a GPU the variant is timed (see `tilerank.bench.timing`): masked, packed and padded, with every peer that
masks, and unmasked with every SDPA backend; a variant on the matrix unit also at several scales of its inputs, since
what it guards against depends on them. Elsewhere its CUDA source runs on the CPU, on lengths that straddle tiles, and
only its error is recorded: a GPU kernel has no time on a CPU.

Run as a program it launches one variant once, for a profiler to look at.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilerank.bench import attention_peers, floors
from tilerank.bench.attention_peers import SDPA, Peer
from tilerank.bench.peers import DTYPES, arithmetic
from tilerank.bench.timing import Case, EventClock, LaunchRecord, Row, faults, look_at, measure, ratio
from tilerank.bench.workloads import (
    AttentionInputs,
    Workload,
    make_inputs,
    max_abs_error,
    reference_attention,
    seed_workload,
)
from tilerank.config import TimingSettings
from tilerank.errors import TilerankError
from tilerank.kernels import build, library, registry
from tilerank.kernels.torch_device import device_sm

# On the CPU: around every tile size in use (16, 32, 64), and nothing at all.
CHECK_LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65)
CHECK_HEADS = 2

OURS_FACTOR = 2.0
"""A variant's error against float64 is at most this many times SDPA's own at the same dtype."""

PEER_FACTOR = 8.0
"""A peer is only asked to compute the right thing: some keep weights in 16 bit, or sum in another order."""

INPUT_SCALES: Mapping[str, Mapping[str, float]] = {
    "fp32": {"x1e-3": 1e-3, "x1": 1.0, "x8": 8.0},
    "tf32": {"x1e-3": 1e-3, "x1": 1.0, "x8": 8.0},
    "fp16": {"x1": 1.0, "x8": 8.0, "x40": 40.0},
    "bf16": {"x1": 1.0, "x8": 8.0, "x40": 40.0},
}
"""Precision -> factors on the N(0,1) inputs: fp32 from two fp16 terms has a range below and above, and 16-bit kernels
guess a maximum. Scores grow with the square: x40 takes them to +-1e4."""

_ALIGNMENT = 256  # bytes; what the library asks of a workspace


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A prepared call of one variant: nothing is left to allocate."""

    run: Callable[[], torch.Tensor]  # queues the kernel; returns `out`
    out: torch.Tensor  # padded [B, H, S, D], or packed [T, H, D]
    layout: str
    inputs: object  # held here because the library knows only their addresses

    def poison(self) -> None:
        """Fill the output with NaN, so that an element that is not written shows."""
        self.out.fill_(float("nan"))


def kernel_call(
    lib: library.Library, row: registry.Row, inputs: AttentionInputs, layout: str, *, masked: bool
) -> KernelCall:
    """Prepare ``row`` on ``inputs``; a packed call is always masked. `library.KernelError` when it refuses them."""
    if layout == "packed":
        out = torch.empty_like(inputs.packed_q)
        return _prepared(lib, row, _packed_params(inputs, out), out, layout, inputs)
    lengths = inputs.key_lengths if masked else None
    return dense_call(lib, row, inputs.q, inputs.k, inputs.v, key_lengths=lengths)


def dense_call(
    lib: library.Library,
    row: registry.Row,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    key_lengths: torch.Tensor | None = None,
    causal: bool = False,
) -> KernelCall:
    """Prepare ``row`` on padded tensors: q ``[B, H, Sq, D]``, k and v ``[B, Hkv, Sk, D]``, key_lengths ``[B]`` int32.

    The result lies in memory as transformers wants it, ``[B, Sq, H, D]``.
    """
    out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    batch, heads, rows, head_dim = q.shape
    params = library.AttentionParams(
        **{name: tensor.data_ptr() for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out))},
        dtype=_dtype_code(q),
        causal=causal,
        scale=head_dim**-0.5,
        batch=batch,
        heads=heads,
        kv_heads=k.shape[1],
        q_len=rows,
        k_len=k.shape[2],
        head_dim=head_dim,
        q_strides=q.stride()[:3],
        k_strides=k.stride()[:3],
        v_strides=v.stride()[:3],
        out_strides=out.stride()[:3],
    )
    if key_lengths is not None:
        params.key_lengths = key_lengths.data_ptr()
        params.key_lengths_type = library.LENGTHS_INT32
    return _prepared(lib, row, params, out, "padded", (q, k, v, key_lengths))


def _prepared(
    lib: library.Library,
    row: registry.Row,
    params: library.AttentionParams | library.AttentionVarlenParams,
    out: torch.Tensor,
    layout: str,
    inputs: object,
) -> KernelCall:
    size = lib.workspace_size(row.name, params)
    workspace = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device=out.device)
    workspace = workspace[-workspace.data_ptr() % _ALIGNMENT :]
    stream = torch.cuda.current_stream().cuda_stream if out.is_cuda else 0

    def run() -> torch.Tensor:
        lib.run(row.name, params, workspace.data_ptr(), size, stream)
        return out

    return KernelCall(run, out, layout, inputs)


def _packed_params(inputs: AttentionInputs, out: torch.Tensor) -> library.AttentionVarlenParams:
    q, k, v = inputs.packed_q, inputs.packed_k, inputs.packed_v
    tokens, heads, head_dim = q.shape
    bounds = inputs.cu_seqlens.data_ptr()
    return library.AttentionVarlenParams(
        **{name: tensor.data_ptr() for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out))},
        dtype=_dtype_code(q),
        scale=head_dim**-0.5,
        batch=inputs.workload.sequences,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        total_q=tokens,
        total_k=tokens,
        max_seqlen_q=inputs.max_length,
        max_seqlen_k=inputs.max_length,
        q_strides=(q.stride(1), q.stride(0)),
        k_strides=(k.stride(1), k.stride(0)),
        v_strides=(v.stride(1), v.stride(0)),
        out_strides=(out.stride(1), out.stride(0)),
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
    )


def _dtype_code(tensor: torch.Tensor) -> int:
    return library.DTYPE_CODES[next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)]


# --- errors ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Truth:
    """Float64 results of one workload, and how far SDPA is from them at the workload's dtype."""

    padded: torch.Tensor  # [B, H, S, D]
    valid: torch.Tensor  # [B, S]
    sdpa_error: float
    rounding: float  # one rounding of the largest result to the dtype: allowed where SDPA is exact by luck

    def error(self, out: torch.Tensor, layout: str, *, every_row: bool) -> float:
        """Largest error of ``out``. Rows of padding queries count with ``every_row``: the interface defines them,
        but peers leave in them what they like."""
        if layout == "packed":
            return max_abs_error(out, self.padded.transpose(1, 2)[self.valid])
        if every_row:
            return max_abs_error(out, self.padded)
        return max_abs_error(out.transpose(1, 2)[self.valid], self.padded.transpose(1, 2)[self.valid])

    def tolerance(self, factor: float) -> float:
        """What an output may be off by."""
        return factor * self.sdpa_error + self.rounding


def truth(inputs: AttentionInputs, precision: str, *, masked: bool) -> Truth:
    """Compute the float64 results and SDPA's error at ``precision``, which counts valid rows only.

    tf32: SDPA's on inputs cast to fp16, which has as many bits of mantissa; its fp32 kernels use TF32 only as a part of
    more exact products, whatever is allowed.
    """
    padded = reference_attention(inputs, masked=masked)
    valid = inputs.valid if masked else torch.ones_like(inputs.valid)
    mask = inputs.valid[:, None, None, :] if masked else None
    given = (tensor.half() if precision == "tf32" else tensor for tensor in (inputs.q, inputs.k, inputs.v))
    out = torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=mask)
    sdpa_error = max_abs_error(out.transpose(1, 2)[valid], padded.transpose(1, 2)[valid])
    return Truth(padded, valid, sdpa_error, torch.finfo(inputs.q.dtype).eps * float(padded.abs().amax()))


def _our_case(row: registry.Row, call: KernelCall, expected: Truth) -> Case:
    return Case(
        f"{row.name} {call.layout}",
        call.run,
        lambda out: expected.error(out, call.layout, every_row=True),
        expected.tolerance(OURS_FACTOR),
        call.poison,
    )


def _peer_cases(peers: Sequence[Peer], expected: Truth) -> list[Case]:
    return [
        Case(
            peer.name,
            peer.run,
            lambda out, layout=peer.layout: expected.error(out, layout, every_row=False),
            expected.tolerance(PEER_FACTOR),
        )
        for peer in peers
        if peer.run is not None
    ]


# --- on a CPU --------------------------------------------------------------------------------------------------


def check_variant(row: registry.Row, precision: str) -> dict[str, Any]:
    """The record of a variant at one of its precisions on a machine without a GPU: its error, and ``timed: false``.

    A CUDA row runs from the host build of its source. ``failure`` says what is wrong with the results;
    ``reason`` why there are none.
    """
    record: dict[str, Any] = {"timed": False, "precision": precision}
    if row.host_exempt is not None:
        return {**record, "reason": f"not in the host build: {row.host_exempt}"}
    lib = library.load(build.Target("cpu" if row.device == "cpu" else "host"))
    head_dim = 32 if row.head_dims is None or 32 in row.head_dims else row.head_dims[0]
    workload = Workload("check", CHECK_LENGTHS, max(CHECK_LENGTHS), CHECK_HEADS, head_dim)
    inputs = make_inputs(workload, DTYPES[precision], "cpu")
    errors, sdpa_errors, failures = [], [], []
    for layout, masked in _calls_served(row):
        expected = truth(inputs, precision, masked=masked)
        call = kernel_call(lib, row, inputs, layout, masked=masked)
        call.poison()
        error = expected.error(call.run(), layout, every_row=True)
        if not error <= expected.tolerance(OURS_FACTOR):
            kind = "masked" if masked else "unmasked"
            failures.append(f"{layout} {kind}: error {error:.3g} is above {expected.tolerance(OURS_FACTOR):.3g}")
            continue
        errors.append(error)
        sdpa_errors.append(expected.sdpa_error)
    if failures:
        return {**record, "failure": "; ".join(failures)}
    return {**record, "max_abs_error": max(errors), "sdpa_max_abs_error": max(sdpa_errors)}


def _calls_served(row: registry.Row) -> list[tuple[str, bool]]:
    """(layout, masked) of every kind of call that the row serves."""
    calls = []
    if "padded" in row.layouts:
        calls.append(("padded", False))
        if "key_lengths" in row.masks:
            calls.append(("padded", True))
    if "packed" in row.layouts:
        calls.append(("packed", True))
    return calls


# --- on a GPU --------------------------------------------------------------------------------------------------


def kernel_pattern(row: registry.Row) -> str:
    """What the demangled name of every kernel of a variant contains: kernels live in a namespace of its name."""
    return f"tilerank::{re.escape(row.name)}::"


@dataclass(frozen=True, slots=True)
class Timed:
    """Rows of one `measure` call, ours first, and what else is to be told about it."""

    ours: Mapping[str, Row]  # layout -> row; the row's timed layout first
    peers: tuple[Row, ...]
    refusals: Mapping[str, str]  # peer -> why it does not take the input
    expected: Truth
    faults: tuple[str, ...]  # of our closures; with any, our times do not count
    launched: LaunchRecord  # of the timed layout

    @property
    def failure(self) -> str | None:
        """Why our times do not count, or None."""
        wrong = next((f"{layout}: {row.failure}" for layout, row in self.ours.items() if row.failure), None)
        return wrong or (f"the timed closure {'; '.join(self.faults)}" if self.faults else None)


def masked_layouts(row: registry.Row) -> tuple[str, ...]:
    """The layouts in which a row leaves padding keys out; its timed layout first."""
    served = [layout for layout, masked in _calls_served(row) if masked]
    return tuple(sorted(served, key=lambda layout: layout != row.timed_layout))


def time_variant(
    lib: library.Library, row: registry.Row, precision: str, timing: TimingSettings, *, masked: bool
) -> Timed:
    """Time one variant beside its peers on workload seed: masked in every layout that it serves, unmasked in its timed
    layout on the padded batch as if all were valid."""
    workload = seed_workload()
    layouts = masked_layouts(row) if masked else (row.timed_layout,)
    inputs = make_inputs(workload, DTYPES[precision], "cuda")
    ours_on = inputs
    if not masked and row.timed_layout == "packed":  # a packed kernel sees no padding: give it full sequences instead
        full = Workload("full", (workload.padded_length,) * workload.sequences, workload.padded_length)
        ours_on = make_inputs(full, DTYPES[precision], "cuda")  # the same numbers: padding rows are drawn like others
    with arithmetic(precision):
        expected = truth(inputs, precision, masked=masked)
        peers = (attention_peers.masked_peers if masked else attention_peers.unmasked_peers)(inputs)
        calls = {layout: kernel_call(lib, row, ours_on, layout, masked=masked) for layout in layouts}
        seen = {layout: look_at(call.run) for layout, call in calls.items()}
        found = [fault for each in seen.values() for fault in faults(*each, kernel_pattern(row))]
        cases = [*(_our_case(row, call, expected) for call in calls.values()), *_peer_cases(peers, expected)]
        description = f"{row.name} {precision} {'masked' if masked else 'unmasked'}"
        rows = measure(
            cases, EventClock(timing.flush_mb), warmup=timing.warmup, rounds=timing.rounds, description=description
        )
    refusals = {peer.name: peer.refusal for peer in peers if peer.refusal is not None}
    ours = dict(zip(layouts, rows, strict=False))
    _, launched = seen[layouts[0]]
    return Timed(ours, rows[len(ours) :], refusals, expected, tuple(dict.fromkeys(found)), launched)


def time_scales(
    lib: library.Library, row: registry.Row, precision: str, timing: TimingSettings
) -> dict[str, dict[str, Any]]:
    """Packed times and errors at every one of `INPUT_SCALES`, beside torch's own packed kernel: how a variant fares
    where its guards do not hold."""
    records = {}
    for name, scale in INPUT_SCALES[precision].items():
        inputs = make_inputs(seed_workload(), DTYPES[precision], "cuda", scale=scale)
        with arithmetic(precision):
            expected = truth(inputs, precision, masked=True)
            peer = attention_peers.packed_peer(inputs)
            call = kernel_call(lib, row, inputs, "packed", masked=True)
            ours, *others = measure(
                [_our_case(row, call, expected), *_peer_cases([peer], expected)],
                EventClock(timing.flush_mb),
                warmup=timing.warmup,
                rounds=timing.rounds,
                description=f"{row.name} {precision} inputs {name}",
            )
        records[name] = scale_record(ours, *others)
    return records


def scale_record(ours: Row, peer: Row | None = None) -> dict[str, Any]:
    """One input scale: our time and error and the peer's."""
    if ours.spread is None:
        return {"failure": ours.failure}
    record: dict[str, Any] = {**_times(ours), "max_abs_error": ours.error}
    if peer is not None and peer.spread is not None:
        speedup = ratio(ours.spread, peer.spread)
        record |= {
            "peer": peer.name,
            "peer_us": 1e6 * peer.spread.median,
            "peer_max_abs_error": peer.error,
            "speedup_vs_peer": speedup.value,
            "speedup_vs_peer_is_noise": speedup.is_noise,
        }
    return record


def bench_variant(row: registry.Row, timing: TimingSettings) -> dict[str, dict[str, dict[str, Any]]]:
    """Time ``row`` on this machine's GPU at each of its precisions: precision -> ``{"rung": record, "peers": record}``.

    A rung's ``us`` is masked where the variant masks, of the row's ``timed_layout``; without a mask it is compared with
    SDPA without a mask. Where the variant does not serve the workload on this GPU there is a ``reason`` instead of
    times, and no peers.
    """
    rates = None
    records: dict[str, dict[str, dict[str, Any]]] = {}
    for precision in row.precisions:
        reason = _not_served(row, precision)
        if reason is not None:
            records[precision] = {"rung": {"timed": False, "precision": precision, "reason": reason}}
            continue
        rates = rates or floors.measured_rates()
        records[precision] = _bench_precision(row, precision, timing, rates)
    return records


def workload_refusal(row: registry.Row, precision: str, sm: int | None = None) -> str | None:
    """Why the row does not serve workload seed at that precision, or None when it does.

    sm: the GPU's compute capability times ten; None: the lowest that the row runs on.
    """
    workload = seed_workload()
    dtype = "fp32" if precision == "tf32" else precision
    sm = row.lowest_sm(dtype) if sm is None else sm
    request = registry.Request("cuda", sm, dtype, workload.head_dim, row.timed_layout, workload.padded_length)
    return registry.refusal(row, request)


def _not_served(row: registry.Row, precision: str) -> str | None:
    refusal = workload_refusal(row, precision, device_sm("cuda"))
    return None if refusal is None else f"not served on this GPU: {refusal}"


def _bench_precision(
    row: registry.Row, precision: str, timing: TimingSettings, rates: floors.Rates
) -> dict[str, dict[str, Any]]:
    lib = library.load()
    unmasked = time_variant(lib, row, precision, timing, masked=False)
    masks = row.timed_layout in masked_layouts(row)
    main = time_variant(lib, row, precision, timing, masked=True) if masks else unmasked
    guarded = "packed" in row.layouts and not uses_ffma(row, precision)
    scales = time_scales(lib, row, precision, timing) if guarded and main.failure is None else {}
    rung = rung_record(row, precision, main, unmasked, scales)
    if "us" in rung:
        rung |= floor_record(row, precision, rung["us"], rates)
    peers = {"unmasked": peers_record(unmasked)}
    if masks:
        peers["masked"] = peers_record(main)
    return {"rung": rung, "peers": peers}


def uses_ffma(row: registry.Row, precision: str) -> bool:
    """Whether it multiplies on the FMA pipe: the fp32 rungs of the ladder."""
    return precision == "fp32" and row.products == "ffma"


def floor_record(row: registry.Row, precision: str, us: float, rates: floors.Rates) -> dict[str, Any]:
    """The floors of workload seed on the unit that the row uses, and what it reached of them."""
    workload = seed_workload()
    floor = floors.attention_floor(workload, precision, rates, ffma_only=uses_ffma(row, precision))
    return {
        "floor_us": floor.seconds * 1e6,
        "floor_bound": floor.bound,
        "share_of_floor": floor.seconds * 1e6 / us,
        "floors": {f"{name}_us": getattr(floor, name) * 1e6 for name in ("hbm", "exps", "products")},
        # A multiply-add is two operations; only products of valid tokens count.
        "tflops": 4 * workload.scores * workload.head_dim / us / 1e6,
    }


def rung_record(
    row: registry.Row,
    precision: str,
    main: Timed,
    unmasked: Timed,
    scales: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """``ladder.<variant>``, and the same at other precisions, without registers and spills, which the compiler knows.

    ``padded_us`` and ``packed_us`` are masked, where served; ``scales`` is what `time_scales` gave. A variant that is
    wrong in one layout or at one scale has no time at all.
    """
    record: dict[str, Any] = {
        "precision": precision,
        "layout": row.timed_layout,
        "masked": main is not unmasked,
        "sdpa_max_abs_error": main.expected.sdpa_error,
    }
    if row.products != "ffma" and precision in ("fp32", "tf32"):
        record["products"] = row.products
    at_scale = (f"inputs {name}: {each['failure']}" for name, each in scales.items() if "failure" in each)
    failure = main.failure or unmasked.failure or next(at_scale, None)
    if failure is not None:
        return {**record, "failure": failure}
    ours, without_mask = main.ours[row.timed_layout], unmasked.ours[row.timed_layout]
    record["max_abs_error"] = max(each.error for each in main.ours.values())
    record["unmasked_us"] = 1e6 * without_mask.spread.median
    record |= _times(ours)
    if record["masked"]:
        record |= {f"{layout}_us": 1e6 * each.spread.median for layout, each in main.ours.items()}
    sdpa = next((row for row in main.peers if row.name == SDPA and row.spread is not None), None)
    if sdpa is not None:
        speedup = ratio(ours.spread, sdpa.spread)
        record |= {
            "sdpa_us": 1e6 * sdpa.spread.median,
            "speedup_vs_sdpa": speedup.value,
            "speedup_vs_sdpa_is_noise": speedup.is_noise,
        }
    best = best_peer(main.peers)
    if best is not None:
        speedup = ratio(ours.spread, best.spread)
        record |= {
            "best_peer": best.name,
            "best_peer_us": 1e6 * best.spread.median,
            "speedup_vs_best_peer": speedup.value,
            "speedup_vs_best_peer_is_noise": speedup.is_noise,
        }
    kernels = main.launched.kernels
    record["launches"] = len(kernels)
    largest = max(kernels, key=lambda kernel: kernel.registers)
    record |= {
        "kernel": largest.name,
        "grid": "x".join(map(str, largest.grid)),
        "block": "x".join(map(str, largest.block)),
        "shared_bytes": largest.shared_bytes,
    }
    if largest.occupancy is not None:
        record["occupancy"] = largest.occupancy
    if scales:
        record["scales"] = {name: dict(each) for name, each in scales.items()}
    return record


def best_peer(rows: Sequence[Row]) -> Row | None:
    """The quickest peer that passed its check."""
    passed = [row for row in rows if row.spread is not None]
    return min(passed, key=lambda row: row.spread.median, default=None)


def peers_record(timed: Timed) -> dict[str, Any]:
    """Each peer's time with spread and error, FAIL with its reason, or why it does not take the input."""
    record: dict[str, Any] = {name: {"refused": reason} for name, reason in timed.refusals.items()}
    for row in timed.peers:
        if row.spread is None:
            record[row.name] = {"failure": row.failure}
        else:
            record[row.name] = {**_times(row), "max_abs_error": row.error}
    return record


def _times(row: Row) -> dict[str, float | int]:
    spread = row.spread
    return {
        "us": 1e6 * spread.median,
        "p10_us": 1e6 * spread.p10,
        "p90_us": 1e6 * spread.p90,
        "repetitions": spread.repetitions,
    }


def compiled_resources(build_record: Mapping[str, Any], sm: str, kernel: str) -> dict[str, int]:
    """``registers``, ``spill_bytes`` and ``stack_bytes`` of the launched ``kernel``, from the variant's section of a
    build_kernels record; empty where nothing was compiled for ``sm`` (``sm_90a``)."""
    found = build_record.get("archs", {}).get(sm)
    if found is None:
        return {}
    named = next((figures for name, figures in found["kernels"].items() if name in kernel), found)
    return {name: named[name] for name in ("registers", "spill_bytes", "stack_bytes")}


def device_architecture() -> str:
    """The architecture that this GPU's machine code is compiled for, as the build names it: sm_80, sm_90a."""
    sm = device_sm("cuda")
    return f"sm_{sm}" + ("a" if sm // 10 == 9 else "")


def main() -> None:
    """Launch one variant once on workload seed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("variant")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "fp16", "bf16"))
    arguments = parser.parse_args()
    row = registry.get(arguments.variant)
    inputs = make_inputs(seed_workload(), DTYPES[arguments.precision], "cuda")
    call = kernel_call(library.load(), row, inputs, row.timed_layout, masked="key_lengths" in row.masks)
    call.poison()
    call.run()
    torch.cuda.synchronize()
    if call.out.isnan().any():
        raise TilerankError(f"variant {row.name} left NaN in its output")


if __name__ == "__main__":
    main()
