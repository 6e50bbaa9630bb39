"""Memory shared by the ranks of one node, and messages through it.

`SharedSegments` is the memory: for each rank some words of flags and some bytes of its own, seen by all.
`SharedTransport` moves messages through it: each ordered pair of ranks has a small ring of slots that one side fills
and the other empties, so a message of any length needs no further memory and one copy in and one out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from mpidist.errors import TransportError
from mpidist.runtime.board import fence
from mpidist.runtime.control import ControlChannel, Watch
from mpidist.runtime.shared_memory import SharedFile, map_file
from mpidist.transports.base import Transport, exchange_among

#: ``exchange(payload)`` gives every rank of a group what each of them gave; collective.
Exchange = Callable[[bytes], list[bytes]]

#: A cache line, in words and bytes: flags of different writers never share one.
_LINE_WORDS, _LINE_BYTES = 8, 64


def map_together(nbytes: int, rank: int, exchange: Exchange) -> Any:
    """Map one zeroed piece of memory into all ranks of a node.

    Collective: every rank of the node calls it in the same order.

    Parameters
    ----------
    nbytes : int
        Size in bytes.
    rank : int
        Rank in the group of the node; 0 makes the file.
    exchange : callable
        Small all-gather over the group.

    Raises
    ------
    TransportError
        On all ranks, when one of them cannot get at the memory; says which and why.
    """
    file, memory, problem = None, None, ""
    try:
        file = SharedFile(nbytes) if rank == 0 else None
        path = file.path if file is not None else ""
    except OSError as error:
        path, problem = "", f"{nbytes} bytes of shared memory cannot be had: {error}"
    path = exchange(path.encode())[0].decode()
    if path:
        try:
            memory = file.map() if file is not None else map_file(path)
        except OSError as error:
            problem = f"the memory of local rank 0 cannot be mapped: {error}"
    problems = [raw.decode() for raw in exchange(problem.encode())]
    if file is not None:
        file.unlink()
    bad = [f"local rank {index}: {text}" for index, text in enumerate(problems) if text]
    if bad:
        raise TransportError(f"no shared memory on this node; {'; '.join(bad)}")
    return memory


class SharedSegments:
    """Memory of the ranks of a node that all of them see: flags, two segments a rank for small calls, and places.

    The two segments are used in turn by even and odd calls.  A rank that writes into its segment of call k + 2 knows
    that all others are done reading it for call k, since they have posted call k + 1 on the status board before that.
    Places and flags are for longer calls: `PlaceAllReduce`, `ShareAllReduce` and `DirectSum` say how they use places,
    and those and `SharedSum` count turns by the flags.  On several nodes all of it is for `TwoLevel`.

    Parameters
    ----------
    memory : writable buffer of `nbytes` (size, segment_bytes, place_bytes) bytes, zeroed
    size : int
    segment_bytes, place_bytes : int
        Multiples of 64.

    Attributes
    ----------
    segments : tuple of two tuples of arrays
        ``segments[call & 1][rank]``: shape (segment_bytes,), uint8.
    places : tuple of `PLACES` tuples of arrays
        ``places[index][rank]``: shape (place_bytes,), uint8.
    flags : memoryview of 64-bit words
    filled_words, reduced_words : tuple of int
        By rank: where in `flags` the last turn stands that the rank has filled, or reduced.
    taken_words : tuple of int
        By rank: where in `flags` the last bucket stands that the rank has taken.
    verdict_words : tuple of int
        Where in `flags` local rank 0 tells the others what it knows of other nodes: a call, and two words about it.
    ping_words : tuple of int
        By rank: where in `flags` it answers the others at once (`Nearness`).
    turn, bucket, pings : int
        The numbers of turns, of buckets and of pings made so far; the same on all ranks between calls.
    """

    PLACES = 4

    def __init__(self, memory: Any, size: int, segment_bytes: int, place_bytes: int) -> None:
        self.segment_bytes, self.place_bytes = segment_bytes, place_bytes
        self.turn = self.bucket = self.pings = 0
        flag_bytes, segments_bytes = 2 * size * _LINE_BYTES, 2 * size * segment_bytes
        self.flags = memoryview(memory)[:flag_bytes].cast("Q")
        self.filled_words = tuple(2 * rank * _LINE_WORDS for rank in range(size))
        self.reduced_words = tuple((2 * rank + 1) * _LINE_WORDS for rank in range(size))
        self.taken_words = tuple(word + 1 for word in self.reduced_words)
        self.verdict_words = (1, 2, 3)  # behind the first word of local rank 0
        self.ping_words = tuple(word + 4 for word in self.filled_words)
        values = numpy.frombuffer(memory, dtype=numpy.uint8)[: self.nbytes(size, segment_bytes, place_bytes)]
        self.segments = _cut(values[flag_bytes : flag_bytes + segments_bytes], 2, size)
        self.places = _cut(values[flag_bytes + segments_bytes :], self.PLACES, size)

    @classmethod
    def nbytes(cls, size: int, segment_bytes: int, place_bytes: int) -> int:
        """Return how much memory all this takes."""
        return size * (2 * _LINE_BYTES + 2 * segment_bytes + cls.PLACES * place_bytes)

    @property
    def depth(self) -> int:
        """How many turns' values there is room for `between` two ranks at a time: two where no others are there."""
        return 2 if len(self.filled_words) == 2 else 1

    @property
    def room(self) -> int:
        """How many bytes there are `between` two ranks."""
        others = len(self.filled_words) - 1
        return self.place_bytes // max(1, -(-others // self.PLACES)) & ~63

    def between(self, rank: int, other: int, turn: int) -> Any:
        """Return the part of the places of `rank` that is for one other rank in a turn: shape (room,), uint8."""
        part, place = divmod(other - (other > rank) + turn % self.depth, self.PLACES)
        return self.places[place][rank][part * self.room : (part + 1) * self.room]

    def wait(self, words: Sequence[int], turn: int, watch: Watch) -> None:
        """Wait until all these flags stand at `turn` or later; errors as for `Watch.tick`."""
        flags = self.flags
        for word in words:
            while flags[word] < turn:
                watch.tick()
        fence()

    def say_filled(self, rank: int, turn: int) -> None:
        """Say that `rank` has done what comes first in the turn before `turn`: mostly, filled its places."""
        fence()
        self.flags[self.filled_words[rank]] = turn

    def say_reduced(self, rank: int, turn: int) -> None:
        """Say that `rank` has done what comes second in the turn before `turn`: mostly, reduced its share."""
        fence()
        self.flags[self.reduced_words[rank]] = turn

    def say_taken(self, rank: int, bucket: int) -> None:
        """Say that `rank` has copied out all of `bucket`."""
        fence()
        self.flags[self.taken_words[rank]] = bucket


