"""Rerank passages for a query, with the interface and the scores of sentence-transformers' ``CrossEncoder``."""

from __future__ import annotations

import contextlib
import importlib
import operator
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from tilerank.errors import TilerankError
from tilerank.models import WEIGHTS, Kind, ModelDescription, describe, resolve_path
from tilerank.tokenization import Tokens, load_tokenizer

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Precision -> dtype of the weights. tf32 lets fp32 products run on TF32 tensor cores; elsewhere it equals fp32."""

_CPU_BATCH = 8  # sequences: more gain nothing there, and are padded more
_GPU_BATCH = 64  # a small forward is bound by launches: one query's passages at once
_CHUNK = 4096  # pairs tokenised at a time: bounds memory, long enough that sorting by length pays

Activation = Callable[[torch.Tensor], torch.Tensor]
Report = Callable[[float], None]  # told the share of a chunk that is done


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What `Reranker.score` found, in the order of its pairs."""

    values: np.ndarray  # [pairs] float32, after the activation: what `predict` returns
    logits: np.ndarray  # [pairs] float32, before it; a bi-encoder's cosine in both
    truncated: np.ndarray  # [pairs] bool: the passage was cut to fit


class Ranking(list[dict[str, Any]]):
    """`Reranker.rank`'s list of results, best first, which also knows what was cut.

    ``truncated`` is how many of all the passages given (not only the top ones) were cut to fit.
    """

    def __init__(self, results: Iterable[dict[str, Any]], truncated: int) -> None:
        super().__init__(results)
        self.truncated = truncated


