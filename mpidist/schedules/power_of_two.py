"""Folding: how an algorithm for powers of two serves any number of ranks.

Of `size` ranks, the first 2 * extra form neighbouring pairs, where extra = size - (the largest power of two in it).
The odd one of each pair hands its buffer to the even one, waits, and is handed the result.  The ranks that stay, the
*cores*, are a power of two.  Pairs are neighbours because neighbours are most often on one node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpidist.schedules.rounds import NOBODY, Index, Round, choose, relabelled, whole


def cores(size: int) -> int:
    """Return the largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)


def distances(size: int) -> list[int]:
    """Return 1, 2, 4, ... below `size`."""
    return [1 << bit for bit in range((size - 1).bit_length())]


def folded(inner: Callable[[Index, int], Iterator[Round]], chunks: int, rank: Index, size: int) -> Iterator[Round]:
    """Yield the rounds of an all-reduce for any `size` from those of `inner`, which knows powers of two only."""
    extra = size - cores(size)
    paired, even = rank < 2 * extra, rank % 2 == 0
    first, second = paired & even, paired & (rank % 2 == 1)
    core = choose(paired, rank // 2, rank - extra)
    if extra:
        yield _hand_over(rank, gives=second, takes=first, chunks=chunks, reduce=True)
    for round_ in inner(core, cores(size)):
        yield relabelled(
            round_,
            rank_of=lambda core: choose(core < extra, 2 * core, core + extra),
            takes_part=even | (rank >= 2 * extra),
        )
    if extra:
        yield _hand_over(rank, gives=first, takes=second, chunks=chunks, reduce=False)


def _hand_over(rank: Index, gives: Index, takes: Index, chunks: int, reduce: bool) -> Round:
    other = rank ^ 1
    return whole(choose(gives, other, NOBODY), choose(takes, other, NOBODY), reduce, chunks)
