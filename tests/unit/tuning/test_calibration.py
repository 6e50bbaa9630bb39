"""Measuring ranks: what is measured on which topology, and that all ranks agree on it.  No time is looked at."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy
import pytest

from mpidist.cluster.topology import Topology
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.ways import selection
from mpidist.errors import RankFailedError
from mpidist.testing import ranks as testing_ranks
from mpidist.testing import run_ranks
from mpidist.tuning import calibration
from mpidist.tuning.calibration import Stopwatch, calibrate, measure_levels
from mpidist.tuning.plausibility import ImplausibleFigures
from mpidist.world import world_communicator

#: Enough for the smallest sizes, which are measured in any case.
NO_BUDGET = 0.0


def measured(budget_seconds=60.0, largest_bytes=1 << 16):
    communicator = world_communicator()
    figures = calibrate(communicator, budget_seconds, largest_bytes, rounds=1)
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
        assert level.alpha > 0 and level.gamma >= 0


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

        stopwatch = Stopwatch(world_communicator(), rounds=3)
        seconds = stopwatch.compare({"first": lambda: run(0), "second": lambda: run(1)}, 8)
        return called, seconds

    first, *others = run_ranks(3, ranks)
    assert all(other == first for other in others)
    assert all(calls >= 3 for calls in first[0]) and len(first[1]) == 2


def given(monkeypatch, seconds):
    """Let a comparison take ``seconds(name, bytes)`` in place of measuring."""

    def compare(stopwatch, runs, nbytes, times_more=1):
        return [seconds(name, nbytes) for name in runs]

    monkeypatch.setattr(Stopwatch, "compare", compare)


def test_what_is_far_behind_is_not_measured_at_long_sizes(monkeypatch):
    # from 256 KiB on "ring" takes ten times as long as the others
    given(monkeypatch, lambda name, nbytes: (10 if name == "ring" else 1) * (1e-6 + 1e-9 * nbytes))
    figures, _ = run_ranks(2, measured, 60.0, 1 << 24)[0]
    assert [size for size, _ in figures.points["ring"]][-1] == 1 << 20  # it was far behind twice
    assert [size for size, _ in figures.points["shared_memory"]][-1] == 1 << 24


def test_what_seems_to_beat_the_table_is_measured_once_more_beside_it(monkeypatch):
    asked = []

    def compare(stopwatch, runs, nbytes, times_more=1):
        asked.append((len(runs), times_more))
        return [5e-5, 4e-5] if times_more > 1 else [1e-4] + [1e-5 * (index + 1) for index in range(len(runs) - 1)]

    monkeypatch.setattr(Stopwatch, "compare", compare)
    runs = dict.fromkeys(["shared_memory", "native", "ring"], lambda: None)
    stopwatch = Stopwatch.__new__(Stopwatch)
    confirmed = calibration._confirmed(stopwatch, runs, "shared_memory", 8)
    assert confirmed == {"shared_memory": 5e-5, "native": 4e-5, "ring": 2e-5}
    assert asked == [(3, 1), (2, calibration._DUEL_ROUNDS)]
    del asked[:]
    confirmed = calibration._confirmed(stopwatch, runs, "native", 8)
    assert confirmed == {"shared_memory": 1e-4, "native": 1e-5, "ring": 2e-5}
    assert asked == [(3, 1)]


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


def test_halves_that_disagree_are_measured_again_and_the_median_counts(monkeypatch):
    tries = [[[1.0], [1.0], [4.0], [4.0]], [[1.0], [3.0], [2.0], [9.0]]]
    stopwatch = Stopwatch.__new__(Stopwatch)
    monkeypatch.setattr(Stopwatch, "_times", lambda *_: numpy.array(tries.pop(0)))
    assert stopwatch.compare({"ring": None}, 8) == [2.5]
    assert tries == []


def test_halves_that_never_agree_end_the_calibration_with_the_reason(monkeypatch):
    stopwatch = Stopwatch.__new__(Stopwatch)
    monkeypatch.setattr(Stopwatch, "_times", lambda *_: numpy.array([[1e-6], [1e-6], [4e-6], [4e-6]]))
    with pytest.raises(ImplausibleFigures, match=r"ring of 8 bytes took 1.0 us and 4.0 us in the two halves"):
        stopwatch.compare({"ring": None}, 8)


def test_one_slow_round_is_no_disagreement(monkeypatch):
    stopwatch = Stopwatch.__new__(Stopwatch)
    monkeypatch.setattr(Stopwatch, "_times", lambda *_: numpy.array([[1.0], [1.0], [1.0], [1.0], [1.0], [99.0]]))
    assert stopwatch.compare({"ring": None}, 8) == [1.0]


class Clocks:
    """A clock for each rank, by which all that is measured takes latency and bytes, and nothing else any time."""

    def __init__(self, monkeypatch, latency, seconds_per_byte):
        self._ranks, self._latency, self._per_byte = threading.local(), latency, seconds_per_byte
        monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=self.now))
        monkeypatch.setattr(calibration, "_all_reduce", lambda communicator, way, source, work: self.run(work.nbytes))
        monkeypatch.setattr(calibration, "_zeros", lambda nbytes: SimpleNamespace(nbytes=nbytes))
        monkeypatch.setattr(calibration, "_addition", self.run)
        monkeypatch.setattr(calibration, "_exchange", lambda communicator, circle: self.run)
        monkeypatch.setattr(calibration, "_one_way", lambda *where: self.run)
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


@pytest.mark.parametrize("rank", range(5))
def test_neighbours_on_the_node_and_between_nodes(rank):
    topology = Topology(list("aabba"))  # node a: 0, 1, 4; node b: 2, 3
    around_node = {0: (1, 4), 1: (4, 0), 4: (0, 1), 2: (3, 3), 3: (2, 2)}
    leaders, everyone = {0: (2, 2), 2: (0, 0)}, {0: (2, 2), 2: (0, 0), 1: (3, 3), 3: (1, 1)}
    assert calibration._around_node(topology, rank) == around_node[rank]
    assert calibration._around_nodes(topology, rank) == leaders.get(rank)
    assert calibration._around_nodes(topology, rank, everyone=True) == everyone.get(rank)


def test_a_rank_that_fails_meanwhile_ends_it_on_the_others():
    def ranks():
        communicator = world_communicator()
        if communicator.rank == 1:
            raise ArithmeticError("not me")
        measure_levels(communicator, 1.0, 1 << 16, rounds=1)

    with pytest.raises(ArithmeticError) as error:
        run_ranks(2, ranks)
    assert isinstance(error.value.rank_errors[0], RankFailedError)
