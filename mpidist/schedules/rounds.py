"""The vocabulary of collective algorithms: rounds, and the schedules that yield them.

A collective works on a buffer cut into *chunks*.  An algorithm is a generator of `Round` objects and nothing else;
the executor sends real bytes by it, the checker proves it, the cost model prices it, the simulator plays it.

All fields of a round that depend on the rank are either Python ints (the generator was called with one rank) or
integer arrays with one entry a rank (it was called with ``numpy.arange(size)``).  The arithmetic is the same.
All ranks yield the same number of rounds, of the same kind: a rank with nothing to do in a round yields an idle one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

#: A rank or chunk number: an int, or an integer array over all ranks.
Index = Any

#: What a schedule may compute.
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")

#: In place of a rank: this rank sends (or receives) nothing in this round.
NOBODY = -1


@dataclass(frozen=True, slots=True)
class Round:
    """One message out and one message in, for each rank.

    In repetition ``j`` of ``repeat``, the rank sends the ``count`` chunks from ``(send_chunk + j * shift) % chunks`` on
    to `send_to`, and receives as many as that rank sends, from ``(receive_chunk + j * shift) % chunks`` on, from
    `receive_from`; received chunks are reduced into the buffer if `reduce`, else replace what is there.  Chunk ranges
    never wrap around the end.  Sending reads the buffer as it was before the round.  What a rank sends and what it
    receives have no chunk in common; only when reducing they may also be the very same chunks.  `unrolled` does the
    arithmetic of the repetitions.

    Attributes
    ----------
    send_to, receive_from : int or array
        A rank, or `NOBODY`; chunk and count next to `NOBODY` mean nothing.
    send_chunk, send_count : int or array
    receive_chunk, receive_count : int or array
    reduce : bool
    repeat : int
        How many times the round is played, each time with the chunk numbers moved on by `shift`.
    shift : int
    cycle : int
        Chunk numbers move round inside their block of `cycle` chunks instead of round all of them; 0 means all.
        A level of a hierarchy works on such a block.
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
    cycle: int = 0


@dataclass(frozen=True)
class Schedule:
    """A collective algorithm as data.

    Attributes
    ----------
    name : str
        The algorithm: ``"ring"``, ``"recursive_doubling"``, ...
    collective : str
        What it computes, one of `COLLECTIVES`.
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

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise ValueError(f"{self.collective!r} is not a collective; known ones: {', '.join(COLLECTIVES)}")

    @property
    def rooted(self) -> bool:
        """Whether one rank, the root, differs from the others."""
        return self.collective in ("broadcast", "reduce")

    def rounds_of(self, rank: Index, size: int, root: int = 0) -> Iterator[Round]:
        """Return the rounds of `rank`, or of an array of ranks; `root` counts in rooted collectives only."""
        return self.rounds(rank, size, root) if self.rooted else self.rounds(rank, size)


def unrolled(rounds: Iterable[Round], chunks: int) -> Iterator[Round]:
    """Yield every repetition of every round as a round of its own, on a grid of `chunks` chunks."""
    for round_ in rounds:
        if round_.repeat == 1:
            yield round_
        else:
            for repetition in range(round_.repeat):
                yield _repetition(round_, repetition, chunks)


def _repetition(round_: Round, repetition: int, chunks: int) -> Round:
    cycle = round_.cycle or chunks

    def moved(chunk: Index) -> Index:
        return chunk - chunk % cycle + (chunk + repetition * round_.shift) % cycle

    return Round(  # not `replace`, which takes as long as all that is done with the round
        round_.send_to,
        moved(round_.send_chunk),
        round_.send_count,
        round_.receive_from,
        moved(round_.receive_chunk),
        round_.receive_count,
        round_.reduce,
        cycle=round_.cycle,
    )


def in_turn(*parts: Callable[..., Iterator[Round]]) -> Callable[[Index, int], Iterator[Round]]:
    """Return the generator of the rounds of several generators, one after the other."""

    def rounds(rank: Index, size: int) -> Iterator[Round]:
        for part in parts:
            yield from part(rank, size)

    return rounds


def choose(condition: Any, then: Index, otherwise: Index) -> Index:
    """Return `then` where `condition` holds, else `otherwise`; ints give an int, arrays an array."""
    return otherwise + (then - otherwise) * condition


def whole(send_to: Index, receive_from: Index, reduce: bool, chunks: int = 1) -> Round:
    """Return a round of messages with all chunks of the buffer."""
    return Round(send_to, 0, chunks, receive_from, 0, chunks, reduce)


def relabelled(
    round_: Round,
    *,
    rank_of: Callable[[Index], Index],
    takes_part: Index = True,
    first_chunk: Index = 0,
    scale: int = 1,
    chunks: int = 0,
) -> Round:
    """Return a round of a small group as a round of a larger one, on a finer grid of chunks.

    `rank_of` turns a rank of the group into one of the larger group; `takes_part` is False for ranks that belong to no
    group, which are idle.  The group's chunk 0 begins at `first_chunk` of the finer grid, of which `scale` make up one
    of its `chunks`; their number is needed for repeated rounds.
    """

    def peer(rank: Index) -> Index:
        return choose((rank != NOBODY) & takes_part, rank_of(rank), NOBODY)

    return Round(
        send_to=peer(round_.send_to),
        send_chunk=first_chunk + round_.send_chunk * scale,
        send_count=round_.send_count * scale,
        receive_from=peer(round_.receive_from),
        receive_chunk=first_chunk + round_.receive_chunk * scale,
        receive_count=round_.receive_count * scale,
        reduce=round_.reduce,
        repeat=round_.repeat,
        shift=round_.shift * scale,
        cycle=(round_.cycle or chunks) * scale,
    )
