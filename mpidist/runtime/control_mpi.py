"""The control channel between nodes: notices over an MPI communicator of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpidist.runtime.stall import Messenger

_TAG = 1


class MpiMessenger(Messenger):
    """Sends and receives notices on `comm`, a communicator that nobody else uses.

    Sends are non-blocking; their requests and bytes are kept until they are done, so that a rank that never
    receives cannot stop the sender.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._under_way: list[tuple[Any, bytes]] = []

    def send(self, rank: int, notice: bytes) -> None:
        from mpi4py import MPI

        self._under_way = [(request, raw) for request, raw in self._under_way if not request.Test()]
        request = self._comm.Isend([notice, MPI.BYTE], dest=rank, tag=_TAG)
        self._under_way.append((request, notice))

    def arrived(self) -> Iterator[tuple[int, bytes]]:
        from mpi4py import MPI

        status = MPI.Status()
        while self._comm.Iprobe(source=MPI.ANY_SOURCE, tag=_TAG, status=status):
            source, count = status.Get_source(), status.Get_count(MPI.BYTE)
            raw = bytearray(count)
            self._comm.Recv([raw, MPI.BYTE], source=source, tag=_TAG)
            yield source, bytes(raw)
