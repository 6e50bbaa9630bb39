"""Connections over a transport: for ranks of different nodes, and where memory cannot be shared.

A message is a *frame* of fixed size, which the receiver has always asked for in advance: how long the header is, how
long the payload, and the header's beginning.  What does not fit follows in a message of its own, and so does the
payload, each of a size that both sides know by then.  So any transport will do.

The receiver owns the buffers that payloads arrive in, and uses them again when they have been released.  An area is
free as soon as the transport is done with it, which may be before the peer releases the message.
"""

from __future__ import annotations

import struct
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy

from mpidist import own_process
from mpidist.arrays import aligned
from mpidist.errors import RankFailedError
from mpidist.transports.base import Pending, Transport
from mpidist.transports.connections.base import Area, Connection, Header, Message
from mpidist.transports.connections.waiting import Presence

#: A prefix: bytes of the header, flags, bytes of the payload; and how long a frame is in all.
_PREFIX = struct.Struct("<QQQ")
_FRAME_BYTES = 1024
_INLINE_BYTES = _FRAME_BYTES - _PREFIX.size

_PAYLOAD = 1

#: Messages that may be under way to the peer before a sender waits.
_MOST_UNDER_WAY = 64

#: How long what a peer has sent may still take to arrive when it is known to have ended.
_ARRIVE_SECONDS = 0.5

#: How long the end of a process waits for what it has sent, where nothing else waits for that.
_SEND_OFF_SECONDS = 5.0


def open_message_connections(transport: Transport, peers: Sequence[int], presence: Presence) -> dict[int, Connection]:
    """Return connections to `peers` over a transport that is used for nothing else.  Local."""
    connections = {peer: MessageConnection(peer, presence, transport) for peer in peers}
    if presence.control.settings.fault_tolerant:  # then MPI is not finalized, which would wait for what is under way
        own_process.at_exit(_send_off, list(connections.values()))
    return dict(connections)


def _send_off(connections: Sequence[MessageConnection]) -> None:
    """Wait a while until all that was sent is on its way, so that the process may end."""
    deadline = time.monotonic() + _SEND_OFF_SECONDS
    while any(not connection.all_sent for connection in connections) and time.monotonic() < deadline:
        time.sleep(0)


