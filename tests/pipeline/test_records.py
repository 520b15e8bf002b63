"""A stale record never passes for fresh: edits of a kernel, a parameter, a record, and a deletion are each caught."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tilerank import records
from tilerank.config import load_settings

PIPELINE = """
vars:
  - cuda/registry.yaml
stages:
  build:
    foreach: ${variants.attention}
    do:
      cmd: python write.py metrics/${machine.name}/build_${key}.json cuda/${item.file}
      deps:
        - cuda/${item.file}
      metrics:
        - metrics/${machine.name}/build_${key}.json:
            cache: false
            persist: true
  bench:
    foreach: ${variants.attention}
    do:
      cmd: python write.py metrics/${machine.name}/bench_${key}.json params.yaml
      deps:
        - data
      params:
        - timing
        - metrics/${machine.name}/build_${key}.json:
            - digest
      metrics:
        - metrics/${machine.name}/bench_${key}.json:
            cache: false
            persist: true
  prepare:
    cmd: python write.py ignored/out/a params.yaml
    outs:
      - ignored/out
  never_run:
    cmd: python write.py metrics/${machine.name}/never_run.json params.yaml
    metrics:
      - metrics/${machine.name}/never_run.json:
          cache: false
          persist: true
"""

WRITE = """
import hashlib, json, pathlib, sys, time
digest = hashlib.sha256(pathlib.Path(sys.argv[2]).read_bytes()).hexdigest()
pathlib.Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
pathlib.Path(sys.argv[1]).write_text(json.dumps({"digest": digest, "time": time.time()}))
"""


def _run(folder: Path, *command: str) -> None:
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "HOME": str(folder)}
    answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small project with a record of two variants, committed; its data folder is ignored by git."""
    folder = tmp_path_factory.mktemp("project")
    for name, text in {
        "cuda/registry.yaml": "variants:\n  attention:\n    one: {file: one.cu}\n    two: {file: two.cu}\n",
        "cuda/one.cu": "one",
        "cuda/two.cu": "two",
        "data/corpus": "text",
        "params.yaml": "machine:\n  name: t4\ntiming:\n  protocol: 1\n",
        "dvc.yaml": PIPELINE,
        "write.py": WRITE,
        "README.md": "<!-- tilerank:freshness:begin -->\n<!-- tilerank:freshness:end -->\n",
        ".gitignore": "/data\n/ignored\n",
        ".dvcignore": "metrics/*/STALE.md\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    _run(folder, "git", "init", "-q")
    _run(folder, "dvc", "init", "-q")
    _run(folder, "dvc", "repro", "-q", "build", "bench", "prepare")
    return folder


@pytest.fixture
def project(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "project"))


def _stale(project: Path) -> set[str]:
    return {record.stage for record in records.check(project)}


def _edit(project: Path, name: str, old: str, new: str) -> None:
    path = project / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_fresh_also_without_what_git_ignores_and_what_never_ran(project: Path) -> None:
    assert _stale(project) == set()
    shutil.rmtree(project / "data")
    shutil.rmtree(project / "ignored")
    assert _stale(project) == set()
    shutil.rmtree(project / ".dvc" / "cache")
    assert _stale(project) == set(), "as in a fresh clone"


def test_an_edited_kernel_is_caught_alone(project: Path) -> None:
    _edit(project, "cuda/one.cu", "one", "edited")
    assert _stale(project) == {"build@one"}


def test_a_rebuilt_kernel_makes_its_benchmark_stale(project: Path) -> None:
    _edit(project, "cuda/one.cu", "one", "edited")
    _run(project, "dvc", "repro", "-q", "--single-item", "build@one")
    assert _stale(project) == {"bench@one"}


def test_an_edited_parameter_is_caught(project: Path) -> None:
    _edit(project, "params.yaml", "protocol: 1", "protocol: 2")
    stale = records.check(project)
    assert {record.stage for record in stale} == {"bench@one", "bench@two"}
    assert any("timing" in reason for record in stale for reason in record.reasons)


def test_an_edited_record_is_caught(project: Path) -> None:
    _edit(project, "metrics/t4/bench_two.json", "time", "tame")
    assert _stale(project) == {"bench@two"}


def test_a_deleted_record_is_caught(project: Path) -> None:
    (project / "metrics/t4/bench_two.json").unlink()
    assert _stale(project) == {"bench@two"}


def test_changed_data_is_caught(project: Path) -> None:
    (project / "data/corpus").write_text("other", encoding="utf-8")
    assert _stale(project) == {"bench@one", "bench@two"}


def test_stale_page_and_readme_tell_the_truth_and_go_away_again(project: Path) -> None:
    page, readme = project / "metrics/t4/STALE.md", project / "README.md"
    assert records.apply(project, "t4", records.check(project), write=True) == ("README.md",)
    assert "matches the kernels, data, weights and settings of the tree" in readme.read_text(encoding="utf-8")

    _edit(project, "cuda/one.cu", "one", "edited")
    stale = records.check(project)
    assert records.apply(project, "t4", stale, write=False) == ("metrics/t4/STALE.md", "README.md")
    assert not page.exists(), "a check writes nothing"
    records.apply(project, "t4", stale, write=True)
    assert "`build@one`" in page.read_text(encoding="utf-8")
    assert "[STALE.md](metrics/t4/STALE.md)" in readme.read_text(encoding="utf-8")
    assert records.apply(project, "t4", records.check(project), write=False) == ()

    _edit(project, "cuda/one.cu", "edited", "one")
    records.apply(project, "t4", records.check(project), write=True)
    assert not page.exists()


def test_the_committed_records_tell_the_truth(repository: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "stages.records_check", "--check"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_the_committed_pages_show_what_the_records_say(repository: Path) -> None:
    """No figure or picture in README and docs differs from its record, by hand or by a report that was not run."""
    from stages.report import PAGES, PICTURES, page_tables
    from tilerank import report
    from tilerank.kernels import registry

    machine = load_settings(repository / "params.yaml").machine.name
    predictions = {row.name: row.prediction for row in registry.attention_rows()}
    committed = report.read_records(repository / "metrics" / machine)
    tables = page_tables(committed)
    for name in PAGES:
        text = (repository / name).read_text(encoding="utf-8")
        assert text == report.update_markers(text, tables), f"{name}: run `dvc repro --single-item report`"
    drawn = {
        picture.name: picture.standalone for picture in report.build_report(committed, machine, predictions).pictures
    }
    for name in PICTURES:
        path = repository / f"docs/pictures/{name}.svg"
        assert (path.read_text(encoding="utf-8") if path.exists() else None) == drawn.get(name), name
