"""The attention block beside the same block unfused, over lengths: kernels only, batch 4, BERT-large's width.

Unfused is what a model runs: LayerNorm, three projections, scaled_dot_product_attention and the output projection,
all with biases, in torch's own operators; with torch's choice of backend, and with each backend alone. Where there is
no GPU only the error of small calls is recorded.

    python -m tilerank.bench.block --batch 4 --seq-len 2048 --iters 50
    python -m tilerank.bench.block --sweep --json block.json --chart block.svg
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilerank.bench import timing
from tilerank.bench.attention import OURS_FACTOR, PEER_FACTOR, best_peer
from tilerank.bench.attention_peers import SDPA_BACKENDS
from tilerank.bench.peers import DTYPES, arithmetic
from tilerank.bench.timing import Case, EventClock, Row, measure, ratio
from tilerank.config import TimingSettings
from tilerank.kernel_choices import Call
from tilerank.kernels import build, library, registry
from tilerank.kernels.torch_device import device_sm

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
FEWER_LENGTHS = (128, 512, 4096)
"""Of the precisions beside fp16 in a record, which takes less than a minute so."""

RECORD_LENGTH = 512
"""Whose figures stand as ``block.<precision>``: the most that BERT takes."""

MAX_ROUNDS = 11
"""Rounds a length: the longest take milliseconds in fp32."""

UNFUSED = "unfused"
_WORKSPACE_ALIGNMENT = 256
_CODES = {DTYPES[name]: code for name, code in library.DTYPE_CODES.items()}


@dataclass(frozen=True, slots=True)
class Shape:
    """One call: BERT-large's block unless said otherwise."""

    tokens: int
    batch: int = 4
    width: int = 1024
    heads: int = 16
    head_dim: int = 64
    causal: bool = False
    pre_ln: bool = True


