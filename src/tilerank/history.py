"""The lab book: every step of git history as an MLflow run, made from the records that its commit holds.

A step is what one commit measured: a variant of the ladder (experiment ``workload seed``), or the pipeline on a data
set (experiment ``workload <data set>``). Runs are a function of git history alone, so importing twice changes nothing,
and a run that history no longer has is removed. Runs that stages logged themselves are left alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tilerank import tracking
from tilerank.errors import TilerankError
from tilerank.moments import Commit, Moment, is_shallow, read_moments
from tilerank.report import Record
from tilerank.report.analysis import gain, measured_by_precision, rungs_before
from tilerank.report.counters import Counters, counters_of
from tilerank.report.predictions import predicted_time, timed_case
from tilerank.report.records import PRECISIONS, lookup, merge
from tilerank.report.tables import FAILED, commit_text, failures, headline, keyed, measure, ratio, share, short, signed

FORMAT = 1
"""Raised when the same history is to become other runs: those of the older format are then replaced."""

LADDER_WORKLOAD = "seed"
"""What bench_attention times every variant on."""

_LADDER_FIGURES = ("ladder/us", "ladder/gain_over_rung_before", "ladder/speedup_vs_sdpa", "ranking/ndcg10")
_PIPELINE_FIGURES = (
    *(f"rerank.{precision}.{figure}" for precision in PRECISIONS for figure in ("ms", "speedup_vs_cross_encoder")),
    *(f"quality.reranker.{precision}.ndcg10" for precision in PRECISIONS),
    "quality.baseline_ndcg10",
)

_VIEW = "steps"
"""Key of the view that `pages` opens: of its own, MLflow draws ten runs only and lists them without a figure."""

_NOTE = "mlflow.note.content"
_TAG_VIEW = f"mlflow.sharedViewState.{_VIEW}"
_TAG_STEP = "tilerank.history"  # digest of what the run holds
_LONGEST_NOTE = 4500  # characters; MLflow takes 5,000 on an experiment
_MACHINE_TAGS = ("gpu", "cpu", "driver", "cuda", "torch", "python", "source_hash")
_RESOURCES = ("registers", "spill_bytes", "stack_bytes", "shared_bytes", "occupancy", "launches")
_NAMED = ("best_peer", "floor_bound", "kernel", "failure", "reason")


@dataclass(frozen=True, slots=True)
class Step:
    """One run to be. Equal steps have equal digests."""

    workload: str
    name: str
    time: int  # milliseconds since 1970, when it was measured
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    description: str  # Markdown: what was tried, predicted and got
    moment: Moment = field(compare=False)  # for the pictures
    sections: tuple[str, ...]  # whose pictures are attached

    @property
    def digest(self) -> str:
        """What two runs of the same step agree in."""
        values = [self.workload, self.name, self.time, self.params, self.metrics, self.tags, self.description]
        text = json.dumps([FORMAT, *values, self.sections], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did, in runs."""

    experiments: tuple[str, ...]
    added: int
    kept: int
    removed: int
    skipped: tuple[str, ...]  # what was left out: older history, records that do not add up


@dataclass(frozen=True, slots=True)
class History:
    """Every step, by workload and time, and why some are missing."""

    steps: tuple[Step, ...]
    skipped: tuple[str, ...]


