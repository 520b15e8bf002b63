"""Attention over lengths, head dims, causal, grouped-query and cross calls, as `auto` serves them, beside the peers."""

from stages._run import Stage, stage_main


def run(stage: Stage) -> None:
    """Write metrics/<machine>/bench_micro.json."""
    from tilerank.bench import micro
    from tilerank.machine import device_for

    settings = stage.settings
    on_cpu = device_for(settings.machine.name) == "cpu"
    # `auto` never takes a lossy variant: there is nothing of its own to time at tf32.
    precisions = [precision for precision in settings.workload.precisions if precision != "tf32"]
    records = {
        precision: micro.check_shapes(precision) if on_cpu else micro.time_shapes(precision, settings.timing)
        for precision in precisions
    }
    for precision, shapes in records.items():
        for shape, record in shapes.items():
            if "failure" in record:
                print(f"bench_micro: {precision} {shape}: FAIL ({record['failure']})")
    stage.write_metrics({"micro": records})


if __name__ == "__main__":
    stage_main(run, belongs_to_machine=True)
