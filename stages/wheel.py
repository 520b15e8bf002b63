"""Build a wheel that carries the kernel library, so that it needs no compiler where it is installed (`make wheel`).

Usage: python -m stages.wheel [--backend cuda|cpu] [--archs LIST] [--tf-python PYTHON] [--out dist]
With --tf-python (or an environment that `make tf-env` made) it carries the TensorFlow operations too, for that one.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from stages import ROOT

OLDEST_GLIBC = 17
"""2.17: the oldest that a tag of this kind names."""

SETUP = """
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

class OfThisPlatform(Distribution):
    def has_ext_modules(self):
        return True

class Tagged(bdist_wheel):
    def get_tag(self):
        return "py3", "none", {tag!r}

setup(distclass=OfThisPlatform, cmdclass={{"bdist_wheel": Tagged}})
"""


def platform_tag(objects: list[Path]) -> str:
    """``manylinux_2_N_<machine>``: N is the newest glibc that the shared objects ask for, so that an installer refuses
    the wheel where they would not load."""
    found = {int(minor) for path in objects for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())}
    return f"manylinux_2_{max(found | {OLDEST_GLIBC})}_{platform.machine()}"


def copy_sources(tree: Path) -> None:
    """What a wheel is made of, without anything built."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("src", "cuda"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "_lib")
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)


def add_operations(python: Path, tree: Path) -> Path:
    """The TensorFlow operations, compiled in TensorFlow's own environment; raises TilerankError with its last line."""
    from tilerank.errors import TilerankError

    code = (
        "from pathlib import Path; from tilerank.kernels import tf_build, tf_ops; "
        "print(tf_build.write_package(tf_ops.installed(), Path('src/tilerank/_lib')))"
    )
    path = os.pathsep.join(filter(None, [str(tree / "src"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    command = [python, "-c", code]
    answer = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise TilerankError(f"{python}: {answer.stderr.strip().splitlines()[-1]}")
    return tree / answer.stdout.strip().splitlines()[-1]


def build_wheel(tree: Path, out: Path) -> Path:
    """Run pip on the prepared tree; raises TilerankError with pip's last line."""
    from tilerank.errors import TilerankError

    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(out), str(tree)]
    try:
        import setuptools

        if int(setuptools.__version__.split(".")[0]) >= 77:  # as pyproject.toml asks: nothing need be fetched
            command.insert(4, "--no-build-isolation")
    except ImportError:
        pass
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise TilerankError(f"pip wheel failed: {(answer.stderr or answer.stdout).strip().splitlines()[-1]}")
    return max(out.glob("tilerank-*.whl"), key=lambda path: path.stat().st_mtime_ns)


def main(arguments: list[str] | None = None) -> int:
    """Build the library, then the wheel; print where it is."""
    from tilerank.errors import TilerankError
    from tilerank.kernels import build

    parser = argparse.ArgumentParser(prog="python -m stages.wheel", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=("cuda", "cpu"), help="default: cuda where there is an nvcc, else cpu")
    parser.add_argument("--archs", default=build.ALL_ARCHS, help="cuda: architectures, as `make build` takes them")
    parser.add_argument("--tf-python", type=Path, help="a Python with TensorFlow; default: the one of `make tf-env`")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args(arguments)
    backend = options.backend or ("cuda" if build.find_nvcc() else "cpu")
    made_here = ROOT / ".venv-tf" / "bin" / "python"
    tf_python = options.tf_python or (made_here if made_here.exists() else None)
    with tempfile.TemporaryDirectory(prefix="tilerank-wheel-") as folder:
        tree = Path(folder)
        copy_sources(tree)
        try:
            target = build.Target(backend, options.archs if backend == "cuda" else "")
            packaged = build.write_package(tree / "src" / "tilerank" / "_lib", target, source=tree / "cuda")
            print(f"wheel: with the library for {backend} {target.archs}".strip(), file=sys.stderr, flush=True)
            objects = [packaged.built.path]
            if tf_python is not None:
                objects.append(add_operations(tf_python.absolute(), tree))
            (tree / "setup.py").write_text(SETUP.format(tag=platform_tag(objects)), encoding="utf-8")
            print(build_wheel(tree, options.out))
        except (TilerankError, ValueError) as error:
            print(f"wheel: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