def _cut(values: Any, count: int, size: int) -> tuple[tuple[Any, ...], ...]:
    cut = values.reshape(count, size, -1)
    return tuple(tuple(cut[index, rank] for rank in range(size)) for index in range(count))


class SharedTransport(Transport):
    """Messages between ranks of one node, through slots of shared memory.

    Parameters
    ----------
    memory : writable buffer of `nbytes` (size, slot_bytes) bytes, zeroed
    rank, size : int
    control : ControlChannel
    world_ranks : sequence of int
    slot_bytes : int
        Size of a slot, a multiple of 64.
    """

    name = "shared"
    SLOTS = 4

    def __init__(
        self,
        memory: Any,
        rank: int,
        size: int,
        control: ControlChannel,
        world_ranks: Sequence[int],
        slot_bytes: int,
    ) -> None:
        self.rank = rank
        self.size = size
        self.control = control
        self.world_ranks = tuple(world_ranks)
        self._slot_bytes = slot_bytes
        flag_bytes = size * size * 2 * _LINE_WORDS * 8
        whole = memoryview(memory)
        words = whole[:flag_bytes].cast("Q")
        count = size * size * self.SLOTS * slot_bytes
        slots = numpy.frombuffer(memory, dtype=numpy.uint8, offset=flag_bytes, count=count)
        slots = slots.reshape(size, size, self.SLOTS, slot_bytes)
        self._out = [_Lane(words, slots[rank, peer], (rank * size + peer)) for peer in range(size)]
        self._in = [_Lane(words, slots[peer, rank], (peer * size + rank)) for peer in range(size)]
        self._sending: list[deque[_Message]] = [deque() for _ in range(size)]
        self._receiving: list[deque[_Message]] = [deque() for _ in range(size)]

    @classmethod
    def nbytes(cls, size: int, slot_bytes: int) -> int:
        """Return how much memory the slots of `size` ranks take."""
        return size * size * (2 * _LINE_WORDS * 8 + cls.SLOTS * slot_bytes)

    @classmethod
    def over(
        cls, exchange: Exchange, rank: int, size: int, control: ControlChannel, world_ranks: Sequence[int]
    ) -> SharedTransport:
        """Return a transport over a group of ranks of one node that have `exchange`.

        Collective: every rank of the group calls it in the same order.
        """
        slot_bytes = max(4096, min(1 << 16, (1 << 20) // (cls.SLOTS * size)) & ~63)
        memory = map_together(cls.nbytes(size, slot_bytes), rank, exchange)
        return cls(memory, rank, size, control, world_ranks, slot_bytes)

    def send(self, array: Any, destination: int) -> _Message:
        message = _Message(self.content(array, destination))
        self._sending[destination].append(message)
        self._fill(destination)
        return message

    def receive(self, array: Any, source: int) -> _Message:
        message = _Message(self.content(array, source))
        self._receiving[source].append(message)
        return message

    def wait(self, pendings: Sequence[_Message], watch: Watch) -> None:
        while not all(message.done for message in pendings):
            if not self._move():
                watch.tick()

    def poll(self, pendings: Sequence[_Message]) -> bool:
        self._move()
        return all(message.done for message in pendings)

    def split(self, color: int) -> SharedTransport:
        watch = self.control.watch("split of a shared-memory transport")
        colors = [int(raw) for raw in self.exchange(str(color).encode(), watch)]
        members = [rank for rank in range(self.size) if colors[rank] == color]
        ranks = [self.world_ranks[member] for member in members]

        def exchange(payload: bytes) -> list[bytes]:
            return exchange_among(self, members, payload, watch)

        return SharedTransport.over(exchange, members.index(self.rank), len(members), self.control, ranks)

    def close(self) -> None:
        self.closed, self._out, self._in = True, [], []

    def _move(self) -> bool:
        """Fill and empty what slots there are; return whether anything moved."""
        moved = False
        for peer in range(self.size):
            moved = self._fill(peer) or moved
            moved = self._empty(peer) or moved
        return moved

    def _fill(self, peer: int) -> bool:
        """Move what fits of the messages to `peer` into its slots; return whether anything moved."""
        queue, lane, moved = self._sending[peer], self._out[peer], False
        while queue and lane.filled - lane.emptied < self.SLOTS:
            piece = queue[0].next_piece(self._slot_bytes)
            numpy.copyto(lane.slots[lane.filled % self.SLOTS][: piece.size], piece)
            lane.fill(queue[0].nbytes)
            moved = True
            if queue[0].done:
                queue.popleft()
        return moved

    def _empty(self, peer: int) -> bool:
        """Move what has come from `peer` into the arrays that wait for it; return whether anything moved."""
        queue, lane, moved = self._receiving[peer], self._in[peer], False
        while queue and lane.emptied < lane.filled:
            fence()
            if lane.nbytes != queue[0].nbytes:
                raise self.wrong_size(lane.nbytes, peer, queue[0].nbytes)
            piece = queue[0].next_piece(self._slot_bytes)
            numpy.copyto(piece, lane.slots[lane.emptied % self.SLOTS][: piece.size])
            lane.empty()
            moved = True
            if queue[0].done:
                queue.popleft()
        return moved


class _Lane:
    """The slots from one rank to another, and two counters: slots filled (the sender's), slots emptied.

    On the cache line of the sender's counter there is a word for each slot: the length in bytes of the whole message
    that the slot has a piece of.
    """

    def __init__(self, words: memoryview, slots: Any, pair: int) -> None:
        self.slots = [slots[index] for index in range(len(slots))]
        self._words = words
        self._filled = pair * 2 * _LINE_WORDS
        self._emptied = self._filled + _LINE_WORDS

    @property
    def filled(self) -> int:
        return self._words[self._filled]

    @property
    def emptied(self) -> int:
        return self._words[self._emptied]

    @property
    def nbytes(self) -> int:
        """The length of the message in the slot that is to be emptied next."""
        return self._words[self._filled + 1 + self.emptied % len(self.slots)]

    def fill(self, nbytes: int) -> None:
        self._words[self._filled + 1 + self.filled % len(self.slots)] = nbytes
        fence()
        self._words[self._filled] += 1

    def empty(self) -> None:
        fence()
        self._words[self._emptied] += 1


class _Message:
    """The bytes of one array, on their way; an empty one still takes a slot, so that it arrives in its turn."""

    __slots__ = ("nbytes", "_raw", "_offset", "done")

    def __init__(self, raw: Any) -> None:
        self.nbytes = raw.size
        self._raw = raw
        self._offset = 0
        self.done = False

    def next_piece(self, most: int) -> Any:
        piece = self._raw[self._offset : self._offset + most]
        self._offset += piece.size
        self.done = self._offset >= self.nbytes
        return piece
