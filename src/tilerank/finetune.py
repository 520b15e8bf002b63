"""Turn the packaged encoder into a cross-encoder on a dataset's training split.

Each training query makes groups of one relevant passage, BM25's hard negatives and a random passage; the loss is the
cross-entropy over a group plus a share of the binary cross-entropy of its pairs. Sampling, initial head and dropout
follow from the recipe's seed, and torch's deterministic algorithms are used, so that the same machine gives the same
bytes again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from tilerank.errors import TilerankError
from tilerank.models import WEIGHTS, file_sha256
from tilerank.reranker import load_model, quiet_transformers
from tilerank.tokenization import TextTokenizer, load_tokenizer
from tilerank.types import Dataset, Pool

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the weights, besides encoder, data and machine."""

    epochs: int = 12
    groups: int = 16  # a step
    hard_negatives: int = 14  # a group, drawn from the query's BM25 pool
    random_negatives: int = 1  # a group, drawn from the corpus
    pool: int = 50  # BM25 candidates that hard negatives are drawn from
    max_length: int = 320  # tokens a pair
    learning_rate: float = 1e-4
    head_learning_rate: float = 1e-3
    weight_decay: float = 0.01  # of matrices; biases and norms have none
    warmup: float = 0.1  # share of the steps; the rate then falls linearly to 0
    pair_loss_weight: float = 0.2
    gradient_norm: float = 1.0  # cut at
    mantissa_bits: int = 7  # of the saved fp16 weights, so that they compress well; fp16 has 10
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """One query with the passages that compete for it; the first is the relevant one."""

    query: str
    passages: tuple[str, ...]


def training_groups(dataset: Dataset, pools: Sequence[Pool], recipe: Recipe, epoch: int) -> list[Group]:
    """One group for each query with a relevant document in the corpus, in this epoch's order.

    Depends on the recipe's seed, the epoch and the data alone. A pool too small for the hard negatives is made up
    with random documents; a corpus too small for a whole group is a `TilerankError`.
    """
    texts = {document.doc_id: document.contents for document in dataset.documents}
    pool_of = {pool.query_id: pool.doc_ids for pool in pools}
    size = recipe.hard_negatives + recipe.random_negatives
    doc_ids = list(texts)
    groups = []
    findable = _findable(dataset)
    for query in dataset.queries:
        if query.query_id not in findable:
            continue
        draw = random.Random(f"{recipe.seed} {epoch} {query.query_id}")
        relevant = findable[query.query_id]
        if len(doc_ids) - len(relevant) < size:
            raise TilerankError(
                f"{dataset.name} has {len(doc_ids)} documents; a group takes {size} that are irrelevant"
            )
        hard = [doc_id for doc_id in pool_of.get(query.query_id, ()) if doc_id not in relevant]
        chosen = draw.sample(hard, min(recipe.hard_negatives, len(hard)))
        taken = {*chosen, *relevant}
        while len(chosen) < size:
            doc_id = draw.choice(doc_ids)
            if doc_id not in taken:
                taken.add(doc_id)
                chosen.append(doc_id)
        groups.append(Group(query.text, tuple(texts[doc_id] for doc_id in (draw.choice(relevant), *chosen))))
    random.Random(f"{recipe.seed} {epoch}").shuffle(groups)
    return groups


def steps_of(dataset: Dataset, recipe: Recipe) -> int:
    """Steps that the recipe's epochs make; `TilerankError` when the dataset has nothing to train on."""
    queries = len(_findable(dataset))
    if not queries:
        raise TilerankError(f"{dataset.name} has no training query with a relevant document in its corpus")
    return recipe.epochs * math.ceil(queries / recipe.groups)


def train(
    encoder: Path,
    dataset: Dataset,
    pools: Sequence[Pool],
    recipe: Recipe,
    device: str,
    steps: int | None = None,
) -> torch.nn.Module:
    """Train a one-label sequence classifier that starts as ``encoder``; ``steps`` None makes the recipe's epochs.

    On CUDA the forward runs under bf16 autocast; on a CPU in fp32, a group at a time. Raises `TilerankError` when the
    dataset has no training query or the loss stops being a number.
    """
    full = steps_of(dataset, recipe)
    total = full if steps is None else steps
    tokenizer = load_tokenizer(encoder, recipe.max_length)
    with _deterministic(recipe.seed, device):
        model = load_model(encoder, "cross-encoder", torch.float32, None, new_head=True).to(device).train()
        optimizer = torch.optim.AdamW(_parameter_groups(model, recipe))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate(total, recipe.warmup))
        batches = _batches(dataset, pools, recipe)
        with tqdm(total=total, desc="finetune", unit="step", disable=None) as bar:
            for _ in range(total):
                loss = _step(model, tokenizer, next(batches), recipe, device)
                if not math.isfinite(loss):
                    raise TilerankError(f"the loss is {loss} at step {bar.n}; lower the recipe's learning rates")
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=True)
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update()
    return model.eval()


