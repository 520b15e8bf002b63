"""The C interface on the reference: what attention means, what is refused, and which library is loaded."""

from __future__ import annotations

import dataclasses
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from kernels import abi

from tilerank.errors import TilerankError
from tilerank.kernels import build, library, registry
from tilerank.kernels.library import KernelError

GUARD = np.float32(-77.25)
"""What memory holds that no call may write."""


@pytest.fixture(scope="module")
def cpu() -> library.Library:
    return library.load(build.Target("cpu"))


def draw(seed: int, *shape: int, dtype: str = "fp32") -> np.ndarray:
    """Seeded N(0,1) values in one of the library's element types."""
    values = np.random.default_rng(seed).standard_normal(shape)
    if dtype == "bf16":
        return abi.to_bits(abi.round_to_bf16(values))
    return values.astype({"fp32": np.float32, "fp16": np.float16}[dtype])


# Half a unit in the last place of the result's type, relative: the reference rounds once, from double.
ROUNDING = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}


def assert_rounded_once(out: np.ndarray, expected: np.ndarray) -> None:
    relative = ROUNDING[abi.DTYPES[out.dtype]]
    error = np.abs(abi.values_of(out) - expected)
    assert np.isfinite(abi.values_of(out)).all()
    assert (error <= relative * np.abs(expected) * (1 + 1e-9) + 2.0**-25).all(), (
        error.max()
    )  # 2^-25: half subnormal fp16


# ---- Values ----


@pytest.mark.parametrize("dtype", registry.DTYPES)
@pytest.mark.parametrize("lengths_dtype", [np.int32, np.int64])
def test_padded_with_key_lengths(cpu: library.Library, dtype: str, lengths_dtype: type) -> None:
    q, k, v = draw(1, 4, 4, 3, 5, dtype=dtype), draw(2, 4, 2, 7, 5, dtype=dtype), draw(3, 4, 2, 7, 5, dtype=dtype)
    lengths = np.array([7, 1, 0, 4], lengths_dtype)
    out = draw(9, 4, 4, 3, 5, dtype=dtype)
    cpu.run("reference", abi.padded_params(q, k, v, out, key_lengths=lengths))
    assert_rounded_once(out, abi.expected_rows(q, k, v, lambda b, h, i, j: j < lengths[b]))
    assert not abi.values_of(out[2]).any(), "a sequence without keys gives zeros"


