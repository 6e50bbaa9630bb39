"""The network of `softplus_net` as a model function, and what one process makes of it, by hand, for tests."""

from __future__ import annotations

from typing import Any

import numpy

import mpidist
from mpidist import estimator
from tests.unit.training import softplus_net as net

RATE, MOMENTUM = 0.5, 0.9
#: How many rows there are: no number of ranks cuts them evenly.
ROWS = 29
X, Y = net.rows(ROWS)


def model_fn(features: Any, labels: Any, mode: str) -> estimator.EstimatorSpec:
    """Return the network, trained by SGD with momentum."""
    shapes = {name: array.shape for name, array in initial().items()}
    assert features is None or features.shape[1:] == (shapes["w1"][0],)
    variables = {name: mpidist.Variable(array, name=name) for name, array in initial().items()}
    train_op = None
    if mode == estimator.ModeKeys.TRAIN:
        train_op = estimator.TrainOp(mpidist.optimizers.SGD(RATE, momentum=MOMENTUM), net.value_and_grad)
    metrics = {"accuracy": "accuracy", "squared": lambda labels, predictions: (labels - predictions) ** 2}
    return estimator.EstimatorSpec(mode, net.predict, net.loss, train_op, metrics, variables=variables)


def initial() -> dict[str, numpy.ndarray]:
    """Return what the variables begin with."""
    random = numpy.random.default_rng(7)
    shapes = {"w1": (3, net.HIDDEN), "b1": (net.HIDDEN,), "w2": (net.HIDDEN, 1)}
    return {name: random.normal(0, 0.5, shape) for name, shape in shapes.items()}


def by_hand(global_batches: list[slice]) -> dict[str, numpy.ndarray]:
    """Return the variables after a step on each of these rows, in one process, without mpidist."""
    values = initial()
    velocity = {name: numpy.zeros_like(array) for name, array in values.items()}
    for rows in global_batches:
        _, gradients = net.value_and_grad(values, X[rows], Y[rows])
        for name, gradient in gradients.items():
            velocity[name] = MOMENTUM * velocity[name] - RATE * gradient
            values[name] = values[name] + velocity[name]
    return values


def cut(size: int, first: int = 0) -> list[slice]:
    """Return the rows from `first` on in global batches of a size."""
    return [slice(start, min(start + size, ROWS)) for start in range(first, ROWS, size)]


def input_fn_of(batch_size: int, repeats: bool = False) -> Any:
    """Return an input function with batches for a replica; a worker of several deals the rows out."""

    def input_fn(input_context: mpidist.InputContext) -> Any:
        rows = mpidist.data.Dataset.from_arrays((X, Y))
        rows = rows.repeat() if repeats else rows
        return rows.shard(input_context.num_input_pipelines, input_context.input_pipeline_id).batch(batch_size)

    return input_fn


def of(folder: Any, strategy: Any = None, **settings: Any) -> estimator.Estimator:
    """Return an estimator of the network."""
    config = estimator.RunConfig(train_distribute=strategy, eval_distribute=strategy, **settings)
    return estimator.Estimator(model_fn, folder, config)


def values(of: estimator.Estimator) -> dict[str, numpy.ndarray]:
    """Return the variables in the newest checkpoint."""
    return {name: of.get_variable_value(name) for name in initial()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that variables are equal, to the rounding of float64."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        numpy.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-13, err_msg=name)