def save(model: torch.nn.Module, encoder: Path, folder: Path, recipe: Recipe) -> str:
    """Write weights (fp16), configuration and the encoder's tokenizer into ``folder``; returns the weights' sha256."""
    model = model.to("cpu", torch.float16)
    with torch.no_grad():
        for weights in model.parameters():
            weights.copy_(round_mantissa(weights, recipe.mantissa_bits))
    with quiet_transformers():
        model.save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        if (encoder / name).is_file():
            shutil.copyfile(encoder / name, folder / name)
    return file_sha256(folder / WEIGHTS)


def round_mantissa(values: torch.Tensor, bits: int) -> torch.Tensor:
    """``values`` (fp16) with ``bits`` (1 to 10) explicit mantissa bits, rounded to nearest, ties to even."""
    dropped = 10 - bits
    if not dropped:
        return values
    # On the bit pattern, sign and magnitude: adding just under half a unit, plus the unit's own parity.
    pattern = values.view(torch.int16).to(torch.int32)
    rounded = pattern + (1 << dropped - 1) - 1 + (pattern >> dropped & 1)
    return (rounded >> dropped << dropped).to(torch.int16).view(torch.float16)


def write_record(folder: Path, recipe: Recipe, **facts: Any) -> dict[str, Any]:
    """Put ``facts`` and the recipe beside the weights as finetune.json; returns the record."""
    record = {**facts, "recipe": asdict(recipe)}
    (folder / "finetune.json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return record


def _findable(dataset: Dataset) -> dict[str, list[str]]:
    """Query id -> its relevant documents that the corpus has, for queries with any."""
    corpus = {document.doc_id for document in dataset.documents}
    relevant = {
        query_id: [doc_id for doc_id, grade in grades.items() if grade > 0 and doc_id in corpus]
        for query_id, grades in dataset.qrels.items()
    }
    return {query_id: doc_ids for query_id, doc_ids in relevant.items() if doc_ids}


def _batches(dataset: Dataset, pools: Sequence[Pool], recipe: Recipe) -> Iterator[list[Group]]:
    epoch = 0
    while True:
        groups = training_groups(dataset, pools, recipe, epoch)
        for start in range(0, len(groups), recipe.groups):
            yield groups[start : start + recipe.groups]
        epoch += 1


def _step(model: torch.nn.Module, tokenizer: TextTokenizer, groups: list[Group], recipe: Recipe, device: str) -> float:
    """Add the gradients of one step's mean loss, and return the loss."""
    at_once = len(groups) if device.startswith("cuda") else 1  # activations of 256 pairs do not fit in a small memory
    total = 0.0
    for start in range(0, len(groups), at_once):
        part = groups[start : start + at_once]
        loss = _loss(model, tokenizer, part, recipe, device) * len(part) / len(groups)
        loss.backward()
        total += loss.item()
    return total


def _loss(
    model: torch.nn.Module, tokenizer: TextTokenizer, groups: list[Group], recipe: Recipe, device: str
) -> torch.Tensor:
    pairs = [(group.query, passage) for group in groups for passage in group.passages]
    tokens = tokenizer.pairs([query for query, _ in pairs], [passage for _, passage in pairs])
    ids, types, mask = torch.from_numpy(tokens.padded(np.arange(len(pairs)), tokenizer.pad_id)).to(device)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = types
    with torch.autocast("cuda", torch.bfloat16, enabled=device.startswith("cuda")):
        output = model(**inputs)
    logits = output.logits.float().view(len(groups), -1)  # [groups, passages of a group]
    first = torch.zeros(len(groups), dtype=torch.int64, device=device)
    relevant = torch.nn.functional.one_hot(first, logits.shape[1]).float()
    in_group = torch.nn.functional.cross_entropy(logits, first)
    in_pairs = torch.nn.functional.binary_cross_entropy_with_logits(logits, relevant)
    return in_group + recipe.pair_loss_weight * in_pairs


def _parameter_groups(model: torch.nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    groups = []
    for is_head, rate in ((False, recipe.learning_rate), (True, recipe.head_learning_rate)):
        for is_matrix, decay in ((True, recipe.weight_decay), (False, 0.0)):
            parameters = [
                parameter
                for name, parameter in model.named_parameters()
                if name.startswith("classifier.") == is_head and (parameter.dim() > 1) == is_matrix
            ]
            groups.append({"params": parameters, "lr": rate, "weight_decay": decay})
    return groups


def _rate(total: int, warmup: float) -> Callable[[int], float]:
    """Share of the learning rate at a step: up over the first ``warmup`` share of the steps, then down to 0."""
    rising = max(1, round(total * warmup))
    return lambda step: min((step + 1) / rising, (total - step) / max(1, total - rising))


@contextlib.contextmanager
def _deterministic(seed: int, device: str) -> Iterator[None]:
    """The same random numbers and the same order of additions in every run."""
    # cuBLAS reads this when it is first used; its default workspace makes sums depend on the stream.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []):
            torch.manual_seed(seed)
            yield
    finally:
        torch.use_deterministic_algorithms(before)
