"""Arrays from one rank to another, without the other ranks: send and receive, bound or not.

A message says what it brings: so the receiver needs to know nothing, and notices what it did not expect.  It begins
with a *head*, in which a short array has room as well; the rest of a long one follows on a channel of its own.  On one
node the head lies in a *box*, memory that each pair of ranks has for each direction; elsewhere it is sent.

All that a rank has started moves on in each of its waits, those of collectives included: so ranks that send to each
other before they receive get through, if they have started one of the two.
"""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy

from mpidist import arrays
from mpidist.collectives.call import Call
from mpidist.collectives.exchange import plain
from mpidist.collectives.exchange.box import Box, box_bytes
from mpidist.collectives.exchange.peer_standoff import PeerStandoffs, PeerWatch
from mpidist.collectives.handle import Handle
from mpidist.collectives.mismatch import fact
from mpidist.collectives.persistent import Once
from mpidist.errors import CollectiveMismatchError, TransportError
from mpidist.options import check_timeout
from mpidist.runtime.shared_memory import LINE_BYTES
from mpidist.transports.base import Pending, Transport

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator

#: Length of the head of a message that is sent, and the numbers with which a head begins: bytes that describe the
#: array, bytes of the array, and the last call that a rank missed.
_HEAD_BYTES, _LENGTHS = 2048, struct.Struct("=qqq")

#: So often a rank looks for the other one before it looks around.
_SPINS = range(200)

#: Channels of heads, and of what follows.
_HEADS, _BODIES = 2, 3

#: Of so many kinds of arrays the description is kept ready.
_KEPT = 256

#: What a message says of an array of some dtype and shape, ``(dtype, shape)``, and back.
_describe, _signature = lru_cache(_KEPT)(pickle.dumps), lru_cache(_KEPT)(pickle.loads)


class Transfer(Handle):
    """A send or a receive that was started.  `watch` is that of those who ask whether it is ready."""

    sends: bool

    def __init__(self, lines: PointToPoint, peer: int, timeout_seconds: float | None) -> None:
        check_timeout(timeout_seconds)
        self.peer, self.timeout_seconds = peer, timeout_seconds
        self.is_over = False
        self.result: Any = None
        self.watch: PeerWatch | None = None
        self._lines = lines

    @property
    def what(self) -> str:
        """The send or receive in a few words, for messages."""
        raise NotImplementedError

    @property
    def number(self) -> int:
        """The message of the pair that the other rank must come to before this transfer can be over."""
        raise NotImplementedError

    def poll(self) -> None:
        """Move on as far as is possible without waiting.  Local."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Return whether the transfer is over; all that is open moves on as far as it can without waiting.

        Local.  Errors as for `wait`; the deadline counts from the first time that somebody asks.
        """
        return self.is_over or self._lines.is_ready(self)

    def wait(self) -> Any:
        """Return when the array has been sent, or the array that was received; a second call returns the same.

        Local, but for the other rank, which must receive or send.

        Raises
        ------
        TransportTimeoutError, RankFailedError
            The other rank did not come, and why as far as it is known.
        RemoteReplicaError
            The function given to `run` raised on the other rank.  This takes the place of a collective call.
        CollectiveMismatchError
            Another array came than the receiver expected; on the receiver only.
        """
        if not self.is_over:
            self._lines.wait(self)
        return self.result


class _Sending(Transfer):
    """A send that was started."""

    sends = True

    def __init__(
        self,
        lines: PointToPoint,
        peer: int,
        timeout_seconds: float | None,
        signature: tuple[Any, tuple[int, ...]],
        head: tuple[bytes, int, Any],
        bodies: list[Any],
    ) -> None:
        super().__init__(lines, peer, timeout_seconds)
        self._signature, self._head, self._bodies = signature, head, bodies
        self._pendings: list[tuple[Transport, Pending]] | None = None

    @property
    def what(self) -> str:
        """The send in a few words."""
        return f"send of {_described(*self._signature)} to rank {self.peer}"

    @property
    def number(self) -> int:
        """The last message that was posted: the next one is posted when it has been taken."""
        return self._lines.targets[self.peer].number

    def poll(self) -> None:
        self._lines.targets[self.peer].poll()

    def move_on(self) -> bool:
        """Post what can be posted, and return whether all of it has been sent."""
        if self._pendings is None:
            pendings = self._lines.targets[self.peer].post(*self._head)
            if pendings is None:
                return False
            bodies = self._lines.bodies
            self._pendings = [*pendings, *((bodies, [bodies.send(raw, self.peer)]) for raw in self._bodies)]
        if self._pendings:
            self._pendings = [(transport, each) for transport, each in self._pendings if not transport.poll(each)]
        self.is_over = not self._pendings
        return self.is_over


