"""Every CUDA row of layer normalisation and of the attention block on a device, against float64."""

from __future__ import annotations

import math

import pytest
import torch

import tilerank
from tests.kernels import block_reference
from tests.kernels.block_reference import exact, make_inputs, plain
from tilerank.bench import timing
from tilerank.bench.block import Shape, block_call, kernel_pattern
from tilerank.bench.block import make_inputs as bench_inputs
from tilerank.bench.memory import peak_device_mb
from tilerank.kernels import library, registry
from tilerank.kernels.torch_device import device_sm

pytestmark = pytest.mark.gpu

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LIMITS = {"fp32": (1e-4, 1e-3), "fp16": (5e-2, 5e-2), "bf16": (5e-2, 5e-2)}
"""Published tolerances: absolute, relative."""

ROWS = [row for row in registry.rows_of("block") if row.device == "cuda"]
CASES = [
    pytest.param(row, dtype, head_dim, id=f"{row.name}-{dtype}-{head_dim}")
    for row in ROWS
    for dtype in row.dtypes
    for head_dim in row.head_dims or ()
]
ONE_A_ROW = [pytest.param(row, row.dtypes[0], id=row.name) for row in ROWS]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill what torch.empty returns with NaN, so that a row nobody wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def full_precision_yardstick():
    """The unfused block in true fp32: with TF32 the bound of twice its error would be a thousand times wider."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    yield
    matmul.fp32_precision = before


def skip_elsewhere(row: registry.Row) -> None:
    if not row.min_sm <= device_sm("cuda") <= (row.max_sm or 1000):
        pytest.skip(f"{row.name} does not serve this device")


def run(inputs, heads, head_dim, **options):
    names = ("x", "wq", "wk", "wv", "wo", "gamma", "beta")
    biases = {name: inputs[name] for name in ("bq", "bk", "bv", "bo")}
    with torch.no_grad():
        return tilerank.fused_attention(*(inputs[name] for name in names), heads, head_dim, **biases, **options)


def check(inputs, heads, head_dim, dtype, *, variant, **options):
    """Within the published tolerances, and at most twice the unfused block's own error (and one rounding)."""
    out = run(inputs, heads, head_dim, variant=variant, **options).double()
    with torch.no_grad():
        expected = exact(inputs, heads, head_dim, **options)
        own = (plain(inputs, heads, head_dim, **options).double() - expected).abs().amax()
    error = (out - expected).abs()
    absolute, relative = LIMITS[dtype]
    assert (error <= absolute + relative * expected.abs()).all(), f"{error.amax():.3g}"
    rounding = torch.finfo(DTYPES[dtype]).eps * expected.abs().amax()
    assert error.amax() <= 2 * own + rounding, f"{error.amax():.3g} where the unfused block is off by {own:.3g}"
    return out


