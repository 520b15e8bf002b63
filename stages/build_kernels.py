"""Compile one variant for every architecture and record registers, memory, spills and the machine code's digest.

``digest`` is what later stages depend on: of the machine code where there is an nvcc, of the sources where not.
"""

from __future__ import annotations

from typing import Any

from stages._run import Stage, variant_main
from tilerank.kernels import build, cubins, registry


def run(stage: Stage) -> None:
    """Write metrics/<machine>/build_kernels_<variant>.json."""
    row = registry.get(stage.options.variant)
    stage.write_metrics(describe(stage, row), suffix=row.name)


def describe(stage: Stage, row: registry.Row) -> dict[str, Any]:
    """The record of a row: its digest, and under the stage's name what the compiler says about it."""
    from tqdm import tqdm

    with tqdm(total=len(cubins.architectures(row)), desc=f"compiling {row.name}", unit="arch", disable=None) as bar:
        described = cubins.describe(row, build.find_nvcc(), progress=lambda arch: bar.update())
    digest = f"cubin:{described['cubin_sha256']}" if described["available"] else f"source:{cubins.source_digest(row)}"
    if not described["available"]:
        print(f"{stage.name}: {row.name}: nothing compiled ({described['reason']})")
    return {"digest": digest, stage.name: {row.name: described}}


if __name__ == "__main__":
    variant_main(run)
