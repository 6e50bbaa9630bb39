"""TensorFlow's observed cases of `fit`, `evaluate`, `predict` and metrics, by `Trainer`."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

import mpidist
from mpidist import metrics
from mpidist.testing import run_ranks
from tests.oracle.cases import cases
from tests.oracle.deviations import DEVIATIONS
from tests.unit.oracle.table import assert_value

CASES = cases("keras_fit")


class Dense:
    """A layer of one unit with the mean squared error: what all cases of `fit` train."""

    def __init__(self, strategy: Any, kernel: Any, regularizer: float = 0.0) -> None:
        self.strategy, self.regularizer = strategy, regularizer
        with strategy.scope():
            self.kernel = mpidist.Variable(numpy.array(kernel, "float32").reshape(-1, 1))
            self.bias = mpidist.Variable(numpy.zeros(1, "float32"))

    def predict(self, parameters: Any, x: Any) -> Any:
        return x @ parameters[0] + parameters[1]

    def value_and_grad(self, parameters: Any, x: Any, y: Any) -> Any:
        kernel, _ = parameters
        error = self.predict(parameters, x) - y
        loss = (error**2).mean() + self.regularizer * (kernel**2).sum()
        gradient = 2 * x.T @ error / len(x) + 2 * self.regularizer * kernel
        return (loss, error + y), [gradient, 2 * error.mean(axis=0)]

    def trainer(self, learning_rate: float, metrics: Any = ("mae",)) -> mpidist.Trainer:
        optimizer = mpidist.optimizers.SGD(learning_rate)
        return mpidist.Trainer(
            self.value_and_grad, [self.kernel, self.bias], optimizer, metrics, predict_fn=self.predict
        )


def strategy_of(given: dict[str, Any]) -> Any:
    return mpidist.MirroredStrategy() if given.get("replicas") else mpidist.get_strategy()


def rows(given: dict[str, Any]) -> tuple[numpy.ndarray, numpy.ndarray]:
    count = given.get("rows")
    return numpy.array(given["x"], "float32")[:count], numpy.array(given["y"], "float32")[:count]


def fit(given: dict[str, Any], from_dataset: bool = False) -> dict[str, Any]:
    model = Dense(strategy_of(given), [given["kernel0"]] * 2)
    trainer, (x, y), batch = model.trainer(0.1), rows(given), given["batch"]
    if from_dataset:
        history = trainer.fit(mpidist.data.Dataset.from_arrays((x, y)).batch(batch), epochs=2)
    else:
        history = trainer.fit(x, y, batch_size=batch, epochs=2, shuffle=False)
    kernel, bias = model.kernel.numpy().ravel(), model.bias.numpy()
    return {"history": history.history, "kernel": kernel.tolist(), "bias": bias.tolist()}


def evaluate_and_predict(given: dict[str, Any]) -> dict[str, Any]:
    trainer, (x, y) = Dense(mpidist.MirroredStrategy(), [given["kernel0"]] * 2).trainer(0.1), rows(given)
    predicted = trainer.predict(x, batch_size=given["batch"])
    return {"evaluate": trainer.evaluate(x, y, batch_size=given["batch"]), "predict": predicted.tolist()}


def mean_metric(given: dict[str, Any]) -> dict[str, Any]:
    strategy = mpidist.MirroredStrategy()
    with strategy.scope():
        mean = metrics.Mean()
    for _ in range(2):
        value = strategy.extended.replica_id + 1.0
        strategy.run(lambda: mean.update_state([value, value]))  # noqa: B023 - run calls it at once
    result = mean.result()
    mean.reset_state()
    return {"result": result, "after_reset": mean.result()}


def model_outside_of_scope(given: dict[str, Any]) -> None:
    strategy = mpidist.MirroredStrategy()
    model = Dense(mpidist.get_strategy(), [0.1, 0.1])
    with strategy.scope():
        model.trainer(0.1)


def made_outside_of_scope(given: dict[str, Any]) -> dict[str, Any]:
    case = CASES["fit_batch4_n0"]["input"]
    model = Dense(mpidist.MirroredStrategy(), [case["kernel0"]] * 2)
    history = model.trainer(0.1).fit(*rows(case), batch_size=case["batch"], shuffle=False)
    return {"loss": history.history["loss"]}


def seed_example(given: dict[str, Any]) -> dict[str, Any]:
    trainer = Dense(mpidist.MirroredStrategy(), [0.5]).trainer(0.01, metrics=())
    ones = numpy.ones((100, 1), "float32")
    data = mpidist.data.Dataset.from_tensors((ones[0], ones[0])).repeat(100).batch(10)
    history = trainer.fit(data, epochs=2)
    return {"loss": history.history["loss"], "evaluate": trainer.evaluate(ones, ones, batch_size=10)}


def regularized(given: dict[str, Any]) -> dict[str, Any]:
    model = Dense(mpidist.MirroredStrategy(), [0.1, 0.1], regularizer=0.5)
    history = model.trainer(0.1, metrics=()).fit(*rows(given), batch_size=8, epochs=2, shuffle=False)
    return {"loss": history.history["loss"], "kernel": model.kernel.numpy().ravel().tolist()}


def moving_statistics(given: dict[str, Any]) -> dict[str, Any]:
    """Statistics of each replica's own rows, kept on reading by the first replica, moved by a half."""
    x = numpy.array(given["x"], "float32")
    strategy = mpidist.MirroredStrategy()
    kept = {"synchronization": "ON_READ", "aggregation": "ONLY_FIRST_REPLICA", "trainable": False}
    with strategy.scope():
        gamma = mpidist.Variable(numpy.ones(2, "float32"))
        mean = mpidist.Variable(numpy.zeros(2, "float32"), **kept)
        variance = mpidist.Variable(numpy.ones(2, "float32"), **kept)

    def value_and_grad(parameters: Any, batch: Any) -> Any:
        mean.assign((mean.value + batch.mean(axis=0)) / 2)
        variance.assign((variance.value + batch.var(axis=0)) / 2)
        return 0.0, [numpy.zeros(2, "float32"), None, None]

    trainer = mpidist.Trainer(value_and_grad, [gamma, mean, variance], mpidist.optimizers.SGD(0.1))
    trainer.fit(x, batch_size=8, shuffle=False)
    return {"moving_mean": mean.value.tolist(), "moving_var": variance.value.tolist()}


