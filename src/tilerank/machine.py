"""Which machine a record belongs to, and which device its figures are taken on."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass

from tilerank.errors import TilerankError


@dataclass(frozen=True, slots=True)
class Machine:
    """What this computer is; ``gpu``, ``driver`` and ``cuda`` are absent (None) without a usable CUDA device."""

    cpu: str
    cores: int  # that this process may use
    gpu: str | None
    driver: str | None
    cuda: str | None


def cpu_name() -> str:
    """The processor's model name as the operating system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on (its affinity, where the system tells)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _driver_version() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    answer = subprocess.run(
        [tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    lines = answer.stdout.split()
    return lines[0] if answer.returncode == 0 and lines else None


def describe_machine(use_cuda: bool) -> Machine:
    """Describe this machine; the GPU's fields only with ``use_cuda`` (this imports torch)."""
    gpu = driver = cuda = None
    if use_cuda:
        import torch

        if torch.cuda.is_available():
            gpu = torch.cuda.get_device_name()
            driver = _driver_version()
            cuda = torch.version.cuda
    return Machine(cpu=cpu_name(), cores=usable_cores(), gpu=gpu, driver=driver, cuda=cuda)


def name_for(gpu: str) -> str:
    """What ``machine=auto`` calls a machine with this GPU unless its owner does: ``t4`` for a "Tesla T4",
    ``rtx-4090`` for an "NVIDIA GeForce RTX 4090"."""
    model = re.split(r"-(?:SXM|PCI|\d+GB)|\s\d+GB", gpu)[0]  # without what the same GPU comes in
    words = re.findall(r"[a-z0-9]+", model.lower())
    return "-".join(word for word in words if word not in ("nvidia", "tesla", "geforce")) or "local"


def device_for(machine_name: str) -> str:
    """The torch device that figures of ``machine_name`` are taken on: ``cpu`` for the machine ``cpu``,
    else ``cuda`` where there is one."""
    if machine_name == "cpu":
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


_COMPUTE_CAPABILITIES = {"cpu": 0, "h200": 90}
"""Of the machines whose name says what they are."""


def compute_capability(machine_name: str) -> int:
    """Compute capability, times ten, of the device that figures of ``machine_name`` are taken on; 0: a CPU.

    The same wherever it is asked for ``cpu`` and ``h200``; for any other name that of the CUDA device here.
    """
    if machine_name in _COMPUTE_CAPABILITIES:
        return _COMPUTE_CAPABILITIES[machine_name]
    from tilerank.kernels.torch_device import device_sm

    return device_sm(device_for(machine_name))


def require_machine(machine_name: str) -> None:
    """Refuse to write figures of ``machine_name`` on another machine.

    ``h200`` needs a CUDA device whose name contains H200; ``cpu`` uses no CUDA device and any other name is
    its owner's choice, so neither is refused.
    """
    if machine_name != "h200":
        return
    import torch

    here = torch.cuda.get_device_name() if torch.cuda.is_available() else "a machine without a CUDA device"
    if "H200" not in here:
        raise TilerankError(
            f"this record belongs to h200 and this is {here}; "
            "`make quickstart` runs here, `machine=auto` records here (see README, 'Record your own machine')"
        )
