"""Measured figures: what lies between the points and beyond them, and that a damaged store is seen as such."""

from __future__ import annotations

import copy
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.cluster.topology import Topology
from mpidist.schedules.cost import CostModel, Level, cost
from mpidist.schedules.figures import Figures, ImplausibleFigures
from mpidist.schedules.table import algorithm

NODE = Topology(["a"] * 4)
NODES = Topology("ab")
MODEL = CostModel(Level.measured([(1.0, 1e-6), (1000.0, 2e-6)]), Level(5e-6, 1e-9, 1e-10), links_per_node=2)
FIGURES = Figures(MODEL, {"native": ((4.0, 2e-6), (400.0, 8e-6)), "ring": ()})


def test_a_measured_size_takes_what_was_measured():
    assert FIGURES.seconds("native", 4, NODE) == pytest.approx(2e-6)
    assert FIGURES.seconds("native", 400, NODE) == pytest.approx(8e-6)


def test_between_two_sizes_logarithms_are_interpolated():
    assert FIGURES.seconds("native", 40, NODE) == pytest.approx(math.sqrt(2e-6 * 8e-6))


@pytest.mark.parametrize("nbytes", [0, 1, 3])
def test_shorter_ones_take_what_the_shortest_does(nbytes):
    assert FIGURES.seconds("native", nbytes, NODE) == pytest.approx(2e-6)


def test_longer_ones_take_time_by_the_byte():
    assert FIGURES.seconds("native", 4000, NODE) == pytest.approx(10 * 8e-6)


def test_a_schedule_that_was_not_measured_is_priced_by_the_model():
    ring = algorithm("all_reduce", "ring")
    assert FIGURES.seconds("ring", 1000, NODE, ring) == cost(ring, 4, 1000, MODEL, NODE)


def test_of_what_is_no_schedule_and_was_not_measured_nothing_is_known():
    assert FIGURES.seconds("shared_memory", 1000, NODE) is None


#: Points of strictly ascending sizes.
points = st.dictionaries(
    st.integers(1, 1 << 40), st.floats(1e-9, 1e3, allow_nan=False, allow_infinity=False), max_size=6
).map(lambda found: tuple((float(size), found[size]) for size in sorted(found)))


def test_all_points_of_a_level_are_stored_and_reductions_may_take_no_time():
    level = Level.measured(*[[(4.0, taken), (8.0, 2 * taken)] for taken in (1e-6, 2e-6, 0.0, 3e-6, 4e-6)])
    figures = Figures(CostModel(level, level, None, 1e-7), {})
    assert Figures.from_json(json.loads(json.dumps(figures.to_json()))) == figures


@given(st.dictionaries(st.sampled_from(["ring", "native", "shared_memory"]), points), st.none() | st.integers(1, 8))
def test_what_is_stored_comes_back(measured, links):
    segments = {1 << 18: ((4.0, 1e-6),), 1 << 20: ((4.0, 2e-6),)}
    figures = Figures(CostModel(MODEL.intra, MODEL.inter, links), measured, segments, 1 << 18)
    assert Figures.from_json(json.loads(json.dumps(figures.to_json()))) == figures


@given(points.filter(bool), st.floats(0, 1e12))
def test_seconds_lie_between_those_of_the_neighbours(measured, nbytes):
    seconds = Figures(MODEL, {"native": measured}).seconds("native", nbytes, NODE)
    inside = [taken for _, taken in measured]
    if nbytes <= measured[-1][0]:
        assert min(inside) * 0.999 <= seconds <= max(inside) * 1.001
    else:
        assert seconds == pytest.approx(measured[-1][1] * nbytes / measured[-1][0])


