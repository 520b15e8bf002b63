"""What stages that run whatever `auto` takes depend on: the row that serves each of their calls, and its code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML
from transformers import BertConfig, BertModel

import tilerank
from tilerank import fused, kernel_choices, packed_attention
from tilerank.bench import micro, tf_block
from tilerank.errors import TilerankError
from tilerank.fused import ENCODER_ROWS
from tilerank.kernel_choices import CALLS, Call, choices
from tilerank.kernels import library, registry, torch_ops

PADDED = Call("attention", "padded")


def choose(calls: tuple[Call, ...] = (PADDED,), **changes: object) -> dict[str, str]:
    arguments = {
        "rows": {"attention": registry.attention_rows()},
        "variant": "auto",
        "sm": 90,
        "dtypes": ("fp32", "fp16"),
        "head_dim": 32,
        "k_len": 512,
        "digest": lambda row: f"code of {row.name}",
    }
    return choices(calls, **{**arguments, **changes})


def test_a_call_is_described_with_the_row_that_serves_it_and_its_code() -> None:
    rows = [replace(row, preference=None) for row in registry.attention_rows() if row.rung in (1, 14, 19)]
    calls = (PADDED, Call("attention", "padded", 7, frozenset({"causal"})))
    assert choose(calls, rows={"attention": rows}) == {
        "attention fp32 padded head_dim 32": "longest_first code of longest_first",
        "attention fp16 padded head_dim 32": "warpgroups code of warpgroups",
        "attention fp32 padded head_dim 7 causal": "naive code of naive",
        "attention fp16 padded head_dim 7 causal": "naive code of naive",
    }


def test_only_a_row_that_auto_takes_changes_what_stages_depend_on() -> None:
    rows = registry.attention_rows()
    newest = max(rows, key=lambda row: row.rung)
    other = replace(newest, name="new", rung=99, preference=None, auto=True, auto_head_dims=None)
    before = choose()
    assert choose(rows={"attention": [*rows, replace(other, auto=False)]}) == before
    assert choose(rows={"attention": [*rows, replace(other, preference=0)]}) == before
    changed = choose(rows={"attention": [*rows, replace(other, dtypes=("fp32",), head_dims=None)]})
    assert changed["attention fp32 padded head_dim 32"] == "new code of new"
    assert changed["attention fp16 padded head_dim 32"] == before["attention fp16 padded head_dim 32"]


def test_a_variant_that_is_asked_for_is_the_one_and_sdpa_is_none() -> None:
    assert set(choose(variant="naive").values()) == {"naive code of naive"}
    assert choose(variant="sdpa") == {}


def test_a_row_that_the_caller_names_is_known_by_its_name() -> None:
    rows = {"layernorm": registry.rows_of("layernorm")}
    assert choose((Call("layernorm", "packed", variant="welford"),), rows=rows, variant="naive") == {
        "layernorm fp32 welford": "welford code of welford",
        "layernorm fp16 welford": "welford code of welford",
    }


def test_an_operation_without_a_row_for_the_call_is_an_error() -> None:
    with pytest.raises(ValueError, match="serves this call"):
        choose(rows={"attention": []})


def test_code_is_known_by_its_sources_where_nothing_compiles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    naive, reference = registry.get("naive"), registry.get("reference")
    assert kernel_choices.code_digest(reference, 90).startswith("source:")
    assert kernel_choices.code_digest(naive, 0).startswith("source:")
    monkeypatch.setattr(kernel_choices.build, "find_nvcc", lambda: None)
    assert kernel_choices.code_digest(naive, 90).startswith("source:")


def test_every_stage_that_runs_what_auto_takes_depends_on_its_calls(repository: Path) -> None:
    stages = YAML(typ="safe").load((repository / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    record = "metrics/${machine.name}/choose_kernels.json"
    depend = {
        name: entry[record]
        for name, block in stages.items()
        for entry in block.get("params", [])
        if isinstance(entry, dict) and record in entry
    }
    assert depend == {name: [f"choices.{name}"] for name in (*CALLS, "bench_block", "bench_micro", "bench_tf")}


def test_every_row_is_compiled_from_what_list_sources_depends_on(repository: Path) -> None:
    from tilerank.kernels import cubins

    stages = YAML(typ="safe").load((repository / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    deps = [dep.removeprefix("cuda/") for dep in stages["list_sources"]["deps"]]
    for rows in registry.read_registry(registry.cuda_dir() / "registry.yaml").values():
        for row in rows:
            missing = [
                name
                for name in cubins.sources_of(row)
                if not name.startswith("host/") and not any(name.startswith(f"{dep}/") for dep in deps)
            ]
            assert not missing, f"{row.name} is compiled from {missing}: list_sources in dvc.yaml must depend on them"


# ---- The calls are those that the code makes ----


def test_the_drop_in_makes_the_calls_of_integrate_hf(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    select = registry.select

    def record(request: registry.Request, rows: object) -> registry.Selection:
        asked.append(request)
        return select(request, rows)

    monkeypatch.setattr(registry, "select", record)
    torch_ops._choose.cache_clear()
    tilerank.register()
    config = BertConfig(vocab_size=30, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = BertModel._from_config(config, attn_implementation="tilerank").eval()
    ids = torch.randint(0, 30, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        model(ids, mask)
        mask[1, 5:] = 0
        model(ids, mask)
    torch_ops._choose.cache_clear()
    calls = {Call("attention", request.layout, masks=request.masks) for request in asked}
    assert calls == set(CALLS["integrate_hf"])


def test_the_encoder_makes_the_calls_of_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def record(request: registry.Request, rows: object) -> registry.Selection:
        asked.append(request)
        return registry.Selection(registry.get("warpgroups"), "planted")

    def unbuilt() -> library.Library:
        raise TilerankError("not here")

    monkeypatch.setattr(registry, "select", record)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(packed_attention, "_torch_part", lambda *arguments: None)
    monkeypatch.setattr(library, "load", unbuilt)
    packed_attention.choose("auto", torch.device("cuda"), torch.float16, 32, 512)
    calls = {Call("attention", request.layout, masks=request.masks) for request in asked}
    assert CALLS["bench_rerank"] == CALLS["evaluate_quality"]
    assert calls == {call for call in CALLS["bench_rerank"] if call.variant is None}


def test_the_encoder_calls_no_row_that_its_stages_do_not_depend_on() -> None:
    parts = fused.KernelParts.__new__(fused.KernelParts)
    parts._precision, parts._sm = "fp32", 90
    for operation, variant in ENCODER_ROWS:
        registry.get(variant, operation)
        parts._runs(operation, variant)
    with pytest.raises(AssertionError, match="depend on those rows alone"):
        parts._runs("layernorm", "welford")


def test_a_block_is_chosen_by_its_width_too() -> None:
    rows = {operation: registry.rows_of(operation) for operation in ("attention", "block")}
    (words,) = choose(tf_block.calls(on_cpu=False), rows=rows, dtypes=("fp16",), variant="naive")
    assert words == "block fp16 padded head_dim 64 width 768"


@pytest.mark.parametrize("on_cpu", [True, False])
def test_micro_benchmarks_call_what_their_shapes_say(on_cpu: bool) -> None:
    shapes = micro.CHECK_SHAPES if on_cpu else micro.SHAPES
    assert {(call.head_dim, "causal" in call.masks) for call in micro.calls(on_cpu)} == {
        (shape.head_dim, shape.causal) for shape in shapes
    }
