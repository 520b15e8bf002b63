"""docs/colab_t4.sh with faked tools: what it would do on machines of each kind, and that it does it in order."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

SMI_PAGE = """\
Sun Nov 29 12:00:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver:<22} Driver Version: {driver:<15} CUDA Version: {cuda:<8} |
|-----------------------------------------+------------------------+----------------------+
"""
TURING = "Tesla T4, 7.5"


class Runtime:
    """A folder of programs that stand in for a machine's own."""

    def __init__(self, folder: Path, repository: Path) -> None:
        self.folder, self.repository = folder, repository
        self.log = folder / "log"
        for name in ("bash", "sed", "head", "dirname", "mktemp", "rm", "cat", "ln"):
            (folder / name).symlink_to(shutil.which(name))
        self.program("make", f'echo "make $* (pins: $PIP_CONSTRAINT)" >> {self.log}')
        self.program("python3", 'case "$2" in *ensurepip*) exit 0;; *) echo 12;; esac')

    def program(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        path.chmod(0o755)

    def gpu(self, query: str, driver: str = "580.65.06", cuda: str = "13.0") -> None:
        page = self.folder / "page"
        page.write_text(SMI_PAGE.format(driver=driver, cuda=cuda), encoding="utf-8")
        self.program("nvidia-smi", f'if [ $# -gt 0 ]; then echo "{query}"; else cat {page}; fi')

    def nvcc(self, release: str, sanity: str = "echo ok") -> None:
        """An nvcc that leaves a program where its -o says."""
        made = self.folder / "made"
        made.write_text(f'#!/bin/bash\necho "sanity" >> {self.log}\n{sanity}\n', encoding="utf-8")
        made.chmod(0o755)
        self.program(
            "nvcc",
            f'if [ "$1" = --version ]; then echo "Cuda compilation tools, release {release}, V{release}.85"; exit; fi\n'
            f'echo "nvcc $1 $2 $3" >> {self.log}; while [ "$1" != -o ]; do shift; done; ln -s {made} "$2"',
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.folder), "CUDA_HOME": "/nonexistent", "TMPDIR": str(self.folder)}
        script = self.repository / "docs" / "colab_t4.sh"
        return subprocess.run(
            ["bash", script, *arguments], env=environment, cwd="/", capture_output=True, text=True, check=False
        )

    def calls(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []


@pytest.fixture
def runtime(tmp_path: Path, repository: Path) -> Runtime:
    return Runtime(tmp_path, repository)


@pytest.mark.parametrize(("driver", "cuda", "release"), [("550.54.15", "12.4", "12.5"), ("580.65.06", "13.0", "13.0")])
def test_dry_run_says_what_would_be_done_and_does_nothing(
    runtime: Runtime, driver: str, cuda: str, release: str
) -> None:
    runtime.gpu(TURING, driver, cuda)
    runtime.nvcc(release)
    answer = runtime.run("--dry-run")
    assert answer.returncode == 0, answer.stderr
    major = cuda.split(".")[0]
    lines = answer.stdout.splitlines()
    assert lines[0] == f"colab_t4: Tesla T4, compute capability 7.5, driver for CUDA {major}, nvcc {major}"
    assert re.fullmatch(r"\+ \S*/nvcc -x cu -arch=sm_75 -o \S+/sanity cuda/tests/sanity.cc", lines[1])
    assert lines[3:] == ["+ make env", "+ make gpu OVERRIDES=model=ms_marco"]
    assert runtime.calls() == []


def test_a_runtime_without_nvcc_gets_one_for_cuda_13(runtime: Runtime) -> None:
    runtime.gpu(TURING)
    lines = runtime.run("--dry-run").stdout.splitlines()
    install = "+ .venv/bin/python -m pip install --quiet nvidia-cuda-nvcc nvidia-cuda-cccl"
    assert lines[1:] == ["+ make env", install, "+ make gpu OVERRIDES=model=ms_marco"]


@pytest.mark.parametrize(
    ("query", "cuda", "release", "message"),
    [
        ("Tesla P100-PCIE-16GB, 6.0", "12.4", "12.5", "Tesla P100-PCIE-16GB has compute capability 6.0; 7.5 (T4) is"),
        (TURING, "11.4", "11.4", "the driver serves CUDA 11; 12 is the oldest that is served"),
        (TURING, "N/A", "12.5", "the driver serves CUDA of no version; 12 is"),
        (TURING, "12.4", "13.0", "is of CUDA 13 and the driver serves CUDA 12: put an nvcc of CUDA 12 first"),
        (TURING, "12.4", None, "no nvcc, and packages bring one for CUDA 13 only: install the CUDA 12 toolkit"),
        ("[Not Supported]", "12.4", "12.5", "nvidia-smi gives no compute capability"),
    ],
)
def test_what_cannot_work_stops_before_anything_is_done(
    runtime: Runtime, query: str, cuda: str, release: str | None, message: str
) -> None:
    runtime.gpu(query, cuda=cuda)
    if release is not None:
        runtime.nvcc(release)
    answer = runtime.run()
    assert answer.returncode == 1
    assert message in answer.stderr
    assert runtime.calls() == []


@pytest.mark.parametrize("smi", [None, "echo 'No devices were found'; exit 6"])
def test_without_a_gpu_it_says_where_to_get_one(runtime: Runtime, smi: str | None) -> None:
    if smi is not None:
        runtime.program("nvidia-smi", smi)
    answer = runtime.run()
    assert answer.returncode == 1
    assert "Runtime > Change runtime type > T4 GPU" in answer.stderr


def test_the_sanity_kernel_runs_before_the_downloads(runtime: Runtime) -> None:
    runtime.gpu(TURING, "550.54.15", "12.4")
    runtime.nvcc("12.5")
    answer = runtime.run("model=all_minilm_l6", "dataset=pydocs")
    assert answer.returncode == 0, answer.stderr
    pins = f"(pins: {runtime.repository}/docs/colab_t4.txt)"
    assert runtime.calls() == [
        "nvcc -x cu -arch=sm_75",
        "sanity",
        f"make env {pins}",
        f"make gpu OVERRIDES=model=all_minilm_l6 dataset=pydocs {pins}",
    ]


def test_a_sanity_kernel_that_fails_ends_it(runtime: Runtime) -> None:
    runtime.gpu(TURING, "550.54.15", "12.4")
    runtime.nvcc("12.5", sanity="echo element 3 is 0; exit 1")
    answer = runtime.run()
    assert answer.returncode != 0
    assert runtime.calls() == ["nvcc -x cu -arch=sm_75", "sanity"]


def test_a_python_without_venv_gets_it(runtime: Runtime) -> None:
    runtime.gpu(TURING)
    runtime.program("python3", 'case "$2" in *ensurepip*) exit 1;; *) echo 12;; esac')
    assert "+ apt-get install -y -qq python3.12-venv" in runtime.run("--dry-run").stdout.splitlines()


def test_every_dependency_is_pinned_within_its_range(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    text = (repository / "docs" / "colab_t4.txt").read_text(encoding="utf-8")
    pins = dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins[requirement.name]), requirement


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_script_is_clean(repository: Path) -> None:
    answer = subprocess.run(
        ["shellcheck", repository / "docs" / "colab_t4.sh"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout
