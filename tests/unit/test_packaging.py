"""What `pip install` puts on a machine that has no checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from kernels.sources import copy_with_rows

from stages import wheel
from tilerank import __version__
from tilerank.kernels import build


def test_the_wheel_holds_every_module_and_the_kernels_sources(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    tree, site = tmp_path / "tree", tmp_path / "site"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, tree)
    for name in ("src", "cuda"):
        shutil.copytree(repository / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, check=True)
    (wheel,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)

    modules = {path.relative_to(tree / "src") for path in (tree / "src").rglob("*.py")}
    sources = {Path("tilerank/_cuda", name) for name in build.read_sources(tree / "cuda") if not name.startswith(".")}
    program_of_doctor = Path("tilerank/_cuda/tests/sanity.cc")
    there = {path.relative_to(site) for path in site.rglob("*")}
    assert (modules | sources | {program_of_doctor}) - there == set()

    shutil.rmtree(tree)
    code = "from tilerank.kernels import build, registry; build.read_sources(registry.cuda_dir())['registry.yaml']"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)


# ---- A wheel with the library in it ----


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked wheel that carries the library, here the reference's."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wheel, "ROOT", _without_tensorflow(folder / "root"))
        assert wheel.main(["--backend", "cpu", "--out", str(folder / "dist")]) == 0
    (made,) = (folder / "dist").iterdir()
    assert re.fullmatch(rf"tilerank-{__version__}-py3-none-manylinux_2_\d+_\w+\.whl", made.name)
    with zipfile.ZipFile(made) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def _without_tensorflow(root: Path) -> Path:
    """The checkout as links, without an environment that `make tf-env` may have made in it."""
    root.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "src", "cuda"):
        (root / name).symlink_to(wheel.ROOT / name)
    return root


def load_elsewhere(site: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Load the library of an installed wheel where there is no compiler, no nvcc and no cache; compute with it."""
    code = (
        "from tilerank.kernels import diagnosis, library; loaded = library.load(); print(loaded.path); "
        "print(diagnosis._known_answer(loaded).detail)"
    )
    environment = {"PYTHONPATH": str(site), "PATH": str(folder / "nothing"), "TILERANK_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_wheel_with_the_library_needs_no_compiler(site: Path, tmp_path: Path) -> None:
    answer = load_elsewhere(site, tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == f"{site}/tilerank/_lib/libtilerank.so\nthe mean of 1 and 2 is 1.5\n"
    assert not (tmp_path / "cache").exists()


def test_an_edited_source_is_never_served_by_the_library_in_the_wheel(site: Path, tmp_path: Path) -> None:
    edited = shutil.copytree(site, tmp_path / "edited")
    with (edited / "tilerank" / "_cuda" / "library.cc").open("a") as file:
        file.write("// edited\n")
    answer = load_elsewhere(edited, tmp_path)
    assert answer.returncode == 1
    assert "building the kernel library needs" in answer.stderr


def test_a_library_of_other_sources_in_the_wheel_is_refused(site: Path, tmp_path: Path) -> None:
    """The manifest fits the sources, the library does not: its own build id gives it away."""
    swapped = shutil.copytree(site, tmp_path / "swapped")
    path = swapped / "tilerank" / "_lib" / "libtilerank.so"
    (identity,) = set(re.findall(rb"\b[0-9a-f]{32}\b", path.read_bytes()))
    path.write_bytes(path.read_bytes().replace(identity, b"0" * 32))
    answer = load_elsewhere(swapped, tmp_path)
    assert answer.returncode == 1
    assert "libtilerank.so was built from other sources" in answer.stderr


CUDA = build.Target("cuda", "80-real;90a-real")


@pytest.mark.parametrize(
    ("built_for", "wanted", "serves"),
    [
        (CUDA, build.Target("cpu"), True),
        (CUDA, build.Target("cuda", "90a-real"), True),
        (CUDA, build.Target("cuda", "90a-real;75-real"), False),
        (CUDA, build.Target("cuda", "90-virtual"), False),
        (build.Target("cpu"), CUDA, False),
        (build.Target("cpu"), build.Target("cpu"), True),
    ],
)
def test_what_a_packaged_library_serves(built_for: build.Target, wanted: build.Target, serves: bool) -> None:
    packaged = build.Packaged(build.Built(Path("somewhere"), "id"), built_for)
    assert packaged.serves(wanted) is serves


def test_the_tag_names_the_newest_glibc_that_is_asked_for(tmp_path: Path) -> None:
    old, new = tmp_path / "old.so", tmp_path / "new.so"
    old.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.14\0")
    new.write_bytes(b"\0GLIBC_2.34\0GLIBC_2.4\0GLIBCXX_3.4.30\0")
    assert re.fullmatch(r"manylinux_2_17_\w+", wheel.platform_tag([old]))
    assert re.fullmatch(r"manylinux_2_34_\w+", wheel.platform_tag([old, new]))


# ---- The C library ----


@pytest.mark.parametrize("backend", ["cpu", "host"])
def test_the_library_exports_its_own_names_only(backend: str, tmp_path: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("there is no nm (binutils)")
    source = copy_with_rows(tmp_path, "reference", "naive")
    built = build.build(build.Target(backend), source=source, cache_folder=tmp_path / "cache")
    command = ["nm", "-D", "--defined-only", str(built.path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = {line.split()[-1] for line in lines}
    declared = set(re.findall(r"\b(tilerank_\w+)\(", (source / "include" / "tilerank.h").read_text(encoding="utf-8")))
    assert len(declared) > 15
    assert declared <= names
    assert not [name for name in names if not name.startswith("tilerank_")]


OUTSIDE = """
cmake_minimum_required(VERSION 3.25)
project(outside LANGUAGES C)
find_package(tilerank {version} REQUIRED)
message(STATUS "backend ${{tilerank_BACKEND}}, archs '${{tilerank_ARCHS}}'")
add_executable(program "{source}")
target_link_libraries(program PRIVATE tilerank::tilerank m)
"""


def test_a_c_project_outside_finds_the_installed_package(repository: Path, tmp_path: Path) -> None:
    tools = build.toolchain(False)

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(each) for each in command], capture_output=True, text=True, check=False)

    def configure(version: str) -> subprocess.CompletedProcess[str]:
        outside.mkdir(exist_ok=True)
        text = OUTSIDE.format(version=version, source=repository / "cuda" / "examples" / "fused_attention.c")
        (outside / "CMakeLists.txt").write_text(text, encoding="utf-8")
        prefix = f"-DCMAKE_PREFIX_PATH={tmp_path / 'installed'}"
        return run(tools.cmake, "-G", "Ninja", "-S", outside, "-B", outside / version, prefix, ninja)

    outside, ninja = tmp_path / "outside", f"-DCMAKE_MAKE_PROGRAM={tools.ninja}"
    options = ["-DTILERANK_BACKEND=cpu", f"-DCMAKE_INSTALL_PREFIX={tmp_path / 'moved'}", ninja]
    library = [tools.cmake, "-G", "Ninja", "-S", repository / "cuda", "-B", tmp_path / "build", *options]
    for command in (library, [tools.cmake, "--build", tmp_path / "build", "--target", "install"]):
        answer = run(*command, *([f"-DPython3_EXECUTABLE={sys.executable}"] if command is library else []))
        assert answer.returncode == 0, answer.stdout + answer.stderr
    (tmp_path / "moved").rename(tmp_path / "installed")  # no path in it may be absolute

    answer = configure(__version__)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "backend cpu, archs ''" in answer.stdout
    assert run(tools.cmake, "--build", outside / __version__).returncode == 0
    answer = run(outside / __version__ / "program")
    assert answer.returncode == 0, answer.stderr
    assert "out[1][0] = -1.3416" in answer.stdout

    refused = configure("9.0")
    assert refused.returncode != 0
    assert f"version: {__version__}" in refused.stderr


def test_cmake_and_python_say_one_version(repository: Path) -> None:
    text = (repository / "cuda" / "CMakeLists.txt").read_text(encoding="utf-8")
    assert f"project(tilerank VERSION {__version__} " in text
