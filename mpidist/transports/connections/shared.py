"""Connections between ranks of one node: headers through rings of shared memory, payloads read where they lie.

Each direction of a connection is a ring of bytes that one side fills and the other empties, with a counter each, on
cache lines of their own.  A *record* in a ring is a prefix of three words and the bytes of a header, or of a part of a
long one.  An area is a file in memory of its own, whose place is told in a record before its first use.  Its first word
is 1 while the area is busy: the sender sets it, and the receiver clears it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy

from mpidist.errors import TransportError
from mpidist.runtime.board import fence
from mpidist.runtime.shared_memory import SharedFile, map_file
from mpidist.transports.connections.base import Area, Connection, Header, Message
from mpidist.transports.connections.waiting import Presence
from mpidist.transports.node_memory import Exchange, map_together

#: A prefix: bytes that follow, flags, number of the area, bytes of the payload.
_PREFIX = struct.Struct("<IIQQ")
_PREFIX_BYTES = _PREFIX.size

#: Flags: more of this header follows; there is a payload; the place of a new area; an area is given back; the rest of
#: the ring is skipped.
_MORE, _PAYLOAD, _AREA, _DROP, _SKIP = 1, 2, 4, 8, 16
_NO_MESSAGE = _MORE | _AREA | _DROP

#: Counters of a ring: bytes filled, bytes emptied; in words from its beginning, and where its bytes begin.
_FILLED, _EMPTIED, _START_BYTES = 0, 8, 128

#: Words at the beginning of an area: busy, and whether the peer has mapped it; and where its bytes begin.
_BUSY, _MAPPED, _AREA_START = 0, 1, 64


def open_shared_connections(
    rank: int,
    here: Sequence[int],
    peers_of: Sequence[Sequence[int]],
    presence: Presence,
    ring_bytes: int,
    exchange: Exchange,
) -> dict[int, Connection]:
    """Return connections to this rank's peers `here`, none (with a warning) where memory cannot be had.  Collective."""
    ring_bytes = max(4096, -(-ring_bytes // 64) * 64)
    directions = [(a, b) for a in here for b in peers_of[a] if b in here]
    stride = _START_BYTES + ring_bytes
    own = [index * stride for index, (sender, _) in enumerate(directions) if sender == rank]
    part = (own[0] if own else 0, len(own) * stride)
    try:
        memory = memoryview(map_together(max(1, len(directions)) * stride, here.index(rank), exchange, part))
    except TransportError as error:
        if rank == here[0]:
            presence.control.warn(f"{error}; the ranks of this node talk by messages instead")
        return {}
    rings = {pair: memory[index * stride : (index + 1) * stride] for index, pair in enumerate(directions)}
    peers = [peer for peer in peers_of[rank] if peer in here]
    return {peer: SharedConnection(peer, presence, rings[rank, peer], rings[peer, rank]) for peer in peers}


class SharedConnection(Connection):
    """A connection to a rank of this node, through a zeroed ring to it and one from it."""

    is_shared = True
    #: The memory of what the peer has sent went with the peer: nothing more can be taken in.
    _is_cut_off = False

    def __init__(self, peer: int, presence: Presence, ring_out: memoryview, ring_in: memoryview) -> None:
        super().__init__(peer, presence)
        self._size = len(ring_out) - _START_BYTES
        self._most = self._size // 4 - _PREFIX_BYTES  # of a header in one record: long ones keep both sides busy
        self._out_words, self._in_words = ring_out[:_START_BYTES].cast("Q"), ring_in[:_START_BYTES].cast("Q")
        self._out, self._in = ring_out[_START_BYTES:], ring_in[_START_BYTES:]
        self._filled = self._emptied = self._seen_emptied = 0
        self._areas: list[SharedArea] = []
        self._made = 0
        self._theirs: dict[int, _TheirArea] = {}
        self._parts = bytearray()

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, header: Header, payload: Area | None = None, nbytes: int | None = None) -> None:
        if payload is None:
            if len(header) > self._most:
                header = self._send_parts(memoryview(header).cast("B"))
            self._put(_record(header, 0, 0, 0))
            return
        area, length = self._checked(payload, nbytes)
        words = area.words
        if area.file is not None:
            self._announce(area)
        words[_BUSY] = 1
        last_header, last_length, record = area.sent
        if header is not last_header or length != last_length:
            if len(header) > self._most:
                header = self._send_parts(memoryview(header).cast("B"))
            record = area.keep_record(header, length)
        self._put(record)

    def _send_parts(self, header: memoryview) -> memoryview:
        """Send all of a long header but its last part, and return that."""
        most = self._most
        while len(header) > most:
            self._put(_record(header[:most], _MORE, 0, 0))
            header = header[most:]
        return header

    def _put(self, record: bytes) -> None:
        """Write one record into the ring, waiting for room."""
        nbytes = len(record)
        filled, size = self._filled, self._size
        at = filled % size
        end = at + nbytes
        if end > size or filled + nbytes - self._seen_emptied > size or self.gone:
            filled, at = self._place_for(nbytes, filled, at)
            end = at + nbytes
        self._out[at:end] = record
        self._filled = filled = filled + nbytes
        fence()
        self._out_words[_FILLED] = filled

    def _place_for(self, nbytes: int, filled: int, at: int) -> tuple[int, int]:
        """Return counter and place of a record, behind what is skipped at the end of the ring; wait for room."""
        size = self._size
        skipped = size - at if at + nbytes > size else 0
        if filled + skipped + nbytes - self._seen_emptied > size or self.gone:
            self._wait_for_room(filled + skipped + nbytes - size)
        if not skipped:
            return filled, at
        self._out[at : at + 8] = _SKIPPED
        return filled + skipped, 0

    def _wait_for_room(self, emptied: int) -> None:
        """Wait until the peer has emptied the ring up to there."""

        def has_room() -> bool:
            self._seen_emptied = self._out_words[_EMPTIED]
            return self._seen_emptied >= emptied

        self._wait_to_send(has_room)
        fence()

    # -- areas --------------------------------------------------------------------------------------------------------

    def area(self, nbytes: int) -> SharedArea:
        try:
            made = SharedArea(self, self._made, nbytes)
        except OSError as error:
            raise TransportError(
                f"{nbytes} bytes of shared memory for what goes to rank {self.peer} cannot be had: {error}"
            ) from error
        self._made += 1
        self._areas.append(made)
        return made

    def _announce(self, area: SharedArea) -> None:
        """Tell the peer, once, where an area is; forget its way in when the peer has taken it."""
        assert area.file is not None
        if not area.announced:
            area.announced = True
            self._put(_record(area.file.path.encode(), _AREA, area.number, 0))
        elif area.words[_MAPPED]:
            area.file.unlink()
            area.file = None

    def drop(self, area: SharedArea) -> None:
        """Tell the peer that an area is no more."""
        if area in self._areas:
            self._areas.remove(area)
            if area.announced and not self.gone and not self.closed:
                self._put(_record(b"", _DROP, area.number, 0))

    # -- receiving ----------------------------------------------------------------------------------------------------

    def receive(self) -> Message | None:
        inbox = self._inbox
        if not inbox and (self._in_words[_FILLED] == self._emptied or not self.take_in() or not inbox):
            return None
        return inbox.popleft()

    def take_in(self) -> bool:
        emptied, filled = self._emptied, self._in_words[_FILLED]
        if filled == emptied or self._is_cut_off:
            return False
        fence()
        size, ring = self._size, self._in
        while emptied < filled:
            at = emptied % size
            if ring[at + 4] & _SKIP:
                emptied += size - at
                continue
            nbytes, flags, number, length = _PREFIX.unpack_from(ring, at)
            start = at + _PREFIX_BYTES
            self._take(bytes(ring[start : start + nbytes]), flags, number, length)
            if self._is_cut_off:
                break
            emptied += (_PREFIX_BYTES + nbytes + 7) & ~7
            fence()
            self._in_words[_EMPTIED] = self._emptied = emptied
        return True

    def _take(self, content: bytes, flags: int, number: int, length: int) -> None:
        """Take one record in."""
        if flags & _NO_MESSAGE:
            if flags & _MORE:
                self._parts += content
            elif flags & _AREA:
                self._map(number, content.decode())
            else:
                self._theirs.pop(number, None)
            return
        if self._parts:
            content, self._parts = bytes(self._parts + content), bytearray()
        if flags:
            area = self._theirs[number]
            self._inbox.append(Message(content, area.beginning(length), area.free))
        else:
            self._inbox.append(Message(content))

    def _map(self, number: int, path: str) -> None:
        try:
            memory = map_file(path)
        except OSError as error:
            if self.presence.end_of(self.peer):  # whoever waits for it looks for its end, and knows what to say
                self._is_cut_off = True
                return
            raise TransportError(f"an area of rank {self.peer} cannot be mapped: {error}") from error
        self._theirs[number] = _TheirArea(memory)

    def close(self) -> None:
        super().close()
        for area in self._areas:
            area.forget()
        self._areas, self._theirs = [], {}


class _TheirArea:
    """An area of the peer."""

    __slots__ = ("_words", "_array", "_length", "_beginning")

    def __init__(self, memory: Any) -> None:
        self._words = memoryview(memory)[:_AREA_START].cast("Q")
        self._array = numpy.frombuffer(memory, dtype=numpy.uint8, offset=_AREA_START)
        self._array.flags.writeable = False
        self._length, self._beginning = -1, self._array
        self._words[_MAPPED] = 1

    def beginning(self, length: int) -> Any:
        """Return so many bytes of it: the same object if it is as many as the last time."""
        if length != self._length:
            self._length, self._beginning = length, self._array[:length]
        return self._beginning

    def free(self) -> None:
        """Say that the area is not needed any more."""
        fence()
        self._words[_BUSY] = 0


class SharedArea(Area):
    """An area in shared memory."""

    connection: SharedConnection

    def __init__(self, connection: SharedConnection, number: int, nbytes: int) -> None:
        self.connection = connection
        self.number = number
        self.announced = False
        self.file: SharedFile | None = SharedFile(_AREA_START + max(1, nbytes))
        memory = self.file.map()
        self.words = memoryview(memory)[:_AREA_START].cast("Q")
        self.array = numpy.frombuffer(memory, dtype=numpy.uint8, offset=_AREA_START)[:nbytes]
        #: The header and the length with which it was sent the last time, and the record.
        self.sent: tuple[Header, int, bytes] = (b"", -1, b"")

    def keep_record(self, header: Header, length: int) -> bytes:
        """Return the record with which the area is sent; it is kept if the header cannot change."""
        record = _record(header, _PAYLOAD, self.number, length)
        if type(header) is bytes:
            self.sent = header, length, record
        return record

    @property
    def busy(self) -> bool:
        if self.words[_BUSY]:
            return True
        fence()
        return False

    def close(self) -> None:
        self.connection.drop(self)
        self.forget()

    def forget(self) -> None:
        """Give the memory back, as far as this rank is concerned."""
        if self.file is not None:
            self.file.unlink()
            self.file = None


def _record(content: Header, flags: int, number: int, length: int) -> bytes:
    """Return a record: a prefix and a header, or a part of one, up to a multiple of 8 bytes."""
    nbytes = len(content)
    return b"".join((_PREFIX.pack(nbytes, flags, number, length), content, bytes(-(_PREFIX_BYTES + nbytes) % 8)))


#: The first word of a record that says that the rest of the ring is skipped.
_SKIPPED = struct.pack("<II", 0, _SKIP)