@pytest.mark.parametrize("mask_dtype", ["bool", "fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (2, 1, 1, 6), (1, 1, 4, 6), (1, 3, 1, 1)])
def test_masks_of_every_type_and_broadcast(cpu: library.Library, mask_dtype: str, shape: tuple[int, ...]) -> None:
    q, k, v = draw(1, 2, 3, 4, 8), draw(2, 2, 3, 6, 8), draw(3, 2, 3, 6, 8)
    visible = np.random.default_rng(5).random(shape) < 0.6
    visible[..., 0] = True  # rows without any key have a test of their own
    mask, bias = visible, np.where(visible, 0.0, -np.inf)
    if mask_dtype != "bool":
        bias = np.where(visible, abi.round_to_bf16(np.random.default_rng(6).standard_normal(shape)), -np.inf)
        mask = (
            abi.to_bits(bias)
            if mask_dtype == "bf16"
            else bias.astype({"fp32": np.float32, "fp16": np.float16}[mask_dtype])
        )
    seen, wide = (np.broadcast_to(array, (2, 3, 4, 6)) for array in (visible, bias))
    out = np.full(q.shape, GUARD)
    cpu.run("reference", abi.padded_params(q, k, v, out, mask=mask))
    assert_rounded_once(out, abi.expected_rows(q, k, v, lambda *at: bool(seen[at]), lambda *at: float(wide[at])))


def test_causal_counts_from_the_first_key(cpu: library.Library) -> None:
    q, k, v = draw(1, 1, 2, 5, 4), draw(2, 1, 2, 3, 4), draw(3, 1, 2, 3, 4)
    lengths = np.array([2], np.int32)
    out = np.empty_like(q)
    cpu.run("reference", abi.padded_params(q, k, v, out, causal=True, key_lengths=lengths))
    assert_rounded_once(out, abi.expected_rows(q, k, v, lambda b, h, i, j: j <= i and j < 2))


def test_every_restriction_at_once(cpu: library.Library) -> None:
    q, k, v = draw(1, 2, 2, 6, 4), draw(2, 2, 1, 6, 4), draw(3, 2, 1, 6, 4)
    lengths = np.array([5, 3], np.int64)
    mask = np.random.default_rng(4).random((2, 2, 6, 6)) < 0.7
    out = np.empty_like(q)
    params = abi.padded_params(q, k, v, out, causal=True, key_lengths=lengths, mask=mask, scale=-0.3)
    cpu.run("reference", params)
    sees = lambda b, h, i, j: j < lengths[b] and j <= i and bool(mask[b, h, i, j])  # noqa: E731
    assert_rounded_once(out, abi.expected_rows(q, k, v, sees, scale=-0.3))


def test_strided_views_are_read_and_written_in_place(cpu: library.Library) -> None:
    """[B, S, H, D] memory handed over as [B, H, S, D], as transformers does; k broadcast over the batch."""
    q, v = draw(1, 2, 5, 3, 4).transpose(0, 2, 1, 3), draw(3, 2, 5, 3, 4).transpose(0, 2, 1, 3)
    k = np.broadcast_to(draw(2, 1, 3, 5, 4), (2, 3, 5, 4))
    memory = np.full((2, 5, 3, 6), GUARD)
    out = memory.transpose(0, 2, 1, 3)[..., :4]
    cpu.run("reference", abi.padded_params(q, k, v, out))
    assert_rounded_once(out, abi.expected_rows(q, k, v, lambda *at: True))
    assert (memory[..., 4:] == GUARD).all(), "nothing outside the rows of out is written"


@pytest.mark.parametrize("dtype", registry.DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_equals_each_sequence_alone(cpu: library.Library, dtype: str, causal: bool) -> None:
    cu_q, cu_k = np.array([0, 3, 3, 4, 9], np.int32), np.array([0, 2, 6, 6, 13], np.int32)
    q, k, v = draw(1, 9, 4, 6, dtype=dtype), draw(2, 13, 2, 6, dtype=dtype), draw(3, 13, 2, 6, dtype=dtype)
    out = draw(9, 9, 4, 6, dtype=dtype)
    cpu.run("reference", abi.packed_params(q, k, v, out, cu_q, cu_k, causal=causal))
    for s in range(4):
        rows, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        alone = [x.transpose(1, 0, 2)[None] for x in (q[rows], k[keys], v[keys])]
        expected = abi.expected_rows(*alone, lambda b, h, i, j: j <= i or not causal)
        assert_rounded_once(out[rows].transpose(1, 0, 2)[None], expected)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_every_16_bit_number_passes_through_unchanged(cpu: library.Library, dtype: str) -> None:
    """With one key the weight is 1: the result is v itself, whatever it holds (a negative zero as 0, from the sum)."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    v = (bits if dtype == "bf16" else bits.view(np.float16)).reshape(256, 1, 1, 256)
    q = k = np.zeros_like(v)
    out = np.ones_like(v)
    cpu.run("reference", abi.padded_params(q, k, v, out))
    np.testing.assert_array_equal(abi.values_of(out), abi.values_of(v))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_results_are_rounded_to_nearest_even(cpu: library.Library, dtype: str) -> None:
    """Two keys of equal score average their values: exact in double, so that only the rounding shows."""
    rng = np.random.default_rng(7)
    v = draw(8, 200, 1, 2, 64, dtype=dtype)
    step = 1 + rng.integers(-3, 4, (200, 1, 64)) * {"fp16": 2.0**-10, "bf16": 2.0**-7}[dtype]  # near ties, and ties
    second = abi.values_of(v[:, :, 0]) * step
    v[:, :, 1] = abi.to_bits(abi.round_to_bf16(second)) if dtype == "bf16" else second.astype(np.float16)
    q, k = np.zeros_like(v[:, :, :1]), np.zeros_like(v)
    out = np.empty_like(q)
    cpu.run("reference", abi.padded_params(q, k, v, out))
    exact = abi.values_of(v).mean(axis=2, keepdims=True)
    rounded = abi.round_to_bf16(exact) if dtype == "bf16" else exact.astype(np.float16).astype(np.float64)
    assert (np.abs(rounded - exact) > 0).any()
    np.testing.assert_array_equal(abi.values_of(out), rounded)


# ---- Nothing to see, and what must not be seen ----


@pytest.mark.parametrize("kind", ["lengths", "bool", "-inf"])
def test_a_row_without_keys_is_zeros_and_the_others_are_right(cpu: library.Library, kind: str) -> None:
    q, k, v = draw(1, 2, 1, 2, 4), draw(2, 2, 1, 3, 4), draw(3, 2, 1, 3, 4)
    visible = np.ones((2, 1, 2, 3), bool)
    visible[1] = False
    arguments = {
        "lengths": {"key_lengths": np.array([3, 0], np.int32)},
        "bool": {"mask": visible},
        "-inf": {"mask": np.where(visible, 0, -np.inf).astype(np.float32)},
    }[kind]
    out = np.full(q.shape, np.nan, np.float32)
    cpu.run("reference", abi.padded_params(q, k, v, out, **arguments))
    assert (out[1] == 0).all()
    assert_rounded_once(out, abi.expected_rows(q, k, v, lambda b, *at: b == 0))


def test_a_row_at_the_lowest_finite_number_is_the_mean(cpu: library.Library) -> None:
    q, k, v = draw(1, 1, 1, 1, 4), draw(2, 1, 1, 3, 4), draw(3, 1, 1, 3, 4)
    mask = np.full((1, 1, 1, 3), np.finfo(np.float32).min)
    out = np.empty_like(q)
    cpu.run("reference", abi.padded_params(q, k, v, out, mask=mask))
    np.testing.assert_allclose(out[0, 0, 0], v[0, 0].mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_hidden_keys_never_leak(cpu: library.Library, garbage: float) -> None:
    q, k, v = draw(1, 1, 1, 2, 4), draw(2, 1, 1, 5, 4), draw(3, 1, 1, 5, 4)
    expected = abi.expected_rows(q, k, v, lambda b, h, i, j: j in (0, 2))
    for hidden in (1, 3, 4):
        k[0, 0, hidden] = v[0, 0, hidden] = garbage
    mask = np.array([True, False, True, True, True])
    out = np.empty_like(q)
    cpu.run("reference", abi.padded_params(q, k, v, out, mask=mask, key_lengths=np.array([3], np.int32)))
    assert_rounded_once(out, expected)


def test_a_visible_nan_is_not_hidden(cpu: library.Library) -> None:
    q, k, v = draw(1, 1, 1, 2, 4), draw(2, 1, 1, 5, 4), draw(3, 1, 1, 5, 4)
    k[0, 0, 2] = np.nan
    out = np.zeros_like(q)
    cpu.run("reference", abi.padded_params(q, k, v, out))
    assert np.isnan(out).all()


@pytest.mark.parametrize(("length", "counted"), [(-5, 0), (99, 3)])
def test_lengths_are_clamped(cpu: library.Library, length: int, counted: int) -> None:
    q, k, v = draw(1, 1, 1, 2, 4), draw(2, 1, 1, 4, 4)[:, :, :3], draw(3, 1, 1, 4, 4)[:, :, :3]
    out = np.empty_like(q)
    cpu.run("reference", abi.padded_params(q, k, v, out, key_lengths=np.array([length], np.int64)))
    assert_rounded_once(out, abi.expected_rows(q, k, v, lambda b, h, i, j: j < counted))


def test_wrong_offsets_stay_inside_and_uncovered_rows_stay_as_they_were(cpu: library.Library) -> None:
    q, k, v = draw(1, 6, 1, 4), draw(2, 6, 1, 4), draw(3, 6, 1, 4)
    out = np.full(q.shape, GUARD)
    # Sequence 0 is longer than announced, 1 runs backwards, 2 ends beyond the tensor.
    cu = np.array([-3, 4, 2, 900], np.int32)
    cpu.run("reference", abi.packed_params(q, k, v, out, cu, cu, max_seqlen_q=3, max_seqlen_k=3))
    assert np.isfinite(out).all()
    written = (out != GUARD).all(axis=(1, 2))
    np.testing.assert_array_equal(written, [True, True, True, True, True, False])


# ---- Empty ----


@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0)], ids=["batch", "queries", "keys"])
def test_empty_shapes_succeed_without_pointers(cpu: library.Library, shape: tuple[int, int, int, int]) -> None:
    batch, heads, q_len, k_len = shape
    q = draw(1, batch, heads, q_len, 4)
    k = v = draw(2, batch, heads, k_len, 4)
    out = np.full(q.shape, GUARD)
    params = abi.padded_params(q, k, v, out)
    params.k = params.v = None
    cpu.run("reference", params)
    assert (out == 0).all(), "queries without keys give zeros"


def test_empty_packed_input_succeeds(cpu: library.Library) -> None:
    nothing = np.empty((0, 2, 4), np.float32)
    offsets = np.zeros(3, np.int32)
    cpu.run("reference", abi.packed_params(nothing, nothing, nothing, nothing, offsets, offsets))
    q, out = draw(1, 3, 2, 4), np.full((3, 2, 4), GUARD)
    cu_q = np.array([0, 1, 3], np.int32)
    cpu.run("reference", abi.packed_params(q, nothing, nothing, out, cu_q, offsets))
    assert (out == 0).all()


# ---- Refusals ----

PADDED_REFUSALS = [
    ("batch", -1, "batch is -1; it must be 0 or more"),
    ("heads", 0, "heads is 0; it must be 1 or more"),
    ("heads", 3, "heads is 3; it must be a multiple of kv_heads, 2"),
    ("kv_heads", 0, "kv_heads is 0; it must be 1 or more"),
    ("q_len", -2, "q_len is -2; it must be 0 or more"),
    ("k_len", -2, "k_len is -2; it must be 0 or more"),
    ("head_dim", 0, "head_dim is 0; allowed: 1 to 256"),
    ("head_dim", 257, "head_dim is 257; allowed: 1 to 256"),
    ("dtype", 3, "dtype is 3; allowed: 0 (fp32), 1 (fp16), 2 (bf16)"),
    ("dtype", -1, "dtype is -1; allowed"),
    ("dtype", 65536, "dtype is 65536; allowed"),
    ("causal", 2, "causal is 2; allowed: 0, 1"),
    ("scale", float("nan"), "scale is nan; it must be finite"),
    ("scale", float("inf"), "scale is inf; it must be finite"),
    ("scale", -1e39, "scale is -1e+39; it must be finite in fp32, in which kernels compute"),
    ("q", None, "q is NULL"),
    ("k", None, "k is NULL"),
    ("v", None, "v is NULL"),
    ("out", None, "out is NULL"),
    ("q", 4097, "q is 0x1001; it must be a multiple of 4 bytes"),
    ("key_lengths_type", 1, "key_lengths is NULL"),
    ("key_lengths_type", 3, "key_lengths_type is 3; allowed: 0 (none), 1 (int32), 2 (int64)"),
    ("key_lengths", 4096, "key_lengths is given but key_lengths_type is 0 (none)"),
    ("mask_type", 2, "mask is NULL"),
    ("mask_type", 5, "mask_type is 5; allowed"),
    ("mask", 4096, "mask is given but mask_type is 0 (none)"),
    ("batch", 1 << 62, "batch * heads * queries is above what 64 bits hold"),
    ("out_strides", (0, 8, 4), "out_strides[0] is 0; rows of out must not overlap: at least head_dim, 4"),
    ("out_strides", (16, 3, 4), "out_strides[1] is 3;"),
    ("out_strides", (16, 8, -2), "out_strides[2] is -2;"),
]


@pytest.mark.parametrize(
    ("field", "value", "message"), PADDED_REFUSALS, ids=[f"{f}={v}" for f, v, _ in PADDED_REFUSALS]
)
def test_padded_refusals_name_field_value_and_what_is_allowed(
    cpu: library.Library, field: str, value: object, message: str
) -> None:
    q, k, v = draw(1, 2, 2, 2, 4), draw(2, 2, 2, 3, 4), draw(3, 2, 2, 3, 4)
    out = np.full(q.shape, GUARD)
    params = abi.padded_params(q, k, v, out)
    if isinstance(value, tuple):
        getattr(params, field)[:] = value
    else:
        setattr(params, field, value)
    with pytest.raises(KernelError, match=re.escape(message)) as refusal:
        cpu.run("reference", params)
    assert refusal.value.status == library.INVALID_ARGUMENT
    assert (out == GUARD).all(), "a refused call writes nothing"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("batch", -1, "batch is -1"),
        ("heads", 5, "heads is 5; it must be a multiple of kv_heads, 2"),
        ("head_dim", 300, "head_dim is 300; allowed: 1 to 256"),
        ("total_q", -1, "total_q is -1"),
        ("total_k", -1, "total_k is -1"),
        ("max_seqlen_q", -1, "max_seqlen_q is -1"),
        ("max_seqlen_k", -1, "max_seqlen_k is -1"),
        ("cu_seqlens_q", None, "cu_seqlens_q is NULL"),
        ("cu_seqlens_k", None, "cu_seqlens_k is NULL"),
        ("cu_seqlens_k", 4098, "cu_seqlens_k is 0x1002; it must be a multiple of 4 bytes"),
        ("out_strides", (2, 8), "out_strides[0] is 2"),
        ("dtype", 65536, "dtype is 65536; allowed"),
        ("overlap", 2, "overlap is 2; allowed: 0, 1"),
        ("overlap", 65536, "overlap is 65536; allowed: 0, 1"),
    ],
)
def test_packed_refusals(cpu: library.Library, field: str, value: object, message: str) -> None:
    q, k, v = draw(1, 5, 2, 4), draw(2, 5, 2, 4), draw(3, 5, 2, 4)
    cu, out = np.array([0, 2, 5], np.int32), np.full(q.shape, GUARD)
    params = abi.packed_params(q, k, v, out, cu, cu)
    if isinstance(value, tuple):
        getattr(params, field)[:] = value
    else:
        setattr(params, field, value)
    with pytest.raises(KernelError, match=re.escape(message)) as refusal:
        cpu.run("reference", params)
    assert refusal.value.status == library.INVALID_ARGUMENT
    assert (out == GUARD).all()


def test_an_unknown_variant_is_refused_with_the_known_names(cpu: library.Library) -> None:
    with pytest.raises(KernelError, match="variant is fastest; this library has: reference") as refusal:
        cpu.run("fastest", library.AttentionParams())
    assert refusal.value.status == library.UNKNOWN_VARIANT


def test_the_workspace_question_checks_sizes_and_follows_no_pointer(cpu: library.Library) -> None:
    params = library.AttentionParams(scale=1.0, batch=2, heads=2, kv_heads=2, q_len=2, k_len=2, head_dim=4)
    params.out_strides[:] = (16, 8, 4)
    assert cpu.workspace_size("reference", params) == 0
    params.head_dim = 1000
    with pytest.raises(KernelError, match="head_dim is 1000"):
        cpu.workspace_size("reference", params)


def test_the_last_error_belongs_to_the_thread(cpu: library.Library) -> None:
    with pytest.raises(KernelError, match="variant is here"):
        cpu.run("here", library.AttentionParams())
    seen: list[str] = []

    def other() -> None:
        seen.append(cpu.last_error())
        try:
            cpu.run("there", library.AttentionParams())
        except KernelError as error:
            seen.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen[0] == ""
    assert "variant is there" in seen[1]
    assert "variant is here" in cpu.last_error()


# ---- The library itself ----


def test_the_table_says_what_the_registry_says(cpu: library.Library) -> None:
    rows = [row for row in registry.attention_rows() if row.device == "cpu"]
    shared = [field.name for field in dataclasses.fields(library.Variant)]
    assert [{name: getattr(row, name) for name in shared} for row in rows] == [
        {name: getattr(variant, name) for name in shared} for variant in cpu.variants
    ]
    assert cpu.backend == "cpu"
    assert cpu.archs == ()


def test_a_build_of_other_sources_is_refused(cpu: library.Library) -> None:
    with pytest.raises(TilerankError, match=f"its build id is {cpu.build_id}, that of these sources 0123; delete it"):
        library.Library(cpu.path, "0123")


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("not a library")
    with pytest.raises(TilerankError, match=r"text\.so is not a usable kernel library"):
        library.Library(text)
    with pytest.raises(TilerankError, match=r"missing\.so is not a usable kernel library"):
        library.Library(tmp_path / "missing.so")
    foreign = tmp_path / "foreign.so"
    shutil.copy(_path_of_libm(), foreign)
    with pytest.raises(TilerankError, match=r"foreign\.so is not a usable kernel library"):
        library.Library(foreign)


def _path_of_libm() -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/libm" in line and ".so" in line:
            return line.split()[-1]
    pytest.skip("this process has no libm loaded to stand in for a foreign library")


def test_python_constants_are_the_headers(repository: Path) -> None:
    header = (repository / "cuda" / "include" / "tilerank.h").read_text(encoding="utf-8")
    values = {name: int(value) for name, value in re.findall(r"TILERANK_(\w+) = (\d+)", header)}
    assert {f"{name.upper()}": code for name, code in library.DTYPE_CODES.items()} == {
        name: values[name] for name in ("FP32", "FP16", "BF16")
    }
    for name in ("OK", "INVALID_ARGUMENT", "UNKNOWN_VARIANT", "UNSUPPORTED", "WORKSPACE", "LAUNCH_FAILED"):
        assert getattr(library, name) == values[name]
    for name in values:
        if name.startswith(("LENGTHS_", "MASK_")):
            assert getattr(library, name) == values[name]
    assert [values[f"DEVICE_{name.upper()}"] for name in registry.DEVICES] == [0, 1]
    assert [values[f"LAYOUT_{name.upper()}"] for name in registry.LAYOUTS] == [1, 2]
    assert [values[f"SERVES_{name.upper()}"] for name in registry.MASKS] == [1, 2, 4, 8]
    assert f"#define TILERANK_ABI_VERSION {library.ABI_VERSION}\n" in header
    assert f"#define TILERANK_MAX_HEAD_DIM {registry.MAX_HEAD_DIM}\n" in header


@pytest.mark.parametrize("complete_exists", [True, False])
def test_a_build_for_every_architecture_is_preferred_where_the_cache_has_one(
    cpu: library.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete_exists: bool
) -> None:
    native, complete = build.Target("cuda", "90a-real"), build.Target("cuda", build.ALL_ARCHS)
    made: list[build.Target] = []

    def built(target: build.Target) -> build.Built:
        made.append(target)
        return build.Built(cpu.path, cpu.build_id)

    monkeypatch.setattr(build, "default_target", lambda: native)
    monkeypatch.setattr(build, "build_id", lambda target: "full" if target == complete else "other")
    monkeypatch.setattr(build, "library_path", lambda identity: tmp_path / identity)
    monkeypatch.setattr(build, "build", built)
    if complete_exists:
        (tmp_path / "full").touch()
    assert library._load.__wrapped__(None).build_id == cpu.build_id
    assert made == [complete if complete_exists else native]
