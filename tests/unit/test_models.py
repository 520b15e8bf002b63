"""Finding weights by name and digest, and reading what a model folder says about itself."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilerank import models
from tilerank.config import ModelSettings
from tilerank.errors import TilerankError

CROSS = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "x"}, "max_position_embeddings": 512}
ENCODER = {"architectures": ["BertModel"], "max_position_embeddings": 512, "type_vocab_size": 2}
POOLING = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def _folder(path: Path, config: dict[str, Any] | None = None, weights: bytes = b"weights", **files: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CROSS if config is None else config), encoding="utf-8")
    (path / models.WEIGHTS).write_bytes(weights)
    for name, content in files.items():
        file = path / f"{name}.json".replace("__", "/")
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILERANK_MODELS", str(tmp_path / "shelf"))
    return tmp_path / "shelf"


def test_the_shelf_comes_before_the_tree(tmp_path: Path, shelf: Path) -> None:
    in_tree = _folder(tmp_path / "models" / "m", weights=b"tree")
    settings = ModelSettings("m", None, None)
    assert models.resolve(settings, tmp_path).path == in_tree
    on_shelf = _folder(shelf / "m", weights=b"shelf")
    found = models.resolve(settings, tmp_path)
    assert found == models.ResolvedModel(on_shelf, "m", hashlib.sha256(b"shelf").hexdigest(), "cross-encoder")


def test_another_digest_is_refused_and_both_are_named(tmp_path: Path) -> None:
    _folder(tmp_path / "models" / "m")
    actual, wanted = hashlib.sha256(b"weights").hexdigest(), "0" * 64
    assert models.resolve(ModelSettings("m", actual, None), tmp_path).sha256 == actual
    with pytest.raises(TilerankError) as failure:
        models.resolve(ModelSettings("m", wanted, None), tmp_path)
    assert actual in str(failure.value)
    assert wanted in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_model_that_is_nowhere_names_the_places(tmp_path: Path, shelf: Path) -> None:
    with pytest.raises(TilerankError, match="no model named 'absent'") as failure:
        models.resolve(ModelSettings("absent", None, None), tmp_path)
    assert str(shelf / "absent") in str(failure.value)
    assert str(tmp_path / "models" / "absent") in str(failure.value)
    way_out = "put its folder there, name its parent in $TILERANK_MODELS, or take all-minilm-l6"
    assert str(failure.value).endswith(way_out)


def test_an_unreachable_hub_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(TilerankError, match=r"'owner/absent' \(ConnectionError: no route to host\)") as failure:
        models.resolve(ModelSettings("absent", None, "owner/absent"), tmp_path)
    assert "\n" not in str(failure.value)


def test_the_hub_is_asked_for_safetensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = {}

    def download(repository: str, allow_patterns: list[str]) -> str:
        asked[repository] = allow_patterns
        return str(_folder(tmp_path / "cache"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert models.resolve(ModelSettings("absent", None, "owner/absent"), tmp_path).path == tmp_path / "cache"
    assert models.WEIGHTS in asked["owner/absent"]
    assert not any("bin" in pattern or pattern == "*" for pattern in asked["owner/absent"])


def test_the_packaged_encoder_is_a_bi_encoder(tmp_path: Path, bi_encoder_dir: Path) -> None:
    found = models.resolve(ModelSettings("all-minilm-l6", None, None), tmp_path)
    assert found.path == bi_encoder_dir
    assert found.kind == "bi-encoder"
    assert found.sha256 == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    description = models.describe(found.path)
    assert (description.own_max_length, description.position_limit, description.pooling) == (256, 512, "mean")


def test_a_path_is_taken_as_it_is(tmp_path: Path, shelf: Path) -> None:
    folder = _folder(tmp_path / "anywhere" / "deep" / "m")
    assert models.resolve_path(folder) == folder
    assert models.resolve_path(str(folder)) == folder
    assert models.resolve_path(_folder(shelf / "known").name) == shelf / "known"
    with pytest.raises(TilerankError, match="no such model folder"):
        models.resolve_path(tmp_path / "gone")
    with pytest.raises(TilerankError, match="no such model folder"):
        models.resolve_path("./one/two/three")


def test_other_weights_are_not_read(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "models" / "m")
    (folder / models.WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(TilerankError, match=r"no model\.safetensors"):
        models.resolve(ModelSettings("m", None, None), tmp_path)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (CROSS, "cross-encoder"),
        ({"architectures": ["XLMRobertaForSequenceClassification"], "num_labels": 1}, "cross-encoder"),
        (ENCODER, "bi-encoder"),
        ({"architectures": ["BertForMaskedLM"]}, "bi-encoder"),
    ],
)
def test_the_kind_is_the_configuration_s(tmp_path: Path, config: dict[str, Any], kind: str) -> None:
    assert models.describe(_folder(tmp_path / "m", config)).kind == kind


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**CROSS, "id2label": {"0": "a", "1": "b", "2": "c"}}, "num_labels=3"),
        ({"architectures": ["BertForSequenceClassification"]}, "num_labels=2"),  # transformers' default
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification"),
        ({}, "architecture ''"),
    ],
)
def test_what_cannot_rank_is_refused(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    with pytest.raises(TilerankError, match=named):
        models.describe(_folder(tmp_path / "m", config))


@pytest.mark.parametrize("content", ["{", "[]", '"text"', "\xff", "[" * 100_000])
def test_a_damaged_configuration_is_one_line(tmp_path: Path, content: str) -> None:
    folder = _folder(tmp_path / "m")
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(TilerankError, match=r"config\.json") as failure:
        models.describe(folder)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("config", "architectures", [None]),
        ("config", "architectures", "BertForSequenceClassification"),
        ("config", "max_position_embeddings", "512"),
        ("config", "type_vocab_size", None),
        ("config", "type_vocab_size", True),
        ("config", "vocab_size", "30522"),
        ("config", "id2label", 1),
        ("config", "sentence_transformers", "x"),
        ("config", "sbert_ce_default_activation_function", 3),
        ("sentence_bert_config", "max_seq_length", "256"),
        ("config_sentence_transformers", "default_prompt_name", 1),
    ],
)
def test_a_field_of_another_kind_is_one_line(tmp_path: Path, file: str, key: str, value: Any) -> None:
    content = {file: {**(CROSS if file == "config" else {}), key: value}}
    folder = _folder(tmp_path / "m", content.pop("config", None), modules=POOLING[:1], **content)
    with pytest.raises(TilerankError, match=rf"{file}\.json: {key} ") as failure:
        models.describe(folder)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("module", ["x", {}, {"type": "sentence_transformers.models.Pooling"}, {"type": 1, "path": ""}])
def test_a_module_that_is_none_is_one_line(tmp_path: Path, module: Any) -> None:
    with pytest.raises(TilerankError, match=r"modules\.json: the module .* is no object with a type and a path"):
        models.describe(_folder(tmp_path / "m", modules=[module]))


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"model_type": "bert", "max_position_embeddings": 512, "pad_token_id": 0}, 512),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "modernbert", "max_position_embeddings": 8192, "pad_token_id": 50283}, 8192),
        ({"model_type": "xlnet", "max_position_embeddings": -1}, None),
        ({"model_type": "t5"}, None),
    ],
)
def test_the_position_table_s_limit(tmp_path: Path, config: dict[str, Any], limit: int | None) -> None:
    assert models.describe(_folder(tmp_path / "m", {**config, "architectures": ["XModel"]})).position_limit == limit


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "mean", "include_prompt": True}, "mean"),
        ({"pooling_mode": "cls", "embedding_dimension": 8}, "cls"),
    ],
)
def test_pooling_is_the_folder_s(tmp_path: Path, pooling: dict[str, Any], expected: str) -> None:
    folder = _folder(tmp_path / "m", ENCODER, modules=POOLING, **{"1_Pooling__config": pooling})
    assert models.describe(folder).pooling == expected


def test_what_would_be_scored_wrongly_is_refused(tmp_path: Path) -> None:
    maximum = _folder(
        tmp_path / "max", ENCODER, modules=POOLING, **{"1_Pooling__config": {"pooling_mode_max_tokens": True}}
    )
    dense = _folder(tmp_path / "dense", ENCODER, modules=[*POOLING, {"path": "2_Dense", "type": "x.Dense"}])
    prompted = _folder(
        tmp_path / "prompted",
        CROSS,
        modules=POOLING[:1],
        config_sentence_transformers={"default_prompt_name": "query"},
    )
    for folder, named in ((maximum, "pooling"), (dense, "Dense"), (prompted, "prompt 'query'")):
        with pytest.raises(TilerankError, match=named):
            models.describe(folder)


@pytest.mark.parametrize(
    ("config", "extra", "expected"),
    [
        ({}, None, None),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, None, "Identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, None, "Identity"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.Tanh"},
            "Tanh",
        ),
    ],
)
def test_the_activation_is_read_where_sentence_transformers_keeps_it(
    tmp_path: Path, config: dict[str, Any], extra: dict[str, Any] | None, expected: str | None
) -> None:
    files = {"modules": POOLING[:1], "config_sentence_transformers": extra} if extra else {}
    activation = models.describe(_folder(tmp_path / "m", {**CROSS, **config}, **files)).activation
    assert (activation or "None").rsplit(".", 1)[-1] == (expected or "None")


def test_nothing_here_imports_torch(repository: Path) -> None:
    code = "import sys, tilerank, tilerank.models, tilerank.tokenization, tilerank.cli; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(repository / "src")}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("said", "columns"),
    [({"hidden_size": 384, "num_attention_heads": 12}, 32), ({"head_dim": 64, "hidden_size": 384}, 64)],
)
def test_columns_of_a_head_are_read_or_worked_out(tmp_path: Path, said: dict[str, int], columns: int) -> None:
    assert models.head_dim(_folder(tmp_path / "m", {**CROSS, **said})) == columns


def test_a_model_that_does_not_say_how_wide_a_head_is_is_named(tmp_path: Path) -> None:
    with pytest.raises(TilerankError, match=r"m/config\.json has no head_dim"):
        models.head_dim(_folder(tmp_path / "m", {**CROSS, "hidden_size": 384}))
