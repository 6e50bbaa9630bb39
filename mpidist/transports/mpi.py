"""Messages over MPI: host memory, a communicator of our own, never a wait inside MPI.

Few files may import mpi4py: see ``FOREIGN`` in ``tests/unit/test_layering.py``.  Importing ``mpi4py.MPI`` starts MPI,
so it is done in functions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from mpidist.errors import RankFailedError, TransportError
from mpidist.runtime.control import ControlChannel, Watch
from mpidist.runtime.control_mpi import MpiMessenger
from mpidist.transports.base import Transport

#: No message is longer: older libraries count in 32 bits, and shorter pieces are moved no slower.
_CHUNK_BYTES = 1 << 30


class MpiTransport(Transport):
    """Messages between the ranks of an MPI communicator.

    Nobody else uses `comm`; longer messages are cut into pieces of `chunk_bytes`.
    """

    name = "mpi"
    has_channels = True

    def __init__(
        self, comm: Any, control: ControlChannel, world_ranks: Sequence[int], chunk_bytes: int = _CHUNK_BYTES
    ) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = self.mpi_communicator = comm
        self._chunk_bytes = chunk_bytes
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.control = control
        self.world_ranks = tuple(world_ranks)
        self.native = {"all_reduce": self._all_reduce}
        vendor, version = MPI.get_vendor()
        self.library = f"{vendor} {'.'.join(map(str, version))}"
        #: By rank of this group, its rank in the communicator; and the tag of this group's messages.
        self._peers: Sequence[int] = range(self.size)
        self._tag = 0
        self._operations = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "prod": MPI.PROD}
        #: What MPI said of the requests of the last wait; kept, so that not every wait makes its own.
        self._statuses: list[Any] = []

    def send(self, array: Any, destination: int) -> list[Any]:
        isend, byte, tag = self._comm.Isend, self._mpi.BYTE, self._tag
        pieces = self._pieces(array, destination)
        return [isend([piece, byte], self._peers[destination], tag) for piece in pieces]

    def receive(self, array: Any, source: int) -> list[Any]:
        irecv, byte, tag = self._comm.Irecv, self._mpi.BYTE, self._tag
        return [irecv([piece, byte], self._peers[source], tag) for piece in self._pieces(array, source)]

    def wait(self, pendings: Sequence[list[Any]], watch: Watch) -> None:
        requests = pendings[0] if len(pendings) == 1 else [request for pending in pendings for request in pending]
        done = self._mpi.Request.Testall
        try:
            while not done(requests, self._statuses):
                watch.tick()
        except BaseException as error:
            self.abandon([requests])  # MPI still writes into their buffers
            if isinstance(error, self._mpi.Exception):
                raise self._refused(error, self._statuses[: len(requests)], watch) from error
            raise

    def poll(self, pendings: Sequence[list[Any]]) -> bool:
        requests = pendings[0] if len(pendings) == 1 else [request for pending in pendings for request in pending]
        try:
            return self._mpi.Request.Testall(requests, self._statuses)
        except self._mpi.Exception as error:
            watch = self.control.watch("a message between ranks")
            raise self._refused(error, self._statuses[: len(requests)], watch) from error

    def among(self, members: Sequence[int], channel: int) -> MpiTransport:
        return _MpiChannel(self, members, channel)

    def exchange(self, payload: bytes, watch: Watch) -> list[bytes]:
        count = numpy.array([len(payload)], dtype=numpy.int64)
        counts = numpy.empty(self.size, dtype=numpy.int64)
        self.wait([[self._comm.Iallgather(count, counts)]], watch)
        everything = bytearray(int(counts.sum()))
        ends = counts.cumsum()
        spec = [everything, counts, ends - counts, self._mpi.BYTE]
        self.wait([[self._comm.Iallgatherv([payload, self._mpi.BYTE], spec)]], watch)
        return [bytes(everything[end - size : end]) for size, end in zip(counts, ends, strict=True)]

    def split(self, color: int) -> MpiTransport:
        watch = self.control.watch("split of an MPI transport")
        colors = [int(raw) for raw in self.exchange(str(color).encode(), watch)]
        ranks = [world for world, other in zip(self.world_ranks, colors, strict=True) if other == color]
        return MpiTransport(self._comm.Split(color, self.rank), self.control, ranks, self._chunk_bytes)

    def messenger(self) -> MpiMessenger:
        return MpiMessenger(self._comm.Dup())

    def close(self) -> None:
        self.closed = True
        if self._comm != self._mpi.COMM_NULL:
            self._comm.Free()

    def _all_reduce(self, buffer: Any, op: str, source: Any = None) -> list[Any]:
        """Start MPI's own all-reduce of a contiguous host array, in place or of what is in `source`."""
        flat, step = buffer.reshape(-1), max(1, self._chunk_bytes // max(1, buffer.itemsize))
        parts = [slice(start, start + step) for start in range(0, flat.size, step)]
        values = [self._mpi.IN_PLACE if source is None else source.reshape(-1)[part] for part in parts]
        operation = self._operations[op]
        return [self._comm.Iallreduce(own, flat[part], operation) for own, part in zip(values, parts, strict=True)]

    def _refused(self, error: Any, statuses: Sequence[Any], watch: Watch) -> TransportError:
        """Return what to raise for an error of MPI's: it names the senders of messages that are too long.

        RankFailedError if MPI says that the rank at the other end is gone; `watch` raises it where it knows the rank.
        """
        mpi, what = self._mpi, f"MPI failed: {error}"
        gone = (getattr(mpi, "ERR_PROC_FAILED", None), getattr(mpi, "ERR_PROC_FAILED_PENDING", None))
        codes = [error.Get_error_class(), *(mpi.Get_error_class(status.Get_error()) for status in statuses)]
        if codes[0] in gone or (codes[0] == mpi.ERR_IN_STATUS and any(code in gone for code in codes[1:])):
            watch.look()
            text = f"a rank that this one talks to is gone, in {watch.what}: {error}"
            return RankFailedError(f"rank {self.rank} of {self.size}: {text}")
        if codes[0] == mpi.ERR_IN_STATUS:
            errors = {status.Get_source(): mpi.Get_error_class(status.Get_error()) for status in statuses}
            numbers = [self._peers.index(source) for source, code in errors.items() if code == mpi.ERR_TRUNCATE]
            if numbers:
                names = self.control.names([self.world_ranks[number] for number in numbers])
                what = f"a message from {names} is longer than the array that is to receive it"
        return TransportError(f"rank {self.rank} of {self.size}: {what}; sender and receiver must agree")

    def _pieces(self, array: Any, peer: int) -> list[Any]:
        """Return views on the bytes of a C-contiguous host array for or from `peer`, none longer than a chunk."""
        raw = self.content(array, peer)
        if raw.size <= self._chunk_bytes:
            return [raw]
        return [raw[start : start + self._chunk_bytes] for start in range(0, raw.size, self._chunk_bytes)]


class _MpiChannel(MpiTransport):
    """Some ranks of an `MpiTransport`, on its communicator: a tag keeps its messages apart."""

    has_channels = False

    def __init__(self, whole: MpiTransport, members: Sequence[int], channel: int) -> None:
        world_ranks = [whole.world_ranks[member] for member in members]
        super().__init__(whole._comm, whole.control, world_ranks, whole._chunk_bytes)
        self.rank, self.size = list(members).index(whole.rank), len(members)
        self.native, self.mpi_communicator = {}, None
        self._peers, self._tag = tuple(members), channel

    exchange = Transport.exchange

    def split(self, color: int) -> MpiTransport:
        raise TransportError("a channel cannot be split; split the transport that it was made of")

    def close(self) -> None:
        self.closed = True
