"""What kernels are timed on: sequence lengths of real reranking calls, and deterministic inputs of those lengths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from tilerank.token_lengths import read_lengths

# One query's 50 candidate pairs, drawn to have the statistics of BM25 pools on SciFact (mean 337 tokens, 43 of
# 50 padded). Frozen: every published figure of this project is taken on this list.
SEED_LENGTHS: tuple[int, ...] = (
    *(254, 233, 350, 432, 312, 177, 366, 313, 512, 169, 388, 512, 241, 300, 335, 250, 404, 305, 169, 211),
    *(391, 264, 304, 433, 345, 340, 512, 512, 411, 482, 206, 512, 252, 398, 248, 321, 228, 434, 426, 259),
    *(259, 512, 328, 512, 255, 331, 298, 108, 343, 373),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """One attention call of a reranker: the valid tokens of each sequence, and the model's heads."""

    name: str
    lengths: tuple[int, ...]
    padded_length: int  # rows a sequence has in a padded batch
    heads: int = 12
    head_dim: int = 32

    def __post_init__(self) -> None:
        bad = [length for length in self.lengths if not 0 <= length <= self.padded_length]
        if bad:
            raise ValueError(f"workload {self.name!r}: lengths {bad} are not within 0..{self.padded_length}")

    @property
    def sequences(self) -> int:
        """Sequences in the batch."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Valid tokens."""
        return sum(self.lengths)

    @property
    def scores(self) -> int:
        """Query-key products over valid tokens, all heads: the exps that one call needs."""
        return self.heads * sum(length * length for length in self.lengths)

    @property
    def square_ratio(self) -> float:
        """Valid scores over the scores of the padded batch."""
        return sum(length * length for length in self.lengths) / (self.sequences * self.padded_length**2)

    @property
    def padded_rows(self) -> int:
        """Sequences shorter than the padded length."""
        return sum(length < self.padded_length for length in self.lengths)


def seed_workload() -> Workload:
    """The workload that all figures share: 50 sequences, 16,830 tokens, padded to 512."""
    return Workload("seed", SEED_LENGTHS, padded_length=512)


def pool_workloads(path: Path, name: str) -> tuple[Workload, ...]:
    """One workload a query from the token lengths that the ``retrieve`` stage records (data/candidates/lengths.json).

    As the model's own padding does, each query is padded to its longest pair. Queries without candidates are left
    out. Raises `TilerankError` when the file is missing or damaged.
    """
    lengths = read_lengths(path).lengths
    return tuple(
        Workload(f"{name}/{query_id}", row, padded_length=max(row)) for query_id, row in lengths.items() if row
    )


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Normally distributed inputs of one workload, padded and packed: the same numbers for the same valid token."""

    workload: Workload
    q: torch.Tensor  # [B, H, S, D], a view of [B, S, H, D] memory as transformers passes it; so are k and v
    k: torch.Tensor
    v: torch.Tensor
    key_lengths: torch.Tensor  # [B] int32
    valid: torch.Tensor  # [B, S] bool: True where a token is
    packed_q: torch.Tensor  # [T, H, D]; so are packed_k and packed_v
    packed_k: torch.Tensor
    packed_v: torch.Tensor
    cu_seqlens: torch.Tensor  # [B + 1] int32

    @property
    def max_length(self) -> int:
        """The longest sequence."""
        return max(self.workload.lengths, default=0)


@lru_cache(maxsize=1)  # seconds of a process that takes one workload at several dtypes and scales
def _draw(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) for _ in "qkv")


def make_inputs(
    workload: Workload, dtype: torch.dtype, device: str, seed: int = 0, scale: float = 1.0
) -> AttentionInputs:
    """Draw N(0,1) inputs times ``scale`` on the CPU in float32: every device and dtype starts from the same numbers."""
    shape = (workload.sequences, workload.padded_length, workload.heads, workload.head_dim)
    memory = [(scale * drawn).to(device=device, dtype=dtype) for drawn in _draw(shape, seed)]
    lengths = torch.tensor(workload.lengths, dtype=torch.int32)
    valid = torch.arange(workload.padded_length) < lengths[:, None]
    cu_seqlens = torch.zeros(workload.sequences + 1, dtype=torch.int32)
    cu_seqlens[1:] = lengths.cumsum(0)
    on_device = valid.to(device)
    q, k, v = (tensor.transpose(1, 2) for tensor in memory)
    packed_q, packed_k, packed_v = (tensor[on_device].contiguous() for tensor in memory)
    return AttentionInputs(
        workload, q, k, v, lengths.to(device), on_device, packed_q, packed_k, packed_v, cu_seqlens.to(device)
    )


def reference_attention(inputs: AttentionInputs, *, masked: bool) -> torch.Tensor:
    """Attention in float64, ``[B, H, S, D]``: softmax over the valid keys (``masked``) or over every row's keys.

    A sequence without keys gives zeros.
    """
    q, k, v = (tensor.double() for tensor in (inputs.q, inputs.k, inputs.v))
    out = torch.zeros_like(q)
    scale = inputs.workload.head_dim**-0.5
    for row, length in enumerate(inputs.workload.lengths):
        keys = length if masked else inputs.workload.padded_length
        if keys:
            weights = torch.softmax(q[row] @ k[row, :, :keys].transpose(-1, -2) * scale, dim=-1)
            out[row] = weights @ v[row, :, :keys]
    return out


def max_abs_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute difference; NaN when ``out`` holds one, 0 when there is nothing to compare."""
    if out.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(out.shape)} and {tuple(reference.shape)}")
    return float((out.double() - reference).abs().amax()) if out.numel() else 0.0
