"""The registry: what a row may say, which row `auto` takes, and that a variant is one file and one row."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kernels import abi
from kernels.sources import copy_with_rows

from tilerank.errors import TilerankError
from tilerank.kernels import build, library, registry
from tilerank.kernels.registry import Request, Row, refusal, select

REQUEST = Request(device="cuda", sm=90, dtype="fp32", head_dim=32, layout="padded", k_len=337)
ANYTHING = Row("anything", "a.cu", "cuda", 1, registry.DTYPES, None, registry.LAYOUTS, registry.MASKS, 75, "slow")
NARROW = Row("narrow", "b.cu", "cuda", 2, ("fp32",), (32, 64), ("padded",), ("key_lengths",), 80, "fast", max_k_len=512)


# ---- This installation's registry ----


def test_rungs_are_distinct_and_rise_in_the_order_of_the_file() -> None:
    rungs = [row.rung for row in registry.attention_rows()]
    assert rungs == sorted(set(rungs))


def test_naive_serves_everything_so_that_auto_always_has_an_answer() -> None:
    naive = registry.get("naive")
    assert (naive.head_dims, naive.dtypes, naive.layouts, naive.masks, naive.min_sm, naive.max_k_len, naive.auto) == (
        *(None, registry.DTYPES, registry.LAYOUTS, registry.MASKS, 75, None, True),
    )


def test_every_row_predicts_something() -> None:
    for row in registry.attention_rows():
        assert len(row.prediction) > 20, row.name


def test_kernel_files_are_numbered_by_their_rung_and_have_a_short_header(repository: Path) -> None:
    for row in registry.attention_rows():
        if row.device == "cuda":
            assert re.match(rf"\w+/{row.rung:02d}_\w+\.cu$", row.file), row
            text = (repository / "cuda" / row.file).read_text(encoding="utf-8")
            header = text.split("#include", 1)[0].splitlines()
            assert 0 < len(header) <= 8, row.file
            assert all(line.startswith("//") for line in header), row.file


def kernel_text(repository: Path, row: Row) -> str:
    """The row's file and the policies of common/ that it includes, without the wrapper header, which has everything."""
    texts = [(repository / "cuda" / row.file).read_text(encoding="utf-8")]
    for name in re.findall(r'#include "(common/\w+\.cuh)"', texts[0]):
        texts.append((repository / "cuda" / name).read_text(encoding="utf-8"))
    return "".join(texts)


def test_a_row_says_which_unit_multiplies_and_where_its_code_ends(repository: Path) -> None:
    """The ladder's best FFMA rung and every floor go by `products`; `auto` goes by `max_sm` on a newer GPU."""
    for row in registry.attention_rows():
        if row.device == "cuda":
            text = kernel_text(repository, row)
            on_matrix_unit = re.search(r"mma\w*[.(<]", text) is not None
            if "fp32" in row.dtypes:
                assert (row.products != "ffma") == on_matrix_unit, f"{row.name}: products is {row.products}"
            if re.search(r"wgmma\w*[.(<]", text):
                assert row.max_sm == 90, f"{row.name} uses instructions of sm_90a alone: max_sm: 90"


def test_kernels_reach_the_machine_through_the_wrapper_header_only(repository: Path) -> None:
    """No CUDA or framework header, no inline PTX, no launch syntax in any kernel's source."""
    for path in (repository / "cuda").glob("attention/*.cu"):
        text = path.read_text(encoding="utf-8")
        includes = re.findall(r'#include [<"]([^>"]+)[>"]', text)
        assert not [name for name in includes if not name.startswith(("common/", "tilerank.h"))], path.name
        assert not re.search(r"\basm\b|<<<|__shared__", text), path.name


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no attention variant is called 'fastest'; there are: reference, naive"):
        registry.get("fastest")


# ---- Reading ----


