"""Reductions of adapters over the replicas of a strategy that reduces in a way of its own."""

import numpy
import pytest

import mpidist
from mpidist.frameworks.replicas import replicas_in_force
from mpidist.testing import run_ranks


class Halves(mpidist.CrossDeviceOps):
    """A user's own way of reducing."""

    def reduce_implementation(self, reduce_op, value, destinations, options):
        return value / 2

    def batch_reduce_implementation(self, reduce_op, pairs, options):
        return [value / 2 for value, _ in pairs]


def test_one_that_is_under_way_is_not_started_again_since_callers_put_values_in_one_place():
    def on_rank():
        strategy = mpidist.MirroredStrategy(cross_device_ops=Halves())

        def step():
            values = [numpy.full(2, 8.0)]
            bound = replicas_in_force().bind(values, "sum", ["w"])
            handle = bound.start(values)
            with pytest.raises(RuntimeError, match="under way"):
                bound.start(values)
            found = [handle.wait()[0][0], bound.start(values).wait()[0][0]]
            bound.start(values)  # is dropped
            return [*found, bound.start(values).wait()[0][0]]

        return strategy.run(step)

    assert run_ranks(2, on_rank) == [[4.0] * 3] * 2


def test_of_ever_new_lengths_little_is_kept_and_all_are_right():
    def on_rank():
        replicas = replicas_in_force()
        for length in [*range(1, 200), 5, 199]:
            values = numpy.full(length, 1.0 + replicas.rank)
            replicas.reduce("sum", [values])
            assert values.tolist() == [3.0] * length
        return len(replicas._bound)

    assert run_ranks(2, on_rank) == [64, 64]
