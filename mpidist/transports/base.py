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

from mpidist.arrays import byte_view, check_memory
from mpidist.errors import TransportError
from mpidist.runtime.control import ControlChannel, Watch
from mpidist.runtime.stall import Messenger

#: What `send` and `receive` return: only the transport that made it knows what is inside.
Pending = Any

#: What nobody waits for any more, and what may still be written into: kept until the process ends.
_abandoned: list[Pending] = []


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
    has_channels : bool
        Whether `among` works.
    library : str
        The library below, with its version, under which measured times are kept; empty where they tell nothing.
    in_one_process : bool
        Whether all ranks are threads of this process, whatever nodes they pretend to be on.
    mpi_communicator : mpi4py.MPI.Intracomm or None
        Of the ranks of this group, where they are MPI's: for libraries that make calls of MPI themselves.
    closed : bool
        Whether `close` has been called: then `send` and `receive` raise TransportError.
    """

    name: str
    rank: int
    size: int
    control: ControlChannel
    world_ranks: tuple[int, ...]
    memory: frozenset[str] = frozenset({"host"})
    native: dict[str, Callable[..., Pending]] = {}
    has_channels: bool = False
    library: str = ""
    mpi_communicator: Any = None
    closed: bool = False
    in_one_process: bool = False

    @abc.abstractmethod
    def send(self, array: Any, destination: int) -> Pending:
        """Enqueue `array` (C-contiguous, any dtype, length 0 allowed) for rank `destination`; Local.

        Raises
        ------
        ValueError
            The group has no such rank, or the array is not C-contiguous.
        UnsupportedDtypeError
            The array holds Python objects, or is in memory of another kind.
        TransportError
            The transport has been closed.
        """

    @abc.abstractmethod
    def receive(self, array: Any, source: int) -> Pending:
        """Enqueue the next message of rank `source` into `array` (C-contiguous, of the sent size in bytes); Local.

        Raises what `send` raises.
        """

    @abc.abstractmethod
    def wait(self, pendings: Sequence[Pending], watch: Watch) -> None:
        """Return when all `pendings` are done.

        Raises
        ------
        TransportTimeoutError, RankFailedError
            What `watch.tick` raises: the deadline passed, or a rank failed, was killed or left.
        TransportError
            Another rank's message is longer than the array that is to receive it.  Most transports refuse a shorter
            one too, and a wrong one of the rank's own; MPI does not tell.
        """

    @abc.abstractmethod
    def poll(self, pendings: Sequence[Pending]) -> bool:
        """Move on what can be moved without waiting, and return whether all `pendings` are done; Local.

        Raises
        ------
        TransportError
            As `wait`.
        """

    def abandon(self, pendings: Sequence[Pending]) -> None:
        """Give up on `pendings`, and keep what they may still write into; after an error, for who polls.  Local."""
        _abandoned.extend(pendings)

    def among(self, members: Sequence[int], channel: int) -> Transport:
        """Return a transport over some ranks of this transport.  Its messages do not mix with those of other channels.

        Local, unlike `split`: nothing is agreed.  So the members must give the same list of ranks, in the same order,
        and two groups that have a pair of ranks in common must have different channels.

        Parameters
        ----------
        members : sequence of int
            Ranks of this transport, this rank included.  The position of a rank in the list is its rank in the result.
        channel : int
            1 or more, and below 4096.

        Raises
        ------
        TransportError
            The transport has no channels; see `has_channels`.
        """
        raise TransportError(f"the {self.name} transport has no channels; use split, which all ranks must call")

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

    def messenger(self) -> Messenger | None:
        """Return what carries the notices of a control channel between the ranks of this group, if they need it.

        Collective: every rank of the group calls it in the same order.
        """
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what the transport holds; a second call does nothing.  Collective."""

    def content(self, array: Any, peer: int) -> Any:
        """Return the bytes of `array` after a look at the arguments of `send` or `receive`, for both to begin with."""
        if self.closed:
            raise TransportError(f"{self!r} has been closed; make another one")
        if not 0 <= peer < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}: there is no rank {peer}")
        check_memory(array, self.memory, self.name)
        return byte_view(array)

    def wrong_size(self, got: int, source: int, expected: int) -> TransportError:
        """Return the error for a message of `got` bytes for an array of `expected` bytes."""
        return TransportError(
            f"rank {self.rank} of {self.size}: a message of {got} bytes from rank {source} does not fit the "
            f"{expected} bytes that are to receive it; sender and receiver must agree"
        )

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
