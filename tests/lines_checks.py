"""What every kind of line must do: checks that each rank of a world runs with its lines to all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from mpidist.errors import TransportError
from mpidist.transports.lines import Line, Patience

#: Small rings, so that they run full and begin anew.
RING_BYTES = 4096

#: Of headers: nothing, around the limits of what travels in one piece in any kind of line, and much.
LENGTHS = (0, 1, 7, 8, 500, 976, 999, 1000, 1001, 1024, 4096, 70_001, 300_000)

Check = Callable[[int, Mapping[int, Line]], None]


def content(source: int, target: int, index: int, nbytes: int) -> bytes:
    """Return the bytes of a rank's message of this number: no two messages are alike."""
    start = source * 89 + target * 31 + index * 7
    return (np.arange(start, start + nbytes) % 251).astype(np.uint8).tobytes()


def headers_of_all_lengths_arrive_in_order(rank: int, lines: Mapping[int, Line]) -> None:
    for peer, line in lines.items():
        for index, nbytes in enumerate(LENGTHS):
            line.send(content(rank, peer, index, nbytes))
    for peer, line in lines.items():
        for index, nbytes in enumerate(LENGTHS):
            message = line.wait()
            assert message.header == content(peer, rank, index, nbytes) and message.payload is None
            message.release()  # nothing to give back


def floods_of_all_to_all_end(rank: int, lines: Mapping[int, Line]) -> None:
    """Nobody receives before all has been sent, and far more than fits into the rings."""
    for index in range(300):
        for peer, line in lines.items():
            line.send(content(rank, peer, index, index % 90))
    for index in range(300):
        for peer, line in lines.items():
            assert line.wait().header == content(peer, rank, index, index % 90)


def payloads_arrive_with_their_headers(rank: int, lines: Mapping[int, Line]) -> None:
    sizes = (0, 1, 63, 4096, 1_000_003)
    for peer, line in lines.items():
        for index, nbytes in enumerate(sizes):
            area = line.area(nbytes + 5)
            assert area.array.size == nbytes + 5 and area.array.ctypes.data % 64 == 0
            area.array[:nbytes] = np.frombuffer(content(rank, peer, index, nbytes), dtype=np.uint8)
            line.send(f"payload {index}".encode(), area, nbytes)
            line.send(b"")
    for peer, line in lines.items():
        for index, nbytes in enumerate(sizes):
            message = line.wait()
            assert message.header == f"payload {index}".encode()
            assert message.payload.tobytes() == content(peer, rank, index, nbytes)
            with pytest.raises(ValueError, match="read-only"):
                message.payload[...] = 0
            message.release()
            assert line.wait().payload is None


def areas_are_used_in_turn(rank: int, lines: Mapping[int, Line]) -> None:
    """What is written into an area while it is free does not change what was sent before."""
    areas = {peer: [line.area(5000), line.area(5000)] for peer, line in lines.items()}
    for index in range(40):
        for peer, line in lines.items():
            area = areas[peer][index % 2]
            area.wait_free()
            area.array[:] = (rank + index) % 256
            line.send(str(index).encode(), area)
        for peer, line in lines.items():
            message = line.wait()
            assert message.header == str(index).encode()
            assert (message.payload == (peer + index) % 256).all()
            message.release()
            message.release()  # does nothing
    for peer, line in lines.items():
        for area in areas[peer]:
            area.wait_free()
            area.close()
        line.send(b"last")
        assert line.wait().header == b"last"


def what_cannot_be_sent_is_refused(rank: int, lines: Mapping[int, Line]) -> None:
    for peer, line in lines.items():
        area = line.area(10)
        with pytest.raises(ValueError, match="11 bytes .* it has 10 bytes"):
            line.send(b"", area, 11)
        for other in lines.values():
            if other is not line:
                with pytest.raises(ValueError, match=f"made by the line to rank {other.peer}"):
                    other.send(b"", area)
        line.send(b"done")
        assert line.wait().header == b"done" and line.receive() is None and line.peer == peer


def a_line_to_a_rank_that_is_there_is_not_lost(rank: int, lines: Mapping[int, Line]) -> None:
    for line in lines.values():
        assert not line.lost and not line.gone
        line.send(b"still here")
    if not lines:  # a world of one rank
        return
    patience = Patience(lines.values(), f"rank {rank} looks around", idle=True)
    came = dict.fromkeys(lines, False)
    while not all(came.values()):
        for peer, line in lines.items():
            came[peer] = came[peer] or line.receive() is not None
        patience.tick()
    patience.reset()


def a_closed_line_sends_nothing(rank: int, lines: Mapping[int, Line]) -> None:
    for line in lines.values():
        line.send(b"first")
        assert line.wait().header == b"first"
    for peer, line in lines.items():
        line.close()
        assert repr(line) == f"<{type(line).__name__} to rank {peer} (closed)>"
        with pytest.raises(TransportError, match=f"line to rank {peer} has been closed"):
            line.send(b"second")


CHECKS: tuple[Check, ...] = (
    headers_of_all_lengths_arrive_in_order,
    floods_of_all_to_all_end,
    payloads_arrive_with_their_headers,
    areas_are_used_in_turn,
    what_cannot_be_sent_is_refused,
    a_line_to_a_rank_that_is_there_is_not_lost,
    a_closed_line_sends_nothing,
)
