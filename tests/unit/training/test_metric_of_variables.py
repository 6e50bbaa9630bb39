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
