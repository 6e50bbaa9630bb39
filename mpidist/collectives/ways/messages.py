"""All-reduces over messages: MPI's own, or a schedule that is played on a packed buffer."""

from __future__ import annotations

from typing import Any

import numpy

from mpidist import arrays
from mpidist.cluster.topology import Topology
from mpidist.collectives.ways import selection
from mpidist.collectives.ways.executor import SEGMENT_BYTES, Executor
from mpidist.collectives.ways.packed import Replay
from mpidist.collectives.ways.scratch import Scratch
from mpidist.runtime.control import Watch
from mpidist.schedules.rounds import Schedule
from mpidist.schedules.table import algorithm, hierarchical
from mpidist.transports.base import Transport

#: MPI's own all-reduce is given this many bytes at a time, and this many such pieces together.
_PIECE_BYTES, _PIECES = 1 << 20, 16


class Messages:
    """The all-reduces of a transport.  What is bound shares `scratch`, so it runs inside the turnstile only."""

    def __init__(self, transport: Transport, topology: Topology, scratch: Scratch) -> None:
        self._transport = transport
        self._topology = topology
        self._schedules: dict[str, Schedule] = {}
        self._scratch = scratch

    def bind(self, elements: int, dtype: numpy.dtype, kind: Any, op: str, chosen: str) -> Replay:
        """Return what reduces flat buffers in place; Local.

        `dtype` is one that is added as such, `kind` an empty array of the kind that is reduced.  `chosen` is
        ``"native"``, ``"none"``, or the name of a schedule; floats whose least or greatest is wanted never take MPI's
        own, which loses NaN.
        """
        if chosen == "none":
            return _nothing
        # MPI libraries compare, and every comparison with NaN is false
        if chosen == "native" and op in ("min", "max") and dtype.kind == "f":
            chosen = selection.instead_of_native(elements * dtype.itemsize)
        if chosen == "native":
            return Native(self._transport, self._scratch, op)
        like = arrays.empty(elements, dtype, kind)
        scratch = (
            None if arrays.is_device(kind) else self._scratch.array((2 * SEGMENT_BYTES,), numpy.dtype(numpy.uint8))
        )
        executor = Executor(self._schedule(chosen), self._transport, like, op, scratch=scratch)
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


class Native:
    """The all-reduce that the transport has of its own.

    MPI takes half the time where values and results lie apart, and less where long buffers come in pieces.
    """

    def __init__(self, transport: Transport, scratch: Scratch, op: str) -> None:
        self._reduce, self._wait = transport.native["all_reduce"], transport.wait
        self._scratch = scratch
        self._op = op

    def __call__(self, watch: Watch, buffer: Any, source: Any = None) -> None:
        whole = buffer
        if whole.dtype.kind == "b":  # MPI has no least and greatest of truth values, but of the bytes that hold them
            whole, source = whole.view(numpy.uint8), None if source is None else source.view(numpy.uint8)
        if whole.nbytes <= _PIECE_BYTES:
            self._wait([self._reduce(whole, self._op, source)], watch)
            return
        step = _PIECE_BYTES // whole.itemsize
        for start in range(0, whole.size, _PIECES * step):
            part = whole[start : start + _PIECES * step]
            values = self._copied(part) if source is None else source[start : start + _PIECES * step]
            pieces = [slice(first, first + step) for first in range(0, part.size, step)]
            self._wait([self._reduce(part[piece], self._op, values[piece]) for piece in pieces], watch)

    def _copied(self, part: Any) -> Any:
        copy = self._scratch.array(part.shape, part.dtype)
        copy[...] = part
        return copy


def _nothing(watch: Watch, buffer: Any) -> None:
    """Return: there is but one rank, or nothing to reduce."""
