"""Small random model folders, saved as transformers and sentence-transformers save them."""

from __future__ import annotations

import json
from pathlib import Path

_VOCABULARY = (
    "the of a and to in is cell protein gene mouse human study blood heart drug dose risk trial bone acid brain virus "
    "immune cancer tumor growth factor level high low old new data model test rank query text page list"
)
WORDS = _VOCABULARY.split()


def write_tiny_bert(
    folder: Path,
    kind: str = "cross-encoder",
    *,
    positions: int = 64,
    labels: int = 1,
    seed: int = 0,
    config: dict | None = None,
) -> Path:
    """A two-layer BERT with weights wide enough (initializer_range 0.5) that wrong attention shows in the score."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"abcdefghijklmnopqrstuvwxyz.,", "##s", "##ing"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=positions)
    settings = BertConfig(
        vocab_size=len(pieces),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=positions,
        initializer_range=0.5,
        num_labels=labels,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        family = BertForSequenceClassification if kind == "cross-encoder" else BertModel
        model = family(settings)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    if config:
        merge_json(folder / "config.json", config)
    return folder


def write_own_attention(folder: Path, tokenizer_from: Path, family: str) -> Path:
    """A two-layer cross-encoder of a family that computes attention by itself (MPNet, DebertaV2): no SDPA, no swap."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_from)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=66,
        initializer_range=0.5,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
    )
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        getattr(transformers, f"{family}ForSequenceClassification")(config).save_pretrained(folder)
    return folder


def merge_json(path: Path, values: dict) -> None:
    """Set keys of a JSON file, which is made where it is missing."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**content, **values}), encoding="utf-8")
