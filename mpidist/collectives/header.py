"""The comparison of digests between nodes: by one rank a node, where the ranks of a node see each other's.

The status board shows a rank the digests of its node.  So one rank a node, the *leader*, takes part in the all-reduce
between the nodes, and shows its outcome to the others in words of their shared memory.  A leader writes the outcome of
call k + 1 only when all ranks of its node have posted that call, having read that of call k.
"""

from __future__ import annotations

import numpy

from mpidist.cluster.topology import Topology
from mpidist.collectives.ways.executor import Executor
from mpidist.runtime.board import fence
from mpidist.runtime.control import ControlChannel, Watch
from mpidist.schedules.table import algorithm
from mpidist.transports.base import Transport
from mpidist.transports.node_memory import SharedSegments

#: The channel of the leaders.
_CHANNEL = 1

_ALL_ONES = 0xFFFFFFFFFFFFFFFF


class Header:
    """The digests of all ranks in one call, as the least d and the least ~d of them.

    `segments` and the board of `control` are of the ranks of this node, and of no others; `transport` is over the whole
    world, and has channels.
    """

    def __init__(
        self, segments: SharedSegments, control: ControlChannel, transport: Transport, topology: Topology
    ) -> None:
        self._flags, self._words = segments.flags, segments.verdict_words
        self._control = control
        self._least = numpy.zeros(2, numpy.uint64)
        self._between: Executor | None = None
        if topology.local_rank_of[transport.rank] == 0:
            leaders = [ranks[0] for ranks in topology.ranks_of_node]
            schedule = algorithm("all_reduce", "recursive_doubling")
            self._between = Executor(schedule, transport.among(leaders, _CHANNEL), self._least, "min")

    def least(self, watch: Watch) -> tuple[int, int]:
        """Return the least digest of the call of `watch` over all ranks, and the least of the complements.

        Collective: every rank calls it in the same order, when it has posted the call.
        """
        self._control.gather(watch)
        flags, (call, first, second) = self._flags, self._words
        if self._between is not None:
            board = self._control.board
            digests = [board.digest(index, watch.call) for index in range(board.size)]
            self._least[:] = min(digests), _ALL_ONES ^ max(digests)
            self._between.run(watch)
            flags[first], flags[second] = int(self._least[0]), int(self._least[1])
            fence()
            flags[call] = watch.call
        else:
            while flags[call] < watch.call:
                watch.tick()
            fence()
        return flags[first], flags[second]
