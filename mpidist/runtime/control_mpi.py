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

        self._under_way = [(request, raw) for request, raw in self._under_way if not _done(request)]
        try:
            request = self._comm.Isend([notice, MPI.BYTE], dest=rank, tag=_TAG)
        except MPI.Exception as error:
            if not _is_loss(error):
                raise
            return  # nobody is there to read it
        self._under_way.append((request, notice))

    def arrived(self) -> Iterator[tuple[int, bytes]]:
        from mpi4py import MPI

        status = MPI.Status()
        while (message := self._probe(status)) is not None:
            raw = bytearray(status.Get_count(MPI.BYTE))
            source = status.Get_source()
            try:
                message.Recv([raw, MPI.BYTE])
            except MPI.Exception as error:
                if not _is_loss(error):
                    raise
                continue  # its sender has died before it had sent all of it
            yield source, bytes(raw)

    def _probe(self, status: Any) -> Any:
        """Return a notice that is there, or None; ranks that are gone, which MPI tells of only here, send no more.

        It is taken out of what is there: a receive by the number of a rank that is gone would be an error.
        """
        from mpi4py import MPI

        try:
            return self._comm.Improbe(source=MPI.ANY_SOURCE, tag=_TAG, status=status)
        except MPI.Exception as error:
            if not _is_loss(error):
                raise
            self._comm.Ack_failed()
            return self._comm.Improbe(source=MPI.ANY_SOURCE, tag=_TAG, status=status)


def _done(request: Any) -> bool:
    """Return whether a send is done, or in vain."""
    from mpi4py import MPI

    try:
        return bool(request.Test())
    except MPI.Exception as error:
        if not _is_loss(error):
            raise
        return True


def _is_loss(error: Any) -> bool:
    """Return whether an error of MPI's says that another rank is gone."""
    from mpi4py import MPI

    return error.Get_error_class() in (
        getattr(MPI, "ERR_PROC_FAILED", None),
        getattr(MPI, "ERR_PROC_FAILED_PENDING", None),
    )
