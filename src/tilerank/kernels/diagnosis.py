"""``tilerank doctor``: does this machine compile and run kernels, checked from the ground up."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tilerank.errors import TilerankError
from tilerank.kernels import build, library, registry


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``ok`` is None where the question does not arise (no device, no nvcc)."""

    name: str
    ok: bool | None
    detail: str


def doctor() -> Iterator[Check]:
    """Check the machine step by step, yielding each finding as soon as it is known.

    A sanity program (one kernel, nothing of this project) is compiled and run before anything else is; then the
    library is built or found, loaded, and its reference computes an attention whose result is known.
    """
    yield Check("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    nvcc = build.find_nvcc()
    capabilities = build.present_capabilities()
    packaged = build.packaged()
    if nvcc is None:
        built = (
            "only the reference can be built" if packaged is None else "the library that came with the package is used"
        )
        yield Check("nvcc", None, f"not found: {built} (`pip install nvidia-cuda-nvcc nvidia-cuda-cccl` brings one)")
    else:
        try:
            yield Check("nvcc", True, f"{build.nvcc_version(nvcc)} at {nvcc}")
        except TilerankError as error:
            yield Check("nvcc", False, str(error))
            nvcc = None
    if capabilities:
        listed = ", ".join(f"{capability / 10}" for capability in capabilities)
        yield Check("device", True, f"compute capability {listed}")
    else:
        yield Check("device", None, "no CUDA device: kernels run through the host build only, never timed")
    if nvcc is not None and capabilities:
        yield _sanity(nvcc, capabilities)
    try:
        loaded = library.load()
    except TilerankError as error:
        yield Check("library", False, str(error))
        return
    archs = f" for {' '.join(loaded.archs)}" if loaded.archs else ""
    yield Check("library", True, f"{loaded.backend}{archs}, build id {loaded.build_id}, at {loaded.path}")
    there = {variant.name for variant in loaded.variants}
    absent = [row.name for row in registry.attention_rows() if row.name not in there]
    yield Check(
        "variants", True, ", ".join(sorted(there)) + (f"; not in this build: {', '.join(absent)}" if absent else "")
    )
    yield _known_answer(loaded)


def _sanity(nvcc: Path, capabilities: tuple[int, ...]) -> Check:
    with tempfile.TemporaryDirectory(prefix="tilerank-doctor-") as folder:
        program = Path(folder) / "sanity"
        source = registry.cuda_dir() / "tests" / "sanity.cc"
        try:
            archs = build.archs_for(capabilities)
        except TilerankError as error:
            return Check("sanity kernel", False, str(error))
        flags = [flag for arch in archs.split(";") for flag in build.gencode(arch)]
        for command in ([nvcc, "-x", "cu", *flags, "-o", program, source], [program]):
            answer = subprocess.run(command, capture_output=True, text=True, check=False, env=build.environment(nvcc))
            said = (answer.stdout + answer.stderr).strip()
            if answer.returncode != 0:
                what = "does not compile" if command[0] == nvcc else "does not run"
                return Check("sanity kernel", False, f"{what}: {said[-300:]}")
    return Check("sanity kernel", True, said)


def _known_answer(loaded: library.Library) -> Check:
    """Two keys with equal scores: the result is the mean of their values, 1.5."""
    floats = ctypes.c_float * 2
    q, k, v, out = (ctypes.c_float * 1)(1.0), floats(0.5, 0.5), floats(1.0, 2.0), (ctypes.c_float * 1)(-1.0)
    params = library.AttentionParams(scale=1.0, batch=1, heads=1, kv_heads=1, q_len=1, k_len=2, head_dim=1)
    params.q, params.k, params.v, params.out = (ctypes.addressof(array) for array in (q, k, v, out))
    for strides in (params.q_strides, params.k_strides, params.v_strides, params.out_strides):
        strides[:] = [2, 2, 1]
    try:
        loaded.run("reference", params)
    except library.KernelError as error:
        return Check("reference", False, str(error))
    return Check("reference", out[0] == 1.5, f"the mean of 1 and 2 is {out[0]}")