ROW = """
variants:
  attention:
    one:
      file: one.cu
      device: cuda
      rung: 1
      dtypes: [fp32]
      head_dims: [32]
      layouts: [padded]
      masks: []
      min_sm: 75
      prediction: "as fast as nothing"
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("device: cuda", "device: tpu", "attention.one.device is 'tpu'; allowed: cpu, cuda"),
        ("[fp32]", "[fp64]", "attention.one.dtypes is ['fp64']; allowed: a list of fp32, fp16, bf16"),
        ("[padded]", "padded", "attention.one.layouts is 'padded'; allowed: a list of padded, packed"),
        ("masks: []", "masks: [alibi]", "attention.one.masks is ['alibi']; allowed: a list of key_lengths"),
        ("[32]", "[512]", "attention.one.head_dims is [512]; allowed: any, or a list of 1 to 256"),
        ("[32]", "[]", "attention.one.head_dims is []; allowed"),
        ("      rung: 1\n", "", "attention.one: missing keys ['rung'], unknown keys []"),
        ("rung: 1", "rung: 1\n      colour: red", "missing keys [], unknown keys ['colour']"),
        ("one.cu", "two.cu", "attention.one.file is two.cu, which does not exist"),
        ("variants:", "kernels:", "expected the one top-level key `variants`"),
        ("[fp32]", "[fp32", "is not YAML"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_by_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "one.cu").touch()
    assert old in ROW
    path = tmp_path / "registry.yaml"
    path.write_text(ROW.replace(old, new), encoding="utf-8")
    with pytest.raises(TilerankError, match=re.escape(message)):
        registry.read_registry(path)
    path.write_text(ROW, encoding="utf-8")
    assert registry.read_registry(path)["attention"][0].head_dims == (32,)


def test_a_missing_registry_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TilerankError, match="No such file"):
        registry.read_registry(tmp_path / "registry.yaml")


# ---- Choosing ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cpu", "sm": 0}, "device is cpu; it serves: cuda"),
        ({"sm": 75}, "sm is 75; it serves: 80 and above"),
        ({"dtype": "bf16"}, "dtype is bf16; it serves: fp32"),
        ({"head_dim": 48}, "head_dim is 48; it serves: 32, 64"),
        ({"layout": "packed"}, "layout is packed; it serves: padded"),
        ({"masks": frozenset({"causal", "boolean"})}, "masks is causal, boolean; it serves: key_lengths"),
        ({"k_len": 513}, "k_len is 513; it serves: up to 512"),
    ],
)
def test_auto_falls_back_to_the_next_rung_and_says_why(change: dict[str, object], message: str) -> None:
    assert refusal(NARROW, REQUEST) is None
    assert select(REQUEST, (ANYTHING, NARROW)).row is NARROW
    request = replace(REQUEST, **change)
    assert refusal(NARROW, request) == message
    if request.device == "cuda":
        chosen = select(request, (ANYTHING, NARROW))
        assert chosen.row is ANYTHING
        assert chosen.reason == f"anything is preferred of all that serve this call (passed over: narrow: {message})"


def test_a_row_can_need_instructions_that_later_architectures_lack() -> None:
    hopper = replace(NARROW, min_sm=90, max_sm=90)
    assert select(REQUEST, (ANYTHING, hopper)).row is hopper
    assert refusal(hopper, replace(REQUEST, sm=100)) == "sm is 100; it serves: 90 to 90"
    assert select(replace(REQUEST, sm=100), (ANYTHING, hopper)).row is ANYTHING


def test_key_lengths_are_served_where_the_row_says_so() -> None:
    masked = replace(REQUEST, masks=frozenset({"key_lengths"}))
    assert select(masked, (ANYTHING, NARROW)).row is NARROW
    assert select(masked, (ANYTHING, replace(NARROW, masks=()))).row is ANYTHING


def test_a_row_kept_from_auto_is_never_chosen() -> None:
    assert select(REQUEST, (ANYTHING, replace(NARROW, auto=False))).row is ANYTHING


def test_a_row_may_be_preferred_at_some_of_its_head_dims() -> None:
    wide = replace(NARROW, auto_head_dims=(64,))
    assert select(REQUEST, (ANYTHING, wide)).row is ANYTHING
    assert "narrow: head_dim is 32; preferred at: 64" in select(REQUEST, (ANYTHING, wide)).reason
    assert select(replace(REQUEST, head_dim=64), (ANYTHING, wide)).row is wide
    assert refusal(wide, REQUEST) is None  # who names it is served


@pytest.mark.parametrize("head_dim", [0, 257])
def test_what_no_row_serves_is_refused_with_every_reason(head_dim: int) -> None:
    with pytest.raises(
        ValueError, match=rf"head_dim is {head_dim}; it serves: 32, 64; anything: head_dim is {head_dim}"
    ):
        select(replace(REQUEST, head_dim=head_dim), (ANYTHING, NARROW))
    with pytest.raises(ValueError, match="there are none"):
        select(REQUEST, ())


# ---- From the registry to the build ----


def generate(registry_file: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    program = registry.cuda_dir() / "generate_table.py"
    command = [sys.executable, str(program), str(registry_file), "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_build_for_older_gpus_leaves_newer_rows_out(tmp_path: Path) -> None:
    file = tmp_path / "registry.yaml"
    file.write_text(ROW.replace("min_sm: 75", "min_sm: 80"), encoding="utf-8")
    for archs, held in (("75-virtual", False), ("75-real;80-real", True), ("90a-real", True)):
        generate(file, tmp_path / archs, "--backend", "cuda", "--archs", archs).check_returncode()
        assert ('"one"' in (tmp_path / archs / "attention_table.cc").read_text(encoding="utf-8")) == held, archs


def test_rows_the_emulator_cannot_run_are_left_out_of_the_host_build(tmp_path: Path) -> None:
    file = tmp_path / "registry.yaml"
    for text, held in ((ROW, True), (ROW + '      host_exempt: "bulk copies"\n', False)):
        file.write_text(text, encoding="utf-8")
        generate(file, tmp_path, "--backend", "host").check_returncode()
        assert ('"one"' in (tmp_path / "attention_table.cc").read_text(encoding="utf-8")) == held


def test_a_file_of_many_kernels_is_compiled_in_the_parts_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "registry.yaml"
    file.write_text(ROW, encoding="utf-8")
    source = tmp_path / next(line.split(": ")[1] for line in ROW.splitlines() if line.strip().startswith("file: "))
    source.parent.mkdir(exist_ok=True)
    source.write_text("TILERANK_PART_0 template int f<1>();\nTILERANK_PART_1 template int f<2>();\n", encoding="utf-8")
    name = source.relative_to(tmp_path).as_posix()
    for backend, whole in (("cuda", False), ("host", True)):
        out = tmp_path / backend
        generate(file, out, "--backend", backend, "--archs", "75-real" if backend == "cuda" else "").check_returncode()
        lists = (out / "variants.cmake").read_text(encoding="utf-8")
        parts = sorted(out.glob("*.cu"))
        assert (name in lists, len(parts)) == ((True, 0) if whole else (False, 2))
        for number, part in enumerate(parts):
            assert f'"TILERANK_MIN_SM_{part.as_posix()}" 75' in lists
            assert part.read_text(encoding="utf-8") == f'#define TILERANK_PART {number}\n#include "{name}"\n'


def test_the_generator_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    file = tmp_path / "registry.yaml"
    file.write_text(ROW.replace("[fp32]", "[fp64]"), encoding="utf-8")
    answer = generate(file, tmp_path, "--backend", "cuda", "--archs", "75-real")
    assert answer.returncode == 1
    assert "attention.one: dtypes has ['fp64']; allowed: ['fp32', 'fp16', 'bf16']" in answer.stderr
    file.write_text(ROW.replace("      rung: 1\n      dtypes: [fp32]\n", ""), encoding="utf-8")
    answer = generate(file, tmp_path, "--backend", "cuda", "--archs", "75-real")
    assert answer.returncode == 1
    assert "a row lacks the key 'dtypes'" in answer.stderr


NEW_KERNEL = """
#include "common/attention.cuh"

