"""What every kind of connection must do: checks that each rank of a world runs with its connections to all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from mpidist.errors import TransportError
from mpidist.transports.connections.base import Connection
from mpidist.transports.connections.waiting import Patience

#: Small rings, so that they run full and begin anew.
RING_BYTES = 4096

#: Of headers: nothing, around the limits of what travels in one piece in any kind of connection, and much.
LENGTHS = (0, 1, 7, 8, 500, 976, 999, 1000, 1001, 1024, 4096, 70_001, 300_000)

Check = Callable[[int, Mapping[int, Connection]], None]


def content(source: int, target: int, index: int, nbytes: int) -> bytes:
    """Return the bytes of a rank's message of this number: no two messages are alike."""
    start = source * 89 + target * 31 + index * 7
    return (np.arange(start, start + nbytes) % 251).astype(np.uint8).tobytes()


def headers_of_all_lengths_arrive_in_order(rank: int, connections: Mapping[int, Connection]) -> None:
    for peer, connection in connections.items():
        for index, nbytes in enumerate(LENGTHS):
            connection.send(content(rank, peer, index, nbytes))
    for peer, connection in connections.items():
        for index, nbytes in enumerate(LENGTHS):
            message = connection.wait()
            assert message.header == content(peer, rank, index, nbytes) and message.payload is None
            message.release()  # nothing to give back


def floods_of_all_to_all_end(rank: int, connections: Mapping[int, Connection]) -> None:
    """Nobody receives before all has been sent, and far more than fits into the rings."""
    for index in range(300):
        for peer, connection in connections.items():
            connection.send(content(rank, peer, index, index % 90))
    for index in range(300):
        for peer, connection in connections.items():
            assert connection.wait().header == content(peer, rank, index, index % 90)


def payloads_arrive_with_their_headers(rank: int, connections: Mapping[int, Connection]) -> None:
    sizes = (0, 1, 63, 4096, 1_000_003)
    for peer, connection in connections.items():
        for index, nbytes in enumerate(sizes):
            area = connection.area(nbytes + 5)
            assert area.array.size == nbytes + 5 and area.array.ctypes.data % 64 == 0
            area.array[:nbytes] = np.frombuffer(content(rank, peer, index, nbytes), dtype=np.uint8)
            connection.send(f"payload {index}".encode(), area, nbytes)
            connection.send(b"")
    for peer, connection in connections.items():
        for index, nbytes in enumerate(sizes):
            message = connection.wait()
            assert message.header == f"payload {index}".encode()
            assert message.payload.tobytes() == content(peer, rank, index, nbytes)
            with pytest.raises(ValueError, match="read-only"):
                message.payload[...] = 0
            message.release()
            assert connection.wait().payload is None


def areas_are_used_in_turn(rank: int, connections: Mapping[int, Connection]) -> None:
    """What is written into an area while it is free does not change what was sent before."""
    areas = {peer: [connection.area(5000), connection.area(5000)] for peer, connection in connections.items()}
    for index in range(40):
        for peer, connection in connections.items():
            area = areas[peer][index % 2]
            area.wait_free()
            area.array[:] = (rank + index) % 256
            connection.send(str(index).encode(), area)
        for peer, connection in connections.items():
            message = connection.wait()
            assert message.header == str(index).encode()
            assert (message.payload == (peer + index) % 256).all()
            message.release()
            message.release()  # does nothing
    for peer, connection in connections.items():
        for area in areas[peer]:
            area.wait_free()
            area.close()
        connection.send(b"last")
        assert connection.wait().header == b"last"


def what_cannot_be_sent_is_refused(rank: int, connections: Mapping[int, Connection]) -> None:
    for peer, connection in connections.items():
        area = connection.area(10)
        with pytest.raises(ValueError, match="11 bytes .* it has 10 bytes"):
            connection.send(b"", area, 11)
        for other in connections.values():
            if other is not connection:
                with pytest.raises(ValueError, match=f"made by the connection to rank {other.peer}"):
                    other.send(b"", area)
        connection.send(b"done")
        assert connection.wait().header == b"done" and connection.receive() is None and connection.peer == peer


def a_connection_to_a_rank_that_is_there_is_not_lost(rank: int, connections: Mapping[int, Connection]) -> None:
    for connection in connections.values():
        assert not connection.lost and not connection.gone
        connection.send(b"still here")
    if not connections:  # a world of one rank
        return
    patience = Patience(connections.values(), f"rank {rank} looks around", idle=True)
    came = dict.fromkeys(connections, False)
    while not all(came.values()):
        for peer, connection in connections.items():
            came[peer] = came[peer] or connection.receive() is not None
        patience.tick()
    patience.reset()


def a_closed_connection_sends_nothing(rank: int, connections: Mapping[int, Connection]) -> None:
    for connection in connections.values():
        connection.send(b"first")
        assert connection.wait().header == b"first"
    for peer, connection in connections.items():
        connection.close()
        assert repr(connection) == f"<{type(connection).__name__} to rank {peer} (closed)>"
        with pytest.raises(TransportError, match=f"connection to rank {peer} has been closed"):
            connection.send(b"second")


CHECKS: tuple[Check, ...] = (
    headers_of_all_lengths_arrive_in_order,
    floods_of_all_to_all_end,
    payloads_arrive_with_their_headers,
    areas_are_used_in_turn,
    what_cannot_be_sent_is_refused,
    a_connection_to_a_rank_that_is_there_is_not_lost,
    a_closed_connection_sends_nothing,
)
