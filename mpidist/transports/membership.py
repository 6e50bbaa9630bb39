"""A world: its transport, topology and control channel; the world in force in a thread; and parts of a world."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from mpidist import context
from mpidist.cluster.topology import Topology
from mpidist.errors import TransportError
from mpidist.options import Settings
from mpidist.runtime.board import StatusBoard
from mpidist.runtime.control import ControlChannel
from mpidist.transports.base import Transport, exchange_among
from mpidist.transports.node_memory import Exchange, SharedSegments, map_together

#: Shared memory that each rank of a node has: two segments for small collectives, places for long ones, in bytes.
#: Longer arrays of broadcast and gather go by messages: MPI copies them once, shared memory twice.  On 2 ranks with one
#: last-level cache a broadcast by messages takes 0.95 of the time at 256 KiB, 0.7 to 0.8 from 512 KiB, 1.2 at 64 KiB.
_SEGMENT_BYTES, _PLACE_BYTES = 1 << 18, 1 << 20


_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Entered(threading.local):
    """The worlds whose ``with`` blocks a thread is in; with each, in how many blocks of strategies the thread was."""

    def __init__(self) -> None:
        self.worlds: list[tuple[World | None, int]] = []


_entered = _Entered()


def innermost() -> World | None:
    """Return the world of the innermost ``with world:`` of this thread, or of the strategy in force inside of that.

    None outside of all, and for a strategy that was made outside of all.  Local.
    """
    mode, depth = context.innermost_mode()
    worlds = _entered.worlds
    if worlds and worlds[-1][1] >= depth:
        return worlds[-1][0]
    extended = None if mode is None else getattr(mode.strategy, "extended", None)
    return getattr(extended, "made_in", None)


class WorldKept:
    """Puts a world in force again inside ``with``, or none of them; for what makes collective calls later.  Local.

    `world` is what `innermost` returned where the caller was made.
    """

    def __init__(self, world: World | None) -> None:
        self._world = world

    def __enter__(self) -> None:
        _entered.worlds.append((self._world, context.innermost_mode()[1]))

    def __exit__(self, *error: object) -> None:
        if not _entered.worlds or _entered.worlds[-1][0] is not self._world:
            raise RuntimeError("the `with` blocks of worlds must be left in the opposite order of entering them")
        _entered.worlds.pop()


def in_kept_world(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a method that runs in the world that ``self.kept_world``, a `WorldKept`, puts in force."""

    @functools.wraps(method)
    def inside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        owner: Any = args[0]
        with owner.kept_world:
            return method(*args, **kwargs)

    return inside


@dataclass(frozen=True, eq=False, repr=False)
class World:
    """Ranks that make collective calls together, as one of them sees it: those of a job, or of a communicator.

    `mpidist.init` and `mpidist.new_world` make one.  Inside ``with world:`` it is the world in force in this thread:
    strategies made there train on its ranks for good, and `mpidist.rank`, `mpidist.barrier` and the like are about it.

    Attributes
    ----------
    transport : Transport
    topology : Topology
    control : ControlChannel
    launcher : str
        What started the ranks, for messages.
    segments : SharedSegments or None
        Shared memory of the ranks of this node, where there is some.
    closing_fn : callable or None
        ``closing_fn(world)`` does what `close` promises; None where the world lasts until its process ends.
    has_gpus : bool
        Whether a rank may have a GPU that CuPy can use; the same on all ranks.  Ranks that are threads have none.
    """

    transport: Transport
    topology: Topology
    control: ControlChannel
    launcher: str
    segments: SharedSegments | None = None
    closing_fn: Callable[[World], None] | None = None
    has_gpus: bool = False

    def close(self) -> None:
        """Give back the MPI communicators of a world that `mpidist.new_world` made, and take it off its process.

        Its shared memory goes with the last strategy or communicator that refers to it.  Later calls in the world raise
        TransportError.  A second `close` does nothing.  Collective: every rank of the world calls it, as its last call.

        Raises
        ------
        RuntimeError
            It is the world of the process, which lasts until this ends.
        TransportTimeoutError, RankFailedError, TransportError
            A rank did not come; or an earlier call has ended this world.
        """
        if self.closing_fn is None:
            raise RuntimeError("this world lasts until its process ends; only those of mpidist.new_world can be closed")
        self.closing_fn(self)

    @property
    def rank(self) -> int:
        """The number of this rank in the world."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.transport.size

    @property
    def node(self) -> int:
        """The number of this rank's node in the world."""
        return self.topology.node_of[self.rank]

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its node."""
        return self.topology.local_rank_of[self.rank]

    @property
    def local_size(self) -> int:
        """The number of ranks on this rank's node."""
        return self.topology.local_size_of[self.rank]

    def __enter__(self) -> World:
        WorldKept(self).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        WorldKept(self).__exit__()

    def __repr__(self) -> str:
        return f"<World: {self.control.own_name}, {self.topology.describe()}>"

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
        return World(transport, topology, control, self.launcher, segments, has_gpus=self.has_gpus)


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
