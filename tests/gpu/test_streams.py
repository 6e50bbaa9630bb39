"""Calls are ordered on the current stream: they wait for what makes their arrays, and what reads results for them.

What makes an array takes the card a while, and the host does not wait for it: a call that reads too soon reads the
values before.
"""

from __future__ import annotations

import numpy
import pytest

import mpidist
from tests.gpu.library import check_on_all_ranks, in_replica, place, problem_of, problems_of, slowly, strategy, stream

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]

COUNTS = [1, 5000, 3_000_000]


@pytest.fixture(params=["default", "other"])
def current(request, xp):
    """The default stream, or another one."""
    if request.param == "default":
        yield
        return
    with stream(xp):
        yield


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("is_list", [False, True])
def test_an_all_reduce_waits_for_its_array_and_is_waited_for(xp, current, is_list, count):
    rank, size = place()
    total, problems = size * (size + 1) / 2, []
    array = xp.zeros(count, "f4")
    for turn in range(3):
        slowly(xp, array, rank + 1 + turn)
        found = in_replica("SUM", [array, array] if is_list else array)
        found = found[1] if is_list else found
        array.fill(-100)  # behind the call
        doubled = found * 2
        found.fill(7)
        problems.append(problem_of(xp, doubled, numpy.full(count, 2 * (total + turn * size), "f4")))
        problems.append(problem_of(xp, found, numpy.full(count, 7, "f4")))
    check_on_all_ranks("".join(problems))


@pytest.mark.parametrize("count", COUNTS)
def test_results_of_one_call_are_the_arrays_of_the_next(xp, current, count):
    """The host never waits in between."""
    rank, size = place()
    array = xp.zeros(count, "f8")
    slowly(xp, array, rank + 1.0)
    for _ in range(4):
        (array,) = in_replica("MEAN", [array * 2])
        array += rank  # the ranks' arrays differ again
    wanted = (size + 1) / 2
    for _ in range(4):
        wanted = 2 * wanted + (size - 1) / 2
    check_on_all_ranks(problem_of(xp, array - rank + (size - 1) / 2, numpy.full(count, wanted), rtol=1e-12))


def test_temporary_arrays_in_many_calls(xp, current):
    """Memory that is given back to the pool while the call is under way is not taken for something else."""
    rank, size = place()
    found = []
    for turn in range(20):
        given = [xp.full((1 + 3000 * number,), rank + turn, "f4") for number in range(6)]
        found.append(in_replica("SUM", given))
        del given
        xp.full(40_000, -5, "f4")
    totals = [size * (size - 1) / 2 + size * turn for turn in range(20)]
    problems = [
        problems_of(xp, results, [numpy.full(1 + 3000 * number, total, "f4") for number in range(6)])
        for results, total in zip(found, totals, strict=True)
    ]
    check_on_all_ranks("".join(problems))


def test_two_streams_in_turn(xp):
    rank, size = place()
    total, found = size * (size + 1) / 2, []
    for turn in range(4):
        with stream(xp):
            array = xp.zeros(200_000, "f4")
            slowly(xp, array, (rank + 1) * (turn + 1))
            (result,) = in_replica("SUM", [array])
            found.append(problem_of(xp, result, numpy.full(200_000, total * (turn + 1), "f4")))
    check_on_all_ranks("".join(found))


@pytest.mark.parametrize("count", [3, 1_000_000])
def test_other_collectives_wait_for_their_array(xp, current, count):
    rank, size = place()
    array = xp.zeros(count, "f4")

    def made(value):
        slowly(xp, array, value)
        return array

    found = [
        mpidist.broadcast(made(rank + 3), root=size - 1),
        mpidist.all_gather(made(rank + 1))[-1:],
        mpidist.reduce_scatter(made(2))[:1],
        mpidist.all_to_all(made(rank), [count, *[0] * (size - 1)])[0][-1:],
    ]
    expected = [
        numpy.full(count, size + 2, "f4"),
        numpy.full(1, size, "f4"),
        numpy.full(min(1, count * (rank + 1) // size - count * rank // size), 2 * size, "f4"),
        numpy.full(1 if rank == 0 else 0, size - 1, "f4"),
    ]
    check_on_all_ranks(problems_of(xp, found, expected))


@pytest.mark.parametrize("make", [mpidist.optimizers.SGD, mpidist.optimizers.Adam], ids=["sgd", "adam"])
def test_an_update_waits_for_its_gradients(xp, current, make):
    """Of gradients that are the same in all elements and steps, both go down by a known way."""
    rank, size = place()
    with strategy().scope():
        variable, optimizer = mpidist.Variable(xp.zeros(100_000, "f8")), make(0.5)
    gradient = xp.zeros(100_000, "f8")
    for _ in range(3):
        slowly(xp, gradient, (rank + 1.0) / (size * (size + 1) / 2))
        strategy().run(lambda: optimizer.apply_gradients([(gradient, variable)]))
        gradient.fill(1e6)
    # of Adam each step is the learning rate, but for its epsilon
    check_on_all_ranks(problem_of(xp, variable.value * 1, numpy.full(100_000, -1.5), rtol=1e-5))