CHECK_SHAPES = tuple(
    Shape(33, batch=2, width=48, heads=2, head_dim=head_dim, causal=head_dim == 64, pre_ln=head_dim != 80)
    for head_dim in (32, 64, 80, 96, 128)
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of one call, its result in float64, and how far the unfused block is from that."""

    shape: Shape
    tensors: Mapping[str, torch.Tensor]  # by the names of `tilerank.fused_attention`
    exact: torch.Tensor  # [B, N, C] float64
    unfused_error: float

    def tolerance(self, factor: float) -> float:
        """What an output may be off by: ``factor`` times the unfused block's error, and one rounding of the largest
        result."""
        eps = torch.finfo(self.tensors["x"].dtype).eps
        return factor * self.unfused_error + eps * float(self.exact.abs().amax())

    def error(self, out: torch.Tensor) -> float:
        """Largest distance from the exact result."""
        return float((out.double() - self.exact).abs().amax())


def make_inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    """x is N(0,1); weights are scaled so that every product is about N(0,1). Drawn on the CPU, so that every device
    starts from the same numbers."""
    generator = torch.Generator().manual_seed(0)
    columns = shape.heads * shape.head_dim

    def draw(*size: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        return (shift + scale * torch.randn(size, generator=generator)).to(device=device, dtype=dtype)

    tensors = {
        "x": draw(shape.batch, shape.tokens, shape.width),
        **{name: draw(columns, shape.width, scale=shape.width**-0.5) for name in ("wq", "wk", "wv")},
        "wo": draw(shape.width, columns, scale=columns**-0.5),
        "gamma": draw(shape.width, scale=0.1, shift=1.0),
        "beta": draw(shape.width, scale=0.1),
        **{name: draw(columns, scale=0.1) for name in ("bq", "bk", "bv")},
        "bo": draw(shape.width, scale=0.1),
    }
    exact = _exact(shape, tensors)
    return Inputs(shape, tensors, exact, float((unfused(shape, tensors).double() - exact).abs().amax()))


def unfused(shape: Shape, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The block in torch's own operators."""
    functional = torch.nn.functional

    def normalized(rows: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(rows, (shape.width,), tensors["gamma"], tensors["beta"], 1e-5)

    rows = normalized(tensors["x"]) if shape.pre_ln else tensors["x"]
    q, k, v = (
        functional.linear(rows, tensors[f"w{name}"], tensors[f"b{name}"])
        .unflatten(-1, (shape.heads, shape.head_dim))
        .transpose(1, 2)
        for name in "qkv"
    )
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)
    out = functional.linear(attended.transpose(1, 2).flatten(2), tensors["wo"], tensors["bo"])
    return out if shape.pre_ln else normalized(out)


def _exact(shape: Shape, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`unfused` in float64, sequence by sequence: at 4,096 tokens the scores of all would not fit beside the rest."""
    double = {name: tensor.double() for name, tensor in tensors.items()}
    return torch.cat([unfused(shape, double | {"x": x[None]}) for x in double["x"]])


# --- ours ------------------------------------------------------------------------------------------------------


def call_of(shape: Shape) -> Call:
    """The kind of call that a shape is."""
    masks = frozenset({"causal"} if shape.causal else ())
    return Call("block", "padded", shape.head_dim, masks, math.gcd(shape.width, shape.heads * shape.head_dim))


def calls(on_cpu: bool) -> tuple[Call, ...]:
    """The kinds of call that are timed, each layer normalisation by its name, or checked on a CPU."""
    if on_cpu:
        return tuple(dict.fromkeys(map(call_of, CHECK_SHAPES)))
    normalizations = (row.name for row in registry.rows_of("layernorm") if row.device == "cuda")
    return call_of(Shape(RECORD_LENGTH)), *(Call("layernorm", "packed", variant=name) for name in normalizations)


def _request(shape: Shape, precision: str, device: str) -> registry.Request:
    return call_of(shape).request(device_sm(device), precision, shape.head_dim, shape.tokens)


def chosen(shape: Shape, precision: str, device: str) -> registry.Row:
    """The row that ``auto`` takes for this call on this machine."""
    return registry.select(_request(shape, precision, device), registry.rows_of("block")).row


def passed_over(shape: Shape, precision: str, device: str) -> tuple[registry.Row, ...]:
    """The other rows that serve this call on this machine, in ladder order."""
    request, first = _request(shape, precision, device), chosen(shape, precision, device)
    rows = registry.rows_of("block")
    return tuple(row for row in rows if row != first and registry.refusal(row, request) is None)


def block_call(lib: library.Library, row: registry.Row, inputs: Inputs) -> tuple[Callable[[], torch.Tensor], Any]:
    """A closure that runs ``row`` on memory it already has, and its output."""
    shape, tensors = inputs.shape, inputs.tensors
    x = tensors["x"]
    out = torch.empty_like(x)
    params = library.FusedAttentionParams(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        out=out.data_ptr(),
        dtype=_CODES[x.dtype],
        causal=shape.causal,
        pre_ln=shape.pre_ln,
        weight_layout=library.WEIGHTS_OUT_IN,
        epsilon=1e-5,
        scale=shape.head_dim**-0.5,
        batch=shape.batch,
        tokens=shape.tokens,
        width=shape.width,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        x_strides=x.stride()[:2],
        out_strides=out.stride()[:2],
        **{f"{name}_stride": tensors[name].stride(0) for name in ("wq", "wk", "wv", "wo")},
    )
    size = lib.workspace_size(row.name, params)
    workspace = torch.empty(size + _WORKSPACE_ALIGNMENT, dtype=torch.uint8, device=x.device)
    workspace = workspace[-workspace.data_ptr() % _WORKSPACE_ALIGNMENT :]
    stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else 0

    def run() -> torch.Tensor:
        lib.run(row.name, params, workspace.data_ptr(), size, stream)
        return out

    return run, out


# --- records ---------------------------------------------------------------------------------------------------


def check_precision(precision: str, shapes: Sequence[Shape] = CHECK_SHAPES) -> dict[str, Any]:
    """``block.<precision>`` of a machine without a GPU: the largest error of small calls, and ``timed: false``."""
    lib = library.load(build.Target("cpu"))
    record: dict[str, Any] = {"timed": False, "max_abs_error": 0.0, "unfused_max_abs_error": 0.0}
    for shape in shapes:
        inputs = make_inputs(shape, DTYPES[precision], "cpu")
        row = chosen(shape, precision, "cpu")
        run, out = block_call(lib, row, inputs)
        out.fill_(math.nan)
        error, tolerance = inputs.error(run()), inputs.tolerance(OURS_FACTOR)
        if not error <= tolerance:
            return {"timed": False, "failure": f"error {error:.3g} against float64 is above {tolerance:.3g}"}
        record["variant"] = row.name
        record["max_abs_error"] = max(record["max_abs_error"], error)
        record["unfused_max_abs_error"] = max(record["unfused_max_abs_error"], inputs.unfused_error)
    return record


def time_precision(
    precision: str, settings: TimingSettings, lengths: Sequence[int] | None = None
) -> dict[int, dict[str, Any]]:
    """Length -> its record, on this machine's GPU. lengths: all of them for fp16 and some for others, unless given."""
    if lengths is None:
        lengths = LENGTHS if precision == "fp16" else FEWER_LENGTHS
    rounds = min(settings.rounds, MAX_ROUNDS)
    return {tokens: time_shape(Shape(tokens), precision, settings, rounds) for tokens in lengths}


def time_shape(shape: Shape, precision: str, settings: TimingSettings, rounds: int) -> dict[str, Any]:
    """The figures of one call: ours, unfused, and unfused with each backend, taking turns."""
    row = chosen(shape, precision, "cuda")
    with arithmetic(precision):
        inputs = make_inputs(shape, DTYPES[precision], "cuda")
        run, out = block_call(library.load(), row, inputs)
        allocated, launched = timing.look_at(run)
        faults = timing.faults(allocated, launched, kernel_pattern(row))
        plain = _unfused_call(inputs)
        plain()
        unfused_launches = len(timing.launches(plain).kernels)
        others = passed_over(shape, precision, "cuda")
        cases = [
            Case(row.name, run, inputs.error, inputs.tolerance(OURS_FACTOR), lambda: out.fill_(math.nan)),
            *(_row_case(other, inputs) for other in others),
            Case(UNFUSED, plain, inputs.error, inputs.tolerance(PEER_FACTOR)),
            *(Case(name, peer, inputs.error, inputs.tolerance(PEER_FACTOR)) for name, peer in _backends(inputs)),
        ]
        ours, *rest = measure(
            cases,
            EventClock(settings.flush_mb),
            warmup=settings.warmup,
            rounds=rounds,
            description=f"{precision} {shape.tokens}",
        )
    record = {"variant": row.name, "launches": len(launched.kernels), "unfused_launches": unfused_launches}
    record["unfused_max_abs_error"] = inputs.unfused_error
    if faults:
        return {**record, "failure": f"the timed closure {'; '.join(faults)}"}
    by_row = {each.name: 1e6 * each.spread.median for each in rest[: len(others)] if each.spread is not None}
    return record | shape_record(ours, rest[len(others) :]) | ({"other_rows_us": by_row} if by_row else {})


def _row_case(row: registry.Row, inputs: Inputs) -> Case:
    run, out = block_call(library.load(), row, inputs)
    return Case(row.name, run, inputs.error, inputs.tolerance(OURS_FACTOR), lambda: out.fill_(math.nan))


def rows_record(lengths: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """``block_rows.<precision>``: variant -> microseconds at each length that it was timed at, ``auto``'s choice and
    those it passed over, from the records of `time_precision`."""
    rows: dict[str, dict[str, float]] = {}
    for tokens, record in lengths.items():
        timed = dict(record.get("other_rows_us", {}))
        if "us" in record:
            timed[record["variant"]] = record["us"]
        for name, us in timed.items():
            rows.setdefault(name, {})[f"tokens_{tokens}_us"] = us
    return rows


def kernel_pattern(row: registry.Row) -> str:
    """What the demangled name of every kernel of a block row contains."""
    return rf"tilerank::({row.name}|block_mma|block_hopper|block_wide)::"


def shape_record(ours: Row, peers: Sequence[Row]) -> dict[str, Any]:
    """The times of one `measure` call."""
    if ours.spread is None:
        return {"failure": ours.failure}
    record: dict[str, Any] = {
        "us": 1e6 * ours.spread.median,
        "p10_us": 1e6 * ours.spread.p10,
        "p90_us": 1e6 * ours.spread.p90,
        "repetitions": ours.spread.repetitions,
        "max_abs_error": ours.error,
    }
    default = next((peer for peer in peers if peer.name == UNFUSED and peer.spread is not None), None)
    if default is not None and default.spread is not None:
        speedup = ratio(ours.spread, default.spread)
        record |= {
            "unfused_us": 1e6 * default.spread.median,
            "speedup_vs_unfused": speedup.value,
            "speedup_vs_unfused_is_noise": speedup.is_noise,
        }
    best = best_peer(peers)
    if best is not None and best.spread is not None:
        record |= {
            "best_peer": best.name,
            "best_peer_us": 1e6 * best.spread.median,
            "speedup_vs_best_peer": ratio(ours.spread, best.spread).value,
        }
    return record


LAYERNORM_ROWS = (512, 16384)
LAYERNORM_WIDTH = 1024


def time_layernorm(settings: TimingSettings) -> dict[str, dict[str, Any]]:
    """``layernorm.<variant>``: every CUDA row on fp16 rows of BERT-large's width, few and many, beside torch's."""
    records: dict[str, dict[str, Any]] = {}
    for count in LAYERNORM_ROWS:
        *ours, peer = _time_layernorm(count, settings)
        for row in ours:
            record = records.setdefault(row.name, {})
            if row.spread is None:
                record["failure"] = row.failure
                continue
            record[f"rows_{count}_us"] = 1e6 * row.spread.median
            if peer.spread is not None:
                record[f"rows_{count}_torch_us"] = 1e6 * peer.spread.median
    return records


def _time_layernorm(count: int, settings: TimingSettings) -> tuple[Row, ...]:
    """The CUDA rows in the registry's order, then torch."""
    dtype, width = torch.float16, LAYERNORM_WIDTH
    generator = torch.Generator().manual_seed(0)
    x, gamma, beta = (
        torch.randn(size, generator=generator).to("cuda", dtype) for size in ((count, width), (width,), (width,))
    )
    normalize = torch.nn.functional.layer_norm
    exact = normalize(x.double(), (width,), gamma.double(), beta.double())
    out = torch.empty_like(x)
    lib, stream = library.load(), torch.cuda.current_stream().cuda_stream
    params = library.LayernormParams(
        x=x.data_ptr(),
        gamma=gamma.data_ptr(),
        beta=beta.data_ptr(),
        out=out.data_ptr(),
        dtype=_CODES[dtype],
        epsilon=1e-5,
        rows=count,
        width=width,
        x_stride=width,
        out_stride=width,
    )

    def error(result: torch.Tensor) -> float:
        return float((result.double() - exact).abs().amax())

    def peer() -> torch.Tensor:
        return normalize(x, (width,), gamma, beta)

    def run(name: str) -> torch.Tensor:
        lib.run(name, params, 0, 0, stream)
        return out

    tolerance = OURS_FACTOR * error(peer())
    names = [row.name for row in registry.rows_of("layernorm") if row.device == "cuda"]
    ours = [Case(name, partial(run, name), error, tolerance, partial(out.fill_, math.nan)) for name in names]
    return measure(
        [*ours, Case("torch", peer, error, tolerance)],
        EventClock(settings.flush_mb),
        warmup=settings.warmup,
        rounds=settings.rounds,
        description=f"layer normalisation of {count} rows",
    )


def _unfused_call(inputs: Inputs) -> Callable[[], torch.Tensor]:
    return lambda: unfused(inputs.shape, inputs.tensors)


def _backends(inputs: Inputs) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """The unfused block with each backend of torch's attention that takes the call."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    plain = _unfused_call(inputs)
    for name, backend in SDPA_BACKENDS.items():

        def run(backend: str = backend) -> torch.Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return plain()

        with contextlib.suppress(RuntimeError):
            run()
            torch.cuda.synchronize()
            yield f"unfused, {name}", run


# --- command line ----------------------------------------------------------------------------------------------


def draw_chart(records: Mapping[str, Mapping[int, Mapping[str, Any]]], path: Path) -> None:
    """Latency against length, one line a precision and one beside it unfused; on logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for precision, lengths in records.items():
        timed = [(tokens, each) for tokens, each in lengths.items() if "us" in each and "unfused_us" in each]
        if not timed:
            continue
        tokens = [tokens for tokens, _ in timed]
        (line,) = axes.plot(tokens, [each["us"] for _, each in timed], marker="o", label=f"{precision} fused")
        axes.plot(
            tokens,
            [each["unfused_us"] for _, each in timed],
            marker="o",
            markerfacecolor="none",
            linestyle="--",
            color=line.get_color(),
            label=f"{precision} unfused",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens a sequence (batch 4, width 1024, 16 heads of 64)")
    axes.set_ylabel("µs")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    """Time the attention block on this machine's GPU beside the unfused one."""
    parser = argparse.ArgumentParser(prog="python -m tilerank.bench.block", description=main.__doc__)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--iters", type=int, default=50, help="rounds that are timed")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--post-ln", action="store_true", help="normalise the result instead of x")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), action="append", help="default: fp16")
    parser.add_argument("--sweep", action="store_true", help=f"lengths {', '.join(map(str, LENGTHS))}, all precisions")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--chart", type=Path, help="where to draw latency against length (.svg, .png, .pdf)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: kernels are not timed on a CPU")
    precisions = options.precision or (["fp32", "fp16", "bf16"] if options.sweep else ["fp16"])
    settings = TimingSettings(protocol=1, warmup=5, rounds=options.iters, flush_mb=256)
    records: dict[str, dict[int, dict[str, Any]]] = {}
    for precision in precisions:
        records[precision] = {}
        for tokens in LENGTHS if options.sweep else (options.seq_len,):
            shape = Shape(
                tokens,
                options.batch,
                options.width,
                options.heads,
                options.head_dim,
                options.causal,
                not options.post_ln,
            )
            record = time_shape(shape, precision, settings, options.iters)
            records[precision][tokens] = record
            print(f"{precision} {tokens} tokens: {_line(record)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    if options.chart:
        draw_chart(records, options.chart)


def _line(record: Mapping[str, Any]) -> str:
    if "failure" in record:
        return f"FAIL ({record['failure']})"
    ours = f"{record['variant']} {record['us']:.1f} us in {record['launches']} launches"
    unfused_text = f"unfused {record['unfused_us']:.1f} us in {record['unfused_launches']}"
    return f"{ours}; {unfused_text}; best {record['best_peer']} {record['best_peer_us']:.1f} us"


if __name__ == "__main__":
    main()
