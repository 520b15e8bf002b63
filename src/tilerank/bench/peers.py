"""What people use today to rerank: the pipelines that `tilerank.Reranker` is checked against and timed beside.

All of them score one query's passages, in order, as float32: a cross-encoder's logits (before any activation), or
a bi-encoder's cosines. Each is loaded with its dtype given explicitly, whatever dtype the file has.

- `HuggingFaceScorer`: the unmodified model, transformers' tokenizer call and padded SDPA forward.
- `SentenceTransformersScorer`: `CrossEncoder.predict`, or `SentenceTransformer.encode` and cosine.
- `TunedScorer`: what a careful user makes of the same parts: the tokenizer's batch call without transformers'
  wrapping, batches of like lengths, no mask where there is no padding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tilerank.models import ModelDescription, describe

DTYPES = {
    "fp64": torch.float64,  # the reference
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""Precision -> dtype of weights and activations."""


class QueryScorer(Protocol):
    """Scores one query's passages."""

    def score(self, query: str, passages: Sequence[str]) -> np.ndarray:
        """One float32 score a passage (float64 at precision fp64), ``[len(passages)]``."""
        ...


@contextlib.contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """Inference with fp32 products as ``precision`` says: TF32 for tf32, full fp32 for the others."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        with torch.inference_mode():
            yield
    finally:
        matmul.fp32_precision = before


def _check(precision: str, batch_size: int) -> torch.dtype:
    if precision not in DTYPES:
        raise ValueError(f"precision must be one of {', '.join(DTYPES)}, found {precision!r}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, found {batch_size}")
    return DTYPES[precision]


def _load_model(path: Path, kind: str, dtype: torch.dtype, device: str) -> torch.nn.Module:
    import transformers

    family = transformers.AutoModelForSequenceClassification if kind == "cross-encoder" else transformers.AutoModel
    # transformers takes SDPA by itself; asked for by name, it refuses the models that compute attention otherwise.
    model = family.from_pretrained(path, dtype=dtype, local_files_only=True)
    return model.to(device).eval()


def _limit(description: ModelDescription, max_length: int) -> int:
    """Tokens a sequence may have: the model's own files may set fewer than asked for."""
    own = description.own_max_length
    return max_length if own is None else min(max_length, own)