@pytest.mark.parametrize(("row", "dtype", "head_dim"), CASES)
@pytest.mark.parametrize(("causal", "pre_ln"), [(False, True), (True, False)])
def test_lengths_that_straddle_tiles(row, dtype, head_dim, causal, pre_ln):
    skip_elsewhere(row)
    for tokens in (1, 63, 64, 65, 128, 200, 513):
        inputs = make_inputs(2, tokens, 256, 3, head_dim, DTYPES[dtype], device="cuda", seed=tokens)
        check(inputs, 3, head_dim, dtype, variant=row.name, causal=causal, pre_ln=pre_ln)
        lengths = torch.tensor([tokens, tokens // 2], device="cuda")
        check(
            inputs,
            3,
            head_dim,
            dtype,
            variant=row.name,
            causal=causal,
            pre_ln=pre_ln,
            residual=inputs["residual"],
            key_lengths=lengths.clamp(min=1),
        )


@pytest.mark.parametrize(("row", "dtype"), ONE_A_ROW)
@pytest.mark.parametrize("tokens", [128, 512, 1024, 2048])
def test_the_width_of_bert_large(row, dtype, tokens):
    skip_elsewhere(row)
    inputs = make_inputs(4, tokens, 1024, 16, 64, DTYPES[dtype], device="cuda")
    check(inputs, 16, 64, dtype, variant=row.name)
    check(inputs, 16, 64, dtype, variant=row.name, pre_ln=False, residual=inputs["residual"], causal=True)


@pytest.mark.parametrize(("row", "dtype"), ONE_A_ROW)
def test_weights_are_read_where_they_lie(row, dtype):
    skip_elsewhere(row)
    inputs = make_inputs(2, 100, 512, 4, 64, DTYPES[dtype], device="cuda")
    expected = run(inputs, 4, 64, variant=row.name)
    views = {name: inputs[name].t().contiguous().t() for name in ("wq", "wk", "wv", "wo")}
    error = (run(inputs | views, 4, 64, variant=row.name) - expected).abs().amax()
    assert error <= 4 * torch.finfo(DTYPES[dtype]).eps * expected.abs().amax()
    tokens_first = inputs["x"].transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(run(inputs | {"x": tokens_first}, 4, 64, variant=row.name), expected)
    odd = torch.empty(2, 100, 515, dtype=DTYPES[dtype], device="cuda")[:, :, 1:513]
    odd.copy_(inputs["x"])
    error = (run(inputs | {"x": odd}, 4, 64, variant=row.name) - expected).abs().amax()
    assert error <= 4 * torch.finfo(DTYPES[dtype]).eps * expected.abs().amax()


@pytest.mark.parametrize(("row", "dtype"), ONE_A_ROW)
def test_the_same_bits_from_run_to_run_and_whatever_the_batch(row, dtype):
    skip_elsewhere(row)
    inputs = make_inputs(3, 300, 512, 8, 64, DTYPES[dtype], device="cuda")
    for options in ({}, {"pre_ln": False}, {"causal": True}):
        first = run(inputs, 8, 64, variant=row.name, **options)
        for _ in range(20):
            assert torch.equal(run(inputs, 8, 64, variant=row.name, **options), first)
        alone = run(inputs | {"x": inputs["x"][1:2]}, 8, 64, variant=row.name, **options)
        torch.testing.assert_close(alone[0], first[1], rtol=0, atol=4 * torch.finfo(DTYPES[dtype]).eps)


@pytest.mark.parametrize(("row", "dtype"), ONE_A_ROW)
def test_what_padding_holds_never_leaks(row, dtype):
    skip_elsewhere(row)
    inputs = make_inputs(2, 200, 512, 8, 64, DTYPES[dtype], device="cuda")
    lengths = torch.tensor([200, 70], device="cuda")
    out = run(inputs, 8, 64, variant=row.name, key_lengths=lengths)
    x = inputs["x"].clone()
    x[1, 70:] = math.nan
    again = run(inputs | {"x": x}, 8, 64, variant=row.name, key_lengths=lengths)
    assert torch.equal(again[0], out[0])
    # Queries that are NaN may have their neighbours' weights taken more carefully: the last place can differ.
    torch.testing.assert_close(again[1, :70], out[1, :70], rtol=0, atol=8 * torch.finfo(DTYPES[dtype]).eps)


@pytest.mark.parametrize(("row", "dtype"), ONE_A_ROW)
def test_a_large_mean_costs_no_accuracy(row, dtype):
    """Rows around 200 with a spread of 1, which pre-LN models have in their later layers."""
    skip_elsewhere(row)
    inputs = make_inputs(2, 128, 1024, 16, 64, DTYPES[dtype], device="cuda", mean=200.0)
    check(inputs, 16, 64, dtype, variant=row.name)


@pytest.mark.parametrize(("row", "dtype"), ONE_A_ROW)
def test_two_launches_that_allocate_nothing(row, dtype):
    skip_elsewhere(row)
    call, _ = block_call(library.load(), row, bench_inputs(Shape(256), DTYPES[dtype], "cuda"))
    allocated, launched = timing.look_at(call)
    assert not timing.faults(allocated, launched, kernel_pattern(row))
    assert len(launched.kernels) == 2


@pytest.mark.parametrize(("row", "dtype"), ONE_A_ROW)
def test_memory_grows_with_the_tokens_not_with_their_square(row, dtype):
    """Up to 65,536 tokens, whose scores alone would be 8 GB a head at 16 bit."""
    skip_elsewhere(row)
    peaks = {}
    layer = tilerank.FusedAttentionLayer(256, 4, variant=row.name, device="cuda", dtype=DTYPES[dtype])
    for tokens in (4096, 16384, 65536):
        x = torch.randn(1, tokens, 256, device="cuda").to(DTYPES[dtype])

        def once(x=x):
            def call():
                with torch.no_grad():
                    assert not layer(x).isnan().any()

            return call

        peaks[tokens] = peak_device_mb(once)
    assert peaks[16384] <= 4.5 * peaks[4096]
    assert peaks[65536] <= 4.5 * peaks[16384]


@pytest.mark.parametrize(("row", "dtype"), ONE_A_ROW)
def test_is_captured_in_a_graph(row, dtype):
    skip_elsewhere(row)
    inputs = make_inputs(2, 130, 512, 8, 64, DTYPES[dtype], device="cuda")
    options = {"variant": row.name, "pre_ln": False, "residual": inputs["residual"]}
    expected = run(inputs, 8, 64, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(inputs, 8, 64, **options)
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, expected)
    inputs["x"].copy_(inputs["x"].flip(0))
    graph.replay()
    assert torch.equal(out, run(inputs, 8, 64, **options))


@pytest.mark.parametrize("pre_ln", [True, False])
@pytest.mark.parametrize(("row", "dtype"), ONE_A_ROW)
def test_two_streams_at_once_end(row, dtype, pre_ln):
    """Blocks of one call wait for each other: with another call on the GPU they must still all get their turn."""
    skip_elsewhere(row)
    inputs = make_inputs(4, 1024, 1024, 16, 64, DTYPES[dtype], device="cuda")
    expected = run(inputs, 16, 64, variant=row.name, pre_ln=pre_ln)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(run(inputs, 16, 64, variant=row.name, pre_ln=pre_ln))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_opcheck(dtype):
    inputs = make_inputs(2, 40, 128, 2, 64, DTYPES[dtype], device="cuda")
    names = ("x", "wq", "wk", "wv", "wo", "gamma", "beta", "bq", "bk", "bv", "bo", "residual")
    lengths = torch.tensor([40, 3], device="cuda")
    arguments = (*(inputs[name] for name in names), lengths, 2, 64, False, True, 1e-5, 0.125, "auto", False)
    torch.library.opcheck(torch.ops.tilerank.fused_attention.default, arguments)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_layer_compiles_without_a_graph_break(mode):
    torch._dynamo.reset()
    layer = tilerank.FusedAttentionLayer(256, 4, pre_ln=False, device="cuda", dtype=torch.float16)
    x = torch.randn(2, 100, 256, device="cuda").half()

    def encoder(x):
        return layer(torch.nn.functional.gelu(x), residual=x)

    compiled = torch.compile(encoder, fullgraph=True, mode=mode)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), encoder(x), atol=4e-3, rtol=4e-3)


