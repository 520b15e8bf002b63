"""One attention variant on workload seed: its error, and on a GPU its time beside every peer."""

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
    precision = "fp32" if "fp32" in row.dtypes else row.dtypes[0]
    if device_for(stage.settings.machine.name) == "cpu" or row.device == "cpu":
        record = {"ladder": attention.check_variant(row, precision)}
    else:
        built = _build_record(stage, row.name)
        record = attention.bench_variant(row, precision, stage.settings.timing)
        if "kernel" in record["ladder"]:
            record["ladder"] |= attention.compiled_resources(
                built, attention.device_architecture(), record["ladder"]["kernel"]
            )
    if "failure" in record["ladder"]:
        print(f"bench_attention: {row.name}: FAIL ({record['ladder']['failure']})")
    if precision != "fp32":  # the ladder is fp32; a row for other precisions is told beside it
        record["other_precision"] = record.pop("ladder")
    stage.write_metrics({section: {row.name: values} for section, values in record.items()}, suffix=row.name)


def _build_record(stage: Stage, variant: str) -> dict[str, Any]:
    """What build_kernels recorded of the variant."""
    path = stage.metrics_folder / f"build_kernels_{variant}.json"
    if not path.exists():
        raise TilerankError(f"{path} is not here; run `dvc repro build_kernels@{variant}` first")
    return json.loads(path.read_text(encoding="utf-8"))["build_kernels"][variant]


if __name__ == "__main__":
    variant_main(run, belongs_to_machine=True)
