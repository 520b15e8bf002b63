"""`tilerank doctor`: each finding, on machines of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilerank import kernels
from tilerank.errors import TilerankError
from tilerank.kernels import build, diagnosis, library


def findings() -> dict[str, tuple[bool | None, str]]:
    return {check.name: (check.ok, check.detail) for check in kernels.doctor()}


@pytest.fixture
def reference_only(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = library.load(build.Target("cpu"))
    monkeypatch.setattr(library, "load", lambda: loaded)


@pytest.mark.usefixtures("reference_only")
def test_without_a_device_nothing_is_wrong_and_the_reference_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "present_capabilities", lambda: ())
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    found = findings()
    assert list(found) == ["python", "nvcc", "device", "library", "variants", "reference"]
    assert not [name for name, (ok, _) in found.items() if ok is False]
    assert found["nvcc"][0] is None
    assert found["device"] == (None, "no CUDA device: kernels run through the host build only, never timed")
    assert found["library"][1].startswith("cpu, build id ")
    assert "not in this build: naive" in found["variants"][1]
    assert found["reference"] == (True, "the mean of 1 and 2 is 1.5")


@pytest.mark.usefixtures("reference_only")
@pytest.mark.parametrize(
    ("compiler", "program", "finding"),
    [
        ("echo unsupported architecture; exit 1", "", (False, "does not compile: unsupported architecture")),
        ("", "echo element 3 is 0; exit 1", (False, "does not run: element 3 is 0")),
        ("", "echo Some GPU", (True, "Some GPU")),
    ],
)
def test_with_a_device_the_sanity_kernel_comes_before_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str, program: str, finding: tuple[bool, str]
) -> None:
    """nvcc is a script that leaves a script where its -o says."""
    ready = tmp_path / "program"
    ready.write_text(f"#!/bin/sh\n{program}\n", encoding="utf-8")
    ready.chmod(0o755)
    nvcc = tmp_path / "nvcc"
    place = 'while [ "$1" != -o ]; do shift; done'
    nvcc.write_text(f'#!/bin/sh\n{compiler}\n{place}\ncp {ready} "$2"\n', encoding="utf-8")
    nvcc.chmod(0o755)
    monkeypatch.setattr(build, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(build, "nvcc_version", lambda path: "13.0.88")
    monkeypatch.setattr(build, "present_capabilities", lambda: (90,))
    found = findings()
    assert list(found) == ["python", "nvcc", "device", "sanity kernel", "library", "variants", "reference"]
    assert found["device"] == (True, "compute capability 9.0")
    assert found["sanity kernel"] == finding


@pytest.mark.usefixtures("reference_only")
def test_a_compiler_that_does_not_run_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho no license; exit 1\n", encoding="utf-8")
    nvcc.chmod(0o755)
    monkeypatch.setattr(build, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(build, "present_capabilities", lambda: (90,))
    found = findings()
    assert found["nvcc"] == (False, f"{nvcc} --version failed: no license")
    assert "sanity kernel" not in found
    assert found["reference"][0] is True


def test_a_library_that_cannot_be_had_ends_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> library.Library:
        raise TilerankError("building the kernel library needs c++")

    monkeypatch.setattr(build, "present_capabilities", lambda: ())
    monkeypatch.setattr(library, "load", fails)
    found = findings()
    assert found["library"] == (False, "building the kernel library needs c++")
    assert "reference" not in found


def test_a_wrong_answer_is_seen() -> None:
    class Wrong:
        def run(self, variant: str, params: library.AttentionParams) -> None:
            """Leaves the result as it was."""

    assert diagnosis._known_answer(Wrong()).ok is False


@pytest.mark.gpu
def test_on_a_gpu_everything_is_well() -> None:
    found = findings()
    assert not [name for name, (ok, _) in found.items() if ok is False], found
    assert found["sanity kernel"][0] is True
