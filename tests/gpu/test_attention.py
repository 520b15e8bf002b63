"""Every CUDA row of the registry on a device, against float64, at every kind of call it serves.

What a row does not serve, it must refuse by name; which calls those are is read from the registry, so a new row is
tested as soon as it stands there.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

import tilerank
from tests.kernels import reference
from tilerank.bench.drop_in import OUR_OPERATOR, attention_time
from tilerank.kernels import registry
from tilerank.kernels.torch_device import device_sm

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 31, 32, 33, 48, 63, 64, 65, 511, 512)  # around every tile size in use
ANY_HEAD_DIMS = (1, 32, 33, 64, 80, 128, 256)  # of rows that serve every one
HEADS = 2
NAN = float("nan")

ROWS = [row for row in registry.attention_rows() if row.device == "cuda"]
CASES = [
    pytest.param(row, dtype, head_dim, id=f"{row.name}-{dtype}-{head_dim}")
    for row in ROWS
    for dtype in row.dtypes
    for head_dim in (ANY_HEAD_DIMS if row.head_dims is None else row.head_dims)
]
ONE_A_ROW = [
    pytest.param(row, row.dtypes[0], 32 if row.head_dims is None else row.head_dims[0], id=row.name) for row in ROWS
]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill what torch.empty returns with NaN, so that a row nobody wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def full_precision_yardstick():
    """SDPA in true fp32: with TF32 the bound of twice its error would be a thousand times wider."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    yield
    matmul.fp32_precision = before


