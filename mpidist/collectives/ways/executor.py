"""The executor: binds a schedule to a buffer once, and replays it with real bytes.

Nomenclature.  The buffer is cut into *chunks*; a *message* carries the chunks that a rank sends in one round.  Messages
that are reduced are cut further into *segments*, so that a segment is reduced while the next one arrives, and is still
in cache when it is.  Both sides cut alike, by the size of the message alone.  A *turn* is what a rank does for a
segment: post its receive and send, and, when later ones have been posted too, wait for them and reduce it.

Received segments go to pieces of scratch in turn, one more than segments are posted *ahead*; where a message replaces
what is there, it is received in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from mpidist import arrays
from mpidist.errors import UnsupportedDtypeError
from mpidist.runtime.control import Watch
from mpidist.schedules.rounds import NOBODY, Round, Schedule, unrolled
from mpidist.transports.base import Transport

#: Size of a segment in bytes.  Two segments of scratch and the parts of the buffer they meet should stay in cache, and
#: each segment costs the wait for one message: rings of 16 MB were slower with a half or the double of this.
SEGMENT_BYTES = 1 << 19

#: The same between nodes, where several are under way.  MPI libraries send such a message at once; before a long one
#: they ask the receiver, whose answer comes behind all that is on its way.  Over TCP, at 0.1 Gbit/s, messages of 16 or
#: 32 KiB took 95 % of the link and such of 120 KiB 91 %; at 10 Gbit/s those of 32 KiB were quicker than those of 128.
#: Steps of ResNet-18 with sums that begin early took 3.96 s with 32 or 64 KiB at 0.1 Gbit/s and 0.73 s at 1; with 128
#: KiB to 8 MiB 4.1 to 4.7 s and 0.84 to 0.96 s.
MESSAGE_BYTES = 1 << 15

#: First and one past the last element of a span of the buffer.
Span = tuple[int, int]


class Turn(NamedTuple):
    """What a rank posts for one segment, in elements of the buffer; None where there is nothing.

    `reduce`: the received segment is reduced into the buffer; else it has replaced what was there.  `last`: this is the
    round's last segment, so nothing of the next round may be posted before it is done.
    """

    send_to: int
    send: Span | None
    receive_from: int
    receive: Span | None
    reduce: bool
    last: bool


def even_bounds(length: int, chunks: int) -> tuple[int, ...]:
    """Return where the chunks of `length` elements begin, and where the last one ends."""
    return tuple(index * length // chunks for index in range(chunks + 1))


@lru_cache(maxsize=256)
def turns_of(
    schedule: Schedule, rank: int, size: int, bounds: tuple[int, ...], segment_elements: int, root: int = 0
) -> tuple[Turn, ...]:
    """Return all that `rank` does in `schedule`, in order (Local)."""
    rounds = unrolled(schedule.rounds_of(rank, size, root), schedule.chunks(size))
    return tuple(turn for round_ in rounds for turn in _turns_of_round(round_, bounds, segment_elements))


def _turns_of_round(round_: Round, bounds: tuple[int, ...], segment_elements: int) -> Iterator[Turn]:
    segment = segment_elements if round_.reduce else 0
    send_to, receive_from = int(round_.send_to), int(round_.receive_from)
    sent = _span(bounds, send_to, round_.send_chunk, round_.send_count)
    received = _span(bounds, receive_from, round_.receive_chunk, round_.receive_count)
    sends, receives = _segments(sent, segment), _segments(received, segment)
    apart = min(sent[1], received[1]) <= max(sent[0], received[0])
    assert apart or sent == received, (
        f"a message that is sent ({sent}) and one that is received ({received}) must be the same part of the buffer "
        "or have nothing in common: segments of the one are reduced while those of the other are under way"
    )
    count = max(len(sends), len(receives))
    for index in range(count):
        send = sends[index] if index < len(sends) else None
        receive = receives[index] if index < len(receives) else None
        yield Turn(send_to, send, receive_from, receive, round_.reduce, last=index == count - 1)


def _span(bounds: tuple[int, ...], peer: int, chunk: Any, count: Any) -> Span:
    return (0, 0) if peer == NOBODY else (bounds[int(chunk)], bounds[int(chunk) + int(count)])


def _segments(span: Span, segment: int) -> list[Span]:
    """Cut a message into segments of nearly equal length, none longer than `segment` (0: do not cut)."""
    start, stop = span
    if start == stop:
        return []
    pieces = -(-(stop - start) // segment) if segment else 1
    cuts = [start + offset for offset in even_bounds(stop - start, pieces)]
    return list(zip(cuts[:-1], cuts[1:], strict=True))


class Executor:
    """A schedule bound to a buffer, to be run any number of times.

    Parameters
    ----------
    schedule : Schedule
    transport : Transport
        Over the ranks of the collective.
    buffer : array, contiguous, in the dtype that goes over the wire
        Worked on in place, in memory order.  The executor keeps it, unless it is told to `release` it.
    op : str
        ``"sum"``, ``"min"``, ``"max"`` or ``"prod"``, for collectives that reduce.
    root : int
        For rooted collectives.
    bounds : sequence of int, optional
        Where the chunks begin, in elements, and where the last one ends; equal on all ranks.  By default the chunks
        are as equal as can be.
    segment_bytes : int
        The longest segment of a message that is reduced; equal on all ranks.
    scratch : array of bytes, optional
        Memory to receive segments into, in place of the executor's own; nobody else may use it during a run.
        ``1 + ahead`` segments are enough.
    ahead : int
        How many segments are posted before the present one is waited for, besides it: 1 keeps a link busy while a rank
        waits, more while it does something else.

    Raises
    ------
    UnsupportedDtypeError
        The transport does not move this kind of memory, or the dtype cannot be reduced by `op`; 16-bit floats never
        are: convert them to `arrays.wire_dtype` first.
    ValueError
        The buffer is not contiguous, or the bounds do not fit it.
    """

    def __init__(
        self,
        schedule: Schedule,
        transport: Transport,
        buffer: Any,
        op: str = "sum",
        root: int = 0,
        bounds: Sequence[int] | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        scratch: Any = None,
        ahead: int = 1,
    ) -> None:
        self.schedule = schedule
        arrays.check_memory(buffer, transport.memory, transport.name)
        reducing = schedule.collective in ("all_reduce", "reduce_scatter", "reduce")
        if reducing:
            _check_wire_dtype(buffer.dtype, op)
        flat = arrays.flat_view(buffer)
        chunks = schedule.chunks(transport.size)
        exact = even_bounds(flat.size, chunks) if bounds is None else _checked(bounds, chunks, flat.size)
        segment_elements = max(1, segment_bytes // flat.itemsize)
        turns = turns_of(schedule, transport.rank, transport.size, exact, segment_elements, root)
        self._transport = transport
        pieces = _ReceiveMemory(turns, flat, scratch, ahead)
        reduce = arrays.reduction(op, arrays.namespace(flat)) if reducing else None
        self._ahead = ahead
        self._plan = list(_planned(turns, reduce, transport.rank, pieces, ahead))
        self._steps = list(_on(flat, self._plan))

    def release(self) -> None:
        """Keep the buffer no more: from now on each run is given one.  Local."""
        self._steps = []

    def run(self, watch: Watch, buffer: Any = None) -> None:
        """Play the schedule on the buffer as it is now.

        Collective: every rank of the transport calls it in the same order.

        Parameters
        ----------
        watch : Watch
        buffer : array, shape (n,), contiguous, optional
            In place of the executor's own: another one of its length, dtype and kind.

        Raises
        ------
        TransportTimeoutError, RankFailedError
            As `Transport.wait`; the buffer's content is then undefined.
        """
        wait = self._transport.wait
        for pendings in self._run(self._steps if buffer is None else _on(buffer, self._plan), deque()):
            wait(pendings, watch)

    def start(self) -> Progress:
        """Begin to play the schedule on the buffer as it is now, and return what carries on.

        Every rank of the transport starts it in the same order.
        """
        posted: deque[list[Any]] = deque()
        return Progress(self._run(self._steps, posted), self._transport, posted)

    def _run(self, steps: Iterable[tuple[Any, ...]], posted: deque[list[Any]]) -> Iterator[list[Any]]:
        """Post message after message, and yield what must be done before the next one."""
        receive, send, ahead = self._transport.receive, self._transport.send, self._ahead
        for received, sent, reduce, first, second, out in steps:
            coming = []
            if received is not None:
                coming.append(receive(*received))
            if sent is not None:
                coming.append(send(*sent))
            if coming:
                posted.append(coming)
            if len(posted) > ahead or not coming:
                yield posted[0]
                posted.popleft()
            if reduce is not None:
                reduce(first, second, out=out)


class Progress:
    """A run of an executor that moves on when it is polled, and never waits."""

    __slots__ = ("done", "_waits", "_transport", "_posted", "_pendings")

    def __init__(self, waits: Iterator[list[Any]], transport: Transport, posted: deque[list[Any]]) -> None:
        self._waits, self._transport, self._posted = waits, transport, posted
        self._pendings = next(waits, [])
        self.done = not self._pendings

    def poll(self) -> bool:
        """Do what can be done now, and return whether that was all.  Errors as of `Transport.poll`."""
        while not self.done and self._transport.poll(self._pendings):
            self._pendings = next(self._waits, [])
            self.done = not self._pendings
        return self.done

    def abandon(self) -> None:
        """Give up after an error: what messages may still write into is kept."""
        for pendings in self._posted:
            self._transport.abandon(pendings)


def _check_wire_dtype(dtype: Any, op: str) -> None:
    arrays.check_reducible(dtype, op)
    if arrays.wire_dtype(dtype) != dtype:
        raise UnsupportedDtypeError(
            f"{dtype} values are not reduced as such, since every step would round; convert the buffer to "
            f"{arrays.wire_dtype(dtype)}, reduce, and round once at the end"
        )


def _checked(bounds: Sequence[int], chunks: int, length: int) -> tuple[int, ...]:
    exact = tuple(int(bound) for bound in bounds)
    if len(exact) != chunks + 1 or exact[0] != 0 or exact[-1] != length or list(exact) != sorted(exact):
        raise ValueError(
            f"expected {chunks + 1} ascending bounds from 0 to {length} (one a chunk, and the end), got {list(exact)}"
        )
    return exact


class _Action(NamedTuple):
    """What `Executor.run` does between two waits: post, wait for what the step before has posted, reduce that.

    Attributes
    ----------
    received : (where, rank) or None
        Into which piece of memory, or into which span of the buffer.
    reduced : (piece, span, is_below) or None
        What was received before, what it is reduced with, and whether it comes from a rank below this one.
    """

    received: tuple[Any, int] | None
    sent: tuple[slice, int] | None
    reduced: tuple[Any, slice, bool] | None
    reduce: Any


def _planned(turns: Sequence[Turn], reduce: Any, rank: int, scratch: _ReceiveMemory, ahead: int) -> Iterator[_Action]:
    """Yield what is done in `turns`, whatever the buffer.

    A turn's segment is posted in one action, and waited for `ahead` actions later.  That one also posts a later segment
    of the round, unless there is none: then it posts nothing, because the next round sends what this one still has to
    receive.
    """
    waiting: deque[tuple[Any, slice, bool] | None] = deque()
    for turn in turns:
        received = reduced = None
        if turn.receive is not None:
            own = slice(*turn.receive)
            received = (scratch.next(turn.receive) if turn.reduce else own, turn.receive_from)
            reduced = (received[0], own, turn.receive_from < rank) if turn.reduce else None
        sent = None if turn.send is None else (slice(*turn.send), turn.send_to)
        waiting.append(reduced)
        yield _Action(received, sent, waiting.popleft() if len(waiting) > ahead else None, reduce)
        while turn.last and waiting:
            yield _Action(None, None, waiting.popleft(), reduce)


def _on(flat: Any, plan: Sequence[_Action]) -> Iterator[tuple[Any, ...]]:
    """Yield what is received, sent and reduced on a buffer: the first two with ranks, then function and operands.

    The lower rank's operand comes first: two ranks that exchange partial results then do the very same operation, which
    matters where operands can be told apart though they are equal, as in the minimum of 0.0 and -0.0.
    """
    for received, sent, reduced, reduce in plan:
        if received is not None and type(received[0]) is slice:
            received = flat[received[0]], received[1]
        if sent is not None:
            sent = flat[sent[0]], sent[1]
        if reduced is None:
            yield received, sent, None, None, None, None
            continue
        piece, span, is_below = reduced
        own = flat[span]
        yield (received, sent, reduce, piece, own, own) if is_below else (received, sent, reduce, own, piece, own)


class _ReceiveMemory:
    """Pieces of memory for received segments, used in turn, as long as the longest of them."""

    def __init__(self, turns: Sequence[Turn], flat: Any, memory: Any, ahead: int) -> None:
        longest = count = of_round = 0
        for turn in turns:
            if turn.reduce and turn.receive is not None:
                of_round += 1
                longest, count = max(longest, turn.receive[1] - turn.receive[0]), max(count, min(of_round, 1 + ahead))
            if turn.last:
                of_round = 0
        if memory is None:
            self._pieces = [arrays.empty(longest, flat.dtype, flat) for _ in range(count)]
        else:
            values = memory[: memory.size - memory.size % flat.itemsize].view(flat.dtype)
            assert values.size >= count * longest, (
                f"scratch of {memory.size} bytes for {count} x {longest} {flat.dtype}"
            )
            self._pieces = [values[index * longest : (index + 1) * longest] for index in range(count)]
        self._used = 0

    def next(self, receive: Span) -> Any:
        """Return the piece that is not being received into, at the length of the segment."""
        self._used += 1
        return self._pieces[self._used % len(self._pieces)][: receive[1] - receive[0]]
