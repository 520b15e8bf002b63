"""The attention block as `auto` serves it, beside the unfused block over lengths, and BERT-large with it swapped in.

Without a GPU only the error of small calls is recorded.
"""

from typing import Any

from stages._run import Stage, stage_main


def run(stage: Stage) -> None:
    """Write metrics/<machine>/bench_block.json."""
    from tilerank.bench import bert_large, block
    from tilerank.machine import device_for

    settings = stage.settings
    on_cpu = device_for(settings.machine.name) == "cpu"
    # `auto` never takes a lossy variant: there is nothing of its own to time at tf32.
    precisions = [precision for precision in settings.workload.precisions if precision != "tf32"]
    if on_cpu:
        records = {"block": {precision: block.check_precision(precision) for precision in precisions}}
    else:
        lengths = {precision: block.time_precision(precision, settings.timing) for precision in precisions}
        records = {
            "block": {precision: each[block.RECORD_LENGTH] for precision, each in lengths.items()},
            "block_lengths": {
                precision: {str(tokens): record for tokens, record in each.items()}
                for precision, each in lengths.items()
            },
            "block_rows": {precision: block.rows_record(each) for precision, each in lengths.items()},
            "layernorm": block.time_layernorm(settings.timing),
            "bert_large": {str(tokens): _bert_large(tokens) for tokens in bert_large.LENGTHS},
        }
    for section, entries in records.items():
        for name, record in entries.items():
            if "failure" in record:
                print(f"bench_block: {section} {name}: FAIL ({record['failure']})")
    stage.write_metrics(records)


def _bert_large(tokens: int) -> dict[str, Any]:
    """Its figures, or why there are none: what the model's library cannot do must not cost the block its record."""
    from tilerank.bench import bert_large

    try:
        return bert_large.time_length(tokens)
    except (RuntimeError, ValueError, TypeError) as error:
        return {"failure": " ".join(str(error).split())[:200]}


if __name__ == "__main__":
    stage_main(run, belongs_to_machine=True)