class Reranker:
    """Scores query-passage pairs with a cross-encoder, or with a bi-encoder's cosine.

    model: a folder (config.json, model.safetensors, tokenizer), the name of a known model, or a hub repository. Its own
        configuration says which kind it is: a sequence classifier with one label is a cross-encoder, an encoder a
        bi-encoder (pooled as its modules.json says, by default the mean; vectors of length 1).
    device: "cpu", "cuda" or "cuda:<number>"; None takes CUDA where there is a device, else the CPU.
    precision: "fp32", "tf32", "fp16" or "bf16", whatever dtype the file has and whatever torch's global switches say.
    attention: "auto" (torch's SDPA until a registered kernel serves better; what the model itself computes where it
        knows no SDPA, as MPNet and DeBERTa), "sdpa", "eager", or a registered variant.
    max_length: tokens a pair (cross-encoder) or a text (bi-encoder) has at most; a smaller limit that the model's own
        files set for its tokenizer holds too, as in sentence-transformers. The attribute has the limit in force.

    A pair that is too long is cut on the passage side (see `tilerank.tokenization`); a query too long is cut with a
    warning. A score does not depend on the other pairs of the call, up to float noise.

    Raises ValueError for an unknown precision or attention and for a ``max_length`` above the position table, and
    `TilerankError` for a model or a device that cannot be used, or a variant that does not run there.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        device: str | torch.device | None = None,
        precision: str = "fp32",
        attention: str = "auto",
        max_length: int = 512,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}; allowed: {', '.join(PRECISIONS)}")
        self.path = resolve_path(model)
        description = describe(self.path)
        max_length = _checked_max_length(max_length, description)
        self.kind = description.kind
        self.precision = precision
        self.device = _device(device)
        max_length = min(max_length, description.own_max_length or max_length)
        self.tokenizer = load_tokenizer(self.path, max_length, texts=2 if self.kind == "cross-encoder" else 1)
        self.max_length = self.tokenizer.max_length
        model = load_model(self.path, self.kind, PRECISIONS[precision], _implementation(attention))
        _check_variant(attention, self.device, precision, model, self.max_length)
        self.model = model.to(self.device)
        self._description = description
        self._activation = _activation(description) if self.kind == "cross-encoder" else torch.nn.Identity()

    def predict(
        self,
        pairs: Iterable[Sequence[str]] | Sequence[str],
        batch_size: int | None = None,
        show_progress_bar: bool = False,
        activation_fn: Activation | None = None,
    ) -> np.ndarray:
        """One float32 score a (query, passage) pair, ``[len(pairs)]``; a single pair gives a single score.

        ``activation_fn`` replaces what the model's configuration names (a sigmoid where it names nothing). It gets all
        logits at once, ``[len(pairs), 1]`` float32 on the CPU, and gives as many scores.
        Raises TypeError for anything but pairs of strings, ValueError for another number of scores, and
        `TilerankError` for a score that is not finite.
        """
        is_sequence = isinstance(pairs, (list, tuple, np.ndarray))
        if is_sequence and len(pairs) == 2 and all(isinstance(text, str) for text in pairs):
            return self.score([pairs], batch_size, show_progress_bar, activation_fn).values[0]
        return self.score(pairs, batch_size, show_progress_bar, activation_fn).values

    def rank(
        self,
        query: str,
        documents: Iterable[str],
        top_k: int | None = None,
        return_documents: bool = False,
        batch_size: int | None = None,
        show_progress_bar: bool = False,
        activation_fn: Activation | None = None,
    ) -> Ranking:
        """``{"corpus_id": index into documents, "score": float[, "text"]}``, best first; ties keep the given order.

        Doubles and empty passages are ranked like any other. Raises as `predict` does, and ValueError for a negative
        ``top_k``.
        """
        if not isinstance(query, str):
            raise TypeError(f"query must be a string, got {type(query).__name__}")
        if top_k is not None:
            top_k = _integer("top_k", top_k)
            if top_k < 0:
                raise ValueError(f"top_k is {top_k}; allowed: 0 and above, or None for all")
        texts = _items(documents, "documents")
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"documents[{index}] must be a string, got {type(text).__name__}")
        scores = self.score([(query, text) for text in texts], batch_size, show_progress_bar, activation_fn)
        order = np.argsort(-scores.values, kind="stable")[:top_k]
        results = [{"corpus_id": int(index), "score": float(scores.values[index])} for index in order]
        if return_documents:
            for result in results:
                result["text"] = texts[result["corpus_id"]]
        return Ranking(results, truncated=int(scores.truncated.sum()))

    def score(
        self,
        pairs: Iterable[Sequence[str]],
        batch_size: int | None = None,
        show_progress_bar: bool = False,
        activation_fn: Activation | None = None,
    ) -> Scores:
        """What `predict` returns, with the logits and which passages were cut.

        ``batch_size`` is sequences a forward pass; None takes 8 on a CPU, else 64. No score depends on it.
        """
        if batch_size is None:
            batch_size = _CPU_BATCH if self.device.type == "cpu" else _GPU_BATCH
        batch_size = _integer("batch_size", batch_size)
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; allowed: 1 and above, or None")
        checked = [_pair(pair, index) for index, pair in enumerate(_items(pairs, "pairs"))]
        score_chunk = self._cross_encode if self.kind == "cross-encoder" else self._cosine
        logits, truncated = [np.zeros(0, np.float32)], [np.zeros(0, bool)]
        hidden = None if show_progress_bar else True  # None: shown on a terminal only
        with (
            _arithmetic(self.precision, self.device),
            tqdm(total=len(checked), desc="rerank", unit="pair", disable=hidden) as bar,
        ):
            for start in range(0, len(checked), _CHUNK):
                chunk = checked[start : start + _CHUNK]

                def report(share: float, start: int = start, pairs: int = len(chunk)) -> None:
                    bar.update(start + round(share * pairs) - bar.n)

                queries, passages = [query for query, _ in chunk], [passage for _, passage in chunk]
                found, cut = score_chunk(queries, passages, batch_size, report)
                logits.append(found)
                truncated.append(cut)
            raw = np.concatenate(logits)
            values = _activated(raw, activation_fn or self._activation)
        for name, scores in (("logit", raw), ("score", values)):
            if not np.isfinite(scores).all():
                index = int(np.flatnonzero(~np.isfinite(scores))[0])
                cause = f"{self.path / WEIGHTS} may be damaged, or its values too large for {self.precision}"
                if name == "score":  # the logits are finite
                    cause = f"the activation made it of the logit {raw[index]}"
                raise TilerankError(f"the {name} of pair {index} is {scores[index]}; {cause}")
        return Scores(values, raw, np.concatenate(truncated))

    def _cross_encode(
        self, queries: list[str], passages: list[str], batch_size: int, report: Report
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens = self.tokenizer.pairs(queries, passages)
        logits = self._forward(tokens, batch_size, report, lambda output, mask: output.logits[:, 0].float())
        return logits.cpu().numpy(), tokens.truncated

    def _cosine(
        self, queries: list[str], passages: list[str], batch_size: int, report: Report
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens = self.tokenizer.texts(queries, passages)
        pool = _mean if self._description.pooling == "mean" else _first
        vectors = self._forward(tokens, batch_size, report, lambda output, mask: pool(output.last_hidden_state, mask))
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
        cosines = (vectors[: len(queries)] * vectors[len(queries) :]).sum(-1)
        return cosines.cpu().numpy(), tokens.truncated[len(queries) :]

    def _forward(
        self, tokens: Tokens, batch_size: int, report: Report, head: Callable[[Any, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """``head(model output, mask [b, s])`` of every sequence, in order, on the device.

        Each distinct sequence is computed once, so that doubles tie exactly (in a batch they would differ by float
        noise). Batches are of like lengths, longest first: little padding, and too little memory shows at once.
        """
        distinct, inverse = tokens.distinct()
        order = np.argsort(-tokens.lengths[distinct], kind="stable")
        parts = []
        for start in range(0, len(order), batch_size):
            rows = distinct[order[start : start + batch_size]]
            batch = torch.from_numpy(tokens.padded(rows, self.tokenizer.pad_id)).to(self.device)
            inputs = {"input_ids": batch[0]}
            if self._description.uses_token_types:
                inputs["token_type_ids"] = batch[1]
            if tokens.lengths[rows[-1]] < tokens.lengths[rows[0]]:
                inputs["attention_mask"] = batch[2]
            parts.append(head(self.model(**inputs), batch[2]))
            report((start + len(rows)) / len(order))
        places = np.argsort(order, kind="stable")[inverse]
        return torch.cat(parts)[torch.from_numpy(places).to(self.device)]


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of the valid tokens, ``[b, s, d]`` and ``[b, s]`` -> ``[b, d]`` float32; every text has special tokens."""
    weights = mask[:, :, None].float()
    return (hidden.float() * weights).sum(1) / weights.sum(1)


