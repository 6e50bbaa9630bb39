"""Collectives on Python objects, on ranks that are threads."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import numpy
import pytest

import mpidist
from mpidist.errors import CollectiveMismatchError, ObjectError, TransportTimeoutError
from mpidist.testing import run_ranks
from mpidist.world import world_communicator

SIZES = [1, 2, 3, 4]


class Local:
    """An object that can be pickled, and not be unpickled again."""

    def __reduce__(self):
        return (_fails, ("no such thing here",))


def _fails(text):
    raise LookupError(text)


class Stubborn:
    """An object that refuses to be pickled, by an error of its own class."""

    def __reduce__(self):
        raise ZeroDivisionError("not for sale")


#: Where ranks are: on one node they share memory, on several they send messages.
HOSTS = [lambda size: ["n1"] * size, lambda size: [f"n{rank % 2}" for rank in range(size)]]


@pytest.mark.parametrize("hosts", HOSTS, ids=["one node", "two nodes"])
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_the_objects_of_all_in_rank_order(size, hosts):
    def gathered():
        rank = mpidist.rank()
        return mpidist.all_gather_object({"rank": rank, "text": "é" * 1000 * rank, "array": numpy.arange(rank)})

    for found in run_ranks(size, gathered, hosts=hosts(size)):
        assert [each["rank"] for each in found] == list(range(size))
        assert [each["text"] for each in found] == ["é" * 1000 * rank for rank in range(size)]
        assert [each["array"].tolist() for each in found] == [list(range(rank)) for rank in range(size)]


@pytest.mark.parametrize("hosts", HOSTS, ids=["one node", "two nodes"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [0, 700, 20_000], ids="{} characters".format)
def test_every_rank_gets_the_object_of_the_root(size, hosts, length):
    def given():
        mine = (mpidist.rank(), "x" * length)
        return [mpidist.broadcast_object(mine, root) for root in range(size) for _ in range(3)]

    expected = [(root, "x" * length) for root in range(size) for _ in range(3)]
    assert run_ranks(size, given, hosts=hosts(size)) == [expected] * size


def test_only_the_root_must_have_an_object_that_can_be_pickled():
    def given():
        return mpidist.broadcast_object("fine" if mpidist.rank() == 1 else Stubborn(), root_rank=1)

    assert run_ranks(3, given) == ["fine"] * 3


def test_the_root_has_its_own_object_and_gathered_ones_are_copies():
    def own():
        mine = [1, 2]
        return mpidist.broadcast_object(mine, mpidist.size() - 1) is mine, mpidist.all_gather_object(mine)[0] is mine

    assert run_ranks(2, own) == [(False, False), (True, False)]
    assert run_ranks(1, own) == [(True, False)]


@pytest.mark.parametrize("hosts", HOSTS, ids=["one node", "two nodes"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bad", [Stubborn(), lambda: None, (n for n in "x")], ids=["class", "lambda", "generator"])
def test_an_object_that_cannot_be_pickled_is_an_error_on_all_ranks_which_go_on_together(size, bad, hosts):
    def refused():
        rank, problems = mpidist.rank(), []
        for call in (mpidist.all_gather_object, lambda mine: mpidist.broadcast_object(mine, size - 1)):
            with pytest.raises(ObjectError) as caught:
                call(bad if rank == size - 1 else "good")
            assert caught.value.on_all_ranks and isinstance(caught.value, TypeError)
            assert (caught.value.__cause__ is not None) == (rank == size - 1)
            problems.append(str(caught.value))
        return problems, mpidist.all_gather_object(rank)

    for rank, (problems, after) in enumerate(run_ranks(size, refused, hosts=hosts(size))):
        for text, call in zip(problems, ("all_gather_object", "broadcast_object"), strict=True):
            assert text.startswith(f"rank {rank} of {size}: {call}")
            assert f"the object of rank {size - 1} ({hosts(size)[-1]}) cannot be pickled" in text
        assert after == list(range(size))


def test_all_ranks_whose_objects_cannot_be_pickled_are_named():
    def refused():
        with pytest.raises(ObjectError) as caught:
            mpidist.all_gather_object(0 if mpidist.rank() == 1 else Stubborn())
        return str(caught.value)

    for text in run_ranks(4, refused):
        assert "the object of rank 0 (localhost) cannot be pickled" in text
        assert "(nor can those of rank 2 (localhost), rank 3 (localhost))" in text
        assert "ZeroDivisionError: not for sale" in text


def test_an_object_that_cannot_be_unpickled_is_an_error_where_it_arrives():
    def arrives():
        rank = mpidist.rank()
        if rank == 0:
            mpidist.broadcast_object(Local(), 0)
        else:
            with pytest.raises(ObjectError, match=r"object of rank 0 \(localhost\) cannot be unpickled here: LookupE"):
                mpidist.broadcast_object(None, 0)
        return mpidist.all_gather_object(rank)

    assert run_ranks(3, arrives) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("root", [-1, 2, 5])
def test_there_must_be_such_a_root(root):
    def asked():
        with pytest.raises(ValueError, match=f"root_rank {root} is no rank"):
            mpidist.broadcast_object(0, root)
        with pytest.raises(TypeError):
            mpidist.broadcast_object(0, "0")
        return world_communicator().control.call

    assert run_ranks(2, asked) == [0, 0]


def test_ranks_that_name_different_roots_or_calls_are_told_so():
    def mismatched():
        rank = mpidist.rank()
        with pytest.raises(CollectiveMismatchError, match=r"broadcast_object\(root_rank=1\)"):
            mpidist.broadcast_object(0, rank)
        with pytest.raises(CollectiveMismatchError, match="barrier"):
            mpidist.barrier() if rank else mpidist.all_gather_object(0)
        return mpidist.all_gather_object(rank)

    assert run_ranks(2, mismatched) == [[0, 1]] * 2


@pytest.mark.parametrize("name", ["barrier", "broadcast_object", "all_gather_object"])
def test_a_rank_that_does_not_come_is_named_by_a_deadline(name):
    def late():
        call = getattr(mpidist, name)
        if mpidist.rank() == 1:
            released.wait(20)
            return
        try:
            with pytest.raises(TransportTimeoutError, match=rf"{name}.* rank 1 \(localhost\)"):
                call(timeout_seconds=0.3) if name == "barrier" else call(0, timeout_seconds=0.3)
        finally:
            released.set()

    released = threading.Event()
    run_ranks(2, late)


PLACES = """
import json, sys, mpidist
found = [mpidist.rank(), mpidist.size(), mpidist.local_rank(), mpidist.local_size(), mpidist.node()]
mpidist.barrier()
found += [mpidist.broadcast_object({"a": 1}), mpidist.all_gather_object("x")]
mpidist.MultiWorkerMirroredStrategy()
found += [mpidist.rank(), mpidist.size(), mpidist.init() is mpidist.init(), mpidist.init().size]
print(json.dumps([*found, "mpi4py.MPI" in sys.modules]))
"""


def test_a_process_started_by_hand_is_rank_0_of_1_without_mpi():
    child = subprocess.run([sys.executable, "-c", PLACES], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(child.stdout) == [0, 1, 0, 1, 0, {"a": 1}, ["x"], 0, 1, True, 1, False]


def test_places_on_several_nodes():
    def place():
        return mpidist.rank(), mpidist.size(), mpidist.local_rank(), mpidist.local_size(), mpidist.node()

    expected = [(0, 5, 0, 2, 0), (1, 5, 0, 3, 1), (2, 5, 1, 2, 0), (3, 5, 1, 3, 1), (4, 5, 2, 3, 1)]
    assert run_ranks(5, place, hosts=["n9", "n10", "n9", "n10", "n10"]) == expected
