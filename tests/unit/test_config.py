"""params.yaml is what conf/ composes to, and is read into typed settings with errors that name the key."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tilerank import host_path
from tilerank.composition import compose_file, compose_settings
from tilerank.config import Settings, load_settings
from tilerank.errors import TilerankError


def test_params_yaml_is_the_composition_of_conf(repository: Path, tmp_path: Path) -> None:
    committed = load_settings(repository / "params.yaml")
    written = tmp_path / "params.yaml"
    settings = compose_file(repository / "conf", written, [f"machine={committed.machine.name}"])
    assert settings == committed
    assert written.read_bytes() == (repository / "params.yaml").read_bytes()
    assert compose_settings(repository / "conf", []) == committed, "conf/config.yaml composes to the record by default"


@pytest.mark.parametrize(
    ("group", "options"),
    [
        ("dataset", ["scifact", "pydocs", "beir"]),
        ("model", ["minilm_l6_scifact", "all_minilm_l6", "ms_marco", "local"]),
        ("retrieval", ["bm25", "stub"]),
        ("kernel", ["auto", "sdpa", "naive"]),
        ("machine", ["cpu", "h200", "auto"]),
        ("experiment", ["scifact", "quickstart"]),
    ],
)
def test_every_option_composes(repository: Path, group: str, options: list[str]) -> None:
    present = sorted(path.stem for path in (repository / "conf" / group).glob("*.yaml"))
    assert present == sorted(options)
    for option in options:
        assert isinstance(compose_settings(repository / "conf", [f"{group}={option}"]), Settings)


def test_quickstart_stays_small_on_a_machine_with_a_gpu(repository: Path) -> None:
    settings = compose_settings(repository / "conf", ["experiment=quickstart", "machine=auto"])
    assert (settings.dataset.name, settings.model.name) == ("pydocs", "all-minilm-l6")
    assert (settings.workload.queries, settings.workload.candidates, settings.workload.max_length) == (20, 50, 256)
    assert (settings.machine.rerank_queries, settings.machine.rerank_rounds) == (2, 1)


def test_machine_auto_takes_its_name_from_the_environment(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILERANK_MACHINE", "t4")
    settings = compose_settings(repository / "conf", ["machine=auto"])
    assert (settings.machine.name, settings.workload.queries) == ("t4", 300)
    monkeypatch.delenv("TILERANK_MACHINE")
    assert compose_settings(repository / "conf", ["machine=auto"]).machine.name == "local"


def test_a_failed_composition_leaves_params_alone(repository: Path, tmp_path: Path) -> None:
    target = tmp_path / "params.yaml"
    target.write_text("kept", encoding="utf-8")
    with pytest.raises(TilerankError, match=r"machine=bogus.*auto cpu h200"):
        compose_file(repository / "conf", target, ["machine=bogus"])
    with pytest.raises(TilerankError, match=r"workload.candidates: expected int, found 'many'"):
        compose_file(repository / "conf", target, ["workload.candidates=many"])
    assert target.read_text(encoding="utf-8") == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["params.yaml"]


def test_settings_are_frozen(repository: Path) -> None:
    settings = load_settings(repository / "params.yaml")
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.workload.candidates = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("candidates: 50", "candidates: fifty", r"params\.workload\.candidates: expected int, found 'fifty'"),
        ("candidates: 50", "candidates: true", r"params\.workload\.candidates: expected int, found True"),
        ("candidates: 50", "candidate: 50", r"unknown keys \['candidate'\], missing keys \['candidates'\]"),
        ("kind: bm25", "kind: on", None),  # YAML 1.2: a bare `on` is a string
        ("machine:\n  name:", "machine: cpu\nother:\n  name:", r"unknown keys \['other'\]"),
        ("k1: 1.5", "k1: [1.5", r"is not YAML"),
    ],
)
def test_a_bad_value_is_named(repository: Path, tmp_path: Path, old: str, new: str, message: str | None) -> None:
    text = (repository / "params.yaml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "params.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    if message is None:
        assert load_settings(path).retrieval.kind == "on"
        return
    with pytest.raises(TilerankError, match=message):
        load_settings(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.queries=0", r"params\.workload\.queries is 0; allowed: 1 or more"),
        ("workload.batch_size=-1", r"params\.workload\.batch_size is -1"),
        ("workload.precisions=[fp8]", r"params\.workload\.precisions is \['fp8'\]; allowed: .*fp32, tf32, fp16, bf16"),
        ("workload.precisions=[]", r"params\.workload\.precisions is \[\]"),
        ("machine.name=../x", r"params\.machine\.name is '\.\./x'"),
        ("machine.name=cpu/x", r"params\.machine\.name is 'cpu/x'"),
        ("host_path.path=quick", r"params\.host_path\.path is 'quick'; allowed: auto, padded, fast_tokens, packed"),
        ("machine.rerank_rounds=0", r"params\.machine\.rerank_rounds is 0"),
    ],
)
def test_a_value_out_of_range_is_named(repository: Path, override: str, message: str) -> None:
    with pytest.raises(TilerankError, match=message):
        compose_settings(repository / "conf", [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.candidate=10", r"params\.workload has no 'candidate'; allowed: batch_size, candidates, max_length"),
        ("workloads.candidates=10", r"params has no 'workloads'; allowed: dataset, host_path"),
        ("workload.candidates.x=10", r"params\.workload\.candidates has no 'x': it is no group of settings"),
        ("dataset.sha256.x=ab", r"use \+dataset\.sha256\.x=ab"),  # Hydra's own words: there this serves
    ],
)
def test_an_unknown_setting_is_named_with_those_that_there_are(repository: Path, override: str, message: str) -> None:
    with pytest.raises(TilerankError, match=f"cannot compose '{override}': .*{message}") as refused:
        compose_settings(repository / "conf", [override])
    assert ("+" in str(refused.value)) == ("sha256" in override)


@pytest.mark.parametrize("override", ["machine=3", "kernel=null", "kernel=[1]", "workload.precisions.x=fp16"])
def test_what_hydra_cannot_read_is_refused_by_name(repository: Path, override: str) -> None:
    """Hydra and OmegaConf let some of these end in exceptions of Python's own."""
    with pytest.raises(TilerankError, match=f"cannot compose '{re.escape(override)}': "):
        compose_settings(repository / "conf", [override])


def test_every_host_path_is_an_option(repository: Path) -> None:
    options = {path.stem for path in (repository / "conf" / "host_path").glob("*.yaml")}
    assert options == {host_path.AUTO, *(path.name for path in host_path.PATHS)}
    for name in options:
        assert compose_settings(repository / "conf", [f"host_path={name}"]).host_path.path == name


def test_a_file_that_is_not_text_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TilerankError, match="is not YAML"):
        load_settings(path)


def test_a_missing_file_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(TilerankError, match=r"stages\.compose"):
        load_settings(tmp_path / "params.yaml")


def test_compose_prints_one_line_and_exits_with_1(repository: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "stages.compose", "dataset=nothing"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 1
    assert len(answer.stderr.splitlines()) == 1, answer.stderr
    assert "beir pydocs scifact" in answer.stderr