namespace tilerank {
namespace last_value {

__global__ void kernel(AttentionArgs args) {
    const int64_t sequence = blockIdx.x / args.heads;
    const int64_t head = blockIdx.x % args.heads;
    const HeadView<float> view = head_view<float>(args, sequence, head);
    const float* row = view.v + (view.k_len - 1) * args.v_token_stride;
    for (int64_t i = threadIdx.x; i < view.q_len * args.head_dim; i += blockDim.x) {
        view.out[i / args.head_dim * args.out_token_stride + i % args.head_dim] = row[i % args.head_dim];
    }
}

}  // namespace last_value

size_t attention_last_value_workspace(const AttentionArgs& args) { return 100 * args.batch; }

tilerank_status attention_last_value(const AttentionArgs& args, void*, void* stream) {
    return launch_blocks("last_value", last_value::kernel, args.batch * args.heads, 32, 0, stream, args);
}

}  // namespace tilerank
"""

NEW_ROW = """
    last_value:
      file: attention/99_last_value.cu
      device: cuda
      rung: 99
      dtypes: [fp32]
      head_dims: [4, 8]
      layouts: [padded]
      masks: [key_lengths]
      min_sm: 75
      max_k_len: 6
      workspace: true
      prediction: "Takes the last key's value for the answer."
