"""`Peer`: one client, as a server knows it."""

from __future__ import annotations

from mpidist.parameter_server.server.store import Planned
from mpidist.transports.connections.base import Area, Connection, Message


class Peer:
    """One client, as a server knows it."""

    def __init__(self, number: int, connection: Connection, applied_word: int) -> None:
        self.number = number
        self.connection = connection
        self.applied_word = applied_word
        #: Pushes that have come.
        self.arrived = 0
        self.is_here = True
        #: What it has sent first, while it waits for the write lock, or for a copy to be written.
        self.first: Message | None = None
        self.plans: dict[int, Planned] = {}
        self._areas: list[Area] = []

    @property
    def name(self) -> str:
        """How messages call it."""
        presence = self.connection.presence
        return presence.control.name(presence.name_of(self.connection.peer))

    def area(self, nbytes: int) -> Area:
        """Return memory for an answer that is free, or will be."""
        for area in self._areas:
            if area.array.size >= nbytes and not area.busy:
                return area
        for area in self._areas:
            if not area.busy:
                self._areas.remove(area)
                area.close()
                break
        if len(self._areas) < 2:
            self._areas.append(self.connection.area(max(4096, nbytes)))
            return self._areas[-1]
        self._areas[0].wait_free()
        return self.area(nbytes)
