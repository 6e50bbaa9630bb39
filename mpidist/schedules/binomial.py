"""Binomial tree: in every round, each rank that is done helps one more; for one root, in as few rounds as can be.

Ranks are counted from the root on.  In the round of distance d, the multiples of 2 d and the ranks d behind them are
the two ends of a message: parent to child in a broadcast, child to parent in a reduce.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpidist.schedules.power_of_two import distances
from mpidist.schedules.rounds import NOBODY, Index, Round, choose, whole


def chunks(size: int) -> int:
    """One: the buffer is never cut."""
    return 1


def from_root(rank: Index, size: int, root: int = 0) -> Iterator[Round]:
    """Give the root's buffer to all, from the farthest distance to the nearest."""
    for distance in reversed(distances(size)):
        child, parent = _ends(rank, size, root, distance)
        yield whole(child, parent, reduce=False)


def to_root(rank: Index, size: int, root: int = 0) -> Iterator[Round]:
    """Bring the sum to the root, from the nearest distance to the farthest; other ranks keep partial sums."""
    for distance in distances(size):
        child, parent = _ends(rank, size, root, distance)
        yield whole(parent, child, reduce=True)


def _ends(rank: Index, size: int, root: int, distance: int) -> tuple[Index, Index]:
    """Return this rank's child and parent in the round of `distance`, either of them `NOBODY`."""
    place = (rank - root) % size
    has_child = (place % (2 * distance) == 0) & (place + distance < size)
    has_parent = place % (2 * distance) == distance
    child = choose(has_child, (rank + distance) % size, NOBODY)
    parent = choose(has_parent, (rank - distance) % size, NOBODY)
    return child, parent