"""


def test_a_new_variant_is_one_file_and_one_row(tmp_path: Path) -> None:
    """From the two, with nothing else touched: built, listed, chosen, called, and refused beyond its row."""
    source = copy_with_rows(tmp_path, "reference", "naive")
    (source / "attention" / "99_last_value.cu").write_text(NEW_KERNEL, encoding="utf-8")
    with (source / "registry.yaml").open("a", encoding="utf-8") as file:
        file.write(NEW_ROW)

    built = build.build(build.Target("host"), source=source, cache_folder=tmp_path / "cache")
    loaded = library.Library(built.path, built.build_id)
    row = registry.read_registry(source / "registry.yaml")["attention"][-1]
    assert loaded.variants[-1].name == row.name == "last_value"
    assert select(replace(REQUEST, head_dim=4, k_len=6), (registry.get("naive"), row)).row is row

    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 3, length, 4)).astype(np.float32) for length in (5, 6, 6))
    out = np.full_like(q, np.nan)
    params = abi.padded_params(q, k, v, out, key_lengths=np.array([6, 2], np.int32))
    assert loaded.workspace_size("last_value", params) == 200
    memory = np.zeros(1024, np.uint8)
    workspace = memory.ctypes.data + -memory.ctypes.data % 256
    for given, message in (
        ((0, 200), "workspace_bytes is 0; it needs 200"),
        ((workspace, 199), "workspace_bytes is 199; it needs 200"),
        ((workspace + 128, 200), "it must be a multiple of 256 bytes"),
    ):
        with pytest.raises(library.KernelError, match=message) as error:
            loaded.run("last_value", params, *given)
        assert error.value.status == library.WORKSPACE
    assert np.isnan(out).all(), "a refused call writes nothing"
    loaded.run("last_value", params, workspace, 200)
    np.testing.assert_array_equal(out[0], np.broadcast_to(v[0, :, 5:6], out[0].shape))
    np.testing.assert_array_equal(out[1], np.broadcast_to(v[1, :, 1:2], out[1].shape))

    def refused(message: str, **arguments: object) -> None:
        with pytest.raises(library.KernelError, match=re.escape(f"variant last_value: {message}")) as error:
            loaded.run("last_value", abi.padded_params(**({"q": q, "k": k, "v": v, "out": out} | arguments)))
        assert error.value.status == library.UNSUPPORTED

    half = {name: array.astype(np.float16) for name, array in (("q", q), ("k", k), ("v", v), ("out", out))}
    wide = {name: np.zeros((2, 3, 5, 7), np.float32) for name in ("q", "k", "v", "out")}
    long = {name: np.zeros((2, 3, 7, 4), np.float32) for name in ("k", "v")}
    refused("dtype is fp16; it serves: fp32", **half)
    refused("head_dim is 7; it serves: 4, 8", **wide)
    refused("the call restricts keys by causal; it serves: key_lengths", causal=True)
    refused("the call restricts keys by boolean; it serves: key_lengths", mask=np.ones((5, 6), bool))
    refused("k_len is 7; it serves: up to 6", **long)
    packed = [np.zeros((5, 3, 4), np.float32) for _ in range(4)]
    offsets = np.array([0, 5], np.int32)
    with pytest.raises(library.KernelError, match="variant last_value: the input is packed; it serves: padded"):
        loaded.run("last_value", abi.packed_params(*packed, offsets, offsets))


def test_a_row_may_rank_itself_otherwise_than_by_its_rung() -> None:
    slower_than_it_looks = replace(NARROW, preference=0)
    assert select(REQUEST, (ANYTHING, slower_than_it_looks)).row is ANYTHING


def test_the_timed_layout_is_one_that_is_served(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("", encoding="utf-8")
    row = "file: a.cu, device: cuda, rung: 1, dtypes: [fp32], head_dims: any, masks: [], min_sm: 75, prediction: x"
    for layouts, extra, timed in (
        ("[padded, packed]", "", "padded"),
        ("[packed]", "", "packed"),
        ("[padded, packed]", ", timed_layout: packed", "packed"),
    ):
        text = f"variants: {{attention: {{a: {{{row}, layouts: {layouts}{extra}}}}}}}"
        (tmp_path / "registry.yaml").write_text(text, encoding="utf-8")
        assert registry.read_registry(tmp_path / "registry.yaml")["attention"][0].timed_layout == timed
    text = f"variants: {{attention: {{a: {{{row}, layouts: [padded], timed_layout: packed}}}}}}"
    (tmp_path / "registry.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(TilerankError, match=r"attention\.a\.timed_layout is 'packed'; allowed: .*padded"):
        registry.read_registry(tmp_path / "registry.yaml")


def read_row(tmp_path: Path, **keys: object) -> Row:
    """One row with ``keys`` set or, None, taken away."""
    (tmp_path / "a.cu").write_text("", encoding="utf-8")
    values = {
        **{"file": "a.cu", "device": "cuda", "rung": 1, "dtypes": "[fp32, fp16, bf16]", "head_dims": "any"},
        **{"layouts": "[padded]", "masks": "[]", "min_sm": 75, "prediction": "x", **keys},
    }
    text = ", ".join(f"{key}: {value}" for key, value in values.items() if value is not None)
    (tmp_path / "registry.yaml").write_text(f"variants: {{attention: {{a: {{{text}}}}}}}", encoding="utf-8")
    (row,) = registry.read_registry(tmp_path / "registry.yaml")["attention"]
    return row


def test_what_a_row_says_of_its_products(tmp_path: Path) -> None:
    assert read_row(tmp_path).products == "ffma"
    assert read_row(tmp_path, products="fp16x3").precisions == ("fp32", "fp16", "bf16")
    assert read_row(tmp_path, products="tf32", auto="false").precisions == ("tf32", "fp16", "bf16")
    with pytest.raises(TilerankError, match=r"attention\.a\.products is tf32, which loses accuracy"):
        read_row(tmp_path, products="tf32")
    with pytest.raises(TilerankError, match=r"products is 'int8'; allowed: ffma, fp16x3, tf32"):
        read_row(tmp_path, products="int8")


def test_head_dims_that_auto_takes_a_row_at_are_some_that_it_serves(tmp_path: Path) -> None:
    assert read_row(tmp_path, head_dims="[32, 64]").auto_head_dims is None
    assert read_row(tmp_path, head_dims="[32, 64]", auto_head_dims="[64]").auto_head_dims == (64,)
    for served, wrong in (("[32, 64]", "[96]"), ("[32, 64]", "[32, 64]"), ("[32, 64]", "64"), ("any", "[64]")):
        with pytest.raises(TilerankError, match=r"auto_head_dims is .*some of the row's head_dims"):
            read_row(tmp_path, head_dims=served, auto_head_dims=wrong)


def test_a_dtype_may_need_a_newer_gpu_than_the_row(tmp_path: Path) -> None:
    row = read_row(tmp_path, dtype_min_sm="{bf16: 80}")
    turing = replace(REQUEST, sm=75, dtype="fp16")
    assert refusal(row, turing) is None
    assert refusal(row, replace(turing, dtype="bf16")) == "sm is 75; it serves: 80 and above"
    assert refusal(row, replace(turing, sm=80, dtype="bf16")) is None
    for wrong in ("{bf16: 70}", "{fp64: 80}", "[bf16]", "{bf16: newer}"):
        with pytest.raises(TilerankError, match=r"dtype_min_sm is .*each above its min_sm, 75"):
            read_row(tmp_path, dtype_min_sm=wrong)


def test_code_for_one_architecture_runs_on_no_newer_one(tmp_path: Path) -> None:
    hopper = replace(read_row(tmp_path, min_sm=90, max_sm=90), name="hopper", rung=9)
    assert refusal(hopper, REQUEST) is None
    assert refusal(hopper, replace(REQUEST, sm=100)) == "sm is 100; it serves: 90 to 90"
    chosen = select(replace(REQUEST, sm=100), (ANYTHING, hopper))
    assert chosen.row is ANYTHING
    assert "passed over: hopper: sm is 100" in chosen.reason


def test_auto_takes_the_row_of_the_call_s_own_dtype_and_gpu() -> None:
    """fp32 rungs, a 16-bit row for every GPU, one for Hopper alone, and a lossy one: as on the ladder."""
    half = replace(NARROW, name="half", rung=3, dtypes=("fp16", "bf16"), min_sm=75, dtype_min_sm={"bf16": 80})
    hopper = replace(half, name="hopper", rung=4, min_sm=90, dtype_min_sm={}, max_sm=90, layouts=("packed",))
    triple = replace(NARROW, name="triple", rung=5, products="fp16x3")
    lossy = replace(NARROW, name="lossy", rung=6, products="tf32", auto=False)
    rows = (ANYTHING, NARROW, half, hopper, triple, lossy)

    def chosen(sm: int, dtype: str, head_dim: int = 32, layout: str = "padded") -> str:
        return select(replace(REQUEST, sm=sm, dtype=dtype, head_dim=head_dim, layout=layout), rows).row.name

    assert [chosen(sm, "fp32") for sm in (75, 80, 90, 100)] == ["anything", "triple", "triple", "triple"]
    assert [chosen(sm, "fp16") for sm in (75, 80, 90, 100)] == ["half"] * 4
    assert [chosen(sm, "bf16") for sm in (75, 80, 90, 100)] == ["anything", "half", "half", "half"]
    assert [chosen(sm, "fp16", layout="packed") for sm in (75, 90, 100)] == ["anything", "hopper", "anything"]
    assert chosen(90, "fp16", head_dim=33) == "anything"
