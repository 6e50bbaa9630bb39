"""`SplitVariable`: a variable of which each logical device of a replica holds a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from mpidist import arrays
from mpidist.variables.partition import part_of
from mpidist.variables.variable import DistributedVariable


class SplitVariable(DistributedVariable):
    """A variable cut into equal parts, one for each logical device of a replica; made by `Variable`.

    `value`, `shape` and the `assign` methods are those of this rank's part; replicas hold copies of it.

    Attributes
    ----------
    partition_dimensions : tuple of int
        How many parts each axis is cut into.
    whole_shape : tuple of int
        The shape of all parts together.
    """

    def __init__(self, whole: DistributedVariable, partition_dimensions: Sequence[int], strategy: Any) -> None:
        self.partition_dimensions = tuple(int(count) for count in partition_dimensions)
        self.whole_shape = whole.shape
        self.strategy = strategy
        super().__init__(
            self.own_part(whole.live).copy(),
            strategy=strategy,
            name=whole.name,
            trainable=whole.trainable,
            synchronization=whole.synchronization,
            aggregation=whole.aggregation,
        )

    @property
    def saved_shape(self) -> tuple[int, ...]:
        """The shape of all parts together: a checkpoint holds the variable whole."""
        return self.whole_shape

    def own_part(self, whole: Any) -> Any:
        """Return this rank's part of an array of `whole_shape`.  Local."""
        return part_of(whole, self.partition_dimensions, self.strategy.extended.logical_device)

    def joined(self, part: Any) -> Any:
        """Return the parts of an array that all logical devices have, put together, as a new array.  Collective."""
        flat = self.strategy.extended.group.all_gather(part.reshape(1, -1))
        whole = numpy.empty(self.whole_shape, part.dtype, like=part)
        for index, values in enumerate(flat):
            part_of(whole, self.partition_dimensions, index)[...] = values.reshape(part.shape)
        return whole

    def _cut_alike(self, whole: DistributedVariable) -> DistributedVariable:
        return self.strategy.extended.split(whole, self.partition_dimensions)

    def whole(self) -> numpy.ndarray:
        """Return the value of the whole variable, as a new array.  Collective."""
        return self.joined(self.value)


def sums_over_parts(variables: Sequence[DistributedVariable], numbers: Sequence[float]) -> list[float]:
    """Return one number for each variable: for a split variable the sum over the ranks that hold its parts.

    Collective where a variable is split, with the same variables on every rank; all ranks of a replica get the same
    bits.  Local otherwise.
    """
    split = [place for place, variable in enumerate(variables) if isinstance(variable, SplitVariable)]
    sums_of_all = list(numbers)
    if split:
        sums = numpy.array([float(arrays.number(numbers[place])) for place in split])
        variables[split[0]].strategy.extended.group.all_reduce(sums)
        for place, total in zip(split, sums.tolist(), strict=True):
            sums_of_all[place] = total
    return sums_of_all
