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


_ROW = numpy.ones(2)
_NO_TIMEOUTS = {"nan": float("nan"), "below": -1, "inf": float("inf"), "text": "2", "truth": True, "bool_": numpy.True_}
_TIMED = {
    "options": lambda seconds: mpidist.CommunicationOptions(timeout_seconds=seconds),
    "all_reduce": lambda seconds: mpidist.all_reduce(_ROW, timeout_seconds=seconds),
    "all_reduce of none": lambda seconds: mpidist.all_reduce([], timeout_seconds=seconds),
    "all_reduce_init": lambda seconds: mpidist.all_reduce_init(_ROW, timeout_seconds=seconds)(_ROW),
    "all_reduce_init, started": lambda seconds: mpidist.all_reduce_init(_ROW, timeout_seconds=seconds).start(_ROW),
    "broadcast_init, started": lambda seconds: mpidist.broadcast_init([_ROW] * 2, timeout_seconds=seconds).start(
        [_ROW] * 2
    ),
    "all_gather": lambda seconds: mpidist.all_gather(_ROW, timeout_seconds=seconds),
    "gather": lambda seconds: mpidist.gather(_ROW, timeout_seconds=seconds),
    "reduce_scatter": lambda seconds: mpidist.reduce_scatter(numpy.ones(6), timeout_seconds=seconds),
    "broadcast": lambda seconds: mpidist.broadcast(_ROW, timeout_seconds=seconds),
    "all_to_all": lambda seconds: mpidist.all_to_all(numpy.ones(6), timeout_seconds=seconds),
    "send": lambda seconds: mpidist.send(_ROW, 1 - mpidist.rank(), timeout_seconds=seconds),
    "receive": lambda seconds: mpidist.receive(1 - mpidist.rank(), timeout_seconds=seconds),
    "barrier": mpidist.barrier,
    "broadcast_object": lambda seconds: mpidist.broadcast_object(1, timeout_seconds=seconds),
    "all_gather_object": lambda seconds: mpidist.all_gather_object(1, timeout_seconds=seconds),
    "in memory": lambda seconds: world_communicator().all_reduce(_ROW.copy(), timeout_seconds=seconds),
    "run_ranks": lambda seconds: run_ranks(1, lambda: None, timeout_seconds=seconds),
}


@pytest.mark.parametrize("number", _NO_TIMEOUTS)
@pytest.mark.parametrize("call", _TIMED)
def test_what_is_no_time_is_no_deadline(call, number):
    seconds = _NO_TIMEOUTS[number]
    kind = ValueError if number in ("nan", "below", "inf") else TypeError

    def on_rank():
        with pytest.raises(kind, match=rf"timeout_seconds must be .*0 \(never\) or more.*, got {seconds!r}$"):
            _TIMED[call](seconds)
        return mpidist.all_reduce(_ROW).tolist()

    assert run_ranks(2, on_rank) == [[2.0] * 2] * 2


@pytest.mark.parametrize("seconds", [None, 0, 30, 0.5e3, numpy.float32(30), numpy.int64(30)])
def test_times_of_any_type_are_deadlines(seconds):
    assert run_ranks(2, lambda: mpidist.all_reduce(_ROW, timeout_seconds=seconds).tolist()) == [[2.0] * 2] * 2