def read_history(root: Path) -> History:
    """Every step in the history of the checkout ``root``.

    A variant that a commit leaves as it was measured before is no new step; its counters, its registers and what docs
    say about it are taken from the latest commit with that measurement. The pipeline has a step for each commit that
    changed one of its records.

    Raises `TilerankError` outside a git checkout.
    """
    first: dict[tuple[str, str, str], Moment] = {}
    latest: dict[tuple[str, str, str], Moment] = {}
    changes: list[Moment] = []
    before: dict[str, Moment] = {}  # machine -> the last one that changed a record of its pipeline
    for moment in read_moments(root):
        if moment.pipeline and (moment.machine not in before or before[moment.machine].pipeline != moment.pipeline):
            changes.append(moment)
            before[moment.machine] = moment
        for name, blob in moment.blobs.items():
            if name.startswith("bench_attention_"):
                key = (moment.machine, name.removeprefix("bench_attention_"), blob)
                first.setdefault(key, moment)
                latest[key] = moment
    steps: list[Step] = []
    skipped = ["what is older than this shallow clone (`git fetch --unshallow`)"] if is_shallow(root) else []
    for key, moment in latest.items():
        try:
            steps += _rung_steps(moment, key[1], first[key].commit)
        except TilerankError as error:
            skipped.append(f"{moment.commit.id[:10]}, {key[1]}: {error}")
    previous: dict[str, Moment] = {}
    for moment in changes:
        try:
            last = previous.get(moment.machine)
            if last is None or last.figures != moment.figures:  # else only its provenance is new
                steps.append(_pipeline_step(moment, last))
                previous[moment.machine] = moment
        except TilerankError as error:
            skipped.append(f"{moment.commit.id[:10]}: {error}")
    return History(tuple(sorted(steps, key=lambda step: (step.workload, step.time, step.name))), tuple(skipped))


def import_history(root: Path) -> Imported:
    """Bring the MLflow store of ``root`` (see `tracking.tracking_uri`) in line with git history.

    Raises `TilerankError` outside a git checkout, and when the store cannot be used.
    """
    from mlflow.exceptions import MlflowException

    history = read_history(root)
    try:
        with tracking.exclusive(root):
            return _bring_in_line(root, history)
    except MlflowException as error:
        raise tracking.unusable(root, error) from error


def _bring_in_line(root: Path, history: History) -> Imported:
    client = tracking.open_client(root)
    wanted: dict[str, list[Step]] = {}
    for step in history.steps:
        wanted.setdefault(experiment_name(step.workload), []).append(step)
    for workload in _imported_workloads(client):
        wanted.setdefault(experiment_name(workload), [])  # history may have lost it
    added = kept = removed = 0
    for name, group in wanted.items():
        experiment_id = tracking.ensure_experiment(client, root, name)
        note, view = (_workload_note(group), _view(group)) if group else ("", "{}")
        for tag, value in ((_NOTE, note), (_TAG_VIEW, view)):
            if client.get_experiment(experiment_id).tags.get(tag) != value:
                client.set_experiment_tag(experiment_id, tag, value)
        present = {}
        for run in tracking.search(client, experiment_id, "tags.kind = 'history'"):
            digest = run.data.tags[_TAG_STEP]
            if run.info.status == "FINISHED" and digest not in present:
                present[digest] = run.info.run_id
            else:  # an import was killed while it wrote this one
                client.delete_run(run.info.run_id)
        digests = {step.digest: step for step in group}
        for digest in present.keys() - digests.keys():
            client.delete_run(present[digest])
            removed += 1
        for digest, step in digests.items():
            if digest in present:
                kept += 1
            else:
                _write(client, experiment_id, step, digest)
                added += 1
    return Imported(tuple(name for name, group in wanted.items() if group), added, kept, removed, history.skipped)


def pages(root: Path) -> dict[str, str]:
    """What was imported: label -> address of its charts below the UI's, the ladder first and in its order."""
    client = tracking.open_client(root)
    found = _imported_workloads(client)
    view = f"{tracking.UI_VIEW}&compareRunsMode=CHART&viewStateShareKey={_VIEW}"
    return {
        "Ladder" if workload == LADDER_WORKLOAD else f"Steps on {workload}": (
            f"#/experiments/{found[workload]}/runs?{view}"
        )
        for workload in sorted(found, key=lambda workload: (workload != LADDER_WORKLOAD, workload))
    }


