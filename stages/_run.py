"""What every stage shares: settings, paths, the machine guard, tracking, metrics files and one-line errors."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from stages import ROOT
from tilerank.config import Settings, load_settings
from tilerank.errors import TilerankError
from tilerank.tracking import StageRun


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage's ``run`` is given.

    Called without overrides a stage reads params.yaml and writes the tracked outputs. With overrides it is a
    what-if: it composes its settings from conf/, reads the tracked inputs and writes below ``output_root``.
    """

    name: str  # the dvc.yaml block
    settings: Settings
    root: Path  # of the tree that the stage runs in
    output_root: Path  # `root`, or the what-if's folder
    options: argparse.Namespace  # the stage's own command-line options
    provenance: Mapping[str, Any]
    tracker: StageRun

    def path(self, relative: str) -> Path:
        """A tracked input. Absent: an error that says which stage makes it."""
        path = self.root / relative
        if not path.exists():
            raise TilerankError(f"{relative} is not here; run `dvc repro {_producer(self.root, relative)}` first")
        return path

    def out(self, relative: str) -> Path:
        """Where to write an output; its folder exists."""
        path = self.output_root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def metrics_folder(self) -> Path:
        """Where the records of the settings' machine are read (the tracked ones)."""
        return self.root / "metrics" / self.settings.machine.name

    def write_metrics(self, record: Mapping[str, Any], suffix: str = "") -> Path:
        """Write metrics/<machine>/<stage>[_<suffix>].json with provenance, and log its numbers."""
        name = self.name + (f"_{suffix}" if suffix else "")
        path = self.out(f"metrics/{self.settings.machine.name}/{name}.json")
        write_json(path, {**record, "provenance": dict(self.provenance)})
        self.tracker.log_metrics(record)
        return path

    def log_artifact(self, path: Path) -> None:
        """Attach a file to the stage's MLflow run."""
        self.tracker.log_artifact(path)


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write ``record`` with sorted keys, all at once: a reader never sees half of it. NaN is refused."""
    text = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


@cache
def _blocks(root: Path) -> dict[str, Mapping[str, Any]]:
    """The stages of dvc.yaml, which takes 0.2 s to read."""
    from ruamel.yaml import YAML

    pipeline = YAML(typ="safe").load((root / "dvc.yaml").read_text(encoding="utf-8"))
    return {name: block.get("do", block) for name, block in pipeline["stages"].items()}


def _producer(root: Path, relative: str) -> str:
    """The stage whose outs hold ``relative``."""
    for name, block in _blocks(root).items():
        for out in block["outs"]:
            path = next(iter(out)) if isinstance(out, Mapping) else out
            if relative == path or relative.startswith(path + "/"):
                return name
    return ""


def _read_before(root: Path, name: str) -> dict[str, str]:
    """Settings (sections or single keys) that the stages before ``name`` read, and which stage does."""
    found: dict[str, str] = {}
    blocks = _blocks(root)
    for dep in blocks.get(name, {}).get("deps", []):
        if producer := _producer(root, dep):
            own = (setting for setting in blocks[producer].get("params", []) if isinstance(setting, str))
            found |= _read_before(root, producer) | dict.fromkeys(own, producer)
    return found


def _check_inputs(root: Path, name: str, settings: Settings, overrides: Sequence[str]) -> None:
    """Overrides do not reach a what-if's inputs, which are the tracked ones. Say so; refuse another data set, whose
    name would stand beside the tracked one's figures."""
    here, tracked = (
        {f"{section}.{key}": value for section, keys in dataclasses.asdict(each).items() for key, value in keys.items()}
        for each in (settings, load_settings(root / "params.yaml"))
    )
    before = _read_before(root, name)
    stages = {
        key: stage
        for key in here
        for setting, stage in before.items()
        if here[key] != tracked[key] and (key == setting or key.startswith(f"{setting}."))
    }
    if not stages:
        return
    command = " ".join(["dvc exp run --temp", *(f"-S {shlex.quote(override)}" for override in overrides), name])
    message = (
        f"the inputs are those that {', '.join(sorted(set(stages.values())))} made from params.yaml, and "
        f"{', '.join(stages)} would change them; `{command}` runs these stages too"
    )
    if any(key.startswith("dataset.") for key in stages):
        raise TilerankError(message)
    print(f"{name}: {message}", file=sys.stderr)


