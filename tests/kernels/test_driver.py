"""The driver, which runs every variant against the reference without Python: that it can pass, and that it can fail."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest
from kernels.sources import copy_with_rows

from tilerank.errors import TilerankError
from tilerank.kernels import build, driver, registry


def build_driver(source: Path, folder: Path, sanitize: str = "") -> Path:
    tools = build.toolchain(False)
    options = {"TILERANK_BACKEND": "host", "TILERANK_DRIVER": "ON", "TILERANK_SANITIZE": sanitize}
    options |= {
        "CMAKE_MAKE_PROGRAM": tools.ninja,
        "CMAKE_CXX_COMPILER": tools.cxx,
        "CMAKE_COMPILE_WARNING_AS_ERROR": "ON",
    }
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    for command in (
        [tools.cmake, "-G", "Ninja", "-S", source, "-B", folder, *definitions],
        [tools.ninja, "-C", folder],
    ):
        answer = subprocess.run(command, capture_output=True, text=True, check=False, env=build.environment())
        assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-1000:]
    return folder / "driver"


def run_driver(program: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *options], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_it_runs_clean_under_sanitizers(tmp_path: Path) -> None:
    """The program itself has no fault of its own; the variants one by one have tests of theirs."""
    source = copy_with_rows(tmp_path, "reference", "naive")
    answer = run_driver(build_driver(source, tmp_path / "build", "address,undefined"), "--lengths", "0,1,33")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "runtime error" not in answer.stderr, answer.stderr
    assert re.fullmatch(
        r"naive: [1-9]\d+ cases, 0 wrong, largest difference from the reference: fp32 .*\n", answer.stdout
    )


@pytest.fixture(scope="module")
def faulty_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver whose naive kernel forgets the third key in the sum of weights: right only at lengths up to 2."""
    folder = tmp_path_factory.mktemp("faulty")
    source = copy_with_rows(folder, "reference", "naive")
    naive = source / registry.get("naive").file
    text = naive.read_text(encoding="utf-8")
    assert text.count("row_sum += weight;") == 1
    naive.write_text(text.replace("row_sum += weight;", "row_sum += key == 2 ? 0.0f : weight;"), encoding="utf-8")
    return driver.build_driver(build.Target("host"), source=source, cache_folder=folder / "cache")


@pytest.mark.slow
def test_a_wrong_kernel_is_seen(faulty_driver: Path) -> None:
    few = run_driver(faulty_driver, "--variant", "naive", "--lengths", "1")
    assert few.returncode == 0, few.stderr
    many = run_driver(faulty_driver, "--lengths", "4")
    assert many.returncode == 1
    assert "naive: fp32, head_dim 32, length 4, padded: element " in many.stderr


@pytest.mark.slow
def test_a_wrong_kernel_is_counted(faulty_driver: Path) -> None:
    tally = driver.run_driver(faulty_driver, "naive")
    assert 0 < tally.wrong < tally.cases
    with pytest.raises(TilerankError, match="ran no case of fused: driver: fused: this library has nothing of that"):
        driver.run_driver(faulty_driver, "fused")


@pytest.mark.slow
def test_a_sample_has_every_length_and_is_small(faulty_driver: Path) -> None:
    """The mistake shows from length 3 on, whatever is asked of the kernel there."""
    for lengths, wrong in (("1,2", False), ("1,2,512", True), ("512", True)):
        assert run_driver(faulty_driver, "--sample", "--lengths", lengths).returncode == int(wrong)
    every, sample = (
        driver.parse_tally(run_driver(faulty_driver, *options).stdout, "naive") for options in ((), ("--sample",))
    )
    assert 11 <= sample.cases < every.cases / 5


@pytest.mark.slow
def test_it_is_built_once_for_a_library_and_driver(faulty_driver: Path) -> None:
    cache = faulty_driver.parents[1]
    before = faulty_driver.stat().st_mtime_ns
    source = cache.parent / "cuda"
    assert driver.build_driver(build.Target("host"), source=source, cache_folder=cache) == faulty_driver
    assert faulty_driver.stat().st_mtime_ns == before
    with (source / "tests" / "driver.cc").open("a", encoding="utf-8") as file:
        file.write("// another driver\n")
    assert driver.build_driver(build.Target("host"), source=source, cache_folder=cache) != faulty_driver
    assert not list(cache.glob(".driver-*"))


@pytest.mark.slow
def test_bad_arguments_are_refused(faulty_driver: Path) -> None:
    for options, message in (
        (["--variant", "fastest"], "driver: fastest: this library has nothing of that name to run here"),
        (["--lengths", "1,x"], "driver: --lengths: expected numbers from 0 to 65536"),
        (["--help"], "driver: --help: not understood; allowed: --variant NAME, --lengths LIST, --sample, --list"),
    ):
        answer = run_driver(faulty_driver, *options)
        assert answer.returncode == 2
        assert message in answer.stderr
    assert run_driver(faulty_driver, "--list").stdout.split() == ["reference", "naive"]


# ---- What is read of it ----

LINE = "fused: {cases} cases, {wrong} wrong, largest difference from the reference: fp32 1.4e-06, fp16 0, bf16 0\n"


def test_the_tally_of_the_variant_asked_for_is_read() -> None:
    text = "========= COMPUTE-SANITIZER\nfused_skip: 9 cases, 9 wrong, largest\n" + LINE.format(cases=44, wrong=2)
    assert driver.parse_tally(text, "fused") == driver.Tally(44, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it printed nothing"),
        (LINE.format(cases=0, wrong=0), "0 cases"),
        ("fused: not run, it needs compute capability 9.0\n", "needs compute capability 9.0"),
        ("driver: cudaMalloc: out of memory\n", "out of memory"),
    ],
)
def test_no_case_is_an_error_with_the_programs_reason(text: str, said: str) -> None:
    with pytest.raises(TilerankError, match=f"ran no case of fused: .*{said}"):
        driver.parse_tally(text, "fused")


def test_which_code_runs_where() -> None:
    naive = registry.get("naive")
    assert driver.refusal(naive, 75, 90) is None
    assert driver.refusal(naive, 75, 75) is None
    assert driver.refusal(naive, 80, 75) == "this device has compute capability 7.5, below 8.0"
    newer = dataclasses.replace(naive, min_sm=80)
    assert driver.refusal(newer, 75, 90) == "the variant needs compute capability 8.0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "name", "length"), [("layernorm", "vectorized", "384"), ("block", "two_launches", "33")]
)
def test_the_other_operations_drivers_can_pass_and_fail(operation: str, name: str, length: str, tmp_path: Path) -> None:
    """Variances that are a third too large are seen in either."""
    source = copy_with_rows(tmp_path, "reference", **{operation: name})
    for is_right in (True, False):
        program = driver.build_driver(build.Target("host"), operation, source=source, cache_folder=tmp_path / "cache")
        command = [*driver.command(program, name, operation), "--lengths", length, "--sample"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        tally = driver.parse_tally(answer.stdout, name)
        assert answer.returncode == (0 if is_right else 1), answer.stderr
        assert (tally.wrong == 0) is is_right
        for header, end in (
            ("common/block.cuh", "+ epsilon)"),
            ("layernorm/03_vectorized.cu", "+ static_cast<float>(args.epsilon))"),
        ):
            text = (source / header).read_text(encoding="utf-8")
            assert end in text
            (source / header).write_text(text.replace(end, f"* 1.3f {end}"), encoding="utf-8")
