"""Two processes that store and load in shared memory as fast as they can: do they see each other's stores in order?

``python -m tests.helpers.memory_order`` counts what goes wrong with the fences and without them. x86-64 keeps the
order of stores and of loads by itself, and what Python does between a store and the next load gives the store time to
be seen: no count without fences is above 0 there. On ARM it is.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Callable
from typing import Any

import numpy

from mpidist.runtime import board

#: Words between two that are to lie in different lines of a cache.
_LINE = 32
_WORDS = 64

Fence = Callable[[], None]


def _in_two_processes(rounds: int, act: Callable[[int, memoryview, memoryview], None]) -> tuple[Any, Any]:
    """Call ``act(who, words, seen)`` in two processes at once, and return what each has put into its `seen`."""
    memory = mmap.mmap(-1, 8 * (_LINE * _WORDS + 2 * rounds))
    words = memoryview(memory).cast("Q")
    shared, seen = words[: _LINE * _WORDS], words[_LINE * _WORDS :]
    parts = [seen[:rounds], seen[rounds:]]
    started = [_LINE * (_WORDS - 1), _LINE * (_WORDS - 2)]

    def run(who: int) -> None:
        shared[started[who]] = 1
        while not shared[started[1 - who]]:
            pass
        act(who, shared, parts[who])

    child = os.fork()
    if child == 0:
        try:
            run(1)
        finally:
            os._exit(0)
    run(0)
    os.waitpid(child, 0)
    return tuple(numpy.frombuffer(part, numpy.uint64).astype(numpy.int64) for part in parts)  # type: ignore


def stale_data(rounds: int, fence: Fence) -> int:
    """Return how often a reader saw a flag before the data that had been stored ahead of it.

    One process stores data, and then a flag; the other loads the flag, and then the data.
    """
    flag, data = 0, _LINE

    def act(who: int, words: memoryview, seen: memoryview) -> None:
        for number in range(1, rounds):
            if who == 0:
                words[data] = number
                fence()
                words[flag] = number
            else:
                flagged = words[flag]
                fence()
                seen[number] = 1 + (words[data] < flagged)

    _, seen = _in_two_processes(rounds, act)
    assert (seen[1:] > 0).all()  # the reader came through
    return int((seen == 2).sum())


def both_overlooked(rounds: int, fence: Fence) -> int:
    """Return how often each of two processes stored a word and then missed the other's store, which came before.

    Process 0 stores i and sees ``a[i]``, process 1 stores j and sees ``b[j]``.  The later of the two stores sees the
    earlier one, so that ``a[i] < j`` and ``b[j] < i`` never hold together.
    """

    def act(who: int, words: memoryview, seen: memoryview) -> None:
        own, other = _LINE * who, _LINE * (1 - who)
        for number in range(1, rounds):
            words[own] = number
            fence()
            seen[number] = words[other]

    first, second = _in_two_processes(rounds, act)
    missed = first[1:] + 1  # the first store that this one did not see
    known = missed < rounds
    return int((second[missed[known]] < numpy.arange(1, rounds)[known]).sum())


def _nothing() -> None:
    """No fence."""


def main() -> None:
    """Print what goes wrong in 300 000 rounds, by test and fence."""
    print(platform.machine())
    for test, fence in ((stale_data, board.fence), (both_overlooked, board.full_fence)):
        print(f"{test.__name__}: {test(300_000, fence)} with the fence, {test(300_000, _nothing)} without")


if __name__ == "__main__":
    main()
