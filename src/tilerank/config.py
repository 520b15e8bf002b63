"""The project's settings as typed records, and the one reader of ``params.yaml``.

``conf/`` (Hydra groups) is the source; ``params.yaml`` is its committed composition.
YAML 1.2 throughout (ruamel): a bare ``on`` is a string, as Hydra and DVC read it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from tilerank import host_path
from tilerank.errors import TilerankError

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """What to search: ``source`` is auto | ir_datasets | local | pydocs (auto: a local folder or zip
    under ``$TILERANK_DATA`` if there is one, else ir_datasets)."""

    name: str
    source: str
    split: str
    sha256: Mapping[str, str]  # canonical file name -> expected digest; empty: not checked
    passages: int  # pydocs only: size of the corpus
    queries: int  # pydocs only: number of known-item queries
    drop_self_retrieval: bool  # drop hits whose document id equals the query id (Quora-like datasets)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which weights, known by digest (``sha256`` of model.safetensors; null: computed when used)."""

    name: str  # folder under $TILERANK_MODELS or models/, or the packaged encoder's name
    sha256: str | None
    hub: str | None  # repository on the Hugging Face hub, when the weights may come from there


@dataclass(frozen=True, slots=True)
class RetrievalSettings:
    """First stage: ``kind`` is bm25 | stub."""

    kind: str
    k1: float
    b: float
    stopwords: str
    seed: int  # of the stub's random fill


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """Which attention the rerank path uses: auto, a registry row's name, or sdpa."""

    variant: str


@dataclass(frozen=True, slots=True)
class HostPathSettings:
    """How the rerank path gets from text to scores: auto, or a name of `tilerank.host_path.PATHS`."""

    path: str


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """What one run of the pipeline processes."""

    queries: int  # queries of the split that model stages rerank, in canonical order
    candidates: int  # passages a query
    max_length: int  # tokens a pair
    batch_size: int  # pairs a forward pass of the unmodified model
    precisions: tuple[str, ...]  # of fp32, tf32, fp16, bf16


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """Whose figures these are: h200 | cpu | a name of the owner's choosing."""

    name: str
    rerank_queries: int  # queries timed end to end
    rerank_rounds: int  # interleaved rounds over them


@dataclass(frozen=True, slots=True)
class TrackingSettings:
    """MLflow: the experiment that runs are logged to."""

    experiment: str


@dataclass(frozen=True, slots=True)
class TimingSettings:
    """How kernels are timed. ``protocol`` is raised whenever the timing code changes meaning."""

    protocol: int
    warmup: int  # rounds before anything is recorded
    rounds: int  # interleaved A/B rounds
    flush_mb: int  # bytes written between repetitions so that the L2 is cold


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything ``params.yaml`` holds."""

    dataset: DatasetSettings
    model: ModelSettings
    retrieval: RetrievalSettings
    kernel: KernelSettings
    host_path: HostPathSettings
    workload: WorkloadSettings
    machine: MachineSettings
    tracking: TrackingSettings
    timing: TimingSettings


T = TypeVar("T")


def _typed(cls: type[T], values: Any, where: str) -> T:
    """Build the record ``cls`` from plain YAML values, naming the key that does not fit."""
    if not isinstance(values, Mapping):
        raise TilerankError(f"{where}: expected a section of settings, found {values!r}")
    hints = get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    missing = sorted(set(hints) - set(values))
    if unknown or missing:
        raise TilerankError(
            f"{where}: unknown keys {unknown}, missing keys {missing}; allowed: {sorted(hints)} "
            "(run `python -m stages.compose` to rewrite params.yaml from conf/)"
        )
    return cls(**{key: _value(hint, values[key], f"{where}.{key}") for key, hint in hints.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _typed(hint, value, where)
    if getattr(hint, "__origin__", None) is tuple:
        if not isinstance(value, list):
            raise TilerankError(f"{where}: expected a list, found {value!r}")
        return tuple(str(item) for item in value)
    if getattr(hint, "__origin__", None) is not None:  # Mapping[str, str]
        return {str(key): str(item) for key, item in (value or {}).items()}
    allowed = get_args(hint) or (hint,)
    if float in allowed and type(value) is int:
        return float(value)
    if type(value) not in allowed:
        names = " or ".join(kind.__name__ for kind in allowed)
        raise TilerankError(f"{where}: expected {names}, found {value!r}")
    return value


def unknown_setting(key: str) -> str | None:
    """What to say of a key, with dots, that is no setting; None for one that is, or that may be made."""
    kind: Any = Settings
    where = "params"
    for name in key.split("."):
        if getattr(kind, "__origin__", None) is Mapping:
            return None
        if not dataclasses.is_dataclass(kind):
            return f"{where} has no {name!r}: it is no group of settings"
        hints = get_type_hints(kind)
        if name not in hints:
            return f"{where} has no {name!r}; allowed: {', '.join(sorted(hints))}"
        kind, where = hints[name], f"{where}.{name}"
    return None


def settings_from_mapping(values: Mapping[str, Any]) -> Settings:
    """Type the composed configuration; raise `TilerankError` naming the first key that does not fit."""
    settings = _typed(Settings, values, "params")
    workload = settings.workload
    for key in ("queries", "candidates", "max_length", "batch_size"):
        _require(f"workload.{key}", getattr(workload, key), getattr(workload, key) >= 1, "1 or more")
    names = (host_path.AUTO, *(path.name for path in host_path.PATHS))
    _require("host_path.path", settings.host_path.path, settings.host_path.path in names, ", ".join(names))
    known = not set(workload.precisions) - set(PRECISIONS) and bool(workload.precisions)
    _require("workload.precisions", list(workload.precisions), known, f"one or more of {', '.join(PRECISIONS)}")
    # It names a folder below metrics/.
    name = settings.machine.name
    _require("machine.name", name, re.fullmatch(r"\w[\w.-]*", name) is not None, "letters, digits, '.', '_' and '-'")
    for key in ("rerank_queries", "rerank_rounds"):
        value = getattr(settings.machine, key)
        _require(f"machine.{key}", value, value >= 1, "1 or more")
    return settings


def _require(key: str, value: Any, fits: bool, allowed: str) -> None:
    if not fits:
        raise TilerankError(f"params.{key} is {value!r}; allowed: {allowed}")


def load_settings(path: Path) -> Settings:
    """Read ``params.yaml``."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        values = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TilerankError(f"{path}: {error.strerror}; run `python -m stages.compose` to write it") from error
    except (YAMLError, UnicodeDecodeError) as error:
        line = str(error).splitlines()[0]
        raise TilerankError(f"{path} is not YAML ({line}); run `python -m stages.compose` to rewrite it") from error
    return settings_from_mapping(values)
