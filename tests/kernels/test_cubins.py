"""What is recorded of compiled kernels, and the digest that later stages depend on."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from stages import build_kernels
from stages._run import Stage
from tilerank.config import load_settings
from tilerank.errors import TilerankError
from tilerank.kernels import build, cubins, registry
from tilerank.kernels.cubins import Resources

needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="there is no nvcc")

PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1aIfEvi' for 'sm_90a'
ptxas info    : Function properties for _Z1aIfEvi
    40 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 49152 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 165.322 ms
ptxas info    : Function properties for _Z6helperv
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_Z1bv' for 'sm_90a'
ptxas info    : Function properties for _Z1bv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for _Z5otherv
    96 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 0 barriers, 40 bytes cumulative stack size
"""


def test_resources_are_read_from_ptxas() -> None:
    assert cubins.parse_ptxas(PTXAS) == {
        "_Z1aIfEvi": Resources(registers=168, shared_bytes=49152, stack_bytes=40, spill_bytes=28),
        "_Z1bv": Resources(registers=20, shared_bytes=0, stack_bytes=0, spill_bytes=0),
    }


def test_a_row_is_compiled_for_the_architectures_it_serves() -> None:
    naive = registry.get("naive")
    assert cubins.architectures(naive) == ("75-real", "80-real", "86-real", "89-real", "90a-real")
    assert cubins.architectures(naive, "75-virtual;90-virtual") == ()


def test_the_flags_that_reach_device_code_are_cmakes(repository: Path) -> None:
    """CMake's release flags and language standard: the digest is of the code that the library holds."""
    cmake = (repository / "cuda" / "CMakeLists.txt").read_text(encoding="utf-8")
    assert "set(CMAKE_CUDA_STANDARD 17)" in cmake
    assert 'set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")' in cmake
    assert cubins.DEVICE_FLAGS == ("-std=c++17", "-O3", "-DNDEBUG")
    assert not re.search(r"lineinfo|fast_math|CMAKE_CUDA_FLAGS\b", cmake)


def test_the_source_digest_follows_the_rows_own_text(tmp_path: Path) -> None:
    source = tmp_path / "cuda"
    shutil.copytree(registry.cuda_dir(), source)
    naive = registry.get("naive")
    before = cubins.source_digest(naive, source)
    (source / "attention" / "reference.cc").open("a").write("// another row's\n")
    assert cubins.source_digest(naive, source) == before
    (source / "common" / "wgmma.cuh").open("a").write("// a header that the row does not include\n")
    assert cubins.source_digest(naive, source) == before
    (source / "common" / "attention.cuh").open("a").write("// shared\n")
    assert cubins.source_digest(naive, source) != before


def test_a_row_is_compiled_from_its_file_and_all_that_it_includes(tmp_path: Path) -> None:
    found = cubins.sources_of(registry.get("split_warpgroups"))
    assert {"attention/22_split_warpgroups.cu", "common/balanced.cuh", "common/device.h", "include/tilerank.h"} <= {
        *found
    }
    assert "common/device_cuda.inl" in found
    assert not [name for name in found if name.startswith("attention/") and name != "attention/22_split_warpgroups.cu"]
    assert list(found) == sorted(found)


@needs_nvcc
def test_no_header_is_missed() -> None:
    """As the compiler itself lists them."""
    source = registry.cuda_dir()
    for row in registry.attention_rows():
        if row.name not in ("naive", "persistent", "split_warpgroups"):
            continue
        command = [str(build.find_nvcc()), "-std=c++17", "-I.", "-Iinclude", "-MM", row.file]
        listed = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True).stdout
        names = {Path(name).as_posix() for name in listed.replace("\\\n", " ").split(":", 1)[1].split()}
        own = {os.path.relpath(source / name, source) for name in names if not name.startswith("/usr")}
        own = {name for name in own if not name.startswith("..")}
        assert own <= set(cubins.sources_of(row)), row.name


