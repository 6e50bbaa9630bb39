"""Memory and streams of other libraries: CuPy's own, taken as if they were another one's."""

from __future__ import annotations

import functools

import numpy
import pytest

import mpidist
from tests.gpu.library import (
    check_on_all_ranks,
    in_replica,
    place,
    problem_of,
    problems_of,
    slowly,
    strategy,
    stream,
)

pytestmark = [pytest.mark.mpi, pytest.mark.gpu(only=True)]

#: Parts of an array of 40 rows and 30 columns, as other libraries have them: a shape, strides and a first element.
PARTS = {
    "whole": lambda array: array,
    "one": lambda array: array[7:8, 4:5],
    "none": lambda array: array[3:3],
    "rows": lambda array: array[5:20],
    "columns": lambda array: array[:, 3:20],
    "transposed": lambda array: array.T,
    "every third": lambda array: array[1::3, 2::5],
    "a column": lambda array: array[:, 11],
    "three axes": lambda array: array.reshape(4, 10, 30)[1:, ::2].transpose(2, 0, 1),
}


@pytest.fixture
def foreign(xp):
    from mpidist.device import foreign

    return foreign


def taken(xp, foreign, view, owner=None, has_strides=True):
    """Return what `array_at` makes of a part of an array, of which only numbers are told."""
    spans = [(length - 1) * stride for length, stride in zip(view.shape, view.strides, strict=True)]
    nbytes = sum(spans) + view.itemsize if view.size else 0
    strides = view.strides if has_strides else None
    return foreign.array_at(view.data.ptr, nbytes, view.shape, strides, view.dtype, owner, xp.cuda.Device().id)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i8", "bool", "c8"])
def test_memory_is_shared(xp, foreign, part, dtype):
    """What is written to one is read from the other, there and nowhere else."""
    numbers = (numpy.arange(1200).reshape(40, 30) % 91).astype(dtype)
    array = xp.asarray(numbers)
    found = taken(xp, foreign, PARTS[part](array))
    problem = problem_of(xp, found.copy(), PARTS[part](numbers))
    found[...] = 1
    numbers = numbers.copy()
    PARTS[part](numbers)[...] = 1
    problem += problem_of(xp, array, numbers)
    array.fill(0)
    check_on_all_ranks(problem + problem_of(xp, found.copy(), numpy.zeros(found.shape, dtype)))


def test_without_strides_it_lies_in_the_order_of_its_shape(xp, foreign):
    array = xp.arange(24.0)
    view = array[4:].reshape(4, 5)
    check_on_all_ranks(problem_of(xp, taken(xp, foreign, view, has_strides=False), numpy.arange(4.0, 24).reshape(4, 5)))


def test_an_element_that_is_repeated(xp, foreign):
    """As PyTorch's `expand` does: its stride is 0."""
    array = xp.arange(6.0)
    found = foreign.array_at(array.data.ptr, 48, (3, 6), (0, 8), array.dtype, None, xp.cuda.Device().id)
    check_on_all_ranks(problem_of(xp, found + 0, numpy.tile(numpy.arange(6.0), (3, 1))))


def test_an_owner_lives_as_long_as_the_array_and_its_parts(xp, foreign):
    rank, _ = place()
    array = xp.full((50, 40), rank, "f4")
    part = taken(xp, foreign, array, owner=array)[3:, ::2]
    del array
    after = [xp.full((50, 40), -5, "f4") for _ in range(3)]
    check_on_all_ranks(problem_of(xp, part.copy(), numpy.full((47, 20), rank, "f4")))
    del after


@pytest.mark.parametrize("is_slow", [False, True])
def test_parts_are_reduced_and_moved(xp, foreign, is_slow):
    rank, size = place()
    total, ranks = size * (size + 1) / 2, numpy.arange(1, size + 1)
    array = xp.zeros((40, 30), "f4")
    views = [taken(xp, foreign, view(array)) for view in PARTS.values()]
    (slowly if is_slow else lambda xp, array, value: array.fill(value))(xp, array, rank + 1)
    summed = in_replica("SUM", views)
    problem = problems_of(xp, summed, [numpy.full(each.shape, total, "f4") for each in views])
    problem += problem_of(xp, in_replica("MAX", views[6]), numpy.full(views[6].shape, size, "f4"))
    problem += problem_of(xp, mpidist.broadcast(views[5], size - 1), numpy.full((30, 40), size, "f4"))
    joined = numpy.repeat(ranks, 17)[None].repeat(40, 0).astype("f4")
    problem += problem_of(xp, mpidist.all_gather(views[4], 1), joined)
    check_on_all_ranks(problem + problem_of(xp, array, numpy.full((40, 30), rank + 1, "f4")))


def test_variables_are_trained_by_gradients_of_other_libraries(xp, foreign):
    rank, size = place()
    with strategy().scope():
        variables = [mpidist.Variable(xp.zeros(shape, "f4")) for shape in ((30, 40), (40, 17))]
        optimizer = mpidist.optimizers.SGD(0.5)
    array = xp.zeros((40, 30), "f4")
    gradients = [taken(xp, foreign, PARTS[name](array)) for name in ("transposed", "columns")]
    for turn in range(4):
        slowly(xp, array, rank + turn)
        strategy().run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))
    wanted = -0.5 * (4 * size * (size - 1) / 2 + 6 * size)
    found = [each.value for each in variables]
    check_on_all_ranks(problems_of(xp, found, [numpy.full(each.shape, wanted, "f4") for each in found]))


# -- streams ----------------------------------------------------------------------------------------------------------


