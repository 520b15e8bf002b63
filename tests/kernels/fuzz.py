"""Random attention calls and their bound: what `tests/gpu/test_fuzz.py` runs on a device and tests/kernels/test_fuzz.py
on the CPU.

A case is drawn from what a row serves and is known by its record, which a failure prints;
`python -c 'from tests.kernels.fuzz import *; rerun(Case(...))'` runs that one again.
"""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import dataclass
from itertools import accumulate

import torch

import tilerank
from tests.kernels import reference
from tilerank.kernels import registry

CASES = 2400
"""Of all CUDA rows together, or a few more."""

HEAD_DIMS = (1, 7, 32, 33, 64, 80, 96, 128, 256)  # of rows that serve every one
LENGTHS = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 200, 255, 256, 257, 300)
# Sharp and flat softmaxes; in the last two the products are ordinary and their factors are not.
SCALES = ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), (8.0, 8.0, 8.0), (1e-3, 1e-3, 1e-3), (500.0, 2e-3, 1.0), (2e-3, 500.0, 1e3))
MEMORY = ("contiguous", "transformers", "fused", "offset", "odd_stride")


@dataclass(frozen=True)
class Case:
    """One call. Sequences of different lengths are packed, or padded and told by key lengths."""

    row: str
    dtype: str
    head_dim: int
    layout: str
    q_lengths: tuple[int, ...]  # of each sequence; all the same where padded
    k_lengths: tuple[int, ...]
    hides_keys: bool  # padded: k_lengths are key lengths; otherwise all the same
    heads: int
    kv_heads: int
    causal: bool
    mask: str | None  # boolean, additive
    scales: tuple[float, float, float]  # factors on N(0,1) of q, k and v
    memory: str
    seed: int


def draw_case(row, seed):
    """A case that the row serves on some GPU."""
    choose = random.Random(f"{row.name} {seed}")
    dtype, layout = choose.choice(row.dtypes), choose.choice(row.layouts)
    batch = choose.randint(1, 5)
    q_lengths = tuple(choose.choices(LENGTHS, k=batch))
    k_lengths = q_lengths if choose.random() < 0.5 else tuple(choose.choices(LENGTHS, k=batch))
    hides_keys = layout == "padded" and "key_lengths" in row.masks and choose.random() < 0.6
    if layout == "padded":
        q_lengths = (max(q_lengths),) * batch
        if not hides_keys:
            k_lengths = (max(k_lengths),) * batch
    kv_heads = choose.choice((1, 2, 3))
    return Case(
        row=row.name,
        dtype=dtype,
        head_dim=choose.choice(HEAD_DIMS if row.head_dims is None else row.head_dims),
        layout=layout,
        q_lengths=q_lengths,
        k_lengths=k_lengths,
        hides_keys=hides_keys,
        heads=kv_heads * choose.choice((1, 1, 2, 4)),
        kv_heads=kv_heads,
        causal="causal" in row.masks and choose.random() < 0.3,
        mask=choose.choice(
            (None, None, *(mask for mask in ("boolean", "additive") if layout == "padded" and mask in row.masks))
        ),
        scales=choose.choice(SCALES),
        memory=choose.choice(MEMORY),
        seed=seed,
    )


def cases_of(row):
    """A row's share of `CASES`: rows on the matrix unit have guards, fragments and tails to get wrong that others do
    not have, and take five times as many."""

    def weight(each):
        return 5 if each.products != "ffma" or "fp32" not in each.dtypes else 1

    rows = [each for each in registry.attention_rows() if each.device == "cuda"]
    count = math.ceil(CASES * weight(row) / sum(map(weight, rows)))
    return [draw_case(row, seed) for seed in range(count)]


def in_memory(kind, x, turned):
    """The same numbers, laid out otherwise. x: ``[..., D]``; ``turned``: heads and tokens are dims 1 and 2."""
    if kind == "contiguous":
        return x.contiguous()
    if kind == "transformers":
        return x.transpose(1, 2).contiguous().transpose(1, 2) if turned else x.contiguous()
    if kind == "fused":
        return torch.stack([x, x, x], dim=-2).unbind(-2)[1]
    width = x.shape[-1]
    if kind == "odd_stride":
        return torch.nn.functional.pad(x, (1, 2), value=float("nan"))[..., 1 : 1 + width]
    memory = torch.full((x.numel() + 1,), float("nan"), dtype=x.dtype, device=x.device)
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)


