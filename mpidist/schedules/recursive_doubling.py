"""Recursive doubling: ranks at distance 1, 2, 4, ... exchange everything they have; the fewest rounds, the most bytes.

Both partners add the same two partial sums, so after round k each aligned group of 2**k ranks holds the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpidist.schedules.power_of_two import distances, folded
from mpidist.schedules.rounds import Index, Round, whole


def chunks(size: int) -> int:
    """One: the buffer is never cut."""
    return 1


def rounds(rank: Index, size: int) -> Iterator[Round]:
    """Exchange and add whole buffers, at doubling distances."""
    return folded(_exchange, chunks(size), rank, size)


def _exchange(rank: Index, size: int) -> Iterator[Round]:
    for distance in distances(size):
        partner = rank ^ distance
        yield whole(partner, partner, reduce=True)
