"""Who carries which part of a buffer between nodes, over what, and in which memory.

Nomenclature.  A *wave* is what goes between nodes at a time.  It is cut into *shards*, as many as the fullest node
has ranks.  Shard s has one *carrier* on every node: the node's local rank s, or, where there are fewer, s modulo their
number, so that a rank on a sparse node carries several.  The carriers of a shard form its *lane*: they all-reduce it
among themselves, while the other lanes do the same.  A rank keeps the shards that it carries in its *slots*, pieces of
the node's shared memory; `SLOTS` waves can be under way at a time.

Each lane and slot has a channel of its own: what moves on in one of them waits for nothing in another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy

from mpidist.cluster.topology import Topology
from mpidist.collectives.ways.executor import MESSAGE_BYTES, Executor
from mpidist.schedules.rounds import Schedule
from mpidist.transports.base import Transport
from mpidist.transports.node_memory import SharedSegments

#: Channels below are for others.
_FIRST_CHANNEL = 16


class Lane(NamedTuple):
    """One shard that this rank carries.

    By slot, `transports` are over the shard's carriers, in the order of their nodes, and `scratch` has bytes to receive
    into.
    """

    shard: int
    transports: tuple[Transport, ...]
    scratch: tuple[Any, ...]


class Lanes:
    """The lanes of a world of several nodes, as one of its ranks sees them.  Local, and the same on all ranks.

    The places of `segments`, of this rank's node, are the memory of the slots; `transport` is over the whole world and
    has channels; `across` is the all-reduce among the carriers of a shard.  `lane_bytes` is the longest shard there is
    room for, and `mine` are the shards that this rank carries.
    """

    SLOTS = 3

    def __init__(self, segments: SharedSegments, transport: Transport, topology: Topology, across: Schedule) -> None:
        rank = transport.rank
        self.segments, self.node_count = segments, topology.node_count
        self.local_rank, self.local_size = topology.local_rank_of[rank], topology.local_size_of[rank]
        self.shards = max(topology.local_size_of)
        most = -(-self.shards // min(topology.local_size_of))
        self.lane_bytes = segments.place_bytes // most
        self._across = across
        scratch_bytes = min(self.lane_bytes, 2 * MESSAGE_BYTES) + 64
        self.mine = tuple(
            self._lane(shard, transport, topology, scratch_bytes)
            for shard in range(self.local_rank, self.shards, self.local_size)
        )

    def _lane(self, shard: int, transport: Transport, topology: Topology, scratch_bytes: int) -> Lane:
        carriers = [ranks[shard % len(ranks)] for ranks in topology.ranks_of_node]
        channels = [_FIRST_CHANNEL + shard * self.SLOTS + slot for slot in range(self.SLOTS)]
        return Lane(
            shard,
            tuple(transport.among(carriers, channel) for channel in channels),
            tuple(numpy.empty(scratch_bytes, numpy.uint8) for _ in channels),
        )

    def values(self, slot: int, shard: int, elements: int, dtype: numpy.dtype) -> Any:
        """Return where the carrier on this node has `elements` values of a shard, in shared memory."""
        carrier, place = shard % self.local_size, shard // self.local_size
        first = place * (self.lane_bytes // dtype.itemsize) * dtype.itemsize
        return self.segments.places[slot][carrier][first : first + elements * dtype.itemsize].view(dtype)

    def executor(self, lane: Lane, slot: int, elements: int, dtype: numpy.dtype, op: str) -> Executor:
        """Return the all-reduce between nodes of a shard of so many elements."""
        buffer = self.values(slot, lane.shard, elements, dtype)
        scratch = lane.scratch[slot]
        return Executor(self._across, lane.transports[slot], buffer, op, segment_bytes=MESSAGE_BYTES, scratch=scratch)
