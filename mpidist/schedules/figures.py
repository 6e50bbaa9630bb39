"""What was measured of a set of ranks: the levels of the cost model, and whole all-reduces by algorithm and size.

The levels price any schedule for any topology.  For these very ranks whole all-reduces are measured besides: MPI's own
and those through shared memory are no schedules, and of a schedule a measurement knows what a model leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy

from mpidist.cluster.topology import Topology
from mpidist.schedules.cost import CostModel, Level, Points, cost
from mpidist.schedules.rounds import Schedule

#: How many times longer half of a measurement may take than its quickest quarter, or fewer bytes than more bytes.
FACTOR = 3.0

#: Bytes a second of any link at most, and inside a node at least; an all-reduce there has at least this shared by its
#: ranks, which take turns where they are more than the cores.  Seconds that a short one takes inside a node at most.
_MOST_RATE, _LEAST_RATE, _MOST_SECONDS = 2e12, 50e6, 0.1

#: Between nodes anything may be that slow.
_NO_LIMITS = (float("inf"), 0.0)

#: From so many bytes on seconds tell a bandwidth.
_LONG_BYTES = 1 << 19


class ImplausibleFigures(ValueError):
    """Figures of no machine: they were measured while other programs used it; says which and how."""


@dataclass(frozen=True)
class Figures:
    """What was measured."""

    model: CostModel  # latency, bandwidth and reduction cost inside a node and between nodes
    # by algorithm: all-reduces of ascending sizes, as the slowest rank saw them; slow ones end at shorter sizes
    points: Mapping[str, Points]
    # by size of segments in bytes: long all-reduces through the memory of one node
    segments: Mapping[int, Points] = field(default_factory=dict)
    segment_bytes: int | None = None  # the size that is clearly quicker than the default, if one is

    def seconds(self, name: str, nbytes: float, topology: Topology, schedule: Schedule | None = None) -> float | None:
        """Return what an all-reduce of `nbytes` takes by algorithm `name`; None where nothing tells (Local)."""
        points = self.points.get(name, ())
        if points:
            return _interpolated(points, nbytes)
        return None if schedule is None else cost(schedule, topology.size, nbytes, self.model, topology)

    def check(self, topology: Topology) -> None:
        """Raise ImplausibleFigures if figures cannot be those of such ranks (Local)."""
        places = []
        if max(topology.local_size_of) > 1:
            places.append(("inside a node", self.model.intra, (_MOST_SECONDS, _LEAST_RATE)))
        if topology.node_count > 1:
            places.append(("between nodes", self.model.inter, _NO_LIMITS))
        for place, level, limits in places:
            line = [(float(nbytes), level.alpha + level.beta * nbytes) for nbytes in (1, 1 << 30)]
            _check(f"an exchange {place}", level.exchange or line, *limits)
            _check(f"a message {place}", level.one_way, *limits)
        limits = (_MOST_SECONDS, _LEAST_RATE / topology.size) if topology.node_count == 1 else _NO_LIMITS
        for name, points in self.points.items():
            _check(name, points, *limits)
        for size, points in self.segments.items():
            _check(f"shared_memory in segments of {size >> 10} KiB", points, *limits)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as what JSON can hold (Local)."""
        points = {name: list(listed) for name, listed in self.points.items()}
        segments = {str(size): list(listed) for size, listed in self.segments.items()}
        model = asdict(self.model)
        return {"model": model, "points": points, "segments": segments, "segment_bytes": self.segment_bytes}

    @classmethod
    def from_json(cls, values: Any) -> Figures:
        """Return the figures that `to_json` gave (Local)."""
        try:
            model = values["model"]
            levels = {side: _level(model[side]) for side in ("intra", "inter")}
            points = {str(name): _checked(listed) for name, listed in values["points"].items()}
            links = None if model["links_per_node"] is None else max(1, int(model["links_per_node"]))
            call_seconds = float(model["call_seconds"])
            segments = {int(size): _checked(listed) for size, listed in values["segments"].items()}
            if len({tuple(nbytes for nbytes, _ in listed) for listed in segments.values()}) > 1:
                raise ValueError("sizes of segments were measured with different all-reduces")
            best = values["segment_bytes"]
            if best is not None and best not in segments:
                raise ValueError(f"segments of {best} bytes are chosen, and were not measured")
            return cls(CostModel(levels["intra"], levels["inter"], links, call_seconds), points, segments, best)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no figures of all-reduces: {type(error).__name__}: {error}") from None


def _level(values: Mapping[str, Any]) -> Level:
    prices = {name: float(values[name]) for name in ("alpha", "beta", "gamma")}
    if not all(0 <= price < float("inf") for price in prices.values()):
        raise ValueError(f"expected seconds of 0 or more, got {prices}")
    points = (_checked(values[each.name], least=0.0) for each in fields(Level) if each.name not in prices)
    return Level(prices["alpha"], prices["beta"], prices["gamma"], *points)


def _checked(listed: Sequence[Any], least: float = 1e-30) -> Points:
    points = tuple((float(nbytes), float(seconds)) for nbytes, seconds in listed)
    sizes = [nbytes for nbytes, _ in points]
    if sizes != sorted(set(sizes)) or not all(0 < n < float("inf") and least <= t < float("inf") for n, t in points):
        raise ValueError(f"expected points of ascending sizes, bytes and seconds above 0, got {listed}")
    return points


def _interpolated(points: Points, nbytes: float) -> float:
    sizes, seconds = zip(*points, strict=True)
    if nbytes >= sizes[-1]:
        return seconds[-1] * nbytes / sizes[-1]
    return float(numpy.exp(numpy.interp(numpy.log(max(nbytes, 1.0)), numpy.log(sizes), numpy.log(seconds))))


def _check(name: str, points: Sequence[tuple[float, float]], most_seconds: float, least_rate: float) -> None:
    """Raise ImplausibleFigures if no machine takes such seconds for the shortest, the longest, or any of the bytes."""
    before = 0.0
    for nbytes, seconds in points:
        rate = nbytes / seconds if seconds > 0 else float("inf")
        least = least_rate if nbytes == points[-1][0] and nbytes >= _LONG_BYTES else 0.0
        reason = ""
        if seconds * FACTOR < before:
            reason = f"fewer bytes take {before:.3g} s"
        elif nbytes == points[0][0] and seconds > most_seconds:
            reason = f"a real one at most {most_seconds:.3g} s"
        elif not least <= rate <= _MOST_RATE:
            reason = f"that is {rate:.3g} bytes a second, and a real one has {least_rate:.3g} to {_MOST_RATE:.3g}"
        if reason:
            raise ImplausibleFigures(f"{name} of {nbytes:.0f} bytes takes {seconds:.3g} s; {reason}")
        before = max(before, seconds)