def _view(steps: Sequence[Step]) -> str:
    """What the UI shows of a workload, in the UI's own words: every run, in order, its main figures as columns."""
    is_ladder = steps[0].workload == LADDER_WORKLOAD
    params = ["params.`precision`"] if is_ladder else []
    state = {
        "runsHiddenMode": "SHOW_ALL",
        "orderByKey": "metrics.`ladder/rung`" if is_ladder else "attributes.start_time",
        "orderByAsc": True,
        "selectedColumns": [*params, *(f"metrics.`{figure}`" for figure in _figures(steps))],
    }
    return json.dumps(state)


def _figures(steps: Sequence[Step]) -> list[str]:
    """The metrics that a workload's steps are compared by, those that were measured."""
    wanted = _LADDER_FIGURES if steps[0].workload == LADDER_WORKLOAD else _PIPELINE_FIGURES
    return [figure for figure in wanted if any(figure in step.metrics for step in steps)]


def _imported_workloads(client: Any) -> dict[str, str]:
    """Workload -> id of its experiment."""
    prefix = experiment_name("")
    found = client.search_experiments(filter_string=f"name LIKE '{prefix}%'")
    return {experiment.name.removeprefix(prefix): experiment.experiment_id for experiment in found}


def experiment_name(workload: str) -> str:
    """The MLflow experiment that holds a workload's steps."""
    return f"workload {workload}"


def _write(client: Any, experiment_id: str, step: Step, digest: str) -> None:
    from mlflow.entities import Metric, Param

    tags = {**step.tags, "kind": "history", _TAG_STEP: digest, _NOTE: step.description}
    run = client.create_run(experiment_id, start_time=step.time, run_name=step.name, tags=tags)
    run_id = run.info.run_id
    metrics = [Metric(tracking.metric_name(key), value, step.time, 0) for key, value in step.metrics.items()]
    for start in range(0, len(metrics), 1000):  # the limit of one batch
        client.log_batch(run_id, metrics=metrics[start : start + 1000])
    client.log_batch(run_id, params=[Param(key, value) for key, value in step.params.items()])
    report = step.moment.report
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        page.write_text(report.page, encoding="utf-8")
        client.log_artifact(run_id, str(page))
        for picture in report.pictures:
            if picture.section in step.sections:
                path = Path(folder) / f"{picture.name}.svg"
                path.write_text(picture.standalone, encoding="utf-8")
                client.log_artifact(run_id, str(path), "pictures")
    client.set_terminated(run_id, status="FINISHED", end_time=step.time)


# --- steps of the ladder ---------------------------------------------------------------------------------------


def _rung_steps(moment: Moment, variant: str, recorded_in: Commit) -> Iterator[Step]:
    """A step for each precision at which the variant's record has figures.

    What was predicted and what the profiler counted belongs to the first of them.
    """
    measured = measured_by_precision(moment.records)
    precisions = [precision for precision, rungs in measured.items() if variant in rungs]
    for precision in precisions:
        rungs = measured[precision]
        own = precision == precisions[0]
        yield _rung_step(moment, variant, precision, rungs, recorded_in, own)