class _Receiving(Transfer):
    """A receive that was started: those of one rank are served in order."""

    sends = False

    def __init__(self, lines: PointToPoint, peer: int, timeout_seconds: float | None, expected: Any, kind: Any) -> None:
        super().__init__(lines, peer, timeout_seconds)
        self.expected, self._kind = expected, kind
        self.wrong = ""

    @property
    def what(self) -> str:
        """The receive in a few words."""
        return f"receive {'' if self.expected is None else f'of {_described(*self.expected)} '}from rank {self.peer}"

    @property
    def number(self) -> int:
        """The message that is to come next, or is coming."""
        source = self._lines.sources[self.peer]
        return source.number + (not source.is_coming)

    def poll(self) -> None:
        source = self._lines.sources[self.peer]
        while source.waiting and not self.is_over and source.poll():
            pass

    def wait(self) -> Any:
        result = super().wait()
        if self.wrong:
            raise CollectiveMismatchError(self.wrong)
        if self._kind is not None:
            result = self.result = arrays.in_memory_of(self._kind, result)
        return result


class _Side:
    """What goes to one other rank, or comes from it, in order; `number` is that of the last message."""

    def __init__(self, lines: PointToPoint, peer: int, box: Box | None) -> None:
        self.waiting: deque[Any] = deque()
        self.number = 0
        self._lines, self._peer, self._box = lines, peer, box


class _Destination(_Side):
    """What goes to one other rank, in order."""

    def poll(self) -> None:
        """Move on with what comes first."""
        while self.waiting and self.waiting[0].move_on():
            self.waiting.popleft()

    def has_put(self, head: bytes, start: int, array: Any) -> bool:
        """Send a short array by the box, if nothing else is under way; return whether it was."""
        box = self._box
        if self.waiting or box is None or not box.put(self.number + 1, head, start, array):
            return False
        self.number += 1
        return True

    def post(self, head: bytes, start: int, array: Any) -> list[tuple[Transport, Pending]] | None:
        """Post the head of the next message, and an array from byte `start` of it on, if there is one.

        Return what to wait for, None if it cannot be posted now.
        """
        number = self.number + 1
        if self._box is not None:
            if not self._box.put(number, head, start, array):
                return None
            self.number = number
            return []
        self.number = number
        raw = head if array is None else head.ljust(start, b"\0") + array.tobytes()
        heads = self._lines.heads
        return [(heads, [heads.send(numpy.frombuffer(raw.ljust(_HEAD_BYTES, b"\0"), numpy.uint8), self._peer)])]


