"""Reductions of adapters over the replicas of a strategy that reduces in a way of its own."""

import numpy
import pytest

import mpidist
from mpidist.compression import BFloat16, Float16
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
        for length in [*range(1, 400), 5, 399]:
            values = numpy.full(length, 1.0 + replicas.rank)
            replicas.reduce("sum", [values])
            assert values.tolist() == [3.0] * length
        return len(replicas.communicator.bindings)

    kept, others = run_ranks(2, on_rank)
    assert kept == others <= 256  # a plan counts for a quarter of a MiB, and 64 MiB are kept


def test_a_coded_list_and_a_plain_one_are_told_apart():
    def on_rank():
        replicas = replicas_in_force()
        results = []
        for stage in (Float16(), None, BFloat16(), Float16()):
            values = numpy.full(3, 1.0 + 2.0**-9)  # which bfloat16 rounds to 1
            replicas.reduce("sum", [values], "w", stage)
            results.append(values[0])
        return results

    exact = 2 + 2.0**-8
    assert run_ranks(2, on_rank) == [[exact, exact, 2.0, exact]] * 2


@pytest.mark.parametrize("values", [numpy.arange(3), numpy.zeros(0)], ids=["of whole numbers", "without values"])
def test_an_array_that_is_not_coded_is_reduced_as_it_is(values):
    def on_rank():
        mine = values.copy()
        replicas_in_force().reduce("sum", [mine], "w", BFloat16())
        return mine.tolist()

    assert run_ranks(2, on_rank) == [(2 * values).tolist()] * 2
