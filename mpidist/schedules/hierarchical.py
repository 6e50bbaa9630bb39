"""Hierarchical all-reduce: levels composed as data, none of them written again.

With S = the ranks on the smallest node, the buffer is cut into S *shards*.  Inside each node a reduce-scatter leaves
shard s on the node's local rank s; local rank s of every node all-reduce shard s between the nodes, all shards at the
same time; an all-gather inside each node brings the shards together.  Each shard is cut into as many chunks as the
algorithm between the nodes wants, so the grid is fine enough for both levels.

Nodes may be uneven.  A larger node runs the same reduce-scatter over all its ranks with the chunks from S on empty:
its local ranks from S on pass partial sums along, own an empty shard, and sit out between the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy

from mpidist.cluster.topology import Topology
from mpidist.schedules.rounds import NOBODY, Index, Round, Schedule, choose, relabelled, unrolled


def compose(topology: Topology, scatter: Schedule, across: Schedule, gather: Schedule) -> Schedule:
    """Return the all-reduce that runs `scatter` inside the nodes, `across` between them, and `gather` inside again."""
    levels = _Levels(topology, scatter, across, gather)
    return Schedule(f"hierarchical_{across.name}", "all_reduce", chunks=levels.chunks, rounds=levels.rounds)


@dataclass(frozen=True)
class _Levels:
    topology: Topology
    scatter: Schedule
    across: Schedule
    gather: Schedule

    @cached_property
    def shards(self) -> int:
        return min(self._node_sizes)

    @cached_property
    def chunks_per_shard(self) -> int:
        return self.across.chunks(self.topology.node_count)

    @cached_property
    def _node_sizes(self) -> list[int]:
        """The different numbers of ranks on a node, smallest first."""
        return sorted({len(ranks) for ranks in self.topology.ranks_of_node})

    @cached_property
    def _everywhere(self) -> _Seat:
        """The places of all ranks."""
        topology = self.topology
        world = numpy.full((topology.node_count, self._node_sizes[-1]), NOBODY)
        for row, ranks in zip(world, topology.ranks_of_node, strict=True):
            row[: len(ranks)] = ranks
        node, local_rank = numpy.array(topology.node_of), numpy.array(topology.local_rank_of)
        return _Seat(node, local_rank, numpy.array(topology.local_size_of), world)

    def chunks(self, size: int) -> int:
        if size != self.topology.size:
            raise ValueError(f"this hierarchical schedule is for {self.topology.size} ranks, not for {size}")
        return self.shards * self.chunks_per_shard

    def rounds(self, rank: Index, size: int) -> Iterator[Round]:
        self.chunks(size)
        place = self._everywhere.of(rank)
        yield from self._inside(self.scatter, place)
        yield from self._between(place)
        yield from self._inside(self.gather, place)

    def _inside(self, level: Schedule, place: _Seat) -> Iterator[Round]:
        if len(self._node_sizes) == 1:
            rounds = level.rounds(place.local_rank, self.shards)
        else:
            rounds = (_cut_off(round_, self.shards) for round_ in self._side_by_side(level, place))
        for round_ in rounds:
            yield relabelled(round_, rank_of=place.neighbour, scale=self.chunks_per_shard, chunks=self.shards)

    def _between(self, place: _Seat) -> Iterator[Round]:
        for round_ in self.across.rounds(place.node, self.topology.node_count):
            yield relabelled(
                round_,
                rank_of=place.counterpart,
                takes_part=place.local_rank < self.shards,
                first_chunk=place.local_rank * self.chunks_per_shard,
                chunks=self.chunks_per_shard,
            )

    def _side_by_side(self, level: Schedule, place: _Seat) -> Iterator[Round]:
        """Play `level` on nodes of every size at the same time; where it ends early, ranks are idle."""
        of_each_size = (
            unrolled(level.rounds(place.local_rank % size, size), level.chunks(size)) for size in self._node_sizes
        )
        for together in zip_longest(*of_each_size):
            played = [round_ for round_ in together if round_ is not None]
            merged = Round(NOBODY, 0, 0, NOBODY, 0, 0, reduce=played[0].reduce)
            for size, round_ in zip(self._node_sizes, together, strict=True):
                if round_ is not None:
                    merged = _merged(place.local_size == size, round_, merged)
            yield merged


@dataclass(frozen=True)
class _Seat:
    """Where a rank, or an array of ranks, is: its node, its number there, and the node's number of ranks."""

    node: Index
    local_rank: Index
    local_size: Index
    #: The world rank at [node, local rank], `NOBODY` beyond the node's last.
    world: Any

    def of(self, rank: Index) -> _Seat:
        node, local_rank = _entry(self.node, rank), _entry(self.local_rank, rank)
        return _Seat(node, local_rank, _entry(self.local_size, rank), self.world)

    def neighbour(self, local_rank: Index) -> Index:
        return _entry(self.world, (self.node, local_rank))

    def counterpart(self, node: Index) -> Index:
        return _entry(self.world, (node, self.local_rank))


def _entry(table: Any, where: Any) -> Index:
    found = table[where]
    return found if found.ndim else int(found)


_PER_RANK = tuple(field.name for field in fields(Round))[:6]


def _merged(condition: Any, then: Round, otherwise: Round) -> Round:
    assert then.reduce == otherwise.reduce, "a level must reduce in the same rounds whatever the number of ranks"
    per_rank = {name: choose(condition, getattr(then, name), getattr(otherwise, name)) for name in _PER_RANK}
    return Round(**per_rank, reduce=then.reduce)


def _cut_off(round_: Round, shards: int) -> Round:
    """Leave the chunks from `shards` on, which are empty, out of the messages."""
    send_count = _below(shards, round_.send_chunk, round_.send_count)
    receive_count = _below(shards, round_.receive_chunk, round_.receive_count)
    return replace(
        round_,
        send_to=choose(send_count > 0, round_.send_to, NOBODY),
        send_count=send_count,
        receive_from=choose(receive_count > 0, round_.receive_from, NOBODY),
        receive_count=receive_count,
    )


def _below(limit: int, chunk: Index, count: Index) -> Index:
    """Return how many of the `count` chunks from `chunk` on are below `limit`."""
    room = choose(chunk < limit, limit - chunk, 0)
    return choose(count < room, count, room)
