"""Calls that a rank does not make because the function given to `Strategy.run` raised there.

Ranks know where they are by counting calls.  When the function raises on one rank only, the others go on to the next
collective, call k, and wait there.  The rank that raised posts call k as *missed*, with the text of its error.
It does not wait.  If its program catches the error, its next collective is call k + 1.  The others see the mark in call
k, before any data has moved, and raise `RemoteReplicaError`.  So all ranks are in step again, a run that succeeds pays
nothing, and nobody votes.

A rank may be no more than one call ahead of the others, since the board keeps two.  So a rank that
missed a call waits until all have come to it before it posts the next one.  Until then further errors queue up.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mpidist.errors import RemoteReplicaError
from mpidist.runtime.watch import Watch

if TYPE_CHECKING:
    from mpidist.runtime.control import ControlChannel

#: The digest of a missed call; no description has it.
MISSED = 0

#: The folder of mpidist: users want the innermost line outside of it.
_PACKAGE = str(Path(__file__).parents[1])

#: How a rank takes part in the comparison of digests between nodes, for a call that it misses.
Join = Callable[[Watch], object]


class MissedCalls:
    """The missed calls of one rank, and the missed calls of others that it has heard of.

    `pending`: there is something to be done before this rank's next call.  `last` is the number of the last call that
    any rank missed, as far as this one has met it: what belongs to the step of an earlier call is void.
    """

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self._queue: deque[tuple[str, Join]] = deque()
        self._open: Join | None = None  # of the missed call that this rank posted last, until it knows all have come
        self._heard: dict[tuple[int, int], str] = {}
        self.pending = False
        self.last = 0

    # -- those of this rank -------------------------------------------------------------------------------------------

    def miss(self, text: str, join: Join) -> None:
        """Say, with the text of an error, that this rank makes no call of the next number.  Local.

        `join` compares digests between nodes, on behalf of the missed call.
        """
        self._queue.append((text, join))
        self.pending = True
        turnstile = self._control.turnstile
        if turnstile.try_acquire():  # not so in a thread that was turned away: the next call posts it
            try:
                # another thread may have passed before this one, and posted it
                if self._queue and (self._open is None or (self._control.arbiter is None and self._all_have_come())):
                    self._post()
            finally:
                turnstile.release()

    def settle(self) -> None:
        """Wait until all ranks have come to every call that this one misses."""
        self.pending = False  # first: another thread may miss a call meanwhile
        while self._open is not None or self._queue:
            if self._open is not None:
                self._close(self._open)
            if self._queue:
                self._post()

    def _close(self, join: Join) -> None:
        """Wait until all ranks have come to the call that this rank posted last."""
        control = self._control
        what = "the function given to `run` raised on this rank; its next collective"
        watch = Watch(control, what, None, control.call)
        if control.arbiter is not None:
            join(watch)
        else:
            while not self._all_have_come():
                watch.tick()
        self._open = None

    def _post(self) -> None:
        control = self._control
        text, self._open = self._queue.popleft()
        control.call += 1
        self.last = control.call
        control.board.write_note(control.board_index, control.call, text)
        control.board.post(control.board_index, control.call, MISSED)
        if control.arbiter is not None:
            control.arbiter.tell("missed", call=control.call, text=text)

    def _all_have_come(self) -> bool:
        board, call = self._control.board, self._control.call
        return all(board.call(index) >= call for index in range(board.size))

    # -- those of others ----------------------------------------------------------------------------------------------

    def hear(self, rank: int, call: int, text: str) -> None:
        """Take in that a rank of another node misses a call."""
        self._heard = {key: value for key, value in self._heard.items() if key[1] >= self._control.call}
        self._heard[rank, call] = text

    def text(self, rank: int, call: int) -> str | None:
        """Return the error for which `rank` misses `call`; None when it does not, as far as this rank knows."""
        control = self._control
        if rank not in control.board_ranks:
            return self._heard.get((rank, call))
        index, board = control.board_ranks.index(rank), control.board
        if not call or board.call(index) < call or board.digest(index, call) != MISSED:
            return None
        return board.note(index, call)

    def error(self, watch: Watch) -> RemoteReplicaError | None:
        """Return the error of a rank in whose call another one is known to be missing."""
        control = self._control
        ranks = sorted({*control.board_ranks, *(rank for rank, _ in self._heard)} - {control.rank})
        return next((found for rank in ranks if (found := self.error_of(rank, watch)) is not None), None)

    def error_of(self, rank: int, watch: Watch) -> RemoteReplicaError | None:
        """Return the error of a rank that waits in `watch` for `rank`, if that one misses the call."""
        text = self.text(rank, watch.call)
        if text is None:
            return None
        control = self._control
        self.last = max(self.last, watch.call)
        message = f"the function given to `run` raised on {control.name(rank)}, while this rank was in {watch.what}"
        return RemoteReplicaError(f"{control.own_name}: {message}: {text}", control.world_ranks[rank], text, watch.call)

    def await_error(self, watch: Watch) -> RemoteReplicaError:
        """Return the error about a call that some rank is known to miss, once its notice has come."""
        while True:
            if self._control.arbiter is not None:
                self._control.arbiter.poll()
            if (error := self.error(watch)) is not None:
                return error
            watch.tick()


def summary(error: BaseException) -> str:
    """Return the type and text of an error, and the innermost line of the user's program that it came through."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    lines = [line for line in traceback.extract_tb(error.__traceback__) if not line.filename.startswith(_PACKAGE)]
    return f"{text} ({Path(lines[-1].filename).name}, line {lines[-1].lineno}, in {lines[-1].name})" if lines else text
