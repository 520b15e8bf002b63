"""Rerank passages for a query, with the interface and the scores of sentence-transformers' ``CrossEncoder``."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from tilerank import host_path as host_paths
from tilerank import packed_attention
from tilerank.encoder import Encoder, Head, PackedEncoder, PaddedEncoder, can_prepack, packed_refusal
from tilerank.errors import TilerankError
from tilerank.fused import refusal as fused_refusal
from tilerank.host_path import AUTO, HostPath
from tilerank.kernels.torch_device import device_sm
from tilerank.models import WEIGHTS, Kind, ModelDescription, describe, resolve_path
from tilerank.packed_attention import PackedAttention
from tilerank.precision import PRECISIONS, arithmetic
from tilerank.token_cache import TokenCache
from tilerank.tokenization import Tokens, load_tokenizer

_CHUNK = 4096  # pairs in memory as tokens at a time: bounds it, long enough that sorting by length pays
_PIECE = 1024  # pairs tokenised at a time for a GPU, which works on them while the host tokenises the next
_OVERLAPPED = 2  # pieces of a call: the GPU starts after the first half, and the host waits for the second only
_SMALLEST_PIECE = 12  # pairs below which another round of launches costs more than it hides

Activation = Callable[[torch.Tensor], torch.Tensor]
Report = Callable[[float], None]  # told how many pairs of a chunk are done


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
    attention: "auto" (a registered kernel where one serves better than torch's own; what the model itself computes
        where it knows no SDPA, as MPNet and DeBERTa), "sdpa", "eager", or a registered variant.
    max_length: tokens a pair (cross-encoder) or a text (bi-encoder) has at most; a smaller limit that the model's own
        files set for its tokenizer holds too, as in sentence-transformers. The attribute has the limit in force.
    host_path: how text gets through the model: one of `tilerank.host_path.PATHS`, or "auto" for the last of them that
        serves the device and the model. The attribute has the path in force, `host_path_reason` why it is not a later
        one; `attention` is then what computes it. All give the same scores, up to float noise.
    token_cache: a file that `tilerank index` wrote for this model's tokenizer; passages that it has are not tokenised.

    A pair that is too long is cut on the passage side (see `tilerank.tokenization`); a query too long is cut with a
    warning. A score does not depend on the other pairs of the call, up to float noise.

    Raises ValueError for an unknown precision, attention or host path and for a ``max_length`` above the position
    table, and `TilerankError` for a model or a device that cannot be used, a variant or a path that does not run there,
    or a token cache of another tokenizer.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        device: str | torch.device | None = None,
        precision: str = "fp32",
        attention: str = "auto",
        max_length: int = 512,
        host_path: str = AUTO,
        token_cache: str | PathLike[str] | None = None,
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
        wanted = None if host_path == AUTO else host_paths.find(host_path)
        implementation = _implementation(attention)
        texts = 2 if self.kind == "cross-encoder" else 1
        self.tokenizer = load_tokenizer(self.path, max_length, texts=texts, fast=wanted is None or wanted.fast_tokens)
        self.max_length = self.tokenizer.max_length
        if token_cache is not None:
            self.tokenizer.use_cache(TokenCache(Path(token_cache)))
        dtype = PRECISIONS[precision]
        model = load_model(self.path, self.kind, dtype, implementation)
        chosen = _choose_path(wanted, attention, self.device, dtype, model, description, self.max_length)
        if chosen.attention is None:
            _check_variant(attention, self.device, precision, model, self.max_length)
        # A fused encoder takes from the model what it needs; on the device the rest would only take memory.
        self.model = model if chosen.path.fused else model.to(self.device)
        self.host_path, self.host_path_reason = chosen.path, chosen.reason
        is_classifier = self.kind == "cross-encoder"
        head = Head(is_classifier, "first" if is_classifier or description.pooling == "cls" else "mean")
        self.encoder: Encoder
        if chosen.attention is None:
            self.attention = self.model.config._attn_implementation if attention == "auto" else attention
            self.encoder = PaddedEncoder(self.model, description, head, self.tokenizer.pad_id, self.device)
        else:
            self.attention = chosen.attention.name
            self.encoder = PackedEncoder(
                self.model,
                description,
                head,
                self.device,
                chosen.attention,
                max_length=self.max_length,
                prepacked=self.host_path.prepacked,
                graphs=self.host_path.graphs,
                fused=self.host_path.fused,
                precision=precision,
            )
        self._activation = _activation(description) if is_classifier else torch.nn.Identity()

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
        (ranking,) = self._rank(
            [query], [documents], "documents", top_k, return_documents, batch_size, show_progress_bar, activation_fn
        )
        return ranking

    def rank_many(
        self,
        queries: Iterable[str],
        candidates: Iterable[Iterable[str]],
        top_k: int | None = None,
        return_documents: bool = False,
        batch_size: int | None = None,
        show_progress_bar: bool = False,
        activation_fn: Activation | None = None,
    ) -> list[Ranking]:
        """`rank` of each query with its own documents, sooner than one after another: batches hold pairs of several
        queries, and while the device works on some pairs the host tokenises the next.

        Memory does not grow with the number of pairs, but for texts and scores. Raises as `rank` does, and ValueError
        where there are not as many lists of candidates as queries.
        """
        queries, candidates = _items(queries, "queries"), _items(candidates, "candidates")
        if len(queries) != len(candidates):
            raise ValueError(f"there are {len(queries)} queries and {len(candidates)} lists of candidates")
        return self._rank(
            queries, candidates, "candidates[{}]", top_k, return_documents, batch_size, show_progress_bar, activation_fn
        )

    def _rank(
        self,
        queries: Sequence[Any],
        candidates: Sequence[Any],
        name: str,
        top_k: int | None,
        return_documents: bool,
        batch_size: int | None,
        show_progress_bar: bool,
        activation_fn: Activation | None,
    ) -> list[Ranking]:
        """``name`` is what messages call a list of candidates."""
        if top_k is not None:
            top_k = _integer("top_k", top_k)
            if top_k < 0:
                raise ValueError(f"top_k is {top_k}; allowed: 0 and above, or None for all")
        lists = []
        for number, (query, documents) in enumerate(zip(queries, candidates, strict=True)):
            if not isinstance(query, str):
                raise TypeError(f"query must be a string, got {type(query).__name__}")
            lists.append(_items(documents, name.format(number)))
            for index, text in enumerate(lists[-1]):
                if not isinstance(text, str):
                    raise TypeError(f"{name.format(number)}[{index}] must be a string, got {type(text).__name__}")
        pairs = [(query, text) for query, texts in zip(queries, lists, strict=True) for text in texts]
        scores = self.score(pairs, batch_size, show_progress_bar, activation_fn)
        ends = np.cumsum([0, *map(len, lists)])
        return [
            _ranking(texts, scores.values[start:end], scores.truncated[start:end], top_k, return_documents)
            for texts, start, end in zip(lists, ends, ends[1:], strict=False)
        ]

    def score(
        self,
        pairs: Iterable[Sequence[str]],
        batch_size: int | None = None,
        show_progress_bar: bool = False,
        activation_fn: Activation | None = None,
    ) -> Scores:
        """What `predict` returns, with the logits and which passages were cut.

        ``batch_size`` is the most sequences a forward pass has; None leaves it to the host path. No score depends on
        it.
        """
        if batch_size is not None:
            batch_size = _integer("batch_size", batch_size)
            if batch_size < 1:
                raise ValueError(f"batch_size is {batch_size}; allowed: 1 and above, or None")
        checked = [_pair(pair, index) for index, pair in enumerate(_items(pairs, "pairs"))]
        with arithmetic(self.precision, self.device), _progress(len(checked), show_progress_bar) as done_by_now:
            found, cut = [np.zeros(0, np.float32)], [np.zeros(0, bool)]
            fetch = None
            for start in range(0, len(checked), _CHUNK):
                chunk = checked[start : start + _CHUNK]

                def report(done: float, start: int = start) -> None:
                    done_by_now(start + round(done))

                scores, truncated = self._score_chunk(chunk, self._pieces(len(chunk)), batch_size, report)
                cut.append(truncated)
                if fetch is not None:
                    found.append(fetch())
                fetch = scores  # fetched after the next chunk has been handed to the device
            if fetch is not None:
                found.append(fetch())
            raw = np.concatenate(found)
            values = _activated(raw, activation_fn or self._activation)
        for name, scores in (("logit", raw), ("score", values)):
            if not np.isfinite(scores).all():
                index = int(np.flatnonzero(~np.isfinite(scores))[0])
                cause = f"{self.path / WEIGHTS} may be damaged, or its values too large for {self.precision}"
                if name == "score":  # the logits are finite
                    cause = f"the activation made it of the logit {raw[index]}"
                raise TilerankError(f"the {name} of pair {index} is {scores[index]}; {cause}")
        return Scores(values, raw, np.concatenate(cut))

    def score_in_steps(self, pairs: Sequence[tuple[str, str]], mark: Callable[[], None]) -> np.ndarray:
        """Logits or cosines of pairs that are in memory together; ``mark`` is called when their ids are there, when the
        batches are on the device, when the model has been called on all, and when the scores are on the host."""
        with arithmetic(self.precision, self.device):
            fetch, _ = self._score_chunk(pairs, [len(pairs)], None, lambda done: None, mark)
            scores = fetch()
            mark()
        return scores

    def forward_of(self, tokens: Tokens) -> Callable[[], torch.Tensor]:
        """A function that runs the model over ``tokens``, which are put on the device now: logits ``[n]`` or vectors
        ``[n, d]``, in order, on the device."""
        plan = self.encoder.plan(tokens.lengths, None)
        batches = list(self.encoder.upload(tokens, plan))
        order = np.concatenate(plan)
        is_ordered = len(batches) == 1 and bool((order == np.arange(len(order))).all())
        places = torch.from_numpy(np.argsort(order, kind="stable")).to(self.device)

        def run() -> torch.Tensor:
            with arithmetic(self.precision, self.device):
                found = [self.encoder.forward(batch) for batch in batches]
                return found[0] if is_ordered else torch.cat(found)[places]

        return run

    def _pieces(self, pairs: int) -> list[int]:
        """How many pairs of a chunk to tokenise at a time."""
        if self.device.type == "cpu":
            return [pairs]
        count = -(-pairs // _PIECE)
        if self.host_path.overlapped and not self.host_path.fused:
            # Half a call keeps the fused encoder for three quarters as long as a whole one: no piece hides that much.
            count = max(count, min(_OVERLAPPED, pairs // _SMALLEST_PIECE), 1)
        ends = [pairs * number // count for number in range(count + 1)]
        return [end - start for start, end in itertools.pairwise(ends)]

    def _score_chunk(
        self,
        pairs: Sequence[tuple[str, str]],
        pieces: Sequence[int],
        batch_size: int | None,
        report: Report,
        mark: Callable[[], None] | None = None,
    ) -> tuple[Callable[[], np.ndarray], np.ndarray]:
        """A function that waits for the logits or cosines of ``pairs``, and which passages were cut.

        Each distinct sequence is computed once, so that doubles tie exactly (in a batch they would differ by float
        noise). ``mark`` is as in `score_in_steps`; one that is given keeps a piece's batches on the device at once.
        """
        step = mark or (lambda: None)
        is_pair = self.kind == "cross-encoder"
        seen: dict[bytes, int] | None = {} if len(pieces) > 1 else None
        logits = torch.empty(len(pairs), pin_memory=self.device.type == "cuda") if is_pair else None
        parts, order, places, cut = [], [], [], []
        start = known = 0
        tokenise = self.tokenizer.start_pairs if is_pair else self.tokenizer.start_texts
        begun: list[Callable[[], Tokens]] = []
        for size in pieces:
            begun.append(tokenise(*zip(*pairs[start : start + size], strict=True)))
            start += size
        start = 0
        for size, finish in zip(pieces, begun, strict=True):
            tokens = finish()
            step()
            distinct, inverse = tokens.distinct(seen)
            plan = self.encoder.plan(tokens.lengths[distinct], batch_size)
            batches = self.encoder.stage(tokens, [distinct[rows] for rows in plan])
            if mark is not None:
                batches = list(batches)
            step()
            done = 0
            for rows, batch in zip(plan, batches, strict=True):
                out = None if logits is None else logits[known + done : known + done + len(rows)]
                parts.append(self.encoder.forward(batch, out))
                order.append(rows + known)
                done += len(rows)
                report(start + size * done / len(distinct))
            known += len(distinct)
            places.append(inverse.reshape(-1, size))  # of a bi-encoder: its queries, then its passages
            cut.append(tokens.truncated[-size:])
            start += size
        wait = _waits_for(self.device) if is_pair else None
        where = np.argsort(np.concatenate(order), kind="stable")[np.concatenate(places, axis=1)]
        step()
        truncated = np.concatenate(cut)
        if logits is not None:

            def fetch() -> np.ndarray:
                wait()
                return logits.numpy()[where[0]]

            return fetch, truncated
        found = torch.nn.functional.normalize(torch.cat(parts), dim=-1)
        first, second = found[_pinned(torch.from_numpy(where), self.device)]
        return _fetched_later((first * second).sum(-1)), truncated


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[int], object]]:
    with tqdm(total=total, desc="rerank", unit="pair", disable=None) as bar:  # None: shown on a terminal only
        yield lambda done: bar.update(done - bar.n)


_NO_BAR: contextlib.nullcontext[Callable[[int], object]] = contextlib.nullcontext(lambda done: None)


def _progress(total: int, is_shown: bool) -> contextlib.AbstractContextManager[Callable[[int], object]]:
    """Gives a function that is told how many of ``total`` pairs are done."""
    return _bar(total) if is_shown else _NO_BAR  # a bar that is not shown takes 10 us all the same


def _pinned(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``values`` on ``device``, by a copy that the host does not wait for."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _fetched_later(values: torch.Tensor) -> Callable[[], np.ndarray]:
    """Start the copy of ``values`` to the host; the function that is returned waits for it."""
    if values.device.type != "cuda":
        return values.numpy
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    wait = _waits_for(values.device)

    def fetch() -> np.ndarray:
        wait()
        return host.numpy()

    return fetch


def _waits_for(device: torch.device) -> Callable[[], None]:
    """A function that waits until ``device`` has done what this thread has enqueued by now."""
    if device.type != "cuda":
        return lambda: None
    reached = torch.cuda.Event()
    reached.record(torch.cuda.current_stream(device))
    return reached.synchronize


def _ranking(
    texts: Sequence[str], scores: np.ndarray, truncated: np.ndarray, top_k: int | None, return_documents: bool
) -> Ranking:
    order = np.argsort(-scores, kind="stable")[:top_k]
    results = [{"corpus_id": int(index), "score": float(scores[index])} for index in order]
    if return_documents:
        for result in results:
            result["text"] = texts[result["corpus_id"]]
    return Ranking(results, truncated=int(truncated.sum()))


@dataclass(frozen=True, slots=True)
class _ChosenPath:
    """A host path, the attention of its packed batches (None: it has none), and why it is no later one."""

    path: HostPath
    attention: PackedAttention | None
    reason: str


def _choose_path(
    wanted: HostPath | None,
    attention: str,
    device: torch.device,
    dtype: torch.dtype,
    model: torch.nn.Module,
    description: ModelDescription,
    max_length: int,
) -> _ChosenPath:
    """The path that was asked for, or (None) the last that serves; `TilerankError` when the former does not."""
    served = host_paths.of_device(device.type)
    if wanted is not None and wanted not in served:
        raise TilerankError(f"host_path {wanted.name!r} runs on {', '.join(wanted.devices)}, not on {device.type}")
    if wanted is not None and not wanted.packed:
        return _ChosenPath(wanted, None, "asked for")
    reason, packed = packed_refusal(description), None
    if reason is None:
        packed = packed_attention.choose(attention, device, dtype, _head_dim(model.config), max_length)
        if packed is None:
            reason = f"attention {attention!r} serves no packed batches here"
    if reason is None and not can_prepack(device, dtype):
        served = tuple(path for path in served if not path.prepacked)
        reason = f"{dtype} on {device.type} has no prepacked layers" if device.type == "cpu" else None
    if reason is None and (unfused := fused_refusal(model)):
        served = tuple(path for path in served if not path.fused)
        reason = unfused if device.type == "cuda" else None
    if packed is None:
        served = tuple(path for path in served if not path.packed)
    if wanted is None:
        return _ChosenPath(served[-1], packed, reason or "it is the last")
    if wanted not in served:
        raise TilerankError(f"host_path {wanted.name!r} does not serve this model here: {reason}")
    return _ChosenPath(wanted, packed, "asked for")


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _items(values: Any, name: str) -> list[Any]:
    if values is None or isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, got {type(values).__name__}")
    return list(values)


def _pair(pair: Any, index: int) -> tuple[str, str]:
    if type(pair) is tuple and len(pair) == 2 and type(pair[0]) is type(pair[1]) is str:
        return pair  # nearly always; the checks below take ten times as long
    if isinstance(pair, (str, bytes)) or not isinstance(pair, (Sequence, np.ndarray)) or len(pair) != 2:
        raise TypeError(f"pairs[{index}] must be a (query, passage) pair of strings, got {pair!r:.80}")
    query, passage = pair
    for text in (query, passage):
        if not isinstance(text, str):
            raise TypeError(f"pairs[{index}] must hold strings, got {type(text).__name__}")
    return query, passage


def _activated(logits: np.ndarray, activation: Activation) -> np.ndarray:
    """``[n]`` -> ``[n]`` float32. The activation gets ``[n, 1]``, as sentence-transformers gives it, and a copy."""
    values = activation(torch.from_numpy(logits.copy())[:, None])
    shape = tuple(getattr(values, "shape", ()))
    if shape not in ((len(logits), 1), (len(logits),)):
        raise ValueError(f"activation_fn gave the shape {shape} for {len(logits)} pairs; expected one score each")
    return torch.as_tensor(values, dtype=torch.float32, device="cpu").numpy().reshape(-1)


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
    request = registry.Request(
        device=device.type,
        sm=device_sm(device),
        dtype="fp32" if precision == "tf32" else precision,
        head_dim=_head_dim(config),
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
