"""All-reduce inside a node in which every rank reads the other ranks' tensors where they lie.

Every rank owns a share of each segment of the buffer.  It

1. says where its tensors and results begin in its memory (before the call is begun, whose check all ranks wait for);
2. reads the values of its share from all others, segment by segment, adds them up in rank order while they are in
   cache, and says so when it has all shares;
3. reads the other shares where they were added up, once all have said so, and waits until all have read theirs.

Nothing is copied into shared memory first.  Between cores that do not share a cache that is the quicker way: memory
which two such cores write and read in turn is fetched from the other's cache line by line.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from mpidist.arrays import reduction
from mpidist.collectives.bucket_reduction import BucketReduction
from mpidist.collectives.pieces import Pieces, Transform, owned
from mpidist.collectives.scratch import Scratch
from mpidist.errors import TransportError
from mpidist.runtime.control import Watch
from mpidist.transports.remote_memory import MOST_PIECES, RemoteMemory, address_of
from mpidist.transports.shared import SharedSegments

#: How many bytes are read at a time when results are gathered: a rank that waits looks around every millisecond.
_READ_BYTES = 1 << 22

#: How many bytes of values, of all ranks together, are read before they are added: a call of the kernel costs as much
#: as some ten thousand bytes do, but what was read should still be in cache.
_FETCH_BYTES = 1 << 21


class RemoteSum(BucketReduction):
    """The all-reduce of tensors of `dtype` over the ranks of a node.

    Parameters
    ----------
    memory : RemoteMemory
    segments : SharedSegments
    rank : int
    sources, targets : Pieces
    dtype : numpy.dtype
        Of sources and targets.
    op : str
        ``"sum"``, ``"min"``, ``"max"`` or ``"prod"``.
    scale : float, optional
        What reduced values are multiplied by.
    segment_bytes : int
        Size of a segment.
    scratch : Scratch
    first : int
        Where in a rank's table of addresses those of this bucket begin.
    """

    def __init__(
        self,
        memory: RemoteMemory,
        segments: SharedSegments,
        rank: int,
        sources: Pieces,
        targets: Pieces,
        dtype: Any,
        op: str,
        scale: float | None,
        segment_bytes: int,
        scratch: Scratch,
        first: int = 0,
    ) -> None:
        step, size = max(1, segment_bytes // dtype.itemsize), len(segments.filled_words)
        self.owned = owned(sources.elements, step, rank, size)
        self._memory = memory
        self._segments = segments
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._sources = sources
        self._targets = targets
        self._combine = reduction(op, numpy)
        self._scale = scale
        self._mine = _Rows(sources, [stretch for stretch in self.owned if stretch[0] < stretch[1]], dtype.itemsize)
        self._fetches = _fetches(self._mine, _FETCH_BYTES // size // dtype.itemsize)
        longest = max((fetch.elements for fetch in self._fetches), default=0)
        self._read = scratch.array((size, longest), dtype)
        self._rows = {other: self._mine.empty() for other in self._others}
        self._into = numpy.empty((1, 2), dtype=numpy.uint64)
        shares = {other: owned(sources.elements, step, other, size) for other in self._others}
        self._theirs = {other: _Rows(targets, shares[other], dtype.itemsize, _READ_BYTES) for other in self._others}
        self._ends = {other: (rows.empty(), rows.empty()) for other, rows in self._theirs.items()}
        count = len(sources.offsets) - 1
        self._tables = [
            [table.view(numpy.uint64)[first : first + self.entries(sources, targets)] for table in tables]
            for tables in segments.segments
        ]
        self._cut = count
        self._turn_of_call = 0

    @staticmethod
    def entries(sources: Pieces, targets: Pieces) -> int:
        """Return how many addresses it puts into a rank's table."""
        return len(sources.offsets) + len(targets.offsets) - 2

    def prepare(self, call: int, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        """Say where this rank's tensors and results are."""
        self._turn_of_call = call & 1
        table = self._tables[call & 1][self._rank]
        table[: self._cut] = [address_of(array) for array in sources]
        table[self._cut :] = [address_of(array) for array in targets]

    def run(
        self, watch: Watch, sources: Sequence[Any], targets: Sequence[Any], transform: Transform | None = None
    ) -> None:
        """Reduce the tensors."""
        segments, tables = self._segments, self._tables[self._turn_of_call]
        turn = segments.turn = segments.turn + 1
        self._reduce(watch, tables, sources, targets, transform)
        segments.say_filled(self._rank, turn)
        segments.wait(segments.filled_words, turn, watch)
        mine = tables[self._rank][self._cut :]
        for other in self._others:
            self._gather(watch, other, mine, tables[other][self._cut :])
        segments.say_reduced(self._rank, turn)
        segments.wait(segments.reduced_words, turn, watch)

    def _reduce(
        self,
        watch: Watch,
        tables: Sequence[Any],
        sources: Sequence[Any],
        targets: Sequence[Any],
        transform: Transform | None,
    ) -> None:
        rows = self._rows
        for other in self._others:
            self._mine.at(tables[other], rows[other])
        self._into[0, 0] = address_of(self._read)
        flat = targets[0].reshape(-1) if len(targets) == 1 and transform is None else None
        if self._rank > 1 and flat is not None and numpy.may_share_memory(flat, sources[0]):
            flat = None  # in place, the sum of the ranks before this one would take the place of its own values
        for fetch in self._fetches:
            for other in self._others:
                self._fetch(watch, other, rows[other][fetch.first : fetch.last], fetch.elements)
            done = 0
            for start, stop in fetch.stretches:
                read = self._read[:, done : done + stop - start]
                # Values are added where they were read: the less memory is in use, the more of it stays in cache.
                total = read[self._others[0]] if flat is None else flat[start:stop]
                self._add_up(start, stop, sources, read, total)
                if transform is not None:
                    transform(start, total)
                elif flat is None:
                    self._targets.scatter(start, total, targets)
                done += stop - start

    def _fetch(self, watch: Watch, other: int, rows: Any, elements: int) -> None:
        """Read another rank's values of some stretches into their row of scratch."""
        row = self._read[other, :elements]
        for first in range(0, len(rows), MOST_PIECES):
            some = rows[first : first + MOST_PIECES]
            self._into[0] = address_of(row), int(some[:, 1].sum())
            self._copy(watch, other, self._into, some)
            row = row[int(self._into[0, 1]) // row.itemsize :]

    def _add_up(self, start: int, stop: int, sources: Sequence[Any], read: Any, total: Any) -> None:
        """Reduce all ranks' values of a stretch, in rank order."""
        combine, rank, done = self._combine, self._rank, 0
        for piece in self._sources.within(start, stop):
            end = done + piece.stop - piece.start
            mine, out = piece.of(sources).reshape(-1), total[done:end]
            result = mine if rank == 0 else read[0, done:end]
            for other in range(1, len(read)):
                combine(result, mine if other == rank else read[other, done:end], out=out)
                result = out
            done = end
        if self._scale is not None:
            numpy.multiply(total, self._scale, out=total)

    def _gather(self, watch: Watch, other: int, mine: Any, theirs: Any) -> None:
        """Read the results of another rank's shares straight to where they belong."""
        rows, (into, source) = self._theirs[other], self._ends[other]
        rows.at(mine, into)
        rows.at(theirs, source)
        for first, last in rows.batches:
            self._copy(watch, other, into[first:last], source[first:last])

    def _copy(self, watch: Watch, other: int, into: Any, source: Any) -> None:
        try:
            self._memory.read(other, into, source)
        except OSError as error:
            watch.look()  # which knows whether a rank has failed or is gone, and raises if so
            control = watch.control
            peer = control.board_ranks[other]
            if error.errno == errno.ESRCH:  # of a process that is ending, the memory goes first
                raise control.breaks(control.died(peer, watch)) from error
            raise TransportError(
                f"{control.own_name}: the memory of {control.name(peer)} "
                f"cannot be read any more: {error}; set MPIDIST_ALGORITHM=shared_memory to do without"
            ) from error


class _Fetch(NamedTuple):
    """Stretches whose values are read at a time.

    Attributes
    ----------
    first, last : int
        Their rows.
    elements : int
    stretches : list of (start, stop)
    """

    first: int
    last: int
    elements: int
    stretches: list[tuple[int, int]]


def _fetches(rows: _Rows, most: int) -> list[_Fetch]:
    """Return the stretches of `rows` in batches of at most so many elements, unless one alone has more."""
    found: list[_Fetch] = []
    for (start, stop), (first, last) in zip(rows.stretches, rows.cuts, strict=True):
        if found and found[-1].elements + stop - start <= most:
            before = found.pop()
            first, elements, stretches = before.first, before.elements, before.stretches
        else:
            elements, stretches = 0, []
        found.append(_Fetch(first, last, elements + stop - start, [*stretches, (start, stop)]))
    return found


class _Rows:
    """Pieces of memory that make up some stretches of a buffer, before it is known where its tensors are.

    Parameters
    ----------
    pieces : Pieces
    stretches : list of (start, stop)
    itemsize : int
    batch_bytes : int, optional
        How many bytes a batch has at most, unless one piece has more.

    Attributes
    ----------
    stretches : list of (start, stop)
    cuts : list of (first, last)
        The rows of each stretch.
    batches : list of (first, last)
        All rows, cut into batches.
    """

    def __init__(
        self, pieces: Pieces, stretches: Sequence[tuple[int, int]], itemsize: int, batch_bytes: int = 1 << 62
    ) -> None:
        found = [pieces.within(start, stop) for start, stop in stretches]
        flat = [piece for each in found for piece in each]
        self.stretches = list(stretches)
        ends = numpy.cumsum([len(each) for each in found], dtype=int).tolist()
        self.cuts = list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []
        self._members = numpy.array([piece.member for piece in flat], dtype=numpy.intp)
        self._starts = numpy.array([piece.start * itemsize for piece in flat], dtype=numpy.uint64)
        lengths = [(piece.stop - piece.start) * itemsize for piece in flat]
        self._lengths = numpy.array(lengths, dtype=numpy.uint64)
        self.batches = _batches(lengths, batch_bytes)

    def empty(self) -> Any:
        """Return an array (address, length) of all pieces, whose addresses are still to come."""
        return numpy.stack([numpy.zeros_like(self._lengths), self._lengths], axis=1)

    def at(self, addresses: Any, rows: Any) -> None:
        """Set the addresses in `rows`, for tensors at `addresses`."""
        numpy.add(addresses[self._members], self._starts, out=rows[:, 0])


def _batches(lengths: Sequence[int], batch_bytes: int) -> list[tuple[int, int]]:
    found, first, nbytes = [], 0, 0
    for row, length in enumerate(lengths):
        if row > first and (nbytes + length > batch_bytes or row - first == MOST_PIECES):
            found.append((first, row))
            first, nbytes = row, 0
        nbytes += length
    return [*found, (first, len(lengths))] if lengths else []
