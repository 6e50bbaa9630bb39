"""The cost model: what a schedule takes, worked out from its own rounds for all ranks at once.

A message of b bytes takes alpha + b beta seconds, reducing them gamma b more; each of the two levels, inside a node and
between nodes, has its own three.  A rank sends and receives at the same time.  Chunks count as equal, though in truth
they may differ by one element; so the repetitions of a round cost the same and are multiplied, not played.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy

from mpidist.cluster.topology import Topology
from mpidist.collectives.rounds import NOBODY, Round, Schedule


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
    """

    alpha: float
    beta: float
    gamma: float = 0.0


@dataclass(frozen=True)
class CostModel:
    """Prices of messages inside a node and between nodes.

    Attributes
    ----------
    intra, inter : Level
    links_per_node : int or None
        How many messages can leave, and how many can enter, a node at full speed; more of them share the links.
        None means as many as there are ranks.
    """

    intra: Level
    inter: Level
    links_per_node: int | None = None

    @classmethod
    def flat(cls, alpha: float, beta: float, gamma: float = 0.0) -> CostModel:
        """Return a model in which all messages cost the same."""
        level = Level(alpha, beta, gamma)
        return cls(intra=level, inter=level)


@dataclass(frozen=True)
class Traffic:
    """What goes over the wire.

    Attributes
    ----------
    rounds : int
        Repetitions counted.
    bytes_sent : array of float, shape (size,)
        By rank.
    """

    rounds: int
    bytes_sent: Any


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
    return float(sum(round_.repeat * seconds.max() for round_, seconds in rounds))


def priced(
    schedule: Schedule, size: int, nbytes: float, model: CostModel, topology: Topology | None = None, root: int = 0
) -> Iterator[tuple[Round, Any]]:
    """Yield each round for all ranks at once, and by rank the seconds that one repetition of it takes (Local)."""
    if topology is not None and topology.size != size:
        raise ValueError(f"the topology has {topology.size} ranks, expected {size}")
    node_of = numpy.arange(size) if topology is None else numpy.asarray(topology.node_of)
    chunk_bytes = nbytes / schedule.chunks(size)
    for round_ in schedule.rounds_of(numpy.arange(size), size, root):
        yield round_, _round_seconds(round_, chunk_bytes, node_of, model)


def traffic(schedule: Schedule, size: int, nbytes: float, root: int = 0) -> Traffic:
    """Return the number of rounds, and how many bytes each rank sends in them (Local)."""
    rounds, chunks_sent = 0, numpy.zeros(size)
    for round_ in schedule.rounds_of(numpy.arange(size), size, root):
        rounds += round_.repeat
        chunks_sent += numpy.where(round_.send_to != NOBODY, round_.send_count, 0) * round_.repeat
    return Traffic(rounds, chunks_sent * (nbytes / schedule.chunks(size)))


def _round_seconds(round_: Round, chunk_bytes: float, node_of: Any, model: CostModel) -> Any:
    sending = _message_seconds(round_, chunk_bytes, node_of, model)
    receiving = sending[round_.receive_from]
    if round_.reduce:
        inside = node_of == node_of[round_.receive_from]
        gamma = numpy.where(inside, model.intra.gamma, model.inter.gamma)
        receiving = receiving + gamma * (round_.receive_count * chunk_bytes)
    return numpy.maximum(sending, numpy.where(round_.receive_from != NOBODY, receiving, 0.0))


def _message_seconds(round_: Round, chunk_bytes: float, node_of: Any, model: CostModel) -> Any:
    """Return by rank the seconds of the message that it sends, 0 where it sends none."""
    sends = round_.send_to != NOBODY
    inside = node_of == node_of[round_.send_to]
    message_bytes = round_.send_count * chunk_bytes
    intra_seconds = model.intra.alpha + model.intra.beta * message_bytes
    crowding = _crowding(round_, sends & ~inside, node_of, model.links_per_node)
    inter_seconds = model.inter.alpha + model.inter.beta * message_bytes * crowding
    return numpy.where(sends, numpy.where(inside, intra_seconds, inter_seconds), 0.0)


def _crowding(round_: Round, leaves: Any, node_of: Any, links: int | None) -> Any:
    """Return by rank how many messages share a link with the one it sends, 1 or more."""
    if links is None:
        return 1.0
    nodes = node_of.max() + 1
    target = node_of[round_.send_to]
    outgoing = numpy.bincount(node_of[leaves], minlength=nodes)[node_of]
    incoming = numpy.bincount(target[leaves], minlength=nodes)[target]
    return numpy.maximum(1.0, numpy.maximum(outgoing, incoming) / links)