class _Incoming(_Side):
    """What comes from one other rank."""

    def __init__(self, lines: PointToPoint, peer: int, box: Box | None) -> None:
        super().__init__(lines, peer, box)
        self.is_coming = False  # whether a message has begun to come, and not ended
        self._head: Any = numpy.empty(_HEAD_BYTES if box is None else 0, numpy.uint8)
        self._content = self._head.data if box is None else box.content
        self._pending: Pending = None
        self._is_void = False  # whether the message was sent in a step that was given up
        self._poll_fn: Callable[[], bool] = self._begin if box is None else self._box_is_filled

    def poll(self) -> bool:
        """Move on by a step, and return whether there was one."""
        return self._poll_fn()

    def taken(self, head: bytes, start: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Return a short array with that head, if it comes soon and nothing was to come before it; else None."""
        box, number = self._box, self.number + 1
        if self.waiting or box is None:
            return None
        for _ in _SPINS:
            if box.holds(number):
                break
        else:
            return None
        if self._content[: len(head)] != head:
            return None
        array = numpy.empty(shape, dtype)
        array[...] = box.values(start, dtype, shape, array.nbytes)
        box.take(number)
        self.number = number
        return array

    def _box_is_filled(self) -> bool:
        assert self._box is not None
        if not self._box.holds(self.number + 1):
            return False
        self._read()
        return True

    def _begin(self) -> bool:
        self._pending = [self._lines.heads.receive(self._head, self._peer)]
        self._poll_fn = self._head_comes
        return True

    def _head_comes(self) -> bool:
        if not self._lines.heads.poll(self._pending):
            return False
        self._read()
        return True

    def _read(self) -> None:
        """Read the head of the next message."""
        content, room = self._content, len(self._content)
        described, nbytes, missed = _LENGTHS.unpack_from(content)
        last = self._lines.last_missed
        if missed > last:  # the other rank has given up the step in which this one still is
            self._lines.is_behind, self._poll_fn = True, self._is_read_now
            return
        self._is_void = missed < last
        self.number += 1
        behind = _LENGTHS.size + described
        if behind > room:
            self._follow(numpy.empty(described, numpy.uint8), lambda raw: self._array_comes(raw.tobytes(), 0, nbytes))
        else:
            start = _start_of(described)
            has_room = start + nbytes <= room
            self._array_comes(bytes(content[_LENGTHS.size : behind]), start if has_room else 0, nbytes)

    def _is_read_now(self) -> bool:
        """Read the head that is there, if this rank has given up its step by now."""
        if _LENGTHS.unpack_from(self._content)[2] > self._lines.last_missed:
            self._lines.is_behind = True
            return False
        self._read()
        return True

    def _follow(self, raw: Any, then: Callable[[Any], object]) -> None:
        """Receive what follows the head."""
        self.is_coming = True
        pending = [self._lines.bodies.receive(raw, self._peer)]

        def come() -> bool:
            if not self._lines.bodies.poll(pending):
                return False
            then(raw)
            return True

        self._poll_fn = come

    def _array_comes(self, description: bytes, start: int, nbytes: int) -> None:
        """Take the array from byte `start` of the head on; 0 if it follows."""
        signature = _signature(description)
        dtype, shape = signature
        result = numpy.empty(shape, dtype)
        if not start:
            self._follow(arrays.byte_view(result), lambda raw: self._end(result, signature))
        elif self._box is not None:
            result[...] = self._box.values(start, dtype, shape, nbytes)
            self._end(result, signature)
        else:
            result[...] = self._head[start : start + nbytes].view(dtype).reshape(shape)
            self._end(result, signature)

    def _end(self, result: Any, signature: Any) -> None:
        self.is_coming = False
        if self._box is None:
            self._poll_fn = self._begin
        else:
            self._box.take(self.number)
            self._poll_fn = self._box_is_filled
        if self._is_void:
            return
        receiving = self.waiting.popleft()
        receiving.is_over, receiving.result = True, result
        expected = receiving.expected
        if expected is not None and expected != signature:
            receiving.wrong = (
                f"{self._lines.control.own_name}: {receiving.what} expected {_described(*expected)}, got "
                f"{_described(*signature)}; both ranks must name the same array (message {self.number} of this pair)"
            )


class PointToPoint:
    """The messages between pairs of ranks, for one rank.

    `targets` and `sources` are by rank: what goes to it, and what comes from it.  `is_behind`: a message has come from
    a later step than that in which this rank waits.
    """

    def __init__(self, ranks: Communicator) -> None:
        transport = ranks.transport
        if not transport.has_channels:
            raise TransportError(
                f"the {transport.name} transport has no channels, which send and receive need; use all_to_all, which "
                "all ranks call"
            )
        self._ranks, self.control, self.turnstile = ranks, ranks.control, ranks.turnstile
        self.heads = transport.among(range(ranks.size), _HEADS)
        self.bodies = transport.among(range(ranks.size), _BODIES)
        segments, rank = ranks.segments, ranks.rank
        has_boxes = segments is not None and box_bytes(segments) > 0
        peers = [peer for peer in range(ranks.size) if peer != rank]

        def box(sender: int, receiver: int) -> Box | None:
            return Box(segments, sender, receiver) if has_boxes and segments is not None else None

        self.targets = {peer: _Destination(self, peer, box(rank, peer)) for peer in peers}
        self.sources = {peer: _Incoming(self, peer, box(peer, rank)) for peer in peers}
        self._room = box_bytes(segments) - 2 * LINE_BYTES if has_boxes else _HEAD_BYTES
        self.standoffs = PeerStandoffs(ranks, self)
        self.is_behind = False
        self._open: list[Transfer] = []
        self._pause: Any = None

    @property
    def last_missed(self) -> int:
        """The last call that a rank missed: messages of earlier steps are void."""
        return self.control.missed.last

    def head_of(self, signature: tuple[Any, tuple[int, ...]], nbytes: int) -> tuple[bytes | None, int]:
        """Return the head of messages that bring such arrays, and where in it these begin; None where none fits in."""
        description = _describe(signature)
        start = _start_of(len(description))
        head = _LENGTHS.pack(len(description), nbytes, self.last_missed) + description
        return (head, start) if start + nbytes <= self._room else (None, 0)

    def start_send(self, array: Any, to: int, timeout_seconds: float | None = None) -> Transfer:
        """Start to send an array; see `Communicator.send`.  Local."""
        to = self.checked_target(array, to)
        return self.post(self.on_host(array, to), to, timeout_seconds)

    def post(self, array: Any, to: int, timeout_seconds: float | None) -> Transfer:
        """Start to send an array of the host that can be sent, to a rank that there is.  Local."""
        signature = (array.dtype, array.shape)
        description, nbytes = _describe(signature), array.nbytes
        start, bodies = _start_of(len(description)), []
        head = _LENGTHS.pack(len(description), nbytes, self.last_missed)
        if len(head) + len(description) <= self._room:
            head += description
        else:
            bodies.append(numpy.frombuffer(description, numpy.uint8))
        inside = array
        if bodies or start + nbytes > self._room:
            bodies.append(arrays.byte_view(array if array.flags.c_contiguous else array.copy(order="C")))
            inside = None
        sending = _Sending(self, to, timeout_seconds, signature, (head, start, inside), bodies)
        with self.turnstile:
            self.targets[to].waiting.append(sending)
            return self._opened(sending)

    def start_receive(self, source: int, like: Any = None, timeout_seconds: float | None = None) -> Transfer:
        """Start to receive an array; see `Communicator.receive`.  Local."""
        source = self.checked_peer(source, "receive", "source")
        expected = None if like is None else (like.dtype, tuple(like.shape))
        return self.expect(source, expected, timeout_seconds, _kind_of(like))

    def expect(self, source: int, expected: Any, timeout_seconds: float | None, kind: Any) -> Transfer:
        """Start to receive, from a rank that there is, an array of a dtype and shape, or of any.  Local.

        It is put into the memory of `kind`, an array; None for the host's.
        """
        receiving = _Receiving(self, source, timeout_seconds, expected, kind)
        with self.turnstile:
            self.sources[source].waiting.append(receiving)
            return self._opened(receiving)

    def wait(self, transfer: Transfer) -> None:
        """Return when a transfer is over; all others move on meanwhile."""
        with self.turnstile:
            for _ in _SPINS if self._pause is None else ():
                self._move_on()
                if transfer.is_over:
                    return
            watch = PeerWatch(self._ranks, transfer, self.standoffs)
            self._move_on()
            while not transfer.is_over and not watch.is_missed and not self.is_behind:
                watch.tick()  # in which all that is open moves on, see `_opened`
        if not transfer.is_over:
            self._end_step(transfer)

    def is_ready(self, transfer: Transfer) -> bool:
        """Return whether a transfer is over; all others move on as well."""
        with self.turnstile:
            self._move_on()
            if transfer.watch is None:
                transfer.watch = PeerWatch(self._ranks, transfer, self.standoffs)
            if not transfer.is_over:
                transfer.watch.tick()
        if not transfer.is_over and (transfer.watch.is_missed or self.is_behind):
            self._end_step(transfer)
        return transfer.is_over

    def _end_step(self, transfer: Transfer) -> None:
        """Raise RemoteReplicaError, as all ranks do: the function given to `run` raised on one."""
        self.is_behind = False
        if isinstance(transfer, _Receiving):  # a send that was begun goes on when that rank receives
            self._open.remove(transfer)
            self.sources[transfer.peer].waiting.remove(transfer)
            self._settle()
        Once(self._ranks, Call(transfer.what, [fact("of", self.control.own_name)]))(None)

    def _opened(self, transfer: Transfer) -> Transfer:
        """Take note of a transfer: while one is open, every turn of every wait moves it on."""
        transfer.poll()
        if not transfer.is_over:
            if not self._open:
                self._pause, self.control.pause = self.control.pause, self._pause_and_move_on
            self._open.append(transfer)
        return transfer

    def _pause_and_move_on(self) -> None:
        if self._pause is not None:
            self._pause()
        self._move_on()

    def _move_on(self) -> None:
        if self._open:
            for transfer in self._open:
                transfer.poll()
            self._open = [transfer for transfer in self._open if not transfer.is_over]
            self._settle()

    def _settle(self) -> None:
        if not self._open and self.control.pause == self._pause_and_move_on:
            self.control.pause = self._pause

    def checked_target(self, array: Any, to: int) -> int:
        """Return the rank to send to as an int; raise unless such an array can be sent there.  Local."""
        to = self.checked_peer(to, "send", "to")
        arrays.check_movable(array.dtype)
        return to

    def on_host(self, array: Any, to: int) -> Any:
        """Return an array that is sent in host memory, as it is if it is there already.  Local."""
        if isinstance(array, numpy.ndarray):
            return array
        with self.turnstile:
            watch = self.control.watch(f"send of {_described(array.dtype, array.shape)} to rank {to}")
            return self._ranks.devices.on_host(array, watch)

    def checked_peer(self, peer: int, verb: str, argument: str) -> int:
        """Return a rank as an int; ValueError unless there is such another rank.  Local."""
        own, size, peer = self._ranks.rank, self._ranks.size, plain.whole(peer, f"{verb}: {argument}")
        if not 0 <= peer < size:
            raise ValueError(f"{verb}: there is no rank {peer} in a world of {size}")
        if peer == own:
            raise ValueError(
                f"{verb}: rank {own} of {size} is this rank itself, which would wait for itself; copy the array instead"
            )
        return peer


def _start_of(described: int) -> int:
    """Return where in a head an array begins that is described by so many bytes."""
    return -(-(_LENGTHS.size + described) // LINE_BYTES) * LINE_BYTES


def _kind_of(like: Any) -> Any:
    """Return an array without elements in the same memory; None for the host's."""
    is_host = like is None or isinstance(like, numpy.ndarray) or not arrays.is_known(like)
    return None if is_host else arrays.empty(0, like.dtype, like)


def _described(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


#: A send that is over already.
_SENT = Handle.done(None)


class _BoundToPeer:
    """What sends to one rank, and receives from one, of arrays of one dtype and shape have in common."""

    def __init__(self, lines: PointToPoint, like: Any, peer: int) -> None:
        self._lines, self._peer, self._turnstile = lines, peer, lines.turnstile
        self._dtype, self._shape, self._nbytes = like.dtype, tuple(like.shape), like.nbytes
        self._renew()

    def _renew(self) -> None:
        """Make the head of the messages, which has the call that this rank missed last."""
        self._missed = self._lines.last_missed
        self._head, self._begin = self._lines.head_of((self._dtype, self._shape), self._nbytes)


class BoundSend(_BoundToPeer):
    """The send of arrays of one dtype and shape to one rank; parameters as for `Communicator.send_init`."""

    def __init__(self, lines: PointToPoint, like: Any, to: int) -> None:
        to = lines.checked_target(like, to)
        super().__init__(lines, like, to)
        self._destination = lines.targets[to]

    def start(self, array: Any, timeout_seconds: float | None = None) -> Handle:
        """Start to send; the array must not change before ``wait()`` of what this returns has returned.  Local."""
        if array.dtype != self._dtype or array.shape != self._shape:
            expected, got = _described(self._dtype, self._shape), _described(array.dtype, array.shape)
            raise ValueError(f"send to rank {self._peer} was bound to {expected}, got {got}; bind another one")
        array = self._lines.on_host(array, self._peer)
        if self._head is not None:
            with self._turnstile:
                if self._missed != self._lines.last_missed:
                    self._renew()
                if self._destination.has_put(self._head, self._begin, array):
                    return _SENT
        return self._lines.post(array, self._peer, timeout_seconds)

    def __call__(self, array: Any, timeout_seconds: float | None = None) -> None:
        """Send, and wait; errors as for `Transfer.wait`."""
        self.start(array, timeout_seconds).wait()


class BoundReceive(_BoundToPeer):
    """The receive of arrays of one dtype and shape from one rank; parameters as for `Communicator.receive_init`."""

    def __init__(self, lines: PointToPoint, like: Any, source: int) -> None:
        source = lines.checked_peer(source, "receive", "source")
        super().__init__(lines, like, source)
        self._origin, self._kind = lines.sources[source], _kind_of(like)

    def start(self, timeout_seconds: float | None = None) -> Transfer:
        """Start to receive.  Local."""
        return self._lines.expect(self._peer, (self._dtype, self._shape), timeout_seconds, self._kind)

    def __call__(self, timeout_seconds: float | None = None) -> Any:
        """Receive, and return the array; errors as for `Transfer.wait`."""
        if self._head is not None:
            with self._turnstile:
                if self._missed != self._lines.last_missed:
                    self._renew()
                found = self._origin.taken(self._head, self._begin, self._dtype, self._shape)
            if found is not None:
                return found if self._kind is None else arrays.in_memory_of(self._kind, found)
        return self.start(timeout_seconds).wait()
