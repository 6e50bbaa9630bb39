"""All-reduces over messages: MPI's own, or a schedule that is played on a packed buffer."""

from __future__ import annotations

from typing import Any, Protocol

import numpy

from mpidist.arrays import is_device
from mpidist.cluster.topology import Topology
from mpidist.collectives import selection
from mpidist.collectives.executor import SEGMENT_BYTES, Executor
from mpidist.collectives.scratch import Scratch
from mpidist.runtime.control import Watch
from mpidist.schedules.rounds import Schedule
from mpidist.schedules.table import algorithm, hierarchical
from mpidist.transports.base import Transport


class Replay(Protocol):
    """Runs the data movement of one call, on the buffer it is bound to or on another one like that."""

    def __call__(self, watch: Watch, buffer: Any = None) -> None:
        """Reduce, within the begun call of `watch`."""


class Messages:
    """The all-reduces of a transport.

    Parameters
    ----------
    transport : Transport
    topology : Topology
    scratch : Scratch
        What is bound runs inside the turnstile only.
    """

    def __init__(self, transport: Transport, topology: Topology, scratch: Scratch) -> None:
        self._transport = transport
        self._topology = topology
        self._schedules: dict[str, Schedule] = {}
        self._scratch = scratch

    def bind(self, buffer: Any, op: str, chosen: str, is_example: bool = False) -> Replay:
        """Return what reduces `buffer` in place; Local.

        Parameters
        ----------
        buffer : array, shape (n,), contiguous, in a dtype that is added as such
        op : str
        chosen : str
            ``"native"``, ``"none"``, or the name of a schedule.
        is_example : bool
            As for `Chooser.bind`.
        """
        if chosen == "none":
            return _nothing
        if chosen == "native":
            return _Native(self._transport, None if is_example else buffer, op)
        scratch = None if is_device(buffer) else self._scratch.array((2 * SEGMENT_BYTES,), numpy.dtype(numpy.uint8))
        executor = Executor(self._schedule(chosen), self._transport, buffer, op, scratch=scratch)
        if is_example:
            executor.release()
        return executor.run

    def _schedule(self, name: str) -> Schedule:
        if name not in self._schedules:
            if name == "hierarchical":
                schedule = hierarchical(self._topology, selection.between_nodes(self._topology))
            else:
                schedule = algorithm("all_reduce", name)
            self._schedules[name] = schedule
        return self._schedules[name]


class _Native:
    """The all-reduce that the transport has of its own."""

    def __init__(self, transport: Transport, buffer: Any, op: str) -> None:
        self._reduce, self._wait = transport.native["all_reduce"], transport.wait
        self._buffer = buffer
        self._op = op

    def __call__(self, watch: Watch, buffer: Any = None) -> None:
        whole = self._buffer if buffer is None else buffer
        # MPI has no least and greatest of truth values; of the bytes that hold them it does.
        operand = whole.view(numpy.uint8) if whole.dtype.kind == "b" else whole
        self._wait([self._reduce(operand, self._op)], watch)


def _nothing(watch: Watch, buffer: Any = None) -> None:
    """One rank alone, or nothing to reduce."""