def _first(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden[:, 0].float()


def _items(values: Any, name: str) -> list[Any]:
    if values is None or isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, got {type(values).__name__}")
    return list(values)


def _pair(pair: Any, index: int) -> tuple[str, str]:
    if isinstance(pair, (str, bytes)) or not isinstance(pair, (Sequence, np.ndarray)) or len(pair) != 2:
        raise TypeError(f"pairs[{index}] must be a (query, passage) pair of strings, got {pair!r:.80}")
    query, passage = pair
    for text in (query, passage):
        if not isinstance(text, str):
            raise TypeError(f"pairs[{index}] must hold strings, got {type(text).__name__}")
    return query, passage


def _activated(logits: np.ndarray, activation: Activation) -> np.ndarray:
    """``[n]`` -> ``[n]`` float32. The activation gets ``[n, 1]``, as sentence-transformers gives it, and a copy."""
    values = activation(torch.tensor(logits)[:, None])
    shape = tuple(getattr(values, "shape", ()))
    if shape not in ((len(logits), 1), (len(logits),)):
        raise ValueError(f"activation_fn gave the shape {shape} for {len(logits)} pairs; expected one score each")
    return torch.as_tensor(values).reshape(-1).float().cpu().numpy()


def _integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None


def _checked_max_length(max_length: int, description: ModelDescription) -> int:
    max_length = _integer("max_length", max_length)
    limit = description.position_limit
    if limit is not None and max_length > limit:
        raise ValueError(f"max_length is {max_length}; the model's position table serves at most {limit} tokens")
    return max_length


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda") or (chosen.type == "cpu" and chosen.index is not None):
        raise TilerankError(f"device is {device!s}; allowed: cpu, cuda, cuda:<number>")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise TilerankError(f"device {device!s}: torch sees {torch.cuda.device_count()} CUDA devices; use cpu")
    return chosen


def _implementation(attention: str) -> str | None:
    """The name under which transformers knows the attention; None: SDPA where the model serves it, else eager."""
    if attention == "auto":
        return None
    if attention in ("sdpa", "eager"):
        return attention
    from tilerank.kernels import huggingface, registry

    variants = [row.name for row in registry.attention_rows()]
    if attention not in variants:
        raise ValueError(f"attention is {attention!r}; allowed: auto, sdpa, eager, {', '.join(variants)}")
    name = f"tilerank_{attention}"
    huggingface.register(name=name, variant=attention)
    return name


def _check_variant(
    attention: str, device: torch.device, precision: str, model: torch.nn.Module, max_length: int
) -> None:
    """Refuse a registered variant that cannot run this model here. Masks are left to the call: some need none."""
    if attention in ("auto", "sdpa", "eager"):
        return
    from tilerank.kernels import huggingface, registry

    if not huggingface.calls_interface(type(model)):
        raise TilerankError(
            f"attention {attention!r} does not serve {type(model).__name__}, which computes attention by itself; "
            "use auto or eager"
        )
    config = model.config
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    request = registry.Request(
        device=device.type,
        sm=10 * major + minor,
        dtype="fp32" if precision == "tf32" else precision,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        layout="padded",
        k_len=max_length,
    )
    if reason := registry.refusal(registry.get(attention), request):
        raise TilerankError(f"attention {attention!r} does not serve this model here: {reason}; use auto or sdpa")


def load_model(
    path: Path, kind: Kind, dtype: torch.dtype, implementation: str | None, *, new_head: bool = False
) -> torch.nn.Module:
    """The transformers model in folder ``path``, on the CPU, with this dtype and attention, whatever the file has.

    ``new_head`` draws a cross-encoder's head at random, to be trained. Raises `TilerankError` for a folder that
    cannot be loaded and for weights that are missing.
    """
    import transformers

    is_cross_encoder = kind == "cross-encoder"
    family = transformers.AutoModelForSequenceClassification if is_cross_encoder else transformers.AutoModel
    try:
        with quiet_transformers():
            model, report = family.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=implementation,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **({"num_labels": 1} if new_head else {}),
            )
    except Exception as error:  # transformers, safetensors and the operating system each raise their own
        reason = " ".join(str(error).split())[:200]
        raise TilerankError(f"{path}: the model cannot be loaded ({reason})") from error
    # transformers draws what the file lacks at random. A bi-encoder does not use its pooler.
    expected = ("classifier.",) if new_head else () if is_cross_encoder else ("pooler.",)
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(expected))
    if missing:
        raise TilerankError(f"{path / WEIGHTS} lacks {len(missing)} of the model's weights, first {missing[0]}")
    return model.eval()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars and load report off stderr: what matters of the report is checked."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _activation(description: ModelDescription) -> Activation:
    """What the model's configuration names, by sentence-transformers' rule: torch's own only, else a sigmoid."""
    if description.activation is None:
        return torch.nn.Sigmoid()
    module, _, name = description.activation.rpartition(".")
    if module.split(".")[:2] == ["torch", "nn"]:
        with contextlib.suppress(ImportError, AttributeError):
            found = getattr(importlib.import_module(module), name)
            if isinstance(found, type) and issubclass(found, torch.nn.Module):
                return found()
    warnings.warn(f"activation {description.activation!r} is not one of torch.nn: a sigmoid is used", stacklevel=3)
    return torch.nn.Sigmoid()


