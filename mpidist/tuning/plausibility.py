"""Figures that no machine has, by which nothing may be chosen: they come of measuring while others use the cores."""

from __future__ import annotations

from collections.abc import Iterator

from mpidist.cluster.topology import Topology
from mpidist.schedules.cost import Level, Points
from mpidist.schedules.figures import Figures

#: How many times longer one half of a measurement may take than the other, or fewer bytes than more bytes.
FACTOR = 3.0

#: Bytes a second of any link at most, and inside a node at least; an all-reduce there has at least this shared by its
#: ranks, which take turns where they are more than the cores.
_MOST_RATE, _LEAST_RATE = 2e12, 50e6

#: Seconds that a message, or a short all-reduce, takes inside a node at most.
_MOST_LATENCY_SECONDS = 0.1

#: From messages of so many bytes on their seconds tell a bandwidth.
_LONG_BYTES = 1 << 19


class ImplausibleFigures(ValueError):
    """Measured figures contradict one another, or what any machine can do; says which and how."""


def check(figures: Figures, topology: Topology) -> None:
    """Raise ImplausibleFigures if figures cannot be those of such ranks (Local)."""
    for fault in _faults(figures, topology):
        raise ImplausibleFigures(fault)


def _faults(figures: Figures, topology: Topology) -> Iterator[str]:
    if max(topology.local_size_of) > 1:
        yield from _level_faults("inside a node", figures.model.intra, _LEAST_RATE, _MOST_LATENCY_SECONDS)
    if topology.node_count > 1:
        yield from _level_faults("between nodes", figures.model.inter, 0.0, float("inf"))
    segments = {f"shared_memory in segments of {size} bytes": points for size, points in figures.segments.items()}
    for name, points in {**figures.points, **segments}.items():
        yield from _point_faults(name, points)
        if topology.node_count == 1 and points:
            yield from _node_faults(name, points, _LEAST_RATE / topology.size)


def _node_faults(name: str, points: Points, least_rate: float) -> Iterator[str]:
    """Give what is too slow of an all-reduce whose ranks share one memory."""
    (shortest, latency), (longest, seconds) = points[0], points[-1]
    if latency > _MOST_LATENCY_SECONDS:
        yield f"{name} takes {latency:.3g} s for {shortest:.0f} bytes inside a node"
    if longest >= _LONG_BYTES and longest < least_rate * seconds:
        rates = f"{longest / seconds:.3g} bytes a second, and real ones at least {least_rate:.3g}"
        yield f"{name} takes {seconds:.3g} s for {longest:.0f} bytes inside a node, {rates}"


def _level_faults(where: str, level: Level, least_rate: float, most_latency_seconds: float) -> Iterator[str]:
    if not 0 < level.alpha <= most_latency_seconds:
        yield f"a message {where} takes {level.alpha:.3g} s before its first byte"
    if not level.exchange or level.exchange[-1][0] >= _LONG_BYTES:
        rate = 1 / level.beta if level.beta > 0 else float("inf")
        if not least_rate <= rate <= _MOST_RATE:
            limits = f"{least_rate:.3g} to {_MOST_RATE:.3g}"
            yield f"messages {where} have {rate:.3g} bytes a second, and real ones {limits}"
    for name in ("exchange", "one_way", "reduction"):
        yield from _point_faults(f"{name.replace('_', ' ')} {where}", getattr(level, name))


def _point_faults(name: str, points: Points) -> Iterator[str]:
    """Give what is wrong with the seconds of one thing by size."""
    longest = (0.0, 0.0)
    for nbytes, seconds in points:
        if seconds <= 0 or nbytes / seconds > _MOST_RATE:
            yield f"{name} takes {seconds:.3g} s for {nbytes:.0f} bytes"
        if seconds * FACTOR < longest[1]:
            yield f"{name} takes {longest[1]:.3g} s for {longest[0]:.0f} bytes, and {seconds:.3g} s for {nbytes:.0f}"
        longest = max(longest, (nbytes, seconds), key=lambda point: point[1])
