"""Standoffs of pairs: ranks each of which waits, in a send or a receive, for the next, in a circle.

They are found by probes, as Chandy, Misra and Haas have it ("Distributed deadlock detection", 1983).  A rank that has
waited for a while sends a probe to the rank that it waits for.  A rank that gets one passes it on to the rank that it
waits for itself, if it has not done its part of what the sender waits for: then that one still waits.  So a probe that
comes back has been round a circle in which nobody can go on.  A rank that computes does not look at probes.

What a rank waits for is a number of a message of the pair.  A message that is under way is no reason for an alarm.
"""

from __future__ import annotations

import struct
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from mpidist.errors import RankFailedError
from mpidist.runtime import board as states
from mpidist.runtime.control import Watch
from mpidist.runtime.watch import limit_text
from mpidist.transports.base import Pending, Transport

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator
    from mpidist.collectives.exchange.point_to_point import PointToPoint, Transfer

#: A note has these bytes, and begins with: its kind, the number of the message that its sender waits for, the rank that
#: sent the probe first, which of its probes it is, how many ranks the probe has been to, and the length of the text.
_NOTE_BYTES, _HEAD = 2048, struct.Struct("=6q")

#: Kinds of notes: an answer, by which a rank says that it has read one; a probe of a rank that sends or receives.
_ANSWER, _SENDS, _RECEIVES = range(3)

#: The channel of notes.
_NOTES = 4

#: So many ranks are named in a message, each in so many characters.
_NAMED, _NAMED_CHARACTERS = 8, 180

#: A probe has to come back so many times: a rank may have given up waiting behind the back of the first.
_ROUNDS = 2


@dataclass(frozen=True)
class _Probe:
    """A probe as it was read, or is to be sent."""

    kind: int
    number: int
    origin: int
    serial: int
    hops: int
    path: str

    def packed(self) -> Any:
        """Return the bytes of a note."""
        text = self.path.encode(errors="replace")[: _NOTE_BYTES - _HEAD.size]
        head = _HEAD.pack(self.kind, self.number, self.origin, self.serial, self.hops, len(text))
        return numpy.frombuffer((head + text).ljust(_NOTE_BYTES, b"\0"), numpy.uint8)


def _unpacked(raw: bytes) -> _Probe:
    """Return the probe of a note."""
    kind, number, origin, serial, hops, length = _HEAD.unpack_from(raw)
    text = raw[_HEAD.size : _HEAD.size + length].decode(errors="ignore")
    return _Probe(kind, number, origin, serial, hops, text)


