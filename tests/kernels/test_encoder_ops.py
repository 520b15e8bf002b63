"""Linear layers and embeddings: what they mean, by the reference and torch in float64; the host build; refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from tilerank.kernels import build, encoder_ops, library, registry, torch_ops
from tilerank.kernels.library import KernelError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ROUNDING = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Half a unit in the last place, relative: a reference rounds once, from double."""

ACTIVATIONS = {None: lambda x: x, "gelu": functional.gelu, "tanh": torch.tanh}

HOST_ROWS = [row for row in registry.rows_of("embedding") if row.device == "cuda" and row.host_exempt is None]


def draw(*shape: int, seed: int, dtype: str = "fp32", spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(*shape, generator=generator)).to(DTYPES[dtype])


@pytest.fixture(params=["cpu", "host"])
def library_of(request: pytest.FixtureRequest) -> Iterator[str]:
    """The operators run this build."""
    with pytest.MonkeyPatch.context() as patch:
        built = library.load(build.Target(request.param))
        patch.setattr(torch_ops, "_library", lambda: built)
        yield request.param


@pytest.fixture
def cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        built = library.load(build.Target("cpu"))
        patch.setattr(torch_ops, "_library", lambda: built)
        yield


def layer_weights(dtype: str, width: int, wide: int, following: int) -> encoder_ops.LayerWeights:
    shapes = {"out": (width, width), "up": (wide, width), "down": (width, wide), "next": (following, width)}
    made = {
        name: (draw(*shape, seed=seed, dtype=dtype, spread=0.3), draw(shape[0], seed=seed + 10, dtype=dtype))
        for seed, (name, shape) in enumerate(shapes.items())
        if shape[0]
    }
    norms = tuple(
        (draw(width, seed=20 + side, dtype=dtype), draw(width, seed=30 + side, dtype=dtype)) for side in (0, 1)
    )
    return encoder_ops.LayerWeights(made["out"], made["up"], made["down"], norms, made.get("next"), epsilon=1e-5)


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    error = (found.double() - expected).abs()
    assert torch.isfinite(found).all()
    assert (error <= ROUNDING[dtype] * expected.abs() * (1 + 1e-9) + 2.0**-25).all(), float(error.max())


# ---- The reference ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("following", [0, 5])
def test_from_attention_to_attention(cpu: None, dtype: str, following: int) -> None:
    weights = layer_weights(dtype, 12, 20, following)
    found, x = draw(7, 12, seed=1, dtype=dtype), draw(7, 12, seed=2, dtype=dtype)

    def linear(x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return functional.linear(x.double(), pair[0].double(), pair[1].double())

    def norm(x: torch.Tensor, side: int) -> torch.Tensor:
        gamma, beta = weights.norms[side]
        return functional.layer_norm(x, (12,), gamma.double(), beta.double(), weights.epsilon)

    x1 = norm(linear(found, weights.out) + x.double(), 0).to(DTYPES[dtype])
    wide = functional.gelu(linear(x1, weights.up)).to(DTYPES[dtype])
    expected = norm(linear(wide, weights.down) + x1.double(), 1)
    out, after = encoder_ops.layer(found, x, weights, variant="reference")
    assert out.data_ptr() == x.data_ptr()
    assert_close(out, expected, dtype)
    assert (after is None) == (following == 0)
    if after is not None and weights.next is not None:
        assert_close(after, linear(expected.to(DTYPES[dtype]), weights.next), dtype)


def test_layers_that_do_not_fit(cpu: None) -> None:
    weights = layer_weights("fp32", 12, 20, 5)
    x = draw(7, 12, seed=1)
    with pytest.raises(ValueError, match="found has shape"):
        encoder_ops.layer(x[:, :8], x, weights, variant="reference")
    with pytest.raises(ValueError, match="up bias has shape"):
        encoder_ops.layer(x, x, replace(weights, up=(weights.up[0], x[0])), variant="reference")
    with pytest.raises(KernelError, match=r"epsilon is -1; it must be finite and 0 or more"):
        encoder_ops.layer(x, x, replace(weights, epsilon=-1.0), variant="reference")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_layer(cpu: None, dtype: str, activation: str | None, with_bias: bool) -> None:
    x, weight = draw(5, 24, seed=1, dtype=dtype), draw(7, 24, seed=2, dtype=dtype)
    bias = draw(7, seed=3, dtype=dtype) if with_bias else None
    found = encoder_ops.linear(x, encoder_ops.plain(weight), bias, variant="reference", activation=activation)
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_close(found, ACTIVATIONS[activation](expected), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_linear_layer_normalised(cpu: None, dtype: str, with_residual: bool) -> None:
    x, weight, bias = draw(5, 96, seed=1, dtype=dtype), draw(64, 96, seed=2, dtype=dtype), draw(64, seed=3, dtype=dtype)
    gamma, beta = draw(64, seed=4, dtype=dtype), draw(64, seed=5, dtype=dtype)
    residual = draw(5, 64, seed=6, dtype=dtype) if with_residual else None
    total = functional.linear(x.double(), weight.double(), bias.double())
    total = total if residual is None else total + residual.double()
    expected = functional.layer_norm(total, (64,), gamma.double(), beta.double(), 1e-5)
    arguments = (bias, residual, gamma, beta, 1e-5)
    assert_close(
        encoder_ops.linear_norm(x, encoder_ops.plain(weight), *arguments, variant="reference"), expected, dtype
    )
    rows = encoder_ops.interleaved(weight)
    assert not torch.equal(rows.values, weight)
    found = encoder_ops.linear_norm(x, rows, *arguments, variant="reference", out=residual)
    assert_close(found, expected, dtype)
    assert with_residual == (found is residual)


def test_interleaved_rows_put_eight_neighbours_into_one_thread() -> None:
    numbers = torch.arange(64)[:, None] * 64 + torch.arange(64)
    order = encoder_ops.interleaved(numbers).values.view(2, 4, 4, 2, 2, 2, 2, 4, 2)
    outputs = order[1, :, :, :, 0, 0, 0, 0, 0] // 64  # block, thread, element
    inputs = order[0, 0, 0, 0, 1] % 64  # step, half, thread, element
    for thread in range(4):
        assert outputs[:, thread].flatten().tolist() == list(range(32 + 8 * thread, 40 + 8 * thread))
        assert inputs[:, :, thread].flatten().tolist() == list(range(32 + 8 * thread, 40 + 8 * thread))
    with pytest.raises(ValueError, match="weight has 40 inputs; interleaving takes a multiple of 32"):
        encoder_ops.interleaved(torch.zeros(32, 40))
    with pytest.raises(ValueError, match="weight has 40 rows; interleaving takes a multiple of 32"):
        encoder_ops.interleaved(torch.zeros(40, 32))


@pytest.mark.parametrize("spread", [1e-4, 0.05, 300.0])
def test_split_weights_keep_22_bits(cpu: None, spread: float) -> None:
    x, weight = draw(5, 48, seed=1), draw(32, 48, seed=2, spread=spread)
    weights = encoder_ops.split(weight)
    assert weights.values.dtype == torch.float16
    assert 2.0**14 <= float(weights.values[:, :48].abs().max()) <= 2.0**15
    found = encoder_ops.linear(x, weights, None, variant="reference", x_exponent=4)
    expected = functional.linear(x.double(), weight.double())
    sizes = functional.linear(x.double().abs(), weight.double().abs())
    assert ((found.double() - expected).abs() <= 2.0**-22 * sizes + 2.0**-23 * expected.abs() + 1e-9 * spread).all()
    rounded = functional.linear(x.double(), weight.half().double())
    assert (rounded - expected).abs().max() > 100 * (found.double() - expected).abs().max()
    with pytest.raises(ValueError, match="weight holds values that are not finite"):
        encoder_ops.split(weight / 0)
    with pytest.raises(ValueError, match=r"weight is torch\.float16 with 48 inputs"):
        encoder_ops.split(weight.half())


def test_strided_rows_are_served_in_place(cpu: None) -> None:
    wide = draw(6, 50, seed=1)
    out = torch.full((6, 20), 7.0)
    weight = draw(9, 40, seed=2)[:, ::1][:, :32]
    found = encoder_ops.linear(wide[:, 3:35], encoder_ops.plain(weight), None, variant="reference", out=out[:, 4:13])
    assert_close(found, functional.linear(wide[:, 3:35].double(), weight.double()), "fp32")
    assert (out[:, :4] == 7).all()
    assert (out[:, 13:] == 7).all()


# ---- Few rows, on the host build ----


@pytest.fixture
def host() -> Iterator[None]:
    """The operators run the host build, with the workspace that a row asks for, poisoned."""

    def call(row: registry.Row, params: library.Params, device: torch.device) -> None:
        size = built.workspace_size(row.name, params) if row.workspace else 0
        memory = torch.full((size + 256,), 255, dtype=torch.uint8)  # NaN in fp32
        built.run(row.name, params, memory.data_ptr() + -memory.data_ptr() % 256, size)

    with pytest.MonkeyPatch.context() as patch:
        built = library.load(build.Target("host"))
        patch.setattr(torch_ops, "_library", lambda: built)
        patch.setattr(torch_ops, "_call", call)
        yield


def few_rows(rows: int, columns: int, depth: int, dtype: str) -> tuple[torch.Tensor, ...]:
    """x, weight, bias and residual; x and the residual are rows of something wider."""
    x, residual = (draw(rows, width + 16, seed=width, dtype=dtype)[:, 8:-8] for width in (depth, columns))
    weight = draw(columns, depth, seed=2, dtype=dtype, spread=depth**-0.5)
    return x, weight, draw(columns, seed=3, dtype=dtype), residual


SIZES = [(1, 1, 8), (5, 24, 64), (16, 16, 256), (17, 30, 296), (33, 40, 1544), (33, 1530, 40)]
"""Rows, columns, depth: what a tile holds and one more, more depth than is under way at once, larger tiles."""


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "columns", "depth"), SIZES)
def test_few_rows(host: None, dtype: str, activation: str | None, rows: int, columns: int, depth: int) -> None:
    x, weight, bias, _ = few_rows(rows, columns, depth, dtype)
    whole = torch.full((rows + 2, columns + 3), 7.0, dtype=DTYPES[dtype])
    options = {"variant": "few_rows", "activation": activation}
    found = encoder_ops.linear(x, encoder_ops.plain(weight), bias, out=whole[1:-1, :columns], **options)
    expected = ACTIVATIONS[activation](functional.linear(x.double(), weight.double(), bias.double()))
    error = (found.double() - expected).abs()
    assert (error <= ROUNDING[dtype] * expected.abs() * (1 + 2.0**-10) + 1e-5).all(), float(error.max())
    whole[1:-1, :columns] = 7.0
    assert (whole == 7.0).all(), "nothing beside the result is written"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 8, 8), (5, 384, 384), (17, 30, 296), (33, 1024, 64)])
