"""The beginning of every collective call: a rank numbers it, and compares it with the calls of the other ranks."""

from __future__ import annotations

import json
from contextlib import suppress

import numpy

from mpidist.collectives.call import Call
from mpidist.collectives.header import Header
from mpidist.collectives.mismatch import mismatch_error
from mpidist.errors import RankFailedError
from mpidist.runtime.control import Watch
from mpidist.runtime.missed_calls import MISSED, summary
from mpidist.transports import World
from mpidist.transports.base import Transport


class CallCheck:
    """Numbers and compares the calls of one rank of a world.

    `transport` is that of the world, with what observes it; `header` compares the calls of several nodes whose ranks
    share memory.
    """

    def __init__(self, world: World, transport: Transport, header: Header | None) -> None:
        self._transport = transport
        self._control = world.control
        self._rank = world.transport.rank
        self._between = header
        self._header = numpy.zeros(2, dtype=numpy.uint64)

    def begin(self, call: Call, timeout_seconds: float | None = None) -> Watch:
        """Number a call, and make sure that all ranks make the same one.

        Collective: every rank calls it in the same order, inside the turnstile of the control channel.
        CollectiveMismatchError, on all ranks, names the ranks that differ, the tensor, and both shapes.
        RemoteReplicaError: the function given to `run` raised on another rank, which therefore does not make this call.
        """
        control = self._control
        watch = control.begin(call.what, call.digest, timeout_seconds)
        same = control.meet(watch) if control.arbiter is None else self._same_header(call.digest, watch)
        if not same:
            if control.arbiter is not None and int(self._header[0]) == MISSED:
                raise control.missed.await_error(watch)
            self._raise_mismatch(call, watch)
        return watch

    def miss(self, error: BaseException) -> None:
        """Make no call of the next number, because the function given to `run` raised `error` on this rank.

        Local: this rank goes on.  The others raise RemoteReplicaError in that call.
        """
        if self._transport.size > 1 and self._control.broken is None:
            self._control.missed.miss(summary(error), lambda watch: self._same_header(MISSED, watch))

    def _same_header(self, digest: int, watch: Watch) -> bool:
        """Compare digests by one small all-reduce: the least d and the least of all ~d are complements if all agree."""
        header = self._header
        if self._between is not None:
            header[:] = self._between.least(watch)
        else:
            header[:] = digest, digest ^ 0xFFFFFFFFFFFFFFFF
            self._transport.wait([self._transport.native["all_reduce"](header, "min")], watch)
        return int(header[0]) ^ int(header[1]) == 0xFFFFFFFFFFFFFFFF

    def _raise_mismatch(self, call: Call, watch: Watch) -> None:
        answers = self._transport.exchange(json.dumps(call.description).encode(), watch)
        with suppress(RankFailedError):  # who has raised already has also come here
            self._transport.exchange(b"", watch)  # nobody raises, and so fails, while others wait for the answers
        raise mismatch_error([json.loads(raw) for raw in answers], watch.call, self._rank)