class PeerStandoffs:
    """The probes of one rank."""

    def __init__(self, ranks: Communicator, sides: PointToPoint) -> None:
        self._ranks, self._sides = ranks, sides
        self._notes: Transport = ranks.transport.among(range(ranks.size), _NOTES)
        self._receives: dict[int, tuple[Any, Pending]] = {}
        self._sends: list[Pending] = []
        self._unanswered: set[int] = set()  # so notes that nobody reads do not pile up
        self._read: dict[tuple[int, int], _Probe] = {}  # by sender and origin
        self._passed: dict[int, int] = {}
        self._to_send: dict[int, _Probe] = {}
        self._place: Any = None
        self._serial = self._rounds = 0

    def found(self, waited: Transfer) -> str | None:
        """Return the text of the error if this rank waits in a standoff; to be asked again and again.  Local."""
        self._take_in()
        place = weakref.ref(waited), waited.number
        if place != self._place:
            self._place, self._rounds = place, 0
            self._passed.clear()
            self._to_send.clear()
            self._send_own(waited)
        for key, probe in list(self._read.items()):
            side = (self._sides.sources if probe.kind == _SENDS else self._sides.targets)[key[0]]
            if side.number >= probe.number:
                del self._read[key]
            elif not side.waiting:
                if probe.origin != self._ranks.rank:
                    # once, so that one that goes round in a circle without that rank has an end
                    if self._passed.get(probe.origin) != probe.serial and probe.hops < self._ranks.size:
                        self._passed[probe.origin] = probe.serial
                        self._to_send[probe.origin] = self._extended(probe, waited)
                elif self._is_round(self._read.pop(key), waited):
                    return _text(probe)
        # when the other rank has read what was sent before
        if self._to_send and waited.peer not in self._unanswered:
            self._unanswered.add(waited.peer)
            self._post(waited.peer, self._to_send.pop(next(iter(self._to_send))))
        return None

    def _is_round(self, probe: _Probe, waited: Transfer) -> bool:
        """Take note that an own probe has come back, and return whether it is the last one."""
        if probe.serial == self._serial:
            self._rounds += 1
            if self._rounds == _ROUNDS:
                return True
            self._send_own(waited)
        return False

    def _send_own(self, waited: Transfer) -> None:
        """Begin a round of an own probe."""
        self._serial += 1
        self._to_send[self._ranks.rank] = self._extended(_Probe(0, 0, self._ranks.rank, self._serial, 0, ""), waited)

    def _extended(self, probe: _Probe, waited: Transfer) -> _Probe:
        control, own = self._ranks.control, self._ranks.transport.world_ranks[self._ranks.rank]
        path = probe.path
        if probe.hops < _NAMED:
            path += ("; " if path else "") + f"{control.name(own)} waits in {waited.what}"[:_NAMED_CHARACTERS]
        kind = _SENDS if waited.sends else _RECEIVES
        return _Probe(kind, waited.number, probe.origin, probe.serial, probe.hops + 1, path)

    # -- notes ------------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Read the notes that are there, and answer them."""
        if not self._receives:
            others = (peer for peer in range(self._ranks.size) if peer != self._ranks.rank)
            self._receives = {peer: self._expected(peer) for peer in others}
        for peer, (raw, pending) in list(self._receives.items()):
            try:
                while self._notes.poll([pending]):
                    self._hear(peer, _unpacked(raw.tobytes()))
                    pending = self._notes.receive(raw, peer)
                self._receives[peer] = raw, pending
            except RankFailedError:  # the watch of who waits for that rank tells of it; the others can do without
                del self._receives[peer]

    def _expected(self, peer: int) -> tuple[Any, Pending]:
        raw = numpy.empty(_NOTE_BYTES, numpy.uint8)
        self._notes.abandon([raw])  # the world may be closed before it is written into
        return raw, self._notes.receive(raw, peer)

    def _hear(self, peer: int, probe: _Probe) -> None:
        if probe.kind == _ANSWER:
            self._unanswered.discard(peer)
        else:
            self._read[peer, probe.origin] = probe
            self._post(peer, _Probe(_ANSWER, 0, 0, 0, 0, ""))

    def _post(self, peer: int, probe: _Probe) -> None:
        self._sends = [each for each in self._sends if not self._notes.poll([each])]
        self._sends.append(self._notes.send(probe.packed(), peer))


def _text(probe: _Probe) -> str:
    more = f"; and {probe.hops - _NAMED} ranks more" if probe.hops > _NAMED else ""
    return (
        f"these ranks wait for each other, so none of them can go on: {probe.path}{more}. Let one of them send where "
        "the other receives first; or start() one of the sends, as in send_init(array, to).start(array), and wait() "
        "for it after the receive"
    )


#: After so many seconds of waiting it may be for ever.
_LONG_SECONDS = 0.5


class PeerWatch(Watch):
    """One eye on the control channel while one rank waits for another.

    `is_missed`: the function given to `run` raised on another rank, so the rank that is waited for may never come.
    """

    __slots__ = ("_waited", "_standoffs", "_peer", "_has_left", "is_missed")

    def __init__(self, ranks: Communicator, waited: Transfer, standoffs: PeerStandoffs) -> None:
        super().__init__(ranks.control, waited.what, waited.timeout_seconds, 0)
        self._waited, self._standoffs = waited, standoffs
        self._peer = ranks.transport.world_ranks[waited.peer]  # as the control channel knows it
        self._has_left = self.is_missed = False

    def _look(self, waited: float) -> None:
        super()._look(waited)
        control: Any = self.control
        self.is_missed = any(control.missed.text(rank, control.call + 1) is not None for rank in range(control.size))
        if self._has_left:  # and a look ago too: what it had sent has come since
            name = control.name(self._peer)
            text = f"{name} left (its program ended, or called sys.exit), while this rank is in {self.what}"
            raise control.error(RankFailedError, text, self._peer)
        self._has_left = control.failures.state_of(self._peer)[0] == states.LEFT
        if waited > _LONG_SECONDS and not self.is_missed and not self._waited.is_over:
            standoff = self._standoffs.found(self._waited)
            if standoff is not None:
                raise control.give_up(standoff)

    def _warn(self, waited: float) -> None:
        control = self.control
        limit = limit_text(self.timeout_seconds)
        control.warn(f"{self.what} has waited {waited:.0f} s for {control.name(self._peer)}; {limit}")

    def _expire(self, waited: float) -> None:
        control = self.control
        raise control.expire(
            f"{self.what} waited {waited:.1f} s for {control.name(self._peer)}. Each send needs one receive on the "
            "other rank; where two ranks send to each other first, start() one of the two and wait() for it later; "
            "or give more time with timeout_seconds or MPIDIST_TIMEOUT_SECONDS"
        )