class _Products:
    """What fp32 products mean. It is one setting of the whole process: threads that want different ones take turns."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._users = 0
        self._wanted = ""
        self._before = ("", "")  # what the process had set: cuda, cpu

    @contextlib.contextmanager
    def as_wanted(self, wanted: str) -> Iterator[None]:
        """``wanted`` ("tf32" or "ieee") on CUDA, exact on the CPU, until the last user leaves."""
        cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
        with self._turn:
            self._turn.wait_for(lambda: not self._users or self._wanted == wanted)
            if not self._users:
                self._wanted, self._before = wanted, (cuda.fp32_precision, cpu.fp32_precision)
                cuda.fp32_precision, cpu.fp32_precision = wanted, "ieee"
            self._users += 1
        try:
            yield
        finally:
            with self._turn:
                self._users -= 1
                if not self._users:
                    cuda.fp32_precision, cpu.fp32_precision = self._before
                    self._turn.notify_all()


_products = _Products()


@contextlib.contextmanager
def _arithmetic(precision: str, device: torch.device) -> Iterator[None]:
    """Fix what fp32 products mean, whatever the process has set (an autocast around the call included)."""
    with (
        _products.as_wanted("tf32" if precision == "tf32" else "ieee"),
        torch.inference_mode(),
        torch.autocast(device.type, enabled=False),
    ):
        yield
