"""Attention and the fused attention block for TensorFlow 2.21 and Keras 3.

`fused_attention` and `attention` are functions over tensors, `FusedAttentionLayer` is the block as a Keras layer. They
run on GPUs; on a CPU only where ``variant="reference"`` is asked for. docs/bindings.md says which TensorFlow goes with
which CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

try:
    import keras
    import tensorflow as tf
except ImportError as error:
    raise ImportError(
        f"tilerank.tf needs TensorFlow 2.21 ({error}): `make tf-env` makes an environment with it, apart from torch's; "
        "elsewhere `pip install 'tensorflow==2.21.*'`"
    ) from error

from tilerank.errors import TilerankError
from tilerank.kernels.registry import MAX_HEAD_DIM
from tilerank.kernels.tf_ops import MOST_HEADS, attention, fused_attention, integer, load_operations

__all__ = ["FusedAttentionLayer", "attention", "fused_attention", "load_operations"]


@keras.saving.register_keras_serializable(package="tilerank")
class FusedAttentionLayer(keras.layers.Layer):
    """The attention block of an encoder layer as one Keras layer: normalisation, projections, attention, output.

    For inference: a gradient through it is refused by name. Its weights are those of `keras.layers.LayerNormalization`
    (gamma, beta) and of four `keras.layers.Dense` (wq, bq, ...), in their shapes, so that trained ones are copied as
    they are. With a mixed policy weights are kept in float32 and cast at each call; ``dtype="float16"`` casts nothing.

    Args:
        num_heads, head_dim: the block projects ``[B, N, C]`` to num_heads heads of head_dim columns and back to C.
        causal: token i sees tokens 0..i only.
        pre_ln: True normalises the input; False normalises the result, residual included.
        dtype: Keras's dtype or policy: float32, float16, bfloat16, mixed_float16 or mixed_bfloat16.
        epsilon: of the normalisation.
        use_bias: whether the four projections have biases.
        add_residual: True adds the input to the output projection; else the residual stays outside.
        variant: a row of the registry, or ``auto``; ``reference`` is what runs on a CPU.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        causal: bool = False,
        pre_ln: bool = True,
        dtype: Any = None,
        *,
        epsilon: float = 1e-5,
        use_bias: bool = True,
        add_residual: bool = False,
        variant: str = "auto",
        **kwargs: Any,
    ) -> None:
        if keras.backend.backend() != "tensorflow":
            raise TilerankError(f"Keras runs on {keras.backend.backend()}; this layer needs KERAS_BACKEND=tensorflow")
        super().__init__(dtype=dtype, **kwargs)
        if self.compute_dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"the layer computes in {self.compute_dtype}; allowed: float32, float16, bfloat16")
        self.num_heads = integer("num_heads", num_heads, MOST_HEADS)
        self.head_dim = integer("head_dim", head_dim, MAX_HEAD_DIM)
        self.causal = causal
        self.pre_ln = pre_ln
        self.epsilon = epsilon
        self.use_bias = use_bias
        self.add_residual = add_residual
        self.variant = variant
        self.supports_jit = False  # XLA has no kernel for the operation: Keras then compiles the model without it

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Make the weights for inputs ``[B, N, C]``."""
        width, columns = input_shape[-1], self.num_heads * self.head_dim
        if len(input_shape) != 3 or width is None:
            raise ValueError(f"the input has shape {input_shape}; expected [batch, tokens, width], width known")
        self.gamma = self.add_weight(name="gamma", shape=(width,), initializer="ones")
        self.beta = self.add_weight(name="beta", shape=(width,), initializer="zeros")
        for name, rows, count in (("q", width, columns), ("k", width, columns), ("v", width, columns)):
            setattr(self, f"w{name}", self.add_weight(name=f"w{name}", shape=(rows, count)))
        self.wo = self.add_weight(name="wo", shape=(columns, width))
        for name, count in (("q", columns), ("k", columns), ("v", columns), ("o", width)):
            bias = self.add_weight(name=f"b{name}", shape=(count,), initializer="zeros") if self.use_bias else None
            setattr(self, f"b{name}", bias)

    def call(self, inputs: tf.Tensor, key_lengths: Any = None, mask: Any = None) -> tf.Tensor:
        """The block over ``[B, N, C]``; ``key_lengths`` ``[B]`` counts the tokens of each sequence from the left."""
        if mask is not None:
            raise ValueError(
                "the input carries a Keras mask, which need not be right padding; pass key_lengths instead (and no "
                "mask: mask_zero=False)"
            )
        return fused_attention(
            inputs,
            *(self.wq, self.wk, self.wv, self.wo, self.gamma, self.beta),
            self.num_heads,
            self.head_dim,
            causal=self.causal,
            pre_ln=self.pre_ln,
            epsilon=self.epsilon,
            **({"bq": self.bq, "bk": self.bk, "bv": self.bv, "bo": self.bo} if self.use_bias else {}),
            residual=inputs if self.add_residual else None,
            key_lengths=key_lengths,
            variant=self.variant,
        )

    def compute_output_shape(self, input_shape: tuple[int | None, ...], **_: Any) -> tuple[int | None, ...]:
        """The input's shape."""
        return input_shape

    def get_config(self) -> Mapping[str, Any]:
        """What `from_config` makes the layer from again."""
        own = ("num_heads", "head_dim", "causal", "pre_ln", "epsilon", "use_bias", "add_residual", "variant")
        return {**super().get_config(), **{name: getattr(self, name) for name in own}}
