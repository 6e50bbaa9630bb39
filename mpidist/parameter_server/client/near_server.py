"""`NearServer`: a server on the client's node."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mpidist.parameter_server.client.direct import Direct
from mpidist.parameter_server.client.part import PushPart
from mpidist.parameter_server.client.server_end import ServerEnd
from mpidist.parameter_server.copies import Reader
from mpidist.parameter_server.layout import Key, Layout, VariableSpec
from mpidist.parameter_server.ledger import LEDGER_OPTIMIZERS, Ledger
from mpidist.parameter_server.write_lock import WriteLock
from mpidist.runtime.board import fence, needs_fence
from mpidist.transports.connections.waiting import Patience


class NearServer(ServerEnd):
    """A server on this node: its ledger and its copies of the variables are read where they lie.

    A pull is no message.  A snapshot is a copy that is pinned: it stays as it is until the next pull.
    """

    _reader: Reader | None = None
    _pinned: Reader | None = None  # what the present snapshot is of; there may be a newer layout
    _copy = -1
    _direct: Direct | None = None

    def __init__(self, end: ServerEnd, answer: dict[str, Any], memory: Any) -> None:
        super().__init__(end.connection, end.number, end.client)
        self.take_policy(answer)
        self.ledger = memory
        ledger = Ledger(self.ledger, self.clients)
        self._words = ledger.words
        self._applied = Ledger.applied_word(self.client)
        if answer["gives_lock"]:
            patience = Patience([self.connection], f"{self._who} to let it change variables there")
            with suppress(OSError):  # by messages then
                lock = WriteLock(answer["ledger"], self._words, patience, self.connection.presence.control)
                self._direct = Direct(self, ledger, lock)
        self.connection.presence.while_waiting.append(self._let_go)

    def _let_go(self) -> None:
        """Give back what this client has pinned, if the server needs it and nobody looks at it."""
        if self._words[Ledger.SHORT] and self._pinned is not None:
            self._pinned.let_go()

    def pull(self) -> dict[Key, Any]:
        words = self._words
        if words[self._applied] < self.pushed:
            self.give_back()  # the server may need the copy
            self._await(self._applied)
        self.check()
        if needs_fence:
            fence()
        if words[Ledger.LAYOUT] != self._layout_number:
            self._map()
        assert self._reader is not None
        self._pinned = self._reader
        self._copy = self._pinned.pin()
        return self._pinned.shown(self._copy)

    def give_back(self) -> None:
        if self._pinned is not None:
            self._pinned.unpin()

    def look_for(self, key: Key) -> bool:
        self._map()
        return self._reader is not None and key in self._reader.layout.index

    def version(self, key: Key) -> int:
        reader = self._pinned
        assert reader is not None
        return int(reader.versions[self._copy][reader.layout.index[key]])

    def begin_step(self, ask: bool = False) -> Sequence[int]:
        if ask:
            return super().begin_step()
        words = self._words
        if words[self._applied] < self.pushed:
            self._await(self._applied)
        self.check()
        if self.has_clock and words[self._applied + 1] < self.pushed:
            self._await(self._applied + 1)
        if not self.gathers:
            return ()
        fence()
        return words[Ledger.steps_word(0) : Ledger.steps_word(LEDGER_OPTIMIZERS)].tolist()

    def apply(self, optimizer: int, part: PushPart, gradients: Sequence[Any], scale: float) -> bool:
        return self._direct is not None and self._direct.push(optimizer, part, gradients, scale)

    def settle(self, optimizer: int, part: PushPart) -> None:
        if self._direct is not None:
            self._direct.settle(optimizer, part)

    def set_rate(self, optimizer: int, value: float) -> None:
        if self._direct is None or not self._direct.set_rate(optimizer, value):
            super().set_rate(optimizer, value)

    def newest(self) -> tuple[Reader, int]:
        """Return the copies of the server's variables as they are laid out now, and the number of that layout."""
        self._map()
        assert self._reader is not None
        return self._reader, self._layout_number

    def look(self) -> None:
        """Look whether the server is still there; errors as for `Connection.wait`."""
        self._patience.look()

    def flush(self) -> None:
        if self._words[self._applied] < self.pushed:
            self._await(self._applied)
        self.check()

    def iterations(self, optimizer: int) -> int:
        self.flush()
        steps = self._words[Ledger.steps_word(optimizer)] if optimizer < LEDGER_OPTIMIZERS else -1
        if steps < 0:
            raise KeyError(f"{self.name} has no optimizer {optimizer}")
        return steps

    def forget(self) -> None:
        if self._direct is not None:
            self._direct.close()
            self._direct = None

    def _await(self, word: int) -> None:
        """Wait until a word of the ledger has come to the number of pushes made."""
        words, pushed, patience = self._words, self.pushed, self._patience
        patience.reset()
        while words[word] < pushed:
            patience.tick()
        fence()

    def _map(self) -> None:
        """Map the copies of the server's present layout, unless that is done."""
        while True:
            answer, _ = self.ask("layout", maps=True)
            if answer["number"] == self._layout_number:
                return
            layout = Layout(map(VariableSpec.from_description, answer["specs"]))
            try:
                # Nobody writes the copies of an older layout: views of them stay as they are without a pin.
                self._reader = Reader(layout, answer["path"], answer["token"], self.clients, self.client)
            except FileNotFoundError:  # there is another layout already
                continue
            self._layout_number = answer["number"]
            return
