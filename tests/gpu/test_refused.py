"""What cannot be right is an error on all ranks, and the next call works; nothing waits for ever."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.errors import CollectiveMismatchError, MpidistError, RemoteReplicaError
from tests.gpu.library import check_on_all_ranks, in_replica, place, problem_of, strategy

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]


@pytest.fixture(autouse=True)
def the_next_call_works(xp):
    yield
    rank, size = place()
    for count in (3, 100_000):
        found = in_replica("SUM", [xp.asarray(numpy.full(count, rank + 1.0))])[0]
        check_on_all_ranks(problem_of(xp, found, numpy.full(count, size * (size + 1) / 2)))


def raised(kind, call):
    """Return what a call raises, on all ranks; '' if it raises nothing."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [3, 200_000])
@pytest.mark.parametrize("is_list", [False, True])
def test_shapes_that_differ_between_ranks(xp, is_list, count):
    rank, size = place()
    array = xp.asarray(numpy.ones((count + (rank == 1), 2), "f4"))
    text = raised(CollectiveMismatchError, lambda: in_replica("SUM", [array, array] if is_list else array))
    check_on_all_ranks(all(part in text for part in ("rank 1", str(count), str(count + 1))) or f"raised: {text!r}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", ["dtype", "operation", "number", "call"])
def test_calls_that_differ_between_ranks(xp, what):
    rank, size = place()
    is_other = rank == size - 1
    array = xp.asarray(numpy.ones(4, "f8" if what == "dtype" and is_other else "f4"))

    def call():
        if what == "call" and is_other:
            mpidist.broadcast(array)
        elif what == "number":
            in_replica("SUM", [array] * (3 if is_other else 2))
        else:
            in_replica("MAX" if what == "operation" and is_other else "SUM", [array])

    text = raised(MpidistError, call)
    check_on_all_ranks(bool(text) or "nothing was raised")


@pytest.mark.gpu(only=True)
@pytest.mark.parametrize("call", ["all_reduce", "reduce", "apply_gradients"])
def test_arrays_of_the_host_and_of_the_card_in_one_list(xp, call):
    mixed = [numpy.ones(3, "f4"), xp.asarray(numpy.ones(3, "f4")), numpy.ones(5, "f4")]
    if call == "apply_gradients":
        with strategy().scope():
            variables = [mpidist.Variable(xp.asarray(numpy.zeros(each.shape, "f4"))) for each in mixed]
            optimizer = mpidist.optimizers.SGD(0.1)

    def run():
        if call == "apply_gradients":
            pairs = list(zip(mixed, variables, strict=True))
            strategy().run(lambda: optimizer.apply_gradients(pairs))
        elif call == "reduce":
            mpidist.all_reduce(mixed)
        else:
            in_replica("SUM", mixed)

    text = raised((MpidistError, TypeError, ValueError), run).lower()
    check_on_all_ranks(("numpy" in text and "cupy" in text) or f"raised: {text!r}")


@pytest.mark.gpu(only=True)
@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter", "all_to_all", "send"])
def test_a_list_where_one_array_is_moved(xp, verb):
    rank, size = place()
    to = ((rank + 1) % (size + 1),) if verb == "send" else ()
    text = raised(TypeError, lambda: getattr(mpidist, verb)([numpy.ones(size), xp.ones(size)], *to))
    check_on_all_ranks(("cupy.ndarray" in text and "cupy.stack" in text) or f"raised: {text!r}")


@pytest.mark.gpu(only=True)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [3, 500_000])
@pytest.mark.parametrize("call", ["all_reduce", "list", "broadcast", "all_gather", "reduce_scatter", "all_to_all"])
def test_memory_that_differs_between_ranks(xp, call, count):
    """Rank 0's array lies on the host: an error that says so, on all ranks, or the values that are right; no hang."""
    rank, size = place()
    array = numpy.ones((size * count,), "f4")
    array = array if rank == 0 else xp.asarray(array)
    calls = {
        "all_reduce": lambda: in_replica("SUM", array),
        "list": lambda: in_replica("SUM", [array, array]),
        "broadcast": lambda: mpidist.broadcast(array),
        "all_gather": lambda: mpidist.all_gather(array),
        "reduce_scatter": lambda: mpidist.reduce_scatter(array),
        "all_to_all": lambda: mpidist.all_to_all(array),
    }
    text = raised((MpidistError, TypeError, ValueError), calls[call])
    if call in ("all_reduce", "list"):
        check_on_all_ranks(bool(text) or "nothing was raised")
    told = mpidist.all_gather_object(bool(text))
    assert len(set(told)) == 1, f"only some ranks raised: {told}"


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_raises_in_a_step(xp):
    rank, size = place()

    def step():
        if rank == 1:
            raise KeyError("of this rank")
        return mpidist.get_replica_context().all_reduce("SUM", [xp.asarray(numpy.ones(1000, "f4"))])

    text = raised(KeyError if rank == 1 else RemoteReplicaError, lambda: strategy().run(step))
    if rank == 1:  # it learns in its next call that the others have left theirs
        text = text and "of this rank"
    check_on_all_ranks("of this rank" in text or f"raised: {text!r}")


def test_nothing_is_reduced_that_has_no_such_reduction(xp):
    for op, dtype in (("MIN", "c8"), ("SUM", "?")):
        text = raised(MpidistError, lambda op=op, dtype=dtype: in_replica(op, xp.asarray(numpy.ones(3, dtype))))
        check_on_all_ranks(op.lower()[:3] in text.lower() or f"raised: {text!r}")


def test_a_rank_that_there_is_not(xp):
    _, size = place()
    text = raised(ValueError, lambda: mpidist.broadcast(xp.asarray(numpy.ones(3)), root=size))
    check_on_all_ranks(str(size) in text or f"raised: {text!r}")
