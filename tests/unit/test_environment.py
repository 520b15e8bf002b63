"""`make env` and `make gpu`: which torch a machine gets, and what is recorded under which name."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from stages import environment, gpu
from tilerank import machine
from tilerank.kernels import tf_build

PAGE = "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: {cuda}     |"


class Recorded(environment.Environment):
    """Does not call pip, but remembers what with."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.calls: list[tuple[str, ...]] = []

    def pip(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        self.calls.append(arguments)
        return subprocess.CompletedProcess(arguments, 0)


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, cuda: str) -> None:
    program = folder / "nvidia-smi"
    answer = f'[ "$1" = -L ] && echo "GPU 0: Tesla T4" || echo "{PAGE.format(cuda=cuda)}"'
    program.write_text(f"#!/bin/sh\n{answer}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("TORCH_INDEX", raising=False)


@pytest.mark.parametrize(
    ("cuda", "arguments"),
    [
        ("12.4", ("install", "--index-url", "https://download.pytorch.org/whl/cu126", environment.TORCH)),
        ("13.0", ("install", environment.TORCH)),
        ("N/A", ("install", environment.TORCH)),
    ],
)
def test_torch_follows_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, arguments: tuple[str, ...]
) -> None:
    smi(tmp_path, monkeypatch, cuda)
    made = Recorded()
    made.install_torch()
    assert made.calls == [arguments]


def test_a_driver_that_no_torch_serves_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, "11.8")
    with pytest.raises(SystemExit, match=r"serves CUDA 11\.8; torch needs 12\.0 or newer"):
        Recorded().install_torch()


def test_tensorflow_comes_without_torch_and_with_what_the_binding_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    made = Recorded()
    made.install_tensorflow()
    smi(tmp_path, monkeypatch, "13.0")
    made.install_tensorflow()
    (cpu, _), (gpu, tilerank) = made.calls[:2], made.calls[2:]
    assert cpu[:2] == ("install", "tensorflow-cpu>=2.21,<2.22")
    assert gpu[:2] == ("install", "tensorflow[and-cuda]>=2.21,<2.22")
    assert cpu[2:] == gpu[2:] == tuple(environment.tensorflow_needs())
    names = [requirement.split(">")[0] for requirement in environment.tensorflow_needs()]
    assert names == list(environment.TENSORFLOW_NEEDS)
    assert tilerank == ("install", "--no-deps", "--editable", str(environment.ROOT))


def test_the_environment_has_the_tensorflow_that_is_served() -> None:
    served = ".".join(map(str, tf_build.SERVED))
    assert environment.TENSORFLOW.startswith(f">={served},<")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("Tesla V100-PCIE-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA", "local"),
    ],
)
def test_a_machine_is_called_by_its_gpu(name: str, short: str) -> None:
    assert machine.name_for(name) == short


# ---- make gpu ----


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What `stages.gpu` runs on a machine with a T4, where everything works."""
    made: list[tuple[str, ...]] = []

    def python(*arguments: str) -> int:
        made.append(arguments)
        return 0

    here = machine.Machine("some CPU", 2, "Tesla T4", "550.54.15", "12.6")
    monkeypatch.setattr(machine, "describe_machine", lambda use_cuda: here)
    monkeypatch.setattr(gpu, "_python", python)
    monkeypatch.setenv("TILERANK_MACHINE", "")
    return made


OVERRIDES = ["model=all_minilm_l6", "dataset=pydocs"]


def test_the_sanity_kernel_comes_first_and_what_to_commit_last(
    calls: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(OVERRIDES) == 0
    assert calls == [
        ("-m", "tilerank.cli", "doctor"),
        ("-m", "stages.compose", "machine=auto", *OVERRIDES),
        ("-m", "dvc", "repro", "--keep-going"),
    ]
    assert os.environ["TILERANK_MACHINE"] == "t4"
    assert "git add params.yaml dvc.lock metrics/t4 README.md docs" in capsys.readouterr().out


def test_a_name_of_ones_own_is_kept(
    calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TILERANK_MACHINE", "lab-3")
    gpu.main(OVERRIDES)
    assert "git switch -c lab-3" in capsys.readouterr().out


def test_nothing_is_recorded_after_a_failed_check(
    calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "_python", lambda *arguments: calls.append(arguments) or 1)
    assert gpu.main(OVERRIDES) == 1
    assert calls == [("-m", "tilerank.cli", "doctor")]
    assert "nothing is recorded" in capsys.readouterr().err


def test_a_failed_stage_leaves_the_report_of_the_others(
    calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "_python", lambda *arguments: calls.append(arguments) or int("--keep-going" in arguments))
    assert gpu.main(OVERRIDES) == 1
    assert calls[-1] == ("-m", "dvc", "repro", "--quiet", "--single-item", "report")
    printed = capsys.readouterr().out
    assert "some stages failed" in printed
    assert "git add params.yaml" in printed


def test_a_model_that_is_not_here_is_told_before_the_settings_change(
    calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["model=local", "model.name=nobody-has-this"]) == 1
    assert calls == [("-m", "tilerank.cli", "doctor")]
    assert "no model named 'nobody-has-this'" in capsys.readouterr().err


def test_without_a_gpu_it_says_what_runs_here(
    calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "describe_machine", lambda use_cuda: machine.Machine("a CPU", 2, None, None, None))
    assert gpu.main([]) == 1
    assert calls == []
    assert "`make quickstart` runs here" in capsys.readouterr().err