def test_few_rows_normalised(host: None, dtype: str, in_place: bool, rows: int, columns: int, depth: int) -> None:
    x, weight, bias, residual = few_rows(rows, columns, depth, dtype)
    gamma, beta = draw(columns, seed=5, dtype=dtype), draw(columns, seed=6, dtype=dtype)
    total = functional.linear(x.double(), weight.double(), bias.double()) + residual.double()
    expected = functional.layer_norm(total, (columns,), gamma.double(), beta.double(), 1e-5)
    out = residual if in_place else torch.empty(rows, columns, dtype=DTYPES[dtype])
    ends = (bias, residual, gamma, beta, 1e-5)
    found = encoder_ops.linear_norm(x, encoder_ops.plain(weight), *ends, variant="few_rows", out=out)
    error = (found.double() - expected).abs()
    assert (error <= ROUNDING[dtype] * expected.abs() * (1 + 2.0**-10) + 1e-5).all(), float(error.max())


def test_few_rows_have_the_same_bits_in_any_company(host: None) -> None:
    """Alone a row is in a small tile, among others in a large one."""
    x, weight, bias, _ = few_rows(33, 1536, 1536, "fp16")
    weights = encoder_ops.plain(weight)
    together = encoder_ops.linear(x, weights, bias, variant="few_rows")
    for row in (0, 20, 32):
        alone = encoder_ops.linear(x[row : row + 1], weights, bias, variant="few_rows")
        torch.testing.assert_close(alone[0], together[row], atol=0, rtol=0)


