"""Memory that the ranks of one node share: `map_together` makes it, `SharedSegments` says what lies where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from mpidist.errors import TransportError
from mpidist.runtime.board import fence
from mpidist.runtime.control import Watch
from mpidist.runtime.shared_memory import LINE_BYTES, LINE_WORDS, SharedFile, check_room, map_file

#: ``exchange(payload)`` gives every rank of a group what each of them gave; collective.
Exchange = Callable[[bytes], list[bytes]]

_PAGE_BYTES = 4096


def map_together(nbytes: int, rank: int, exchange: Exchange, own: tuple[int, int] | None = None) -> Any:
    """Map one zeroed piece of memory into all ranks of a node.

    Collective: every rank of the node calls it in the same order.  Rank 0 of the node's group makes the file;
    `exchange` is a small all-gather over the group.  `own`, a start and a number of bytes, is the part that this rank
    touches first: it then lies on the NUMA node of this rank.  The parts of all ranks cover the memory; by default rank
    0 touches all of it.  TransportError, on all ranks, says which of them cannot get at the memory, and why.
    """
    start, length = own or ((0, nbytes) if rank == 0 else (0, 0))
    file, memory, path, problem = None, None, "", ""
    try:
        if rank == 0:
            check_room(nbytes)
            file = SharedFile(nbytes, reserved=0)
            file.reserve(start, length)
            memory, path = file.map(), file.path
    except OSError as error:
        problem = f"{nbytes} bytes of shared memory cannot be had: {error}"
    path = exchange(path.encode())[0].decode()
    try:
        if rank and path:
            memory = map_file(path, start, length)
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

    The two segments are used in turn by even and odd calls.  A rank writes into its segment of
    call k + 2 when all ranks have posted call k + 1 on the status board.  By then nobody reads the segment of call k.
    Places and flags are for longer calls: `PlaceAllReduce`, `ShareAllReduce`, `DirectSum` and `Outbox` say how they use
    places, and those and `SharedSum` count turns by the flags.  On several nodes all of it is for `TwoLevel`.  Boxes
    are for messages between two ranks, see `Box`.

    Parameters
    ----------
    memory : writable buffer of `nbytes` (size, segment_bytes, place_bytes) bytes, zeroed
        The ranks' parts, one after the other: whole pages, which one rank touches first.
    segment_bytes, place_bytes : int
        Multiples of 64.

    Attributes
    ----------
    segments : tuple of two arrays, shape (size, segment_bytes), uint8
        ``segments[call & 1][rank]``.
    places : tuple of `PLACES` arrays, shape (size, place_bytes), uint8
        ``places[index][rank]``.
    boxes : array, shape (size, bytes), uint8
        By rank: what it has for messages to single ranks, as long as a segment or longer.
    filled_words, reduced_words : tuple of int
        By rank: where in `flags` the last turn stands that the rank has filled, or reduced.
    taken_words : tuple of int
        By rank: where in `flags` the last wave stands that the rank has taken.
    verdict_words : tuple of int
        Where in `flags` local rank 0 writes the header of other nodes: the number of a call, and two words.
    turn, wave : int
        The numbers of turns and of waves made so far; the same on all ranks between calls.
    """

    PLACES = 4

    def __init__(self, memory: Any, size: int, segment_bytes: int, place_bytes: int) -> None:
        self.segment_bytes, self.place_bytes = segment_bytes, place_bytes
        self.turn = self.wave = 0
        nbytes, part_bytes = self.nbytes(size, segment_bytes, place_bytes), self.part_bytes(segment_bytes, place_bytes)
        self.flags = memoryview(memory)[:nbytes].cast("Q")
        self.filled_words = tuple(rank * part_bytes // 8 for rank in range(size))
        self.reduced_words = tuple(word + LINE_WORDS for word in self.filled_words)
        self.taken_words = tuple(word + 1 for word in self.reduced_words)
        self.verdict_words = (1, 2, 3)  # behind the first word of local rank 0
        parts = numpy.frombuffer(memory, dtype=numpy.uint8)[:nbytes].reshape(size, part_bytes)
        middle = 2 * LINE_BYTES + 2 * segment_bytes
        self.segments = _cut(parts[:, 2 * LINE_BYTES : middle], segment_bytes)
        last = middle + self.PLACES * place_bytes
        self.places = _cut(parts[:, middle:last], place_bytes)
        self.boxes = parts[:, last:]

    @classmethod
    def part_bytes(cls, segment_bytes: int, place_bytes: int) -> int:
        """Return how much of the memory is one rank's."""
        nbytes = 2 * LINE_BYTES + 3 * segment_bytes + cls.PLACES * place_bytes
        return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES

    @classmethod
    def nbytes(cls, size: int, segment_bytes: int, place_bytes: int) -> int:
        """Return how much memory all this takes."""
        return size * cls.part_bytes(segment_bytes, place_bytes)

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

    def say_taken(self, rank: int, wave: int) -> None:
        """Say that `rank` has copied out all of `wave`."""
        fence()
        self.flags[self.taken_words[rank]] = wave


def _cut(parts: Any, nbytes: int) -> tuple[Any, ...]:
    """Return the columns of `parts`, each `nbytes` wide."""
    return tuple(parts[:, start : start + nbytes] for start in range(0, parts.shape[1], nbytes))
