"""How a client opens a server, near or far."""

from __future__ import annotations

from mpidist.parameter_server.client.far_server import FarServer
from mpidist.parameter_server.client.near_server import NearServer
from mpidist.parameter_server.client.server_end import ServerEnd
from mpidist.runtime.shared_memory import map_file
from mpidist.transports.connections.base import Connection


def open_server(connection: Connection, number: int, client: int) -> ServerEnd:
    """Return a server as a client sees it, after a first word with it.  Local."""
    end = ServerEnd(connection, number, client)
    answer, _ = end.ask("hello")
    kind: type[ServerEnd] = FarServer
    if answer["ledger"]:
        try:
            end.ledger = map_file(answer["ledger"])
            kind = NearServer
        except OSError:  # in another container: by messages then
            pass
    return kind.opened(end, answer)
