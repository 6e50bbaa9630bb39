"""Metrics of one's own on N ranks: what they add counts as in one process, also means of uneven parts."""

from __future__ import annotations

import importlib.util

import numpy
import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)

import keras

from tests.frameworks.keras_models import X, Y, assert_histories, compiled, distributed, pair, ranks, sequential

pytestmark = pytest.mark.mpi(min_size=2)

ops = keras.ops


def distance(y, outputs):
    return ops.mean(ops.abs(ops.subtract(y, outputs)))


def distances(y, outputs):
    return ops.sum(ops.abs(ops.subtract(y, outputs)))


class Adding(keras.metrics.Metric):
    """Adds a number for each batch, and counts batches or rows."""

    def __init__(self, fn=distance, counts=lambda y: 1, divides=True, dtype=None):
        super().__init__(name="own")
        self.fn, self.counts, self.divides = fn, counts, divides
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count", dtype=dtype)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(self.fn(y_true, y_pred))
        self.count.assign_add(self.counts(y_true))

    def result(self):
        return self.total / ops.cast(self.count, "float32") if self.divides else self.total + 0.0


class OwnMean(keras.metrics.Mean):
    def update_state(self, values, sample_weight=None):
        super().update_state(values, sample_weight)


class Told(keras.Model):
    """Gives its loss to a metric."""

    def __init__(self, *args, kind, **kwargs):
        super().__init__(*args, **kwargs)
        self.own = kind(name="own")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        self.own.update_state(loss)
        return loss


def with_metric(metric):
    return lambda model: model.compile("sgd", "mse", metrics=[metric()])


def train(model):
    """Batches of 20, 20 and 5 rows, of 7, of 1, and with a rank of fewer rows."""
    found = model.fit(X, Y, batch_size=20, epochs=2, verbose=0, shuffle=False)
    found.history["few"] = [model.evaluate(X[:23], Y[:23], batch_size=size, verbose=0)[-1] for size in (7, 1)]
    found.history["batch"] = [model.train_on_batch(X[:rows], Y[:rows])[-1] for rows in (ranks() + 1, 1)]
    return found


@pytest.mark.parametrize("metric", [
    lambda: Adding(),
    lambda: Adding(divides=False),
    lambda: Adding(distances, len),
    lambda: Adding(distances, len, dtype="int32"),
    lambda: Adding(lambda y, outputs: ops.mean(ops.cast(ops.greater(y, 0.9), "float32"))),  # zeros in the first rows
])  # fmt: skip
def test_sums_and_means(metric):
    (_, expected), (_, found) = pair(sequential, with_metric(metric))(train)
    assert_histories(expected, found)


@pytest.mark.parametrize("kind", [keras.metrics.Mean, OwnMean])
def test_a_loss_that_is_given_to_a_metric(kind):
    def make():
        inputs = keras.Input((3,))
        return Told(inputs, keras.layers.Dense(1)(inputs), kind=kind)

    (_, expected), (_, found) = pair(make, compiled(metrics=[]))(
        lambda model: model.fit(X, Y, batch_size=20, epochs=2, verbose=0, shuffle=False)
    )
    assert "own" in found.history
    assert_histories(expected, found)


class OwnSum(keras.metrics.Sum):
    def update_state(self, values, sample_weight=None):
        super().update_state(values, sample_weight)


class Counted(Adding):
    def update_state(self, number):
        self.total.assign_add(ops.sum(number))
        self.count.assign_add(1)


class Errors(keras.Model):
    """Gives a sum over rows to a metric: one number, or those of the rows."""

    def __init__(self, *args, make_number, make_metric, **kwargs):
        super().__init__(*args, **kwargs)
        self.errors, self.make_number = make_metric(), make_number

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.errors.update_state(self.make_number(ops.abs(y - y_pred)))
        return super().compute_loss(x, y, y_pred, sample_weight, training)


def errors(make_number, make_metric):
    def make():
        inputs = keras.Input((3,))
        outputs = keras.layers.Dense(1)(inputs)
        return Errors(inputs, outputs, make_number=make_number, make_metric=make_metric)

    return make


