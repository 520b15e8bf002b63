"""Compile one variant of layer normalisation for every architecture, as build_kernels does the attention's."""

from __future__ import annotations

from stages._run import Stage, variant_main
from stages.build_kernels import describe
from tilerank.kernels import registry


def run(stage: Stage) -> None:
    """Write metrics/<machine>/build_layernorm_<variant>.json."""
    row = registry.get(stage.options.variant, "layernorm")
    stage.write_metrics(describe(stage, row), suffix=row.name)


if __name__ == "__main__":
    variant_main(run)
