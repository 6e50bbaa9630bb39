"""A small convolutional network; HIPS autograd differentiates it.

Its activation is smooth, as is that of `mlp`: at the kink of a ReLU the rounding of a sum decides about a gradient,
and runs on different numbers of ranks would drift apart by more than rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as plain_numpy

try:
    import autograd.numpy as numpy
    from autograd import value_and_grad as differentiate
    from autograd.extend import defvjp, primitive
except ImportError:
    raise SystemExit("the cnn needs autograd: pip install autograd (or train the other model: --model mlp)") from None

SHIFTS = True
LEARNING_RATE = 0.2
SMOOTHING = 0.1
FILTERS = 16, 32
HIDDEN = 64


def initial(seed: int) -> dict[str, Any]:
    """Return the first parameters, float32, by name."""
    random = plain_numpy.random.default_rng(seed)
    first, second = FILTERS
    shapes = {"conv1": (9, first), "conv2": (9 * first, second), "hidden": (16 * second, HIDDEN)}
    shapes["output"] = (HIDDEN, 10)
    parameters = {}
    for name, shape in shapes.items():
        parameters[f"{name}/kernel"] = random.normal(0, (2 / shape[0]) ** 0.5, shape).astype("float32")
        parameters[f"{name}/bias"] = plain_numpy.zeros(shape[1], "float32")
    return parameters


@primitive
def patches(images: Any, stride: int) -> Any:
    """Return the 3 x 3 neighbourhood of every `stride`-th pixel: (n, h, w, c) to (n, h / stride, w / stride, 9 c)."""
    n, height, width, channels = images.shape
    padded = plain_numpy.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = [padded[:, i : i + height : stride, j : j + width : stride] for i in range(3) for j in range(3)]
    return plain_numpy.concatenate(windows, axis=3)


def patches_vjp(result: Any, images: Any, stride: int) -> Any:
    """Return the function that takes a gradient for `patches`' result to the gradient for its images."""

    def vjp(gradient: Any) -> Any:
        n, height, width, channels = images.shape
        padded = plain_numpy.zeros((n, height + 2, width + 2, channels), gradient.dtype)
        for k in range(9):
            i, j = divmod(k, 3)
            window = gradient[..., k * channels : (k + 1) * channels]
            padded[:, i : i + height : stride, j : j + width : stride] += window
        return padded[:, 1:-1, 1:-1]

    return vjp


defvjp(patches, patches_vjp, None)


@primitive
def squareplus(x: Any) -> Any:
    """Return (x + sqrt(x * x + 1 / 4)) / 2: close to max(x, 0), and smooth."""
    return (x + plain_numpy.sqrt(x * x + 0.25)) / 2


# With r the root: y = (x + r) / 2 and r = 2 y - x, so dy / dx = y / r.
defvjp(squareplus, lambda y, x: lambda gradient: gradient * y / (2 * y - x))


def logits(parameters: Any, images: Any) -> Any:
    """Return the scores of the 10 classes for images of shape (rows, 8, 8)."""
    k1, b1, k2, b2, w3, b3, w4, b4 = parameters
    x = squareplus(patches(images[..., None], 1) @ k1 + b1)
    x = squareplus(patches(x, 2) @ k2 + b2)
    x = squareplus(x.reshape(-1, w3.shape[0]) @ w3 + b3)
    return x @ w4 + b4


def loss(parameters: Any, images: Any, labels: Any, batch_size: int) -> Any:
    """Return (sum of the rows' cross-entropy with smoothed labels) / `batch_size`."""
    labels = (1 - SMOOTHING) * labels + SMOOTHING / labels.shape[1]
    scores = logits(parameters, images)
    scores = scores - numpy.max(scores, axis=1, keepdims=True)
    return numpy.sum(numpy.log(numpy.sum(numpy.exp(scores), axis=1)) - numpy.sum(labels * scores, axis=1)) / batch_size


value_and_grad = differentiate(loss)


if __name__ == "__main__":
    raise SystemExit("cnn.py has a model of train.py: python examples/train.py --model cnn")
