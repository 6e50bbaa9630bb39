"""What takes part in a benchmark: the interface, and mpidist's own contenders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

import mpidist
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.tensors import TensorList


class Contender:
    """Something that reduces lists of tensors over all ranks.

    Parameters
    ----------
    ranks : Ranks
    tensors : TensorList
        What is going to be reduced; a contender may make memory of its own for it here.

    Attributes
    ----------
    name : str
        In tables.
    kind : str
        ``"ours"``, ``"peer"``, or ``"reference"`` for what is no reduction.
    is_reduction : bool
        Whether results are sums over the ranks, which are then checked.
    warm_ups, needed_warm_ups : int
        How many steps it makes before any is timed; and how many if its steps are long.
    """

    name = ""
    kind = "peer"
    is_reduction = True
    warm_ups = 3
    needed_warm_ups = 2

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        self.ranks = ranks
        self.tensors = tensors

    def prepare(self, gradients: list[Any]) -> Any:
        """Return what `run` takes.  Not timed: it stands for a framework whose gradients are born in that form."""
        return gradients

    def run(self, prepared: Any) -> Any:
        """Reduce once and return the result.  Timed.  Collective."""
        raise NotImplementedError

    def run_all(self, batch: Sequence[Any]) -> Any:
        """Reduce several times, keeping each result until the next is there; return the last.  Timed.  Collective."""
        result = None
        for prepared in batch:
            result = self.run(prepared)
        return result

    def arrays(self, result: Any) -> list[Any]:
        """Return a result as NumPy arrays, one for each tensor."""
        return list(result)

    def wrong(self, result: Any, step: int) -> int | None:
        """Return how many elements of a step's result are not what they should be, None if that is not defined."""
        return self.tensors.wrong(self.arrays(result), step) if self.is_reduction else None

    def close(self) -> None:
        """Give back what was taken.  Collective."""


class Ours(Contender):
    """The public call: ``all_reduce`` of the replica context, inside ``strategy.run``, which is timed too."""

    name = "mpidist"
    kind = "ours"
    warm_ups = needed_warm_ups = 30  # older versions, in `benchmarks.pairs`, try ways in their first steps

    def run(self, prepared: Any) -> Any:
        return mpidist.get_replica_context().all_reduce("SUM", prepared)

    def run_all(self, batch: Sequence[Any]) -> Any:
        return self.ranks.strategy.run(super().run_all, args=(batch,))


class OursOneArray(Ours):
    """The public call with a single array in place of a list."""

    def prepare(self, gradients: list[Any]) -> Any:
        return gradients[0]

    def arrays(self, result: Any) -> list[Any]:
        return [result]


class OursInBuffers(Ours):
    """The public call on gradients that were written into memory which all ranks of the node see."""

    name = "mpidist, in buffers"

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        with ranks.strategy.scope():
            zeros = [numpy.zeros(shape, tensors.dtype) for shape in tensors.shapes]
            self._variables = [mpidist.Variable(each) for each in zeros]
        self._buffers = ranks.strategy.extended.gradient_buffers(self._variables)

    @staticmethod
    def is_there(ranks: Ranks) -> bool:
        """Return whether this version of mpidist hands out such buffers."""
        return hasattr(ranks.strategy.extended, "gradient_buffers")

    def prepare(self, gradients: list[Any]) -> Any:
        for buffer, gradient in zip(self._buffers, gradients, strict=True):
            buffer[...] = gradient
        return self._buffers


class OursByAlgorithm(Contender):
    """One algorithm on one array, in place, by the call below the public one."""

    kind = "ours"

    def __init__(self, ranks: Ranks, tensors: TensorList, algorithm: str) -> None:
        super().__init__(ranks, tensors)
        self.name = self._algorithm = algorithm
        # one that refuses this size or these nodes does so now, on all ranks, and is left out
        ranks.communicator.all_reduce(numpy.zeros(tensors.elements, tensors.dtype), algorithm=algorithm)

    def prepare(self, gradients: list[Any]) -> Any:
        return gradients[0]

    def run(self, prepared: Any) -> Any:
        self.ranks.communicator.all_reduce(prepared, algorithm=self._algorithm)
        return prepared

    def arrays(self, result: Any) -> list[Any]:
        return [result]


class Copy(Contender):
    """A plain copy of the list into arrays that exist: what a reduction cannot be quicker than."""

    name = "copy"
    kind = "reference"
    is_reduction = False

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        self._out = ranks.existing(tensors)

    def run(self, prepared: Any) -> Any:
        for target, source in zip(self._out, prepared, strict=True):
            target[...] = source
        return self._out
