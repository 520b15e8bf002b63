"""Build the TensorFlow operations (``cuda/bindings/tf_op.cc``) against the installed TensorFlow, once.

They are C++ over TensorFlow's C++ interface, which no two releases share: one shared object a TensorFlow, compiled
where it is first used by the machine's own C++ compiler. No CUDA compiler or header takes part. What it calls is the
kernel library that `tilerank.kernels.library` has loaded and checked.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tilerank.errors import TilerankError
from tilerank.kernels import build
from tilerank.kernels.registry import cuda_dir

SERVED = (2, 21)
"""The TensorFlow release that the operations are written for and tested with."""

_SOURCES = ("bindings/tf_op.cc", "include/tilerank.h", "exports.map")
_DIALECT = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")


@dataclass(frozen=True, slots=True)
class TensorFlow:
    """What a compiler needs to know of an installed TensorFlow (``tf.sysconfig`` and ``tf.version`` say it)."""

    version: str  # with what it was built from: two builds of one version may differ in their C++ interface
    include: Path
    library: Path  # the folder of libtensorflow_framework
    defines: tuple[str, ...]  # -D...
    link: str  # -l:libtensorflow_framework.so.2


def check_version(version: str) -> None:
    """`TilerankError` unless the operations are known to compile and run with TensorFlow ``version``."""
    parts = version.split(".")
    if tuple(int(part) for part in parts[:2]) != SERVED:
        served = ".".join(map(str, SERVED))
        raise TilerankError(
            f"TensorFlow is {version}; the operations are written for the C++ interface of {served}, which other "
            f"releases do not share: `pip install tensorflow=={served}.*` (see docs/bindings.md)"
        )


def _command(compiler: Path, tensorflow: TensorFlow, source: Path, result: Path) -> list[str]:
    return [
        str(compiler),
        *_DIALECT,
        *("-Wall", "-Wextra", "-isystem", str(tensorflow.include), *tensorflow.defines),
        *("-I", str(source / "include"), str(source / "bindings" / "tf_op.cc"), "-o", str(result)),
        *(f"-L{tensorflow.library}", tensorflow.link, "-ldl", f"-Wl,--version-script={source / 'exports.map'}"),
    ]


def _identity(tensorflow: TensorFlow, source: Path, compiler: str) -> str:
    texts = (tensorflow.version, *tensorflow.defines, *_DIALECT, compiler)
    return build.digest_of(*map(str.encode, texts), *((source / name).read_bytes() for name in _SOURCES))[:32]


def operations_path(tensorflow: TensorFlow, *, source: Path | None = None, cache_folder: Path | None = None) -> Path:
    """Where the operations for that TensorFlow are kept: the name is a digest of all that they are made from."""
    _, version = build.cxx_compiler()
    return (
        cache_folder or build.cache_dir()
    ) / f"tilerank_tf-{_identity(tensorflow, source or cuda_dir(), version)}.so"


def packaged_path(tensorflow: TensorFlow, folder: Path | None = None) -> Path:
    """Where a wheel would have the operations for that TensorFlow, compiled from the sources that came with it."""
    return (folder or build.packaged_dir()) / f"tilerank_tf-{_identity(tensorflow, cuda_dir(), 'packaged')}.so"


def build_operations(tensorflow: TensorFlow, *, source: Path | None = None, cache_folder: Path | None = None) -> Path:
    """The operations for that TensorFlow: the package's own, else compiled (some seconds) unless the cache has them.

    Args:
        tensorflow: what to compile against.
        source: the ``cuda/`` folder; this installation's by default.
        cache_folder: where to keep the result; `build.cache_dir()` by default.

    Raises:
        TilerankError: no C++ compiler, or a compile error (its first line).
    """
    if source is None and (packaged := packaged_path(tensorflow)).exists():
        return packaged
    source = (source or cuda_dir()).resolve()
    result = operations_path(tensorflow, source=source, cache_folder=cache_folder)
    if not result.exists():
        with build.writing(result.parent):
            result.parent.mkdir(parents=True, exist_ok=True)
        _compile(tensorflow, source, result)
    return result


def write_package(tensorflow: TensorFlow, folder: Path) -> Path:
    """Compile the operations into a wheel's ``folder``, where `packaged_path` finds them. Raises as
    `build_operations`."""
    result = packaged_path(tensorflow, folder)
    folder.mkdir(parents=True, exist_ok=True)
    _compile(tensorflow, cuda_dir(), result)
    return result


def _compile(tensorflow: TensorFlow, source: Path, result: Path) -> None:
    compiler, _ = build.cxx_compiler()
    with tempfile.TemporaryDirectory(prefix="tilerank-tf-") as temporary:
        made = Path(temporary) / result.name
        command = _command(compiler, tensorflow, source, made)
        answer = subprocess.run(command, capture_output=True, text=True, check=False, env=build.environment())
        if answer.returncode != 0:
            said = answer.stderr.splitlines()
            wrong = next((line for line in said if "error" in line or "fatal" in line), "".join(said[-1:]))
            raise TilerankError(f"the TensorFlow operations do not compile: {wrong.strip()}")
        with build.writing(result.parent):
            build.keep(made.read_bytes(), result)


def use_library(operations: Path, library: Path) -> None:
    """Have the ``operations``, which TensorFlow has loaded, call the kernel library at ``library``.

    Raises:
        TilerankError: that library cannot be loaded or speaks another version of the interface.
    """
    use = ctypes.CDLL(str(operations)).tilerank_tf_use_library
    use.restype = ctypes.c_char_p
    reason = use(str(library).encode())
    if reason is not None:
        raise TilerankError(f"the TensorFlow operations cannot use {library}: {reason.decode(errors='replace')}")