def _rung_step(
    moment: Moment,
    variant: str,
    precision: str,
    rungs: Mapping[str, Mapping[str, Any]],
    recorded_in: Commit,
    own: bool,
) -> Step:
    """rungs: what was measured of every variant at this precision. own: whether prediction and counters are of it."""
    row, values = moment.variants.get(variant, {}), rungs[variant]
    before = rungs_before(rungs, moment.variants).get(variant)
    resources, ladder = {}, {}
    for key, value in tracking.flatten(values).items():
        if _is_number(value) and (key, value) != ("occupancy", 0):  # torch's profiler then has no estimate
            (resources if key in _RESOURCES else ladder)[key] = float(value)
    if "rung" in row:
        ladder["rung"] = float(row["rung"])
    if before is not None:
        ladder["gain_over_rung_before"] = gain(rungs[before], values)
    predicted = predicted_time(row.get("prediction", ""), values) if own else None
    if predicted is not None:
        ladder |= {"predicted_us": predicted.us, "measured_over_predicted": predicted.measured / predicted.us}
    ranking = _ranking_with(moment, variant, precision)
    counters = counters_of(moment.records).get(variant) if own else None
    grouped = {
        "ladder": ladder,
        "resources": resources,
        "ranking": {key: float(value) for key, value in ranking.items() if _is_number(value)},
        "stall": counters.stalls if counters is not None else {},
        "ncu": counters.figures if counters is not None else {},
    }
    record = moment.record(f"bench_attention_{variant}")
    assert record is not None  # the step exists because the record does
    named = {key: str(values[key]) for key in _NAMED if key in values}
    return Step(
        workload=LADDER_WORKLOAD,
        name=variant if precision == "fp32" else f"{variant} {precision}",
        time=_time(record),
        params={"variant": variant, "precision": precision, "timed": timed_case(values)},
        # MLflow's chart page makes a section of what stands before the slash.
        metrics={f"{group}/{key}": value for group, figures in grouped.items() for key, value in figures.items()},
        tags={**named, **_tags(moment, record, recorded_in)},
        description=_rung_note(moment, variant, row, values, ladder, ranking, before, counters),
        moment=moment,
        sections=("ladder", "predicted", "counters", "rungs"),
    )


def _ranking_with(moment: Moment, variant: str, precision: str) -> Mapping[str, Any]:
    """What the unmodified model ranks like with this variant; empty when it was measured with another one."""
    used = lookup(merge(moment.records), f"drop_in.{precision}.variants") or ()
    return (lookup(moment.summary, f"quality.drop_in.{precision}") or {}) if variant in used else {}


def _rung_note(
    moment: Moment,
    variant: str,
    row: Mapping[str, Any],
    values: Mapping[str, Any],
    ladder: Mapping[str, float],
    ranking: Mapping[str, Any],
    before: str | None,
    counters: Counters | None,
) -> str:
    got = []
    if "us" in values:
        spread = f", p10 to p90 {short(values['p10_us'])} to {short(values['p90_us'])}" if "p10_us" in values else ""
        got.append(f"{short(values['us'])} µs (median{spread}); {timed_case(values)}")
    elif "failure" in values:
        got.append(f"{FAILED}: {values['failure']}")
    else:
        got.append("not timed on this machine")
    if before is not None:
        got.append(f"{ratio(ladder['gain_over_rung_before'])} against `{before}`, the rung before")
    if "speedup_vs_sdpa" in values:
        noise = " (noise)" if values.get("speedup_vs_sdpa_is_noise") else ""
        got.append(f"{ratio(values['speedup_vs_sdpa'])}{noise} against SDPA")
    if "measured_over_predicted" in ladder:
        got.append(f"{ladder['measured_over_predicted']:.2f} times the predicted {short(ladder['predicted_us'])} µs")
    if "max_abs_error" in values:
        sdpa = f", SDPA's {values['sdpa_max_abs_error']:.1e}" if "sdpa_max_abs_error" in values else ""
        got.append(f"largest error against float64 {values['max_abs_error']:.1e}{sdpa}")
    if counters is not None:
        reasons = " and ".join(f"{reason} ({share(part)})" for reason, part in counters.main_reasons)
        got.append(f"bound by {counters.bound_by}; warps wait most for {reasons}")
    parts = [
        ("Tried", _idea(moment, row) or "–"),
        ("Predicted", str(row.get("prediction", "nothing was written down"))),
        ("Got", "\n".join(f"- {line}" for line in got)),
        ("Did ranking change?", _ranking_text(moment.summary, ranking) or _not_ranked(moment)),
        ("Why", _answer(moment, variant) or "docs/ladder.md of this commit does not say."),
    ]
    return _note(parts)


def _idea(moment: Moment, row: Mapping[str, Any]) -> str:
    """The head of the variant's file without its prediction and where the answer is."""
    text = moment.file(f"cuda/{row['file']}") if "file" in row else None
    lines = []
    for line in (text or "").splitlines():
        if not line.startswith("//"):
            break
        lines.append(line.removeprefix("//").strip())
    return re.split(r"\b(?:Prediction|Answer):", " ".join(lines))[0].strip()


