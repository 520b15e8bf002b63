"""The fused encoder on a device: its linear layers and embeddings against torch in float64, its scores against the
unmodified model's, a score alone and among others."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import WORDS
from torch.nn import functional

import tilerank
from tilerank import Reranker
from tilerank.bench.forward_parts import kernels_of
from tilerank.bench.peers import HuggingFaceScorer
from tilerank.bench.workloads import SEED_LENGTHS
from tilerank.encoder import PackedEncoder
from tilerank.kernels import encoder_ops, registry, torch_ops
from tilerank.kernels.torch_device import device_sm
from tilerank.precision import PRECISIONS

pytestmark = pytest.mark.gpu

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
QUERY = "high risk of bone cancer"


def draw(*shape: int, seed: int, dtype: str, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (spread * torch.randn(*shape, generator=generator, device="cuda")).to(DTYPES[dtype])


def needs(operation: str, variant: str, dtype: str) -> None:
    """Skip where the device does not run the variant."""
    row = registry.get(variant, operation)
    sm = device_sm("cuda")
    if dtype not in row.dtypes:
        pytest.skip(f"{variant} does not serve {dtype}")
    if not row.runs_on(sm, dtype):
        pytest.skip(f"{variant} does not run on sm {sm}")


def guarded(rows: int, columns: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A result's memory, poisoned, and all of it with a row before and two behind."""
    whole = torch.full((rows + 3, columns), float("nan"), device="cuda", dtype=DTYPES[dtype])
    return whole[1 : rows + 1], whole


def check(found: torch.Tensor, whole: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    torch.cuda.synchronize()
    assert torch.isfinite(found).all()
    assert whole[0].isnan().all()
    assert whole[found.shape[0] + 1 :].isnan().all()
    limit = 2 * (theirs.double() - exact).abs().max() + 2.0**-20 * exact.abs().max()
    assert (found.double() - exact).abs().max() <= limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [
        (1, 384, 128),
        (127, 1152, 384),
        (128, 384, 128),
        (129, 384, 256),
        (300, 1536, 384),
        (17000, 768, 384),
        (17000, 1152, 384),
        (40000, 384, 128),
    ],
)
def test_linear_layers(dtype: str, gelu: bool, rows: int, columns: int, depth: int) -> None:
    variant = "split_rows" if dtype == "fp32" else "resident_rows"
    needs("linear", variant, dtype)
    x, bias = draw(rows, depth, seed=1, dtype=dtype), draw(columns, seed=2, dtype=dtype)
    weight = draw(columns, depth, seed=3, dtype=dtype, spread=depth**-0.5)
    weights = encoder_ops.split(weight) if dtype == "fp32" else encoder_ops.interleaved(weight)
    out, whole = guarded(rows, columns, dtype)
    options = {"activation": "gelu" if gelu else None} | ({"x_exponent": 6} if dtype == "fp32" else {})
    found = encoder_ops.linear(x, weights, bias, variant=variant, out=out, **options)
    theirs, exact = functional.linear(x, weight, bias), functional.linear(x.double(), weight.double(), bias.double())
    if gelu:
        theirs, exact = functional.gelu(theirs), functional.gelu(exact)
    check(found, whole, theirs, exact)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("rows", "depth"), [(1, 64), (128, 384), (129, 1536), (300, 448), (17000, 384), (40000, 192)])
def test_linear_layers_normalised(dtype: str, in_place: bool, rows: int, depth: int) -> None:
    needs("linear", "row_layernorm", dtype)
    x, bias = draw(rows, depth, seed=1, dtype=dtype), draw(384, seed=2, dtype=dtype)
    weight = draw(384, depth, seed=3, dtype=dtype, spread=depth**-0.5)
    gamma, beta = draw(384, seed=4, dtype=dtype), draw(384, seed=5, dtype=dtype)
    residual = draw(rows, 384, seed=6, dtype=dtype)
    total = functional.linear(x.double(), weight.double(), bias.double()) + residual.double()
    exact = functional.layer_norm(total, (384,), gamma.double(), beta.double(), 1e-12)
    theirs = functional.layer_norm(functional.linear(x, weight, bias) + residual, (384,), gamma, beta, 1e-12)
    out, whole = guarded(rows, 384, dtype)
    if in_place:
        out.copy_(residual)
    ends = (bias, out if in_place else residual, gamma, beta, 1e-12)
    found = encoder_ops.linear_norm(x, encoder_ops.interleaved(weight), *ends, variant="row_layernorm", out=out)
    check(found, whole, theirs, exact)


