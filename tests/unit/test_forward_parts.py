"""Which part of a forward pass a kernel belongs to, and what a part takes at least."""

import pytest

from tilerank.bench.floors import Rates
from tilerank.bench.forward_parts import (
    ATTENTION,
    BETWEEN,
    DOWN,
    EMBEDDINGS,
    LAST,
    OUT,
    PARTS,
    QKV,
    UP,
    Sizes,
    exclusive,
    floors,
    label,
    medians,
    parts_record,
)
from tilerank.bench.workloads import seed_workload
from tilerank.errors import TilerankError

RATES = Rates(hbm_bytes=4e12, exps=3.7e12, fp32_fmas=3e13, fp16_fmas=4e14, how={})


@pytest.mark.parametrize(
    "rest",
    [
        (OUT, UP, DOWN, QKV),
        (OUT, UP, UP, DOWN, QKV),
        (OUT, OUT, UP, DOWN, DOWN, QKV),
        (OUT, OUT, UP, UP, DOWN, DOWN, QKV),
    ],
)
def test_kernels_by_their_order(rest: tuple[str, ...]) -> None:
    layer = ("att::kernel", *rest)
    last = (*rest[:-1], "kv", "gather", "q", "arange")
    kernels = ["words", "gemm", *layer, *layer, "att::kernel", *last, "att::kernel", "gemm", "tanh", "gemm"]
    found = label(kernels, "att::")
    assert found[:2] == (EMBEDDINGS, QKV)
    assert found[2 : 2 + 2 * len(layer)] == (ATTENTION, *rest) * 2
    tail = found[2 + 2 * len(layer) :]
    assert tail == (ATTENTION, *rest[:-1], *[LAST] * 8)
    assert len(found) == len(kernels)


def test_whole_layers() -> None:
    layer = ("att::kernel", "layer")
    kernels = ["words", "gemm", *layer, *layer, *layer, "gather", "q", "warp_keys::kernel", "gemm", "tanh"]
    found = label(kernels, "att::")
    assert found == (EMBEDDINGS, QKV, *(ATTENTION, BETWEEN) * 3, *[LAST] * 5)
    sizes = Sizes(layers=6, width=384, wide=1536)
    apart = floors(seed_workload(), sizes, "fp16", RATES)
    least = floors(seed_workload(), sizes, "fp16", RATES, whole_layers=True)
    assert tuple(least) == tuple(dict.fromkeys(found))
    assert sum(least.values()) < sum(apart.values()), "what is wide need not move"
    assert least[BETWEEN] == pytest.approx(16830 * 384 * 384 * (5 * 9 + 4 * 3 + 2) / 4e14)


def test_another_order_is_refused() -> None:
    with pytest.raises(TilerankError, match="1 kernels are called 'att'"):
        label(["gemm", "att", "gemm"], "att")
    with pytest.raises(TilerankError, match="3 kernels stand between two attentions; known: 1, 4, 5, 6, 7"):
        label(["gemm", "att", *"abc", "att", *"abcd", "att"], "att")


def test_a_parts_kernels_are_added_up() -> None:
    """The kernels of a fused pass of three layers, by the names that a profiler gives them."""
    linear, norm = "void tilerank::resident_rows::kernel<__half, 6, {}>", "void tilerank::row_layernorm::kernel<__half>"
    attention = "void tilerank::warpgroups::kernel<__half, 32>(tilerank::AttentionArgs, float, bool)"
    layer = [
        (attention, 50e-6),
        (norm, 15e-6),
        (linear.format("true"), 30e-6),
        (norm, 31e-6),
        (linear.format("false"), 20e-6),
    ]
    first = [("void tilerank::warp_rows::kernel<__half, 2>", 10e-6), (linear.format("false"), 20e-6)]
    tail = [("gather", 2e-6), ("void tilerank::warp_keys::kernel<__half, 4>", 7e-6), ("nvjet_sm90", 3e-6)]
    record = parts_record([*first, *layer, *layer, *tail], "warpgroups::", dict.fromkeys(PARTS, 1e-6))
    assert record[QKV] == {"us": pytest.approx(40.0), "launches": 2, "floor_us": 1.0}
    assert record[ATTENTION] == {"us": pytest.approx(100.0), "launches": 2, "floor_us": 1.0}
    assert record[DOWN]["us"] == pytest.approx(62.0)
    assert record[LAST] == {"us": pytest.approx(32.0), "launches": 4, "floor_us": 1.0}, "keys and values are its own"
    assert set(record) == set(PARTS)


def test_time_that_two_kernels_share_counts_once() -> None:
    spans = [("b", 8.0, 15.0), ("a", 0.0, 10.0), ("c", 20.0, 21.0), ("d", 20.5, 20.75)]
    assert exclusive(spans) == [("a", 10.0), ("b", 5.0), ("c", 1.0), ("d", 0.0)]
    assert exclusive([]) == []


def test_one_call_of_several() -> None:
    calls = [("a", 1.0), ("b", 2.0), ("a", 9.0), ("b", 1.0), ("a", 2.0), ("b", 3.0)]
    assert medians(calls, 3) == [("a", 2.0), ("b", 2.0)]
    assert medians([], 3) == []
    for other in (calls[:-1], [*calls[:-1], ("c", 3.0)]):
        with pytest.raises(TilerankError, match="kernels in 3 calls: they are not the same in each"):
            medians(other, 3)


def test_floors() -> None:
    sizes = Sizes(layers=6, width=384, wide=1536)
    half, full = (floors(seed_workload(), sizes, precision, RATES) for precision in ("fp16", "fp32"))
    assert tuple(half) == PARTS
    # 16,830 tokens, 384 x 1,536 factors, 16 bit.
    assert half[UP] == pytest.approx(5 * max(16830 * 384 * 1536 / 4e14, 2 * (16830 * 1920 + 384 * 1536) / 4e12))
    assert half[OUT] == pytest.approx(5 * 2 * (16830 * 3 * 384 + 384**2) / 4e12), "bound by bytes"
    assert half[EMBEDDINGS] == pytest.approx(4 * 16830 * 384 / 4e12)
    for part in PARTS:
        assert 1.7 <= full[part] / half[part] <= 4.1, f"{part}: twice the bytes, up to three times the products"