def draw(shape, dtype, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(reference.DTYPES[dtype])


def inputs(dtype, head_dim, q_len, k_len=None, batch=2, heads=HEADS, kv_heads=None):
    k_len = q_len if k_len is None else k_len
    shape = (batch, kv_heads or heads, k_len, head_dim)
    return draw((batch, heads, q_len, head_dim), dtype, 1), draw(shape, dtype, 2), draw(shape, dtype, 3)


def serves(row, dtype, head_dim, layout, k_len, *masks):
    request = registry.Request("cuda", device_sm("cuda"), dtype, head_dim, layout, k_len, frozenset(masks))
    return registry.refusal(row, request) is None


def check(row, dtype, tensors, *, strict=False, **arguments):
    """Compare one padded call with float64, or see that the row refuses it. Returns the result, or None."""
    q, k, v = tensors
    masks = [name for name in ("key_lengths", "causal") if arguments.get(name) is not None]
    if (mask := arguments.get("mask")) is not None:
        masks.append("boolean" if mask.dtype == torch.bool else "additive")
    if not serves(row, dtype, q.shape[-1], "padded", k.shape[2], *masks):
        with pytest.raises(ValueError, match=row.name):
            tilerank.attention(q, k, v, variant=row.name, **arguments)
        return None
    out = tilerank.attention(q, k, v, variant=row.name, **arguments)
    reference.assert_close(out, q, k, v, lossy=is_lossy(row), strict=strict, **arguments)
    return out


def is_lossy(row):
    return row.products == "tf32"


def padded_row(row, dtype, head_dim):
    """Skip rows that take packed input only."""
    if not serves(row, dtype, head_dim, "padded", 1):
        pytest.skip(f"{row.name} serves {', '.join(row.layouts)} input")


# --- parity --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "dtype", "head_dim"), CASES)
def test_lengths_that_straddle_tiles(row, dtype, head_dim):
    for length in LENGTHS:
        check(row, dtype, inputs(dtype, head_dim, length))
    check(row, dtype, inputs(dtype, head_dim, 33, 65))
    check(row, dtype, inputs(dtype, head_dim, 65, 33))
    check(row, dtype, inputs(dtype, head_dim, 48, heads=6, kv_heads=2), scale=0.25)


@pytest.mark.parametrize(("row", "dtype", "head_dim"), [case for case in CASES if case.values[1] != "fp32"])
def test_long_keys_that_end_within_a_tile(row, dtype, head_dim):
    """They go round a ring of tiles several times before a tile that is not whole."""
    tensors = inputs(dtype, head_dim, 65, 2501)
    check(row, dtype, tensors)
    check(row, dtype, tensors, key_lengths=torch.tensor([2501, 1300], dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize(("row", "dtype", "head_dim"), CASES)
def test_padded_keys_never_leak(row, dtype, head_dim):
    q, k, v = inputs(dtype, head_dim, 65, max(LENGTHS), batch=len(LENGTHS))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    clean = check(row, dtype, (q, k, v), key_lengths=lengths)
    if clean is None:
        return
    beyond = torch.arange(k.shape[2], device="cuda") >= lengths[:, None]
    for poison in (NAN, float("inf")):
        k.transpose(1, 2)[beyond] = poison
        v.transpose(1, 2)[beyond] = poison
        for given in (lengths, lengths.long(), list(LENGTHS)):
            assert torch.equal(tilerank.attention(q, k, v, key_lengths=given, variant=row.name), clean)
    assert not clean[0].any(), "no key: zeros"


@pytest.mark.parametrize(("row", "dtype", "head_dim"), CASES)
def test_masks(row, dtype, head_dim):
    q, k, v = inputs(dtype, head_dim, 33, 65)
    generator = torch.Generator(device="cuda").manual_seed(4)
    seen = torch.rand(2, HEADS, 33, 65, generator=generator, device="cuda") < 0.7
    seen[1, :, 3] = False  # a row with nothing to attend to
    lengths = torch.tensor([65, 31], device="cuda")
    check(row, dtype, (q, k, v), causal=True)
    check(row, dtype, (q, k, v), causal=True, key_lengths=lengths)
    for mask in (seen, seen[:, :1], seen[:1, :1, :1].expand_as(seen), seen[0, 0, 0], seen[:, :, :, :1]):
        check(row, dtype, (q, k, v), mask=mask)
        bias = draw(mask.shape, "fp32", 5).masked_fill(~mask, -float("inf"))
        check(row, dtype, (q, k, v), mask=bias)
        check(row, dtype, (q, k, v), mask=bias.to(q.dtype), key_lengths=lengths, causal=True)
    smallest = torch.full((33, 65), torch.finfo(q.dtype).min, dtype=q.dtype, device="cuda")
    out = check(row, dtype, (q, k, v), mask=smallest)
    assert out is None or out.isfinite().all()


@pytest.mark.parametrize(("row", "dtype", "head_dim"), CASES)
def test_packed(row, dtype, head_dim):
    bounds = [0, *accumulate(LENGTHS)]
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    q = draw((bounds[-1], HEADS, head_dim), dtype, 1)
    k, v = (draw((bounds[-1], 1, head_dim), dtype, seed) for seed in (2, 3))
    for causal in (False, True):
        call = (q, k, v, cu, cu, max(LENGTHS), max(LENGTHS))
        if not serves(row, dtype, head_dim, "packed", max(LENGTHS), *["causal"] * causal):
            with pytest.raises(ValueError, match=row.name):
                tilerank.attention_varlen(*call, causal=causal, variant=row.name)
            continue
        out = tilerank.attention_varlen(*call, causal=causal, variant=row.name)
        reference.assert_close_varlen(out, q, k, v, bounds, bounds, causal=causal, lossy=is_lossy(row))
    if serves(row, dtype, head_dim, "packed", max(LENGTHS)):
        # Rows of no sequence are zeros, and the keys there are never read.
        tail = torch.full((40, 1, head_dim), NAN, dtype=q.dtype, device="cuda")
        longer = [torch.cat([x, tail.expand(-1, x.shape[1], -1)]) for x in (q, k, v)]
        shifted = tilerank.attention_varlen(*longer, cu, cu, max(LENGTHS), max(LENGTHS), variant=row.name)
        reference.assert_close_varlen(shifted, *longer, bounds, bounds, lossy=is_lossy(row))


# --- accuracy and its limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "dtype", "head_dim"), CASES)
@pytest.mark.parametrize("scale", [1.0, 8.0, 1e-3])
def test_accuracy_at_scales_of_the_inputs(row, dtype, head_dim, scale):
    """Enough rows and keys for SDPA's error to be no luck: at most twice that, on sharp and on flat softmaxes.

    Rungs on the FMA pipe sum key by key, where SDPA sums block by block: on flat softmaxes they need `sum_floor`.
    """
    tensors = [(x * scale).to(x.dtype) for x in inputs(dtype, head_dim, 257, heads=4)]
    lengths = torch.tensor([257, 200], dtype=torch.int32, device="cuda")
    strict = row.products == "fp16x3"
    check(row, dtype, tensors, strict=strict)
    check(row, dtype, tensors, strict=strict, key_lengths=lengths)
    if serves(row, dtype, head_dim, "packed", 257):
        packed_check(row, tensors, [257, 200], strict=strict)


@pytest.mark.parametrize(("row", "dtype", "head_dim"), CASES)
def test_scores_of_ten_thousand(row, dtype, head_dim):
    """Scores of +-1e4: exact one-hot weights, rows of equal keys, and a maximum that keeps rising or falling, which a
    guess from the first keys misses by far."""
    keys = 200  # in steps that every dtype holds, so that equal keys have equal scores
    sign = 1 if head_dim == 1 else torch.tensor([1.0, -1.0], device="cuda").repeat(head_dim)[:head_dim]
    ramp = (torch.arange(keys, device="cuda")[:, None] - keys / 2) / 128
    size = (1e4 / head_dim**0.5) ** 0.5
    q = (size * sign * torch.ones(head_dim, device="cuda")).expand(2, HEADS, 65, head_dim)
    v = draw((2, HEADS, keys, head_dim), dtype, 3)
    for k in (ramp, -ramp, ramp.abs(), torch.ones_like(ramp), ramp.roll(keys // 2, 0)):
        given = [(x + torch.zeros(y, device="cuda")).to(v.dtype) for x, y in ((q, q.shape), (size * sign * k, v.shape))]
        out = check(row, dtype, (*given, v))
        assert out is None or out.isfinite().all()
        check(row, dtype, (*given, v), causal=True)
        if serves(row, dtype, head_dim, "packed", keys):
            packed_check(row, (*(x[:, :, :65] for x in given), v[:, :, :65]), [65, 33])


def packed_check(row, tensors, lengths, strict=False):
    """The first ``lengths`` rows of each sequence of padded tensors, packed, against float64."""
    flat = [torch.cat([x[i, :, :length].transpose(0, 1) for i, length in enumerate(lengths)]) for x in tensors]
    bounds = [0, *accumulate(lengths)]
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    out = tilerank.attention_varlen(*flat, cu, cu, max(lengths), max(lengths), variant=row.name)
    reference.assert_close_varlen(out, *flat, bounds, bounds, lossy=is_lossy(row), strict=strict)


# --- the same bits -------------------------------------------------------------------------------------------

NEIGHBOURS = (65, 1, 512, 33, 0, 130)
"""Lengths of sequences in one batch."""


def neighbours(dtype, head_dim):
    """One sequence of each length, as packed tensors of its own. Some are so large or so small that whoever looks at
    the batch as a whole (for a range, a maximum, a path) decides otherwise than for the others alone."""
    factors = (1.0, 1.0, 200.0, 1e-3, 1.0, 30.0)
    return [
        [(draw((length, HEADS, head_dim), "fp32", 10 * i + j) * factor).to(reference.DTYPES[dtype]) for j in range(3)]
        for i, (length, factor) in enumerate(zip(NEIGHBOURS, factors, strict=True))
    ]


def packed_together(row, sequences):
    """One packed call of these sequences; the results, one a sequence."""
    lengths = [q.shape[0] for q, _, _ in sequences]
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    flat = [torch.cat(tensors) for tensors in zip(*sequences, strict=True)]
    return tilerank.attention_varlen(*flat, cu, cu, max(lengths), max(lengths), variant=row.name).split(lengths)


def padded_together(row, sequences):
    """One padded call with key lengths; the results without their padding."""
    lengths = [q.shape[0] for q, _, _ in sequences]
    padded = [torch.zeros(len(lengths), max(lengths), *sequences[0][0].shape[1:]).to(sequences[0][0]) for _ in "qkv"]
    for index, tensors in enumerate(sequences):
        for whole, part in zip(padded, tensors, strict=True):
            whole[index, : lengths[index]] = part
    views = [x.transpose(1, 2) for x in padded]
    out = tilerank.attention(*views, key_lengths=lengths, variant=row.name).transpose(1, 2)
    return [out[index, :length] for index, length in enumerate(lengths)]


@pytest.mark.parametrize(("row", "dtype", "head_dim"), CASES)
def test_a_sequence_does_not_depend_on_what_else_is_in_the_batch(row, dtype, head_dim):
    sequences = neighbours(dtype, head_dim)
    ways = []
    if serves(row, dtype, head_dim, "packed", max(NEIGHBOURS)):
        ways.append(packed_together)
    if serves(row, dtype, head_dim, "padded", max(NEIGHBOURS), "key_lengths"):
        ways.append(padded_together)
    if not ways:
        pytest.skip(f"{row.name} takes no sequences of different lengths")
    alone = [ways[0](row, [sequence])[0] for sequence in sequences if sequence[0].shape[0]]
    orders = (range(6), (5, 4, 3, 2, 1, 0), (2, 0), (3, 1, 4), (0, 0, 2, 0))
    for way in ways:
        for order in orders:
            together = way(row, [sequences[i] for i in order])
            for i, result in zip(order, together, strict=True):
                if NEIGHBOURS[i]:
                    place = [j for j, length in enumerate(NEIGHBOURS) if length].index(i)
                    assert torch.equal(result, alone[place]), f"{way.__name__} {list(order)}: sequence {i}"


@pytest.mark.parametrize(("row", "dtype", "head_dim"), CASES)
def test_the_same_bits_from_run_to_run(row, dtype, head_dim):
    """Many blocks, so that their order differs between runs, with other work on the device in between."""
    lengths = torch.tensor([500 - 7 * i for i in range(16)], dtype=torch.int32, device="cuda")
    q, k, v = inputs(dtype, head_dim, 512, batch=16, heads=8)
    served = serves(row, dtype, head_dim, "padded", 512, "key_lengths")
    calls = []
    if serves(row, dtype, head_dim, "padded", 512):
        calls.append(lambda: tilerank.attention(q, k, v, variant=row.name, key_lengths=lengths if served else None))
    if serves(row, dtype, head_dim, "packed", 512):
        cu = torch.tensor([0, *accumulate(lengths.tolist())], dtype=torch.int32, device="cuda")
        flat = [x.transpose(1, 2).flatten(0, 1)[: cu[-1]].contiguous() for x in (q, k, v)]
        calls.append(lambda: tilerank.attention_varlen(*flat, cu, cu, 512, 512, variant=row.name))
    for run in calls:
        first = run()
        for _ in range(5):
            torch.randn(1 << 24, device="cuda").sort()
            assert torch.equal(run(), first)


# --- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "dtype", "head_dim"), CASES)
def test_views_as_transformers_passes_them(row, dtype, head_dim):
    """[B,H,S,D] views of [B,S,H,D] memory, alone and inside a fused projection: same numbers, answer in place."""
    padded_row(row, dtype, head_dim)
    fused = draw((3, 65, 3, HEADS, head_dim), dtype)
    q, k, v = (x.transpose(1, 2) for x in fused.unbind(2))
    out = check(row, dtype, (q, k, v))
    assert out.transpose(1, 2).is_contiguous()
    separate = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(tilerank.attention(*separate, variant=row.name), out)


@pytest.mark.parametrize(("row", "dtype", "head_dim"), CASES)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_offsets_that_break_16_byte_alignment(row, dtype, head_dim, offset):
    """Served right, or refused by name by the variant; `auto` serves them in any case."""
    padded_row(row, dtype, head_dim)
    q, k, v = inputs(dtype, head_dim, 65)
    expected = tilerank.attention(q, k, v, variant=row.name)

    def shifted(x):
        memory = torch.full((x.numel() + offset,), NAN, dtype=x.dtype, device="cuda")
        memory[offset:] = x.flatten()
        return memory[offset:].view(x.shape)

    def odd_rows(x):
        return torch.nn.functional.pad(x, (offset, 3), value=NAN)[..., offset : offset + head_dim]

    for view in (shifted, odd_rows):
        turned = [view(x) for x in (q, k, v)]
        out = tilerank.attention(*turned, variant=row.name)
        assert torch.equal(out, expected)
        reference.assert_close(tilerank.attention(*turned), q, k, v)


@pytest.mark.parametrize(("row", "dtype", "head_dim"), ONE_A_ROW)
def test_batch_above_65535(row, dtype, head_dim):
    q, k, v = inputs(dtype, head_dim, 2, batch=65_537, heads=1)
    check(row, dtype, (q, k, v))
    if "packed" in row.layouts:
        cu = torch.arange(0, 2 * 65_537 + 1, 2, dtype=torch.int32, device="cuda")
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        packed = tilerank.attention_varlen(*flat, cu, cu, 2, 2, variant=row.name)
        result = packed.view(65_537, 2, 1, head_dim).transpose(1, 2)
        reference.assert_close(result, q, k, v, lossy=is_lossy(row))


@pytest.mark.parametrize(("row", "dtype", "head_dim"), ONE_A_ROW)
def test_offsets_above_two_to_the_31(row, dtype, head_dim):
    """Strides past 2^31 elements, and a result of more than 2^31 elements."""
    padded_row(row, dtype, head_dim)
    dtype = next((x for x in row.dtypes if x != "fp32"), "fp32")  # half the memory where the row allows
    element = torch.empty(0, dtype=reference.DTYPES[dtype]).element_size()
    free, _ = torch.cuda.mem_get_info()
    if free < 2.6 * 2**31 * element:
        pytest.skip(f"needs {2.6 * 2**31 * element / 1e9:.0f} GB of free device memory, there are {free / 1e9:.0f}")
    torch.use_deterministic_algorithms(False)  # filling buffers of this size would be most of the test

    apart = 2**31 + 64
    memory = torch.empty(apart + 3 * 65 * head_dim, dtype=reference.DTYPES[dtype], device="cuda")
    views = [
        memory.as_strided((2, 1, 65, head_dim), (apart, head_dim, head_dim, 1), i * 65 * head_dim) for i in (0, 1, 2)
    ]
    for index, view in enumerate(views):
        view.copy_(draw(view.shape, dtype, index))
    check(row, dtype, views)

    tokens = 2**31 // head_dim + 65
    q = memory.resize_(tokens * head_dim).view(1, 1, tokens, head_dim).fill_(0.5)
    k, v = draw((1, 1, 1, head_dim), dtype, 5), draw((1, 1, 1, head_dim), dtype, 6)
    out = tilerank.attention(q, k, v, variant=row.name)
    # One key: every row is v, or the sum of its two terms.
    expected = out[0, 0, :1].clone() if row.products == "fp16x3" else v[0, 0]
    torch.testing.assert_close(expected, v[0, 0], rtol=2**-20, atol=0)
    for first in range(0, tokens, tokens // 8):
        part = out[0, 0, first : first + tokens // 8]
        assert torch.equal(part, expected.expand_as(part))


# --- streams, graphs, devices --------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "dtype", "head_dim"), ONE_A_ROW)
def test_runs_on_the_current_stream(row, dtype, head_dim):
    """On another stream, behind work that is still running there: a launch elsewhere would read NaN."""
    padded_row(row, dtype, head_dim)
    good = inputs(dtype, head_dim, 65)
    expected = tilerank.attention(*good, variant=row.name)
    late = [torch.full_like(x, NAN) for x in good]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for x, y in zip(late, good, strict=True):
            x.copy_(y)
        out = tilerank.attention(*late, variant=row.name)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("row", "dtype", "head_dim"), ONE_A_ROW)
def test_is_captured_in_a_graph(row, dtype, head_dim):
    masks = ["key_lengths"] if "key_lengths" in row.masks else []
    tensors = inputs(dtype, head_dim, 65)
    cu = torch.tensor([0, 33, 65], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([65, 33], dtype=torch.int32, device="cuda") if masks else None
    flat = [x[0].transpose(0, 1).contiguous() for x in tensors]

    def run():
        if "padded" in row.layouts:
            return tilerank.attention(*tensors, key_lengths=lengths, variant=row.name)
        return tilerank.attention_varlen(*flat, cu, cu, 65, 65, variant=row.name)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for index, x in enumerate((*tensors, *flat)):
        x.copy_(draw(x.shape, dtype, 10 + index))
    if masks:
        lengths.copy_(torch.tensor([1, 64]))
    cu[1] = 7
    captured.fill_(NAN)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, run())


def test_lengths_from_the_host_are_refused_during_capture(monkeypatch):
    q, k, v = inputs("fp32", 32, 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="cannot be captured"):
        tilerank.attention(q, k, v, key_lengths=[4, 2])


def test_runs_on_the_tensors_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    q, k, v = (x.to("cuda:1") for x in inputs("fp32", 32, 65))
    with torch.cuda.device(0):
        out = tilerank.attention(q, k, v)
    reference.assert_close(out, q, k, v)


# --- lengths on the device -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "dtype", "head_dim"), ONE_A_ROW)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_lengths_on_the_device_are_clamped_or_checked(row, dtype, head_dim, kind):
    if not serves(row, dtype, head_dim, "padded", 65, "key_lengths"):
        pytest.skip(f"{row.name} takes no key lengths")
    q, k, v = inputs(dtype, head_dim, 65, batch=4)
    wild = [2**31 - 1, -5, 66, 64] if kind == torch.int32 else [2**40, -(2**40), 2**32 + 3, 64]
    wrong = torch.tensor(wild, dtype=kind, device="cuda")
    right = [65, 0, 65, 64]
    found = tilerank.attention(q, k, v, key_lengths=wrong, variant=row.name)
    assert torch.equal(found, tilerank.attention(q, k, v, key_lengths=right, variant=row.name))
    with pytest.raises(ValueError, match=rf"key_lengths\[0\] is {wild[0]}; allowed: 0 to 65"):
        tilerank.attention(q, k, v, key_lengths=wrong, variant=row.name, check=True)


@pytest.mark.parametrize(("row", "dtype", "head_dim"), ONE_A_ROW)
def test_bounds_on_the_device_are_clamped_or_checked(row, dtype, head_dim):
    if not serves(row, dtype, head_dim, "packed", 9):
        pytest.skip(f"{row.name} takes no packed input")
    q, k, v = (draw((9, HEADS, head_dim), dtype, seed) for seed in (1, 2, 3))
    good = torch.tensor([0, 4, 9], dtype=torch.int32, device="cuda")
    for wild in ([0, 4, 2**31 - 1], [-7, 4, 9], [0, 40, 9], [0, 4, 2]):
        wrong = torch.tensor(wild, dtype=torch.int32, device="cuda")
        for bounds in ((wrong, good), (good, wrong), (wrong.long() * 2**20, good)):
            assert tilerank.attention_varlen(q, k, v, *bounds, 5, 5, variant=row.name).isfinite().all()
        with pytest.raises(ValueError, match=r"cu_seqlens_k|max_seqlen_k"):
            tilerank.attention_varlen(q, k, v, good, wrong, 5, 5, variant=row.name, check=True)
    # A sequence longer than announced is cut there; the rows beyond are zeros.
    short = tilerank.attention_varlen(q, k, v, good, good, 3, 5, variant=row.name)
    assert not short[3].any()
    assert not short[7:].any()


# --- auto ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", registry.DTYPES)
@pytest.mark.parametrize("head_dim", [1, 32, 33, 256])
def test_auto_always_has_an_answer(dtype, head_dim):
    q, k, v = inputs(dtype, head_dim, 33, 65, heads=4, kv_heads=2)
    for mask in (None, draw((65,), "fp32", 7) < 0.0, draw((33, 1), "fp32", 8)):
        for lengths in (None, [65, 0]):
            for causal in (False, True):
                arguments = {"mask": mask, "key_lengths": lengths, "causal": causal}
                reference.assert_close(tilerank.attention(q, k, v, **arguments), q, k, v, **arguments)


def test_refusals_before_any_launch():
    q, k, v = inputs("fp32", 32, 4)
    for wrong in ((q, k.cpu(), v), (q.cpu(), k, v), (q, k, v.half())):
        with pytest.raises(ValueError, match=r"is on|is torch"):
            tilerank.attention(*wrong)
    with pytest.raises(ValueError, match="'reference' does not serve this call: device is cuda"):
        tilerank.attention(q, k, v, variant="reference")
    with pytest.raises(ValueError, match=r"key_lengths\[1\] is 5"):
        tilerank.attention(q, k, v, key_lengths=[4, 5])
    torch.cuda.synchronize()
    reference.assert_close(tilerank.attention(q, k, v), q, k, v)


# --- as a torch operator -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", registry.DTYPES)
def test_opcheck(dtype):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(dtype, 32, 33))
    lengths = torch.tensor([33, 5], dtype=torch.int32, device="cuda")
    bias = torch.zeros(33, device="cuda")
    for options in ((None, None, False), (lengths, None, True), (None, bias, False)):
        torch.library.opcheck(torch.ops.tilerank.attention.default, (q, k, v, *options, 0.2, "auto", False))
    cu = torch.tensor([0, 30, 33], dtype=torch.int32, device="cuda")
    flat = [x[0].transpose(0, 1) for x in (q, k, v)]
    torch.library.opcheck(
        torch.ops.tilerank.attention_varlen.default, (*flat, cu, cu, 30, 30, False, 0.2, "auto", False)
    )


@pytest.mark.parametrize(("mode", "dtype"), [("default", "fp32"), ("reduce-overhead", "fp32"), ("default", "bf16")])
def test_compiles_without_a_graph_break(mode, dtype):
    """With Inductor, and inside the CUDA graphs that `reduce-overhead` makes."""
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()

    def layer(x, lengths, cu):
        q, k, v = (y.transpose(1, 2) for y in x.unflatten(-1, (3, 4, 32)).unbind(2))
        padded = tilerank.attention(q * 2, k, v, key_lengths=lengths).transpose(1, 2).flatten(2)
        flat = [y[0].transpose(0, 1) for y in (q, k, v)]
        packed = tilerank.attention_varlen(*flat, cu, cu, 33, 33).flatten(1)
        return torch.nn.functional.gelu(padded + packed)

    run = torch.compile(layer, fullgraph=True, mode=mode)
    cu = torch.tensor([0, 30, 33], dtype=torch.int32, device="cuda")
    for seed in range(4):  # the third call replays a recorded graph
        x, lengths = draw((2, 33, 384), dtype, seed), torch.tensor([33, 1 + seed], device="cuda")
        tolerance = 4 * torch.finfo(x.dtype).eps  # of the operators around it, which the compiler fuses
        assert torch.allclose(run(x, lengths, cu), layer(x, lengths, cu), atol=max(1e-5, tolerance), rtol=tolerance)


@pytest.mark.parametrize("dtype", registry.DTYPES)
def test_auto_launches_the_row_that_it_selects(dtype):
    q, k, v = inputs(dtype, 32, 65)
    request = registry.Request("cuda", device_sm("cuda"), dtype, 32, "padded", 65)
    chosen = registry.select(request, registry.attention_rows()).row
    tilerank.attention(q, k, v)
    seen = attention_time(lambda: tilerank.attention(q, k, v), OUR_OPERATOR)
    assert seen.calls == 1
    assert seen.seconds > 0
    assert any(f"tilerank::{chosen.name}::" in kernel for kernel in seen.kernels), seen.kernels