@contextlib.contextmanager
def poisoned_memory():
    """Fill what torch.empty returns with NaN, so that a row nobody wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def excess(case, device="cuda"):
    """How far beyond its bound the worst element of the case is, as a tensor: not above 0 where all is right."""
    row = registry.get(case.row)
    generator = torch.Generator(device=device).manual_seed(case.seed)
    longest_q, longest_k = max(case.q_lengths), max(case.k_lengths)
    batch, dtype = len(case.q_lengths), reference.DTYPES[case.dtype]

    def draw(rows, heads, scale):
        shape = (batch, heads, rows, case.head_dim)
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    q = draw(longest_q, case.heads, case.scales[0])
    k, v = (draw(longest_k, case.kv_heads, scale) for scale in case.scales[1:])
    given = {"causal": case.causal}
    if case.mask is not None:
        mask = torch.rand(batch, 1, longest_q, longest_k, generator=generator, device=device) < 0.7
        bias = torch.randn(mask.shape, generator=generator, device=device).masked_fill(~mask, -float("inf"))
        given["mask"] = mask if case.mask == "boolean" else bias.to(dtype)
    lengths = torch.tensor(case.k_lengths, device=device)
    rows = torch.arange(longest_q, device=device) < torch.tensor(case.q_lengths, device=device)[:, None]
    keys = torch.arange(longest_k, device=device) < lengths[:, None]
    hidden = {"key_lengths": lengths} if len(set(case.k_lengths)) > 1 else {}
    for tensor in (k, v):
        tensor.transpose(1, 2)[~keys] = float("nan")

    if case.layout == "padded":
        laid_out = [in_memory(case.memory, x, turned=True) for x in (q, k, v)]
        lengths_given = {"key_lengths": lengths} if case.hides_keys else {}
        with poisoned_memory():
            out = tilerank.attention(*laid_out, **given, **lengths_given, variant=case.row)
    else:
        bounds = [
            torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device)
            for each in (case.q_lengths, case.k_lengths)
        ]
        packed = [x.transpose(1, 2)[kept] for x, kept in ((q, rows), (k, keys), (v, keys))]
        laid_out = [in_memory(case.memory, x, turned=False) for x in packed]
        with poisoned_memory():
            flat = tilerank.attention_varlen(
                *laid_out, *bounds, longest_q, longest_k, causal=case.causal, variant=case.row
            )
        out = torch.zeros_like(q).transpose(1, 2)
        out[rows] = flat
        out = out.transpose(1, 2)

    lossy = row.products == "tf32"
    expected = reference.attention(q, k, v, **given, **hidden)
    own = reference.sdpa(*((x.half() if lossy else x) for x in (q, k, v)), **given, **hidden)
    worst = (own.double() - expected).abs().amax() if expected.numel() else 0.0
    bound = 2 * worst + torch.finfo(dtype).eps * expected.abs() + reference.slack(
        q, k, v, lossy=lossy, **given, **hidden
    )  # fmt: skip
    beyond = torch.where(rows[:, None, :, None], (out.double() - expected).abs() - bound, -1.0)
    # NaN is no number above 0 either.
    return torch.nan_to_num(beyond, nan=float("inf")).amax() if beyond.numel() else beyond.new_tensor(-1.0)


def rerun(case, device="cuda"):
    """Print by how much the case is beyond its bound."""
    print(f"{case}\nbeyond its bound by {excess(case, device).item():.3g}")


def check(cases, device="cuda"):
    """Fail with the first case that is beyond its bound. The device is waited for once for many cases."""
    for start in range(0, len(cases), 50):
        some = cases[start : start + 50]
        beyond = torch.stack([excess(case, device) for case in some]).tolist()
        wrong = [f"{case} by {size:.3g}" for case, size in zip(some, beyond, strict=True) if not size <= 0]
        assert not wrong, f"{len(wrong)} of {len(some)} calls are beyond their bound, the first:\n{wrong[0]}"