def damaged(path, value):
    found = copy.deepcopy(FIGURES.to_json())
    place = found
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return found


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        {},
        {"model": {}, "points": {}},
        damaged(["points"], 3),
        damaged(["points", "native"], [[4, 1e-6], [4, 1e-6]]),
        damaged(["points", "native"], [[8, 1e-6], [4, 1e-6]]),
        damaged(["points", "native"], [[4, 0.0]]),
        damaged(["points", "native"], [[4, float("nan")]]),
        damaged(["points", "native"], [[4, 1e-6, 1]]),
        damaged(["points", "native"], [["four", 1e-6]]),
        damaged(["model", "intra", "alpha"], -1.0),
        damaged(["model", "intra", "beta"], float("inf")),
        damaged(["model", "inter"], None),
        damaged(["model", "links_per_node"], "many"),
        damaged(["model", "intra", "exchange"], [[1, "x"]]),
        damaged(["model", "intra", "one_way_reduction"], [[4, -1e-6]]),
    ],
)
def test_what_is_damaged_is_refused(found):
    with pytest.raises(ValueError):
        Figures.from_json(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"segment_bytes": 1 << 19}, "segments of 524288 bytes are chosen, and were not measured"),
        ({"segments": {"8": [[4.0, 1e-6]], "16": [[8.0, 1e-6]]}}, "with different all-reduces"),
        ({"segments": {"8": [[4.0, -1e-6]]}}, "expected points of ascending sizes"),
        ({"segments": None}, "no figures of all-reduces"),
    ],
)
def test_segments_that_contradict_themselves_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        Figures.from_json({**FIGURES.to_json(), **change})


# -- figures of no machine --------------------------------------------------------------------------------------------

GOOD = Level(1e-6, 1e-9, 1e-10)


def pairs(*found):
    return tuple((float(nbytes), seconds) for nbytes, seconds in found)


def of(level=GOOD, segments=None, **series):
    return Figures(CostModel(level, level), {name: pairs(*found) for name, found in series.items()}, segments or {})


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        (of(Level(0.0, 0.0)), "an exchange inside a node of 1 bytes takes 0 s; that is inf bytes a second"),
        (of(Level(0.11, 1e-9)), "an exchange inside a node of 1 bytes takes 0.11 s; a real one at most 0.1 s"),
        (
            of(Level(1e-6, 1 / 49e6)),
            r"takes 21.9 s; that is 4.9e\+07 bytes a second, and a real one has 5e\+07 to 2e\+12",
        ),
        (of(Level(1e-6, 1 / 2.1e12)), r"bytes a second, and a real one has 5e\+07 to 2e\+12"),
        (
            of(Level(1e-6, 1e-9, one_way=[(1, 4e-6), (8, 1e-6)])),
            "a message inside a node of 8 bytes takes 1e-06 s; fewer",
        ),
        (of(ring=[(4, 0.2)]), "ring of 4 bytes takes 0.2 s; a real one at most 0.1 s"),
        (of(ring=[(4, 1e-6), (1 << 30, 5e-4)]), "ring of 1073741824 bytes takes 0.0005 s; that is"),
        (of(ring=[(4, 4e-6), (64, 1e-6)]), "ring of 64 bytes takes 1e-06 s; fewer bytes take 4e-06 s"),
        (of(ring=[(4, 4e-6), (8, 2e-6), (16, 1e-6)]), "ring of 16 bytes takes 1e-06 s; fewer bytes take 4e-06 s"),
        (
            of(ring=[(4, 1e-6), (1 << 26, 180.0)]),
            r"takes 180 s; that is 3.73e\+05 bytes .* a real one has 1.25e\+07 to",
        ),
        (
            of(segments={1 << 18: pairs((4, 1e-6), (1 << 26, 180.0))}),
            "segments of 256 KiB of 67108864 bytes takes 180",
        ),
    ],
)
def test_figures_of_no_machine_are_refused(figures, reason):
    with pytest.raises(ImplausibleFigures, match=reason):
        figures.check(NODE)


@pytest.mark.parametrize(
    ("figures", "topology"),
    [
        (of(ring=[(4, 1e-6), (64, 1e-6), (1024, 4e-7), (4096, 2e-6)]), NODE),  # noise
        (of(Level(0.09, 1 / 51e6), ring=[(4, 0.1)]), NODE),
        (of(Level(1e-6, 0.0, exchange=[(1, 1e-6), (1 << 18, 0.09)])), NODE),  # too short to tell a bandwidth
        (of(Level(0.5, 1e-5), ring=[(4, 1.0), (1 << 26, 180.0)]), NODES),  # a far link may be slow
        (of(ring=[(4, 1e-6), (1 << 26, 5.3)]), NODE),
        (of(ring=[(4, 1e-6), (1 << 26, 80.0)]), Topology("a" * 64)),  # far more ranks than cores
    ],
)
def test_figures_of_a_slow_or_noisy_machine_are_taken(figures, topology):
    figures.check(topology)


def test_between_nodes_too_nothing_is_for_nothing():
    with pytest.raises(ImplausibleFigures, match="between nodes"):
        of(Level(1e-6, 1 / 2.1e12)).check(NODES)
