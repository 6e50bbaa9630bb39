"""Metrics of other libraries, by duck type: their variables are added up over the ranks."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.testing import run_ranks
from mpidist.training.metrics import get


class Variable:
    def __init__(self, shape=(), aggregation="sum"):
        self.shape, self.aggregation, self.value = shape, aggregation, numpy.zeros(shape, "f4")

    def numpy(self):
        return self.value

    def assign(self, value):
        self.value = numpy.asarray(value, "f4")


class LargestClass:
    """Which class most labels have: no mean of anything."""

    name = "largest"

    def __init__(self, *variables):
        self.variables = list(variables)

    def reset_state(self):
        for each in self.variables:
            each.assign(numpy.zeros(each.shape))

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.variables[0].assign(self.variables[0].value + numpy.bincount(y_true, minlength=3))

    def result(self):
        return self.variables[0].value.argmax()

    def __call__(self, *args):
        raise AssertionError("a metric is not called as a function of rows")


def test_a_number_is_no_rows():
    metric = get(LargestClass(Variable((3,))))
    with pytest.raises(TypeError, match="metric 'largest' takes rows: give it arrays"):
        metric.update_state(2, 2)
    metric.update_state(numpy.empty(0, int), numpy.empty(0, int))
    metric.update_state(y_true=numpy.array([2]), y_pred=numpy.array([2]))
    metric.update_state(y_true=numpy.empty(0, int), y_pred=numpy.empty(0, int))
    assert metric.state()["0"].tolist() == [0, 0, 1]


def test_the_result_is_that_of_all_rows():
    labels = [[0, 0, 1], [1, 1, 2], []]  # of each rank: 0, 1 and nothing are the most frequent ones

    def fn():
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            metric = get(LargestClass(Variable((3,))))
        rows = numpy.array(labels[strategy.extended.replica_id], int)
        found = []
        for _ in range(2):
            strategy.run(metric.update_state, (rows, rows))
            found.append((metric.result(), metric.state()["0"].tolist()))
        metric.reset_state()
        return [*found, metric.result(), metric.name]

    assert run_ranks(3, fn) == [[(1.0, [2, 3, 1]), (1.0, [4, 6, 2]), 0.0, "largest"]] * 3


@pytest.mark.parametrize("variables, message", [
    ([], "no variables before it has seen rows"),
    ([Variable(aggregation="mean")], "which is no sum"),
])  # fmt: skip
def test_what_is_not_known_over_all_ranks(variables, message):
    with pytest.raises(TypeError, match=message):
        get(LargestClass(*variables))


class MeanOfBatch:
    """What Keras' means do with numbers of one axis: all rows count as one."""

    name = "mean_of_batch"

    def __init__(self):
        self.variables = [Variable(), Variable()]

    def reset_state(self):
        for each in self.variables:
            each.assign(0)

    def update_state(self, y_true, y_pred, sample_weight=None):
        errors = ((numpy.asarray(y_true) - y_pred) ** 2).mean(axis=-1)
        for each, value in zip(self.variables, (errors.sum(), errors.size), strict=True):
            each.assign(each.value + value)

    def result(self):
        total, count = self.variables
        return total.value / count.value


def test_rows_that_do_not_add_up_are_refused():
    rows = numpy.arange(5.0)
    with pytest.raises(ValueError, match=r"'mean_of_batch' adds something else .* of shape \(rows, 1\)"):
        get(MeanOfBatch()).update_state(rows, 0 * rows)
    with pytest.raises(ValueError, match="one array of labels"):  # which it spreads over the predictions
        get(MeanOfBatch()).update_state((rows, rows), 0 * rows)
    metric = get(MeanOfBatch())
    for part in (rows[:1], rows[1:]):
        metric.update_state(part[:, None], 0 * part[:, None], sample_weight=None)
    assert metric.result() == 6
    with pytest.raises(ValueError, match="mean_of_batch"):  # after a row alone, of which nothing is known
        metric = get(MeanOfBatch())
        metric.update_state(rows[:1], rows[:1])
        metric.update_state(rows, 0 * rows)


def test_labels_in_a_tuple_without_rows_add_nothing():
    class OfTwo(MeanOfBatch):
        def update_state(self, y_true, y_pred, sample_weight=None):
            assert len(y_pred)
            super().update_state(y_true[1][:, None], y_pred[:, None])

    metric, rows = get(OfTwo()), numpy.arange(5.0)
    for part in (rows, rows[:0]):
        metric.update_state((None, part), 0 * part)
        metric.update_state({0: part, 1: part}, 0 * part)
    assert metric.result() == 6