def test_what_few_rows_refuse(host: None) -> None:
    x, weight, bias, residual = few_rows(3, 1032, 40, "fp16")
    norm = (bias, residual, bias, bias, 0.0)
    with pytest.raises(KernelError, match="columns is 1032; where gamma is given it serves: up to 1024"):
        encoder_ops.linear_norm(x, encoder_ops.plain(weight), *norm, variant="few_rows")
    with pytest.raises(KernelError, match="depth is 36; it serves: multiples of 8"):
        encoder_ops.linear(x[:, :36], encoder_ops.plain(weight[:, :36]), None, variant="few_rows")
    with pytest.raises(KernelError, match="does not begin at a multiple of 16 bytes"):
        encoder_ops.linear(x[:, 4:36], encoder_ops.plain(weight[:, :32]), None, variant="few_rows")
    with pytest.raises(KernelError, match=r"weight_format is 1; it serves: 0 \(plain\)"):
        encoder_ops.linear(x[:, :32], encoder_ops.interleaved(weight[:1024, :32]), None, variant="few_rows")


# ---- Embeddings: the reference, and the kernel on the host build ----


def variants(built: str) -> list[str]:
    return ["reference"] if built == "cpu" else [row.name for row in HOST_ROWS]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 33, 128, 384, 520, 2056])
@pytest.mark.parametrize("with_types", [False, True])
def test_embeddings(library_of: str, dtype: str, width: int, with_types: bool) -> None:
    words, positions = draw(11, width, seed=1, dtype=dtype), draw(6, width, seed=2, dtype=dtype)
    types = draw(2, width, seed=3, dtype=dtype) if with_types else None
    gamma, beta = draw(width, seed=4, dtype=dtype), draw(width, seed=5, dtype=dtype)
    # Two beyond the table: the nearest rows. Enough of some widths that a warp goes on with further rows.
    ids, places, kinds = (
        torch.tensor(indices * (15 if width == 384 else 1), dtype=torch.int32)
        for indices in ([0, 10, 3, 3, 99, -5, 7], [0, 5, 1, 2, 6, -1, 3], [0, 1, 0, 1, 2, -1, 1])
    )
    total = words.double()[ids.clamp(0, 10).long()] + positions.double()[places.clamp(0, 5).long()]
    if types is not None:
        total = total + types.double()[kinds.clamp(0, 1).long()]
    expected = functional.layer_norm(total, (width,), gamma.double(), beta.double(), 1e-12)
    for variant in variants(library_of):
        found = encoder_ops.embedding(ids, places, kinds, words, positions, types, gamma, beta, 1e-12, variant=variant)
        if variant == "reference":
            assert_close(found, expected, dtype)
        else:  # sums in fp32
            error = (found.double() - expected).abs()
            assert (error <= (ROUNDING[dtype] + 2.0**-20) * expected.abs() + 2.0**-19).all(), float(error.max())


# ---- Attention from one token a sequence ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 96, 128])
@pytest.mark.parametrize("shifted", [False, True])
def test_attention_from_one_token(library_of: str, dtype: str, head_dim: int, shifted: bool) -> None:
    """Sequences of lengths around what groups and warps take at once, none, and rows of one buffer as a product leaves
    keys and values; the second half at addresses that are no multiple of 16 bytes."""
    lengths = [1, 0, 2, 31, 32, 33, 65, 130, 5]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    total, heads = int(bounds[-1]), 3
    wide = draw(total, 2, heads, head_dim + shifted, seed=1, dtype=dtype)[..., int(shifted) :]
    k, v = wide.unbind(1)
    q = draw(len(lengths), heads, head_dim, seed=2, dtype=dtype)
    scale = head_dim**-0.5
    expected = torch.zeros(q.shape, dtype=torch.double)
    for s, (start, length) in enumerate(zip(bounds.tolist(), lengths, strict=False)):
        keys, values = (x[start : start + length].double() for x in (k, v))
        weights = torch.einsum("hd,khd->hk", q[s].double(), keys).mul(scale).softmax(-1)
        expected[s] = torch.einsum("hk,khd->hd", weights, values)
    for variant in ["reference"] if library_of == "cpu" else ["warp_keys"]:
        found = encoder_ops.token_attention(q, k, v, bounds, scale, variant=variant)
        assert not found[1].any(), "a sequence without keys"
        error = (found.double() - expected).abs()
        assert (
            error <= ROUNDING[dtype] * expected.abs() * (1 + 1e-9) + (2.0**-25 if variant == "reference" else 2e-6)
        ).all()
    beyond = bounds.clone()
    beyond[-1] += 1000
    found = encoder_ops.token_attention(q, k, v, beyond, scale, variant=variant)
    assert torch.isfinite(found).all(), "bounds are clamped to the keys there are"


