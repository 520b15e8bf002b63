"""One attention variant on workload seed at its precisions: its error, on a GPU its time beside every peer."""

from __future__ import annotations

import json
from typing import Any

from stages._run import Stage, variant_main
from tilerank.errors import TilerankError


def run(stage: Stage) -> None:
    """Write metrics/<machine>/bench_attention_<variant>.json."""
    from tilerank.bench import attention
    from tilerank.kernels import registry
    from tilerank.machine import device_for

    row = registry.get(stage.options.variant)
    if device_for(stage.settings.machine.name) == "cpu" or row.device == "cpu":
        benched = {precision: {"rung": attention.check_variant(row, precision)} for precision in row.precisions}
    else:
        built = _build_record(stage, row.name)
        benched = attention.bench_variant(row, stage.settings.timing)
        for record in benched.values():
            if "kernel" in record["rung"]:
                record["rung"] |= attention.compiled_resources(
                    built, attention.device_architecture(), record["rung"]["kernel"]
                )
    for precision, record in benched.items():
        if "failure" in record["rung"]:
            print(f"bench_attention: {row.name} {precision}: FAIL ({record['rung']['failure']})")
    stage.write_metrics(_sections(row.name, benched), suffix=row.name)


def _sections(variant: str, benched: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The ladder is fp32; rungs of other precisions stand beside it, each under its precision. So do the peers."""
    sections: dict[str, Any] = {}
    for precision, record in benched.items():
        if precision == "fp32":
            sections["ladder"] = {variant: record["rung"]}
        else:
            sections.setdefault("rungs", {})[precision] = {variant: record["rung"]}
        if "peers" in record:
            peers = sections.setdefault("peers", {}).setdefault(variant, {})
            peers |= record["peers"] if precision == "fp32" else {precision: record["peers"]}
    return sections


def _build_record(stage: Stage, variant: str) -> dict[str, Any]:
    """What build_kernels recorded of the variant."""
    path = stage.metrics_folder / f"build_kernels_{variant}.json"
    if not path.exists():
        raise TilerankError(f"{path} is not here; run `dvc repro build_kernels@{variant}` first")
    return json.loads(path.read_text(encoding="utf-8"))["build_kernels"][variant]


if __name__ == "__main__":
    variant_main(run, belongs_to_machine=True)
