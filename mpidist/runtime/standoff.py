"""Standoffs: ranks that wait for each other in different worlds, and would do so for ever.

Rank 0 waits in one world for rank 1, which waits in another world for rank 0: they use the worlds in different orders.
No board shows both waits, and the circle may be longer.  It is found by the labels of Mitchell and Merritt ("A
distributed algorithm for deadlock detection and resolution", 1984).  A rank that begins to wait takes a new label,
greater than its own last one and that of the rank it waits for, and shows it on the boards of all its worlds.  While it
waits, it takes over the label of the rank it waits for when that is greater.  So the greatest label of a circle goes
round it, and who meets its own label again is in a circle: each rank of it has waited since the label came by, because
the rank that it waits for has.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpidist.errors import MpidistError, TransportError

if TYPE_CHECKING:
    from mpidist.runtime.control import ControlChannel, Watch

#: Bits of a label that are the number of the process which made it; those above count.
_NUMBER_BITS = 22

#: How the threads of mpidist are called: they make no collective calls.
_OWN_THREADS = "mpidist-"


class Standoffs:
    """The label of one process, and its look for standoffs.

    `number`, by default the process number, tells this process from all others on its boards.  ``is_blocked_fn()``
    tells whether a process whose rank waits makes no other call meanwhile; by default, whether it has no threads
    besides those of mpidist.
    """

    def __init__(self, number: int | None = None, is_blocked_fn: Callable[[], bool] | None = None) -> None:
        self._number = os.getpid() if number is None else number
        self._is_blocked_fn = _has_one_thread if is_blocked_fn is None else is_blocked_fn
        self._channels: list[ControlChannel] = []
        self._wait: tuple[ControlChannel, int, int] | None = None
        self._own = self._shown = 0

    def add(self, control: ControlChannel) -> None:
        """Take in one more world of this process.  Local."""
        self._channels.append(control)
        self._show(self._shown)

    def remove(self, control: ControlChannel) -> None:
        """Forget a world that is closed.  Local."""
        self._channels = [each for each in self._channels if each is not control]
        self._wait = None

    def error(self, control: ControlChannel, watch: Watch) -> MpidistError | None:
        """Return the error of a rank that waits in a standoff, if it has found one; to be asked again and again."""
        if len(self._channels) < 2 or not watch.call or not self._is_blocked_fn():
            return None
        board = control.board
        index = next((each for each in range(board.size) if board.call(each) < watch.call), None)
        if index is None:
            return None
        label, wait = board.labels[index], (control, watch.call, index)
        if wait != self._wait:
            self._wait = wait
            self._own = ((max(label, self._shown) >> _NUMBER_BITS) + 1 << _NUMBER_BITS) | self._number
            self._show(self._own)
        elif label > self._shown:
            self._show(label)
        elif label == self._own == self._shown:
            return self._found(control, watch, index)
        return None

    def _show(self, label: int) -> None:
        self._shown = label
        for control in self._channels:
            control.board.labels[control.board_index] = label

    def _found(self, control: ControlChannel, watch: Watch, index: int) -> MpidistError:
        name = control.name(control.board_ranks[index])
        places = [_place(other, control, index) for other in self._channels if other is not control]
        where = next((f", {place}," for place in places if place), "")
        return control.error(
            TransportError,
            f"{watch.what} (call {watch.call}) waits for {name}, which waits in another world{where} for a rank that "
            "waits for this one: none of them can go on. Use worlds that have ranks in common in the same order on all "
            "of these ranks",
        )


def _place(other: ControlChannel, control: ControlChannel, index: int) -> str:
    """Return where a rank of `control` waits in another world of this process, for messages; empty if it does not."""
    pid = control.board.pids[index]
    for there in range(other.board.size):
        call = other.board.waiting[there]
        if other.board.pids[there] == pid and call and other.board.call(other.board_index) < call:
            return f"in call {call} of the world in which this rank is {other.own_name}"
    return ""


def _has_one_thread() -> bool:
    """Return whether this thread alone can make calls: another one might make the call that others wait for."""
    own = threading.current_thread()
    return all(thread is own or thread.name.startswith(_OWN_THREADS) for thread in threading.enumerate())
