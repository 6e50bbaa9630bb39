"""The world a process belongs to: what its transport, topology and control channel are; and parts of a world."""

from __future__ import annotations

from dataclasses import dataclass

from mpidist.cluster.topology import Topology
from mpidist.errors import TransportError
from mpidist.options import Settings
from mpidist.runtime.board import StatusBoard
from mpidist.runtime.control import ControlChannel
from mpidist.transports.base import Transport, exchange_among
from mpidist.transports.node_memory import Exchange, SharedSegments, map_together

#: Shared memory that each rank of a node has: two segments for small collectives, places for long ones, in bytes.
_SEGMENT_BYTES, _PLACE_BYTES = 1 << 18, 1 << 20


@dataclass(frozen=True, eq=False)
class World:
    """All ranks of a job, as one of them sees it.

    Attributes
    ----------
    transport : Transport
    topology : Topology
    control : ControlChannel
    launcher : str
        What started the ranks, for messages.
    segments : SharedSegments or None
        Shared memory of the ranks of this node, where there is some.
    """

    transport: Transport
    topology: Topology
    control: ControlChannel
    launcher: str
    segments: SharedSegments | None = None

    def part(self, color: int) -> World:
        """Return a world of the ranks that give the same `color`, whose collectives need none of the others.

        Its ranks count from 0, in the order of this world's; messages name them by their numbers in the whole job.  A
        rank that fails there has failed in the job, and the other way round.

        Collective: every rank of the world calls it in the same order.
        """
        whole, transport = self.control, self.transport.split(color)
        members, size = transport.world_ranks, transport.size
        topology = Topology([self.topology.hosts[member] for member in members])
        here = topology.ranks_of_node[topology.node_of[transport.rank]]
        watch = whole.watch("making a part of the world")

        def exchange(payload: bytes) -> list[bytes]:
            return exchange_among(transport, here, payload, watch)

        board, segments, problem = share_memory(exchange, here.index(transport.rank), len(here), whole.settings)
        board_ranks = here
        if transport.in_one_process and topology.node_count > 1:  # threads see one board, wherever they pretend to be
            board_ranks = tuple(range(size))
            memory = map_together(StatusBoard.nbytes(size), transport.rank, lambda raw: transport.exchange(raw, watch))
            board = StatusBoard(memory, size)
        elif board is None:
            board_ranks, board = (transport.rank,), StatusBoard(bytearray(StatusBoard.nbytes(1)), 1)
        has_segments = [raw == b"1" for raw in transport.exchange(b"1" if segments is not None else b"0", watch)]
        if topology.node_count > 1 and not all(has_segments):
            segments = None  # all ranks must take the same way
        control = ControlChannel(
            transport.rank,
            size,
            board,
            board_ranks,
            hosts=topology.hosts,
            messenger=None if len(board_ranks) == size else transport.messenger(),
            pause=whole.pause,
            chosen=whole.settings,
            whole=whole,
            members=members,
        )
        if problem and here[0] == transport.rank:
            control.warn(f"{problem}; small all-reduces use messages instead")
        transport.exchange(b"", watch)  # every rank has signed on to its board before any looks who is missing
        transport.control, transport.world_ranks = control, tuple(range(size))
        return World(transport, topology, control, self.launcher, segments)


def share_memory(
    exchange: Exchange, rank: int, size: int, chosen: Settings
) -> tuple[StatusBoard | None, SharedSegments | None, str]:
    """Return the status board and the segments of the ranks of a node, or what is in the way of them.

    Collective: every rank of the node calls it in the same order.
    """
    if not chosen.shared_memory:
        return None, None, ""
    board_bytes = -(-StatusBoard.nbytes(size) // 4096) * 4096
    nbytes = board_bytes + SharedSegments.nbytes(size, _SEGMENT_BYTES, _PLACE_BYTES)
    part_bytes = SharedSegments.part_bytes(_SEGMENT_BYTES, _PLACE_BYTES)
    own = (board_bytes + rank * part_bytes, part_bytes) if rank else (0, board_bytes + part_bytes)
    try:
        memory = memoryview(map_together(nbytes, rank, exchange, own))
    except TransportError as error:
        return None, None, str(error)
    board = StatusBoard(memory[: StatusBoard.nbytes(size)], size)
    return board, SharedSegments(memory[board_bytes:], size, _SEGMENT_BYTES, _PLACE_BYTES), ""
