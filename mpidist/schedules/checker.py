"""The checker: plays a schedule with symbols in place of numbers, and so proves it for every buffer.

What a rank holds in a chunk is a *term*: a rank's own contribution (a leaf), or the sum of two terms (an unordered
pair, as addition commutes but does not associate).  Equal terms have the same number in one table, so two ranks whose
terms are equal have added the same values in the same tree: they hold the same bits, whatever the rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from mpidist.errors import MpidistError
from mpidist.schedules.rounds import NOBODY, Round, Schedule, unrolled


class ScheduleError(MpidistError):
    """A schedule does not compute what it promises; the message names the round, the ranks and the chunk."""


@dataclass(frozen=True)
class Proof:
    """What is known of a schedule after `check`."""

    rounds: int  # how many rounds there are, repetitions counted
    chunks_sent: tuple[int, ...]  # by rank: how many chunks it sends in all
    # whether all ranks have added each sum in the same tree, without which AUTO must not choose the algorithm
    same_bits: bool


def check(schedule: Schedule, size: int, root: int = 0) -> Proof:
    """Prove that `schedule` does what its collective promises on `size` ranks (Local).

    Raises
    ------
    ScheduleError
        Messages do not match, a chunk is used before it is there, a contribution is added twice or missing at the end.
    """
    return _Play(schedule, size, root).prove()


class _Terms:
    """All sums that occur, each once: leaves are numbered like the ranks, sums follow."""

    def __init__(self, size: int) -> None:
        #: By term: the ranks whose contributions are in it, as bits.
        self.contributors = [1 << rank for rank in range(size)]
        self._sums: dict[tuple[int, int], int] = {}

    def sum(self, first: int, second: int) -> int:
        pair = (first, second) if first < second else (second, first)
        if pair not in self._sums:
            self._sums[pair] = len(self.contributors)
            self.contributors.append(self.contributors[first] | self.contributors[second])
        return self._sums[pair]

    def shared(self, first: int, second: int) -> list[int]:
        """Return the ranks that contribute to both terms."""
        return _ranks_in(self.contributors[first] & self.contributors[second])


class _Play:
    """All ranks playing one schedule in step."""

    def __init__(self, schedule: Schedule, size: int, root: int) -> None:
        self.schedule, self.size, self.root = schedule, size, root
        self.chunks = schedule.chunks(size)
        self.terms = _Terms(size)
        #: By rank and chunk: the term held there, or None where there is nothing of use yet.
        self.held = [[self._at_first(rank, chunk) for chunk in range(self.chunks)] for rank in range(size)]
        self.chunks_sent = [0] * size
        #: Of the round being played, counted from 1.
        self.round_number = 0

    def prove(self) -> Proof:
        if self.schedule.collective in ("reduce_scatter", "all_gather") and self.chunks != self.size:
            raise self._error(f"{self.chunks} chunks, expected one a rank")
        for rounds in self._in_step():
            self.round_number += 1
            for rank, round_ in enumerate(rounds):
                self._check_ends(rank, round_)
            for rank in range(self.size):
                self._check_match(rank, rounds)
            self._play(rounds)
        self._check_promise()
        return Proof(self.round_number, tuple(self.chunks_sent), self._same_bits())

    def _in_step(self) -> Iterator[Sequence[Round]]:
        of_rank = [
            unrolled(self.schedule.rounds_of(rank, self.size, self.root), self.chunks) for rank in range(self.size)
        ]
        for rounds in zip_longest(*of_rank):
            if None in rounds:
                raise self._error(f"rank {rounds.index(None)} stops here, other ranks go on")
            yield rounds

    def _at_first(self, rank: int, chunk: int) -> int | None:
        there = {"all_gather": rank == chunk, "broadcast": rank == self.root}.get(self.schedule.collective, True)
        return rank if there else None

    # -- messages --------------------------------------------------------------------------------------------------

    def _check_ends(self, rank: int, round_: Round) -> None:
        """Check one rank's side alone: peers exist, ranges lie inside the buffer and do not collide."""
        sent = self._range(rank, "sends", round_.send_to, round_.send_chunk, round_.send_count)
        received = self._range(rank, "receives", round_.receive_from, round_.receive_chunk, round_.receive_count)
        both = range(max(sent.start, received.start), min(sent.stop, received.stop))
        if both and not round_.reduce:
            raise self._error(f"rank {rank} receives chunk {both.start} over the one that it sends")
        if both and sent != received:
            raise self._error(f"rank {rank} reduces into chunk {both.start} and sends it, but not just the same chunks")

    def _range(self, rank: int, verb: str, peer: int, chunk: int, count: int) -> range:
        if peer == NOBODY:
            return range(0)
        if peer == rank or not 0 <= peer < self.size:
            raise self._error(f"rank {rank} {verb} chunk {chunk}, but rank {peer} is no other rank of {self.size}")
        if chunk < 0 or count < 0 or chunk + count > self.chunks:
            raise self._error(f"rank {rank} {verb} {_span(chunk, count)}, but there are {self.chunks} chunks")
        return range(chunk, chunk + count)

    def _check_match(self, rank: int, rounds: Sequence[Round]) -> None:
        """Check that who is sent to receives just that, and who receives is sent something."""
        mine = rounds[rank]
        if mine.receive_from != NOBODY and rounds[mine.receive_from].send_to != rank:
            raise self._error(f"rank {rank} receives from rank {mine.receive_from}, which does not send to it")
        if mine.send_to == NOBODY:
            return
        theirs = rounds[mine.send_to]
        if theirs.receive_from != rank:
            raise self._error(f"rank {rank} sends to rank {mine.send_to}, which does not receive from it")
        sent, received = (mine.send_chunk, mine.send_count), (theirs.receive_chunk, theirs.receive_count)
        if sent != received:
            raise self._error(
                f"rank {rank} sends {_span(*sent)} to rank {mine.send_to}, which receives {_span(*received)}"
            )
        if mine.reduce != theirs.reduce:
            raise self._error(f"rank {rank} and rank {mine.send_to} differ in whether {_span(*sent)} is reduced")

    # -- what they do ----------------------------------------------------------------------------------------------

    def _play(self, rounds: Sequence[Round]) -> None:
        """Take all messages from the buffers as they are before the round, then apply them."""
        messages = [(rank, round_, self._message(rank, round_)) for rank, round_ in enumerate(rounds)]
        for sender, round_, message in messages:
            if round_.send_to != NOBODY:
                self._apply(sender, round_, message)

    def _message(self, rank: int, round_: Round) -> list[int]:
        if round_.send_to == NOBODY:
            return []
        end = round_.send_chunk + round_.send_count
        self.chunks_sent[rank] += round_.send_count
        return [self._held(rank, "sends", chunk) for chunk in range(round_.send_chunk, end)]

    def _apply(self, sender: int, round_: Round, message: list[int]) -> None:
        receiver = round_.send_to
        for chunk, term in enumerate(message, round_.send_chunk):
            if round_.reduce:
                term = self._sum(sender, receiver, chunk, term)
            self.held[receiver][chunk] = term

    def _sum(self, sender: int, receiver: int, chunk: int, term: int) -> int:
        own = self._held(receiver, "reduces into", chunk)
        if twice := self.terms.shared(own, term):
            raise self._error(
                f"rank {receiver} reduces chunk {chunk} from rank {sender}, "
                f"which adds the contribution of {_ranks(twice)} a second time"
            )
        return self.terms.sum(own, term)

    def _held(self, rank: int, verb: str, chunk: int) -> int:
        term = self.held[rank][chunk]
        if term is None:
            raise self._error(f"rank {rank} {verb} chunk {chunk}, which it does not have yet")
        return term

    # -- what comes out --------------------------------------------------------------------------------------------

    def _promised(self, rank: int, chunk: int) -> int | None:
        """Return the contributors that `rank` must hold in `chunk` at the end, None where anything may be."""
        everybody = (1 << self.size) - 1
        promises = {
            "all_reduce": everybody,
            "reduce_scatter": everybody if rank == chunk else None,
            "all_gather": 1 << chunk,
            "broadcast": 1 << self.root,
            "reduce": everybody if rank == self.root else None,
        }
        return promises[self.schedule.collective]

    def _check_promise(self) -> None:
        for rank, held in enumerate(self.held):
            for chunk, term in enumerate(held):
                promised = self._promised(rank, chunk)
                got = 0 if term is None else self.terms.contributors[term]
                if promised is not None and got != promised:
                    raise self._error(
                        f"it was the last, and rank {rank} has chunk {chunk} with contributions of "
                        f"{_ranks(_ranks_in(got))}, expected {_ranks(_ranks_in(promised))}"
                    )

    def _same_bits(self) -> bool:
        for chunk in range(self.chunks):
            final = {self.held[rank][chunk] for rank in range(self.size) if self._promised(rank, chunk) is not None}
            if len(final) > 1:
                return False
        return True

    def _error(self, what: str) -> ScheduleError:
        name = f"{self.schedule.name} {self.schedule.collective} on {self.size} ranks"
        return ScheduleError(f"{name}, round {self.round_number}: {what}")


def _ranks_in(contributors: int) -> list[int]:
    return [rank for rank in range(contributors.bit_length()) if contributors >> rank & 1]


def _ranks(ranks: list[int]) -> str:
    if not ranks:
        return "no rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _span(chunk: int, count: int) -> str:
    return f"chunk {chunk}" if count == 1 else f"{count} chunks from {chunk} on"
