"""A small smooth network in float64 for tests of `Trainer`: its gradients by hand, its variables in a dict."""

from __future__ import annotations

from typing import Any

import numpy

import mpidist

HIDDEN = 5


def rows(count: int, seed: int = 0) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return inputs of 3 numbers and labels of 0 or 1, float64."""
    random = numpy.random.default_rng(seed)
    x = random.normal(size=(count, 3))
    return x, (x.sum(axis=1, keepdims=True) + random.normal(size=(count, 1)) > 0).astype("float64")


def predict(parameters: Any, x: Any) -> Any:
    """Return the probability of a 1."""
    hidden = numpy.tanh(x @ parameters["w1"] + parameters["b1"])
    return 1 / (1 + numpy.exp(-(hidden @ parameters["w2"])))


def value_and_grad(parameters: Any, x: Any, y: Any) -> Any:
    """Return the mean binary cross-entropy, the predictions, and the gradients."""
    hidden = numpy.tanh(x @ parameters["w1"] + parameters["b1"])
    p = 1 / (1 + numpy.exp(-(hidden @ parameters["w2"])))
    loss = -(y * numpy.log(p) + (1 - y) * numpy.log(1 - p)).mean()
    error = (p - y) / len(x)
    back = error @ parameters["w2"].T * (1 - hidden**2)
    return (loss, p), {"w1": x.T @ back, "b1": back.sum(axis=0), "w2": hidden.T @ error}


def loss(parameters: Any, x: Any, y: Any) -> float:
    """Return the mean binary cross-entropy."""
    p = predict(parameters, x)
    return -(y * numpy.log(p) + (1 - y) * numpy.log(1 - p)).mean()


def variables(strategy: Any, dtype: str = "float64") -> dict[str, Any]:
    """Return variables of the strategy, with the same values every time."""
    random = numpy.random.default_rng(7)
    shapes = {"w1": (3, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, 1)}
    with strategy.scope():
        return {name: mpidist.Variable(random.normal(0, 0.5, shape).astype(dtype)) for name, shape in shapes.items()}


def trainer(strategy: Any = None, optimizer: Any = None, **options: Any) -> mpidist.Trainer:
    """Return a trainer of it; by default on all ranks, by SGD with momentum."""
    strategy = strategy or mpidist.MirroredStrategy()
    optimizer = optimizer or mpidist.optimizers.SGD(0.5, momentum=0.9)
    options = {"metrics": ["accuracy", "auc"], "predict_fn": predict, **options}
    return mpidist.Trainer(value_and_grad, variables(strategy), optimizer, **options)


def values(of: mpidist.Trainer) -> numpy.ndarray:
    """Return all variables in one flat array."""
    return numpy.concatenate([variable.numpy().reshape(-1) for variable in of.variables])
