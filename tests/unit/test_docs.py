"""The documents say what the code does: tables equal the registry, the example builds and is right, names exist."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kernels import abi
from kernels.sources import copy_with_rows

from tilerank.kernels import build, library, registry
from tilerank.kernels.registry import Row
from tilerank.report import update_markers
from tilerank.report.variants import PAGES, doc_tables, predictions_table, variants_table

CUDA_ROWS = [row for row in registry.attention_rows() if row.device == "cuda"]

HAND_WRITTEN = ("docs/attention.md", "docs/bindings.md", "docs/measuring.md")

ROW = Row(
    "narrow", "a/b.cu", "cuda", 7, ("fp32", "bf16"), (32, 64), ("packed",), ("causal",), 80, "9 us. One read a score."
)
WIDE = Row("wide", "c.cc", "cpu", 0, ("fp16",), None, ("padded",), (), 0, "Never timed.")


def read(repository: Path, name: str) -> str:
    return (repository / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def sections(text: str, level: int) -> dict[str, str]:
    """Heading -> what follows, up to the next heading of that level or above."""
    found = re.split(rf"^(#{{1,{level}}}) (.+)$", text, flags=re.MULTILINE)[1:]
    triples = zip(found[::3], found[1::3], found[2::3], strict=True)
    return {title: body for marks, title, body in triples if len(marks) == level}


# ---- Tables ----


@pytest.mark.parametrize("page", PAGES)
def test_committed_tables_are_those_of_the_registry(repository: Path, page: str) -> None:
    text = read(repository, page)
    assert update_markers(text, doc_tables(registry.attention_rows())) == text, (
        f"{page} is behind cuda/registry.yaml; run `python -m tilerank.report.variants`"
    )


def test_each_table_stands_in_one_page(repository: Path) -> None:
    """Without its markers a table would be missing, and the test above would pass."""
    text = "".join(read(repository, page) for page in PAGES)
    for name, table in doc_tables(registry.attention_rows()).items():
        assert text.count(f"<!-- tilerank:{name}:begin -->") == 1
        assert table in text


def cells(table: str, line: int) -> list[str]:
    return table.splitlines()[line].strip("| ").split(" | ")


def test_what_a_variant_serves() -> None:
    table = variants_table((ROW, WIDE))
    assert len(table.splitlines()) == 4
    assert cells(table, 2) == [
        *("`narrow`", "`a/b.cu`", "fp32, bf16", "32, 64", "packed", "causal", "any", "sm_80", "7"),
    ]
    assert cells(table, 3) == ["`wide`", "`c.cc`", "fp16", "1 to 256", "padded", "none", "any", "CPU", "0"]


@pytest.mark.parametrize(
    ("change", "column", "shown"),
    [
        ({"max_k_len": 1 << 30}, 6, "up to 2^30"),
        ({"max_k_len": 1000}, 6, "up to 1,000"),
        ({"dtype_min_sm": {"bf16": 86}}, 7, "sm_80 (bf16 from sm_86)"),
        ({"min_sm": 90, "max_sm": 90}, 7, "sm_90 only"),
        ({"max_sm": 89}, 7, "sm_80 to sm_89"),
        ({"preference": 12}, 8, "12"),
        ({"preference": 0}, 8, "0"),
        ({"auto": False, "preference": 12}, 8, "by name"),
    ],
)
def test_what_a_variant_says_beside_that(change: dict[str, object], column: int, shown: str) -> None:
    assert cells(variants_table((replace(ROW, **change),)), 2)[column] == shown


def test_predictions_come_with_their_reason_and_without_what_is_never_timed() -> None:
    slow = replace(ROW, name="slow", rung=8, prediction="Slow: it reads q | k twice.")
    table = predictions_table((WIDE, ROW, slow))
    assert len(table.splitlines()) == 4
    assert cells(table, 2) == ["7", "`narrow`", "9 us", "One read a score."]
    assert cells(table, 3) == ["8", "`slow`", "Slow", "it reads q \\| k twice."], "a bar in a cell is escaped"
    assert cells(predictions_table((replace(ROW, prediction="Fast."),)), 2)[2:] == ["Fast", "–"]


# ---- Words about variants ----


def test_every_rung_has_its_answer_in_ladder_order(repository: Path) -> None:
    titles = [title for title in sections(read(repository, "docs/ladder.md"), 3) if title.startswith("`")]
    assert titles == [f"`{row.name}`" for row in CUDA_ROWS]


def test_answers_introduce_no_figures(repository: Path) -> None:
    """A time or share in the prose is one that the rung's row predicts; what was measured stands in tables."""
    answers = sections(read(repository, "docs/ladder.md"), 3)
    figure = re.compile(r"\d[\d,.]*(?=\s*(?:us\b|µs\b|ms\b|%|×|GB\b))")
    assert figure.findall("took 31 us, 1.5 ms, 20 %") == ["31", "1.5", "20"]
    for title, answer in answers.items():
        prediction = next((row.prediction for row in CUDA_ROWS if f"`{row.name}`" == title), "")
        wrong = [number for number in figure.findall(answer) if number not in prediction]
        assert not wrong, f"{title}: {wrong}"