@torch.no_grad()
def test_autocast():
    layer = tilerank.FusedAttentionLayer(256, 4, device="cuda")
    x = torch.randn(2, 100, 256, device="cuda")
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype):
            out = layer(x, residual=x)
        assert out.dtype == dtype
        expected = block_reference.unfused(layer, x, residual=x)
        torch.testing.assert_close(out.float(), expected, atol=5e-2, rtol=5e-2)


# --- layer normalisation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row", [row for row in registry.rows_of("layernorm") if row.device == "cuda"], ids=lambda row: row.name
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 384, 1000, 1024, 4096, 5000])
def test_layernorm(row, dtype, width):
    x = torch.randn(67, width, device="cuda").to(DTYPES[dtype])
    gamma, beta = (torch.randn(width, device="cuda").to(DTYPES[dtype]) for _ in range(2))
    out = torch.empty_like(x)
    params = library.LayernormParams(
        x=x.data_ptr(),
        gamma=gamma.data_ptr(),
        beta=beta.data_ptr(),
        out=out.data_ptr(),
        dtype=library.DTYPE_CODES[dtype],
        epsilon=1e-5,
        rows=67,
        width=width,
        x_stride=width,
        out_stride=width,
    )
    library.load().run(row.name, params, 0, 0, torch.cuda.current_stream().cuda_stream)
    expected = torch.nn.functional.layer_norm(x.double(), (width,), gamma.double(), beta.double(), 1e-5)
    own = torch.nn.functional.layer_norm(x, (width,), gamma, beta, 1e-5).double()
    rounding = torch.finfo(DTYPES[dtype]).eps * expected.abs().amax()
    assert (out.double() - expected).abs().amax() <= 2 * (own - expected).abs().amax() + rounding
