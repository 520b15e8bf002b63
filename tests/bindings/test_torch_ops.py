"""`tilerank.attention` on the CPU: results, layouts, refusals, and how it behaves as a torch operator."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilerank
from tests.kernels import reference

DTYPES = list(reference.DTYPES.values())
NAN = float("nan")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill what torch.empty returns with NaN, so that a row nobody wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def inputs(shape=(2, 3, 5, 8), k_len=None, kv_heads=None, dtype=torch.float32, seed=0):
    batch, heads, q_len, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    keys = (batch, kv_heads or heads, q_len if k_len is None else k_len, head_dim)
    return tuple(torch.randn(size, generator=generator).to(dtype) for size in (shape, keys, keys))


def check(q, k, v, **arguments):
    out = tilerank.attention(q, k, v, **arguments)
    reference.assert_close(out, q, k, v, **arguments)
    return out


# --- results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65])
def test_matches_float64(dtype, length):
    check(*inputs((2, 2, length, 16), dtype=dtype))


@pytest.mark.parametrize("head_dim", [1, 3, 32, 80, 256])
def test_any_head_dim(head_dim):
    check(*inputs((1, 2, 7, head_dim)))


def test_cross_lengths_grouped_heads_and_scale():
    for q_len, k_len in ((3, 9), (9, 3)):
        for kv_heads in (1, 2, 6):
            check(*inputs((2, 6, q_len, 8), k_len=k_len, kv_heads=kv_heads), scale=0.3, causal=True)
    q, k, v = inputs()
    check(q, k, v, scale=0.0)
    check(q, k, v, scale=-0.5)
    assert not torch.equal(tilerank.attention(q, k, v, scale=0.3), tilerank.attention(q, k, v))


def test_causal_counts_from_the_first_key():
    q, k, v = inputs((1, 2, 4, 8), k_len=7)
    out = check(q, k, v, causal=True)
    assert torch.allclose(out[:, :, 0], v[:, :, 0])
    v[:, :, 4:] = NAN
    assert torch.equal(tilerank.attention(q, k, v, causal=True), out)


@pytest.mark.parametrize("form", ["list", "tuple", "numpy", "read-only numpy", "int32", "int64"])
def test_key_lengths_in_every_form(form):
    q, k, v = inputs((3, 2, 4, 8))
    values = [4, 1, 2]
    forms = {
        "list": values,
        "tuple": tuple(values),
        "numpy": np.array(values),
        "read-only numpy": np.broadcast_to(np.array(values), (2, 3))[0],
        "int32": torch.tensor(values, dtype=torch.int32),
        "int64": torch.tensor(values)[None].expand(2, -1).t()[:, 0],  # a strided view
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's about arrays that it may not write to
        out = tilerank.attention(q, k, v, key_lengths=forms[form])
    reference.assert_close(out, q, k, v, key_lengths=values)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (7,), (1, 7), (5, 1), (2, 1, 1, 7), (3, 5, 7), (2, 3, 5, 7), (2, 1, 5, 1)])
def test_masks_broadcast(dtype, shape):
    q, k, v = inputs((2, 3, 5, 8), k_len=7)
    generator = torch.Generator().manual_seed(1)
    seen = torch.rand(shape, generator=generator) < 0.7
    mask = (
        seen if dtype == torch.bool else torch.randn(shape, generator=generator).masked_fill(~seen, -math.inf).to(dtype)
    )
    check(q, k, v, mask=mask)
    check(q, k, v, mask=mask, key_lengths=[3, 7], causal=True)
    expanded = mask.expand(2, 3, 5, 7)
    assert torch.equal(tilerank.attention(q, k, v, mask=expanded), tilerank.attention(q, k, v, mask=mask))


def test_mask_matters():
    q, k, v = inputs()
    hidden = torch.ones(5, dtype=torch.bool)
    hidden[2] = False
    assert not torch.allclose(tilerank.attention(q, k, v, mask=hidden), tilerank.attention(q, k, v))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_property_any_call_matches_float64_and_nothing_hidden_leaks(data):
    """Random sizes, lengths, masks and layouts; NaN and infinities stand wherever the call must not look."""
    draw = data.draw
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    q_len, k_len, head_dim = draw(st.integers(1, 9)), draw(st.integers(1, 12)), draw(st.sampled_from([1, 4, 7, 32]))
    dtype = draw(st.sampled_from(DTYPES))
    q, k, v = inputs((batch, kv_heads * group, q_len, head_dim), k_len, kv_heads, dtype, draw(st.integers(0, 99)))
    arguments = {"causal": draw(st.booleans()), "scale": draw(st.sampled_from([None, 0.25, 1.5]))}
    if draw(st.booleans()):
        arguments["key_lengths"] = draw(st.lists(st.integers(0, k_len), min_size=batch, max_size=batch))
    kind = draw(st.sampled_from(["none", "bool", "float"]))
    if kind != "none":
        sizes = [draw(st.sampled_from([1, size])) for size in (batch, kv_heads * group, q_len, k_len)]
        bits = draw(st.lists(st.booleans(), min_size=math.prod(sizes), max_size=math.prod(sizes)))
        seen = torch.tensor(bits).view(sizes)
        arguments["mask"] = seen if kind == "bool" else torch.where(seen, 0.5, -math.inf).to(dtype)
    clean = tilerank.attention(q, k, v, **arguments)
    reference.assert_close(clean, q, k, v, **arguments)

    visible = reference.visible_keys(
        (batch, kv_heads * group, q_len, k_len),
        arguments.get("key_lengths"),
        arguments.get("mask"),
        arguments["causal"],
    )
    never = ~visible.view(batch, kv_heads, group * q_len, k_len).any(2)
    k[never] = draw(st.sampled_from([NAN, math.inf, -math.inf]))
    v[never] = draw(st.sampled_from([NAN, math.inf]))
    layout = draw(st.sampled_from(["tokens first", "gaps", "expanded"]))
    if layout == "tokens first":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "gaps":
        q, k, v = (torch.nn.functional.pad(x, (3, 2, 1, 1), value=NAN)[:, :, 1:-1, 3:-2] for x in (q, k, v))
    else:
        q, k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1)[:, :, 1] for x in (q, k, v))
    assert torch.equal(tilerank.attention(q, k, v, **arguments), clean)


# --- rows and sizes at the edge (CASES 1 and 2) --------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_with_nothing_to_attend_to_is_zeros(dtype):
    q, k, v = inputs((3, 2, 4, 8), dtype=dtype)
    boolean = torch.ones(3, 1, 4, 4, dtype=torch.bool)
    boolean[1, 0, 2] = False
    additive = torch.zeros(3, 1, 4, 4, dtype=dtype).masked_fill(~boolean, -math.inf)
    for mask in (boolean, additive):
        out = check(q, k, v, mask=mask)
        assert torch.equal(out[1, :, 2], torch.zeros(2, 8, dtype=dtype))
    out = check(q, k, v, key_lengths=[4, 0, 2])
    assert torch.equal(out[1], torch.zeros(2, 4, 8, dtype=dtype))
    k[1], v[1] = NAN, NAN
    assert torch.equal(tilerank.attention(q, k, v, key_lengths=[4, 0, 2]), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_at_the_smallest_finite_value_stays_finite(dtype):
    q, k, v = inputs((1, 2, 3, 8), dtype=dtype)
    mask = torch.full((3, 3), torch.finfo(dtype).min, dtype=dtype)
    out = tilerank.attention(q, k, v, mask=mask)
    assert out.isfinite().all()
    reference.assert_close(out, q, k, v, mask=mask)
    mask[0] = 0
    assert torch.equal(tilerank.attention(q, k, v, mask=mask)[:, :, 0], tilerank.attention(q, k, v)[:, :, 0])


def test_a_visible_nan_reaches_the_result():
    q, k, v = inputs()
    v[0, 0, 1, 2] = NAN
    out = tilerank.attention(q, k, v)
    assert out[0, 0, :, 2].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize(
    ("shape", "k_len"), [((0, 2, 3, 8), 3), ((2, 2, 0, 8), 3), ((2, 2, 0, 8), 0), ((0, 2, 0, 8), 0), ((1, 1, 1, 1), 1)]
)
def test_empty_and_tiny(shape, k_len):
    q, k, v = inputs(shape, k_len=k_len)
    for arguments in ({}, {"causal": True}, {"key_lengths": [k_len] * shape[0]}, {"mask": torch.ones(1, k_len).bool()}):
        check(q, k, v, **arguments)
    check(*inputs())  # the next call works


def test_queries_without_any_key_give_zeros():
    q, k, v = inputs((2, 2, 3, 8), k_len=0)
    assert torch.equal(tilerank.attention(q, k, v), torch.zeros(2, 2, 3, 8))
    assert torch.equal(tilerank.attention(q, k, v, key_lengths=[0, 0]), torch.zeros(2, 2, 3, 8))


# --- layouts -------------------------------------------------------------------------------------------------


def test_transformers_views_are_read_and_answered_in_place():
    """[B,H,S,D] views of [B,S,H,D] memory: transposing the answer back is free."""
    memory = [torch.randn(2, 5, 3, 8) for _ in range(3)]
    q, k, v = (x.transpose(1, 2) for x in memory)
    out = check(q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    assert tilerank.attention(*(x.contiguous() for x in (q, k, v))).is_contiguous()


def test_a_fused_projection_is_read_in_place():
    fused = torch.randn(2, 5, 3, 4, 8)  # [B, S, (q k v), H, D]
    q, k, v = (x.transpose(1, 2) for x in fused.unbind(2))
    assert torch.equal(check(q, k, v), tilerank.attention(*(x.clone() for x in (q, k, v))))


def test_strided_sliced_offset_and_expanded_inputs():
    q, k, v = inputs((2, 2, 6, 8))
    expected = tilerank.attention(q, k, v)

    def last_dimension_strided(x):
        return x.transpose(2, 3).contiguous().transpose(2, 3)

    def sliced(x):
        return torch.nn.functional.pad(x, (0, 0, 2, 1), value=NAN)[:, :, 2:-1]

    def odd_offset(x):
        return torch.cat([torch.full((3,), NAN), x.flatten()])[3:].view(x.shape)

    def every_second_token(x):
        return torch.stack([x, torch.full_like(x, NAN)], dim=3).flatten(2, 3)[:, :, ::2]

    for view in (last_dimension_strided, sliced, odd_offset, every_second_token):
        assert torch.equal(tilerank.attention(view(q), view(k), view(v)), expected), view.__name__
        assert torch.equal(tilerank.attention(q, view(k), v), expected), view.__name__

    shared = k[:1].expand(2, -1, -1, -1)
    assert torch.equal(tilerank.attention(q, shared, v), tilerank.attention(q, shared.clone(), v))
    same_feature = v[..., :1].expand(-1, -1, -1, 8)
    assert torch.equal(tilerank.attention(q, k, same_feature), tilerank.attention(q, k, same_feature.clone()))


def test_inputs_are_left_alone():
    q, k, v = inputs()
    lengths, mask = torch.tensor([9, -1], dtype=torch.int32).clamp(0, 5), torch.zeros(5, 5)
    before = [x.clone() for x in (q, k, v, lengths, mask)]
    tilerank.attention(q, k, v, key_lengths=lengths, mask=mask)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, lengths, mask), before, strict=True))


def test_a_result_does_not_depend_on_its_neighbours():
    q, k, v = inputs((4, 2, 6, 8))
    lengths = [6, 3, 1, 5]
    together = tilerank.attention(q, k, v, key_lengths=lengths)
    for index, length in enumerate(lengths):
        alone = tilerank.attention(q[index, None], k[index, None, :, :length], v[index, None, :, :length])
        assert torch.equal(together[index, None], alone)
    order = [2, 0, 3, 1]
    shuffled = tilerank.attention(q[order], k[order], v[order], key_lengths=[lengths[i] for i in order])
    assert torch.equal(shuffled, together[order])


# --- refusals (CASES 3) --------------------------------------------------------------------------------------

Q = torch.zeros(2, 4, 5, 8)
K = torch.zeros(2, 2, 6, 8)
REFUSED = {
    "q is not a tensor": (([1.0], K, K), {}, TypeError, "q is a list"),
    "three dimensions": ((Q[0], K, K), {}, ValueError, "q has 3 dimensions"),
    "batches differ": ((Q, K[:1], K[:1]), {}, ValueError, "batch 1.*batch 2|batch 2.*batch 1"),
    "k and v lengths differ": ((Q, K, K[:, :, :5]), {}, ValueError, r"\(2, 2, 6, 8\).*\(2, 2, 5, 8\)"),
    "k and v heads differ": ((Q, K, K[:, :1]), {}, ValueError, r"\(2, 2, 6, 8\).*\(2, 1, 6, 8\)"),
    "head dims differ": ((Q, K[..., :4], K[..., :4]), {}, ValueError, "head dimension 4.*8|8.*4"),
    "value head dim differs": ((Q, K, K[..., :4]), {}, ValueError, r"\(2, 2, 6, 4\)"),
    "heads not a multiple": ((Q[:, :3], K, K), {}, ValueError, "3 heads.*multiple.*2"),
    "no head dimension": ((Q[..., :0], K[..., :0], K[..., :0]), {}, ValueError, "head dimension 0.*1 to 256"),
    "head dim too large": (
        (torch.zeros(1, 1, 1, 257),) * 3,
        {},
        ValueError,
        "head dimension 257.*1 to 256",
    ),
    "mixed dtypes": ((Q, K.half(), K.half()), {}, ValueError, "k is torch.float16.*q is torch.float32"),
    "mixed k and v": ((Q, K, K.bfloat16()), {}, ValueError, "v is torch.bfloat16.*q is torch.float32"),
    "float64": ((Q.double(), K.double(), K.double()), {}, ValueError, "torch.float64.*float32.*float16.*bfloat16"),
    "integers": ((Q.int(), K.int(), K.int()), {}, ValueError, "torch.int32.*float32"),
    "another device": ((Q, K.to("meta"), K), {}, ValueError, "k is on meta.*q is on cpu"),
    "lengths on another device": (
        (Q, K, K),
        {"key_lengths": torch.tensor([1, 2], device="meta")},
        ValueError,
        "key_lengths is on meta; expected the CPU or cpu",
    ),
    "length above the tensor": ((Q, K, K), {"key_lengths": [7, 1]}, ValueError, r"key_lengths\[0\] is 7.*0 to 6"),
    "negative length": ((Q, K, K), {"key_lengths": [3, -1]}, ValueError, r"key_lengths\[1\] is -1.*0 to 6"),
    "a length that wraps": ((Q, K, K), {"key_lengths": [2**32 + 3, 1]}, ValueError, r"key_lengths\[0\] is 4294967299"),
    "tensor length above": ((Q, K, K), {"key_lengths": torch.tensor([6, 8])}, ValueError, r"key_lengths\[1\] is 8"),
    "too few lengths": ((Q, K, K), {"key_lengths": [3]}, ValueError, r"key_lengths has shape \(1,\).*\(2,\)"),
    "no lengths": ((Q, K, K), {"key_lengths": []}, ValueError, r"key_lengths has shape \(0,\)"),
    "lengths in a matrix": ((Q, K, K), {"key_lengths": torch.ones(2, 1).int()}, ValueError, r"shape \(2, 1\)"),
    "one number for lengths": ((Q, K, K), {"key_lengths": 3}, TypeError, "key_lengths is 3.*sequence"),
    "float lengths": ((Q, K, K), {"key_lengths": torch.tensor([1.0, 2.0])}, TypeError, "key_lengths.*torch.float32"),
    "float in the list": ((Q, K, K), {"key_lengths": [1.5, 2]}, TypeError, "key_lengths"),
    "boolean lengths": ((Q, K, K), {"key_lengths": [True, False]}, TypeError, "key_lengths.*torch.bool"),
    "mask of the wrong size": (
        (Q, K, K),
        {"mask": torch.ones(2, 1, 5, 5).bool()},
        ValueError,
        r"mask has shape \(2, 1, 5, 5\).*\(2, 4, 5, 6\)",
    ),
    "mask with five dimensions": ((Q, K, K), {"mask": torch.ones(1, 1, 1, 5, 6)}, ValueError, "mask has shape"),
    "integer mask": ((Q, K, K), {"mask": torch.ones(5, 6).int()}, ValueError, "mask is torch.int32.*bool"),
    "float64 mask": ((Q, K, K), {"mask": torch.ones(5, 6).double()}, ValueError, "mask is torch.float64"),
    "mask on another device": ((Q, K, K), {"mask": torch.ones(5, 6, device="meta")}, ValueError, "mask is on meta"),
    "mask is a list": ((Q, K, K), {"mask": [[True]]}, TypeError, "mask is a list"),
    "length beyond 64 bits": ((Q, K, K), {"key_lengths": [2**70, 2]}, ValueError, f"key_lengths holds {2**70}"),
    "causal is text": ((Q, K, K), {"causal": "no"}, TypeError, "causal is 'no'.*True or False"),
    "check is a number": ((Q, K, K), {"check": 1}, TypeError, "check is 1.*True or False"),
    "no variant": ((Q, K, K), {"variant": None}, TypeError, "variant is None.*auto"),
    "lengths are bytes": ((Q, K, K), {"key_lengths": b"ab"}, TypeError, "key_lengths is b'ab'"),
    "lengths are one number": ((Q, K, K), {"key_lengths": np.array(3)}, TypeError, r"key_lengths is array\(3\)"),
    "scale is text": ((Q, K, K), {"scale": "0.5"}, TypeError, "scale is '0.5'; expected a number"),
    "scale is a truth value": ((Q, K, K), {"scale": True}, TypeError, "scale is True"),
    "scale is a list": ((Q, K, K), {"scale": [0.5]}, TypeError, r"scale is \[0.5\]"),
    "scale beyond float32": ((Q, K, K), {"scale": 1e39}, ValueError, "scale is 1e\\+39.*float32"),
    "scale beyond every float": ((Q, K, K), {"scale": 10**400}, ValueError, "scale is 1000.*float32"),
    "infinite scale": ((Q, K, K), {"scale": math.inf}, ValueError, "scale is inf"),
    "NaN scale": ((Q, K, K), {"scale": NAN}, ValueError, "scale is nan"),
    "unknown variant": ((Q, K, K), {"variant": "fastest"}, ValueError, "fastest.*reference"),
    "a CUDA variant on the CPU": ((Q, K, K), {"variant": "naive"}, ValueError, "naive.*cuda"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_value(case):
    tensors, arguments, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        tilerank.attention(*tensors, **arguments)
    check(*inputs())  # nothing surfaces in the next, innocent call


def test_named_reference_equals_auto_on_the_cpu():
    q, k, v = inputs()
    assert torch.equal(tilerank.attention(q, k, v, variant="reference"), tilerank.attention(q, k, v))


def test_gradients_are_refused_only_where_they_would_be_recorded():
    q, k, v = inputs()
    expected = tilerank.attention(q, k, v)
    for index in range(3):
        tensors = [q, k, v]
        tensors[index] = tensors[index].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=r"gradient.*no_grad"):
            tilerank.attention(*tensors)
        with torch.no_grad():
            assert torch.equal(tilerank.attention(*tensors), expected)
        with torch.inference_mode():
            assert torch.equal(tilerank.attention(*tensors), expected)
    with pytest.raises(NotImplementedError, match="mask"):
        tilerank.attention(q, k, v, mask=torch.zeros(5, 5, requires_grad=True))


def test_the_bare_operator_refuses_gradients():
    q, k, v = inputs()
    arguments = (None, None, False, 0.3, "auto", False)
    with pytest.raises(NotImplementedError, match=r"q requires a gradient.*no_grad"):
        torch.ops.tilerank.attention(q.clone().requires_grad_(), k, v, *arguments)
    with pytest.raises(NotImplementedError, match=r"mask requires a gradient.*no_grad"):
        torch.ops.tilerank.attention(q, k, v, None, torch.zeros(5, 5, requires_grad=True), *arguments[2:])
    with torch.no_grad():
        torch.ops.tilerank.attention(q.clone().requires_grad_(), k, v, *arguments)


def test_forward_mode_tangents_are_refused():
    q, k, v = inputs()
    with pytest.raises(NotImplementedError, match="k carries a tangent"):
        torch.func.jvp(lambda x: tilerank.attention(q, x, v), (k,), (k,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, v)
        with torch.no_grad(), pytest.raises(NotImplementedError, match="v carries a tangent"):
            tilerank.attention(q, k, dual)
        with pytest.raises(NotImplementedError, match="v carries a tangent"):
            torch.ops.tilerank.attention(q, k, dual, None, None, False, 0.3, "auto", False)
        check(q, k, v)


# --- as a torch operator -------------------------------------------------------------------------------------


def opcheck_cases():
    q, k, v = inputs((2, 4, 5, 8), k_len=6, kv_heads=2)
    token_major = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    yield "plain", (q, k, v, None, None, False, 0.3, "auto", False)
    yield "token major", (*token_major, None, None, True, 0.3, "reference", False)
    yield "lengths", (q, k, v, torch.tensor([6, 2], dtype=torch.int32), None, False, 0.3, "auto", True)
    yield "mask", (q, k, v, None, torch.ones(5, 6).bool(), False, 0.3, "auto", False)
    yield "half", (*(x.half() for x in (q, k, v)), None, torch.zeros(2, 1, 1, 6).half(), False, 0.3, "auto", False)
    yield "empty", (q[:, :, :0], k, v, None, None, False, 0.3, "auto", False)
    yield "no keys", (q, k[:, :, :0], v[:, :, :0], None, None, False, 0.3, "auto", False)


@pytest.mark.parametrize(("name", "arguments"), opcheck_cases(), ids=lambda x: x if isinstance(x, str) else "")
def test_opcheck(name, arguments):
    torch.library.opcheck(torch.ops.tilerank.attention.default, arguments)


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic):
    def layer(x, lengths, mask):
        q, k, v = x.unflatten(-1, (3, 4, 8)).unbind(2)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        out = tilerank.attention(q * 2, k, v, key_lengths=lengths, mask=mask)
        return out.transpose(1, 2).flatten(2) + 1

    run = compiled(layer, dynamic=dynamic)
    for length in (5, 9, 12):
        x = torch.randn(2, length, 96)
        lengths, mask = torch.tensor([length, 2]), torch.randn(length)
        assert torch.allclose(run(x, lengths, mask), layer(x, lengths, mask))
    with pytest.raises(ValueError, match=r"key_lengths\[1\] is 99"):
        run(x, torch.tensor([1, 99]), mask)


def test_compiles_with_lengths_from_the_host():
    q, k, v = inputs()
    run = compiled(lambda q, k, v: tilerank.attention(q, k, v, key_lengths=[5, 2], causal=True))
    assert torch.equal(run(q, k, v), tilerank.attention(q, k, v, key_lengths=[5, 2], causal=True))


def test_fake_kernel_agrees_in_shape_and_strides():
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = inputs((2, 4, 5, 8), k_len=6, kv_heads=2)
    for view in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x[:, :, ::2]):
        real = tilerank.attention(view(q), view(k), view(v))
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(view(x)) for x in (q, k, v)]
        with mode:
            fake = tilerank.attention(*fakes)
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_many_threads_at_once():
    from concurrent.futures import ThreadPoolExecutor

    cases = [inputs(seed=seed) for seed in range(16)]
    expected = [tilerank.attention(*case) for case in cases]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: tilerank.attention(*case), cases))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
