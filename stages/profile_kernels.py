"""What Nsight Compute says about one attention variant on workload seed; without the tool, why there is nothing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from stages._run import Stage, variant_main

if TYPE_CHECKING:
    from tilerank.profiling import KernelProfile


def run(stage: Stage) -> None:
    """Write metrics/<machine>/profile_kernels_<variant>.json."""
    from tilerank.bench import attention
    from tilerank.kernels import registry
    from tilerank.machine import device_for
    from tilerank.profiling import NcuError, kernel_profiles, run_ncu

    row = registry.get(stage.options.variant)
    try:
        if row.device == "cpu":
            raise NcuError("host code: there is no kernel to profile")
        if device_for(stage.settings.machine.name) == "cpu":
            raise NcuError("no CUDA device is used on this machine")
        if refusal := attention.workload_refusal(row, row.precisions[0]):
            raise NcuError(f"the workload's {refusal}")
        command = [sys.executable, "-m", "tilerank.bench.attention", row.name]
        if "fp32" not in row.dtypes:
            command += ["--precision", row.dtypes[0]]
        profiles = kernel_profiles(run_ncu(command, kernel_regex=attention.kernel_pattern(row)))
        record = {"available": True, "kernels": {str(place): _fields(each) for place, each in enumerate(profiles)}}
    except NcuError as error:
        record = {"available": False, "reason": str(error)}
        print(f"profile_kernels: {row.name}: not available ({error})")
    stage.write_metrics({"profile_kernels": {row.name: record}}, suffix=row.name)


def _fields(profile: KernelProfile) -> dict[str, Any]:
    """One launch: its figures, and the reasons that warps wait for, worst first."""
    return {
        "kernel": profile.kernel,
        **profile.figures,
        "stall_reasons": [reason for reason, _ in profile.stalls],
        "stalls": dict(profile.stalls),
    }


if __name__ == "__main__":
    variant_main(run, belongs_to_machine=True)
