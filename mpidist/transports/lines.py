"""Lines: messages between two ranks at any time, without the others; what parameter servers talk through.

A line carries messages in their order.  A message is a *header* of a few or many bytes, and perhaps a *payload*: the
beginning of an `Area`, memory that was set aside for what goes to that peer.  Ranks of one node read each other's
areas where they lie (`shared_line`); others send them (`message_line`).

Who owns what: an area belongs to the rank that made it, and from `Line.send` on its content belongs to the peer, until
`Area.busy` is false again.  A header belongs to whoever received it, a payload only until `Message.release`.

No line is collective, and none waits inside MPI: whoever waits calls `Patience.tick`, which looks who is still there.
"""

from __future__ import annotations

import abc
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from mpidist.errors import CollectiveMismatchError, MpidistError, PeerLostError, RankFailedError
from mpidist.runtime import board as states
from mpidist.runtime.control import ControlChannel, last_line, yield_processor
from mpidist.transports.base import exchange_among
from mpidist.transports.membership import World

#: What can be sent as a header.
Header: TypeAlias = bytes | bytearray | memoryview

#: Turns of a waiting loop between two looks at the alarm word, and seconds between two looks at processes and clock.
_LOOK_TURNS = 64
_ALARM_SECONDS, _LOOK_SECONDS = 0.002, 0.05
#: Seconds of waiting after which a rank sleeps between looks, and for how long.
_SPIN_SECONDS, _NAP_SECONDS = 0.02, 0.0002


class Message:
    """What came through a line.

    Attributes
    ----------
    header : bytes
    payload : array, shape (n,), uint8, or None
        Not to be written.  Valid until `release`.
    """

    __slots__ = ("header", "payload", "_release_fn")

    def __init__(self, header: bytes, payload: Any = None, release_fn: Callable[[], object] | None = None) -> None:
        self.header = header
        self.payload = payload
        self._release_fn = release_fn

    def release(self) -> None:
        """Give the payload back to the sender, which may overwrite it from now on; a second call does nothing."""
        release_fn, self._release_fn = self._release_fn, None
        if release_fn is not None:
            self.payload = None
            release_fn()


class Area(abc.ABC):
    """Memory for payloads to one peer; made by `Line.area`.

    Attributes
    ----------
    line : Line
    array : array, shape (nbytes,), uint8
        To be written by this rank while the area is not `busy`.  It begins at a multiple of 64 bytes.
    """

    line: Line
    array: Any

    @property
    @abc.abstractmethod
    def busy(self) -> bool:
        """Whether its content was sent and is still needed: it must not be written."""

    def wait_free(self) -> None:
        """Wait until the area is not busy; errors as for `Line.wait`."""
        if not self.busy:
            return
        presence = self.line.presence
        control, peer = presence.control, presence.name_of(self.line.peer)
        what = f"rank {control.rank} waits for {control.name(peer)} to be done with what it was sent"
        patience = Patience([self.line], what)
        while self.busy:
            patience.tick()

    @abc.abstractmethod
    def close(self) -> None:
        """Give the memory back, on both sides; the area is not used any more.  Local."""