@functools.cache
def their_streams(xp, count=2):
    """Return streams that last as long as the process, as PyTorch's do."""
    return [xp.cuda.Stream(non_blocking=True) for _ in range(count)]


@pytest.mark.parametrize("count", [5, 5000, 300_000])
def test_calls_are_ordered_on_a_stream_of_another_library(xp, foreign, count):
    """It is slow to make the array, and reads the result at once; mpidist's thread has another stream."""
    rank, size = place()
    theirs, device, problems = their_streams(xp)[0], xp.cuda.Device().id, []
    with theirs:
        array = xp.zeros(count, "f4")
    for turn in range(3):
        with theirs:
            slowly(xp, array, rank + 1 + turn)
        with foreign.on_stream(theirs.ptr, device):
            (found,) = in_replica("SUM", [array])
        with theirs:
            array.fill(-100)
            doubled = found * 2
            found.fill(7)
            total = size * (size + 1) / 2 + turn * size
            problems.append(problem_of(xp, doubled, numpy.full(count, 2 * total, "f4")))
            problems.append(problem_of(xp, found, numpy.full(count, 7, "f4")))
    check_on_all_ranks("".join(problems))


def test_the_default_stream_of_another_library(xp, foreign):
    rank, size = place()
    array = xp.zeros(4000, "f4")
    slowly(xp, array, rank + 1)
    with stream(xp):
        with foreign.on_stream(0, xp.cuda.Device().id):
            assert xp.cuda.get_current_stream().ptr == 0
            (found,) = in_replica("SUM", [array])
        assert xp.cuda.get_current_stream().ptr != 0
    check_on_all_ranks(problem_of(xp, found, numpy.full(4000, size * (size + 1) / 2, "f4")))


def test_the_stream_is_current_inside_only(xp, foreign):
    device = xp.cuda.Device().id
    first, second = their_streams(xp)
    before, seen = xp.cuda.get_current_stream().ptr, []
    with foreign.on_stream(first.ptr, device):
        seen.append(xp.cuda.get_current_stream().ptr)
        with foreign.on_stream(second.ptr, device):
            seen.append(xp.cuda.get_current_stream().ptr)
        seen.append(xp.cuda.get_current_stream().ptr)
    with pytest.raises(ArithmeticError), foreign.on_stream(second.ptr, device):
        raise ArithmeticError
    seen.append(xp.cuda.get_current_stream().ptr)
    assert seen == [first.ptr, second.ptr, first.ptr, before]


def test_more_streams_than_are_remembered(xp, foreign):
    rank, size = place()
    problems = []
    for turn, theirs in enumerate(their_streams(xp, 70)):
        with theirs:
            array = xp.zeros(50, "f4")
            slowly(xp, array, rank + turn)
        with foreign.on_stream(theirs.ptr, xp.cuda.Device().id):
            found = array * 2
            if turn % 10 == 0:
                (found,) = in_replica("SUM", [found])
                problems.append(problem_of(xp, found, numpy.full(50, size * (size - 1) + 2 * turn * size, "f4")))
    check_on_all_ranks("".join(problems))


# -- DLPack, and the wait ---------------------------------------------------------------------------------------------


class Theirs:
    """An array of another library, which makes it on a stream of its own."""

    def __init__(self, array, own):
        self._array, self._own = array, own

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options):
        with self._own:  # whoever takes it comes behind this stream
            return self._array.__dlpack__(**options)


def test_what_dlpack_knows_is_taken_without_a_copy_and_behind_its_stream(xp, foreign):
    rank, size = place()
    theirs, ours = their_streams(xp)
    problems = []
    for turn in range(3):
        with theirs:
            array = xp.zeros((60, 50), "f4")
            slowly(xp, array, rank + 1 + turn)
        with ours:
            found = foreign.array_of(Theirs(array[1:].T, theirs))
            assert found.data.ptr == array[1:].data.ptr and found.strides == (4, 200)
            total = size * (size + 1) / 2 + turn * size
            (summed,) = in_replica("SUM", [found])
            problems.append(problem_of(xp, summed, numpy.full((50, 59), total, "f4")))
            problems.append(problem_of(xp, found.copy(), numpy.full((50, 59), rank + 1 + turn, "f4")))
    check_on_all_ranks("".join(problems))


def test_the_memory_lives_as_long_as_what_was_taken(xp, foreign):
    array = xp.full((60, 50), 3, "f4")
    found = foreign.array_of(array)
    del array
    after = [xp.full((60, 50), -5, "f4") for _ in range(3)]
    check_on_all_ranks(problem_of(xp, found, numpy.full((60, 50), 3, "f4")))
    del after


@pytest.mark.parametrize("is_other", [False, True])
def test_the_host_waits_for_the_current_stream(xp, foreign, is_other):
    array = xp.zeros(1000)
    if not is_other:
        slowly(xp, array, 2)
        foreign.wait()
        assert xp.cuda.get_current_stream().done
    with stream(xp):
        slowly(xp, array, 2)
        foreign.wait()
        assert xp.cuda.get_current_stream().done
    check_on_all_ranks(problem_of(xp, array, numpy.full(1000, 2.0)))


@pytest.mark.parametrize("count", [3, 200_000])
def test_the_host_waits_for_a_sum_that_is_under_way(xp, foreign, count):
    rank, size = place()
    array = xp.zeros(count, "f8")
    for _ in range(3):
        slowly(xp, array, rank + 1)
        (found,) = in_replica("SUM", [array])
        foreign.wait()
        assert xp.cuda.get_current_stream().done
    check_on_all_ranks(problem_of(xp, found, numpy.full(count, size * (size + 1) / 2)))
