"""The lab book: git history as MLflow runs, the same ones however often it is imported."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tilerank import history, tracking
from tilerank.errors import TilerankError
from tilerank.report import read_records

PROVENANCE = {
    "commit": "0123456789abcdef",
    "dirty": False,
    "gpu": "NVIDIA T4",
    "driver": "570.1",
    "cuda": "13.0",
    "torch": "2.11.0",
    "time": "2026-11-29T10:00:00+00:00",
}
REGISTRY = """
variants:
  attention:
    naive: {file: attention/01_naive.cu, rung: 1, prediction: "Slow: nothing is reused."}
    tiled: {file: attention/02_tiled.cu, rung: 2, prediction: "1,100 us masked, from 2,000. Tiles."}
"""
DOCS = """# The ladder

### `naive`

Held, as expected.

### `tiled`

Bound by shared memory, which
serves `tiled`. Then:

- first, and
  more;
- second.

## More
"""
STALLS = {"stalls": {"short_scoreboard": 2.0, "long_scoreboard": 0.5, "not_selected": 0.5}, "occupancy_pct": 25.0}
QUALITY = {
    "ndcg10": 0.76,
    "ndcg10_diff_low": -0.002,
    "ndcg10_diff_high": 0.003,
    "top10_exact": 0.99,
    "queries": 300,
}


def rung(us: float, **more: object) -> dict:
    return {"us": us, "masked": True, "precision": "fp32", "layout": "padded", "registers": 80, **more}


class Book:
    """A checkout whose records a test writes and commits."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "-q", "-b", "main")
        self.write("cuda/registry.yaml", REGISTRY)
        self.write("cuda/attention/01_naive.cu", "// Naive: a thread a row.\n// Prediction: slow.\nint x;\n")
        self.write("cuda/attention/02_tiled.cu", "// Tiled: keys in\n// shared memory. Answer: docs.\n")
        self.write("docs/ladder.md", DOCS)
        self.write("params.yaml", "dataset: {name: scifact}\n")

    def git(self, *arguments: str) -> str:
        names = {f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        command = ["git", "-C", str(self.root), *arguments]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, **names}
        ).stdout.strip()

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def record(self, name: str, **values: object) -> None:
        self.write(f"metrics/t4/{name}.json", json.dumps({**values, "provenance": PROVENANCE}))

    def commit(self, message: str) -> str:
        self.git("add", "-A")
        self.git("commit", "-qm", message)
        return self.git("rev-parse", "HEAD")

    def runs(self, workload: str) -> dict:
        client = tracking.open_client(self.root)
        experiment = client.get_experiment_by_name(history.experiment_name(workload))
        runs = client.search_runs([experiment.experiment_id])
        assert all(run.info.status == "FINISHED" for run in runs)
        return {run.info.run_name: run for run in runs}


