"""A JAX model of handwritten digits trains on all ranks: ``mpidist run -n 4 examples/jax_digits.py``.

It needs jax, optax and scikit-learn (for its data file).  The accuracy is the same on any number of ranks.
"""

from __future__ import annotations

import argparse
from typing import Any

import needed

needed.packages("jax", "optax", install="pip install '.[jax,examples]' optax")

import digits  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy  # noqa: E402
import optax  # noqa: E402

import mpidist  # noqa: E402
import mpidist.jax  # noqa: E402

BATCH = 96
WIDTHS = (64, 64, 64, 10)


def initial(seed: int) -> list[dict[str, jax.Array]]:
    """Return the first parameters of a network with two hidden layers."""
    keys = jax.random.split(jax.random.key(seed), len(WIDTHS) - 1)
    pairs = zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    return [{"w": jax.random.normal(key, (m, n)) * m**-0.5, "b": jnp.zeros(n)} for key, m, n in pairs]


def logits(parameters: list[dict[str, jax.Array]], images: Any) -> jax.Array:
    """Return the scores of the 10 classes."""
    x = images.reshape(len(images), -1)
    for number, layer in enumerate(parameters):
        x = x @ layer["w"] + layer["b"]
        x = jnp.tanh(x) if number < len(parameters) - 1 else x
    return x


def loss(parameters: list[dict[str, jax.Array]], images: Any, labels: Any) -> jax.Array:
    """Return the mean cross-entropy of some rows."""
    return optax.softmax_cross_entropy(logits(parameters, images), labels).mean()


def main() -> None:
    """Train, and print the accuracy on the test rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    epochs = parser.parse_args().epochs
    rank, size = mpidist.rank(), mpidist.size()
    train, test = digits.load()
    optimizer = mpidist.jax.distributed(optax.adam(2e-3))
    parameters = mpidist.jax.broadcast_tree(initial(seed=rank))  # rank 0's, on all ranks
    state = optimizer.init(parameters)
    gradient_fn, apply = jax.jit(jax.grad(loss)), jax.jit(optax.apply_updates)
    random = numpy.random.default_rng(0)  # the same order on all ranks
    for _ in range(epochs):
        order = random.permutation(len(train.images))
        for first in range(0, len(order) - BATCH + 1, BATCH):
            rows = order[first : first + BATCH][BATCH * rank // size : BATCH * (rank + 1) // size]
            gradients = gradient_fn(parameters, train.images[rows], train.labels[rows])
            updates, state = optimizer.update(gradients, state, parameters, weight=len(rows))
            parameters = apply(parameters, updates)
    found = jnp.argmax(logits(parameters, test.images), axis=1)
    if rank == 0:
        print(f"{size} ranks: accuracy {numpy.mean(found == test.labels.argmax(axis=1)):.4f}")


if __name__ == "__main__":
    main()
