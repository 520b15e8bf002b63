"""Every command and program in the README and docs runs as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from projects import IDENTITY, Project, commit_tree, make_project

from tilerank.config import load_settings

ELSEWHERE = {
    "make quickstart": "tests/pipeline/test_quickstart.py",  # through the program that the target calls
    "make test": "tests/pipeline/test_readme.py",  # is what runs this test
    "make gpu": "tests/unit/test_environment.py",  # through the program that the target calls
    "bash docs/colab_t4.sh --dry-run": "tests/unit/test_colab.py",  # with programs that stand in for a GPU's
    "make ui": "tests/pipeline/test_browser.py",  # through the program that the target calls
    "dvc plots show": "tests/pipeline/test_readme.py",  # where there are pictures: test_records_are_compared...
    "dvc plots diff": "tests/pipeline/test_readme.py",
}
"""Beginnings of commands that another test runs."""

KERNELS = {
    "make doctor": "tests/kernels/test_doctor.py",
    "make build": "tests/kernels/test_build.py",
    "cmake -S cuda -B build/lib": "tests/kernels/test_c_example.py",
    "ninja -C build/lib": "tests/kernels/test_c_example.py",
    "build/lib/attention_example": "tests/kernels/test_c_example.py",
    "cmake -S cuda -B build/driver": "tests/kernels/test_driver.py",
    "ninja -C build/driver": "tests/kernels/test_driver.py",
    "pytest tests/kernels/test_host_emulator.py": "tests/kernels/test_host_emulator.py",
    "build/host-checks/": "tests/kernels/test_host_variants.py",
}
"""The same for docs/kernels.md; its commands about the example are `test_a_kernel_is_added_as_the_page_says`."""

BINDINGS = {
    "make tf-env": ".ci/run",
    "make tf-test": ".ci/run",
    ".venv-tf/bin/python docs/example/keras_encoder.py": "tests/bindings/test_tf.py",
    "cmake -S cuda -B build/lib": "tests/unit/test_packaging.py",
    "ninja -C build/lib install": "tests/unit/test_packaging.py",
    "make wheel": "tests/unit/test_packaging.py",  # through the program that the target calls
}
"""The same for docs/bindings.md."""

NOT_HERE = ("pip install", "compute-sanitizer", "pytest -m gpu", "dvc repro bench_attention@one_pass")
"""Beginnings of commands that need a package index or a GPU."""

SLOW = ("dvc exp run", "dvc queue", "TILERANK_MACHINE=", "git ")
"""Beginnings of commands that run whole experiments or commit: `test_experiments`."""


def _blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def _commands(page: Path) -> list[str]:
    return [line for block in _blocks(page, "sh") for line in block.splitlines() if line.strip()]


def _run_commands(project: Project, page: Path) -> None:
    commands = [line for line in _commands(page) if not line.startswith((*ELSEWHERE, *SLOW))]
    assert len(commands) >= 5
    for command in commands:
        if "cranfield" in command and "TILERANK_DATA" not in project.environment:
            continue  # needs a data set that is not everywhere
        project.check(command)


def test_commands_of_the_readme_run_and_leave_the_tree_alone(project: Project, repository: Path) -> None:
    _run_commands(project, repository / "README.md")
    assert project.check("git status --porcelain") == "", "a what-if or a table never touches a tracked file"


def test_commands_of_measuring_run(project: Project, repository: Path) -> None:
    _run_commands(project, repository / "docs" / "measuring.md")
    project.check("git checkout --quiet .")  # the check of the records may have written its line in the README


def test_the_commands_named_elsewhere_are_there_and_so_are_their_tests(repository: Path) -> None:
    for page, named in (
        ("README.md", ELSEWHERE),
        ("docs/kernels.md", KERNELS),
        ("docs/bindings.md", BINDINGS),
    ):
        for beginning, test in named.items():
            assert any(line.startswith(beginning) for line in _commands(repository / page)), beginning
            assert (repository / test).is_file(), test


def test_no_page_has_a_command_that_nothing_runs(repository: Path) -> None:
    pages = {"README.md", *(f"docs/{path.name}" for path in (repository / "docs").glob("*.md"))}
    run_here = {"README.md", "docs/measuring.md", "docs/kernels.md", "docs/bindings.md"}
    assert [page for page in pages - run_here if _commands(repository / page)] == []
    assert [line for line in _commands(repository / "docs/bindings.md") if not line.startswith(tuple(BINDINGS))] == []
    walked = [line for line in _commands(repository / "docs/kernels.md") if not line.startswith((*KERNELS, *NOT_HERE))]
    assert walked == WALK


def test_experiments_run_with_what_every_reader_has(repository: Path) -> None:
    """The record's machine, data and model are not: an experiment with them would stop anywhere else."""
    commands = _commands(repository / "docs" / "measuring.md")
    experiments = [line for line in commands if line.startswith("dvc exp run")]
    assert len(experiments) >= 2
    for command in experiments:
        assert "-S experiment=quickstart -S machine=cpu" in command, command


def test_programs_run(repository: Path) -> None:
    blocks = _blocks(repository / "README.md", "python")
    assert blocks
    for block in blocks:
        answer = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
        assert answer.returncode == 0, f"{block}\n{answer.stderr}"


# --- DVC's tables and plots ------------------------------------------------------------------------------------


