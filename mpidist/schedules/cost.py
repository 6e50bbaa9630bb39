"""The cost model: what a schedule takes, worked out from its own rounds for all ranks at once.

A message of b bytes takes alpha + b beta seconds, reducing them gamma b more; each of the two levels, inside a node and
between nodes, has its own three.  Real links and caches are not that straight, so a level may hold measured points
instead: seconds by size, interpolated.  A rank sends and receives at the same time.  Chunks count as equal, though in
truth they may differ by one element; so the repetitions of a round cost the same and are multiplied, not played.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from mpidist.cluster.topology import Topology
from mpidist.schedules.rounds import NOBODY, Round, Schedule

#: Measured seconds by size: (bytes, seconds), the sizes ascending and above 0.
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Level:
    """The network inside a node, or the one between nodes.

    Attributes
    ----------
    alpha : float
        Seconds a message.
    beta : float
        Seconds a byte.
    gamma : float
        Seconds a byte reduced.
    exchange, one_way : tuple of (bytes, seconds)
        Measured messages: with one coming in at the same time, and without.  Between two points, and between `alpha` at
        0 bytes and the first, seconds are interpolated; beyond the last they grow by `beta`.  Without any it is a
        straight line; without points of one kind those of the other serve for both.
    reduction : tuple of (bytes, seconds)
        Measured reductions, from 0 seconds at 0 bytes on; beyond the last point they grow by `gamma`.
    one_way_reduction, in_place_reduction : tuple of (bytes, seconds)
        Those of messages with none coming in at the same time, and those into the very chunks that are being sent.
        Without such points, `reduction` holds for them too.

    Raises
    ------
    ValueError
        The sizes of the points do not ascend.
    """

    alpha: float
    beta: float
    gamma: float = 0.0
    exchange: Points = ()
    one_way: Points = ()
    reduction: Points = ()
    one_way_reduction: Points = ()
    in_place_reduction: Points = ()

    def __post_init__(self) -> None:
        for name in ("exchange", "one_way", "reduction", "one_way_reduction", "in_place_reduction"):
            points = tuple((float(nbytes), float(seconds)) for nbytes, seconds in getattr(self, name))
            lengths = [0.0, *(nbytes for nbytes, _ in points)]
            if any(after <= before for before, after in zip(lengths[:-1], lengths[1:], strict=True)):
                raise ValueError(f"{name} points must be of ascending sizes above 0 bytes, got {lengths[1:]}")
            object.__setattr__(self, name, points)

    @classmethod
    def measured(
        cls,
        exchange: Sequence[tuple[float, float]],
        one_way: Sequence[tuple[float, float]] = (),
        reduction: Sequence[tuple[float, float]] = (),
        one_way_reduction: Sequence[tuple[float, float]] = (),
        in_place_reduction: Sequence[tuple[float, float]] = (),
    ) -> Level:
        """Return the level that passes through measured points, with straight lines before and behind them.

        Parameters
        ----------
        exchange, one_way, reduction, one_way_reduction, in_place_reduction : sequence of (bytes, seconds)
            As the attributes; at least two of `exchange`.
        """
        alpha, beta = max(0.0, exchange[0][1] - _slope(exchange[:2]) * exchange[0][0]), _slope(exchange[-2:])
        gamma = _slope([(0.0, 0.0), *reduction][-2:]) if reduction else 0.0
        points = (exchange, one_way, reduction, one_way_reduction, in_place_reduction)
        return cls(alpha, beta, gamma, *map(tuple, points))

    def message_seconds(self, nbytes: Any, crowding: Any = 1.0, alone: Any = False) -> Any:
        """Return what messages of so many bytes take (Local).

        Parameters
        ----------
        nbytes : number or array
        crowding : number or array
            How many messages share each link: all of the seconds but alpha are multiplied by it.
        alone : bool or array of bool
            Whether the ends of a message have no other one under way.
        """
        exchange, one_way = self.exchange or self.one_way, self.one_way or self.exchange
        grown = _growth(exchange, self.alpha, self.beta, nbytes)
        if one_way is not exchange:
            grown = numpy.where(alone, _growth(one_way, self.alpha, self.beta, nbytes), grown)
        return self.alpha + grown * crowding

    def reduce_seconds(self, nbytes: Any, alone: Any = False, in_place: Any = False) -> Any:
        """Return what reducing so many bytes takes, on top of their message (Local).

        Parameters
        ----------
        nbytes : number or array
        alone : bool or array of bool
            Whether the ends of the message have no other one under way.
        in_place : bool or array of bool
            Whether the message is reduced into the chunks that are being sent.
        """
        seconds = _growth(self.reduction, 0.0, self.gamma, nbytes)
        for applies, points in ((alone, self.one_way_reduction), (in_place, self.in_place_reduction)):
            if points:
                seconds = numpy.where(applies, _growth(points, 0.0, self.gamma, nbytes), seconds)
        return seconds


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the seconds a byte between two points, not below 0: what is measured may be noisy."""
    (first, then), (before, after) = zip(*points, strict=True)
    return max(0.0, (after - before) / (then - first))


