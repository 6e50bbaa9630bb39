"""How far the clocks of the nodes are apart: told by messages to and fro, of which the quickest counts."""

from __future__ import annotations

import time
from typing import Any

import numpy

from mpidist.runtime.control import Watch
from mpidist.transports import World
from mpidist.transports.base import Transport

#: How many messages go to and fro for each node.
_MESSAGES = 16


def clock_offset(world: World, watch: Watch) -> int:
    """Return what this rank adds to its clock to get that of rank 0, in nanoseconds.

    Collective: every rank calls it in the same order, within a begun call.  The ranks of a node have one clock; the
    first rank of each node asks rank 0, one node after the other, and tells its node.
    """
    topology, transport = world.topology, world.transport
    rank = transport.rank
    leaders = [ranks[0] for ranks in topology.ranks_of_node]
    if rank == 0:
        for leader in leaders[1:]:
            _answer(transport, leader, watch)
        return 0
    node = topology.node_of[rank]
    if node == 0:
        return 0
    word = numpy.zeros(1, dtype=numpy.int64)
    if rank != leaders[node]:
        _receive(transport, word, leaders[node], watch)
        return int(word[0])
    word[0] = _ask(transport, watch)
    for other in topology.ranks_of_node[node][1:]:
        _send(transport, word, other, watch)
    return int(word[0])


def _ask(transport: Transport, watch: Watch) -> int:
    """Return the offset by the quickest of some questions: its answer was given in the middle of its way."""
    word, quickest, offset = numpy.zeros(1, dtype=numpy.int64), float("inf"), 0
    for _ in range(_MESSAGES):
        asked = time.monotonic_ns()
        _send(transport, word, 0, watch)
        _receive(transport, word, 0, watch)
        answered = time.monotonic_ns()
        if answered - asked < quickest:
            quickest, offset = answered - asked, int(word[0]) - (asked + answered) // 2
    return offset


def _answer(transport: Transport, leader: int, watch: Watch) -> None:
    word = numpy.zeros(1, dtype=numpy.int64)
    for _ in range(_MESSAGES):
        _receive(transport, word, leader, watch)
        word[0] = time.monotonic_ns()
        _send(transport, word, leader, watch)


def _send(transport: Transport, word: Any, rank: int, watch: Watch) -> None:
    transport.wait([transport.send(word, rank)], watch)


def _receive(transport: Transport, word: Any, rank: int, watch: Watch) -> None:
    transport.wait([transport.receive(word, rank)], watch)