ACTIVATIONS = {None: lambda x: x, "gelu": functional.gelu, "tanh": torch.tanh}
FEW = [(50, 1, 96), (50, 384, 384), (64, 1536, 384), (64, 384, 1536), (65, 30, 72), (1024, 768, 3072), (5000, 1024, 64)]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "columns", "depth"), FEW)
def test_few_rows(dtype: str, activation: str | None, rows: int, columns: int, depth: int) -> None:
    needs("linear", "few_rows", dtype)
    x, bias = draw(rows, depth, seed=1, dtype=dtype), draw(columns, seed=2, dtype=dtype)
    weight = draw(columns, depth, seed=3, dtype=dtype, spread=depth**-0.5)
    out, whole = guarded(rows, columns, dtype)
    options = {"variant": "few_rows", "activation": activation}
    found = encoder_ops.linear(x, encoder_ops.plain(weight), bias, out=out, **options)
    end = ACTIVATIONS[activation]
    exact = end(functional.linear(x.double(), weight.double(), bias.double()))
    check(found, whole, end(functional.linear(x, weight, bias)), exact)
    for row in {0, rows // 2, rows - 1}:
        alone = encoder_ops.linear(x[row : row + 1], encoder_ops.plain(weight), bias, **options)
        torch.testing.assert_close(alone[0], found[row], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 384, 384), (50, 384, 1536), (64, 1024, 4096), (65, 30, 72), (3000, 768, 768)]
)
def test_few_rows_normalised(dtype: str, in_place: bool, rows: int, columns: int, depth: int) -> None:
    needs("linear", "few_rows", dtype)
    x, bias = draw(rows, depth, seed=1, dtype=dtype), draw(columns, seed=2, dtype=dtype)
    weights = encoder_ops.plain(draw(columns, depth, seed=3, dtype=dtype, spread=depth**-0.5))
    gamma, beta = draw(columns, seed=4, dtype=dtype), draw(columns, seed=5, dtype=dtype)
    residual = draw(rows, columns, seed=6, dtype=dtype)
    total = functional.linear(x.double(), weights.values.double(), bias.double()) + residual.double()
    exact = functional.layer_norm(total, (columns,), gamma.double(), beta.double(), 1e-12)
    rounded = functional.linear(x, weights.values, bias) + residual
    theirs = functional.layer_norm(rounded, (columns,), gamma, beta, 1e-12)
    out, whole = guarded(rows, columns, dtype)
    if in_place:
        out.copy_(residual)

    def run(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ends = (bias, residual, gamma, beta, 1e-12)
        return encoder_ops.linear_norm(x, weights, *ends, variant="few_rows", out=out)

    found = run(x, out if in_place else residual, out)
    check(found, whole, theirs, exact)
    alone = run(x[-1:], residual[-1:], torch.empty_like(residual[-1:]))
    torch.testing.assert_close(alone, found[-1:], atol=0, rtol=0)


def test_a_chain_over_few_rows_that_overlaps() -> None:
    """What a last layer does with first tokens, each kernel beginning while the one before ends."""
    needs("linear", "few_rows", "fp16")
    shapes = {"q": (384, 384), "up": (1536, 384), "down": (384, 1536)}
    weights = {
        name: encoder_ops.plain(draw(*shape, seed=seed, dtype="fp16", spread=0.05))
        for seed, (name, shape) in enumerate(shapes.items())
    }
    gamma, beta = draw(384, seed=5, dtype="fp16"), draw(384, seed=6, dtype="fp16")
    k, v = draw(16830, 2, 12, 32, seed=7, dtype="fp16").unbind(1)
    bounds = torch.arange(0, 16831, 330, device="cuda", dtype=torch.int32)
    start = draw(51, 384, seed=8, dtype="fp16")

    def chain(overlap: bool) -> torch.Tensor:
        x, options = start.clone(), {"variant": "few_rows", "overlap": overlap}
        for _ in range(12):
            q = encoder_ops.linear(x, weights["q"], None, **options).view(51, 12, 32)
            found = encoder_ops.token_attention(q, k, v, bounds, 32**-0.5, variant="warp_keys", overlap=overlap)
            x = encoder_ops.linear_norm(
                found.view(51, 384), weights["q"], None, x, gamma, beta, 1e-12, out=x, **options
            )
            wide = encoder_ops.linear(x, weights["up"], None, activation="gelu", **options)
            x = encoder_ops.linear_norm(wide, weights["down"], None, x, gamma, beta, 1e-12, out=x, **options)
        return x

    expected = chain(overlap=False)
    assert torch.isfinite(expected).all()
    for _ in range(20):
        torch.testing.assert_close(chain(overlap=True), expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "plain", "norm"),
    [
        ("fp16", "resident_rows", "row_layernorm"),
        ("fp32", "split_rows", "split_rows"),
    ],
)
def test_a_chain_of_layers_that_overlap(dtype: str, plain: str, norm: str) -> None:
    """Each begins while the one before ends, and overwrites what that one reads."""
    needs("linear", norm, dtype)
    rows, make = 20000, encoder_ops.split if dtype == "fp32" else encoder_ops.interleaved
    up, down = make(draw(1536, 384, seed=1, dtype=dtype, spread=0.05)), make(draw(384, 1536, seed=2, dtype=dtype))
    biases = draw(1536, seed=3, dtype=dtype), draw(384, seed=4, dtype=dtype)
    gamma, beta = draw(384, seed=5, dtype=dtype), draw(384, seed=6, dtype=dtype)
    start = draw(rows, 384, seed=7, dtype=dtype)

    def chain(overlap: bool) -> torch.Tensor:
        x, wide = start.clone(), draw(rows, 1536, seed=8, dtype=dtype)
        for _ in range(12):
            if dtype == "fp32":
                options = {"variant": "split_rows", "x_exponent": 4, "overlap": overlap}
                encoder_ops.linear(x, up, biases[0], activation="gelu", out=wide, **options)
                encoder_ops.linear(wide, down, biases[1], out=x, **options)
                x = functional.layer_norm(x, (384,))
            else:
                encoder_ops.linear(x, up, biases[0], variant=plain, activation="gelu", overlap=overlap, out=wide)
                ends = (biases[1], x, gamma, beta, 1e-12)
                encoder_ops.linear_norm(wide, down, *ends, variant=norm, overlap=overlap, out=x)
        return x

    expected = chain(overlap=False)
    assert torch.isfinite(expected).all()
    for _ in range(5):
        torch.testing.assert_close(chain(overlap=True), expected, atol=0, rtol=0)


