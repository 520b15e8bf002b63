"""BERT-large, 24 layers of width 1024 with 16 heads, with each layer's attention swapped for the fused block: tokens a
second beside the unmodified model.

Weights are random: speed does not depend on them, and the results are compared with the model's own in float64. Every
system runs the same whole batch without padding, in one process, taking turns: transformers' eager attention, SDPA,
SDPA replayed from a CUDA graph without a mask, and the swapped model, as it is and from a graph.

    python -m tilerank.bench.bert_large --seq-len 512 --batch 8
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilerank.bench.attention import best_peer
from tilerank.bench.peers import DTYPES, arithmetic
from tilerank.bench.timing import Case, Row, WallClock, measure, ratio
from tilerank.kernels.torch_block import fused_attention

LENGTHS = (128, 512)
BATCH = 8
PRECISION = "fp16"
ROUNDS = 11
WARMUP = 3
OURS, OURS_IN_GRAPH = "tilerank", "tilerank in a graph"
EAGER = "eager"

ERROR_FACTOR = 2.0
"""What a system's hidden states may be off by, in errors that SDPA's have against float64."""


class FusedBertAttention(torch.nn.Module):
    """In place of a ``BertAttention``, with its weights: projections, attention, output projection, residual and the
    normalisation of their sum in two launches. It takes no mask: every token is attended to.

    Args:
        attention: the module whose weights it shares.
        heads: attention heads.
        variant: a row of the registry's ``block``, or auto.
    """

    def __init__(self, attention: torch.nn.Module, heads: int, variant: str = "auto") -> None:
        super().__init__()
        self.self, self.output = attention.self, attention.output
        self.heads, self.variant = heads, variant

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any) -> tuple[Any, None]:
        """``[B, N, C]`` -> (``[B, N, C]``, None), as ``BertAttention`` answers; ValueError when there is a mask."""
        if attention_mask is not None:
            raise ValueError("attention_mask is given; this module attends to every token")
        of_self, norm = self.self, self.output.LayerNorm
        out = fused_attention(
            hidden,
            of_self.query.weight,
            of_self.key.weight,
            of_self.value.weight,
            self.output.dense.weight,
            norm.weight,
            norm.bias,
            self.heads,
            hidden.shape[-1] // self.heads,
            pre_ln=False,
            epsilon=norm.eps,
            bq=of_self.query.bias,
            bk=of_self.key.bias,
            bv=of_self.value.bias,
            bo=self.output.dense.bias,
            residual=hidden,
            variant=self.variant,
        )
        return out, None


def make_model(layers: int, width: int, heads: int, implementation: str, device: str = "cpu") -> torch.nn.Module:
    """A BERT encoder with random weights, the same for the same sizes and device."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        attn_implementation=implementation,
    )
    with torch.device(device):
        return BertModel(config, add_pooling_layer=False).eval()


def swap_attention(model: torch.nn.Module, variant: str = "auto") -> torch.nn.Module:
    """The model with every layer's attention replaced, in place."""
    for layer in model.encoder.layer:
        layer.attention = FusedBertAttention(layer.attention, model.config.num_attention_heads, variant)
    return model


def _forward(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    # Not through the model itself: while a graph is captured transformers makes a mask of a whole batch, too.
    return lambda: model.encoder(model.embeddings(input_ids=ids)).last_hidden_state


def _in_graph(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def time_length(
    tokens: int,
    *,
    batch: int = BATCH,
    precision: str = PRECISION,
    rounds: int = ROUNDS,
    layers: int = 24,
    width: int = 1024,
    heads: int = 16,
) -> dict[str, Any]:
    """``bert_large.<tokens>`` of this machine's GPU."""
    dtype = DTYPES[precision]
    with arithmetic(precision):
        ids = torch.randint(1000, 30000, (batch, tokens), generator=torch.Generator().manual_seed(0)).to("cuda")
        sizes = (layers, width, heads)
        models = {name: make_model(*sizes, name, "cuda").to(dtype) for name in (EAGER, "sdpa")}
        ours = swap_attention(make_model(*sizes, "sdpa", "cuda").to(dtype))
        exact_model = make_model(*sizes, EAGER, "cuda").to(dtype).double()
        exact = torch.cat([exact_model(input_ids=row[None]).last_hidden_state for row in ids])
        del exact_model

        def error(out: torch.Tensor) -> float:
            return float((out.double() - exact).abs().amax())

        runs = {name: _forward(model, ids) for name, model in models.items()}
        allowed = ERROR_FACTOR * error(runs["sdpa"]()) + torch.finfo(dtype).eps * float(exact.abs().amax())
        runs[OURS] = _forward(ours, ids)
        for name, of in (("sdpa in a graph", "sdpa"), (OURS_IN_GRAPH, OURS)):
            runs[name] = _in_graph(runs[of])
        rows = measure(
            [Case(name, run, error, allowed) for name, run in runs.items()],
            WallClock("cuda"),
            warmup=WARMUP,
            rounds=rounds,
            description=f"BERT-large {tokens}",
        )
    return length_record(rows, batch * tokens) | {"batch": batch, "precision": precision}


def length_record(rows: Sequence[Row], tokens: int) -> dict[str, Any]:
    """The figures of the rows of one `measure` call over ``tokens`` tokens: the better of ours, beside the best
    peer."""
    mine = best_peer([row for row in rows if row.name in (OURS, OURS_IN_GRAPH)])
    if mine is None or mine.spread is None:
        failures = [f"{row.name}: {row.failure}" for row in rows if row.name in (OURS, OURS_IN_GRAPH)]
        return {"failure": "; ".join(failures)}
    record: dict[str, Any] = {
        "system": mine.name,
        "tokens_per_s": tokens / mine.spread.median,
        "max_abs_error": mine.error,
    }
    named = {row.name: row for row in rows}
    for name, key in ((EAGER, "eager"), ("sdpa", "sdpa"), (OURS, "ungraphed")):
        spread = named[name].spread if name in named else None
        if spread is not None:
            record[f"{key}_tokens_per_s"] = tokens / spread.median
    best = best_peer([row for row in rows if row.name not in (OURS, OURS_IN_GRAPH)])
    if best is not None and best.spread is not None:
        speedup = ratio(mine.spread, best.spread)
        record |= {
            "best_peer": best.name,
            "best_peer_tokens_per_s": tokens / best.spread.median,
            "speedup_vs_best_peer": speedup.value,
            "speedup_vs_best_peer_is_noise": speedup.is_noise,
        }
    return record


def main() -> None:
    """Time BERT-large with the fused block on this machine's GPU beside the unmodified model."""
    parser = argparse.ArgumentParser(prog="python -m tilerank.bench.bert_large", description=main.__doc__)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--iters", type=int, default=ROUNDS, help="rounds that are timed")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default=PRECISION)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: kernels are not timed on a CPU")
    record = time_length(options.seq_len, batch=options.batch, precision=options.precision, rounds=options.iters)
    for name, value in record.items():
        print(f"{name}: {value:,.4g}" if isinstance(value, float) else f"{name}: {value}")


if __name__ == "__main__":
    main()
