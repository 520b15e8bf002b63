"""The shape of the project: one-way imports, one name for stage, module, block and metrics file."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

TOOLS = {"environment", "compose", "gpu", "pack", "quickstart", "records_check", "show", "ui", "finetune", "wheel"}
TOOLS |= {"import_history"}
"""Modules in stages/ that are programs but no block of dvc.yaml (`finetune` is a side stage)."""


def _imports(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_imports_go_one_way(repository: Path) -> None:
    for path in (repository / "src").rglob("*.py"):
        wrong = [name for name in _imports(path) if _within(name, "stages") or _within(name, "tests")]
        assert not wrong, f"{path} imports {wrong}"
    kernels = repository / "src" / "tilerank" / "kernels"
    allowed = ("tilerank.kernels", "tilerank.errors", "tilerank.types", "tilerank._version")
    for path in kernels.rglob("*.py"):
        own = [name for name in _imports(path) if _within(name, "tilerank") and name != "tilerank"]
        wrong = [name for name in own if not any(_within(name, base) for base in allowed)]
        assert not wrong, f"{path} imports {wrong}"


def test_includes_go_one_way(repository: Path) -> None:
    include = re.compile(r'#include\s+[<"]([^">]+)[">]')
    framework = re.compile(r"torch|ATen|c10|tensorflow|xla|jax", re.IGNORECASE)
    checked = 0
    for path in (repository / "cuda").rglob("*"):
        if path.suffix not in {".cu", ".cuh", ".cc", ".h", ".inl", ".c"}:
            continue
        if "bindings" in path.parts or "build" in path.parts:
            continue
        names = include.findall(path.read_text(encoding="utf-8"))
        checked += 1
        assert not [name for name in names if framework.search(name)], f"{path} includes a framework's header"
        if path.parent.name == "include":
            assert set(names) <= {"stddef.h", "stdint.h"}, f"{path}: the seam includes only C's own headers"
        if path.suffix == ".cu" and path.parent.name != "tests":
            wrong = [name for name in names if name.startswith("cuda") or ".cu" in name.replace(".cuh", "")]
            assert not wrong, f"{path} includes {wrong}: kernels reach CUDA through common/device.h"
    assert checked > 0


def test_no_array_of_arrays_of_a_class_that_sets_its_members(repository: Path) -> None:
    """nvcc 13.0 gives the members their initial values in the first of the arrays alone (the others become zeros, which
    no test on a CPU sees): a struct between them is right."""
    sources = [path for path in (repository / "cuda").rglob("*") if path.suffix in {".cu", ".cuh"}]
    texts = {path: path.read_text(encoding="utf-8") for path in sources}
    body = re.compile(r"^(?:struct|class) (\w+)[^;{]*\{(.*?)^\};", re.MULTILINE | re.DOTALL)
    starts = re.compile(r"^    (?!static|constexpr|using)\w[\w:<> ]* \w+ = (?!0|0u|0\.0f|false|nullptr)", re.MULTILINE)
    classes = {name for text in texts.values() for name, members in body.findall(text) if starts.search(members)}
    assert "SoftmaxState" in classes  # its maximum starts below every score
    wrong = re.compile(rf"\b(?:{'|'.join(classes)})(?:<[^;()]*>)? \w+\[[^]]+\]\[[^;]*;")
    for path, text in texts.items():
        assert not (found := wrong.search(text)), f"{path}: {found and found[0]}"


def test_a_stage_is_a_module_a_block_and_a_metrics_file(repository: Path) -> None:
    blocks = YAML(typ="safe").load((repository / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    modules = {path.stem for path in (repository / "stages").glob("*.py") if not path.stem.startswith("_")}
    assert modules - TOOLS == set(blocks)
    for name, block in blocks.items():
        body = block.get("do", block)
        assert body["cmd"].split("--")[0].strip() == f"python -m stages.{name}"
        records = [entry for entry in body["outs"] if "metrics/" in str(entry)]
        expected = f"metrics/${{machine.name}}/{name}" + ("_${key}" if "do" in block else "") + ".json"
        assert [next(iter(entry)) for entry in records] == ([] if name == "report" else [expected])
        assert "metrics" not in body, f"{name}: `dvc exp show` would have a column for each of its figures"
        for entry in records:
            assert next(iter(entry.values())) == {"cache": False, "persist": True}, name


@pytest.mark.parametrize(
    "module", ["tilerank", "tilerank.data", "tilerank.retrieval", "tilerank.models", "tilerank.cli"]
)
def test_import_leaves_torch_out(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_top_level_is_fixed(repository: Path) -> None:
    listed = subprocess.run(
        ["git", "-C", str(repository), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    top = {name.split("/")[0] for name in listed.stdout.splitlines()}
    folders = {"conf", "stages", "cuda", "src", "metrics", "tests", "docs", ".ci", ".dvc"}
    files = {
        "dvc.yaml",
        "dvc.lock",
        "params.yaml",
        "README.md",
        "Makefile",
        "LICENSE",
        "pyproject.toml",
        "CHANGELOG.md",
    }
    files |= {".gitignore", ".dvcignore", ".clang-format"}
    assert top <= folders | files, sorted(top - folders - files)
