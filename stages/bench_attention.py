"""One attention variant on workload seed: its error, and on a GPU its time beside every peer."""

from __future__ import annotations

import argparse
import json

from stages._run import Stage, stage_main


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variant", required=True, help="a row of cuda/registry.yaml")


def run(stage: Stage) -> None:
    """Write metrics/<machine>/bench_attention_<variant>.json."""
    from tilerank.bench import attention
    from tilerank.errors import TilerankError
    from tilerank.kernels import registry
    from tilerank.machine import device_for

    try:
        row = registry.get(stage.options.variant)
    except ValueError as error:
        raise TilerankError(str(error)) from error
    precision = "fp32" if "fp32" in row.dtypes else row.dtypes[0]
    if device_for(stage.settings.machine.name) == "cpu" or row.device == "cpu":
        record = {"ladder": attention.check_variant(row, precision)}
    else:
        record = attention.bench_variant(row, precision, stage.settings.timing)
        built = json.loads(
            stage.path(f"metrics/{stage.settings.machine.name}/build_kernels_{row.name}.json").read_text()
        )
        if "kernel" in record["ladder"]:
            record["ladder"] |= attention.compiled_resources(
                built["build_kernels"][row.name], attention.device_architecture(), record["ladder"]["kernel"]
            )
    if "failure" in record["ladder"]:
        print(f"bench_attention: {row.name}: FAIL ({record['ladder']['failure']})")
    stage.write_metrics({section: {row.name: values} for section, values in record.items()}, suffix=row.name)


if __name__ == "__main__":
    stage_main(run, belongs_to_machine=True, options=_options, label=lambda arguments: arguments.variant)