def _pool(pooling: str, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sentence vectors ``[b, d]`` of ``hidden [b, s, d]``; pooling: mean | cls."""
    if pooling == "cls":
        return hidden[:, 0]
    weights = mask[:, :, None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def _cosines(vectors: torch.Tensor) -> torch.Tensor:
    """Cosine of the first vector with each of the others."""
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    return unit[1:] @ unit[0]


def _to_numpy(scores: torch.Tensor) -> np.ndarray:
    return scores.cpu().numpy() if scores.dtype == torch.float64 else scores.float().cpu().numpy()


class HuggingFaceScorer:
    """The unmodified model: `tokenizer(..., padding=True, truncation=True, return_tensors="pt")`, then the forward.

    kind: cross-encoder | bi-encoder. precision: fp64 | fp32 | tf32 | fp16 | bf16. batch_size: sequences a forward
    pass, in the order given. The steps are public for the profile. `score` is for those who want scores and no time:
    its tensors are those of `tokenize` (see `inputs`).
    """

    def __init__(
        self, path: Path, kind: str, precision: str, device: str, max_length: int, batch_size: int = 32
    ) -> None:
        from transformers import AutoTokenizer

        self.precision = precision
        self._kind = kind
        self._device = device
        self._batch_size = batch_size
        description = describe(path)
        self._pooling = description.pooling
        self._max_length = _limit(description, max_length)
        self._model = _load_model(path, kind, _check(precision, batch_size), device)
        self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self._backend = self._copied_backend()

    def _copied_backend(self) -> Any:
        """The tokenizer below transformers' wrapper, set as the wrapper sets it in `tokenize`."""
        from tokenizers import Tokenizer

        wrapper = self._tokenizer
        backend = Tokenizer.from_str(wrapper.backend_tokenizer.to_str())
        backend.enable_truncation(min(self._max_length, wrapper.model_max_length), direction=wrapper.truncation_side)
        backend.enable_padding(
            direction=wrapper.padding_side,
            pad_id=wrapper.pad_token_id,
            pad_token=wrapper.pad_token,
            pad_type_id=wrapper.pad_token_type_id,
        )
        return backend

    def batches(self, query: str, passages: Sequence[str]) -> list[tuple[list[str], ...]]:
        """The tokenizer's text arguments of each forward pass: pairs, or (bi-encoder) the query and the passages."""
        columns = ([query] * len(passages), list(passages)) if self._kind == "cross-encoder" else ([query, *passages],)
        size = self._batch_size
        return [tuple(column[start : start + size] for column in columns) for start in range(0, len(columns[0]), size)]

    def tokenize(self, texts: tuple[list[str], ...], return_tensors: str | None = "pt") -> Any:
        """The tokenizer call: padded tensors, or padded lists with ``return_tensors=None``."""
        return self._tokenizer(
            *texts, padding=True, truncation=True, max_length=self._max_length, return_tensors=return_tensors
        )

    def inputs(self, query: str, passages: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        """What `tokenize` and `transfer` make of `batches`, in a fraction of the time that padding in Python takes."""
        inputs = []
        for texts in self.batches(query, passages):
            encodings = self._backend.encode_batch_fast(list(zip(*texts, strict=True)) if len(texts) > 1 else texts[0])
            columns = {"input_ids": "ids", "token_type_ids": "type_ids", "attention_mask": "attention_mask"}
            inputs.append(
                {
                    name: torch.from_numpy(np.array([getattr(row, column) for row in encodings])).to(self._device)
                    for name, column in columns.items()
                    if name in self._tokenizer.model_input_names
                }
            )
        return inputs

    def transfer(self, encoding: Any) -> Any:
        """Tensors to the model's device."""
        return encoding.to(self._device)

    def forward(self, inputs: Any) -> torch.Tensor:
        """Logits ``[b]``, or sentence vectors ``[b, d]``."""
        with arithmetic(self.precision):
            output = self._model(**inputs)
            if self._kind == "cross-encoder":
                return output.logits[:, 0]
            return _pool(self._pooling, output.last_hidden_state, inputs["attention_mask"])

    def finish(self, outputs: Sequence[torch.Tensor]) -> np.ndarray:
        """The scores of all batches, on the host."""
        result = torch.cat(list(outputs))
        return _to_numpy(result if self._kind == "cross-encoder" else _cosines(result))

    def score(self, query: str, passages: Sequence[str]) -> np.ndarray:
        """Logits or cosines, ``[len(passages)]``."""
        if not passages:
            return np.zeros(0, np.float32)
        return self.score_inputs(self.inputs(query, passages))

    def score_inputs(self, inputs: Sequence[dict[str, torch.Tensor]]) -> np.ndarray:
        """The same from `inputs`, which scorers of one model at several precisions may share."""
        return self.finish([self.forward(batch) for batch in inputs])


class SentenceTransformersScorer:
    """sentence-transformers as people call it; the activation is left out so that logits can be compared."""

    def __init__(
        self, path: Path, kind: str, precision: str, device: str, max_length: int, batch_size: int = 32
    ) -> None:
        import sentence_transformers

        dtype = _check(precision, batch_size)
        limit = _limit(describe(path), max_length)
        options: dict[str, Any] = {
            "device": device,
            "local_files_only": True,
            "model_kwargs": {"dtype": dtype},
        }
        self.batch_size = batch_size
        self._precision = precision
        self._is_cross_encoder = kind == "cross-encoder"
        if self._is_cross_encoder:
            self._model = sentence_transformers.CrossEncoder(str(path), max_length=limit, **options)
        else:
            self._model = sentence_transformers.SentenceTransformer(str(path), **options)
            self._model.max_seq_length = limit

    def score(self, query: str, passages: Sequence[str]) -> np.ndarray:
        """`CrossEncoder.predict` without its activation, or `encode` and cosine, ``[len(passages)]``."""
        return self.score_pairs([(query, passage) for passage in passages])

    def score_pairs(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """The same for pairs of any queries, ``[len(pairs)]``; each distinct text of a bi-encoder is encoded once."""
        if not pairs:
            return np.zeros(0, np.float32)
        options = {"batch_size": self.batch_size, "show_progress_bar": False}
        with arithmetic(self._precision):
            if self._is_cross_encoder:
                return self._model.predict(list(pairs), activation_fn=torch.nn.Identity(), **options)
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            places = {text: place for place, text in enumerate(texts)}
            unit = torch.nn.functional.normalize(self._model.encode(texts, convert_to_tensor=True, **options), dim=-1)
            first, second = ([places[pair[side]] for pair in pairs] for side in (0, 1))
            return _to_numpy((unit[first] * unit[second]).sum(-1))


class TunedScorer:
    """transformers' model with everything around it made lean, and nothing of this project in it."""

    def __init__(
        self, path: Path, kind: str, precision: str, device: str, max_length: int, batch_size: int = 32
    ) -> None:
        from transformers import AutoTokenizer

        self.batch_size = batch_size
        self._kind = kind
        self._precision = precision
        self._device = device
        self._model = _load_model(path, kind, _check(precision, batch_size), device)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self._pad_id = tokenizer.pad_token_id
        description = describe(path)
        self._pooling = description.pooling
        self._uses_types = "token_type_ids" in tokenizer.model_input_names
        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.enable_truncation(_limit(description, max_length))
        self._tokenizer.no_padding()

    def score(self, query: str, passages: Sequence[str]) -> np.ndarray:
        """Logits or cosines, ``[len(passages)]``."""
        if not passages:
            return np.zeros(0, np.float32)
        is_pair = self._kind == "cross-encoder"
        texts = [(query, passage) for passage in passages] if is_pair else [query, *passages]
        encodings = self._tokenizer.encode_batch_fast(texts)
        order = np.argsort([-len(encoding.ids) for encoding in encodings], kind="stable")
        parts = [
            self._forward([encodings[row] for row in order[start : start + self.batch_size]])
            for start in range(0, len(order), self.batch_size)
        ]
        in_order = torch.cat(parts)
        result = torch.empty_like(in_order)
        result[torch.from_numpy(order).to(self._device)] = in_order
        return _to_numpy(result if is_pair else _cosines(result))

    def _forward(self, encodings: Sequence[Any]) -> torch.Tensor:
        """Logits or sentence vectors of one batch, longest first."""
        widest = len(encodings[0].ids)
        batch = np.zeros((3, len(encodings), widest), dtype=np.int64)
        batch[0] = self._pad_id
        for row, encoding in enumerate(encodings):
            count = len(encoding.ids)
            batch[0, row, :count] = encoding.ids
            batch[1, row, :count] = encoding.type_ids
            batch[2, row, :count] = 1
        ids, types, mask = torch.from_numpy(batch).to(self._device)
        inputs = {"input_ids": ids}
        if self._uses_types:
            inputs["token_type_ids"] = types
        if len(encodings[-1].ids) < widest:
            inputs["attention_mask"] = mask
        with arithmetic(self._precision):
            output = self._model(**inputs)
            if self._kind == "cross-encoder":
                return output.logits[:, 0]
            return _pool(self._pooling, output.last_hidden_state, mask)