class Line(abc.ABC):
    """The two ends of a conversation, seen from one of them; made by `open_lines`.

    Parameters
    ----------
    peer : int
        Rank of the other end, in the world the line was opened in.
    presence : Presence

    Attributes
    ----------
    peer : int
    is_shared : bool
        Whether the peer is on this node, so that memory can be shared with it.
    """

    is_shared = False

    def __init__(self, peer: int, presence: Presence) -> None:
        self.peer = peer
        self.presence = presence
        self.closed = False
        self._inbox: deque[Message] = deque()
        self._gone = ""  # why nothing more will come

    @abc.abstractmethod
    def send(self, header: Header, payload: Area | None = None, nbytes: int | None = None) -> None:
        """Send a message; waits only while there is no room, and takes in meanwhile what has come.  Local.

        Parameters
        ----------
        header : bytes-like
            Copied; may be changed afterwards.
        payload : Area, optional
            Of this line, and not busy.
        nbytes : int, optional
            How much of the area is sent, from its beginning; all by default.

        Raises
        ------
        ValueError
            The area is another line's, or busy, or smaller than `nbytes`.
        PeerLostError, RankFailedError, TransportTimeoutError
            As for `wait`.
        """

    @abc.abstractmethod
    def area(self, nbytes: int) -> Area:
        """Return new memory for payloads of up to `nbytes` bytes to the peer.  Local.

        Raises
        ------
        TransportError
            The memory cannot be had.
        """

    @abc.abstractmethod
    def take_in(self) -> bool:
        """Move what has come to where `receive` finds it, and what is to be sent on its way; whether anything moved."""

    def receive(self) -> Message | None:
        """Return the next message if it is there; never waits.  Local."""
        inbox = self._inbox
        if not inbox:
            self.take_in()
            if not inbox:
                return None
        return inbox.popleft()

    def wait(self, what: str = "", timeout_seconds: float | None = None) -> Message:
        """Return the next message, waiting for it.  Local.

        Parameters
        ----------
        what : str
            What is waited for, for messages.
        timeout_seconds : float or None
            None means the default of the settings, 0 never.

        Raises
        ------
        PeerLostError
            With fault tolerance: the peer is gone, and all that it had sent has been received.
        RankFailedError
            Without: any rank failed or was killed, or the peer left; names it.
        TransportTimeoutError
            The deadline has passed.
        """
        message = self.receive()
        if message is None:
            patience = Patience([self], what or self.described, timeout_seconds)
            while (message := self.receive()) is None:
                patience.tick()
        return message

    @property
    def described(self) -> str:
        """How a wait on this line is called, where nothing better is known."""
        control = self.presence.control
        return f"rank {control.rank} waits for a message of {control.name(self.presence.name_of(self.peer))}"

    @property
    def lost(self) -> bool:
        """Whether the peer has ended, and all that it had sent has been received.  Local."""
        if not self._gone:
            self.presence.look()
        return bool(self._gone) and not self._has_more()

    def _has_more(self) -> bool:
        """Whether something that the peer sent before its end is still to be received."""
        self.take_in()
        return bool(self._inbox)

    def lose(self, why: str) -> None:
        """Take note of the end of the peer, for this reason.  Local."""
        self._gone = self._gone or why

    @property
    def gone(self) -> str:
        """Why the peer will send nothing more than it has sent, empty if it may.  Local."""
        return self._gone

    def close(self) -> None:
        """Give the line's memory back; messages that nobody has received are dropped.  Local."""
        self.closed = True
        self.lose("was closed here")
        self._inbox.clear()
        self.presence.forget(self)

    def __repr__(self) -> str:
        state = " (closed)" if self.closed else f" ({self._gone})" if self._gone else ""
        return f"<{type(self).__name__} to rank {self.peer}{state}>"


