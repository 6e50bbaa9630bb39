"""Ring: every rank speaks to its two neighbours only, and moves the fewest bytes that an all-reduce can.

The buffer has one chunk a rank.  A partial sum of chunk c starts at rank c + 1, goes once round the ring and is
complete at rank c; the finished chunks then go round once more.  All repetitions differ by a shift of the chunk
numbers, so each of the two phases is a single `Round`.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpidist.schedules.rounds import Index, Round


def chunks(size: int) -> int:
    """One chunk a rank."""
    return size


def pass_sums(rank: Index, size: int) -> Iterator[Round]:
    """Pass partial sums on; rank r ends with the sum of chunk r."""
    return _once_round(rank, size, first=rank - 1, reduce=True)


def pass_copies(rank: Index, size: int) -> Iterator[Round]:
    """Pass finished chunks on, starting with one's own."""
    return _once_round(rank, size, first=rank, reduce=False)


def _once_round(rank: Index, size: int, first: Index, reduce: bool) -> Iterator[Round]:
    if size > 1:
        yield Round(
            send_to=(rank + 1) % size,
            send_chunk=first % size,
            send_count=1,
            receive_from=(rank - 1) % size,
            receive_chunk=(first - 1) % size,
            receive_count=1,
            reduce=reduce,
            repeat=size - 1,
            shift=-1,
        )