class MessageConnection(Connection):
    """A connection over a transport in which the peer has the same number."""

    def __init__(self, peer: int, presence: Presence, transport: Transport) -> None:
        super().__init__(peer, presence)
        self._transport = transport
        self._under_way: deque[tuple[Pending, Any]] = deque()  # with what is being sent
        self._awaited: list[Pending] = []
        self._spare: list[Any] = []  # buffers for payloads
        self._incoming = self._arrays()
        self._last_came = 0.0
        self._ask()
        # what is under way when nobody refers to the connection any more is still written into, or read from
        weakref.finalize(self, transport.abandon, [self._under_way, self._awaited])

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, header: Header, payload: Area | None = None, nbytes: int | None = None) -> None:
        area, length = (None, 0) if payload is None else self._checked(payload, nbytes)
        self._wait_for_room()
        content = bytes(header)
        frame: Any = numpy.empty(_FRAME_BYTES, dtype=numpy.uint8)
        view = memoryview(frame)
        _PREFIX.pack_into(view, 0, len(content), _PAYLOAD if area is not None else 0, length)
        inline = content[:_INLINE_BYTES]
        view[_PREFIX.size : _PREFIX.size + len(inline)] = inline
        self._start(frame)
        if len(content) > _INLINE_BYTES:
            self._start(numpy.frombuffer(content, dtype=numpy.uint8)[_INLINE_BYTES:])
        if area is not None and length:
            area.pending = self._start(area.array[:length])

    def _start(self, array: Any) -> Pending:
        pending = self._guarded(self._transport.send, array, self.peer)
        self._under_way.append((pending, array))
        return pending

    def _wait_for_room(self) -> None:
        def has_room() -> bool:
            self._push_on()
            return len(self._under_way) < _MOST_UNDER_WAY

        self._wait_to_send(has_room)

    def _push_on(self) -> bool:
        """Let go of what has been sent; return whether there was something."""
        queue, moved = self._under_way, False
        while queue and self._done(queue[0][0]):
            queue.popleft()
            moved = True
        return moved

    def _done(self, pending: Pending) -> bool:
        return bool(self._guarded(self._transport.poll, [pending]))

    def _guarded(self, fn: Any, *args: Any) -> Any:
        """Call a method of the transport; a peer that it finds gone is lost."""
        try:
            return fn(*args)
        except RankFailedError as error:
            if not self.gone:  # else it has said before that it leaves
                self.lose(f"died: {error}")
                self.presence.control.failures.lost[self.presence.name_of(self.peer)] = str(error)
            self._transport.abandon([*self._under_way, *self._awaited])
            self._under_way.clear()
            self._awaited.clear()
            if not self.presence.control.settings.fault_tolerant:
                raise
            return None

    @property
    def all_sent(self) -> bool:
        """Whether nothing is on its way to the peer any more, or the peer is gone.  Local."""
        self._push_on()
        return not self._under_way or bool(self.gone)

    # -- areas --------------------------------------------------------------------------------------------------------

    def area(self, nbytes: int) -> MessageArea:
        return MessageArea(self, nbytes)

    def sent(self, pending: Pending) -> bool:
        """Return whether what `send` started is done; also when it is in vain."""
        return self._done(pending) or bool(self.gone)

    # -- receiving ----------------------------------------------------------------------------------------------------

    def take_in(self) -> bool:
        moved = bool(self._under_way) and self._push_on()
        while self._awaited and self._done(self._awaited[0]):
            self._awaited.pop()
            self._ask()
            moved = True
        return moved

    def _ask(self) -> None:
        """Ask the transport for what is to be received next."""
        pending = self._guarded(self._transport.receive, next(self._incoming), self.peer)
        if pending is not None:
            self._awaited.append(pending)

    def _has_more(self) -> bool:
        """As `Connection._has_more`; what is under way when the peer's end gets known has a moment to arrive."""
        now = time.monotonic()
        if self.take_in() or not self._last_came:
            self._last_came = now
        return bool(self._inbox) or now - self._last_came < _ARRIVE_SECONDS

    def _arrays(self) -> Iterator[Any]:
        """Yield the arrays to be received into, one after the other, and put the messages together."""
        frame: Any = numpy.empty(_FRAME_BYTES, dtype=numpy.uint8)
        while True:
            yield frame
            nbytes, flags, length = _PREFIX.unpack_from(frame)
            header = frame[_PREFIX.size : _PREFIX.size + min(nbytes, _INLINE_BYTES)].tobytes()
            if nbytes > _INLINE_BYTES:
                rest = numpy.empty(nbytes - _INLINE_BYTES, dtype=numpy.uint8)
                yield rest
                header += rest.tobytes()
            if flags & _PAYLOAD:
                buffer = self._buffer_of(length)
                if length:
                    yield buffer[:length]
                payload = buffer[:length]
                payload.flags.writeable = False
                self._inbox.append(Message(header, payload, partial(self._spare.append, buffer)))
            else:
                self._inbox.append(Message(header))

    def _buffer_of(self, nbytes: int) -> Any:
        """Return a buffer of at least `nbytes` bytes: the smallest spare one that fits, or a new one."""
        fitting = [index for index, buffer in enumerate(self._spare) if buffer.size >= nbytes]
        if fitting:
            return self._spare.pop(min(fitting, key=lambda index: self._spare[index].size))
        if self._spare:
            self._spare.pop()  # too small by now: it grows
        return aligned(nbytes, numpy.uint8)

    def close(self) -> None:
        super().close()
        self._transport.abandon([*self._under_way, *self._awaited])
        self._awaited.clear()


class MessageArea(Area):
    """An area in private memory; `pending` is what `Transport.send` returned when its content was sent last."""

    connection: MessageConnection

    def __init__(self, connection: MessageConnection, nbytes: int) -> None:
        self.connection = connection
        self.array = aligned(nbytes, numpy.uint8)
        self.pending: Pending = None

    @property
    def busy(self) -> bool:
        if self.pending is not None and self.connection.sent(self.pending):
            self.pending = None
        return self.pending is not None

    def close(self) -> None:
        """Do nothing: the memory goes with the last reference to it."""