@needs_nvcc
def test_the_digest_ignores_folder_and_comments_and_follows_the_code(tmp_path: Path) -> None:
    nvcc, naive = build.find_nvcc(), registry.get("naive")
    digests = {}
    for name in ("here", "a/much/deeper/place", "edited"):
        source = tmp_path / name / "cuda"
        shutil.copytree(registry.cuda_dir(), source)
        kernel = source / naive.file
        text = "// A word before.\n\n" + kernel.read_text(encoding="utf-8")
        if name == "edited":
            assert "expf(score - shift)" in text
            text = text.replace("expf(score - shift)", "expf(shift - score)")
        if name != "here":
            kernel.write_text(text, encoding="utf-8")
            (source / "common" / "attention.cuh").open("a").write("// A word after.\n")
        cubin = cubins.compile_cubin(naive, "90a-real", nvcc, source)
        digests[name] = cubin.sha256
        assert set(cubin.kernels) == {
            f"tilerank::naive::kernel<{element}>" for element in ("float", "__half", "__nv_bfloat16")
        }
        assert all(resources.stack_bytes == resources.spill_bytes == 0 for resources in cubin.kernels.values())
    assert digests["here"] == digests["a/much/deeper/place"] != digests["edited"]


@needs_nvcc
def test_what_does_not_compile_is_one_line(tmp_path: Path) -> None:
    source = tmp_path / "cuda"
    shutil.copytree(registry.cuda_dir(), source)
    naive = registry.get("naive")
    (source / naive.file).write_text("int broken = nonsense;\n", encoding="utf-8")
    with pytest.raises(TilerankError, match=r"01_naive\.cu does not compile for 90a-real: .*nonsense") as error:
        cubins.compile_cubin(naive, "90a-real", build.find_nvcc(), source)
    assert "\n" not in str(error.value)
    (source / naive.file).write_text("int empty = 0;\n", encoding="utf-8")
    with pytest.raises(TilerankError, match="names no kernel in it for 90a-real"):
        cubins.compile_cubin(naive, "90a-real", build.find_nvcc(), source)


class Untracked:
    """Stands in for the MLflow run."""

    def log_metrics(self, record: object) -> None:
        pass


def run_stage(repository: Path, out: Path, variant: str) -> dict[str, object]:
    settings = load_settings(repository / "params.yaml")
    options = argparse.Namespace(variant=variant)
    build_kernels.run(Stage("build_kernels", settings, repository, out, options, {"command": "test"}, Untracked()))
    (path,) = out.glob(f"metrics/*/build_kernels_{variant}.json")
    return json.loads(path.read_text(encoding="utf-8"))


def test_without_nvcc_the_record_says_what_is_missing(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    record = run_stage(repository, tmp_path, "naive")
    assert record["build_kernels"] == {"naive": {"available": False, "reason": "no nvcc on this machine"}}
    assert record["digest"] == f"source:{cubins.source_digest(registry.get('naive'))}"


def test_a_cpu_row_has_nothing_to_compile(repository: Path, tmp_path: Path) -> None:
    record = run_stage(repository, tmp_path, "reference")
    assert record["build_kernels"]["reference"]["available"] is False
    assert record["digest"].startswith("source:")


def test_a_variant_that_does_not_exist_is_refused(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no attention variant is called 'fastest'"):
        run_stage(repository, tmp_path, "fastest")


@needs_nvcc
def test_the_record_has_every_architecture(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling is replaced by canned answers: the real thing is tested above."""

    def compiled(row: registry.Row, arch: str, nvcc: Path, source: Path | None = None) -> cubins.Cubin:
        small, large = Resources(20, 16, 0, 0), Resources(40, 0, 8, 4)
        return cubins.Cubin(f"digest of {arch}", {"small": small, "large": large})

    monkeypatch.setattr(cubins, "compile_cubin", compiled)
    record = run_stage(repository, tmp_path, "naive")
    described = record["build_kernels"]["naive"]
    assert set(described["archs"]) == {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90a"}
    hopper = described["archs"]["sm_90a"]
    assert hopper["cubin_sha256"] == "digest of 90a-real"
    assert {name: hopper[name] for name in ("registers", "shared_bytes", "stack_bytes", "spill_bytes")} == {
        "registers": 40,
        "shared_bytes": 16,
        "stack_bytes": 8,
        "spill_bytes": 4,
    }
    assert hopper["kernels"]["small"] == {"registers": 20, "shared_bytes": 16, "stack_bytes": 0, "spill_bytes": 0}
    assert record["digest"] == f"cubin:{described['cubin_sha256']}"
    assert described["nvcc"] == build.nvcc_version(build.find_nvcc())
