"""Rabenseifner: the ring's few bytes in recursive doubling's few rounds.

Partners split the range of chunks they still share: each sends the half it gives up and reduces the half it keeps,
until every rank holds one finished chunk; then the same steps backwards, copying.  Distances double while ranges halve,
so the largest messages go to the nearest ranks, which are most often on the same node.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpidist.schedules.power_of_two import cores, distances, folded
from mpidist.schedules.rounds import Index, Round


def chunks(size: int) -> int:
    """One chunk a core, that is a rank that stays when the others are folded in."""
    return cores(size)


def rounds(rank: Index, size: int) -> Iterator[Round]:
    """Halve the range while reducing, then double it again while copying."""
    return folded(_halve_and_double, chunks(size), rank, size)


def _halve_and_double(rank: Index, size: int) -> Iterator[Round]:
    start = 0 * rank
    for distance in distances(size):
        half = size // (2 * distance)
        upper = rank // distance % 2
        kept, given = start + upper * half, start + (1 - upper) * half
        yield _swap(rank ^ distance, given, kept, half, reduce=True)
        start = kept
    for distance in reversed(distances(size)):
        half = size // (2 * distance)
        upper = rank // distance % 2
        held, missing = start, start + (1 - 2 * upper) * half
        yield _swap(rank ^ distance, held, missing, half, reduce=False)
        start = start - upper * half


def _swap(partner: Index, send_chunk: Index, receive_chunk: Index, count: int, reduce: bool) -> Round:
    return Round(partner, send_chunk, count, partner, receive_chunk, count, reduce)
