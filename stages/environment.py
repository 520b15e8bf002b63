"""Make the project's virtual environment (`make env`). Needs nothing but Python 3.11 to 3.13.

With --tensorflow: an environment of its own for the TensorFlow binding (`make tf-env`), without torch and the pipeline.
TensorFlow is the build with CUDA 12 where an NVIDIA GPU is here, else the CPU build.

How torch is chosen, unless the environment variable TORCH_INDEX names a package index to take it from:
- an NVIDIA GPU is here (nvidia-smi lists one): the default index, which gives the build for CUDA 13 on Linux, or
  PyTorch's own index for CUDA 12 where the GPU's driver serves no more than that;
- no GPU: the default index if its build needs no CUDA packages, else PyTorch's own CPU index, else (that index
  cannot be reached) the CUDA build, about 3 GB, announced before the download starts.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch>=2.11,<2.14"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_12_INDEX = "https://download.pytorch.org/whl/cu126"  # the build for CUDA 12 that every torch in range has
TENSORFLOW = ">=2.21,<2.22"
TENSORFLOW_NEEDS = ("cmake", "ninja", "numpy", "ruamel.yaml", "tqdm", "pytest")
"""Of pyproject.toml, what the TensorFlow binding and its tests use."""
PYTHONS = ((3, 11), (3, 13))


def log(message: str) -> None:
    """Say what happens next, before pip's own output."""
    print(f"environment: {message}", file=sys.stderr, flush=True)


def has_gpu() -> bool:
    """Whether nvidia-smi lists a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    answer = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return answer.returncode == 0 and "GPU" in answer.stdout


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the NVIDIA driver serves, from the heading of nvidia-smi; None where it names none."""
    answer = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False)
    found = re.search(r"CUDA Version: *(\d+)\.(\d+)", answer.stdout)
    return (int(found[1]), int(found[2])) if found else None


class Environment:
    """A virtual environment in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def pip(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run pip; its progress bars show on a terminal."""
        quiet = [] if sys.stderr.isatty() else ["--quiet"]
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", *quiet, *arguments]
        return subprocess.run(command, check=check, text=True)

    def torch_in_range(self) -> bool:
        """Whether a torch that the project accepts is installed already."""
        code = "import importlib.metadata as m; print(m.version('torch'))"
        answer = subprocess.run([str(self.python), "-c", code], capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            return False
        major, minor = (int(part) for part in answer.stdout.split(".")[:2])
        return (2, 11) <= (major, minor) < (2, 14)

    def default_build_needs_cuda(self) -> bool:
        """Whether the default index's torch depends on CUDA packages; read from its metadata, nothing is fetched."""
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
        answer = subprocess.run([*command, "--report", "-", TORCH], capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            sys.exit(f"environment: pip finds no {TORCH}: {answer.stderr.strip().splitlines()[-1]}")
        metadata = json.loads(answer.stdout)["install"][0]["metadata"]
        needs = [name.split(";")[0] for name in metadata.get("requires_dist", []) if "extra ==" not in name]
        return any(name.startswith(("nvidia-", "cuda-")) for name in needs)

    def install_torch(self) -> None:
        """Install torch by the rule in this module's docstring."""
        index = os.environ.get("TORCH_INDEX")
        if index:
            log(f"torch from {index} (TORCH_INDEX)")
            self.pip("install", "--index-url", index, TORCH)
        elif has_gpu():
            cuda = driver_cuda()
            if cuda is not None and cuda < (12, 0):
                sys.exit(f"environment: the NVIDIA driver serves CUDA {cuda[0]}.{cuda[1]}; torch needs 12.0 or newer")
            if cuda is not None and cuda < (13, 0):
                log(f"an NVIDIA GPU with a driver for CUDA 12 is here: torch from {CUDA_12_INDEX} (about 3 GB)")
                self.pip("install", "--index-url", CUDA_12_INDEX, TORCH)
            else:
                log("an NVIDIA GPU is here: torch from the default index (the CUDA build, about 3 GB)")
                self.pip("install", TORCH)
        elif not self.default_build_needs_cuda():
            log("no NVIDIA GPU here: the default index has a CPU build of torch")
            self.pip("install", TORCH)
        else:
            log(f"no NVIDIA GPU here: torch from PyTorch's CPU index ({CPU_INDEX})")
            from_cpu_index = [
                "install",
                "--no-deps",
                "--retries",
                "1",
                "--timeout",
                "15",
                "--index-url",
                CPU_INDEX,
                TORCH,
            ]
            if self.pip(*from_cpu_index, check=False).returncode != 0:
                log("that index cannot be reached. What is left is the CUDA build: about 3 GB of downloads.")
                log("To avoid it, stop now and set TORCH_INDEX to an index that has a CPU build. Going on in 10 s.")
                time.sleep(10)
                self.pip("install", TORCH)

    def install_tensorflow(self) -> None:
        """Install TensorFlow, tilerank without its dependencies, and those that its TensorFlow binding has."""
        tensorflow = "tensorflow[and-cuda]" if has_gpu() else "tensorflow-cpu"
        size = "about 4 GB with CUDA 12" if has_gpu() else "about 270 MB"
        log(f"installing {tensorflow} {TENSORFLOW} ({size})")
        self.pip("install", tensorflow + TENSORFLOW, *tensorflow_needs())
        self.pip("install", "--no-deps", "--editable", str(ROOT))


def tensorflow_needs() -> list[str]:
    """Requirements of pyproject.toml by the names of `TENSORFLOW_NEEDS`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    named = {re.split(r"[<>=; \[]", requirement)[0]: requirement for requirement in listed}
    return [named[name] for name in TENSORFLOW_NEEDS]


def main() -> int:
    """Make or update the environment in the folder named on the command line (default .venv)."""
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        wanted = f"{PYTHONS[0][0]}.{PYTHONS[0][1]} to {PYTHONS[1][0]}.{PYTHONS[1][1]}"
        sys.exit(
            f"environment: Python {wanted} is needed, this is {sys.version.split()[0]}; try `make PYTHON=python3.12`"
        )
    for_tensorflow = "--tensorflow" in sys.argv
    folders = [argument for argument in sys.argv[1:] if argument != "--tensorflow"]
    environment = Environment(ROOT / (folders or [".venv-tf" if for_tensorflow else ".venv"])[0])
    stamp = environment.folder / "tilerank-environment"
    state = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + TENSORFLOW.encode() * for_tensorflow).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8") == state:
        return 0
    if not environment.python.exists():
        log(f"making {environment.folder} with Python {sys.version.split()[0]}")
        try:
            venv.create(environment.folder, with_pip=True)
        except subprocess.CalledProcessError:
            sys.exit("environment: this Python cannot make virtual environments (Debian: apt install python3-venv)")
    try:
        environment.pip("install", "--upgrade", "pip>=24")
        if for_tensorflow:
            environment.install_tensorflow()
        else:
            if not environment.torch_in_range():
                environment.install_torch()
            log("installing tilerank and what it needs (about 600 MB without torch)")
            environment.pip("install", "--editable", f"{ROOT}[pipeline,dev]")
    except subprocess.CalledProcessError as error:
        sys.exit(f"environment: pip failed (exit code {error.returncode}); its message is above")
    stamp.write_text(state, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
