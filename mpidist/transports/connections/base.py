"""Connections: messages between two ranks at any time, without the others; what parameter servers talk through.

A connection carries messages in their order.  A message is a *header* of a few or many bytes, and perhaps a *payload*:
the beginning of an `Area`, memory that was set aside for what goes to that peer.  Ranks of one node read each other's
areas where they lie (`shared`); others send them (`messages`).

Who owns what: an area belongs to the rank that made it, and from `Connection.send` on its content belongs to the peer,
until `Area.busy` is false again.  A header belongs to whoever received it, a payload only until `Message.release`.

No connection is collective, and none waits inside MPI: whoever waits calls `Patience.tick`, which looks who is there.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from mpidist.errors import TransportError
from mpidist.transports.connections.waiting import Patience, Presence

#: What can be sent as a header.
Header: TypeAlias = bytes | bytearray | memoryview


class Message:
    """What came through a connection.  The `payload`, not to be written, is valid until `release`."""

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
    """Memory for payloads to one peer; made by `Connection.area`.

    This rank writes to `array` while the area is not `busy`; it begins at a multiple of 64 bytes.
    """

    connection: Connection
    array: Any

    @property
    @abc.abstractmethod
    def busy(self) -> bool:
        """Whether its content was sent and is still needed: it must not be written."""

    def wait_free(self) -> None:
        """Wait until the area is not busy; errors as for `Connection.wait`."""
        if not self.busy:
            return
        presence = self.connection.presence
        control, peer = presence.control, presence.name_of(self.connection.peer)
        what = f"rank {control.rank} waits for {control.name(peer)} to be done with what it was sent"
        patience = Patience([self.connection], what)
        while self.busy:
            patience.tick()

    @abc.abstractmethod
    def close(self) -> None:
        """Give the memory back, on both sides; the area is not used any more.  Local."""


class Connection(abc.ABC):
    """The two ends of a conversation, seen from one of them; made by `open_connections`.

    Parameters
    ----------
    peer : int
        Rank of the other end, in the world the connection was opened in.

    Attributes
    ----------
    is_shared : bool
        Whether the peer is on this node, so that memory can be shared with it.
    """

    is_shared = False

    def __init__(self, peer: int, presence: Presence) -> None:
        self.peer = peer
        self.presence = presence
        self.closed = False
        self._inbox: deque[Message] = deque()
        #: Why the peer will send nothing more than it has sent, empty if it may.
        self.gone = ""

    @abc.abstractmethod
    def send(self, header: Header, payload: Area | None = None, nbytes: int | None = None) -> None:
        """Send a message; waits only while there is no room, and takes in meanwhile what has come.  Local.

        Parameters
        ----------
        header : bytes-like
            Copied; may be changed afterwards.
        payload : Area, optional
            Of this connection, and not busy.
        nbytes : int, optional
            How much of the area is sent, from its beginning; all by default.

        Raises
        ------
        ValueError
            The area is another connection's, or busy, or smaller than `nbytes`.
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
        """Take in messages for `receive`, and send messages that wait; return whether any moved."""

    def _checked(self, area: Any, nbytes: int | None) -> tuple[Any, int]:
        """Return an area that may be sent, and how many of its bytes are; errors as for `send`."""
        if not isinstance(area, Area) or area.connection is not self:
            raise ValueError(f"an area that was made by the connection to rank {self.peer} is needed, got {area!r}")
        length = area.array.size if nbytes is None else nbytes
        if area.busy or not 0 <= length <= area.array.size:
            state = "is busy; call wait_free before it is filled" if area.busy else f"has {area.array.size} bytes"
            raise ValueError(f"{length} bytes of an area to rank {self.peer} cannot be sent: it {state}")
        return area, length

    def _wait_to_send(self, has_room_fn: Callable[[], bool]) -> None:
        """Wait until there is room for what this rank sends; errors as for `send`."""
        patience = None
        while self.gone or not has_room_fn():
            if self.closed:
                raise TransportError(f"the connection to rank {self.peer} has been closed")
            if patience is None:
                patience = Patience([self], f"{self.described}, for room to send its own")
            if self.gone:
                raise patience.lost(self)
            for connection in self.presence.connections:  # or a circle of ranks would wait for each other
                connection.take_in()
            patience.tick()

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
        """How a wait on this connection is called, where nothing better is known."""
        control = self.presence.control
        return f"rank {control.rank} waits for a message of {control.name(self.presence.name_of(self.peer))}"

    @property
    def lost(self) -> bool:
        """Whether the peer has ended, and all that it had sent has been received.  Local."""
        if not self.gone:
            self.presence.look()
        return bool(self.gone) and not self._has_more()

    def _has_more(self) -> bool:
        """Whether something that the peer sent before its end is still to be received."""
        self.take_in()
        return bool(self._inbox)

    def lose(self, why: str) -> None:
        """Take note of the end of the peer, for this reason.  Local."""
        self.gone = self.gone or why

    def close(self) -> None:
        """Give the connection's memory back; messages that nobody has received are dropped.  Local."""
        self.closed = True
        self.lose("was closed here")
        self._inbox.clear()
        self.presence.forget(self)

    def __repr__(self) -> str:
        state = " (closed)" if self.closed else f" ({self.gone})" if self.gone else ""
        return f"<{type(self).__name__} to rank {self.peer}{state}>"