class Presence:
    """Which of the peers are still there; one a rank, for all lines that were opened together.

    Parameters
    ----------
    control : ControlChannel
    world_ranks : sequence of int
        World rank of every rank of the group that the lines were opened in.
    """

    def __init__(self, control: ControlChannel, world_ranks: Sequence[int]) -> None:
        self.control = control
        self.lines: list[Line] = []
        #: Called when this rank has waited for a moment, for whatever it is.
        self.while_waiting: list[Callable[[], object]] = []
        self._world_ranks = tuple(world_ranks)
        self._looked = self._looked_at_alarm = 0.0

    def name_of(self, peer: int) -> int:
        """Return by which rank the control channel knows a peer."""
        return self._world_ranks[peer]

    def forget(self, line: Line) -> None:
        """Watch a line no more."""
        if line in self.lines:
            self.lines.remove(line)

    def look(self) -> bool:
        """Look, if it is time for it, who has ended, and tell the lines; return whether it was time.  Local."""
        now = time.monotonic()
        thorough = now - self._looked > _LOOK_SECONDS
        if not thorough and not (self.control.board.alarm and now - self._looked_at_alarm > _ALARM_SECONDS):
            return False
        self._looked_at_alarm = now
        if thorough:
            self._looked = now
            if self.control.arbiter is not None:
                self.control.arbiter.poll()
        for line in self.lines:
            if not line.gone:
                why = self._end_of(self.name_of(line.peer), thorough)
                if why:
                    line.lose(why)
        return True

    def _end_of(self, rank: int, thorough: bool) -> str:
        """Return how `rank` has ended, empty if it has not, as far as is known."""
        control = self.control
        if rank not in control.board_ranks:
            return self._end_elsewhere(rank)
        line, board = control.board_ranks.index(rank), control.board
        state = board.state(line)
        if state == states.LEFT:
            return "left"
        if state in (states.FAILED, states.EXPIRED):
            return f"failed: {last_line(board.text(line))}"
        if thorough and not board.alive(line):
            return f"died: its process {board.pid(line)} is gone (killed, or out of memory)"
        return ""

    def _end_elsewhere(self, rank: int) -> str:
        arbiter = self.control.arbiter
        if arbiter is None:
            return ""
        if rank in arbiter.failed_texts:
            return f"failed: {last_line(arbiter.failed_texts[rank])}"
        return "left" if rank in arbiter.left_ranks else ""


class Patience:
    """What a loop calls that has found nothing to do: lets others run, and looks who is still there.

    Parameters
    ----------
    lines : iterable of Line
        Those that are waited for.  If one of them is lost, the wait is in vain.
    what : str
        What is waited for, for messages: ``"rank 3 waits for ps 0 (rank 5) to apply its push 17"``.
    timeout_seconds : float or None
        Until the deadline, counted from the first turn after `reset`; None means the default of the settings, 0 never.
    idle : bool
        True for loops that wait for whatever comes, from anybody, for ever: no deadline, no warning, and no error for a
        line that is lost, whose owner asks `Line.lost` itself.
    warns : bool, optional
        Whether a long wait is told; by default all but idle ones.
    """

    __slots__ = ("what", "_lines", "_presence", "_timeout", "_idle", "_turns", "_start", "_warned", "_yield")

    def __init__(
        self,
        lines: Iterable[Line],
        what: str,
        timeout_seconds: float | None = None,
        idle: bool = False,
        warns: bool | None = None,
    ) -> None:
        self._lines = list(lines)
        self._presence = self._lines[0].presence
        settings = self._presence.control.settings
        self._timeout = 0.0 if idle else settings.timeout_seconds if timeout_seconds is None else timeout_seconds
        self._yield = self._presence.control.pause or yield_processor()
        self._idle = idle
        self.what = what
        self._turns, self._warned = 0, idle if warns is None else not warns
        self._start: float | None = None

    def reset(self) -> None:
        """Begin anew: something came.  Local."""
        self._start = None  # turns go on: who waits often and never for long must look around, too

    def tick(self) -> bool:
        """Be called in every turn of a waiting loop that found nothing; return whether it looked around.  Local.

        Raises
        ------
        PeerLostError, RankFailedError, TransportTimeoutError
            As for `Line.wait`.
        """
        self._yield()
        self._turns = turns = self._turns + 1
        if turns % _LOOK_TURNS:
            return False
        now = time.monotonic()
        if self._start is None:
            self._start = now
        waited = now - self._start
        self.look()
        if waited > _SPIN_SECONDS:
            time.sleep(_NAP_SECONDS)
            self._turns = turns + _LOOK_TURNS - 1  # a nap is as long as many turns
            self._mind_the_clock(waited)
        return True

    def look(self) -> None:
        """Look around, as `tick` does now and then; errors as there.  Local."""
        for line in self._presence.lines:
            line.take_in()  # so that nobody waits for this rank to make room
        for act in self._presence.while_waiting:
            act()
        if self._presence.look():
            self._judge()

    def _judge(self) -> None:
        """Raise if the wait is in vain."""
        control = self._presence.control
        watch = control.watch(f"this wait: {self.what}")
        tolerant = control.settings.fault_tolerant
        error = control.vital_failure(watch) if tolerant else control.failure(watch)
        if error is not None:
            raise control.breaks(error)
        if not self._idle:
            for line in self._lines:
                if line.lost:
                    raise self.lost(line)

    def lost(self, line: Line) -> MpidistError:
        """Return what to raise because the peer of `line` is gone."""
        control = self._presence.control
        rank = self._presence.name_of(line.peer)
        text = f"{self.what}: {control.name(rank)} {line.gone}"
        return control.error(PeerLostError if control.settings.fault_tolerant else RankFailedError, text, rank)

    def _mind_the_clock(self, waited: float) -> None:
        control = self._presence.control
        if not self._warned and 0 < control.settings.warn_seconds < waited:
            self._warned = True
            limit = f"it fails after {self._timeout:g} s" if self._timeout else "it waits without a limit"
            control.warn(f"{self.what}, for {waited:.0f} s by now; {limit}")
        if 0 < self._timeout < waited:
            raise control.expire(
                f"{self.what}: nothing came in {waited:.1f} s. Look at what that rank does (py-spy dump), or give more "
                "time with MPIDIST_TIMEOUT_SECONDS"
            )


