"""On real ranks: a refused array is refused on every rank before a call begins, and the next call works."""

import numpy
import pytest

import mpidist
from mpidist.world import world_communicator
from tests.helpers import refused

pytestmark = pytest.mark.mpi

SUMS = [(call, array) for call in refused.SUMS for array in {**refused.OBJECTS, **refused.NOT_SUMMED}]
MOVES = [(call, array) for call in refused.MOVES for array in refused.OBJECTS]


def _agree(problem):
    problems = world_communicator().exchange(problem.encode())
    assert not any(problems), problems


@pytest.mark.parametrize(("call", "array"), SUMS + MOVES)
def test_what_cannot_be_moved_or_summed_is_refused(call, array):
    make = {**refused.OBJECTS, **refused.NOT_SUMMED}[array]
    _agree(refused.problem({**refused.MOVES, **refused.SUMS}[call], make))


@pytest.mark.parametrize("number", refused.NO_NUMBERS)
@pytest.mark.parametrize("call", [*refused.NUMBERED, *refused.OF_PEERS])
def test_what_is_no_whole_number_is_no_rank_and_no_axis(call, number):
    _agree(refused.number_problem(call, refused.NO_NUMBERS[number]))


@pytest.mark.parametrize("number", refused.ZEROS)
@pytest.mark.parametrize("call", refused.NUMBERED)
def test_whole_numbers_of_any_type_are_ranks_and_axes(call, number):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    expected, found = (refused.NUMBERED[call](strategy, each) for each in (0, refused.ZEROS[number]))
    _agree("" if numpy.array_equal(found, expected) else f"{found} is not {expected}")


@pytest.mark.parametrize("call", [*refused.MOVES, *refused.SUMS])
def test_a_mask_is_not_lost(call):
    _agree(refused.problem({**refused.MOVES, **refused.SUMS}[call], refused.masked))


@pytest.mark.parametrize("kind", [numpy.matrix, numpy.recarray, numpy.ma.MaskedArray])
@pytest.mark.parametrize("length", [3, 400, 1500])
def test_arrays_of_a_subclass_are_summed_as_plain_ones(kind, length):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    size, rank = strategy.num_replicas_in_sync, strategy.extended.replica_id
    value = numpy.full((length, length), rank + 1.0).view(kind)
    total = strategy.reduce("sum", value, axis=None)
    in_place = value.copy()
    world_communicator().all_reduce(in_place)
    gathered = strategy.gather(value, 0)
    expected = size * (size + 1) / 2
    right = [
        type(total) is numpy.ndarray and total.shape == (length, length) and (total == expected).all(),
        type(in_place) is kind and (in_place == expected).all(),
        type(gathered) is numpy.ndarray and (gathered[::length, 0] == numpy.arange(1, size + 1)).all(),
    ]
    _agree("" if all(right) else str(right))
