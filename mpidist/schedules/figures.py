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

    def to_json(self) -> dict[str, Any]:
        """Return the figures as what JSON can hold (Local)."""
        points = {name: list(listed) for name, listed in self.points.items()}
        segments = {str(size): list(listed) for size, listed in self.segments.items()}
        return {
            "model": asdict(self.model),
            "points": points,
            "segments": segments,
            "segment_bytes": self.segment_bytes,
        }

    @classmethod
    def from_json(cls, found: Any) -> Figures:
        """Return the figures that `to_json` gave (Local)."""
        try:
            model = found["model"]
            levels = {side: _level(model[side]) for side in ("intra", "inter")}
            points = {str(name): _checked(listed) for name, listed in found["points"].items()}
            links = model["links_per_node"]
            links = None if links is None else max(1, int(links))
            segments = {int(size): _checked(listed) for size, listed in found["segments"].items()}
            if len({tuple(nbytes for nbytes, _ in listed) for listed in segments.values()}) > 1:
                raise ValueError("sizes of segments were measured with different all-reduces")
            best = found["segment_bytes"]
            if best is not None and best not in segments:
                raise ValueError(f"segments of {best} bytes are chosen, and were not measured")
            return cls(CostModel(levels["intra"], levels["inter"], links, **_others(model)), points, segments, best)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no figures of all-reduces: {type(error).__name__}: {error}") from None


def _level(found: Mapping[str, Any]) -> Level:
    prices = {name: float(found[name]) for name in ("alpha", "beta", "gamma")}
    if not all(0 <= price < float("inf") for price in prices.values()):
        raise ValueError(f"expected seconds of 0 or more, got {prices}")
    points = (_checked(found[name]) for name in ("exchange", "one_way", "reduction"))
    return Level(prices["alpha"], prices["beta"], prices["gamma"], *points)


def _others(model: Mapping[str, Any]) -> dict[str, float]:
    """Return the prices of a model that belong to no level."""
    levels = {"intra", "inter", "links_per_node"}
    return {each.name: float(model[each.name]) for each in fields(CostModel) if each.name not in levels}


def _checked(listed: Sequence[Any]) -> Points:
    points = tuple((float(nbytes), float(seconds)) for nbytes, seconds in listed)
    sizes = [nbytes for nbytes, _ in points]
    if sizes != sorted(set(sizes)) or not all(0 < value < float("inf") for point in points for value in point):
        raise ValueError(f"expected points of ascending sizes, bytes and seconds above 0, got {listed}")
    return points


def _interpolated(points: Points, nbytes: float) -> float:
    sizes, seconds = zip(*points, strict=True)
    if nbytes >= sizes[-1]:
        return seconds[-1] * nbytes / sizes[-1]
    return float(numpy.exp(numpy.interp(numpy.log(max(nbytes, 1.0)), numpy.log(sizes), numpy.log(seconds))))
