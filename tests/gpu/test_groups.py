"""Groups of the ranks, and worlds of some of them: each has its own links; closed forms."""

from __future__ import annotations

import functools

import numpy
import pytest

import mpidist
from mpidist.collectives.engine import Engine
from mpidist.collectives.group import GroupCommunicator
from mpidist.world import world_communicator
from tests.gpu.library import (
    check_on_all_ranks,
    host,
    is_own,
    place,
    problem_of,
    problems_of,
    slowly,
    stream,
    two_streams,
)

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]

#: The number of a rank's group.
DEALS = {
    "neighbours": lambda rank, size: rank // 2,
    "every second": lambda rank, size: rank % 2,
    "all but the last": lambda rank, size: int(rank == size - 1),
    "all": lambda rank, size: 0,
}


def members_of(deal, rank=None):
    """Return the ranks of a rank's group; by default of this one's."""
    own, size = place()
    number = DEALS[deal](own if rank is None else rank, size)
    return [each for each in range(size) if DEALS[deal](each, size) == number]


def are_even(deal):
    """Return whether all groups are of one size, as a strategy's are: a list goes the same way in each."""
    return len({len(members_of(deal, each)) for each in range(mpidist.size())}) == 1


@functools.cache
def group_of(deal):
    """Return the collectives of this rank's group; made once, as its links are.  Collective."""
    return GroupCommunicator(world_communicator(), members_of(deal))


def link_problem(xp, communicator, ranks):
    """Return what is wrong unless a group has a link of its own where the world has one, or nobody shares a card."""
    if communicator.size == 1:
        return ""
    have, of_world = (
        [not isinstance(each, str) for each in ranks_of.devices.links()]
        for ranks_of in (communicator, world_communicator())
    )
    if xp is not numpy and of_world == [False]:
        count = xp.cuda.runtime.getDeviceCount()
        of_world = [len({each % count for each in ranks}) == len(ranks)]
    return "" if have == of_world else f"links: {communicator.devices.links()}"


@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize("count", [1, 5000])
def test_a_verb_of_each_group(xp, deal, count):
    """Of arrays whose lengths are the group's own affair."""
    group, ranks, rank = group_of(deal), members_of(deal), mpidist.rank()
    mpidist.all_reduce(xp.ones(3))
    count += ranks[0]
    problems = []
    for dtype in ("f4", "f8", "i8", "c8"):
        given = xp.full(count, rank + 1, dtype)
        problems.append(problem_of(xp, group.all_reduce_here(given), numpy.full(count, sum(ranks) + len(ranks), dtype)))
        problems.append(problem_of(xp, given, numpy.full(count, rank + 1, dtype)))
    for op, wanted in {"mean": sum(ranks) / len(ranks), "min": ranks[0], "max": ranks[-1]}.items():
        found = group.all_reduce_here(xp.full((count, 2), rank, "f4"), op)
        problems.append(problem_of(xp, found, numpy.full((count, 2), wanted, "f4"), rtol=1e-6))
    joined = group.all_gather_here(xp.full((2, rank * count), rank, "f4"), 1)
    row = numpy.repeat(numpy.array(ranks, "f4"), numpy.array(ranks) * count)
    problems.append(problem_of(xp, joined, numpy.stack([row, row])))
    root = len(ranks) - 1 if are_even(deal) else 0  # the same in all groups
    found = group.broadcast_here(xp.full((count, 3), rank, "i4"), root)
    problems.append(problem_of(xp, found, numpy.full((count, 3), ranks[root], "i4")))
    check_on_all_ranks("".join(problems) or link_problem(xp, group, ranks))


@pytest.mark.parametrize("deal", DEALS)
def test_a_list_of_each_group(xp, deal):
    if not are_even(deal):
        return
    group, ranks, rank = group_of(deal), members_of(deal), mpidist.rank()
    engine, shapes, problems = Engine(group), [(3,), (), (0, 2), (70, 50)], []
    for turn in range(3):
        found = engine([xp.full(shape, rank + turn, "f4") for shape in shapes], "sum")
        wanted = [numpy.full(shape, sum(ranks) + turn * len(ranks), "f4") for shape in shapes]
        problems.append(problems_of(xp, found, wanted))
    check_on_all_ranks("".join(problems))


@pytest.mark.parametrize("is_other", [False, True])
def test_groups_and_the_whole_in_turn(xp, is_other):
    """The result of one is the array of the next, the host waits for none, and the streams are two."""
    rank, size = place()
    streams = two_streams(xp)
    whole, problems = Engine(world_communicator()), []
    deals = [each for each in DEALS if are_even(each)]
    for turn in range(3):
        with streams[0]:
            array = xp.zeros(4000, "f8")
            slowly(xp, array, rank + 1.0 + turn)
            value = [each + 1.0 + turn for each in range(size)]  # by rank
            for deal in deals:
                (array,) = Engine(group_of(deal))([array], "sum")
                value = [sum(value[other] for other in members_of(deal, each)) for each in range(size)]
                (array,) = whole([array], "mean")
                value = [sum(value) / size] * size
                array += rank  # they differ again
                value = [old + each for each, old in enumerate(value)]
            problems.append(problem_of(xp, array, numpy.full(4000, value[rank]), rtol=1e-12))
        with streams[int(is_other)]:
            other = xp.zeros(300, "f4")
            slowly(xp, other, rank)
            found = group_of("every second").all_reduce_here(other)
            problems.append(problem_of(xp, found, numpy.full(300, sum(members_of("every second")), "f4")))
    check_on_all_ranks("".join(problems))


def test_worlds_of_some_ranks_train_for_themselves(xp):
    """Each to its own numbers, in turn with the world of all."""
    mpi = pytest.importorskip("mpi4py.MPI")
    rank, size = place()
    ranks = members_of("every second")
    problems = []
    with mpidist.new_world(mpi.COMM_WORLD.Split(rank % 2, rank)) as world:
        own = mpidist.MultiWorkerMirroredStrategy()
        with own.scope():
            variable = mpidist.Variable(xp.full((30, 7), rank + 1.0))  # the value of the chief: rank 0 or 1 of all
            optimizer = mpidist.optimizers.SGD(0.5, momentum=0.5)
    for turn in range(4):
        with stream(xp):
            gradient = xp.zeros((30, 7))
            slowly(xp, gradient, rank + 1.0)
            own.run(lambda gradient=gradient: optimizer.apply_gradients([(gradient, variable)]))
            (total,) = mpidist.all_reduce([gradient])
            problems.append(problem_of(xp, total, numpy.full((30, 7), size * (size + 1) / 2)))
            value, speed = ranks[0] + 1.0, 0.0
            for _ in range(turn + 1):
                speed = 0.5 * speed - 0.5 * (sum(ranks) + len(ranks))
                value += speed
            problems.append(problem_of(xp, variable.value * 1, numpy.full((30, 7), value), rtol=1e-12))
    assert is_own(xp, variable.value) and host(variable.value).shape == (30, 7)
    world.close()
    check_on_all_ranks("".join(problems))
