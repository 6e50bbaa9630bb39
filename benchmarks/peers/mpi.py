"""MPI itself as a peer, by mpi4py: the ways in which people reduce a list of gradients with it."""

from __future__ import annotations

from typing import Any

import numpy

from benchmarks.suite.contender import Contender
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.tensors import TensorList


class AllreduceEach(Contender):
    """One blocking ``Allreduce`` for each tensor, into arrays that exist."""

    name = "Allreduce each"

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        self._out = ranks.existing(tensors)

    def run(self, prepared: Any) -> Any:
        all_reduce = self.ranks.comm.Allreduce
        for source, target in zip(prepared, self._out, strict=True):
            all_reduce(source, target)
        return self._out


class AllreducePacked(Contender):
    """Pack into one buffer, one ``Allreduce``, unpack into arrays that exist."""

    name = "Allreduce packed"

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        self._out = ranks.existing(tensors)
        self._packed, self._reduced = ranks.packed(tensors)
        self._parts = tensors.cut(self._reduced)

    def run(self, prepared: Any) -> Any:
        numpy.concatenate(prepared, axis=None, out=self._packed)
        self.reduce()
        for target, part in zip(self._out, self._parts, strict=True):
            target[...] = part
        return self._out

    def reduce(self) -> None:
        """Reduce what is packed."""
        self.ranks.comm.Allreduce(self._packed, self._reduced)


class IallreducePacked(AllreducePacked):
    """The same with ``Iallreduce`` and a loop of ``Test``."""

    name = "Iallreduce packed"

    def reduce(self) -> None:
        request = self.ranks.comm.Iallreduce(self._packed, self._reduced)
        while not request.Test():
            pass


class Iallreduce(Contender):
    """One non-blocking ``Iallreduce`` of one array, into an array that exists, and a loop of ``Test``."""

    name = "Iallreduce"

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        (self._out,) = ranks.existing(tensors)

    def run(self, prepared: Any) -> Any:
        request = self.ranks.comm.Iallreduce(prepared[0], self._out)
        while not request.Test():
            pass
        return [self._out]


class Allreduce(Iallreduce):
    """One blocking ``Allreduce`` of one array, into an array that exists."""

    name = "Allreduce"

    def run(self, prepared: Any) -> Any:
        self.ranks.comm.Allreduce(prepared[0], self._out)
        return [self._out]
