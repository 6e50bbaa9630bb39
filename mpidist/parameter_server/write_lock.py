"""`WriteLock`: the right to change a server's variables, of the server or of a client on its node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mpidist.parameter_server.ledger import Ledger
from mpidist.runtime.control import ControlChannel
from mpidist.runtime.node_lock import NodeLock
from mpidist.transports.connections.waiting import Patience

T = TypeVar("T")

#: How often the lock is tried before others are let run: a short update is over by then.
_TRIES = 40


class WriteLock:
    """The right to change a server's variables, seen from the server, or from one of its clients.  All Local.

    It ends with the process that has it, so that the death of one never stops the others.
    """

    def __init__(self, path: str, words: Any, patience: Patience, control: ControlChannel) -> None:
        self._node_lock = NodeLock(path, words, Ledger.HELD, 1 + control.rank)
        self._words = words
        self._patience, self._what = patience, patience.what
        self._control = control
        #: Give the lock back, if it is held.
        self.release = self._node_lock.give_back

    def acquire(self) -> None:
        """Wait for the lock; errors as for `Connection.wait`."""
        take = self._node_lock.take
        for _ in range(_TRIES):
            if take():
                return
        self._patience.reset()
        while not take():
            self.wait()

    def try_acquire(self) -> bool:
        """Try to take the lock; return whether it is this process's now."""
        take = self._node_lock.take
        for _ in range(_TRIES):
            if take():
                self._patience.reset()
                return True
        return False

    def wait(self) -> bool:
        """Let others run, since the lock is another's; return whether it looked around.  Errors as for `acquire`."""
        looked = self._patience.tick()
        if looked:  # messages say who is waited for
            holder = self._words[Ledger.HELD]
            named = f", where {self._control.name(holder - 1)} has the write lock" if holder else ""
            self._patience.what = f"{self._what}{named}"
        return looked

    def holding(self, act: Callable[..., T], *arguments: Any) -> T:
        """Return what `act` returns, called with the lock; errors as for `acquire`."""
        try:
            self.acquire()
            result = act(*arguments)
            self.release()
        except BaseException:  # Ctrl-C may come anywhere, in `acquire` and `release`, too
            self.release()
            raise
        return result

    def close(self) -> None:
        """Take the lock no more."""
        self._node_lock.close()
