"""`Failures`: the error that a waiting rank must raise because of another rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.errors import MpidistError, RankFailedError, RemoteReplicaError, TransportTimeoutError
from mpidist.runtime import board as states

if TYPE_CHECKING:
    from mpidist.runtime.control import ControlChannel, Watch

#: The states of a rank that raised.
ENDED = (states.FAILED, states.EXPIRED)


class Failures:
    """The failures, deaths and departures of other ranks, as far as one rank knows."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        #: Why ranks of other boards are gone, as their transport has found out.
        self.lost: dict[int, str] = {}

    # -- what happened ------------------------------------------------------------------------------------------------

    def state_of(self, rank: int) -> tuple[int, str]:
        """Return the state of a rank on any board, and the error of one that has failed, as far as this one knows."""
        board, arbiter = self._control.board, self._control.arbiter
        if rank in self._control.board_ranks:
            index = self._control.board_ranks.index(rank)
            state = board.state(index)
            return state, board.text(index) if state in ENDED else ""
        if arbiter is not None and rank in arbiter.failed_texts:
            return states.FAILED, arbiter.failed_texts[rank]
        return states.LEFT if arbiter is not None and rank in arbiter.left_ranks else states.UNKNOWN, ""

    def dead(self) -> list[int]:
        """Return the ranks of the board whose processes are gone without having said that they leave."""
        board, silent = self._control.board, (states.UNKNOWN, states.RUNNING)
        return [
            rank
            for index, rank in enumerate(self._control.board_ranks)
            if board.state(index) in silent and not board.quiet[index] and not board.alive(index)
        ]

    def first(self, watch: Watch) -> MpidistError | None:
        """Return the error that a rank waiting in `watch` must raise because of another rank, if any.

        A deadline comes first: all ranks raise it alike, and the late rank may have left by now.  A rank that left or
        was killed comes before ranks that failed, perhaps because of it.
        """
        control, board = self._control, self._control.board
        others = [(index, rank) for index, rank in enumerate(control.board_ranks) if rank != control.rank]
        seen = [(index, rank, board.state(index)) for index, rank in others]
        for index, rank, state in seen:
            if state == states.EXPIRED:
                return control.error(TransportTimeoutError, f"{control.name(rank)} gave up: {board.text(index)}")
        for index, rank, state in seen:
            if state == states.LEFT and board.call(index) < watch.call:
                return self.left(rank, board.call(index), watch)
            # Between nodes a rank joins a call that it missed at its next one; who leaves makes none.
            if (
                state == states.LEFT
                and control.arbiter is not None
                and (remote := control.missed.error_of(rank, watch))
            ):
                return remote
        dead = self.killed(watch)
        if dead is not None:
            return dead
        # A rank that has come to a later call has done its part of this one: whoever is to blame is met there.
        failed = [
            (rank, board.text(index))
            for index, rank, state in seen
            if state == states.FAILED and not 0 < watch.call < board.call(index)
        ]
        if failed:
            # Who only failed because another did says so in its last line.
            return self.failed(*min(failed, key=lambda pair: is_consequence(pair[1])), watch)
        return control.arbiter.failure(watch) if control.arbiter is not None else None

    def vital(self, watch: Watch) -> MpidistError | None:
        """Return the error that names a vital rank that has failed or was killed, None if there is none."""
        control, board = self._control, self._control.board
        for rank in sorted(control.vital_ranks - {control.rank}):
            if rank in control.board_ranks:
                index = control.board_ranks.index(rank)
                state = board.state(index)
                if state in ENDED:
                    return self.failed(rank, board.text(index), watch)
                if state != states.LEFT and not board.alive(index):
                    return self.died(rank, watch)
            elif rank in self.lost and not self._has_left(rank):
                return self._gone(rank, f"died in {watch.what}: {self.lost[rank]}")
            elif control.arbiter is not None and rank in control.arbiter.failed_texts:
                return self.failed(rank, control.arbiter.failed_texts[rank], watch)
        return None

    def _has_left(self, rank: int) -> bool:
        """Whether a rank of another board has said that it leaves; its notice may come after its end."""
        arbiter = self._control.arbiter
        if arbiter is None:
            return False
        arbiter.poll()
        return rank in arbiter.left_ranks

    def killed(self, watch: Watch) -> MpidistError | None:
        """Return the error that names a rank of the board whose process is gone, if there is one."""
        return next((self.died(rank, watch) for rank in self.dead()), None)

    # -- how it is said -----------------------------------------------------------------------------------------------

    def died(self, rank: int, watch: Watch) -> MpidistError:
        """Return the error that names a rank of the board whose process is gone, or about to be."""
        control = self._control
        text = f"its process {control.board.pids[control.board_ranks.index(rank)]} is gone (killed, or out of memory)"
        return self._gone(rank, f"died in {watch.what}: {text}")

    def _gone(self, rank: int, how: str) -> MpidistError:
        """Return the error that names a dead rank, with the cure where that rank had a duty."""
        control, name = self._control, self._control.name(rank)
        if rank not in control.duties:
            return control.error(RankFailedError, f"{name} {how}", rank)
        title, remedy = control.duties[rank]
        return control.error(RankFailedError, f"{title} ({name}) {how}. {remedy}", rank)

    def failed(self, rank: int, text: str, watch: Watch) -> MpidistError:
        """Return the error of a rank that waits for one that has failed with the traceback `text`."""
        remote = self._control.missed.error_of(rank, watch)
        if remote is not None:
            return remote
        what = f"{self._control.name(rank)} failed while this rank was in {watch.what}: {last_line(text)}"
        return self._control.error(RankFailedError, what, rank)

    def left(self, rank: int, call: int, watch: Watch) -> MpidistError:
        """Return the error of a rank that waits for one that has left after `call` calls."""
        text = (
            f"{self._control.name(rank)} left (its program ended, or called sys.exit) after {call} collective calls, "
            f"while this rank is in call {watch.call}, {watch.what}; every rank must make the same calls"
        )
        return self._control.error(RankFailedError, text, rank)


def last_line(text: str) -> str:
    """Return the last line of a traceback: the error itself."""
    return text.strip().rpartition("\n")[2]


def is_consequence(text: str) -> bool:
    """Return whether this traceback is the consequence of another rank's failure."""
    return any(kind.__name__ in last_line(text) for kind in (RankFailedError, RemoteReplicaError))