def open_lines(world: World, peers: Sequence[int], *, ring_bytes: int = 1 << 18) -> dict[int, Line]:
    """Open a line to each of `peers`, and return them by peer.

    Collective: every rank of the world calls it in the same order, also one without peers.

    Parameters
    ----------
    world : World
    peers : sequence of int
        Ranks of the world's transport.  If a rank names another, that one must name it too.
    ring_bytes : int
        Memory for headers under way, for each direction of a shared line.

    Raises
    ------
    ValueError
        A rank names itself, or one that there is not.
    CollectiveMismatchError
        On all ranks: a rank names one that does not name it.
    """
    from mpidist.transports.message_line import open_message_lines
    from mpidist.transports.shared_line import open_shared_lines

    transport, control = world.transport, world.control
    mine = sorted(set(peers))
    if not all(0 <= peer < transport.size and peer != transport.rank for peer in mine):
        raise ValueError(
            f"rank {transport.rank} of {transport.size}: lines to {mine}: ranks that there are, not itself"
        )
    watch = control.watch("opening lines")
    peers_of = [json.loads(raw) for raw in transport.exchange(json.dumps(mine).encode(), watch)]
    _check_symmetric(peers_of)
    presence = Presence(control, transport.world_ranks)
    here = world.topology.ranks_of_node[world.topology.node_of[transport.rank]]
    lines: dict[int, Line] = {}
    if control.settings.shared_memory and any(peer in here for rank in here for peer in peers_of[rank]):
        lines |= open_shared_lines(
            transport.rank,
            here,
            peers_of,
            presence,
            ring_bytes,
            lambda payload: exchange_among(transport, here, payload, watch),
        )
    missing = [peer for peer in mine if peer not in lines]
    if any(raw == b"1" for raw in transport.exchange(b"1" if missing else b"0", watch)):
        lines |= open_message_lines(transport.split(0), missing, presence)
    presence.lines = [lines[peer] for peer in mine]
    return {line.peer: line for line in presence.lines}


def _check_symmetric(peers_of: Sequence[Sequence[int]]) -> None:
    """Raise, on all ranks alike, unless all named each other."""
    for rank, peers in enumerate(peers_of):
        for peer in peers:
            if rank not in peers_of[peer]:
                raise CollectiveMismatchError(
                    f"opening lines: rank {rank} names rank {peer}, which names {peers_of[peer]}; both must name each "
                    "other"
                )
