"""A refused array is refused on every rank before a call begins, and the next call works."""

import numpy
import pytest

import mpidist
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


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("number", refused.NO_NUMBERS)
@pytest.mark.parametrize("call", [*refused.NUMBERED, *refused.OF_PEERS])
def test_what_is_no_whole_number_is_no_rank_and_no_axis(size, call, number):
    assert run_ranks(size, lambda: refused.number_problem(call, refused.NO_NUMBERS[number])) == [""] * size


@pytest.mark.parametrize("number", refused.ZEROS)
@pytest.mark.parametrize("call", refused.NUMBERED)
def test_whole_numbers_of_any_type_are_ranks_and_axes(call, number):
    def on_rank():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        expected, found = (refused.NUMBERED[call](strategy, each) for each in (0, refused.ZEROS[number]))
        return numpy.array_equal(found, expected)

    assert run_ranks(3, on_rank) == [True] * 3


@pytest.mark.parametrize("number", refused.ZEROS)
def test_whole_numbers_of_any_type_are_peers(number):
    zero = refused.ZEROS[number]
    steps = [lambda: mpidist.send(numpy.ones(3), zero + 1), lambda: mpidist.receive(zero)]
    steps += [lambda: mpidist.send_init(numpy.ones(3), zero + 1)(numpy.ones(3) * 2)]
    steps += [lambda: mpidist.receive_init(numpy.ones(3), zero)()]

    def on_rank():
        return [None if found is None else found.tolist() for found in (each() for each in steps[mpidist.rank() :: 2])]

    assert run_ranks(2, on_rank) == [[None] * 2, [[1.0] * 3, [2.0] * 3]]


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