def _growth(points: Points, start: float, slope: float, nbytes: Any) -> Any:
    """Return the seconds beyond those at 0 bytes, `start`: through the points, and on by `slope` behind them."""
    if not points:
        return slope * nbytes
    lengths, seconds = zip((0.0, start), *points, strict=True)
    beyond = numpy.maximum(0.0, nbytes - lengths[-1])
    return numpy.interp(nbytes, lengths, seconds) + slope * beyond - start


@dataclass(frozen=True)
class CostModel:
    """Prices of messages inside a node and between nodes.

    Attributes
    ----------
    intra, inter : Level
    links_per_node : int or None
        How many messages can leave, and how many can enter, a node at full speed; more of them share the links.
        None means as many as there are ranks.
    call_seconds : float
        What a collective takes besides its rounds.
    """

    intra: Level
    inter: Level
    links_per_node: int | None = None
    call_seconds: float = 0.0

    @classmethod
    def flat(cls, alpha: float, beta: float, gamma: float = 0.0) -> CostModel:
        """Return a model in which all messages cost the same."""
        level = Level(alpha, beta, gamma)
        return cls(intra=level, inter=level)


@dataclass(frozen=True)
class Traffic:
    """What goes over the wire."""

    rounds: int  # repetitions counted
    bytes_sent: Any  # by rank
    bytes_leaving: Any  # by node: what its ranks send to other nodes, and receive from them
    bytes_entering: Any  # by node: what its ranks send to other nodes, and receive from them


def cost(
    schedule: Schedule, size: int, nbytes: float, model: CostModel, topology: Topology | None = None, root: int = 0
) -> float:
    """Return the seconds of a collective in which every round waits for its slowest rank (Local).

    Parameters
    ----------
    schedule : Schedule
    size : int
        The number of ranks.
    nbytes : float
        Length of the whole buffer in bytes; in a reduce-scatter or all-gather, of all ranks' parts together.
    model : CostModel
    topology : Topology or None
        Which ranks share a node; None puts every rank on a node of its own.
    root : int
        Of a broadcast or reduce.
    """
    rounds = priced(schedule, size, nbytes, model, topology, root)
    return model.call_seconds + float(sum(round_.repeat * seconds.max() for round_, seconds in rounds))


def priced(
    schedule: Schedule, size: int, nbytes: float, model: CostModel, topology: Topology | None = None, root: int = 0
) -> Iterator[tuple[Round, Any]]:
    """Yield each round for all ranks at once, and by rank the seconds that one repetition of it takes (Local)."""
    node_of = _nodes(size, topology)
    chunk_bytes = nbytes / schedule.chunks(size)
    for round_ in schedule.rounds_of(numpy.arange(size), size, root):
        yield round_, _round_seconds(round_, chunk_bytes, node_of, model)


