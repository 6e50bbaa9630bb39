"""Arrays from one rank to another, without the other ranks: send and receive, bound or not.

Messages between two ranks are numbered, and say what they bring: so the receiver needs to know nothing, and notices
what it did not expect.  A message begins with a *head* of fixed length, in which a short array has room as well; the
rest of a long one follows on a channel of its own.

All that a rank has started moves on in each of its waits, those of collectives included: so ranks that send to each
other before they receive get through, if they have started one of the two.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy

from mpidist import arrays
from mpidist.collectives.call import Call
from mpidist.collectives.mismatch import fact
from mpidist.collectives.persistent import Once
from mpidist.collectives.ranks import Ranks
from mpidist.errors import CollectiveMismatchError, RankFailedError, TransportError, UnsupportedDtypeError
from mpidist.runtime import board as states
from mpidist.runtime.control import Watch
from mpidist.transports.base import Pending, Transport

#: Length of the head of a message, and of the three words that it begins with: number, bytes that describe the array,
#: bytes of the array.
_HEAD_BYTES, _WORDS_BYTES = 2048, 24

#: Channels of heads, and of what follows.
_HEADS, _BODIES = 2, 3

#: Of so many kinds of arrays the description is kept ready.
_KEPT = 256


class PeerWatch(Watch):
    """One eye on the control channel while one rank waits for another.

    Parameters
    ----------
    ranks : Ranks
    what : str
    peer : int
        The other rank.
    timeout_seconds : float, optional

    Attributes
    ----------
    is_missed : bool
        Whether the function given to `run` raised on the other rank, which therefore may never come.
    """

    __slots__ = ("_peer", "_has_left", "is_missed")

    def __init__(self, ranks: Ranks, what: str, peer: int, timeout_seconds: float | None) -> None:
        super().__init__(ranks.control, what, timeout_seconds, 0)
        self._peer = peer
        self._has_left = self.is_missed = False

    def _look(self, waited: float) -> None:
        super()._look(waited)
        control: Any = self.control
        self.is_missed = control.missed.text(self._peer, control.call + 1) is not None
        if self._has_left:  # and a look ago too: what it had sent has come since
            name = control.name(self._peer)
            text = f"{name} left (its program ended, or called sys.exit), while this rank is in {self.what}"
            raise control.error(RankFailedError, text, self._peer)
        self._has_left = control.failures.state_of(self._peer)[0] == states.LEFT

    def _warn(self, waited: float) -> None:
        control = self.control
        limit = f"it fails after {self.timeout_seconds:g} s" if self.timeout_seconds else "it waits without a limit"
        control.warn(f"{self.what} has waited {waited:.0f} s for {control.name(self._peer)}; {limit}")

    def _expire(self, waited: float) -> None:
        control = self.control
        raise control.expire(
            f"{self.what} waited {waited:.1f} s for {control.name(self._peer)}. Each send needs one receive on the "
            "other rank; where two ranks send to each other first, start() one of the two and wait() for it later; "
            "or give more time with timeout_seconds or MPIDIST_TIMEOUT_SECONDS"
        )


class Transfer:
    """A send or a receive that was started.

    Attributes
    ----------
    what : str
    peer : int
    is_over : bool
    result : array or None
    """

    def __init__(self, lines: PointToPoint, what: str, peer: int, timeout_seconds: float | None) -> None:
        self.what, self.peer, self.timeout_seconds = what, peer, timeout_seconds
        self.is_over = False
        self.result: Any = None
        self._lines = lines

    def poll(self) -> None:
        """Move on as far as is possible without waiting.  Local."""
        raise NotImplementedError

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

    def __init__(
        self,
        lines: PointToPoint,
        what: str,
        peer: int,
        timeout_seconds: float | None,
        messages: list[tuple[Transport, Any]],
    ) -> None:
        super().__init__(lines, what, peer, timeout_seconds)
        self._messages = [(transport, [transport.send(raw, peer)], raw) for transport, raw in messages]

    def poll(self) -> None:
        self._messages = [each for each in self._messages if not each[0].poll(each[1])]
        self.is_over = not self._messages


class _Receiving(Transfer):
    """A receive that was started: those of one rank are served in order."""

    def __init__(self, lines: PointToPoint, what: str, peer: int, timeout_seconds: float | None, like: Any) -> None:
        super().__init__(lines, what, peer, timeout_seconds)
        self.expected = None if like is None else (like.dtype, tuple(like.shape))
        self.wrong: str = ""

    def poll(self) -> None:
        source = self._lines.sources[self.peer]
        while source.waiting and not self.is_over and source.poll():
            pass

    def wait(self) -> Any:
        result = super().wait()
        if self.wrong:
            raise CollectiveMismatchError(self.wrong)
        return result


class _Source:
    """What comes from one other rank."""

    def __init__(self, lines: PointToPoint, peer: int) -> None:
        self.waiting: deque[_Receiving] = deque()
        self._lines, self._peer = lines, peer
        self._number = 0
        self._head = numpy.empty(_HEAD_BYTES, numpy.uint8)
        self._pending: Pending = None
        self._poll_fn: Callable[[], bool] = self._begin

    def poll(self) -> bool:
        """Move on by a step, and return whether there was one."""
        return self._poll_fn()

    def _begin(self) -> bool:
        self._pending = [self._lines.heads.receive(self._head, self._peer)]
        self._poll_fn = self._head_comes
        return True

    def _head_comes(self) -> bool:
        if not self._lines.heads.poll(self._pending):
            return False
        self._number += 1
        number, described, nbytes = self._head[:_WORDS_BYTES].view(numpy.int64).tolist()
        if number != self._number:
            raise self._lines.error(f"message {number} came from rank {self._peer} in place of {self._number}")
        behind = _WORDS_BYTES + described
        if behind > _HEAD_BYTES:
            self._follow(numpy.empty(described, numpy.uint8), lambda raw: self._array_comes(raw.tobytes(), nbytes))
        else:
            inside = self._head[behind : behind + nbytes] if behind + nbytes <= _HEAD_BYTES else None
            self._array_comes(self._head[_WORDS_BYTES:behind].tobytes(), nbytes, inside)
        return True

    def _follow(self, raw: Any, then: Callable[[Any], object]) -> None:
        """Receive what follows the head."""
        pending = [self._lines.bodies.receive(raw, self._peer)]

        def come() -> bool:
            if not self._lines.bodies.poll(pending):
                return False
            then(raw)
            return True

        self._poll_fn = come

    def _array_comes(self, description: bytes, nbytes: int, inside: Any = None) -> None:
        dtype, shape = self._lines.signature(description)
        result = numpy.empty(shape, dtype)
        if inside is None:
            self._follow(arrays.byte_view(result), lambda raw: self._end(result))
        else:
            arrays.byte_view(result)[...] = inside
            self._end(result)

    def _end(self, result: Any) -> None:
        self._poll_fn = self._begin
        receiving = self.waiting.popleft()
        receiving.is_over, receiving.result = True, result
        expected, got = receiving.expected, (result.dtype, result.shape)
        if expected not in (None, got):
            receiving.wrong = (
                f"{self._lines.own_name}: {receiving.what} expected {_described(*expected)}, got {_described(*got)}; "
                f"both ranks must name the same array (message {self._number} of this pair)"
            )


class PointToPoint:
    """The messages between pairs of ranks, for one rank.

    Parameters
    ----------
    ranks : Ranks

    Attributes
    ----------
    heads, bodies : Transport
    sources : dict of int to _Source
    """

    def __init__(self, ranks: Ranks) -> None:
        transport = ranks.transport
        if not transport.has_channels:
            raise TransportError(
                f"the {transport.name} transport has no channels, which send and receive need; use all_to_all, which "
                "all ranks call"
            )
        self._ranks, self._control = ranks, ranks.control
        self.heads = transport.among(range(ranks.size), _HEADS)
        self.bodies = transport.among(range(ranks.size), _BODIES)
        self.sources = {peer: _Source(self, peer) for peer in range(ranks.size)}
        self._sent = [0] * ranks.size
        self._open: list[Transfer] = []
        self._pause: Any = None
        self._descriptions: dict[Any, bytes] = {}
        self._signatures: dict[bytes, Any] = {}

    @property
    def own_name(self) -> str:
        """How messages of this rank begin."""
        return self._control.own_name

    def error(self, text: str) -> TransportError:
        """Return the error of this rank with a text.  Local."""
        return TransportError(f"{self.own_name}: {text}")

    def start_send(self, array: Any, to: int, timeout_seconds: float | None = None) -> Transfer:
        """Start to send an array; see `Communicator.send`.  Local."""
        self._check_peer(to, "send")
        if arrays.is_device(array):
            raise UnsupportedDtypeError(
                f"send moves arrays of the host, got a {type(array).__name__}; copy it with mpidist.arrays.as_host"
            )
        arrays.check_movable(array.dtype)
        description = self._describe(array)
        body = arrays.byte_view(array if array.flags.c_contiguous else array.copy(order="C"))
        with self._control.turnstile:
            self._sent[to] += 1
            head = numpy.zeros(_HEAD_BYTES, numpy.uint8)
            head[:_WORDS_BYTES].view(numpy.int64)[...] = self._sent[to], len(description), body.size
            behind = _WORDS_BYTES + len(description)
            messages = [(self.heads, head)]
            described = numpy.frombuffer(description, numpy.uint8)
            if behind > _HEAD_BYTES:
                messages.append((self.bodies, described))
            else:
                head[_WORDS_BYTES:behind] = described
            if behind + body.size > _HEAD_BYTES:
                messages.append((self.bodies, body))
            else:
                head[behind : behind + body.size] = body
            what = f"send of {_described(array.dtype, array.shape)} to rank {to}"
            return self._opened(_Sending(self, what, to, timeout_seconds, messages))

    def start_receive(self, source: int, like: Any = None, timeout_seconds: float | None = None) -> Transfer:
        """Start to receive an array; see `Communicator.receive`.  Local."""
        self._check_peer(source, "receive")
        what = f"receive from rank {source}"
        if like is not None:
            what = f"receive of {_described(like.dtype, like.shape)} from rank {source}"
        with self._control.turnstile:
            found = _Receiving(self, what, source, timeout_seconds, like)
            self.sources[source].waiting.append(found)
            return self._opened(found)

    def wait(self, transfer: Transfer) -> None:
        """Return when a transfer is over; all others move on meanwhile."""
        watch = PeerWatch(self._ranks, transfer.what, transfer.peer, transfer.timeout_seconds)
        with self._control.turnstile:
            self._move_on()
            while not transfer.is_over and not watch.is_missed:
                watch.tick()  # in which all that is open moves on, see `_opened`
        if not transfer.is_over:
            self._give_up(transfer)
            Once(self._ranks, Call(transfer.what, [fact("of", self.own_name)]))(None)  # raises RemoteReplicaError

    def _give_up(self, transfer: Transfer) -> None:
        """Wait for a transfer no more: the function of the other rank raised."""
        self._open.remove(transfer)
        if isinstance(transfer, _Receiving):
            self.sources[transfer.peer].waiting.remove(transfer)
        self._settle()

    def _opened(self, transfer: Transfer) -> Transfer:
        """Take note of a transfer: while one is open, every turn of every wait moves it on."""
        transfer.poll()
        if not transfer.is_over:
            if not self._open:
                self._pause, self._control.pause = self._control.pause, self._pause_and_move_on
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
        if not self._open and self._control.pause == self._pause_and_move_on:
            self._control.pause = self._pause

    def _describe(self, array: Any) -> bytes:
        key = (array.dtype, array.shape)
        found = self._descriptions.get(key)
        if found is None:
            if len(self._descriptions) >= _KEPT:
                self._descriptions.clear()
            found = self._descriptions[key] = pickle.dumps(key)
        return found

    def signature(self, description: bytes) -> Any:
        """Return dtype and shape of an array that was described so.  Local."""
        found = self._signatures.get(description)
        if found is None:
            if len(self._signatures) >= _KEPT:
                self._signatures.clear()
            found = self._signatures[description] = pickle.loads(description)
        return found

    def _check_peer(self, peer: int, verb: str) -> None:
        own, size = self._ranks.rank, self._ranks.size
        if not 0 <= peer < size:
            raise ValueError(f"{verb}: there is no rank {peer} in a world of {size}")
        if peer == own:
            raise ValueError(
                f"{verb}: rank {own} of {size} is this rank itself, which would wait for itself; copy the array instead"
            )


def _described(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


class BoundSend:
    """The send of arrays of one dtype and shape to one rank; parameters as for `Communicator.send_init`."""

    def __init__(self, lines: PointToPoint, like: Any, to: int) -> None:
        lines._check_peer(to, "send")
        self._lines, self._to = lines, to
        self._signature = (like.dtype, tuple(like.shape))

    def start(self, array: Any, timeout_seconds: float | None = None) -> Transfer:
        """Start to send; the array must not change before the transfer's ``wait`` returns.  Local."""
        if (array.dtype, array.shape) != self._signature:
            expected, got = _described(*self._signature), _described(array.dtype, array.shape)
            raise ValueError(f"send to rank {self._to} was bound to {expected}, got {got}; bind another one")
        return self._lines.start_send(array, self._to, timeout_seconds)

    def __call__(self, array: Any, timeout_seconds: float | None = None) -> None:
        """Send, and wait; errors as for `Transfer.wait`."""
        self.start(array, timeout_seconds).wait()


class BoundReceive:
    """The receive of arrays of one dtype and shape from one rank; parameters as for `Communicator.receive_init`."""

    def __init__(self, lines: PointToPoint, like: Any, source: int) -> None:
        lines._check_peer(source, "receive")
        self._lines, self._source = lines, source
        self._like = numpy.broadcast_to(numpy.zeros((), like.dtype), like.shape)

    def start(self, timeout_seconds: float | None = None) -> Transfer:
        """Start to receive.  Local."""
        return self._lines.start_receive(self._source, self._like, timeout_seconds)

    def __call__(self, timeout_seconds: float | None = None) -> Any:
        """Receive, and return the array; errors as for `Transfer.wait`."""
        return self.start(timeout_seconds).wait()
