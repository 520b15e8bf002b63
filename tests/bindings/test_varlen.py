"""`tilerank.attention_varlen` on the CPU: sequences packed one after another."""

from __future__ import annotations

from itertools import accumulate

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


def cu(lengths):
    return [0, *accumulate(lengths)]


def packed(q_lengths, k_lengths=None, heads=4, kv_heads=2, head_dim=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k_lengths = q_lengths if k_lengths is None else k_lengths
    sizes = [(sum(q_lengths), heads, head_dim), *[(sum(k_lengths), kv_heads, head_dim)] * 2]
    q, k, v = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return q, k, v, cu(q_lengths), cu(k_lengths), max([0, *q_lengths]), max([0, *k_lengths])


def check(call, **arguments):
    out = tilerank.attention_varlen(*call, **arguments)
    reference.assert_close_varlen(out, *call[:5], **arguments)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_matches_float64(dtype, causal):
    check(packed([5, 1, 33, 64, 7], dtype=dtype), causal=causal)
    check(packed([5, 3, 2], [2, 3, 9], dtype=dtype), causal=causal, scale=0.2)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_property_each_sequence_scores_as_it_does_alone(data):
    """Random lengths (zeros included), layouts and NaN in all memory that belongs to no sequence."""
    draw = data.draw
    count = draw(st.integers(0, 4))
    q_lengths = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    k_lengths = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    heads = draw(st.sampled_from([(1, 1), (2, 1), (6, 2)]))
    dtype, causal = draw(st.sampled_from(DTYPES)), draw(st.booleans())
    call = packed(q_lengths, k_lengths, *heads, draw(st.sampled_from([1, 7, 32])), dtype, draw(st.integers(0, 99)))
    out = check(call, causal=causal)

    q, k, v = (torch.nn.functional.pad(x, (2, 1, 1, 0, 0, 3), value=NAN)[:, 1:, 2:-1] for x in call[:3])
    forms = [
        torch.tensor(call[3]),
        torch.tensor(call[3], dtype=torch.int32),
        np.array(call[3]),
        torch.tensor([x for x in call[3] for _ in range(2)])[::2],
    ]
    again = tilerank.attention_varlen(q, k, v, draw(st.sampled_from(forms)), *call[4:], causal=causal)
    assert torch.equal(again[: len(out)], out)
    assert torch.equal(again[len(out) :], torch.zeros_like(again[len(out) :]))

    for index in range(count):
        rows, keys = slice(*call[3][index : index + 2]), slice(*call[4][index : index + 2])
        alone = tilerank.attention(
            *(x.transpose(0, 1)[None] for x in (call[0][rows], call[1][keys], call[2][keys])), causal=causal
        )
        assert torch.equal(out[rows], alone[0].transpose(0, 1))


def test_empty():
    check(packed([]))
    check(packed([0, 0]))
    check(packed([3, 0, 2]))
    out = check(packed([3, 2], [0, 4]))
    assert torch.equal(out[:3], torch.zeros(3, 4, 8))


def test_a_sequence_without_keys_is_zeros_and_the_others_are_right():
    out = check(packed([2, 2, 2], [3, 0, 1]))
    assert torch.equal(out[2:4], torch.zeros(2, 4, 8))


def test_maximum_above_the_longest_is_fine():
    call = packed([5, 3])
    expected = tilerank.attention_varlen(*call)
    for maxima in ((50, 60), (2**62, 2**63 - 1), (np.int32(5), np.uint64(6))):
        assert torch.equal(tilerank.attention_varlen(*call[:5], *maxima), expected)


def test_a_fused_projection_is_read_in_place():
    fused = torch.randn(9, 3, 4, 8)  # [T, (q k v), H, D]
    q, k, v = fused.unbind(1)
    call = (q, k, v, [0, 4, 9], [0, 4, 9], 5, 5)
    out = check(call)
    assert out.is_contiguous()
    assert torch.equal(out, tilerank.attention_varlen(*(x.clone() for x in (q, k, v)), *call[3:]))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(tilerank.attention_varlen(*turned, *call[3:]), out)


Q, K = torch.zeros(7, 4, 8), torch.zeros(9, 2, 8)
GOOD = {"cu_seqlens_q": [0, 3, 7], "cu_seqlens_k": [0, 4, 9], "max_seqlen_q": 4, "max_seqlen_k": 5}
REFUSED = {
    "padded tensors": ({"q": Q[None]}, ValueError, "q has 4 dimensions"),
    "k and v differ": ({"v": K[:8]}, ValueError, r"\(9, 2, 8\).*\(8, 2, 8\)"),
    "heads": ({"q": Q[:, :3]}, ValueError, "3 heads.*multiple.*2"),
    "head dims": ({"q": Q[..., :4]}, ValueError, "head dimension"),
    "dtypes": ({"q": Q.half()}, ValueError, "k is torch.float32.*q is torch.float16"),
    "bounds elsewhere": (
        {"cu_seqlens_k": torch.tensor([0, 4, 9], device="meta")},
        ValueError,
        "cu_seqlens_k is on meta; expected the CPU or cpu",
    ),
    "starts late": ({"cu_seqlens_q": [1, 3, 7]}, ValueError, r"cu_seqlens_q\[0\] is 1.*0"),
    "falls": ({"cu_seqlens_q": [0, 3, 2]}, ValueError, r"cu_seqlens_q\[2\] is 2; allowed: 3"),
    "ends above": ({"cu_seqlens_k": [0, 4, 10]}, ValueError, r"cu_seqlens_k\[2\] is 10.*9"),
    "negative": ({"cu_seqlens_k": [0, -1, 9]}, ValueError, r"cu_seqlens_k\[1\] is -1"),
    "wraps": ({"cu_seqlens_k": [0, 2**32, 2**32 + 9]}, ValueError, "4294967296"),
    "counts differ": ({"cu_seqlens_k": [0, 9]}, ValueError, r"cu_seqlens_q has 3.*cu_seqlens_k has 2"),
    "nothing": ({"cu_seqlens_q": [], "cu_seqlens_k": []}, ValueError, "cu_seqlens_q has shape"),
    "matrix": ({"cu_seqlens_q": torch.zeros(1, 3).int()}, ValueError, r"cu_seqlens_q has shape \(1, 3\)"),
    "floats": ({"cu_seqlens_q": [0.0, 3.0, 7.0]}, TypeError, "cu_seqlens_q"),
    "maximum too small": ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q is 3.*4"),
    "key maximum too small": ({"max_seqlen_k": 4}, ValueError, "max_seqlen_k is 4.*5"),
    "negative maximum": ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k is -1"),
    "maximum is a float": ({"max_seqlen_k": 5.0}, TypeError, "max_seqlen_k"),
    "maximum is a tensor": ({"max_seqlen_k": torch.tensor(5)}, TypeError, "max_seqlen_k"),
    "maximum is a truth value": ({"max_seqlen_q": True}, TypeError, "max_seqlen_q is True"),
    "maximum beyond 64 bits": ({"max_seqlen_q": 2**70}, ValueError, f"max_seqlen_q is {2**70}"),
    "maximum below 64 bits": ({"max_seqlen_q": -(2**70)}, ValueError, f"max_seqlen_q is -{2**70}"),
    "causal is text": ({"causal": "no"}, TypeError, "causal is 'no'"),
    "no variant": ({"variant": None}, TypeError, "variant is None"),
    "scale": ({"scale": float("inf")}, ValueError, "scale is inf"),
    "variant": ({"variant": "fastest"}, ValueError, "fastest"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_value(case):
    change, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        tilerank.attention_varlen(**{"q": Q, "k": K, "v": K, **GOOD, **change})
    check(packed([2, 3]))


def test_gradients_are_refused():
    call = packed([3, 2])
    with pytest.raises(NotImplementedError, match="gradient"):
        tilerank.attention_varlen(call[0].requires_grad_(), *call[1:])
    bounds = (torch.tensor(call[3]), torch.tensor(call[4]))
    with pytest.raises(NotImplementedError, match="gradient"):
        torch.ops.tilerank.attention_varlen(*call[:3], *bounds, 3, 3, False, 0.3, "auto", False)
    with torch.no_grad():
        check(call)
    with pytest.raises(NotImplementedError, match="v carries a tangent"):
        torch.func.jvp(lambda v: tilerank.attention_varlen(call[0].detach(), call[1], v, *call[3:]), *[(call[2],)] * 2)


def opcheck_cases():
    for lengths in ([5, 1, 7], [4, 0], []):
        q, k, v, cu_q, cu_k, max_q, max_k = packed(lengths)
        bounds = (torch.tensor(cu_q, dtype=torch.int32), torch.tensor(cu_k))
        yield (q, k, v, *bounds, max_q, max_k, bool(lengths), 0.3, "auto", False)


@pytest.mark.parametrize("arguments", opcheck_cases())
def test_opcheck(arguments):
    torch.library.opcheck(torch.ops.tilerank.attention_varlen.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic):
    torch._dynamo.reset()

    def layer(x, bounds, longest):
        q, k, v = x.unflatten(-1, (3, 4, 8)).unbind(1)
        return tilerank.attention_varlen(q, k, v, bounds, bounds, longest, longest).flatten(1) * 2

    run = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in ([5, 2], [3, 9], [8, 8]):
        x, bounds = torch.randn(sum(lengths), 96), torch.tensor(cu(lengths), dtype=torch.int32)
        assert torch.allclose(run(x, bounds, max(lengths)), layer(x, bounds, max(lengths)))


def test_only_bounds_that_lie_ready_let_a_call_overlap(monkeypatch):
    """Others are converted in front of the call."""
    from tilerank.kernels import torch_ops

    seen = []
    monkeypatch.setattr(torch_ops, "_call", lambda row, params, device: seen.append(params.overlap))
    q, k, v, *bounds = (torch.tensor(each) if isinstance(each, list) else each for each in packed([2, 3]))
    for kind, options in ((torch.int32, {}), (torch.int32, {"overlap": True}), (torch.int64, {"overlap": True})):
        call = (q, k, v, *(each.to(kind) for each in bounds[:2]), *bounds[2:])
        torch_ops._attention_varlen(*call, False, 1.0, "reference", False, **options)
    assert seen == [0, 1, 0]