def traffic(schedule: Schedule, size: int, nbytes: float, root: int = 0, topology: Topology | None = None) -> Traffic:
    """Return the number of rounds, and how many bytes each rank and each node sends in them (Local)."""
    node_of = _nodes(size, topology)
    rounds, chunks_sent = 0, numpy.zeros(size)
    leaving, entering = numpy.zeros(node_of.max() + 1), numpy.zeros(node_of.max() + 1)
    for round_ in schedule.rounds_of(numpy.arange(size), size, root):
        rounds += round_.repeat
        sent = numpy.where(round_.send_to != NOBODY, round_.send_count, 0) * round_.repeat
        target = node_of[round_.send_to]
        outwards = numpy.where(target != node_of, sent, 0)
        chunks_sent += sent
        leaving += numpy.bincount(node_of, outwards, minlength=len(leaving))
        entering += numpy.bincount(numpy.broadcast_to(target, node_of.shape), outwards, minlength=len(entering))
    chunk_bytes = nbytes / schedule.chunks(size)
    return Traffic(rounds, chunks_sent * chunk_bytes, leaving * chunk_bytes, entering * chunk_bytes)


def _nodes(size: int, topology: Topology | None) -> Any:
    """Return by rank its node."""
    if topology is not None and topology.size != size:
        raise ValueError(f"the topology has {topology.size} ranks, expected {size}")
    return numpy.arange(size) if topology is None else numpy.asarray(topology.node_of)


def _round_seconds(round_: Round, chunk_bytes: float, node_of: Any, model: CostModel) -> Any:
    both = (round_.send_to != NOBODY) & (round_.receive_from != NOBODY)
    alone = ~(both | both[round_.send_to])  # neither end of a rank's message has another one under way
    sending = _message_seconds(round_, chunk_bytes, node_of, model, alone)
    receiving = sending[round_.receive_from]
    if round_.reduce:
        receiving = receiving + _reduce_seconds(round_, chunk_bytes, node_of, model, alone)
    return numpy.maximum(sending, numpy.where(round_.receive_from != NOBODY, receiving, 0.0))


def _message_seconds(round_: Round, chunk_bytes: float, node_of: Any, model: CostModel, alone: Any) -> Any:
    """Return by rank the seconds of the message that it sends, 0 where it sends none."""
    sends = round_.send_to != NOBODY
    inside = node_of == node_of[round_.send_to]
    message_bytes = round_.send_count * chunk_bytes
    crowding = _crowding(round_, sends & ~inside, node_of, model.links_per_node)
    intra_seconds = model.intra.message_seconds(message_bytes, alone=alone)
    inter_seconds = model.inter.message_seconds(message_bytes, crowding, alone)
    return numpy.where(sends, numpy.where(inside, intra_seconds, inter_seconds), 0.0)


def _reduce_seconds(round_: Round, chunk_bytes: float, node_of: Any, model: CostModel, alone: Any) -> Any:
    """Return by rank the seconds that reducing takes on top of the message that it receives."""
    inside = node_of == node_of[round_.receive_from]
    same = (round_.send_chunk == round_.receive_chunk) & (round_.send_count == round_.receive_count)
    in_place = same & (round_.send_to != NOBODY)
    levels = (model.intra, model.inter)
    nbytes, one_way = round_.receive_count * chunk_bytes, alone[round_.receive_from]
    return numpy.where(inside, *(level.reduce_seconds(nbytes, one_way, in_place) for level in levels))


def _crowding(round_: Round, leaves: Any, node_of: Any, links: int | None) -> Any:
    """Return by rank how many messages share a link with the one it sends, 1 or more."""
    if links is None:
        return 1.0
    nodes = node_of.max() + 1
    target = node_of[round_.send_to]
    outgoing = numpy.bincount(node_of[leaves], minlength=nodes)[node_of]
    incoming = numpy.bincount(target[leaves], minlength=nodes)[target]
    return numpy.maximum(1.0, numpy.maximum(outgoing, incoming) / links)