@pytest.mark.parametrize("metric", [keras.metrics.Sum, OwnSum, Counted])
def test_a_sum_of_the_values_of_rows(metric):
    (_, expected), (_, found) = pair(errors(lambda values: values, metric), compiled(metrics=[]))(
        lambda model: model.fit(X, Y, batch_size=20, epochs=2, verbose=0, shuffle=False)
    )
    assert_histories(expected, found)


@pytest.mark.parametrize("make_number", [ops.sum, ops.mean])
@pytest.mark.parametrize("metric", [keras.metrics.Sum, OwnSum, Counted])
def test_a_sum_of_one_number(make_number, metric):
    model = distributed(errors(make_number, metric), compiled(metrics=[]))
    with pytest.raises(NotImplementedError, match=rf"a {metric.__name__}, is given one number.*Give it the values of"):
        model.fit(X, Y, batch_size=20, verbose=0)


@pytest.mark.parametrize("metric, message", [
    (lambda: Adding(lambda y, outputs: ops.max(y)), "'own/total' what is neither a sum nor a mean over the rows"),
    (lambda: Adding(lambda y, outputs: ops.std(y)), "'own/total' what is neither a sum nor a mean over the rows"),
    (lambda: Adding(lambda y, outputs: ops.exp(distance(y, outputs))), "'own/total' what is neither"),
    (lambda: Adding(dtype="int32"), "'own/count' a number that does not grow with the rows.*which int32"),
    (lambda: Adding(lambda y, outputs: ops.mean(ops.reshape(y, (10, 1)))), "'own' fails for other numbers of rows"),
])  # fmt: skip
@pytest.mark.parametrize("call", ["fit", "evaluate", "train_on_batch"])
def test_what_parts_do_not_add_up_to(metric, message, call):
    model = distributed(sequential, with_metric(metric))
    x = X[: 10 * ranks()] if ranks() < 5 else numpy.tile(X, (ranks(), 1))[: 10 * ranks()]
    settings = {} if call.endswith("batch") else {"verbose": 0, "batch_size": len(x)}
    with pytest.raises(NotImplementedError, match=message):
        getattr(model, call)(x, numpy.tanh(x.sum(axis=1, keepdims=True)), **settings)


class Counting(Adding):
    """Counts its updates, those that are tried as well."""

    updates = 0

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.updates += 1
        super().update_state(y_true, y_pred, sample_weight)


def late(make_number):
    """Return a function of rows that is 0 for the first batches, which have no labels above 0."""
    return lambda y, outputs: make_number(ops.cast(ops.greater(y, 0.0), "float32"))


#: Batches of 6 rows, of which the last third has labels above 0: in every rank's rows.
LATE_X = numpy.random.default_rng(2).normal(size=(6 * 30, 3)).astype("f4")
LATE_Y = numpy.where(numpy.arange(6 * 30) >= 6 * 20, numpy.arange(6 * 30) % 2 + 0.5, -1.0).astype("f4")[:, None]


@pytest.mark.parametrize("fn, counts", [(distances, len), (distance, lambda y: 1)])
def test_few_updates_are_tried(fn, counts):
    metric = Counting(fn, counts)
    model = distributed(sequential, with_metric(lambda: metric))
    for _ in range(3):
        model.fit(numpy.tile(X[:12], (40, 1)), numpy.tile(Y[:12], (40, 1)), batch_size=12, verbose=0)
    assert metric.updates < 120 + 12 * 12  # on JAX it is traced


@pytest.mark.parametrize("make_number", [ops.sum, ops.mean])
def test_what_is_added_late(make_number):
    metric = with_metric(lambda: Adding(late(make_number), divides=False))
    (_, expected), (_, found) = pair(sequential, metric)(
        lambda model: model.fit(LATE_X, LATE_Y, batch_size=6, verbose=0, shuffle=False)
    )
    assert expected.history["own"][0] > 0
    assert_histories(expected, found)


def test_what_is_added_late_and_does_not_add_up():
    mixed = LATE_Y * numpy.linspace(1, 2, len(LATE_Y), dtype="f4")[:, None]
    own = lambda y, outputs: ops.max(ops.maximum(y, 0.0))  # noqa: E731
    model = distributed(sequential, with_metric(lambda: Adding(own)))
    with pytest.raises(NotImplementedError, match="'own/total' what is neither a sum nor a mean over the rows"):
        model.fit(LATE_X, mixed, batch_size=6, verbose=0, shuffle=False)
