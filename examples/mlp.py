"""A perceptron with one hidden layer, its gradients written by hand: runs on NumPy and on CuPy arrays alike."""

from __future__ import annotations

from typing import Any

import numpy

HIDDEN = 128
SHIFTS = False
LEARNING_RATE = 0.1


def initial(seed: int) -> dict[str, numpy.ndarray]:
    """Return the first parameters, float32, by name."""
    random = numpy.random.default_rng(seed)
    return {
        "hidden/kernel": random.normal(0, (2 / 64) ** 0.5, (64, HIDDEN)).astype("float32"),
        "hidden/bias": numpy.zeros(HIDDEN, "float32"),
        "output/kernel": random.normal(0, (1 / HIDDEN) ** 0.5, (HIDDEN, 10)).astype("float32"),
        "output/bias": numpy.zeros(10, "float32"),
    }


def squareplus(x: Any) -> tuple[Any, Any]:
    """Return y = (x + r) / 2 with r = sqrt(x * x + 1 / 4), close to max(x, 0) but smooth; and dy / dx = y / r."""
    root = numpy.sqrt(x * x + 0.25)
    y = (x + root) / 2
    return y, y / root


def logits(parameters: Any, images: Any) -> Any:
    """Return the scores of the 10 classes for images of shape (rows, 8, 8)."""
    w1, b1, w2, b2 = parameters
    hidden, _ = squareplus(images.reshape(-1, 64) @ w1 + b1)
    return hidden @ w2 + b2


def value_and_grad(parameters: Any, images: Any, labels: Any, batch_size: int) -> tuple[Any, list[Any]]:
    """Return (sum of the rows' cross-entropy) / `batch_size`, and its gradient for every parameter."""
    w1, b1, w2, b2 = parameters
    x = images.reshape(-1, 64)
    hidden, slope = squareplus(x @ w1 + b1)
    scores = hidden @ w2 + b2
    scores -= scores.max(axis=1, keepdims=True)
    log_probability = scores - numpy.log(numpy.exp(scores).sum(axis=1, keepdims=True))
    loss = -(labels * log_probability).sum() / batch_size
    d_scores = (numpy.exp(log_probability) - labels) / batch_size
    d_hidden = (d_scores @ w2.T) * slope
    return loss, [x.T @ d_hidden, d_hidden.sum(axis=0), hidden.T @ d_scores, d_scores.sum(axis=0)]


if __name__ == "__main__":
    raise SystemExit("mlp.py has a model of train.py: python examples/train.py --model mlp")
