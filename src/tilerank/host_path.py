"""The ways from raw text to scores, each one idea after the one before it, with what was expected of it.

`Reranker` takes one of them; ``bench_rerank`` times all that run on its device beside each other, in one process. As
on the ladder of kernels, a prediction was written before anything was timed end to end, and is answered by
``rerank.<precision>.steps`` of the records. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

AUTO = "auto"
"""The last path that the device and the model are served by."""


@dataclass(frozen=True, slots=True)
class HostPath:
    """One way to run a model. The switches are independent; `PATHS` turns them on one after another."""

    name: str
    idea: str
    prediction: str  # before measuring, and why; MiniLM-L6, one query with 50 SciFact passages
    devices: tuple[str, ...] = ("cpu", "cuda")
    fast_tokens: bool = False  # tokie, where its ids are proven to be equal
    packed: bool = False  # sequences back to back instead of a padded batch
    prepacked: bool = False  # linear layers by oneDNN, their weights laid out once
    graphs: bool = False  # a CUDA graph for each bucket of total tokens
    overlapped: bool = False  # the GPU works on the first pairs while the host tokenises the next
    fused: bool = False  # a forward pass of this project's own instead of transformers' model


PATHS = (
    HostPath(
        "padded",
        "Batches of like lengths, padded; ids by `tokenizers`, without the padded tensors of its wrapper.",
        "H200, fp16: 18 ms. Ids take 9 ms and the launches of the forward pass 7. Two cores, fp32: within a tenth of "
        "`CrossEncoder` at its best batch size, since both sort by length and run the same products.",
    ),
    HostPath(
        "fast_tokens",
        "Ids by `tokie` where they are proven to be equal.",
        "H200, fp16: 11 ms. 18,000 tokens take 1 ms instead of 9 and become arrays in 0.5. Two cores: nothing that is "
        "above the spread, since ids are under a hundredth of the time.",
        fast_tokens=True,
    ),
    HostPath(
        "packed",
        "One row of tokens instead of a padded batch; after the last attention only the classifier's tokens go on.",
        "H200, fp16: 8 ms. No mask is built and a third of the tokens goes, but some 110 launches still cost 5 ms. Two "
        "cores: 1.2 times sooner; the last layer keeps 2 of its 12 matrix products a token, a seventh of all.",
        fast_tokens=True,
        packed=True,
    ),
    HostPath(
        "prepacked",
        "Linear layers by oneDNN, with weights that are laid out for it once.",
        "Two cores: 1.7 times sooner where MKL takes its slow path (a processor that is not Intel's): three quarters "
        "of the time are these layers, and alone they ran 2.3 times sooner. Nothing on Intel's.",
        devices=("cpu",),
        fast_tokens=True,
        packed=True,
        prepacked=True,
    ),
    HostPath(
        "graphs",
        "The launches of one forward pass as a CUDA graph, one for each bucket of total tokens.",
        "H200, fp16: 4 ms. The kernels alone take 1.9 ms in a graph; ids, one copy in, one out are the rest.",
        devices=("cuda",),
        fast_tokens=True,
        packed=True,
        graphs=True,
    ),
    HostPath(
        "overlapped",
        "A call's pairs in pieces: the GPU works on one while the host tokenises the next.",
        "H200, fp16: 4.4 ms, from 6. The host takes 3.4 ms in all and the GPU 2.6, a third of which comes after the "
        "host's last piece; more pieces cost a round of launches each, fewer leave more of either's time uncovered.",
        devices=("cuda",),
        fast_tokens=True,
        packed=True,
        graphs=True,
        overlapped=True,
    ),
    HostPath(
        "fused",
        "A forward pass of few kernels: bias, GELU, residual and LayerNorm are the end of the product before them.",
        "H200, fp16: 1 ms sooner than `overlapped`. The forward pass falls from 2.5 ms to 0.95: in a layer 155 us of "
        "kernels instead of 282, and no copies to place what attention found.",
        devices=("cuda",),
        fast_tokens=True,
        packed=True,
        graphs=True,
        overlapped=True,
        fused=True,
    ),
)
"""In order: each is the one before it (of those that the device has) and one idea more."""

CACHED = "cached"
CACHED_IDEA = "The last path, with the passages' ids from a token cache instead of the tokenizer."
CACHED_PREDICTION = (
    "H200, fp16: 3 ms. A digest and a look-up of each passage take 0.3 ms instead of 1.5. Two cores: nothing."
)


def find(name: str) -> HostPath:
    """The path called ``name``; ValueError with the names that exist."""
    for path in PATHS:
        if path.name == name:
            return path
    raise ValueError(f"host_path is {name!r}; allowed: {AUTO}, {', '.join(path.name for path in PATHS)}")


def of_device(device: str) -> tuple[HostPath, ...]:
    """The paths that ``device`` (cpu or cuda) has, in order."""
    return tuple(path for path in PATHS if device in path.devices)
