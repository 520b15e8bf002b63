"""Every CUDA row of the registry, run on the CPU against the reference: plainly under several orders of its threads,
and under AddressSanitizer with UBSan, and ThreadSanitizer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from kernels.host.programs import build_tree, run, run_in
from kernels.sources import copy_with_rows
from ruamel.yaml import YAML

from tilerank.kernels import registry

ROWS = [row.name for row in registry.attention_rows() if row.device == "cuda" and row.host_exempt is None]

SCHEDULES = ("forward", "reverse", "last_in", "random")


def check(flavour: str, *arguments: str, timeout_s: float = 300) -> dict:
    """Run check_variants for one row; its summary, once all cases were right."""
    done = run(flavour, "check_variants", *arguments, timeout_s=timeout_s)
    cases = re.findall(r"^case (.*)$", done.stderr, re.MULTILINE)
    under_way = cases[-1] if cases else "none"
    assert done.returncode == 0, f"case under way: {under_way}\n{done.stdout}\n{done.stderr[-6000:]}"
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failed"] == 0
    assert summary["cases"] > summary["refused"]
    assert summary["cases"] == len(cases)
    return summary


@pytest.mark.parametrize("row", ROWS)
def test_agrees_with_the_reference(row: str) -> None:
    """In every order of its threads, and in each with the same bits."""
    digests = set()
    for schedule in SCHEDULES:
        summary = check("plain", "--variant", row, "--schedule", schedule, "--seed", "1")
        assert summary["variant"] == row
        assert 0 < summary["worst"] <= 1
        digests.add(summary["digest"])
    assert len(digests) == 1, "the results depend on the order in which threads run"


@pytest.mark.parametrize("row", ROWS)
def test_stays_in_bounds_and_aligned(row: str) -> None:
    check("address", "--variant", row)


@pytest.mark.parametrize("row", ROWS)
def test_threads_do_not_race(row: str) -> None:
    # A race does not depend on the length as a bound does: fewer lengths, two head dims.
    check("thread", "--variant", row, "--lengths", "1,33,65", "--head-dims", "2", "--schedule", "random")


def test_parts_of_balanced_kernels_cover_the_line() -> None:
    done = run("plain", "check_places")
    assert done.returncode == 0, done.stdout + done.stderr


def test_unknown_variant_is_an_error() -> None:
    done = run("plain", "check_variants", "--variant", "no_such_row")
    assert done.returncode == 2
    assert "no variant to check: no_such_row" in done.stderr


# ---- That check_variants can fail ----

KEYS = "const int64_t keys = visible_keys(args, view.k_len, query);"
STORE = "out_row[first + column] = from_float<Element>(accumulator[column] * normalizer);"

FAULTY = {
    "sees_padding": (
        KEYS,
        KEYS.replace("view.k_len", "args.key_lengths != nullptr ? args.k_len : view.k_len"),
        "nan, the reference says",
    ),
    "ignores_causal": (KEYS, "const int64_t keys = view.k_len;", "causal"),
    "reads_a_row_too_many": (
        KEYS,
        KEYS + " volatile float beyond = to_float(view.k[keys * args.k_token_stride]); (void)beyond;",
        "AddressSanitizer",
    ),
    "writes_beyond_a_row": (STORE, STORE + " out_row[args.head_dim] = Element{};", "AddressSanitizer"),
    "leaves_a_column_out": (STORE, "if (first + column > 0) " + STORE, "nan, the reference says"),
    "looks_at_the_batch": (
        STORE,
        STORE.replace("* normalizer", "* (args.batch > 1 ? 1.000001f : 1.0f) * normalizer"),
        "has other bits when sequence 0 is alone",
    ),
    "drops_a_key": ("row_sum += weight;", "row_sum += key == 2 ? 0.0f : weight;", "the reference says"),
}
"""Mistakes made in the naive kernel: text, its replacement, and what the report must contain."""


@pytest.fixture(scope="module")
def faulty_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """check_variants over a library whose CUDA rows are naive with one mistake each."""
    folder = tmp_path_factory.mktemp("faulty")
    cuda = copy_with_rows(folder, "reference", "naive")
    rows = YAML(typ="safe").load((cuda / "registry.yaml").read_text(encoding="utf-8"))["variants"]["attention"]
    naive = rows.pop("naive")
    source = (cuda / naive["file"]).read_text(encoding="utf-8")
    for name, (text, replacement, _) in FAULTY.items():
        assert source.count(text) == 1
        faulty = source.replace(text, replacement).replace("attention_naive(", f"attention_{name}(")
        assert f"attention_{name}(" in faulty
        rows[name] = naive | {"file": f"attention/{name}.cu"}
        (cuda / rows[name]["file"]).write_text(
            faulty.replace("namespace naive", f"namespace {name}").replace("naive::", f"{name}::"), encoding="utf-8"
        )
    with (cuda / "registry.yaml").open("w", encoding="utf-8") as file:
        YAML().dump({"variants": {"attention": rows}}, file)
    tree = folder / "tree"
    build_tree(tree, "address", cuda)
    return tree


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTY)
def test_a_mistake_in_a_kernel_is_found(faulty_tree: Path, name: str) -> None:
    done = run_in(faulty_tree, "check_variants", "--variant", name, "--head-dims", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert FAULTY[name][2] in done.stdout + done.stderr
