"""Digests of the text that each variant is compiled from, its headers included: which ones to compile again."""

from __future__ import annotations

from stages._run import Stage, stage_main


def run(stage: Stage) -> None:
    """Write metrics/<machine>/list_sources.json."""
    from tilerank.kernels import cubins, registry

    rows = registry.read_registry(registry.cuda_dir() / "registry.yaml")
    digests = {
        operation: {row.name: cubins.source_digest(row) for row in of_operation}
        for operation, of_operation in rows.items()
    }
    stage.write_metrics({"sources": digests})


if __name__ == "__main__":
    stage_main(run)
