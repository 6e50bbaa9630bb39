"""What a communicator has bound for calls that bind nothing themselves: deadlines, keys, and what is kept of arrays."""

from weakref import ref

import numpy
import pytest

from mpidist.collectives.reductions.adjustment import Adjustment
from mpidist.errors import CollectiveMismatchError
from mpidist.testing import run_ranks
from mpidist.world import world_communicator

VERBS = {
    "all_reduce": lambda communicator, seconds: communicator.all_reduce(numpy.ones(3), timeout_seconds=seconds),
    "all_reduce_list": lambda communicator, seconds: communicator.all_reduce_list(
        [numpy.ones(3)], "sum", Adjustment(2.0, None, False), seconds
    ),
    "with None": lambda communicator, seconds: communicator.all_reduce_list(
        [numpy.ones(3)], "sum", Adjustment(None, None, True), seconds
    ),
    "all_gather": lambda communicator, seconds: communicator.all_gather(numpy.ones(3), timeout_seconds=seconds),
    "broadcast": lambda communicator, seconds: communicator.broadcast(numpy.ones(3), timeout_seconds=seconds),
    "barrier": lambda communicator, seconds: communicator.barrier(timeout_seconds=seconds),
}


@pytest.mark.parametrize("hosts", ["a", "aa", "ab"])
@pytest.mark.parametrize("call", VERBS.values(), ids=VERBS)
def test_a_deadline_is_that_of_its_call_and_not_of_later_ones(call, hosts):
    def on_rank():
        communicator, begin, seen = world_communicator(), world_communicator().begin, set()

        def noted(call, timeout_seconds=None):
            seen.add(timeout_seconds)
            return begin(call, timeout_seconds)

        communicator.begin = noted
        found = []
        for seconds in (41.0, None, 42.0, None):
            seen.clear()
            call(communicator, seconds)
            found.append(set(seen))
        return found

    assert run_ranks(len(hosts), on_rank, hosts=hosts) == [[{41.0}, {None}, {42.0}, {None}]] * len(hosts)


@pytest.mark.parametrize("hosts", ["aa", "ab", "aabb"])
@pytest.mark.parametrize("rows", [1, 3000])
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_arrays_of_as_many_elements_in_other_shapes_are_not_reduced_in_place(rows, dtype, hosts):
    def on_rank():
        communicator = world_communicator()
        shape = (rows, 6) if communicator.rank else (6, rows)
        with pytest.raises(CollectiveMismatchError, match=rf"(?=.*\({rows}, 6\))(?=.*\(6, {rows}\))"):
            communicator.all_reduce(numpy.ones(shape, dtype))
        array = numpy.ones((6, rows), dtype)
        communicator.all_reduce(array)
        return bool((array == len(hosts)).all())

    assert all(run_ranks(len(hosts), on_rank, hosts=hosts))


def test_a_gather_of_an_array_with_fewer_axes_is_told_what_is_wrong_with_it():
    def on_rank():
        communicator = world_communicator()
        communicator.gather(numpy.ones((2, 3)), axis=1)
        communicator.gather(numpy.ones(2), axis=0)
        calls, texts = communicator.control.call, []
        for array, axis in ((numpy.ones(2), 1), (numpy.array(1.0), 0)):
            with pytest.raises(ValueError) as caught:
                communicator.gather(array, axis=axis)
            texts.append(str(caught.value))
        assert communicator.control.call == calls
        return texts

    for texts in run_ranks(2, on_rank):
        assert all("bound" not in text for text in texts), texts


@pytest.mark.parametrize("elements", [3, 90_000])
@pytest.mark.parametrize("algorithm", [None, "ring"])
@pytest.mark.usefixtures("without_collector")
def test_no_array_of_a_call_that_has_failed_is_kept(algorithm, elements):
    def on_rank():
        communicator = world_communicator()
        bound = communicator.all_reduce_init([numpy.ones(elements)] * 2, none_as_zeros=True, algorithm=algorithm)
        communicator.all_reduce(numpy.ones(elements), algorithm=algorithm)
        kept = []
        for call in (
            lambda array: communicator.all_reduce(array, algorithm=algorithm),
            lambda array: bound([array, None]),
        ):
            array = numpy.ones(elements)
            kept.append(ref(array))
            with pytest.raises(CollectiveMismatchError):
                communicator.barrier() if communicator.rank else call(array)
            del array
        return [each() is None for each in kept]

    assert run_ranks(2, on_rank) == [[True, True]] * 2
