"""Compile one variant for every architecture and record registers, memory, spills and the machine code's digest.

``digest`` is what later stages depend on: of the machine code where there is an nvcc, of the sources where not.
"""

from __future__ import annotations

from stages._run import Stage, variant_main
from tilerank.kernels import build, cubins, registry


def run(stage: Stage) -> None:
    """Write metrics/<machine>/build_kernels_<variant>.json."""
    from tqdm import tqdm

    row = registry.get(stage.options.variant)
    with tqdm(total=len(cubins.architectures(row)), desc=f"compiling {row.name}", unit="arch", disable=None) as bar:
        described = cubins.describe(row, build.find_nvcc(), progress=lambda arch: bar.update())
    digest = f"cubin:{described['cubin_sha256']}" if described["available"] else f"source:{cubins.source_digest(row)}"
    if not described["available"]:
        print(f"build_kernels: {row.name}: nothing compiled ({described['reason']})")
    stage.write_metrics({"digest": digest, "build_kernels": {row.name: described}}, suffix=row.name)


if __name__ == "__main__":
    variant_main(run)