def _refuse_shallow() -> None:
    """DVC loses, without a word, the result of an experiment that it runs in a copy of a shallow clone."""
    outer = os.environ.get("DVC_ROOT", str(ROOT))
    if "DVC_EXP_NAME" not in os.environ or Path(outer).resolve() == ROOT.resolve():
        return
    command = ["git", "-C", outer, "rev-parse", "--is-shallow-repository"]
    if subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == "true":
        raise TilerankError(
            f"{outer} is a shallow clone, in which DVC loses the experiment's result; run `git fetch --unshallow` first"
        )


def _what_if_folder(name: str, overrides: Sequence[str]) -> Path:
    label = hashlib.sha256("\n".join(overrides).encode()).hexdigest()[:8]
    return ROOT / "build" / "what-if" / f"{name}-{label}"


def _tags(provenance: Mapping[str, Any]) -> dict[str, Any]:
    tags = {
        "mlflow.source.git.commit": provenance.get("commit"),
        **{key: provenance.get(key) for key in ("dirty", "source_hash", "gpu", "driver", "cuda", "torch", "cpu")},
    }
    lock = ROOT / "dvc.lock"
    if lock.exists():
        tags["dvc_lock"] = hashlib.sha256(lock.read_bytes()).hexdigest()
    return tags


def stage_main(
    run: Callable[[Stage], None],
    *,
    belongs_to_machine: bool = False,
    options: Callable[[argparse.ArgumentParser], None] | None = None,
    label: Callable[[argparse.Namespace], str] | None = None,
) -> None:
    """Run a stage as a program and exit: 0 when it ended well, 1 with one line on stderr when it did not.

    ``belongs_to_machine``: the stage's figures belong to ``machine.name``; on another machine it stops before
    it touches an output. ``options`` adds the stage's own arguments; ``label`` names the MLflow run by them.
    """
    module = sys.modules[run.__module__]
    name = Path(str(module.__file__)).stem
    parser = argparse.ArgumentParser(prog=f"python -m stages.{name}", description=(module.__doc__ or "").strip())
    if options is not None:
        options(parser)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, for example retrieval=stub: a what-if run")
    arguments = parser.parse_intermixed_args()
    try:
        _run(run, name, arguments, belongs_to_machine, label)
    except (TilerankError, ValueError, OSError) as error:  # settings' values are refused with ValueError; a full disk
        if os.environ.get("TILERANK_TRACEBACK"):
            raise
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)


def variant_main(run: Callable[[Stage], None], *, belongs_to_machine: bool = False) -> None:
    """`stage_main` for a stage that is run once a variant: its name is ``stage.options.variant``."""

    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--variant", required=True, help="a row of cuda/registry.yaml")

    stage_main(run, belongs_to_machine=belongs_to_machine, options=options, label=lambda arguments: arguments.variant)


def _run(
    run: Callable[[Stage], None],
    name: str,
    arguments: argparse.Namespace,
    belongs_to_machine: bool,
    label: Callable[[argparse.Namespace], str] | None,
) -> None:
    from tilerank import provenance, tracking

    _refuse_shallow()
    output_root = ROOT
    if arguments.overrides:
        from tilerank.composition import compose_settings

        settings = compose_settings(ROOT / "conf", arguments.overrides)
        _check_inputs(ROOT, name, settings, arguments.overrides)
        output_root = _what_if_folder(name, arguments.overrides)
    else:
        settings = load_settings(ROOT / "params.yaml")
    use_cuda = False
    if belongs_to_machine:
        from tilerank.machine import device_for, require_machine

        require_machine(settings.machine.name)
        use_cuda = device_for(settings.machine.name) == "cuda"
    command = ["python", "-m", f"stages.{name}", *sys.argv[1:]]
    record = provenance.collect(ROOT, command, use_cuda)
    run_name = name + (f" {label(arguments)}" if label is not None else "")
    with tracking.stage_run(ROOT, settings, run_name, record.get("commit"), _tags(record)) as tracker:
        stage = Stage(name, settings, ROOT, output_root, arguments, record, tracker)
        run(stage)
    if output_root != ROOT:
        print(f"{name}: what-if written to {output_root.relative_to(ROOT)}/", file=sys.stderr)
