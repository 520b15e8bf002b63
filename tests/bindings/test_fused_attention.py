"""`tilerank.fused_attention` and `FusedAttentionLayer` on the CPU: results, layouts, refusals, and as an operator."""

from __future__ import annotations

import re

import pytest
import torch

import tilerank
from tests.kernels import block_reference
from tests.kernels.block_reference import exact, make_inputs
from tilerank.kernels import torch_block

DTYPES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""What one rounding of the result may be off by, relative to a result of about 1."""


def run(inputs, heads=3, head_dim=4, **options):
    weights = [inputs[name] for name in ("x", "wq", "wk", "wv", "wo", "gamma", "beta")]
    biases = {name: inputs[name] for name in ("bq", "bk", "bv", "bo") if name in inputs}
    return tilerank.fused_attention(*weights, heads, head_dim, **biases, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pre_ln", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_matches_float64(dtype, pre_ln, causal):
    inputs = make_inputs(2, 7, 20, 3, 4, dtype)
    for options in ({}, {"residual": inputs["residual"]}, {"key_lengths": [7, 3]}, {"scale": 0.3}):
        out = run(inputs, causal=causal, pre_ln=pre_ln, **options)
        expected = exact(inputs, 3, 4, causal=causal, pre_ln=pre_ln, **options)
        assert (out.shape, out.dtype) == (inputs["x"].shape, dtype)
        torch.testing.assert_close(out.double(), expected, atol=4 * DTYPES[dtype], rtol=2 * DTYPES[dtype])


def test_the_arguments_that_may_be_left_out_matter():
    inputs = make_inputs(2, 5, 12, 3, 4, torch.float32)
    whole = run(inputs)
    bare = {name: inputs[name] for name in ("x", "wq", "wk", "wv", "wo")} | {"gamma": None, "beta": None}
    torch.testing.assert_close(run(bare).double(), exact(bare, 3, 4), atol=1e-5, rtol=1e-5)
    for change in ({"causal": True}, {"pre_ln": False}, {"epsilon": 0.5}, {"scale": 0.1}, {"key_lengths": [5, 4]}):
        assert not torch.allclose(run(inputs, **change), whole), change
    for name in ("gamma", "beta", "bq", "bv", "bo"):
        assert not torch.allclose(run(inputs | {name: None}), whole), name


def test_weights_are_read_where_they_lie():
    """As rows of outputs, as rows of inputs (transposed views), and as parts of one matrix."""
    inputs = make_inputs(2, 5, 12, 3, 4, torch.float32)
    expected = run(inputs)
    weights = {name: inputs[name] for name in ("wq", "wk", "wv", "wo")}
    views = {name: weight.t().contiguous().t() for name, weight in weights.items()}
    assert torch.equal(run(inputs | views), expected)
    assert torch.equal(run(inputs | {"wq": views["wq"]}), expected)
    packed = torch.cat([weights[name] for name in ("wq", "wk", "wv")])
    assert torch.equal(run(inputs | dict(zip(("wq", "wk", "wv"), packed.chunk(3), strict=True))), expected)
    broadcast = inputs | {name: weight[:1].expand_as(weight) for name, weight in weights.items()}
    copied = broadcast | {name: broadcast[name].contiguous() for name in weights}
    assert torch.equal(run(broadcast), run(copied))
    assert torch.equal(run(broadcast | {"wq": copied["wq"].t().contiguous().t()}), run(copied))
    strided = torch.randn(2, 5, 24)[:, :, ::2]
    assert torch.equal(run(inputs | {"x": strided}), run(inputs | {"x": strided.contiguous()}))
    tokens_first = inputs["x"].transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(run(inputs | {"x": tokens_first}), expected)


def test_what_bulk_copies_cannot_read_is_copied_and_nothing_else():
    """Rows that begin at odd addresses, batches whose rows are not equally far from each other, and rows repeated."""
    x = torch.randn(2, 4, 16, dtype=torch.float16)
    padded = torch.randn(2, 4, 24, dtype=torch.float16)
    for tensor in (x, x[:1], padded[:, :, :16], padded[:, :, 8:], x[0], x[0, 0]):
        assert torch_block._aligned(tensor) is tensor
    longer = torch.randn(2, 6, 16, dtype=torch.float16)
    odd = torch.randn(2, 4, 17, dtype=torch.float16)
    for tensor in (longer[:, :4], x.transpose(0, 1), padded[:, :, 1:17], odd[:, :, :16], x[:, :1].expand(2, 4, 16)):
        copy = torch_block._aligned(tensor)
        assert copy is not tensor
        assert torch.equal(copy, tensor)
        assert copy.is_contiguous()


def test_padding_never_leaks():
    inputs = make_inputs(2, 6, 12, 3, 4, torch.float32)
    out = run(inputs, key_lengths=[6, 2])
    x = inputs["x"].clone()
    x[1, 2:] = float("nan")
    torch.testing.assert_close(run(inputs | {"x": x}, key_lengths=[6, 2])[1, :2], out[1, :2], rtol=0, atol=0)


def test_a_sequence_does_not_depend_on_the_others():
    inputs = make_inputs(3, 6, 12, 3, 4, torch.float32)
    together = run(inputs)
    for index in range(3):
        alone = run(inputs | {"x": inputs["x"][index : index + 1]})
        assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 12)}, "x has 2 dimensions; expected [B, N, C]"),
        ({"wq": torch.zeros(12, 13)}, "wq has shape (12, 13); expected (12, 12) for C = 12, 3 heads of 4"),
        ({"wo": torch.zeros(13, 12)}, "wo has shape (13, 12); expected (12, 12)"),
        ({"bq": torch.zeros(3)}, "bq has shape (3,); expected (12,)"),
        ({"gamma": torch.zeros(12).half()}, "gamma is torch.float16 but x is torch.float32; convert them to one dtype"),
        ({"x": torch.zeros(2, 5, 12).int()}, "x is torch.int32; served: torch.float32"),
        ({"x": torch.zeros(2, 5, 0)}, "x has no channels"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(change, message):
    inputs = make_inputs(2, 5, 12, 3, 4, torch.float32) | change
    with pytest.raises(ValueError, match=re.escape(message)):
        run(inputs)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"residual": torch.zeros(2, 4, 12)}, ValueError, "residual has shape (2, 4, 12); expected (2, 5, 12)"),
        ({"key_lengths": torch.tensor([5, 5], device="meta")}, ValueError, "key_lengths is on meta; expected the CPU"),
        ({"key_lengths": [5]}, ValueError, "key_lengths has shape (1,); expected (2,)"),
        ({"key_lengths": [5, 6]}, ValueError, "key_lengths[1] is 6; allowed: 0 to 5"),
        ({"epsilon": -1.0}, ValueError, "epsilon is -1.0; it must be finite and 0 or more"),
        ({"epsilon": "small"}, TypeError, "epsilon is 'small'; expected a number"),
        ({"scale": float("inf")}, ValueError, "scale is inf; it must be finite"),
        ({"heads": 0}, ValueError, "num_heads is 0; it must be at least 1"),
        ({"head_dim": 300}, ValueError, "head_dim is 300; served: 1 to 256"),
        ({"causal": 1}, TypeError, "causal is 1; expected True or False"),
        ({"variant": "fastest"}, ValueError, "no block variant is called 'fastest'; there are: reference"),
        ({"variant": "two_launches"}, ValueError, "variant 'two_launches' does not serve this call: device is cpu"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        run(make_inputs(2, 5, 12, 3, 4, torch.float32), **options)


def test_shapes_are_known_without_data():
    inputs = {name: tensor.to("meta") for name, tensor in make_inputs(2, 5, 12, 3, 4, torch.float16).items()}
    out = run(inputs)
    assert (out.device.type, out.shape, out.dtype) == ("meta", (2, 5, 12), torch.float16)


def test_a_gradient_is_refused_by_name():
    inputs = make_inputs(2, 5, 12, 3, 4, torch.float32)
    inputs["wk"].requires_grad_()
    with pytest.raises(NotImplementedError, match="wk requires a gradient, and no tilerank variant has a backward"):
        run(inputs)
    with torch.no_grad():
        run(inputs)
    layer = tilerank.FusedAttentionLayer(12, 3)
    with pytest.raises(NotImplementedError, match="requires a gradient"):
        layer(inputs["x"])


def test_nothing_to_do():
    for shape in ((0, 5, 12), (2, 0, 12)):
        assert run(make_inputs(2, 5, 12, 3, 4, torch.float32) | {"x": torch.zeros(shape)}).shape == shape


# --- as a module and an operator -----------------------------------------------------------------------------


@torch.no_grad()
def test_the_layer_is_the_block_of_its_modules():
    torch.manual_seed(0)
    layer = tilerank.FusedAttentionLayer(24, 3, causal=True, pre_ln=False, epsilon=1e-3)
    torch.nn.init.normal_(layer.norm.weight)
    x = torch.randn(2, 6, 24)
    torch.testing.assert_close(
        layer(x, key_lengths=[6, 4], residual=x),
        block_reference.unfused(layer, x, key_lengths=torch.tensor([6, 4]), residual=x),
        atol=1e-5,
        rtol=1e-5,
    )
    copy = tilerank.FusedAttentionLayer(24, 3, causal=True, pre_ln=False, epsilon=1e-3)
    copy.load_state_dict(layer.state_dict())
    assert torch.equal(copy(x), layer(x))
    assert "num_heads=3, head_dim=8, causal=True, pre_ln=False" in repr(layer)


def test_a_width_that_heads_do_not_divide_needs_a_head_dim():
    with pytest.raises(ValueError, match="width is 20; without head_dim it must be a multiple of num_heads, 3"):
        tilerank.FusedAttentionLayer(20, 3)
    layer = tilerank.FusedAttentionLayer(20, 3, head_dim=5, bias=False)
    with torch.no_grad():
        assert layer(torch.randn(1, 4, 20)).shape == (1, 4, 20)


@torch.no_grad()
def test_autocast_converts_every_tensor():
    layer = tilerank.FusedAttentionLayer(24, 3)
    x = torch.randn(2, 6, 24)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, residual=x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, layer.to(torch.bfloat16)(x.bfloat16(), residual=x.bfloat16()))


def opcheck_cases():
    inputs = make_inputs(2, 5, 12, 3, 4, torch.float32)
    names = ("x", "wq", "wk", "wv", "wo", "gamma", "beta", "bq", "bk", "bv", "bo", "residual")
    sizes = (3, 4, False, True, 1e-5, 0.5, "auto", False)
    yield "everything", (*(inputs[name] for name in names), torch.tensor([5, 3]), *sizes)
    yield "bare", (*(inputs[name] for name in names[:5]), *[None] * 8, *sizes)
    views = {name: inputs[name].t().contiguous().t() for name in ("wq", "wk", "wv", "wo")}
    yield "transposed", (*((inputs | views)[name] for name in names[:7]), *[None] * 6, *sizes)


@pytest.mark.parametrize(("name", "arguments"), opcheck_cases(), ids=lambda x: x if isinstance(x, str) else "")
def test_opcheck(name, arguments):
    torch.library.opcheck(torch.ops.tilerank.fused_attention.default, arguments)


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic):
    layer = tilerank.FusedAttentionLayer(24, 3)

    def encoder(x, lengths):
        return layer(torch.nn.functional.gelu(x), key_lengths=lengths, residual=x) * 2

    torch._dynamo.reset()
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (5, 8, 11):
        x, lengths = torch.randn(2, length, 24), torch.tensor([length, 2])
        torch.testing.assert_close(compiled(x, lengths), encoder(x, lengths))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x, lengths), encoder(x, lengths))