def test_records_are_compared_in_readable_tables_on_a_fresh_clone(repository: Path, tmp_path: Path) -> None:
    root = tmp_path / "clone"
    commit_tree(repository, root)
    project = Project(root)
    machine = load_settings(root / "params.yaml").machine.name
    summary = root / "metrics" / machine / "summary.json"
    figures = json.loads(summary.read_text(encoding="utf-8"))
    before = figures["ladder"]["best_ffma"]["us"]
    figures["ladder"]["best_ffma"]["us"] = 2 * before
    summary.write_text(json.dumps(figures), encoding="utf-8")
    project.check(f"git {' '.join(IDENTITY)} commit -qam again")
    shown = {}
    for command in _commands(repository / "README.md"):
        if command.startswith(("dvc metrics", "dvc exp show", "dvc plots")):
            shown[" ".join(command.split()[:3])] = project.check(command)

    changed = shown["dvc metrics diff"].strip().splitlines()
    assert len(changed) == 2, "a heading, and the one figure that changed"
    told = [
        f"metrics/{machine}/summary.json",
        "ladder.best_ffma.us",
        *(f"{round(each, 5)}" for each in (before, 2 * before)),
    ]
    assert changed[1].split()[:4] == told
    table = shown["dvc exp show"].strip().splitlines()
    assert max(map(len, table)) <= 160
    heading = next(line for line in table if "Experiment" in line)
    for figure in ("ladder.best_ffma.us", "rerank.fp16.ms", "quality.reranker.fp32.ndcg10"):
        assert figure in heading
    assert any(f"{2 * before:.5g}" in line for line in table), table
    page = (root / "dvc_plots" / "index.html").read_text(encoding="utf-8")
    assert "ladder.svg" in page
    assert project.check("git status --porcelain") == ""


# --- experiments -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_experiments(repository: Path, tmp_path: Path) -> None:
    project = make_project(repository, tmp_path / "project")
    project.check("dvc repro --quiet")
    project.check("git add -A")
    project.check("git commit -qm record")
    commands = _commands(repository / "docs/measuring.md")
    # Sweeps first: recording under another name, as the page has it, leaves the branch.
    sweeps = [command for command in commands if command.startswith(("dvc exp", "dvc queue"))]
    for command in sweeps:
        shown = project.check(command)
        if command == "dvc queue start":
            _wait_for_queue(project)
    rows = [line for line in shown.splitlines() if re.search(r"\d", line)]
    assert len(rows) >= 5, shown
    for row in (row for row in rows if "[" in row):  # an experiment: its name, and a number for each figure
        assert all(re.fullmatch(r"[\d.]+", cell.strip()) for cell in row.strip("| ").split("|")[1:]), shown
    for command in commands:
        if command not in sweeps:
            project.check(command)
    records = project.check("git ls-tree -r --name-only HEAD metrics").splitlines()
    assert "metrics/t4/summary.json" in records
    assert "metrics/cpu/summary.json" in records, "the other machine's record stays"


def _wait_for_queue(project: Project) -> None:
    import time

    for _ in range(600):
        status = project.check("dvc queue status")
        if not re.search(r"Queued|Running", status):
            assert status.count("Success") == 2, status
            return
        time.sleep(2)
    pytest.fail("the queue did not end")


# --- a new kernel ----------------------------------------------------------------------------------------------

WALK = [
    "python -m tilerank.report.variants",
    "pytest tests/kernels/test_registry.py tests/unit/test_docs.py",
    "pytest tests/kernels/test_host_variants.py -k one_pass",
    "python -m stages.build_kernels --variant one_pass machine=auto",
]
"""What docs/kernels.md has a reader do after writing the file and the row."""


@pytest.mark.slow
def test_a_kernel_is_added_as_the_page_says(repository: Path, tmp_path: Path) -> None:
    """One file, one row, and the commands of the page, in a tree with the tests and few other variants."""
    project = make_project(repository, tmp_path / "project", keep=("tests/", "docs/pictures/"))
    for stale in repository.glob("metrics/*/STALE.md"):  # the README leads there where there is one
        copy = project.root / stale.relative_to(repository)
        copy.parent.mkdir(parents=True)
        copy.write_text(stale.read_text("utf-8"), encoding="utf-8")
    page = repository / "docs" / "kernels.md"
    (kernel,), (row,) = _blocks(page, "cuda"), _blocks(page, "yaml")
    path = project.root / "cuda" / re.search(r"file: (\S+)", row)[1]
    path.write_text(kernel, encoding="utf-8")
    registry = project.root / "cuda" / "registry.yaml"
    head, attention, others = re.split(
        r"(?<=^  attention:\n)((?:^(?:    .*)?\n)+)", registry.read_text("utf-8"), flags=re.M
    )
    registry.write_text(f"{head}{attention.rstrip()}\n{row}{others}", encoding="utf-8")
    project.environment["PYTHONPATH"] = str(project.root / "src")  # what an editable install of the tree gives
    variants, tests, host, build = WALK
    project.check(variants)
    assert "| `one_pass` | `attention/99_one_pass.cu` |" in (project.root / "docs/kernels.md").read_text("utf-8")
    answer = project.run(tests)
    asked = set(re.findall(r"^FAILED \S+::(\w+)", answer.stdout, flags=re.MULTILINE))
    # As the page says, the same test asks for a paragraph and a line; here other variants' are left over, too.
    assert asked <= {
        "test_every_rung_has_its_answer_in_ladder_order",
        "test_the_changelog_has_a_line_for_each_variant",
        "test_answers_introduce_no_figures",
    }, answer.stdout
    assert "test_the_changelog_has_a_line_for_each_variant" in asked
    assert re.search(r"[1-9]\d* passed", project.check(host))
    project.check(build)
    (record,) = project.root.glob("build/what-if/*/metrics/*/build_kernels_one_pass.json")
    assert json.loads(record.read_text(encoding="utf-8"))["digest"]