def layer_weights(dtype: str, wide: int, following: int) -> encoder_ops.LayerWeights:
    def linear(columns: int, depth: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return draw(columns, depth, seed=seed, dtype=dtype, spread=depth**-0.5), draw(
            columns, seed=40 + seed, dtype=dtype
        )

    norms = tuple((draw(384, seed=20 + side, dtype=dtype), draw(384, seed=30 + side, dtype=dtype)) for side in (0, 1))
    after = linear(following, 384, 4) if following else None
    return encoder_ops.LayerWeights(
        linear(384, 384, 1), linear(wide, 384, 2), linear(384, wide, 3), norms, after, epsilon=1e-12
    )


def layer_by_torch(
    found: torch.Tensor, x: torch.Tensor, weights: encoder_ops.LayerWeights, to: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    def linear(x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return functional.linear(x, pair[0].to(to), pair[1].to(to))

    def norm(x: torch.Tensor, side: int) -> torch.Tensor:
        gamma, beta = weights.norms[side]
        return functional.layer_norm(x, (384,), gamma.to(to), beta.to(to), weights.epsilon)

    x1 = norm(linear(found.to(to), weights.out) + x.to(to), 0)
    out = norm(linear(functional.gelu(linear(x1, weights.up)), weights.down) + x1, 1)
    return out, None if weights.next is None else linear(out, weights.next)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("wide", "following"), [(1536, 1152), (1536, 768), (1536, 0), (128, 64), (320, 128)])
def test_from_attention_to_attention(dtype: str, wide: int, following: int) -> None:
    needs("layer", "resident_tokens", dtype)
    weights = layer_weights(dtype, wide, following)
    alone: list[torch.Tensor] = []
    for rows in [1, 127, 300, 6336, 9000, 10560, 12000, 16830, 17900, 19000, 24000]:
        found, x = draw(rows, 384, seed=5, dtype=dtype), draw(rows, 384, seed=6, dtype=dtype)
        found[0], x[0] = 0.5, 1.5
        exact, theirs = (layer_by_torch(found, x, weights, to) for to in (torch.float64, DTYPES[dtype]))
        held, whole = guarded(rows, 384, dtype)
        held.copy_(x)
        out, after = encoder_ops.layer(found, held, weights, variant="resident_tokens")
        check(out, whole, theirs[0], exact[0])
        if after is not None:
            assert after.untyped_storage().nbytes() == rows * wide * 2, "it has memory of its own"
            own = functional.linear(out.double(), weights.next[0].double(), weights.next[1].double())
            limit = 2.0**-7 if dtype == "bf16" else 2.0**-10  # of the result's largest, rounded once
            assert (after.double() - own).abs().max() <= limit * own.abs().max()
        first = [out[0].clone(), *([] if after is None else [after[0].clone()])]
        alone = alone or first
        for ours, before in zip(first, alone, strict=True):
            torch.testing.assert_close(ours, before, atol=0, rtol=0, msg=f"{rows} rows: another company, other bits")


def test_layers_that_overlap() -> None:
    """Each begins while the one before ends, in place, and gives what it gives alone."""
    needs("layer", "resident_tokens", "fp16")
    weights = layer_weights("fp16", 1536, 384)
    start = draw(16800, 384, seed=7, dtype="fp16")

    def chain(overlap: bool) -> torch.Tensor:
        x, after = start.clone(), start
        for _ in range(12):
            x, after = encoder_ops.layer(after, x, weights, variant="resident_tokens", overlap=overlap)
        return torch.cat([x, after])

    expected = chain(overlap=False)
    assert torch.isfinite(expected).all()
    for _ in range(5):
        torch.testing.assert_close(chain(overlap=True), expected, atol=0, rtol=0)


ATTENTION = {"fp16": "warpgroups", "bf16": "warpgroups", "fp32": "split_warpgroups"}


def attend(qkv: torch.Tensor, bounds: torch.Tensor, longest: int, *, overlap: bool) -> torch.Tensor:
    """Attention of 12 heads of 32 columns over a product's rows ``[rows, 1152]``; rows of no sequence hold anything."""
    variant = ATTENTION[next(name for name, dtype in DTYPES.items() if dtype == qkv.dtype)]
    arguments = (bounds, bounds, longest, longest, False, 32**-0.5, variant, False)
    heads = qkv.view(-1, 3, 12, 32).unbind(1)
    return torch_ops._attention_varlen(*heads, *arguments, clear=False, overlap=overlap).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [SEED_LENGTHS, (70, 200, 1, 0, 333), (16384,)])
def test_attention_overlaps_the_products_around_it(dtype: str, lengths: tuple[int, ...]) -> None:
    """It reads what the product in front writes, which lets it begin at once: where tokens are few, on multiprocessors
    that the product leaves idle. On a stream and in a graph, all bits are those of one call after the other."""
    needs("attention", ATTENTION[dtype], dtype)
    make = encoder_ops.split if dtype == "fp32" else encoder_ops.interleaved
    own = {"variant": "split_rows", "x_exponent": 4} if dtype == "fp32" else {"variant": "resident_rows"}
    qkv = make(draw(1152, 384, seed=1, dtype=dtype, spread=384**-0.5))
    back = make(draw(384, 384, seed=2, dtype=dtype, spread=384**-0.5))
    bias, weights = draw(1152, seed=3, dtype=dtype), layer_weights(dtype, 1536, 0)
    start = draw(sum(lengths), 384, seed=7, dtype=dtype)
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    wide = torch.empty(sum(lengths), 1152, device="cuda", dtype=DTYPES[dtype])

    def chain(overlap: bool) -> torch.Tensor:
        x = start.clone()
        for _ in range(6):
            encoder_ops.linear(x, qkv, bias, overlap=overlap, out=wide, **own)
            found = attend(wide, bounds, max(lengths), overlap=overlap)
            if dtype == "fp32":
                encoder_ops.linear(found, back, bias[:384], overlap=overlap, out=x, **own)
            else:
                encoder_ops.layer(found, x, weights, variant="resident_tokens", overlap=overlap)
        return x

    expected = chain(overlap=False)
    assert torch.isfinite(expected).all()
    for _ in range(20):
        torch.testing.assert_close(chain(overlap=True), expected, atol=0, rtol=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(overlap=True)
    for _ in range(20):
        captured.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(captured, expected, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_no_rows_ends_behind_what_stands_before_it(dtype: str) -> None:
    """What follows waits for it alone, and reads what the product before it wrote."""
    needs("attention", ATTENTION[dtype], dtype)
    make = encoder_ops.split if dtype == "fp32" else encoder_ops.interleaved
    own = {"variant": "split_rows", "x_exponent": 4} if dtype == "fp32" else {"variant": "resident_rows"}
    first, second = (make(draw(1152, 384, seed=seed, dtype=dtype, spread=0.05)) for seed in (1, 2))
    bias = draw(1152, seed=3, dtype=dtype)
    x = draw(2000, 384, seed=4, dtype=dtype)
    none = torch.zeros(5, dtype=torch.int32, device="cuda")
    wide, out = (torch.empty(2000, 1152, device="cuda", dtype=DTYPES[dtype]) for _ in range(2))

    def chain(overlap: bool) -> torch.Tensor:
        wide.fill_(float("nan"))
        encoder_ops.linear(x, first, bias, overlap=overlap, out=wide, **own)
        attend(wide, none, 512, overlap=overlap)
        return encoder_ops.linear(wide[:, :384], second, bias, overlap=overlap, out=out, **own).clone()

    expected = chain(overlap=False)
    assert torch.isfinite(expected).all()
    for _ in range(50):
        torch.testing.assert_close(chain(overlap=True), expected, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 33, 384, 2056])
def test_embeddings(dtype: str, width: int) -> None:
    words, places, types = (draw(count, width, seed=count, dtype=dtype) for count in (999, 512, 2))
    gamma, beta = draw(width, seed=4, dtype=dtype), draw(width, seed=5, dtype=dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    ids, at, kinds = (
        torch.randint(0, count, (9001,), generator=generator, device="cuda").int() for count in (999, 512, 2)
    )
    found = encoder_ops.embedding(ids, at, kinds, words, places, types, gamma, beta, 1e-12, variant="warp_rows")
    total = words.double()[ids] + places.double()[at] + types.double()[kinds]
    exact = functional.layer_norm(total, (width,), gamma.double(), beta.double(), 1e-12)
    theirs = functional.layer_norm(words[ids] + places[at] + types[kinds], (width,), gamma, beta, 1e-12)
    limit = 2 * (theirs.double() - exact).abs().max() + 2.0**-20 * exact.abs().max()
    assert (found.double() - exact).abs().max() <= limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 32, 64, 96, 128])
def test_attention_from_one_token(dtype: str, head_dim: int) -> None:
    lengths = torch.tensor([1, 0, 31, 33, 512, 337, 3000], device="cuda")
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    k, v = draw(int(bounds[-1]), 2, 12, head_dim, seed=1, dtype=dtype).unbind(1)
    q = draw(len(lengths), 12, head_dim, seed=2, dtype=dtype)
    scale = head_dim**-0.5
    found = encoder_ops.token_attention(q, k, v, bounds, scale, variant="warp_keys")
    limit = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}[dtype]
    for s, (start, length) in enumerate(zip(bounds.tolist(), lengths.tolist(), strict=False)):
        keys, values = (x[start : start + length].double() for x in (k, v))
        weights = torch.einsum("hd,khd->hk", q[s].double(), keys).mul(scale).softmax(-1)
        assert (found[s].double() - torch.einsum("hk,khd->hd", weights, values)).abs().max() <= limit, s
    alone = encoder_ops.token_attention(q[4:5], k, v, bounds[4:6].contiguous(), scale, variant="warp_keys")
    torch.testing.assert_close(alone[0], found[4], atol=0, rtol=0)


