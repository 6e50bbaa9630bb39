"""The room that ranks have: the host with the fewest cores for a rank, by what a scheduler has given."""

from __future__ import annotations

import platform

import pytest

from mpidist.cluster.allocation import Allocation, HostShare
from mpidist.commands.launch.cores import Cores
from mpidist.commands.launch.room import Room, least_room

HERE = platform.node()


def job(**shares: HostShare) -> Allocation:
    return Allocation("Slurm", "41", {HERE if name == "here" else name: share for name, share in shares.items()})


@pytest.mark.parametrize(
    "visible, allocation, ranks_of, expected",
    [
        # without a scheduler all hosts are like this one
        (Cores(8, False), None, {"a": 2, "b": 3}, (3, Cores(8, False), "b")),
        # a whole machine
        (
            Cores(8, False),
            job(here=HostShare(2, 8), b=HostShare(2, 8)),
            {"here": 2, "b": 2},
            (2, Cores(8, False), "here"),
        ),
        # a part of it, and nothing keeps this process there
        (Cores(8, False), job(here=HostShare(2, 4), b=HostShare(2, 4)), {"here": 2}, (2, Cores(4, True), "here")),
        # a part of it, and this process is kept there
        (Cores(4, True), job(here=HostShare(2, 4), b=HostShare(2, 4)), {"here": 2}, (2, Cores(4, True), "here")),
        # the scheduler counts hardware threads, two a core
        (Cores(4, True), job(here=HostShare(2, 8), b=HostShare(2, 4)), {"here": 2, "b": 2}, (2, Cores(2, True), "b")),
        # the scheduler believes in more cores than there are
        (
            Cores(1, True),
            job(here=HostShare(2, 4), b=HostShare(2, 4)),
            {"here": 2, "b": 2},
            (2, Cores(1, True), "here"),
        ),
        # uneven: what counts is the cores for a rank
        (Cores(9, False), job(here=HostShare(3, 9), b=HostShare(1, 2)), {"here": 3, "b": 1}, (1, Cores(2, False), "b")),
        # from a machine that is none of the job's
        (Cores(64, False), job(a=HostShare(2, 6), b=HostShare(2, 6)), {"a": 2, "b": 2}, (2, Cores(6, True), "a")),
        # a scheduler that says nothing about cores
        (Cores(8, False), job(a=HostShare(2), b=HostShare(2)), {"a": 2, "b": 2}, (2, Cores(8, False), "a")),
        # hosts of the user's that the job does not have
        (Cores(8, False), job(a=HostShare(2, 4)), {"far": 2}, (2, Cores(8, False), "far")),
    ],
)
def test_the_host_where_a_rank_has_the_fewest_cores(visible, allocation, ranks_of, expected):
    ranks_of = {HERE if name == "here" else name: ranks for name, ranks in ranks_of.items()}
    ranks, cores, host = expected
    assert least_room(ranks_of, visible, allocation) == Room(ranks, cores, HERE if host == "here" else host)


def test_more_ranks_than_places():
    allocation = job(a=HostShare(1, 8), b=HostShare(2, 8))
    assert least_room({"a": 1, "b": 2}, Cores(8, False), allocation).too_few_places == ""
    few = least_room({"a": 1, "b": 3}, Cores(8, False), allocation).too_few_places
    assert few == "Slurm job 41 counts on 2 of the 3 ranks on b"
