"""Hand-optimised CUDA attention for reranking.

`Reranker` ranks passages for a query; `attention` and `attention_varlen` are the kernels behind it for PyTorch;
`register` makes them an attention implementation of transformers, `accelerate` a drop-in for a whole model;
`fused_attention` and `FusedAttentionLayer` are the
attention block of an encoder layer, and `tf` has the same for TensorFlow and Keras. Each is imported when it is first
used: importing the package loads no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tilerank._version import __version__

if TYPE_CHECKING:
    from tilerank.accelerated import accelerate
    from tilerank.kernels.huggingface import register
    from tilerank.kernels.torch_block import FusedAttentionLayer, fused_attention
    from tilerank.kernels.torch_ops import attention, attention_varlen
    from tilerank.reranker import Reranker

__all__ = [
    "FusedAttentionLayer",
    "Reranker",
    "__version__",
    "accelerate",
    "attention",
    "attention_varlen",
    "fused_attention",
    "register",
]

_HOMES = {
    "FusedAttentionLayer": "tilerank.kernels.torch_block",
    "Reranker": "tilerank.reranker",
    "accelerate": "tilerank.accelerated",
    "attention": "tilerank.kernels.torch_ops",
    "attention_varlen": "tilerank.kernels.torch_ops",
    "fused_attention": "tilerank.kernels.torch_block",
    "register": "tilerank.kernels.huggingface",
}


def __getattr__(name: str) -> Any:
    if name == "tf":
        return importlib.import_module("tilerank.tf")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
