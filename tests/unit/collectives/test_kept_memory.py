"""Memory of results: who holds a part of it has it for himself; what nobody holds is used again, and bounded."""

import gc
import tracemalloc
from weakref import ref

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.collectives.exchange.node_exchange import memory_of_results
from mpidist.collectives.kept_memory import KeptMemory, Owners
from mpidist.testing import run_ranks
from mpidist.world import world_communicator

BYTES = numpy.dtype("u1")


def _kept(memory):
    return [each.nbytes for each in memory._kept]


HOLDS = {
    "itself": lambda array: array,
    "element": lambda array: array[1:2],
    "other dtype": lambda array: array.view("i2")[::3],
    "subclass": lambda array: array.view(numpy.matrix)[0].view(numpy.ndarray),
    "memoryview": memoryview,
    "buffer": lambda array: numpy.frombuffer(memoryview(array).cast("B"), "u1"),
    "dlpack": numpy.from_dlpack,
    "what lies behind it": lambda array: array.base,
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_memory_is_written_again_when_nobody_holds_any_of_it(hold):
    memory = KeptMemory(3)
    first = memory.array((4, 5), numpy.dtype("f4"))
    place, held = first.ctypes.data, hold(first)
    del first
    other = memory.array((4, 5), numpy.dtype("f4"))
    assert other.ctypes.data != place
    del held
    again = memory.array((20,), numpy.dtype("f4"))
    assert again.ctypes.data == place and again.flags.writeable and not place % 64


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(-6, 6)), max_size=60))
def test_no_two_holders_have_the_same_memory_and_what_is_kept_is_bounded(steps):
    memory, held = KeptMemory(2, room_bytes=5000, least_bytes=100), []
    for number, (nbytes, holds) in enumerate(steps):
        array = memory.array((nbytes,), BYTES)
        array[...] = number % 251
        held.append((array, number % 251))
        del array
        del held[: max(0, len(held) - abs(holds))]
        assert all((each == value).all() for each, value in held)
        assert sum(_kept(memory)) <= max(5000, 2 * max(_kept(memory), default=0) + 2)
        assert all(each >= 100 for each in _kept(memory))


def test_of_one_size_so_many_are_kept_the_latest():
    for times in (2, 3):
        for nbytes in (0, 1, 1 << 16):
            memory = KeptMemory(times)
            held = [memory.array((nbytes,), BYTES) for _ in range(9)]
            places = [each.ctypes.data for each in held]
            assert len(memory._kept) == times
            del held
            again = [memory.array((nbytes,), BYTES) for _ in range(times)]
            assert {each.ctypes.data for each in again} == set(places[-times:])


def test_memory_serves_arrays_of_half_its_size_and_more_the_shortest_that_fits():
    memory = KeptMemory(9)
    held = [memory.array((nbytes,), BYTES) for nbytes in (4000, 2600, 1000)]
    places = [each.ctypes.data for each in held]
    del held
    for nbytes, place in ((4000, 0), (2600, 1), (1301, 1), (2000, 1), (1300, 1), (2601, 0), (900, 2), (500, 2)):
        assert memory.array((nbytes,), BYTES).ctypes.data == places[place]
    assert sorted(_kept(memory)) == [1000, 2600, 4000]
    memory.array((499,), BYTES)
    assert sorted(_kept(memory)) == [499, 1000, 2600, 4000]


def test_what_is_not_used_for_long_is_dropped():
    memory = memory_of_results()
    memory.array((1 << 20,), BYTES)
    for _ in range(512):
        memory.array((1 << 18,), BYTES)
    assert _kept(memory) == [1 << 18]


def test_owners_of_several_arrays_are_held_by_a_view_of_any():
    arrays = [numpy.empty(3), numpy.empty(4)]
    made = Owners(tuple(arrays), 56)
    del arrays
    memory = KeptMemory(3)
    assert memory.keep(made) is memory.take(56) is made
    held = made.references.args[0][1][2:]
    assert memory.take(56) is None
    del held
    assert memory.take(56) is made


def test_what_is_freed_is_gone_and_a_holder_keeps_his():
    memory = KeptMemory(3)
    array = memory.array((8,), numpy.dtype("f8"))
    array[...] = 7
    known = [ref(each) for each in memory._kept]
    memory.free()
    assert known[0]() is None and not memory._kept
    assert memory.array((8,), numpy.dtype("f8")) is not array and (array == 7).all()


VERBS = {
    "all_gather": lambda replica, array: replica.all_gather(array, axis=0),
    "broadcast": lambda replica, array: replica.broadcast(array),
    "reduce_scatter": lambda replica, array: replica.reduce_scatter("sum", array),
}


@pytest.mark.parametrize("move", VERBS.values(), ids=VERBS)
def test_memory_of_moved_arrays_goes_with_the_strategy(move):
    length = 1 << 20

    def on_rank():
        communicator = world_communicator()
        strategy = mpidist.MirroredStrategy()
        strategy.run(lambda: (move(mpidist.get_replica_context(), numpy.ones(length)), None)[1])
        communicator.barrier()
        before = tracemalloc.get_traced_memory()[0]
        communicator.barrier()
        del strategy
        communicator.barrier()
        gc.collect()
        communicator.barrier()
        return before, tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        found = run_ranks(2, on_rank)
    finally:
        tracemalloc.stop()
    for before, after in found:
        assert before > 4 * length and after < 4 * length
