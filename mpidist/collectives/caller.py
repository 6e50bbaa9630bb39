"""What every collective call begins with: it is numbered, and compared with those of the other ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy

from mpidist import arrays
from mpidist.collectives.call import Call
from mpidist.collectives.header import Header
from mpidist.collectives.mismatch import mismatch_error
from mpidist.errors import RankFailedError
from mpidist.runtime.control import Watch
from mpidist.runtime.missed_calls import MISSED, summary
from mpidist.transports import World


class Caller:
    """Who makes collective calls: one rank of a world.

    Parameters
    ----------
    world : World
    header : Header, optional
        Compares the calls of several nodes whose ranks share memory.

    Attributes
    ----------
    rank, size : int
    topology : Topology
    control : ControlChannel
    transport : Transport
    """

    def __init__(self, world: World, header: Header | None = None) -> None:
        self.transport = world.transport
        self.topology = world.topology
        self.control = world.control
        self.rank = world.transport.rank
        self.size = world.transport.size
        self._between = header
        self._header = numpy.zeros(2, dtype=numpy.uint64)

    def check(self, call: Call, timeout_seconds: float | None = None) -> None:
        """Make sure that all ranks are at the same place and describe it alike.

        Collective: every rank calls it in the same order.  Errors as for `begin`.
        """
        with self.control.turnstile:
            self.begin(call, timeout_seconds)

    def begin(self, call: Call, timeout_seconds: float | None = None) -> Watch:
        """Number a call, and make sure that all ranks make the same one.

        Collective: every rank calls it in the same order, inside the turnstile of the control channel.

        Raises
        ------
        CollectiveMismatchError
            On all ranks: names the ranks that differ, the tensor, and both shapes.
        RemoteReplicaError
            The function given to `run` raised on another rank, which therefore does not make this call.
        TransportTimeoutError, RankFailedError
            A rank did not come, and why as far as it is known.
        """
        watch = self.control.begin(call.what, call.digest, timeout_seconds)
        same = self.control.meet(watch) if self.control.arbiter is None else self._same_header(call.digest, watch)
        if not same:
            if self.control.arbiter is not None and int(self._header[0]) == MISSED:
                raise self.control.missed.await_error(watch)
            self._raise_mismatch(call, watch)
        return watch

    def miss(self, error: BaseException) -> None:
        """Make no call of the next number, because the function given to `run` raised `error` on this rank.

        Local: this rank goes on.  The others raise RemoteReplicaError in that call.
        """
        if self.size > 1 and self.control.broken is None:
            self.control.missed.miss(summary(error), lambda watch: self._same_header(MISSED, watch))

    def _same_header(self, digest: int, watch: Watch) -> bool:
        """Compare digests by one small all-reduce: the least d and the least of all ~d are complements if all agree."""
        header = self._header
        if self._between is not None:
            header[:] = self._between.least(watch)
        else:
            header[:] = digest, digest ^ 0xFFFFFFFFFFFFFFFF
            self.transport.wait([self.transport.native["all_reduce"](header, "min")], watch)
        return int(header[0]) ^ int(header[1]) == 0xFFFFFFFFFFFFFFFF

    def _raise_mismatch(self, call: Call, watch: Watch) -> None:
        answers = self.transport.exchange(json.dumps(call.description).encode(), watch)
        with suppress(RankFailedError):  # who has raised already has also come here
            self.transport.exchange(b"", watch)  # nobody raises, and so fails, while others wait for the answers
        raise mismatch_error([json.loads(raw) for raw in answers], watch.call, self.rank)

    def call(
        self,
        name: str,
        tensors: Sequence[tuple[str, Any, Sequence[int]]] = (),
        packs: Sequence[tuple[str, int]] = (),
    ) -> Call:
        """Return what stands for a call of that name; parameters as for `Call`.  Local."""
        return Call(name, tensors, packs)

    def barrier(self, what: str = "barrier", timeout_seconds: float | None = None) -> None:
        """Return when all ranks have come here.

        Collective: every rank calls it in the same order.
        """
        self.check(self.call(what), timeout_seconds)

    def exchange(self, payload: bytes, what: str = "exchange", timeout_seconds: float | None = None) -> list[bytes]:
        """Return the small byte string that every rank gave, in rank order; for agreement, not for data.

        Collective: every rank calls it in the same order.
        """
        with self.control.turnstile:
            watch = self.begin(self.call(what), timeout_seconds)
            return [payload] if self.size == 1 else self.transport.exchange(payload, watch)

    def _plain(self, array: Any, op: str | None = None) -> Any:
        """Return an array as `arrays.plain` does; raise, before any communication, if it cannot be moved or reduced.

        Raises
        ------
        TypeError, UnsupportedDtypeError
        ValueError
            There is no reduction `op`.
        """
        array = arrays.plain(array)
        if op is not None:
            arrays.check_reducible(array.dtype, op)
        arrays.check_movable(array.dtype)
        if self.size > 1:
            arrays.check_memory(array, self.transport.memory, self.transport.name)
        return array