#: Id of a case -> how many ranks observe it, and what each observes.  Keras' error for uneven batches is a deviation:
#: what is expected then is what it gives without a strategy.
CHECKS = {
    "fit_batch4_n0": (1, fit),
    "fit_uneven_n0": (1, fit),
    "fit_dataset_n0": (1, lambda given: fit(given, from_dataset=True)),
    "fit_even_n1": (1, fit),
    "fit_uneven_n1": (1, fit),
    "fit_even_n2": (2, fit),
    "fit_uneven_n2": (2, fit),
    "fit_uneven_n4": (4, fit),
    "fit_dataset_n2": (2, lambda given: fit(given, from_dataset=True)),
    "evaluate_predict_n2": (2, evaluate_and_predict),
    "metric_mean_n2": (2, mean_metric),
    "metric_mean_n4": (4, mean_metric),
    "fit_compiled_outside_scope": (2, made_outside_of_scope),
    "fit_seed_example": (2, seed_example),
    "fit_l2_regularizer_n1": (1, regularized),
    "fit_l2_regularizer_n2": (2, regularized),
    "batchnorm_sync0_n1": (1, moving_statistics),
    "batchnorm_sync0_n2": (2, moving_statistics),
}
EXPECTED_OF = {"fit_uneven_n2": "fit_uneven_n0", "fit_uneven_n4": "fit_uneven_n0"}


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_trainer_does_what_was_observed(name):
    size, observe = CHECKS[name]
    expected = CASES[EXPECTED_OF.get(name, name)]["expected"]
    for observed in run_ranks(size, observe, CASES[name]["input"]):
        assert_close(observed, expected)


def assert_close(observed: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert observed.keys() == expected.keys()
        for key in expected:
            assert_close(observed[key], expected[key])
    else:
        numpy.testing.assert_allclose(observed, expected, rtol=1e-5, atol=1e-7)


def test_a_model_outside_of_the_scope_is_refused():
    with pytest.raises(ValueError, match="create the variables in that scope too"):
        run_ranks(2, model_outside_of_scope, {})


@pytest.mark.parametrize("reduction", ["none", "sum_over_batch_size"])
def test_losses_in_a_replica(reduction):
    """Keras' loss objects divide by the replicas; here the loss over the global batch is `compute_average_loss`."""
    expected = CASES[f"keras_loss_reduction_{reduction}"]["expected"]
    squares = numpy.arange(4, dtype="float32") ** 2

    def on_rank():
        strategy = mpidist.MirroredStrategy()
        if reduction == "none":
            return strategy.run(lambda: squares)
        return strategy.run(lambda: mpidist.compute_average_loss(squares, global_batch_size=8))

    for replica, observed in enumerate(run_ranks(2, on_rank)):
        assert_value(observed, expected[replica])


def test_every_case_is_checked_or_is_a_deviation():
    by_hand = {"keras_loss_reduction_none", "keras_loss_reduction_sum_over_batch_size", "fit_model_built_outside_scope"}
    assert CASES.keys() == CHECKS.keys() | by_hand
    assert EXPECTED_OF.keys() | {"fit_model_built_outside_scope"} <= DEVIATIONS.keys()