@pytest.mark.parametrize("page", ["docs/analysis.md", "docs/measuring.md"])
def test_pages_introduce_no_figures_outside_their_tables(repository: Path, page: str) -> None:
    text = read(repository, page)
    prose = re.sub(r"<!-- tilerank:(\w+):begin -->.*?<!-- tilerank:\1:end -->", "", text, flags=re.DOTALL)
    assert not re.findall(
        r"\d[\d,.]*\s*(?:us|µs|ms|%|×|GB|KB|TFLOP)", re.sub(r"^```.*?^```", "", prose, flags=re.M | re.S)
    )


def test_the_analysis_has_its_tables_filled(repository: Path) -> None:
    text = read(repository, "docs/analysis.md")
    for name in ("amdahl", "counters", "predicted", "devices", "architectures"):
        (table,) = re.findall(
            rf"<!-- tilerank:{name}:begin -->(.*?)<!-- tilerank:{name}:end -->", text, flags=re.DOTALL
        )
        assert table.count("\n|") >= 3, name


def test_the_changelog_has_a_line_for_each_variant(repository: Path) -> None:
    text = read(repository, "CHANGELOG.md")
    for operation in ("attention", "layernorm", "block"):
        for row in registry.rows_of(operation):
            assert re.search(rf"^- `{row.name}`: ", text, flags=re.MULTILINE), (operation, row.name)


# ---- Names and commands ----


@pytest.mark.parametrize("page", [*PAGES, *HAND_WRITTEN, "CHANGELOG.md"])
def test_files_targets_and_modules_named_exist(repository: Path, page: str) -> None:
    text = read(repository, page)
    paths = re.findall(r"(?<![\w/])(?:cuda|docs|src|tests|stages)/[\w./]+\w", text)
    example = {"cuda/attention/99_one_pass.cu", "cuda/attention/NN_name.cu"}
    missing = [path for path in paths if path not in example and not (repository / path).exists()]
    assert not missing
    targets = set(re.findall(r"^([a-z-]+):.*## ", read(repository, "Makefile"), flags=re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE)) <= targets
    for module in re.findall(r"python -m ((?:tilerank|stages)[\w.]*)", text):
        root = "src" if module.startswith("tilerank") else "."
        assert (repository / root / (module.replace(".", "/") + ".py")).is_file(), module


def test_links_between_pages_lead_somewhere(repository: Path) -> None:
    for page in (*PAGES, *HAND_WRITTEN, "README.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", read(repository, page)):
            assert ((repository / page).parent / target).exists(), f"{page}: {target}"


# ---- The example ----


def test_the_example_variant_is_complete_and_right(repository: Path, tmp_path: Path) -> None:
    """The file and the row as they stand in docs/kernels.md: built for the CPU and compared with the reference."""
    text = read(repository, "docs/kernels.md")
    (kernel,), (row_text,) = blocks(text, "cuda"), blocks(text, "yaml")
    source = copy_with_rows(tmp_path, "reference", "naive")
    with (source / "registry.yaml").open("a", encoding="utf-8") as file:
        file.write(row_text)
    path = source / re.search(r"file: (\S+)", row_text).group(1)
    path.write_text(kernel, encoding="utf-8")
    row = registry.read_registry(source / "registry.yaml")["attention"][-1]
    header = kernel.split("#include", 1)[0].splitlines()
    assert path.name.startswith(f"{row.rung:02d}_")
    assert len(header) <= 8
    assert all(line.startswith("//") for line in header)

    built = build.build(build.Target("host"), source=source, cache_folder=tmp_path / "cache")
    loaded = library.Library(built.path, built.build_id)
    rng = np.random.default_rng(3)
    for head_dim in row.head_dims:
        q, k, v = (rng.standard_normal((2, 3, length, head_dim)).astype(np.float32) for length in (5, 9, 9))
        k[0, :, 4:] = v[0, :, 4:] = np.nan
        for causal in (False, True):
            for lengths in (np.array([4, 9], np.int32), np.array([0, 9], np.int32)):
                results = []
                for name in ("reference", row.name):
                    out = np.full_like(q, np.nan)
                    loaded.run(name, abi.padded_params(q, k, v, out, key_lengths=lengths, causal=causal))
                    results.append(out)
                assert np.isfinite(results[0]).all()
                np.testing.assert_allclose(results[1], results[0], atol=1e-5)
        offsets = np.array([0, 2, 5], np.int32), np.array([0, 6, 9], np.int32)
        q, k, v = (rng.standard_normal((length, 3, head_dim)).astype(np.float32) for length in (5, 9, 9))
        results = []
        for name in ("reference", row.name):
            out = np.full_like(q, np.nan)
            loaded.run(name, abi.packed_params(q, k, v, out, *offsets))
            results.append(out)
        np.testing.assert_allclose(results[1], results[0], atol=1e-5)
