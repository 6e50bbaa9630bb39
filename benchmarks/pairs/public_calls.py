"""Broadcast, all-gather and reduce by mpidist's public calls, and by MPI."""

from __future__ import annotations

from typing import Any

import numpy

from benchmarks.suite.collectives import AllGather, Broadcast, Collective, MpiAllGather, MpiBroadcast
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.tensors import PERIOD, TensorList


class PublicBroadcast(Broadcast):
    """``broadcast_to`` of the strategy's extension."""

    def run(self, prepared: Any) -> Any:
        return self.ranks.strategy.extended.broadcast_to(prepared, prepared)


class Reduce(Collective):
    """``reduce`` of the strategy: every rank gets the sum."""

    work = "reduce"

    def run(self, prepared: Any) -> Any:
        return self.ranks.strategy.reduce("SUM", prepared, axis=None)

    def expected(self, step: int) -> Any:
        return self.tensors.sums(step, numpy.arange(self.tensors.elements) % PERIOD)


class MpiReduce(Reduce):
    """The same by ``Allreduce``, into an array that exists."""

    name, kind = "Allreduce", "peer"

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        (self._out,) = ranks.existing(tensors)

    def run(self, prepared: Any) -> Any:
        self.ranks.comm.Allreduce(prepared, self._out)
        return self._out


#: Ours and MPI's.
CALLS: tuple[tuple[type[Collective], type[Collective]], ...] = (
    (PublicBroadcast, MpiBroadcast),
    (AllGather, MpiAllGather),
    (Reduce, MpiReduce),
)