def _answer(moment: Moment, variant: str) -> str:
    """What docs/ladder.md says about the variant."""
    text = moment.file("docs/ladder.md") or ""
    found = re.search(rf"^### `{re.escape(variant)}`\n(.*?)(?=^#|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    return _unwrapped(found[1].strip()) if found else ""


def _unwrapped(text: str) -> str:
    """Markdown with each paragraph and list item on one line: MLflow breaks lines where the source does."""
    return re.sub(r"(?<!\n)\n[ \t]*(?![ \t\n|#>]|[-*] |\d+\. )", " ", text)


def _not_ranked(moment: Moment) -> str:
    drop_in = merge(moment.records).get("drop_in", {})
    used = sorted({name for values in drop_in.values() for name in values.get("variants", ())})
    if not used:
        return "Not measured at this commit."
    return f"Not run in the model at this commit, which ranks with {', '.join(f'`{name}`' for name in used)}."


# --- steps of the pipeline -------------------------------------------------------------------------------------


def _pipeline_step(moment: Moment, previous: Moment | None) -> Step:
    own = [record for record in moment.records if record.name in moment.pipeline]
    flat = tracking.flatten(moment.figures)
    metrics = {key: float(value) for key, value in flat.items() if _is_number(value)}
    latest = max(own, key=_time)
    return Step(
        workload=moment.dataset or "unknown",
        name=f"{moment.commit.id[:7]} {moment.commit.subject}"[:120],
        time=_time(latest),
        params={key: str(value) for key, value in flat.items() if isinstance(value, str)},
        metrics=metrics,
        tags=_tags(moment, latest, moment.commit),
        description=_pipeline_note(moment, previous),
        moment=moment,
        sections=("workload", "profile", "drop_in", "rerank", "quality", "ladder", "attention"),
    )


def _pipeline_note(moment: Moment, previous: Moment | None) -> str:
    summary = moment.summary
    predicted = [
        f"- drop-in {precision}: {ratio(values['predicted_speedup'])} by Amdahl's law"
        for precision, values in keyed(summary.get("drop_in", {}), ())
        if "predicted_speedup" in values
    ]
    ceiling = lookup(summary, "profile.amdahl_ceiling")
    if ceiling is not None:
        predicted.append(f"- most that a faster attention can gain: {ratio(ceiling)}")
    before = dict(headline(previous.summary)) if previous is not None else {}
    got = [
        f"- {label}: {value}" + (f" (before: {before[label]})" if before.get(label, value) != value else "")
        for label, value in headline(summary)
    ]
    measured = merge(moment.records)  # the summary has figures, not why there are none
    got += [
        f"- {FAILED}, {label} {precision}: {reason}"
        for section, label in (("drop_in", "drop-in"), ("rerank", "one query"))
        for precision, values in keyed(measured.get(section, {}), ())
        for reason in failures(values)
    ]
    ranking = [
        _ranking_text(summary, values, f"{scorer.replace('_', '-')} {precision}")
        for scorer in ("drop_in", "reranker")
        for precision, values in keyed(lookup(summary, f"quality.{scorer}") or {}, ())
    ]
    return _note(
        [
            ("Tried", "\n\n".join(filter(None, (moment.commit.subject, _unwrapped(moment.commit.body))))),
            ("Predicted", "\n".join(predicted) or "–"),
            ("Got", "\n".join(got) or "–"),
            ("Did ranking change?", "\n".join(f"- {line}" for line in ranking if line) or "Not measured."),
        ]
    )


def _ranking_text(summary: Mapping[str, Any], values: Mapping[str, Any], label: str = "") -> str:
    if "ndcg10" not in values:
        return ""
    parts = [f"nDCG@10 {measure(values['ndcg10'])}"]
    baseline = lookup(summary, "quality.baseline_ndcg10")
    if baseline is not None:
        parts.append(f"the unmodified model's {measure(baseline)}")
    if "ndcg10_diff_low" in values:
        low, high = values["ndcg10_diff_low"], values["ndcg10_diff_high"]
        verdict = "No difference was found" if low <= 0 <= high else "It changed"
        parts.append(f"95 % interval of the difference {signed(low)} to {signed(high)}")
    else:
        verdict = ""
    if "top10_exact" in values:
        parts.append(f"top ten equal for {share(values['top10_exact'])} of {values['queries']:.0f} queries")
    return f"{label}: " * bool(label) + ", ".join(parts) + "." + (f" {verdict}." if verdict else "")


# --- what an experiment says -----------------------------------------------------------------------------------


def _workload_note(steps: Sequence[Step]) -> str:
    if steps[0].workload != LADDER_WORKLOAD:
        return (
            "One run a commit that changed the pipeline's records, raw text to scores. Each run's description says "
            "what was tried, predicted and got, and whether ranking changed; `report.html` among its artifacts has "
            "every table and picture. Columns to compare: "
            + ", ".join(f"`{figure}`" for figure in _figures(steps))
            + "."
        )
    lines = [
        "Attention alone: one run a rung of the ladder and measurement. `ladder/us` is its time, "
        "`ladder/gain_over_rung_before` what the step gained, `stall/...` why warps waited (cycles an instruction), "
        "`ranking/...` what the unmodified model ranks like with it. Each run's description says what was tried, "
        "predicted and got.",
        "",
    ]
    for machine in sorted({step.tags["machine"] for step in steps}):
        latest = {step.name: step for step in steps if step.tags["machine"] == machine}  # by time: the last stands
        gains = {name: step.metrics.get("ladder/gain_over_rung_before", 0.0) for name, step in latest.items()}
        best = max(gains, key=lambda name: gains[name])
        if gains[best] > 0:
            lines.append(
                f"- {machine}: the step that gained most is `{best}`, {ratio(gains[best])} over the one before."
            )
        for precision in PRECISIONS:
            own = {name: step for name, step in latest.items() if step.params["precision"] == precision}
            timed = {name: step.metrics["ladder/us"] for name, step in own.items() if "ladder/us" in step.metrics}
            if timed:
                quickest = min(timed, key=lambda name: timed[name])
                lines.append(f"- {machine}: the quickest at {precision} is `{quickest}`, {short(timed[quickest])} µs.")
            for name, step in own.items():
                ranking = {
                    key.removeprefix("ranking/"): value
                    for key, value in step.metrics.items()
                    if key.startswith("ranking/")
                }
                if ranking:
                    told = _ranking_text(step.moment.summary, ranking)
                    lines.append(f"- {machine}: did ranking change? With `{name}` in the unmodified model: {told}")
    return "\n".join(lines)


# --- small things ----------------------------------------------------------------------------------------------


def _note(parts: Sequence[tuple[str, str]]) -> str:
    text = "\n\n".join(f"### {title}\n\n{body}" for title, body in parts)
    return text if len(text) <= _LONGEST_NOTE else text[:_LONGEST_NOTE].rsplit(" ", 1)[0] + " …"


def _tags(moment: Moment, record: Record, commit: Commit) -> dict[str, str]:
    provenance = record.provenance
    return {
        "machine": moment.machine,
        "mlflow.source.git.commit": commit.id,
        "recorded_in": f"{commit.id[:10]} {commit.subject}"[:250],
        "measured_from": commit_text(provenance) if provenance else "not recorded",
        **{key: str(provenance[key]) for key in _MACHINE_TAGS if key in provenance},
    }


def _time(record: Record) -> int:
    """When it was measured, in milliseconds since 1970; 0 when it does not say."""
    try:
        return int(datetime.fromisoformat(str(record.provenance.get("time"))).timestamp() * 1000)
    except ValueError:
        return 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