# ---- Refusals ----


def test_what_does_not_fit_is_refused(cpu: None) -> None:
    x, weight = draw(5, 24, seed=1), draw(7, 24, seed=2)
    weights = encoder_ops.plain(weight)
    with pytest.raises(ValueError, match=r"x has shape \(5, 24\); expected \(5, 23\)"):
        encoder_ops.linear(x, encoder_ops.plain(weight[:, :23]), None, variant="reference")
    with pytest.raises(ValueError, match=r"bias is torch\.float16 on cpu; expected torch\.float32"):
        encoder_ops.linear(x, weights, draw(7, seed=1, dtype="fp16"), variant="reference")
    with pytest.raises(ValueError, match="its rows must be contiguous"):
        encoder_ops.linear(draw(24, 5, seed=1).t(), weights, None, variant="reference")
    with pytest.raises(KernelError, match="columns is 7; unless weights are plain it must be a multiple of 32"):
        encoder_ops.linear(x, replace(weights, format=library.FORMAT_INTERLEAVED), None, variant="reference")
    with pytest.raises(KernelError, match=r"x_exponent is 3; allowed here: -0 to 0"):
        encoder_ops.linear(x, weights, None, variant="reference", x_exponent=3)
    with pytest.raises(KernelError, match="out_stride is 0; rows of out must not overlap: at least columns, 7"):
        encoder_ops.linear(x, weights, None, variant="reference", out=torch.zeros(7).expand(5, 7))
    with pytest.raises(ValueError, match=r"x is a view that negates.*resolve_neg\(\)"):
        encoder_ops.linear(torch._neg_view(x), weights, None, variant="reference")
    with pytest.raises(NotImplementedError, match="x requires a gradient"):
        encoder_ops.linear(x.clone().requires_grad_(), weights, None, variant="reference")
    with pytest.raises(ValueError, match="no linear variant is called 'quick'; there are: reference"):
        encoder_ops.linear(x, weights, None, variant="quick")
    ids = torch.zeros(3, dtype=torch.int64)
    bounds = torch.zeros(2, dtype=torch.int32)
    heads = draw(1, 2, 8, seed=1)
    with pytest.raises(ValueError, match=r"k has shape \(1, 2, 8\); expected \(1, 1, 8\)"):
        encoder_ops.token_attention(heads[:, :1], heads, heads, bounds, 1.0, variant="reference")
    with pytest.raises(ValueError, match=r"cu_seqlens_k is torch\.int32 \(1,\); expected torch\.int32 \(2,\)"):
        encoder_ops.token_attention(heads, heads, heads, bounds[:1], 1.0, variant="reference")
    with pytest.raises(KernelError, match="scale is inf; it must be finite"):
        encoder_ops.token_attention(heads, heads, heads, bounds, float("inf"), variant="reference")
    with pytest.raises(ValueError, match=r"ids is torch\.int64"):
        encoder_ops.embedding(ids, ids, None, x, x, None, x[0], x[0], 0.0, variant="reference")


def test_an_epsilon_and_halves_of_a_normalisation_are_checked(cpu: None) -> None:
    built = torch_ops._library()
    values = torch.zeros(64)
    params = library.LinearParams(
        x=values.data_ptr(), weight=values.data_ptr(), out=values.data_ptr(), rows=1, columns=2, depth=4, epsilon=-1.0
    )
    with pytest.raises(KernelError, match="epsilon is -1; it must be finite"):
        built.run("reference", params)
    params.epsilon, params.residual = 0.0, values.data_ptr()
    with pytest.raises(KernelError, match="residual or beta is given without gamma"):
        built.run("reference", params)
    params.residual, params.activation = None, 3
    with pytest.raises(KernelError, match=r"activation is 3; allowed: 0 \(none\), 1 \(gelu\), 2 \(tanh\)"):
        built.run("reference", params)
    params.activation, params.gamma = 1, values.data_ptr()
    with pytest.raises(KernelError, match="activation is 1 where gamma is given"):
        built.run("reference", params)
