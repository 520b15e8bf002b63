"""Where the time of the unmodified pipeline goes, and the ceiling that Amdahl's law puts on a faster attention."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages._run import Stage, stage_main

if TYPE_CHECKING:
    from tilerank.bench.rerank import Call, RerankSetup


def run(stage: Stage) -> None:
    from tilerank import data, models, quality, retrieval
    from tilerank.bench import baseline, rerank
    from tilerank.machine import device_for

    settings = stage.settings
    workload, machine = settings.workload, settings.machine
    dataset = data.load(stage.path("data/canonical"), settings.dataset.name)
    pools = retrieval.read_pools(stage.path("data/candidates/pools.jsonl"))
    calls = rerank.calls_of(quality.make_task(dataset, pools, machine.rerank_queries))
    model = models.resolve(settings.model, stage.root)
    setup = rerank.RerankSetup(
        path=model.path,
        kind=model.kind,
        device=device_for(machine.name),
        max_length=workload.max_length,
        attention="sdpa",
        batch_size=workload.batch_size,
    )
    trace = stage.out("data/profile/trace.json.gz")
    record = baseline.profile_baseline(setup, calls, machine.rerank_rounds, trace)
    timeline = _timeline(stage, setup, calls[0])
    stage.log_artifact(trace)
    stage.write_metrics({"profile": {**record, "queries": len(calls), "nsys": timeline}})


def _timeline(stage: Stage, setup: RerankSetup, call: Call) -> dict[str, Any]:
    """An Nsight Systems timeline of one call beside the trace, or why there is none."""
    from tilerank.bench import baseline
    from tilerank.profiling import NsysError, run_nsys

    with tempfile.TemporaryDirectory() as folder:
        calls = Path(folder) / "calls.json"
        baseline.write_calls(calls, setup, [call])
        command = [sys.executable, "-m", "tilerank.bench.baseline", str(calls)]
        try:
            report = run_nsys(command, stage.out("data/profile/timeline"))
        except NsysError as error:
            return {"available": False, "reason": str(error)}
    stage.log_artifact(report)
    return {"available": True, "file": f"data/profile/{report.name}"}


if __name__ == "__main__":
    stage_main(run, belongs_to_machine=True)