@pytest.fixture
def book(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Book:
    """Two steps of the ladder and two of the pipeline, in two commits."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    made = Book(tmp_path / "book")
    shutil.copy(empty_store, made.root)
    made.write(".gitignore", "mlflow.db*\nmlartifacts/\n")
    made.record("bench_attention_naive", ladder={"naive": rung(2000.0)})
    made.record("bench_rerank", rerank={"fp32": {"ms": 31.0, "cross_encoder_ms": 50.0}})
    made.commit("Write the naive kernel")
    made.record("bench_attention_tiled", ladder={"tiled": rung(1000.0, best_peer="sdpa", max_abs_error=1e-6)})
    made.record("profile_kernels_tiled", profile_kernels={"tiled": {"available": True, "kernels": {"0": STALLS}}})
    failed = {"failures": {"tilerank": "error 2 is above 1"}, "cross_encoder_ms": 50.0}
    made.record("bench_rerank", rerank={"fp32": {"ms": 30.0, "cross_encoder_ms": 50.0}, "fp16": failed})
    made.record(
        "integrate_hf",
        drop_in={"fp32": {"predicted_speedup": 1.1, "variants": ["tiled"]}, "fp16": {"failure": "error 3 is above 1"}},
        quality={"baseline_ndcg10": 0.76, "drop_in": {"fp32": QUALITY}},
    )
    made.commit("Put keys into shared memory\n\nTwice as fast.")
    return made


def test_one_run_a_step_in_one_experiment_a_workload(book: Book) -> None:
    imported = history.import_history(book.root)
    assert (imported.added, imported.kept, imported.removed, imported.skipped) == (4, 0, 0, ())
    assert set(imported.experiments) == {"workload seed", "workload scifact"}
    rungs, pipeline = book.runs("seed"), book.runs("scifact")
    assert set(rungs) == {"naive", "tiled"}
    assert [
        name.split(" ", 1)[1]
        for name in sorted(pipeline, key=lambda name: pipeline[name].data.metrics["rerank.fp32.ms"])
    ] == [
        "Put keys into shared memory",
        "Write the naive kernel",
    ]
    head = book.git("rev-parse", "HEAD")
    tiled = rungs["tiled"].data
    assert tiled.metrics["ladder/us"] == 1000.0
    assert tiled.metrics["ladder/gain_over_rung_before"] == 2.0
    assert tiled.metrics["ladder/measured_over_predicted"] == pytest.approx(1000 / 1100)
    assert tiled.metrics["resources/registers"] == 80
    assert tiled.metrics["stall/short_scoreboard"] == 2.0
    assert tiled.metrics["ncu/occupancy_pct"] == 25.0
    assert tiled.metrics["ranking/ndcg10"] == 0.76
    assert "ladder/gain_over_rung_before" not in rungs["naive"].data.metrics
    assert tiled.tags["mlflow.source.git.commit"] == head
    assert rungs["naive"].data.tags["mlflow.source.git.commit"] == book.git("rev-parse", "HEAD~1")
    assert (tiled.tags["gpu"], tiled.tags["driver"], tiled.tags["torch"]) == ("NVIDIA T4", "570.1", "2.11.0")
    assert tiled.tags["measured_from"] == "commit 0123456789"
    assert rungs["tiled"].info.start_time == 1795946400000, "when it was measured, not when it was imported"


def test_descriptions_say_what_was_tried_predicted_and_got(book: Book) -> None:
    history.import_history(book.root)
    text = book.runs("seed")["tiled"].data.tags["mlflow.note.content"]
    for part in (
        "### Tried\n\nTiled: keys in shared memory.\n",
        "### Predicted\n\n1,100 us masked, from 2,000. Tiles.",
        "1,000 µs (median); masked",
        "2.00× against `naive`, the rung before",
        "0.91 times the predicted 1,100 µs",
        "bound by shared memory; warps wait most for short_scoreboard (50.0 %) and long_scoreboard (12.5 %)",
        "nDCG@10 0.7600, the unmodified model's 0.7600, 95 % interval of the difference -0.0020 to +0.0030, "
        "top ten equal for 99.0 % of 300 queries. No difference was found.",
        "### Why\n\nBound by shared memory, which serves `tiled`. Then:\n\n- first, and more;\n- second.",
    ):
        assert part in text, text
    assert (
        "Not run in the model at this commit, which ranks with `tiled`."
        in (book.runs("seed")["naive"].data.tags["mlflow.note.content"])
    )
    (pipeline,) = (run for name, run in book.runs("scifact").items() if "shared" in name)
    text = pipeline.data.tags["mlflow.note.content"]
    assert "Put keys into shared memory\n\nTwice as fast." in text
    assert "one query, raw text to scores, fp32: 30.0 ms (before: 31.0 ms)" in text
    assert "drop-in fp32: 1.10× by Amdahl's law" in text
    assert "- FAIL, drop-in fp16: error 3 is above 1" in text
    assert "- FAIL, one query fp16: tilerank: error 2 is above 1" in text
    client = tracking.open_client(book.root)
    note = client.get_experiment_by_name("workload seed").tags["mlflow.note.content"]
    assert "t4: the step that gained most is `tiled`, 2.00× over the one before" in note
    assert "t4: the quickest at fp32 is `tiled`, 1,000 µs" in note
    assert "t4: did ranking change? With `tiled` in the unmodified model: nDCG@10 0.7600, " in note


def test_the_pages_show_every_run_and_columns_that_runs_have(book: Book) -> None:
    history.import_history(book.root)
    client = tracking.open_client(book.root)
    addresses = history.pages(book.root)
    assert list(addresses) == ["Ladder", "Steps on scifact"]
    for address, workload in zip(addresses.values(), ("seed", "scifact"), strict=True):
        key = address.rpartition("viewStateShareKey=")[2]
        experiment = client.get_experiment_by_name(history.experiment_name(workload))
        view = json.loads(experiment.tags[f"mlflow.sharedViewState.{key}"])
        assert f"/experiments/{experiment.experiment_id}/" in address
        assert view["runsHiddenMode"] == "SHOW_ALL"
        logged = {f"metrics.`{name}`" for run in book.runs(workload).values() for name in run.data.metrics}
        columns = {column for column in view["selectedColumns"] if column.startswith("metrics.")}
        assert columns, "a table without a figure says nothing"
        assert columns <= logged
        assert view["orderByKey"] in logged | {"attributes.start_time"}


def test_pictures_and_the_report_are_attached(book: Book) -> None:
    history.import_history(book.root)
    client = tracking.open_client(book.root)
    run_id = book.runs("seed")["tiled"].info.run_id
    assert {item.path for item in client.list_artifacts(run_id)} == {"report.html", "pictures"}
    assert "pictures/ladder.svg" in {item.path for item in client.list_artifacts(run_id, "pictures")}


def identities(book: Book) -> set[str]:
    return {run.info.run_id for workload in ("seed", "scifact") for run in book.runs(workload).values()}


def test_importing_twice_changes_nothing(book: Book) -> None:
    history.import_history(book.root)
    before = identities(book)
    again = history.import_history(book.root)
    assert (again.added, again.kept, again.removed) == (0, 4, 0)
    assert identities(book) == before


def test_a_rung_measured_again_is_a_run_of_its_own(book: Book) -> None:
    history.import_history(book.root)
    book.record("bench_attention_tiled", ladder={"tiled": rung(900.0)})
    book.commit("Measure again")
    imported = history.import_history(book.root)
    assert (imported.added, imported.kept) == (1, 4)
    client = tracking.open_client(book.root)
    experiment = client.get_experiment_by_name("workload seed").experiment_id
    times = [run.data.metrics["ladder/us"] for run in client.search_runs([experiment], "params.variant = 'tiled'")]
    assert sorted(times) == [900.0, 1000.0]


def test_each_precision_of_a_variant_is_a_run(book: Book) -> None:
    half = rung(100.0, precision="fp16", layout="packed", floors={"exps_us": 30.0})
    bf16 = {**half, "us": 120.0, "precision": "bf16"}
    book.record("bench_attention_mma", rungs={"fp16": {"mma": half}, "bf16": {"mma": bf16}})
    book.record("profile_kernels_mma", profile_kernels={"mma": {"available": True, "kernels": {"0": STALLS}}})
    row = '    mma: {file: attention/03_mma.cu, rung: 3, prediction: "90 us packed."}\n'
    book.write("cuda/registry.yaml", REGISTRY + row)
    book.commit("Use tensor cores")
    history.import_history(book.root)
    runs = book.runs("seed")
    assert set(runs) == {"naive", "tiled", "mma fp16", "mma bf16"}
    first, second = (runs[f"mma {precision}"].data.metrics for precision in ("fp16", "bf16"))
    assert (first["ladder/us"], first["ladder/predicted_us"], first["ladder/floors.exps_us"]) == (100.0, 90.0, 30.0)
    assert "stall/short_scoreboard" in first
    assert second["ladder/us"] == 120.0
    assert not {"ladder/predicted_us", "stall/short_scoreboard"} & set(second), "these are of the first precision"
    assert "ladder/gain_over_rung_before" not in first, "another precision's rung is not the one before"


def test_a_commit_that_changes_no_figure_is_no_step(book: Book) -> None:
    path = book.root / "metrics/t4/bench_rerank.json"
    path.write_text(path.read_text(encoding="utf-8").replace("10:00:00", "11:00:00"), encoding="utf-8")
    book.commit("Run it again: same figures")
    assert history.import_history(book.root).added == 4


def test_runs_that_history_lost_go_and_live_ones_stay(book: Book) -> None:
    history.import_history(book.root)
    client = tracking.open_client(book.root)
    experiment = client.get_experiment_by_name("workload seed").experiment_id
    live = client.create_run(experiment, run_name="live").info.run_id
    client.set_terminated(live)
    interrupted = client.create_run(experiment, tags={"kind": "history", "tilerank.history": "x"}).info.run_id
    book.git("reset", "-q", "--hard", "HEAD~1")
    imported = history.import_history(book.root)
    # `naive` is told anew: what the commits after it said of it is gone too.
    assert (imported.added, imported.kept, imported.removed) == (1, 1, 3)
    assert set(book.runs("seed")) == {"naive", "live"}
    assert client.get_run(interrupted).info.lifecycle_stage == "deleted"


def test_records_that_do_not_add_up_are_left_out_and_said(book: Book) -> None:
    book.write("metrics/t4/bench_rerank.json", "[]")
    broken = book.commit("Break a record")
    book.git("revert", "--no-edit", "HEAD")
    imported = history.import_history(book.root)
    assert imported.added == 4
    assert len(imported.skipped) == 1
    assert broken[:10] in imported.skipped[0]
    assert "expected a JSON object, found list" in imported.skipped[0]


def test_a_shallow_clone_says_what_it_lacks(book: Book, tmp_path: Path) -> None:
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{book.root}", str(shallow)], check=True)
    found = history.read_history(shallow)
    assert {step.name for step in found.steps} >= {"naive", "tiled"}
    assert "git fetch --unshallow" in found.skipped[0]
    assert history.read_history(book.root).skipped == ()


def test_outside_a_checkout_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TilerankError, match="is no git checkout"):
        history.import_history(tmp_path)


def test_the_projects_own_history_holds_its_records(repository: Path) -> None:
    """Each time that is in the tree is a step of history, unless it is not committed yet."""
    listed = subprocess.run(
        ["git", "-C", str(repository), "status", "--porcelain", "--", "metrics"], capture_output=True, text=True
    )
    if listed.returncode != 0 or listed.stdout:
        pytest.skip("not a git checkout with its records committed")
    steps = history.read_history(repository).steps
    for folder in (repository / "metrics").iterdir():
        for record in read_records(folder):
            for variant, values in record.values.get("ladder", {}).items():
                found = [
                    step.metrics.get("ladder/us")
                    for step in steps
                    if (step.params.get("variant"), step.tags["machine"]) == (variant, folder.name)
                ]
                assert values.get("us") in found, record.name
