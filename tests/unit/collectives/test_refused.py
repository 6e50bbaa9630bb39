"""A refused array is refused on every rank before a call begins, and the next call works."""

import numpy
import pytest

from mpidist.testing import run_ranks
from mpidist.world import world_communicator
from tests.helpers import refused

SIZES = [1, 2, 3]


def _check(size, call, make):
    assert run_ranks(size, lambda: refused.problem(call, make)) == [""] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("array", [*refused.OBJECTS, "masked"])
@pytest.mark.parametrize("call", [*refused.MOVES, *refused.SUMS])
def test_what_cannot_be_moved_is_refused_by_every_call(size, call, array):
    _check(size, {**refused.MOVES, **refused.SUMS}[call], {**refused.OBJECTS, "masked": refused.masked}[array])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("array", refused.NOT_SUMMED)
@pytest.mark.parametrize("call", refused.SUMS)
def test_what_cannot_be_summed_is_refused_by_every_sum(size, call, array):
    _check(size, refused.SUMS[call], refused.NOT_SUMMED[array])


@pytest.mark.parametrize("array", [*refused.OBJECTS, *refused.NOT_SUMMED])
def test_there_are_no_gradient_buffers_of_such_arrays(array):
    _check(2, refused.gradient_buffers, {**refused.OBJECTS, **refused.NOT_SUMMED}[array])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("array", refused.NOT_SUMMED)
def test_what_is_not_summed_is_moved(size, array):
    value = refused.NOT_SUMMED[array]()

    def step():
        communicator = world_communicator()
        own = value if communicator.rank == 0 else numpy.zeros_like(value)
        gathered = communicator.all_gather(own)
        communicator.broadcast(own)
        return gathered.dtype == value.dtype, gathered.tolist(), own.tolist()

    zeros = numpy.zeros_like(value).tolist()
    for result in run_ranks(size, step):
        assert result == (True, value.tolist() + zeros * (size - 1), value.tolist())
