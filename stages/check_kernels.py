"""One attention variant under compute-sanitizer's tools and from PTX of older GPUs, against the reference.

Without a GPU, and for what a tool does not serve, the record says why there is nothing.
"""

from __future__ import annotations

from typing import Any

from stages._run import Stage, variant_main
from tilerank.kernels.registry import Row


def check(stage: Stage, row: Row, operation: str) -> dict[str, Any]:
    """What there is to say about a row of that operation."""
    from tilerank import kernel_checks
    from tilerank.kernels import build, driver
    from tilerank.machine import device_for

    if row.device == "cpu":
        record = {"available": False, "reason": "host code: there is no kernel to check"}
    elif device_for(stage.settings.machine.name) == "cpu":
        record = {"available": False, "reason": "no CUDA device is used on this machine"}
    else:
        capabilities = build.present_capabilities()
        reason = driver.refusal(row, row.min_sm, min(capabilities))
        record = (
            {"available": False, "reason": reason}
            if reason
            else kernel_checks.check_variant(row, capabilities, operation)
        )
    if "failure" in record:
        print(f"{stage.name}: {row.name}: FAIL ({record['failure']})")
    return record


def run(stage: Stage) -> None:
    """Write metrics/<machine>/check_kernels_<variant>.json."""
    from tilerank.kernels import registry

    row = registry.get(stage.options.variant)
    stage.write_metrics({"checks": {row.name: check(stage, row, "attention")}}, suffix=row.name)


if __name__ == "__main__":
    variant_main(run, belongs_to_machine=True)
