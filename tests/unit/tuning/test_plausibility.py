"""Figures that no machine has are refused, each with its reason."""

from __future__ import annotations

import pytest

from mpidist.cluster.topology import Topology
from mpidist.schedules.cost import CostModel, Level
from mpidist.schedules.figures import Figures
from mpidist.tuning.plausibility import ImplausibleFigures, check

NODE, NODES = Topology("aa"), Topology("ab")
GOOD = Level(1e-6, 1e-9, 1e-10)


def points(*pairs):
    return tuple((float(nbytes), seconds) for nbytes, seconds in pairs)


def of(level=GOOD, segments=None, **series):
    return Figures(CostModel(level, level), {name: points(*pairs) for name, pairs in series.items()}, segments or {})


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        (of(Level(0.0, 1e-9)), "a message inside a node takes 0 s before its first byte"),
        (of(Level(0.11, 1e-9)), "a message inside a node takes 0.11 s"),
        (of(Level(1e-6, 0.0)), "messages inside a node have inf bytes a second"),
        (of(Level(1e-6, 1 / 49e6)), r"have 4.9e\+07 bytes a second, and real ones 5e\+07 to 2e\+12"),
        (of(Level(1e-6, 1 / 2.1e12)), r"have 2.1e\+12 bytes a second"),
        (of(ring=[(4, 0.2)]), "ring takes 0.2 s for 4 bytes inside a node"),
        (of(ring=[(4, 1e-6), (1 << 30, 5e-4)]), "ring takes 0.0005 s for 1073741824 bytes"),
        (of(ring=[(4, 4e-6), (64, 1e-6)]), "ring takes 4e-06 s for 4 bytes, and 1e-06 s for 64"),
        (of(ring=[(4, 4e-6), (8, 2e-6), (16, 1e-6)]), "ring takes 4e-06 s for 4 bytes, and 1e-06 s for 16"),
        (of(ring=[(4, 1e-6), (1 << 26, 180.0)]), r"ring takes 180 s for 67108864 .* 3.73e\+05 .* at least 2.5e\+07"),
        (of(segments={1 << 18: points((4, 1e-6), (1 << 26, 180.0))}), "segments of 262144 bytes takes 180 s"),
        (of(segments={1 << 18: points((4, 4e-6), (8, 1e-6))}), "shared_memory in segments of 262144 bytes takes"),
        (of(Level(1e-6, 1e-9, one_way=[(1, 4e-6), (8, 1e-6)])), "one way inside a node takes 4e-06 s for 1 bytes"),
        (of(Level(1e-6, 1e-9, reduction=[(1, 4e-6), (8, 1e-6)])), "reduction inside a node takes 4e-06 s"),
        (of(Level(1e-6, 0.0, exchange=[(1, 1e-6), (1 << 19, 1e-3)])), "have inf bytes a second"),
    ],
)
def test_figures_of_no_machine_are_refused(figures, reason):
    with pytest.raises(ImplausibleFigures, match=reason):
        check(figures, NODE)


@pytest.mark.parametrize(
    ("figures", "topology"),
    [
        (of(ring=[(4, 1e-6), (64, 1e-6), (1024, 4e-7), (4096, 2e-6)]), NODE),  # noise
        (of(Level(0.1, 1 / 50e6), ring=[(4, 0.1)]), NODE),
        (of(Level(1e-6, 0.0, exchange=[(1, 1e-6), (1 << 18, 1e-6)])), NODE),  # too short to tell a bandwidth
        (of(Level(0.5, 1e-5), ring=[(4, 1.0)]), NODES),  # a far link may be slow
        (of(Level(0.5, 1e-5), ring=[(4, 1.0), (1 << 26, 180.0)]), NODES),
        (of(ring=[(4, 1e-6), (1 << 26, 2.6)]), NODE),
        (of(ring=[(4, 1e-6), (1 << 26, 80.0)]), Topology("a" * 64)),  # far more ranks than cores
        (of(ring=[(4, 1e-6), (1 << 18, 0.09)]), NODE),  # too short to tell a bandwidth
    ],
)
def test_figures_of_a_slow_or_noisy_machine_are_taken(figures, topology):
    check(figures, topology)


@pytest.mark.parametrize("level", [Level(1e-6, 0.0), Level(1e-6, 1 / 2.1e12), Level(0.0, 1e-9)])
def test_between_nodes_too_nothing_is_for_nothing(level):
    with pytest.raises(ImplausibleFigures, match="between nodes"):
        check(of(level), NODES)
