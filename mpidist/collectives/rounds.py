"""The vocabulary of collective algorithms: rounds, and the schedules that yield them.

A collective works on a buffer cut into *chunks*.  An algorithm is a generator of `Round` objects and nothing else;
the executor sends real bytes by it, the checker proves it, the cost model prices it, the simulator plays it.

All fields of a round that depend on the rank are either Python ints (the generator was called with one rank) or
integer arrays with one entry a rank (it was called with ``numpy.arange(size)``).  The arithmetic is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

#: A rank or chunk number: an int, or an integer array over all ranks.
Index = Any

#: In place of a rank: this rank sends (or receives) nothing in this round.
NOBODY = -1


@dataclass(frozen=True, slots=True)
class Round:
    """One message out and one message in, for each rank.

    In repetition ``j`` of ``repeat``, the rank sends the ``count`` chunks from ``(send_chunk + j * shift) % chunks`` on
    to `send_to`, and receives as many as that rank sends, from ``(receive_chunk + j * shift) % chunks`` on, from
    `receive_from`; received chunks are reduced into the buffer if `reduce`, else replace what is there.  Chunk ranges
    never wrap around the end.  Sending reads the buffer as it was before the round.

    Attributes
    ----------
    send_to, receive_from : int or array
        A rank, or `NOBODY`.
    send_chunk, send_count : int or array
    receive_chunk, receive_count : int or array
    reduce : bool
    repeat : int
        How many times the round is played, each time with the chunk numbers moved on by `shift`.
    shift : int
    """

    send_to: Index
    send_chunk: Index
    send_count: Index
    receive_from: Index
    receive_chunk: Index
    receive_count: Index
    reduce: bool
    repeat: int = 1
    shift: int = 0


@dataclass(frozen=True)
class Schedule:
    """A collective algorithm as data.

    Attributes
    ----------
    name : str
        The algorithm: ``"ring"``, ``"recursive_doubling"``, ...
    collective : str
        What it computes: ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"``, ``"broadcast"`` or ``"reduce"``.
        After a reduce-scatter rank r holds chunk r; before an all-gather it does.
    chunks : callable
        ``chunks(size)``: into how many chunks the buffer is cut.
    rounds : callable
        ``rounds(rank, size)`` or, for rooted collectives, ``rounds(rank, size, root)``: the generator.
    """

    name: str
    collective: str
    chunks: Callable[[int], int]
    rounds: Callable[..., Iterator[Round]]
