"""Tensors that do not lie in memory in the order of their axes, or have gaps."""

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.collectives.engine import Engine
from mpidist.collectives.reductions.intake import Sources
from mpidist.testing import run_ranks
from mpidist.world import world_communicator


def _ordered(shape, order, rank):
    """An array of this shape whose axes lie in memory in `order`."""
    values = numpy.arange(numpy.prod(shape), dtype="f4").reshape(shape) * (rank + 1)
    return numpy.ascontiguousarray(values.transpose(order)).transpose(numpy.argsort(order))


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(4)), st.tuples(*[st.integers(1, 4)] * 4))
def test_what_is_in_the_order_of_memory_is_not_copied(order, shape):
    tensor = _ordered(shape, order, 0)
    (found,) = Sources([tensor]).in_order([tensor])
    assert found.flags.c_contiguous
    assert numpy.shares_memory(found, tensor)


def test_what_has_gaps_is_copied():
    tensor = numpy.arange(20.0).reshape(4, 5)[:, ::2]
    sources = Sources([tensor])
    (found,) = sources.in_order([tensor])
    assert found.flags.c_contiguous and not numpy.shares_memory(found, tensor)
    numpy.testing.assert_array_equal(found, tensor)


@pytest.mark.parametrize("count", [6, 60000])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_transposed_and_sliced_tensors(size, count):
    def run():
        fused, rank = Engine(world_communicator()), world_communicator().rank
        base = numpy.arange(2 * count, dtype="f4").reshape(2, count) * (rank + 1)
        lists = [[base.T, base[:, ::3], base], [base, base.T, base[:, 1::2]]]
        return [[array.copy() for array in fused(tensors)] for tensors in lists * 2]

    factor = size * (size + 1) // 2
    base = numpy.arange(2 * count, dtype="f4").reshape(2, count) * factor
    for results in run_ranks(size, run):
        for (first, second, third), (fourth, fifth, sixth) in (results[:2], results[2:]):
            for got, expected in ((first, base.T), (second, base[:, ::3]), (third, base)):
                numpy.testing.assert_array_equal(got, expected)
            for got, expected in ((fourth, base), (fifth, base.T), (sixth, base[:, 1::2])):
                numpy.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("count", [10, 4000])
def test_ranks_whose_tensors_lie_differently_agree_on_the_order_of_axes(count):
    def run():
        fused, rank = Engine(world_communicator()), world_communicator().rank
        results = []
        for step in range(4):
            values = numpy.arange(2 * count, dtype="f4").reshape(2, count) * (rank + 1 + step)
            late = step == 3  # then they swap roles
            results.append(fused([numpy.asfortranarray(values) if (rank == 1) != late else values])[0].copy())
        return results

    for results in run_ranks(2, run):
        for step, result in enumerate(results):
            expected = numpy.arange(2 * count, dtype="f4").reshape(2, count) * (3 + 2 * step)
            numpy.testing.assert_array_equal(result, expected)
