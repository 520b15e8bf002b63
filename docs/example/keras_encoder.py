"""A Keras encoder beside the same one with tilerank's block in place of LayerNormalization + MultiHeadAttention.

    make tf-env && .venv-tf/bin/python docs/example/keras_encoder.py

On a GPU it runs the kernels in float16; without one the reference, in float32 and at a small size, which shows that the
two encoders agree and says nothing about time. --help lists the sizes.
"""

from __future__ import annotations

import argparse
import time

import keras
import numpy as np
import tensorflow as tf

import tilerank.tf


def encoder(sizes: argparse.Namespace, fused: bool, variant: str) -> keras.Model:
    """A pre-LN encoder; ``fused`` says which attention block it has. Everything else is Keras's own."""
    inputs = tokens = keras.Input((None, sizes.width))
    for index in range(sizes.layers):
        if fused:
            block = tilerank.tf.FusedAttentionLayer(
                sizes.heads, sizes.head_dim, add_residual=True, variant=variant, name=f"attention_{index}"
            )
            tokens = block(tokens)
        else:
            normed = keras.layers.LayerNormalization(epsilon=1e-5, name=f"norm_{index}")(tokens)
            attention = keras.layers.MultiHeadAttention(sizes.heads, sizes.head_dim, name=f"attention_{index}")
            tokens = tokens + attention(normed, normed)
        hidden = keras.layers.LayerNormalization(epsilon=1e-5, name=f"ffn_norm_{index}")(tokens)
        hidden = keras.layers.Dense(4 * sizes.width, activation="gelu", name=f"ffn_in_{index}")(hidden)
        tokens = tokens + keras.layers.Dense(sizes.width, name=f"ffn_out_{index}")(hidden)
    return keras.Model(inputs, tokens)


def copy_weights(stock: keras.Model, fused: keras.Model) -> None:
    """Give ``fused`` the weights of ``stock``, whose kernels are [width, heads, head_dim]: matrices in the block."""
    for layer in fused.layers:
        if isinstance(layer, tilerank.tf.FusedAttentionLayer):
            index = layer.name.rsplit("_", 1)[1]
            gamma, beta = stock.get_layer(f"norm_{index}").get_weights()
            attention = stock.get_layer(f"attention_{index}")
            width, columns = layer.wq.shape
            for name, dense in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
                kernel, bias = getattr(attention, f"_{dense}_dense").get_weights()
                getattr(layer, f"w{name}").assign(kernel.reshape((columns, width) if name == "o" else (width, columns)))
                getattr(layer, f"b{name}").assign(bias.reshape(-1))
            layer.gamma.assign(gamma)
            layer.beta.assign(beta)
        elif layer.weights:
            layer.set_weights(stock.get_layer(layer.name).get_weights())


def milliseconds(model: keras.Model, inputs: tf.Tensor, rounds: int) -> float:
    """Median time of one forward pass in a tf.function, its result awaited."""
    forward = tf.function(model, autograph=False)
    forward(inputs).numpy()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        forward(inputs).numpy()
        seconds.append(time.perf_counter() - start)
    return 1e3 * float(np.median(seconds))


def main() -> None:
    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    defaults = (8, 512, 768, 12) if on_gpu else (2, 24, 64, 4)
    for name, default in zip(("batch", "tokens", "width", "heads"), defaults, strict=True):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=20 if on_gpu else 3)
    sizes = parser.parse_args()
    sizes.head_dim = sizes.width // sizes.heads
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float16" if on_gpu else "float32")
    variant = "auto" if on_gpu else "reference"

    stock, fused = encoder(sizes, False, variant), encoder(sizes, True, variant)
    random = np.random.default_rng(0)
    stock.set_weights([weight + random.normal(0, 0.05, weight.shape) for weight in stock.get_weights()])  # no zero bias
    copy_weights(stock, fused)
    inputs = tf.random.normal((sizes.batch, sizes.tokens, sizes.width), dtype="float16" if on_gpu else "float32")
    expected, found = (np.asarray(model(inputs), np.float64) for model in (stock, fused))
    difference, largest = np.abs(found - expected).max(), np.abs(expected).max()
    print(f"{sizes.layers} layers, [{sizes.batch}, {sizes.tokens}, {sizes.width}], {sizes.heads} heads, {variant}")
    print(f"largest output {largest:.3g}, largest difference {difference:.3g}")
    for name, model in (("stock", stock), ("fused", fused)):
        print(f"{name}: {milliseconds(model, inputs, sizes.rounds):.2f} ms")
    if not on_gpu:
        print("no GPU: the block ran as the reference, in double and unoptimised; its time means nothing")
    if not difference <= (2e-2 if on_gpu else 1e-4) * largest:
        raise SystemExit("the two encoders do not agree")


if __name__ == "__main__":
    main()
