"""Rounds that are measured: who speaks to whom, what is moved, and that points come out for every level."""

from __future__ import annotations

import numpy
import pytest

from mpidist.cluster.topology import Topology
from mpidist.collectives.ways.executor import Executor
from mpidist.schedules.rounds import NOBODY, Schedule
from mpidist.schedules.table import algorithm
from mpidist.testing import run_ranks
from mpidist.tuning.measured_rounds import MeasuredRounds, Neighbours, Taken
from mpidist.world import world_communicator


def test_neighbours_go_round_their_circle():
    found = Neighbours.of([[0, 2, 4], [1, 3]], 6)
    assert found.next == [2, 3, 4, 1, 0, NOBODY]
    assert found.previous == [4, 3, 0, 1, 2, NOBODY]
    assert found.partner == [2, 3, 0, 1, NOBODY, NOBODY]


def test_a_circle_of_one_has_no_neighbours():
    found = Neighbours.of([[0], [1, 2]], 3)
    assert (found.next[0], found.previous[0], found.partner[0]) == (NOBODY, NOBODY, NOBODY)


def played(size: int, chunks: int, kind: str, reduce: bool) -> list:
    """Return the buffers after the rounds of a kind; before, rank r has r + 1 in one chunk and 10 r in the other."""
    neighbours = Neighbours.of([range(size)], size)

    def on_rank():
        communicator = world_communicator()
        buffer = numpy.array([communicator.rank + 1.0, 10.0 * communicator.rank][:chunks])
        rounds = getattr(neighbours, kind)
        schedule = Schedule(kind, "all_reduce", lambda _: chunks, lambda rank, _: rounds(rank, reduce))
        with communicator.control.turnstile:
            Executor(schedule, communicator.transport, buffer).run(communicator.control.watch(kind))
        return buffer.tolist()

    return run_ranks(size, on_rank)


def test_what_is_sent_on_was_received_just_before():
    assert played(2, 2, "swap", reduce=False) == [[1.0, 2.0], [2.0, 1.0]]
    # rank 0: 0 + 2, and then 1 + (10 + 1) comes for the first half
    assert played(2, 2, "swap", reduce=True) == [[1.0 + 11.0, 2.0], [2.0 + 2.0, 11.0]]


def test_there_and_back():
    assert played(3, 1, "there_and_back", reduce=False) == [[1.0], [1.0], [3.0]]
    assert played(3, 1, "there_and_back", reduce=True) == [[1.0 + 3.0], [3.0], [3.0]]


def test_in_place():
    assert played(2, 1, "in_place", reduce=True) == [[6.0], [6.0]]


@pytest.mark.parametrize("hosts", ["aa", "ab", "aaa", "aabb", "aaab"])
def test_every_level_that_there_is_gets_points(hosts):
    sizes = [8, 64]
    ring = algorithm("all_reduce", "ring")

    def on_rank():
        rounds = MeasuredRounds(world_communicator(), 256)
        seconds = rounds.measure(sizes, [ring], 256)
        return rounds.model(), seconds

    results = run_ranks(len(hosts), on_rank, hosts=list(hosts))
    (model, seconds), *others = results
    assert all(other == (model, seconds) for other in others), "all ranks have the same figures"
    assert len(seconds) == 1 and seconds[0].seconds > 0
    for level in (model.intra, model.inter):
        assert [nbytes for nbytes, _ in level.exchange] == sizes
        assert [nbytes for nbytes, _ in level.in_place_reduction] == sizes
        assert all(taken > 0 for _, taken in level.exchange)
    one_level = Topology(hosts).node_count in (1, len(hosts))
    assert (model.intra == model.inter) == one_level


STEADY, MOVED, SHAKEN = Taken(1.0, 1.0, 1.05), Taken(1.5, 1.0, 2.0), Taken(1.0, 1.3, 1.0)


@pytest.mark.parametrize(
    "tries, kept",
    [
        ([[STEADY, MOVED], [STEADY, SHAKEN], [STEADY, STEADY]], [STEADY, STEADY]),
        ([[MOVED], [SHAKEN], [MOVED], [MOVED]], [SHAKEN]),
    ],
)
def test_what_is_measured_while_the_machine_changes_is_measured_again(monkeypatch, tries, kept):
    left = list(tries)
    monkeypatch.setattr(MeasuredRounds, "_compared", lambda self, runs: left.pop(0))
    assert object.__new__(MeasuredRounds)._steadiest([]) == kept
    assert not left
    assert MOVED.unsteady == 1.0