def passages(count: int, longest: int = 400) -> list[str]:
    drawn = random.Random(0)
    return [" ".join(drawn.choices(WORDS, k=drawn.randint(1, longest))) for _ in range(count)]


def encoder_of(ours: Reranker) -> PackedEncoder:
    assert isinstance(ours.encoder, PackedEncoder)
    assert ours.encoder.fused is not None
    return ours.encoder


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_scores_are_the_unmodified_models(cross_encoder_dir: Path, precision: str) -> None:
    ours = Reranker(cross_encoder_dir, device="cuda", precision=precision, host_path="fused")
    texts = passages(70)
    exact, unmodified = (
        HuggingFaceScorer(cross_encoder_dir, "cross-encoder", dtype, "cuda", 512, batch_size=16).score(QUERY, texts)
        for dtype in ("fp64", precision)
    )
    own = np.abs(unmodified - exact).max()
    for batch_size in (None, 9):
        found = ours.score([(QUERY, text) for text in texts], batch_size).logits
        assert np.abs(found - exact).max() <= 2 * own + 1e-5, encoder_of(ours).fused.parts.used
    if precision == "fp32":
        assert np.abs(found - unmodified).max() <= 1e-4


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_score_does_not_depend_on_its_neighbours(cross_encoder_dir: Path, precision: str) -> None:
    """Kernels of this project give a row the same bits wherever it is. What is left, in fp32, are torch's products over
    the first tokens, whose order of summing may follow their number: as much as the same model's padded scores move."""
    texts = passages(40)
    pairs = [(QUERY, text) for text in texts]
    ours = Reranker(cross_encoder_dir, device="cuda", precision=precision, host_path="fused")
    together = ours.score(pairs).logits
    order = list(range(40))
    random.Random(1).shuffle(order)
    own = {"resident_tokens", "few_rows"} <= set(encoder_of(ours).fused.parts.used.values())
    largest = 0.0 if own else {"fp32": 2e-5, "fp16": 2e-2, "bf16": 1.5e-1}[precision]
    shuffled = ours.score([pairs[index] for index in order]).logits
    assert np.abs(shuffled - together[order]).max() <= largest
    alone = np.array([ours.score([pair]).logits[0] for pair in pairs[:10]])
    assert np.abs(alone - together[:10]).max() <= largest
    np.testing.assert_array_equal(ours.score(pairs).logits, together)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_hidden_states_are_bitwise_the_same_in_any_company(cross_encoder_dir: Path, precision: str) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(cross_encoder_dir, dtype=DTYPES[precision]).eval().cuda()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 20000, (24, 300), generator=generator).cuda()
    lengths = torch.randint(1, 301, (24,), generator=generator).cuda()
    mask = (torch.arange(300, device="cuda") < lengths[:, None]).long()
    with torch.inference_mode():
        plain, captured = (tilerank.accelerate(model, graphs=graphs) for graphs in (False, True))
        together = plain(ids, mask).last_hidden_state
        torch.testing.assert_close(captured(ids, mask).last_hidden_state, together, atol=0, rtol=0)
        order = torch.randperm(24, generator=generator)
        shuffled = captured(ids[order], mask[order]).last_hidden_state
        torch.testing.assert_close(shuffled, together[order], atol=0, rtol=0)
        alone = plain(ids[3:4], mask[3:4]).last_hidden_state
        torch.testing.assert_close(alone, together[3:4], atol=0, rtol=0)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_accelerate(cross_encoder_dir: Path, precision: str) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    dtype = PRECISIONS[precision]
    model = AutoModelForSequenceClassification.from_pretrained(cross_encoder_dir, dtype=dtype).eval().cuda()
    tokenizer = AutoTokenizer.from_pretrained(cross_encoder_dir)
    inputs = tokenizer([QUERY] * 20, passages(20), padding=True, truncation=True, return_tensors="pt").to("cuda")
    fast = tilerank.accelerate(model, precision=precision)
    with torch.inference_mode():
        theirs, ours = model(**inputs).logits, fast(**inputs).logits
        exact = model.double()(**inputs).logits
    assert ours.dtype == dtype
    own = (theirs.double() - exact).abs().max()
    if precision == "tf32":
        own = max(own, torch.tensor(2e-2))  # the model itself ran in fp32
    assert (ours.double() - exact).abs().max() <= 2 * own + 1e-5


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_no_product_is_a_librarys(cross_encoder_dir: Path, precision: str) -> None:
    """cuBLAS would take 32 MiB of workspace through torch's allocator."""
    needs("layer", "resident_tokens", precision)
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(cross_encoder_dir, dtype=DTYPES[precision]).eval().cuda()
    fast = tilerank.accelerate(model, precision=precision, graphs=False)
    ids = torch.randint(1000, 20000, (9, 40), device="cuda")
    with torch.inference_mode():
        names = [name for name, _ in kernels_of(lambda: fast(ids, torch.ones_like(ids)))]
    assert any("few_rows" in name for name in names)
    foreign = [name for name in names if "tilerank" not in name]
    assert not [name for name in foreign if any(word in name for word in ("gemm", "gemv", "nvjet", "cutlass"))], names
