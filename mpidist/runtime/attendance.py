"""`Attendance`: which ranks have come to a call, and which of them wait in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpidist.errors import listed

if TYPE_CHECKING:
    from mpidist.runtime.control import ControlChannel


#: A rank that waits says so often.  One that has come and is silent for so many seconds does not wait.
_SILENT_SECONDS = 2.0


class Attendance:
    """Who has come to a call, as far as one rank knows."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control

    def missing(self, call: int) -> list[int]:
        """Return the ranks that have not come to `call`."""
        control = self._control
        here = [rank for index, rank in enumerate(control.board_ranks) if control.board.call(index) < call]
        return sorted(here + (control.arbiter.missing(call) if control.arbiter is not None else []))

    def silent(self, call: int, waited: float) -> list[int]:
        """Return the ranks that have come to `call` but do not wait in it; this rank has waited so many seconds."""
        if not call:
            return []
        control, least = self._control, min(_SILENT_SECONDS, waited / 2)
        found = [rank for rank, seconds in self.silences() if seconds > least and rank != control.rank]
        return sorted(found + (control.arbiter.silent(least) if control.arbiter is not None else []))

    def silences(self) -> list[tuple[int, float]]:
        """Return each rank of the board, and for how many seconds it has not said that it waits."""
        control = self._control
        return [(rank, control.board.silent_seconds(index)) for index, rank in enumerate(control.board_ranks)]

    def awaited(self, call: int, waited: float) -> str:
        """Return for whom a rank waits that has waited so many seconds in `call`, for messages."""
        if missing := self.missing(call):
            return self._control.names(missing) + self._of_nodes(missing)
        if silent := self.silent(call, waited):
            names = self._control.names(silent)
            return f"{names}, which came to this call and does not move on in it (stopped, swapped out, in a debugger)"
        return "a message (all ranks have come, and wait)"

    def _of_nodes(self, missing: Sequence[int]) -> str:
        """Return which nodes of several ranks have no other rank than these, for messages: such a node may be lost."""
        hosts = Counter(self._control.hosts)
        gone = Counter(self._control.hosts[rank] for rank in missing if rank < len(self._control.hosts))
        nodes = [host for host, count in gone.items() if count == hosts[host] > 1]
        down = "that node" if len(nodes) == 1 else "these nodes"
        return f", all ranks of {listed(nodes)}: {down} may be down" if nodes else ""

    def deadline_text(self, what: str, call: int, waited: float) -> str:
        """Return the text of a deadline that has passed: who is missing, and what to do."""
        return (
            f"{what} (call {call}) waited {waited:.1f} s for {self.awaited(call, waited)}. "
            "Every rank must make the same calls in the same order; look at what those ranks do instead "
            "(py-spy dump), or give more time with timeout_seconds or MPIDIST_TIMEOUT_SECONDS"
        )
