"""Measuring ranks: what is measured on which topology, and that all ranks agree on it.  No time is looked at."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace

import numpy
import pytest

from mpidist.cluster.topology import Topology
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.ways import selection
from mpidist.collectives.ways.executor import Executor
from mpidist.errors import RankFailedError
from mpidist.schedules.figures import ImplausibleFigures
from mpidist.schedules.rounds import NOBODY, Schedule
from mpidist.schedules.table import algorithm
from mpidist.testing import ranks as testing_ranks
from mpidist.testing import run_ranks
from mpidist.tuning import calibration
from mpidist.tuning.calibration import Levels, Stopwatch, Times, calibrate
from mpidist.world import world_communicator

#: Enough for the smallest sizes, which are measured in any case.
NO_BUDGET = 0.0


def measured(budget_seconds=60.0, largest_bytes=1 << 16):
    communicator = world_communicator()
    figures = calibrate(communicator, budget_seconds, largest_bytes, turns=1)
    return figures, selection.eligible(communicator.facts())


@pytest.mark.parametrize("hosts", ["aa", "aaa", "ab", "aabb", "abab", "aab"])
def test_every_candidate_is_measured_at_ascending_sizes_and_all_ranks_agree(hosts):
    (figures, names), *others = run_ranks(len(hosts), measured, hosts=list(hosts))
    assert all(other == (figures, names) for other in others)
    assert set(figures.points) == set(names)
    for points in figures.points.values():
        assert [size for size, _ in points] == [4.0, 64.0, 1024.0, 16384.0, 65536.0]
        assert all(seconds > 0 for _, seconds in points)


@pytest.mark.parametrize(("hosts", "levels"), [("aa", 1), ("ab", 1), ("aabb", 2), ("aab", 2)])
def test_a_level_that_is_not_there_is_the_other_one(hosts, levels):
    model = run_ranks(len(hosts), measured, hosts=list(hosts))[0][0].model
    assert (model.intra is model.inter) == (levels == 1)
    for level in (model.intra, model.inter):
        assert len(level.exchange) >= 2 and len(level.one_way) >= 2 and level.reduction
        assert all(taken > 0 for _, taken in (*level.exchange, *level.one_way)) and level.gamma >= 0


def test_links_are_no_more_than_the_ranks_of_a_node():
    model = run_ranks(4, measured, hosts=list("aabb"))[0][0].model
    assert model.links_per_node in (None, 1)
    assert run_ranks(2, measured, hosts=list("ab"))[0][0].model.links_per_node is None


def test_without_a_budget_there_are_still_points_of_each_candidate():
    figures, names = run_ranks(2, measured, NO_BUDGET)[0]
    assert {name: len(points) for name, points in figures.points.items()} == dict.fromkeys(names, 1)


def test_the_slowest_rank_counts():
    def ranks():
        communicator = world_communicator()
        return Stopwatch(communicator).slowest([communicator.rank, -communicator.rank]).tolist()

    assert run_ranks(3, ranks) == [[2.0, 0.0]] * 3


def test_contenders_take_turns_and_are_called_as_often_on_all_ranks():
    def ranks():
        called = [0, 0]

        def run(index):
            called[index] += 1

        stopwatch = Stopwatch(world_communicator(), turns=3)
        return called, stopwatch.compare({"first": lambda: run(0), "second": lambda: run(1)}).seconds

    first, *others = run_ranks(3, ranks)
    assert all(other == first for other in others)
    assert all(calls >= 3 for calls in first[0]) and list(first[1]) == ["first", "second"]


def given(monkeypatch, seconds):
    """Let a comparison take ``seconds(name, bytes)`` in place of measuring."""

    def compare(stopwatch, runs, steady=3.0):
        numbers = {name: re.search("of ([0-9]+) bytes", name) for name in runs}
        return Times({name: seconds(name, int(found[1]) if found else 0) for name, found in numbers.items()}, 1, "")

    monkeypatch.setattr(Stopwatch, "compare", compare)


def test_what_is_far_behind_is_not_measured_at_longer_sizes(monkeypatch):
    # from 256 KiB on "ring" takes ten times as long as the others
    given(monkeypatch, lambda name, nbytes: (10 if name.startswith("ring") else 1) * (1e-6 + 1e-9 * nbytes))
    figures, _ = run_ranks(2, measured, 60.0, 1 << 24)[0]
    assert [size for size, _ in figures.points["ring"]][-1] == 1 << 18
    assert [size for size, _ in figures.points["shared_memory"]][-1] == 1 << 24


# -- segments ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def room(monkeypatch):
    """Give threads the memory that ranks of a node have."""
    monkeypatch.setattr(testing_ranks, "_PLACE_BYTES", 1 << 20)


def in_segments(kib, factor):
    """Return seconds by name and bytes: all take 2 ns a byte, those in segments of `kib` KiB `factor` times that."""
    return lambda name, nbytes: (factor if f"{kib} KiB" in name else 2.0) * (1e-6 + 1e-9 * nbytes)


def test_every_size_of_segments_that_fits_is_compared_from_2_mib_on(monkeypatch, room):
    given(monkeypatch, in_segments(256, 2.0))
    figures, _ = run_ranks(2, measured, 60.0, 1 << 24)[0]
    assert list(figures.segments) == [1 << 18, 1 << 19, 1 << 20]  # there is 1 MiB between two ranks
    assert {tuple(nbytes for nbytes, _ in points) for points in figures.segments.values()} == {(4.0 * 2**20, 2.0**24)}
    assert figures.segment_bytes is None


@pytest.mark.parametrize(("factor", "chosen"), [(1.8, 1 << 18), (1.9, None), (2.5, None)])
def test_segments_that_are_clearly_quicker_are_chosen(monkeypatch, room, factor, chosen):
    given(monkeypatch, in_segments(256, factor))
    figures, _ = run_ranks(2, measured, 60.0, 1 << 24)[0]
    assert figures.segment_bytes == chosen
    seconds = dict(figures.points["shared_memory"])
    assert seconds[2.0**24] == (factor if chosen else 2.0) * (1e-6 + 1e-9 * 2**24)
    assert seconds[2.0**20] == 2.0 * (1e-6 + 1e-9 * 2**20)


@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_between_nodes_no_segments_are_compared(monkeypatch, hosts):
    given(monkeypatch, in_segments(256, 1.0))
    figures, _ = run_ranks(len(hosts), measured, 60.0, 1 << 22, hosts=list(hosts))[0]
    assert figures.segments == {} and figures.segment_bytes is None


# -- what is refused --------------------------------------------------------------------------------------------------


def compared(monkeypatch, *tries):
    """Return what a comparison makes of the seconds of turns, try by try, and how many tries were not made."""
    left = list(tries)
    monkeypatch.setattr(Stopwatch, "_times", lambda *_: numpy.array(left.pop(0)))
    return Stopwatch.__new__(Stopwatch).compare({"ring of 8 bytes": None}), len(left)


def test_the_quicker_quarter_of_the_turns_counts(monkeypatch):
    times = [[3.0], [1.0], [2.0], [1.5], [99.0]]
    assert compared(monkeypatch, times) == (({"ring of 8 bytes": 1.5}, 2.0 / 1.5, "ring of 8 bytes"), 0)


def test_what_was_disturbed_is_measured_again(monkeypatch):
    disturbed = [[1.0], [1.0], [4.0], [4.0], [4.0]]
    found, left = compared(monkeypatch, disturbed, [[2.0]] * 5, [[3.0]] * 5)
    assert (found.check(), left) == ([2.0], 1)


def test_what_is_always_disturbed_ends_the_calibration_with_the_reason(monkeypatch):
    found, left = compared(
        monkeypatch, *[[[1.0], [1.0], [4.0 + more], [4.0 + more], [4.0 + more]] for more in (1, 0, 2)]
    )
    assert left == 0 and found.unsteady == 4.0
    with pytest.raises(ImplausibleFigures, match="ring of 8 bytes took 4.0 times as long in half of its turns as in"):
        found.check()


class Clocks:
    """A clock for each rank, by which all that is measured takes latency and bytes, and nothing else any time."""

    def __init__(self, monkeypatch, latency, seconds_per_byte):
        self._ranks, self._latency, self._per_byte = threading.local(), latency, seconds_per_byte
        monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=self.now))
        full = {"full": lambda count, value, dtype: SimpleNamespace(nbytes=count * numpy.dtype(dtype).itemsize)}
        monkeypatch.setattr(calibration, "numpy", SimpleNamespace(**{**vars(numpy), **full}))
        monkeypatch.setattr(calibration, "_all_reduce", lambda communicator, way, source, work: self.run(work.nbytes))
        monkeypatch.setattr(Levels, "_playing", lambda levels, rounds, chunks, nbytes: self.run(len(rounds) * nbytes))
        for owner, name in ((Stopwatch, "slowest"), (Communicator, "barrier")):
            monkeypatch.setattr(owner, name, self._after(self.run(8), getattr(owner, name)))

    def now(self):
        return getattr(self._ranks, "seconds", 0.0)

    def run(self, nbytes):
        def run():
            self._ranks.seconds = self.now() + self._latency + nbytes * self._per_byte

        return run

    @staticmethod
    def _after(run, do):
        def both(*args):
            run()
            return do(*args)

        return both


@pytest.mark.parametrize("hosts", ["aa", "aabb"])
@pytest.mark.parametrize("latency", [1e-6, 1e-4, 5e-3])
@pytest.mark.parametrize("bytes_per_second", [1e6, 1e8, 1e10])
def test_a_calibration_takes_less_than_a_minute_however_slow_the_ranks_are(
    hosts, latency, bytes_per_second, monkeypatch
):
    """From shared memory to a link of 8 Mbit/s whose messages take 5 ms; by a clock of its own, no second passes."""
    clocks = Clocks(monkeypatch, latency, 1 / bytes_per_second)

    def ranks():
        calibrate(world_communicator())
        return clocks.now()

    taken = run_ranks(len(hosts), ranks, hosts=list(hosts))
    assert 0 < max(taken) < 60


def test_a_rank_that_fails_meanwhile_ends_it_on_the_others():
    def ranks():
        communicator = world_communicator()
        if communicator.rank == 1:
            raise ArithmeticError("not me")
        calibrate(communicator, 1.0, 1 << 16, turns=1)

    with pytest.raises(ArithmeticError) as error:
        run_ranks(2, ranks)
    assert isinstance(error.value.rank_errors[0], RankFailedError)


# -- rounds -----------------------------------------------------------------------------------------------------------


def test_a_rank_alone_in_its_circle_or_in_none_is_idle():
    for rank in (0, 3):
        for rounds in calibration._kinds([[0], [1, 2]], rank).values():
            assert {(each.send_to, each.receive_from) for each in rounds} == {(NOBODY, NOBODY)}
    (first, second) = calibration._kinds([[0, 2, 4], [1, 3]], 4)["message"]  # the last of an odd number has no partner
    assert (first.send_to, second.send_to) == (NOBODY, NOBODY)


def played(size: int, kind: str) -> list:
    """Return the buffers after the rounds of a kind; before, rank r has r + 1 in one chunk and 10 r in the other."""

    def on_rank():
        communicator = world_communicator()
        buffer = numpy.array([communicator.rank + 1.0, 10.0 * communicator.rank])
        rounds = calibration._kinds([range(size)], communicator.rank)[kind]
        schedule = Schedule(kind, "all_reduce", lambda _: 2, lambda *_: iter(rounds))
        with communicator.control.turnstile:
            Executor(schedule, communicator.transport, buffer).run(communicator.control.watch(kind))
        return buffer.tolist()

    return run_ranks(size, on_rank)


@pytest.mark.parametrize(
    ("kind", "buffers"),
    [
        ("exchange", [[1.0, 2.0], [2.0, 1.0]]),  # what came is sent on
        (
            "reduction",
            [[1.0 + 11.0, 2.0], [2.0 + 2.0, 11.0]],
        ),  # rank 0: 0 + 2, and then 1 + (10 + 1) for the first half
        ("reduction in place", [[6.0, 0.0], [6.0, 10.0]]),
    ],
)
def test_what_two_neighbours_do(kind, buffers):
    assert played(2, kind) == buffers


def test_there_and_back():
    assert played(3, "message") == [[1.0, 0.0], [1.0, 10.0], [3.0, 20.0]]
    assert played(3, "one-way reduction") == [[1.0 + 3.0, 0.0], [3.0, 10.0], [3.0, 20.0]]


@pytest.mark.parametrize("hosts", ["aa", "ab", "aaa", "aabb", "aaab"])
def test_every_level_that_there_is_gets_points_in_turn_with_schedules(hosts):
    sizes, ring = [8, 64], algorithm("all_reduce", "ring")

    def on_rank():
        levels = Levels(Stopwatch(world_communicator(), turns=3), 256)
        return levels.measure(sizes, {"ring": levels.play(ring, 256)}).seconds, levels.model()

    (seconds, model), *others = run_ranks(len(hosts), on_rank, hosts=list(hosts))
    assert all(other == (seconds, model) for other in others), "all ranks have the same figures"
    assert list(seconds) == ["ring"] and seconds["ring"] > 0
    for level in (model.intra, model.inter):
        assert [nbytes for nbytes, _ in level.exchange] == sizes
        assert [nbytes for nbytes, _ in level.in_place_reduction] == sizes
        assert all(taken > 0 for _, taken in level.exchange)
    assert (model.intra is model.inter) == (Topology(hosts).node_count in (1, len(hosts)))


def test_reducing_takes_what_a_round_takes_more_with_it_and_links_are_those_of_all_ranks_together(monkeypatch):
    def seconds(name, nbytes):
        if name == "a schedule without rounds":
            return 1e-6
        times = {"reduction": 3, "exchange of all ranks": 2}
        return 1e-6 + 2e-9 * nbytes * next((n for kind, n in times.items() if name.startswith(kind)), 1)

    given(monkeypatch, seconds)

    def on_rank():
        levels = Levels(Stopwatch(world_communicator()), 1000)
        levels.measure([100, 1000], {})
        return levels.model()

    model = run_ranks(8, on_rank, hosts=list("aaaabbbb"))[0]
    numpy.testing.assert_allclose(model.inter.exchange, [(100.0, 1e-7), (1000.0, 1e-6)])
    numpy.testing.assert_allclose(model.inter.reduction, [(100.0, 2e-7), (1000.0, 2e-6)])
    assert (model.inter.beta, model.inter.gamma) == pytest.approx((1e-9, 2e-9))
    assert model.call_seconds == 1e-6
    assert model.links_per_node == 2  # four ranks together take twice as long as one
