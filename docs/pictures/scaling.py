"""All-reduces on up to 100 000 ranks, as `mpidist.schedules` predicts them: the example of ``docs/simulate.md``."""

from __future__ import annotations

from functools import cache

from docs.pictures import axes
from docs.pictures.axes import Axis
from docs.pictures.svg import SMALL, Drawing, Theme
from mpidist.cluster.topology import Topology
from mpidist.schedules.comparison import candidates
from mpidist.schedules.cost import CostModel
from mpidist.schedules.networks import network
from mpidist.schedules.simulator import simulate

#: The job and its links, as ``mpidist simulate`` has them when nothing else is said.
BYTES, RANKS_PER_NODE = 100_000_000, 8
MODEL = CostModel(intra=network("pcie-4").level(), inter=network("infiniband-hdr").level(), links_per_node=1)

#: The last is no power of two: 100 000 ranks.
_NODES = (*(2**power for power in range(1, 14)), 12_500)

#: What the simulator calls an algorithm -> its name in the picture, and its colour.
_CURVES = {
    "ring": ("ring", "network"),
    "recursive_doubling": ("recursive doubling", "failed"),
    "hierarchical_ring": ("ring, two levels", "rank"),
    "rabenseifner": ("Rabenseifner", "shared"),
}

_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 368, 80, 368


@cache
def seconds() -> dict[str, dict[int, float]]:
    """Return by algorithm what an all-reduce takes, by the number of ranks."""
    found: dict[str, dict[int, float]] = {name: {} for name in _CURVES}
    for nodes in _NODES:
        topology = Topology([f"node{node}" for node in range(nodes) for _ in range(RANKS_PER_NODE)])
        for schedule in candidates("all_reduce", topology):
            if schedule.name in _CURVES:
                played = simulate(schedule, topology.size, BYTES, MODEL, topology)
                found[schedule.name][topology.size] = played.seconds
    return found


def scaling(theme: Theme) -> Drawing:
    drawing = Drawing(theme, "Predicted time of an all-reduce of 100 MB on 16 to 100 000 ranks", _BOTTOM + 60)
    drawing.heading(
        "An all-reduce on 100 000 ranks", f"Predicted, not measured: 100 MB, {RANKS_PER_NODE} ranks a node."
    )
    across = Axis(10, 100_000, _LEFT, _RIGHT, is_log=True)
    upwards = Axis(0.005, 2, _BOTTOM, _TOP, is_log=True)
    names = {10**power: f"{10**power:,}".replace(",", " ") for power in range(1, 6)}
    axes.columns(drawing, across, names, _TOP, _BOTTOM)
    axes.rows(drawing, upwards, {0.01: "10 ms", 0.1: "100 ms", 1: "1 s"}, _LEFT, _RIGHT)
    drawing.words((_LEFT + _RIGHT) / 2, _BOTTOM + 42, "ranks", SMALL, "muted")
    for name, (shown, colour) in _CURVES.items():
        points = [(across.at(ranks), upwards.at(time)) for ranks, time in seconds()[name].items()]
        drawing.line(*points, colour=colour, width=2.4)
        drawing.dot(*points[-1], 4, colour)
        drawing.words(_RIGHT + 10, points[-1][1] + 5, shown, SMALL, colour, at="start")
    return drawing
