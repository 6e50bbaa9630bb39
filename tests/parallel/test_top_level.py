"""The functions of `mpidist` itself, over real MPI ranks."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.errors import CollectiveMismatchError, ObjectError

pytestmark = pytest.mark.mpi


@pytest.fixture
def comm():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def test_places_are_those_of_mpi(comm):
    from mpi4py import MPI

    machine = comm.Split_type(MPI.COMM_TYPE_SHARED)
    assert (mpidist.rank(), mpidist.size()) == (comm.rank, comm.size)
    assert (mpidist.local_rank(), mpidist.local_size()) == (machine.rank, machine.size)
    assert mpidist.node() == 0  # one machine
    machine.Free()


def test_places_are_the_same_inside_and_outside_of_a_strategy(comm):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        assert (mpidist.rank(), mpidist.size()) == (comm.rank, comm.size)
    assert strategy.run(lambda: (mpidist.rank(), mpidist.size())) == (comm.rank, comm.size)
    assert mpidist.rank() == mpidist.init().rank == comm.rank


def test_init_without_a_communicator_and_with_that_of_all_ranks_return_one_world(comm):
    world = mpidist.init()
    assert mpidist.init(comm) is world
    copy = comm.Dup()
    assert mpidist.init(copy) is world
    copy.Free()
    assert repr(world).startswith(f"<World: rank {comm.rank} of {comm.size}, 1 node x {comm.size} rank")


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 5_000_000])
def test_objects_of_all_sizes(comm, nbytes):
    mine = {"rank": comm.rank, "raw": bytes([comm.rank]) * (nbytes + comm.rank)}
    expected = [{"rank": rank, "raw": bytes([rank]) * (nbytes + rank)} for rank in range(comm.size)]
    assert mpidist.all_gather_object(mine) == expected
    for root in range(comm.size):
        assert mpidist.broadcast_object(mine, root_rank=root) == expected[root]


def test_objects_may_be_anything_that_can_be_pickled(comm):
    mine = [None, (1, "é"), numpy.float32, numpy.full((2, comm.rank), 1.5), ValueError("no"), comm.rank]
    for rank, found in enumerate(mpidist.all_gather_object(mine)):
        assert found[:3] == [None, (1, "é"), numpy.float32] and found[3].shape == (2, rank) and found[5] == rank
        assert isinstance(found[4], ValueError) and str(found[4]) == "no"


def test_an_object_that_cannot_be_pickled_is_an_error_on_all_ranks(comm):
    last = comm.size - 1
    for call in (mpidist.all_gather_object, lambda mine: mpidist.broadcast_object(mine, last)):
        with pytest.raises(ObjectError, match=rf"rank {comm.rank} of {comm.size}: .* object of rank {last} \("):
            call((lambda: 0) if comm.rank == last else 0)
    assert mpidist.all_gather_object(comm.rank) == list(range(comm.size))


def test_calls_that_differ_are_told_so(comm):
    if comm.size == 1:
        mpidist.barrier()
        return
    with pytest.raises(CollectiveMismatchError, match="barrier"):
        mpidist.barrier() if comm.rank else mpidist.broadcast_object(0)
    mpidist.barrier()


def test_top_level_calls_and_those_of_a_strategy_take_turns(comm):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    total = comm.size * (comm.size - 1) // 2
    for step in range(20):
        assert strategy.reduce("sum", numpy.array(comm.rank), axis=None) == total
        assert mpidist.all_gather_object(step) == [step] * comm.size
        mpidist.barrier()


@pytest.mark.parametrize("call", [mpidist.all_reduce, mpidist.broadcast])
def test_a_rank_without_arrays_is_told_so_and_its_next_call_is_not_taken_for_this_one(comm, call):
    if comm.size == 1:
        assert call([]) == []
        return
    others, none = f"ranks? {', '.join(map(str, range(comm.size - 1)))}", f"rank {comm.size - 1}"
    text = f"({none} passed 0 tensors .*, {others} passed 1|{none} called .* of no array, {others} called)"
    with pytest.raises(CollectiveMismatchError, match=text if comm.size != 2 else "0 tensors|of no array"):
        call([] if comm.rank == comm.size - 1 else [numpy.ones(3)])
    assert call([]) == []
    assert call([numpy.ones(3)])[0].tolist() == [1 if call is mpidist.broadcast else comm.size] * 3


@pytest.mark.parametrize("call", [mpidist.all_reduce, mpidist.broadcast])
def test_dicts_of_other_keys_are_told_so(comm, call):
    if comm.size == 1:
        pytest.skip("one rank differs from nobody")
    value = {"a": numpy.ones(3), "last" if comm.rank == comm.size - 1 else "b": numpy.ones(3)}
    with pytest.raises(CollectiveMismatchError, match=r"\['last'\].*\['b'\]"):
        call(value)
    assert call(dict(a=numpy.ones(3)))["a"].tolist() == [1 if call is mpidist.broadcast else comm.size] * 3
