"""`LocalClient`: the client of a process without servers: its only server is in the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import numpy

from mpidist.parameter_server.client.client import Client
from mpidist.parameter_server.client.part import PushPart
from mpidist.parameter_server.client.server_end import ServerEnd
from mpidist.parameter_server.consistency import Asynchronous
from mpidist.parameter_server.layout import Key
from mpidist.parameter_server.ledger import Ledger
from mpidist.parameter_server.server.peer import Peer
from mpidist.parameter_server.server.progress import ServerProgress
from mpidist.parameter_server.server.requests import Requests
from mpidist.transports.connections.base import Connection
from mpidist.variables import read_only


class LocalClient(Client):
    """A client whose pushes are applied when the call returns, and whose values are those of the moment."""

    def __init__(self) -> None:
        super().__init__((), 0, 1, is_chief=True)

    def _opened(self, connections: Sequence[Connection]) -> list[ServerEnd]:
        self._store = (server := _LocalServer()).store
        return [server]

    def value(self, key: Key) -> Any:
        """Return a read-only view of the value; valid until the variable changes."""
        self._store.lay_out()
        return read_only(self._store.read(key))

    def version(self, key: Key) -> int:
        """Return how often a variable was changed."""
        return self._store.version(key)

    def leave(self) -> None:
        """Do nothing: nobody waits."""


class _LocalServer(ServerEnd):
    """A server in this process: what it is asked, it does at once, and what goes wrong is raised as it is."""

    def __init__(self) -> None:  # without a connection
        self.number, self.pushed = 0, 0
        self.has_clock = self.gathers = False
        self.forgotten, self.parts = [], WeakSet()
        progress = ServerProgress((), 0)
        self.store = progress.store
        no_connection: Any = None
        self._peer = Peer(0, no_connection, Ledger.PUSHES)
        self._requests = Requests(0, progress, Asynchronous(), [self._peer], gives_lock=False)
        #: Where the gradients of any list are packed.
        self._memory = numpy.empty(0, numpy.uint8)

    def ask(
        self, verb: str, array: Any = None, timeout_seconds: float | None = None, **fields: Any
    ) -> tuple[dict[str, Any], Any]:
        content, *arrays = self._requests.answer(self._peer, {"verb": verb, **fields}, array)
        return content, numpy.array(arrays[0]) if arrays else None

    def push(
        self, optimizer: int, part: PushPart, chosen: Sequence[Any], gradients: Sequence[Any], scale: float
    ) -> None:
        rows = [gradients[place].coalesced() for place in part.sparse]
        counts = tuple(len(each.indices) for each in rows)
        nbytes = part.plan.nbytes(counts)
        if self._memory.size < nbytes:
            self._memory = numpy.empty(nbytes, numpy.uint8)
            self.drop_views()
        part.pack(chosen, self._memory)
        part.pack_rows(rows, counts, self._memory)
        self.store.push(optimizer, self._peer.plans[part.number], [(counts, self._memory, scale)])

    def flush(self) -> None:
        """Do nothing: every push is applied at once."""
