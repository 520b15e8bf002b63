"""One variant of the attention block under compute-sanitizer's tools and from PTX of older GPUs.

As check_kernels does it for attention.
"""

from __future__ import annotations

from stages._run import Stage, variant_main
from stages.check_kernels import check
from tilerank.kernels import registry


def run(stage: Stage) -> None:
    """Write metrics/<machine>/check_block_<variant>.json."""
    row = registry.get(stage.options.variant, "block")
    stage.write_metrics({"block_checks": {row.name: check(stage, row, "block")}}, suffix=row.name)


if __name__ == "__main__":
    variant_main(run, belongs_to_machine=True)
