"""Building the library: the cache, locks left by others, edits that must be seen, and errors that say what to do."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels.sources import copy_with_rows

from tilerank.errors import TilerankError
from tilerank.kernels import build, library, registry
from tilerank.kernels.build import Target

CPU = Target("cpu")


@pytest.fixture(scope="module")
def shared_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources that this file's tests may edit and must put back."""
    folder = tmp_path_factory.mktemp("build") / "cuda"
    shutil.copytree(registry.cuda_dir(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def source(shared_source: Path) -> Iterator[Path]:
    """The shared copy, put back as it was after each test."""
    before = build.read_sources(shared_source)
    yield shared_source
    for name, content in before.items():
        if (shared_source / name).read_bytes() != content:
            (shared_source / name).write_bytes(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for this file, warm after its first build."""
    return tmp_path_factory.mktemp("cache")


def lock_of(cache_folder: Path) -> Path:
    """The lock of the one build tree in a cache folder."""
    (lock,) = cache_folder.glob("*.lock")
    return lock


def builder(cache_folder: Path, **options: object) -> subprocess.Popen[str]:
    """A process that builds the CPU library of this installation from scratch."""
    command = [sys.executable, "-m", "tilerank.kernels.build", "--backend", "cpu"]
    environment = os.environ | {"TILERANK_CACHE": str(cache_folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


# ---- The cache and edits ----


def test_a_library_is_built_once_and_carries_its_id(source: Path, folder: Path) -> None:
    first = build.build(CPU, source=source, cache_folder=folder)
    age = first.path.stat().st_mtime_ns
    assert library.Library(first.path, first.build_id).build_id == build.build_id(CPU, source)
    assert build.build(CPU, source=source, cache_folder=folder) == first
    assert first.path.stat().st_mtime_ns == age


def test_an_edited_header_is_always_rebuilt_even_with_an_old_date(source: Path, folder: Path) -> None:
    before = build.build(CPU, source=source, cache_folder=folder)
    header = source / "include" / "tilerank.h"
    stat = header.stat()
    text = header.read_text(encoding="utf-8")
    header.write_text(
        text.replace("#define TILERANK_ABI_VERSION 1", "#define TILERANK_ABI_VERSION 41"), encoding="utf-8"
    )
    os.utime(header, ns=(stat.st_atime_ns, stat.st_mtime_ns - 10**12))
    after = build.build(CPU, source=source, cache_folder=folder)
    assert after.build_id != before.build_id
    assert ctypes.CDLL(str(after.path)).tilerank_abi_version() == 41
    assert ctypes.CDLL(str(before.path)).tilerank_abi_version() == 1
    with pytest.raises(TilerankError, match="interface version 41; this package speaks 1"):
        library.Library(after.path)


def test_the_id_depends_on_sources_target_and_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = build.build_id(CPU, source)
    assert build.build_id(Target("host"), source) != identity
    assert build.build_id(Target("host", sanitize="thread"), source) != build.build_id(Target("host"), source)
    (source / "attention" / "reference.cc").open("a").write("// a word\n")
    assert build.build_id(CPU, source) != identity
    edited = build.build_id(CPU, source)
    (source / "tests" / "note.txt").write_text("not part of the library")
    assert build.build_id(CPU, source) == edited
    tools = build.toolchain(False)
    other = build.Toolchain(tools.cmake, tools.ninja, tools.cxx, None, "g++ 99")
    monkeypatch.setattr(build, "toolchain", lambda needs_nvcc: other)
    assert build.build_id(CPU, source) != edited


def test_libraries_beside_an_nvcc_from_a_wheel_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A toolkit keeps them in lib64, where nvcc looks; the wheel in lib, where it does not."""
    monkeypatch.setenv("LIBRARY_PATH", "/elsewhere")
    nvcc = tmp_path / "bin" / "nvcc"
    assert build.environment(nvcc)["LIBRARY_PATH"] == "/elsewhere"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudart_static.a").touch()
    assert build.environment(nvcc)["LIBRARY_PATH"] == f"{tmp_path / 'lib'}{os.pathsep}/elsewhere"
    assert build.environment()["LIBRARY_PATH"] == "/elsewhere"


def test_flags_from_the_environment_do_not_reach_the_compilers(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CXXFLAGS", "CFLAGS", "LDFLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.setenv(name, "--no-such-flag")
    (source / "library.cc").open("a").write("// built again\n")
    assert build.build(CPU, source=source, cache_folder=folder).path.exists()
    monkeypatch.setenv("PATH_KEPT", "yes")
    assert build.environment()["PATH_KEPT"] == "yes"


def test_a_compile_error_is_one_line_with_the_log_and_mending_it_helps(source: Path, folder: Path) -> None:
    reference = source / "attention" / "reference.cc"
    good = reference.read_text(encoding="utf-8")
    reference.write_text(good + "\nint broken = nonsense;\n", encoding="utf-8")
    with pytest.raises(TilerankError, match=r"reference\.cc:\d+:\d+: error: .*nonsense.*whole log: (.*)\)$") as error:
        build.build(CPU, source=source, cache_folder=folder)
    assert "\n" not in str(error.value)
    log = Path(re.search(r"whole log: (.*)\)$", str(error.value)).group(1))
    assert "nonsense" in log.read_text(encoding="utf-8")
    reference.write_text(good + "\n// mended\n", encoding="utf-8")
    assert build.build(CPU, source=source, cache_folder=folder).path.exists()


def test_a_broken_registry_stops_the_build_by_name(source: Path, folder: Path) -> None:
    rows = source / "registry.yaml"
    rows.write_text(rows.read_text(encoding="utf-8").replace("[fp32, fp16, bf16]", "[fp33]"), encoding="utf-8")
    with pytest.raises(TilerankError, match=r"building the kernel library failed .*whole log: (.*)\)$") as error:
        build.build(CPU, source=source, cache_folder=folder)
    log = Path(re.search(r"whole log: (.*)\)$", str(error.value)).group(1))
    assert "dtypes has ['fp33']; allowed: ['fp32', 'fp16', 'bf16']" in log.read_text(encoding="utf-8")


# ---- Locks ----


def test_two_processes_that_build_at_once_both_get_the_library(tmp_path: Path) -> None:
    processes = [builder(tmp_path / "cache") for _ in range(2)]
    answers = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    paths = {out.strip() for out, _ in answers}
    assert len(paths) == 1
    assert library.Library(Path(paths.pop())).backend == "cpu"
    assert len(list((tmp_path / "cache").glob("libtilerank-*.so"))) == 1


@pytest.mark.parametrize("whole_group", [True, False], ids=["with its compilers", "alone"])
def test_after_a_killed_build_the_next_one_succeeds(tmp_path: Path, whole_group: bool) -> None:
    """SIGKILL in the middle: nothing cleans up. Killed alone, its compilers go on and keep the lock till they end."""
    cache_folder = tmp_path / "cache"
    process = builder(cache_folder, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(cache_folder.glob("tree-*/build/CMakeFiles")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
    process.wait()
    assert not list(cache_folder.glob("libtilerank-*.so")), "killed too late to test anything"
    assert lock_of(cache_folder).exists()

    built = build.build(CPU, cache_folder=cache_folder)
    assert library.Library(built.path, built.build_id).backend == "cpu"


def hold(lock: Path) -> int:
    """Lock a file as another process would (flock belongs to the open file, so a second open in this one will do)."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.pwrite(descriptor, b"4711\n", 0)
    return descriptor


def test_a_lock_held_in_silence_fails_in_time_and_is_named(source: Path, folder: Path) -> None:
    build.build(CPU, source=source, cache_folder=folder)
    (source / "library.cc").open("a").write("// needs a build\n")
    lock = lock_of(folder)
    descriptor = hold(lock)
    try:
        started = time.monotonic()
        with pytest.raises(TilerankError, match=re.escape(f"{lock} is locked by process 4711")) as error:
            build.build(CPU, source=source, cache_folder=folder, wait_s=0.3)
        assert time.monotonic() - started < 5
        assert "TILERANK_CACHE" in str(error.value)
    finally:
        os.close(descriptor)
    assert build.WAIT_S < 60
    assert build.build(CPU, source=source, cache_folder=folder).path.exists()


def test_a_builder_that_shows_signs_of_life_is_waited_for(source: Path, folder: Path) -> None:
    build.build(CPU, source=source, cache_folder=folder)
    (source / "library.cc").open("a").write("// needs another build\n")
    lock = lock_of(folder)
    descriptor = hold(lock)

    def other_builder() -> None:
        for _ in range(15):
            time.sleep(0.1)
            lock.with_suffix(".log").touch()
        os.close(descriptor)

    thread = threading.Thread(target=other_builder)
    thread.start()
    started = time.monotonic()
    built = build.build(CPU, source=source, cache_folder=folder, wait_s=0.7)
    thread.join()
    assert time.monotonic() - started > 1.4
    assert built.path.exists()


def test_an_unwritable_cache_is_an_error_that_says_what_to_do(source: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TilerankError, match=r"cannot be written .*; set TILERANK_CACHE to a writable folder"):
        build.build(CPU, source=source, cache_folder=tmp_path / "file" / "cache")
    build.build(CPU, source=source, cache_folder=folder)
    for name in (lock_of(folder).name, lock_of(folder).with_suffix(".log").name):
        cache = tmp_path / name
        (cache / name).mkdir(parents=True)  # root may write to read-only folders, but to no folder as a file
        with pytest.raises(TilerankError, match=f"{cache} cannot be written .*; set TILERANK_CACHE"):
            build.build(CPU, source=source, cache_folder=cache)


# ---- Tools and targets ----


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_find_program", lambda name: None)
    with pytest.raises(TilerankError, match=r"needs cmake, ninja, c\+\+: `pip install cmake ninja`"):
        build.toolchain.__wrapped__(False)
    monkeypatch.setattr(build, "_find_program", lambda name: Path("/bin/true"))
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    with pytest.raises(TilerankError, match=r"needs nvcc: .*CUDA_HOME.*nvidia-cuda-nvcc"):
        build.toolchain.__wrapped__(True)


def test_nvcc_is_found_in_cuda_home_and_in_its_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def program(*parts: str) -> Path:
        path = tmp_path.joinpath(*parts)
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)
        return path

    wheel, toolkit, first = (
        program("site", "nvidia", "cu13", "bin", "nvcc"),
        program("cuda", "bin", "nvcc"),
        program("bin", "nvcc"),
    )
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path / "site"))
    assert build.find_nvcc() == wheel
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert build.find_nvcc() == toolkit
    monkeypatch.setenv("PATH", str(first.parent))
    assert build.find_nvcc() == first


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILERANK_CACHE", str(tmp_path / "mine"))
    assert build.cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("TILERANK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / "tilerank"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert build.cache_dir() == tmp_path / ".cache" / "tilerank"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(TilerankError, match=r"no home folder .*; set TILERANK_CACHE"):
        build.cache_dir()


def test_a_tool_that_does_not_run_is_named(tmp_path: Path) -> None:
    program = tmp_path / "g++"
    program.write_text("no program")
    program.chmod(0o755)
    with pytest.raises(TilerankError, match=f"{re.escape(str(program))} does not run .*mend it"):
        build._version(program)


@pytest.mark.parametrize(
    ("capabilities", "archs"),
    [((75,), "75-real"), ((80, 90), "80-real;90a-real"), ((90,), "90a-real"), ((100, 120), "90-virtual"), ((), "")],
)
def test_architectures_for_the_devices_present(capabilities: tuple[int, ...], archs: str) -> None:
    assert build.archs_for(capabilities) == archs


def test_a_gpu_that_nvcc_13_no_longer_knows_is_refused() -> None:
    with pytest.raises(TilerankError, match=r"compute capability 7\.0 is not supported: .* 7\.5"):
        build.archs_for((70, 90))


def test_the_machine_decides_what_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "present_capabilities", lambda: (90,))
    monkeypatch.setattr(build, "find_nvcc", lambda: Path("/usr/bin/nvcc"))
    assert build.default_target() == Target("cuda", "90a-real")
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    assert build.default_target() == CPU
    monkeypatch.setattr(build, "present_capabilities", lambda: ())
    assert build.default_target() == CPU


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("metal",), "backend is 'metal'; allowed: cuda, host, cpu"),
        (("cuda",), "archs is ''; backend cuda needs a list"),
        (("cpu", "75-real"), "archs is '75-real'"),
        (("cpu", "", "thread"), "sanitize is 'thread'; only backend host"),
    ],
)
def test_targets_that_make_no_sense_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Target(*arguments)


def test_gencode_flags() -> None:
    assert build.gencode("90a-real") == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert build.gencode("75-virtual") == ["-gencode=arch=compute_75,code=compute_75"]
    assert build.gencode("80") == ["-gencode=arch=compute_80,code=[compute_80,sm_80]"]
    with pytest.raises(TilerankError, match="architecture '80-magic'"):
        build.gencode("80-magic")


@pytest.mark.parametrize(
    ("backend", "archs", "message"),
    [
        ("cuda", "native", "--archs native: this machine has no CUDA device; name the architectures\n"),
        ("cuda", "70-real", "--archs names '70-real'; allowed: all, native, or numbers from 75 "),
        ("cuda", "80-real;hopper", "--archs names 'hopper'; allowed: "),
        ("cuda", "", "--archs names ''; allowed: "),
        ("cpu", "80-real", "--archs 80-real: backend cpu compiles for no GPU; leave it out\n"),
    ],
)
def test_the_command_line_says_what_is_wrong_in_one_line(
    backend: str, archs: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "present_capabilities", lambda: ())
    with pytest.raises(SystemExit) as stop:
        build.main(["--backend", backend, "--archs", archs])
    assert stop.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"build: {message}")
    assert said.count("\n") == 1


# ---- With nvcc ----

needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="there is no nvcc")


@needs_nvcc
@pytest.mark.slow
def test_the_cuda_library_of_ptx_alone_loads_and_refuses_without_a_device(tmp_path: Path) -> None:
    """A build that holds only compute_75 PTX: what lets a newer GPU run the oldest one's code."""
    source = copy_with_rows(tmp_path, "reference", "naive")
    built = build.build(Target("cuda", "75-virtual"), source=source, cache_folder=tmp_path / "cache")
    loaded = library.Library(built.path, built.build_id)
    assert (loaded.backend, loaded.archs) == ("cuda", ("75-virtual",))
    assert [variant.name for variant in loaded.variants] == ["reference", "naive"]
    if not build.present_capabilities():
        params = library.AttentionParams(scale=1.0, batch=1, heads=1, kv_heads=1, q_len=1, k_len=1, head_dim=1)
        params.q = params.k = params.v = params.out = 4096
        with pytest.raises(library.KernelError, match="variant naive: the launch was refused: ") as refusal:
            loaded.run("naive", params)
        assert refusal.value.status == library.LAUNCH_FAILED
