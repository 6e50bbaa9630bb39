"""`ServerProgress`: what a server shows in its ledger, and learns from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpidist.optimizers.rule import Rule
from mpidist.options import settings
from mpidist.parameter_server.consistency import Consistency
from mpidist.parameter_server.ledger import LEDGER_OPTIMIZERS, Ledger
from mpidist.parameter_server.server.peer import Peer
from mpidist.parameter_server.server.store import Store
from mpidist.runtime.board import fence
from mpidist.runtime.shared_memory import SharedFile
from mpidist.transports.connections.base import Connection


class ServerProgress:
    """How far a server is, in words that the clients on its node read."""

    def __init__(self, connections: Sequence[Connection], number: int) -> None:
        shares = settings().shared_memory and any(connection.is_shared for connection in connections)
        self._file = _shared_ledger(connections, number) if shares else None
        memory = bytearray(Ledger.nbytes(len(connections))) if self._file is None else self._file.map()
        self.ledger = Ledger(memory, len(connections))
        self.words = self.ledger.words
        #: How many optimizers there may be: any number where nobody looks how far this server is.
        self.most_optimizers = LEDGER_OPTIMIZERS if connections else math.inf
        for optimizer in range(LEDGER_OPTIMIZERS):
            self.words[Ledger.steps_word(optimizer)] = -1
        self.store = Store(len(connections) if self._file is not None else 0)
        self._known = self.changes()

    @property
    def path(self) -> str:
        """Of the ledger's file; empty where the ledger is private."""
        return "" if self._file is None else self._file.path

    def close(self) -> None:
        """Give memory back; clients that read it keep it."""
        self.store.close()
        if self._file is not None:
            self._file.unlink()

    # -- what clients on this node change -----------------------------------------------------------------------------

    def changes(self) -> tuple[int, int]:
        """Return what tells whether clients have changed anything."""
        return self.words[Ledger.PUSHES], self.words[Ledger.RATES]

    def know(self) -> None:
        """Take note that all changes are known."""
        self._known = self.changes()

    def catch_up(self) -> None:
        """Take over the steps that clients have made themselves, and the learning rates that they have set."""
        if self.changes() == self._known:
            return
        for number, served in self.store.optimizers.items():
            served.optimizer.iterations = self.words[Ledger.steps_word(number)]
            rate = self.ledger.reals[Ledger.rate_real(number)]
            if not math.isnan(rate):
                served.optimizer.learning_rate = rate

    # -- what is shown ------------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Show which layout and rules hold, and whether anything is torn: who changes variables goes by it."""
        self.words[Ledger.LAYOUT] = self.store.layout_number
        self.words[Ledger.RULES] = self.store.rules_number
        self.words[Ledger.TORN] = self.store.is_torn

    def count_push(self, peer: Peer, optimizer: int) -> None:
        """Show that a push is done with: steps before pushes, since who sees its push sees its step."""
        words = self.words
        words[Ledger.PUSHES] += 1
        self.show()
        if optimizer in self.store.optimizers:
            words[Ledger.steps_word(optimizer)] = self.store.optimizers[optimizer].optimizer.iterations
        fence()
        words[peer.applied_word] += 1

    def show_clocks(self, consistency: Consistency, peers: Sequence[Peer]) -> None:
        """Show how many pushes each client may have made to start a step."""
        if consistency.has_clock:
            for peer in peers:
                self.words[peer.applied_word + 1] = consistency.permitted(peer.number)

    def show_rule(self, number: int) -> None:
        """Show that an optimizer has other settings, and its steps and learning rate."""
        self.show_steps(number)
        self.show_rate(number)
        self.store.rules_number += 1
        self.show()

    def show_steps(self, number: int) -> None:
        """Show the steps of an optimizer."""
        if number < LEDGER_OPTIMIZERS:
            self.words[Ledger.steps_word(number)] = self.store.optimizers[number].optimizer.iterations

    def show_rate(self, number: int) -> None:
        """Show the learning rate, NaN where it is more than a number that somebody has set."""
        optimizer = self.store.optimizers[number].optimizer
        is_plain = not optimizer.has_schedule and type(optimizer).learning_rate is Rule.learning_rate
        if number < LEDGER_OPTIMIZERS:
            self.ledger.reals[Ledger.rate_real(number)] = optimizer.learning_rate if is_plain else math.nan


def _shared_ledger(connections: Sequence[Connection], number: int) -> SharedFile | None:
    try:
        return SharedFile(Ledger.nbytes(len(connections)))
    except OSError as error:
        text = f"ps {number} has no shared memory ({error}); its clients pull by messages"
        connections[0].presence.control.warn(text)
        return None
