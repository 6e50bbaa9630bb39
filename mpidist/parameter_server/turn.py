"""`Turn`: whose turn it is to change a server's variables, the server's or that of a client on its node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mpidist.parameter_server.ledger import Ledger
from mpidist.runtime.control import ControlChannel
from mpidist.runtime.node_lock import NodeLock
from mpidist.transports.lines import Patience

T = TypeVar("T")

#: How often the lock is tried before others are let run: a turn with little to do is over by then.
_TRIES = 40


class Turn:
    """The right to change a server's variables, seen from the server, or from one of its clients.  All Local.

    It ends with the process that has it, so that the death of one never stops the others.
    """

    def __init__(self, path: str, words: Any, patience: Patience, control: ControlChannel) -> None:
        self._lock = NodeLock(path, words, Ledger.HELD, 1 + control.rank)
        self._words = words
        self._patience, self._what = patience, patience.what
        self._control = control
        #: End the turn; nothing if there is none.
        self.leave = self._lock.give_back

    def enter(self) -> None:
        """Wait for the turn; errors as for `Line.wait`."""
        take = self._lock.take
        for _ in range(_TRIES):
            if take():
                return
        self._patience.reset()
        while not take():
            self.wait()

    def taken(self) -> bool:
        """Try to have the turn; return whether it is this process's now."""
        take = self._lock.take
        for _ in range(_TRIES):
            if take():
                self._patience.reset()
                return True
        return False

    def wait(self) -> bool:
        """Let others run, since the turn is another's; return whether it looked around.  Errors as for `enter`."""
        looked = self._patience.tick()
        if looked:  # messages say who is waited for
            holder = self._words[Ledger.HELD]
            named = f", where {self._control.name(holder - 1)} has its turn" if holder else ""
            self._patience.what = f"{self._what}{named}"
        return looked

    def during(self, act: Callable[..., T], *arguments: Any) -> T:
        """Return what `act` returns, called in a turn; errors as for `enter`."""
        try:
            self.enter()
            result = act(*arguments)
            self.leave()
        except BaseException:  # Ctrl-C may come anywhere, in `enter` and `leave`, too
            self.leave()
            raise
        return result

    def close(self) -> None:
        """Take no more turns."""
        self._lock.close()
