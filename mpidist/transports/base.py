"""The interface every transport implements: enqueue sends and receives, then wait with one eye on the control channel.

A transport moves the bytes of arrays between the ranks of one group.  `send` and `receive` only *enqueue*;
the array must not be touched until `wait` has returned for what they gave back.  A transport for device memory
enqueues on its stream and waits for an event; one for host memory starts a non-blocking message and tests it.
Messages between two ranks arrive in the order in which they were enqueued, and match in that order.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from mpidist.runtime.control import ControlChannel, Watch

#: What `send` and `receive` return: only the transport that made it knows what is inside.
Pending = Any


class Transport(abc.ABC):
    """The ranks of one group, and a way to move arrays between them.

    Attributes
    ----------
    name : str
        The name under which errors and benchmarks show this transport.
    rank, size : int
        This process's place in the group, and the number of ranks in it.
    control : ControlChannel
        The control channel that `wait` looks at.  It speaks of world ranks; `world_ranks` translates.
    world_ranks : tuple of int
        The world rank of every rank of this group.
    memory : frozenset of str
        Kinds of memory the transport moves without a copy: ``"host"``, ``"device"``.
    native : mapping of str to callable
        Collectives that the library below has of its own; empty for most.  See `mpi.MpiTransport`.
    """

    name: str
    rank: int
    size: int
    control: ControlChannel
    world_ranks: tuple[int, ...]
    memory: frozenset[str] = frozenset({"host"})
    native: dict[str, Callable[..., Pending]] = {}

    @abc.abstractmethod
    def send(self, array: Any, destination: int) -> Pending:
        """Enqueue `array` (C-contiguous, any dtype, length 0 allowed) for rank `destination`; Local."""

    @abc.abstractmethod
    def receive(self, array: Any, source: int) -> Pending:
        """Enqueue the next message of rank `source` into `array` (C-contiguous, of the sent size in bytes); Local."""

    @abc.abstractmethod
    def wait(self, pendings: Sequence[Pending], watch: Watch) -> None:
        """Return when all `pendings` are done.

        Raises
        ------
        TransportTimeoutError, RankFailedError
            What `watch.tick` raises: the deadline passed, or a rank failed, was killed or left.
        """

    def exchange(self, payload: bytes, watch: Watch) -> list[bytes]:
        """Return what every rank of the group gave: a small all-gather of bytes, for plans and messages, not for data.

        Collective: every rank of the group calls it in the same order.
        """
        return exchange_among(self, range(self.size), payload, watch)

    @abc.abstractmethod
    def split(self, color: int) -> Transport:
        """Return a transport over the ranks that give the same `color`, in rank order.

        Collective: every rank of the group calls it in the same order.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what the transport holds; a second call does nothing.  Collective."""

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size}>"


def exchange_among(transport: Transport, members: Sequence[int], payload: bytes, watch: Watch) -> list[bytes]:
    """Return what each of `members`, ranks of `transport`, gave: first everyone's lengths, then the bytes.

    Collective: every member calls it in the same order, with the same `members`.
    """
    length = numpy.array([len(payload)], dtype=numpy.int64)
    lengths = [numpy.zeros(1, dtype=numpy.int64) for _ in members]
    _to_and_from_all(transport, members, length, lengths, watch)
    mine = numpy.frombuffer(payload, dtype=numpy.uint8)
    theirs = [numpy.empty(int(count[0]), dtype=numpy.uint8) for count in lengths]
    _to_and_from_all(transport, members, mine, theirs, watch)
    return [raw.tobytes() for raw in theirs]


def _to_and_from_all(
    transport: Transport, members: Sequence[int], mine: Any, theirs: Sequence[Any], watch: Watch
) -> None:
    receives = [transport.receive(array, member) for array, member in zip(theirs, members, strict=True)]
    sends = [transport.send(mine, member) for member in members]
    transport.wait(receives + sends, watch)
