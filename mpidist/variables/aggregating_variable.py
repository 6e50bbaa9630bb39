"""`AggregatingVariable`: a variable of which the ranks of a node share one copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from mpidist import arrays
from mpidist.collectives.call import Call
from mpidist.variables.one_copy import OneCopy
from mpidist.variables.variable import DistributedVariable


class AggregatingVariable(DistributedVariable):
    """A variable of `CentralStorageStrategy`; made by `Variable`.

    All ranks see the same array.  So every write is collective, in any context: what replicas write is aggregated, and
    then written once.  Across replicas, it is rank 0's value that is written.

    Attributes
    ----------
    one_copy : OneCopy
        Where it lies.
    """

    def __init__(self, storage: Any, *, one_copy: OneCopy, **attributes: Any) -> None:
        super().__init__(storage, **attributes)
        self.one_copy: OneCopy = one_copy
        self._calls: dict[str, Call] = {}

    def begin_with(self, value: Any) -> None:
        """Set the array to rank 0's value, whatever the context.  Collective."""
        self._change("Variable", lambda storage: numpy.copyto(storage, value), sets_all=True)

    def empty_slot(self, dtype: Any) -> Any:
        """Return a flat array of as many elements, that all ranks see too.  Collective."""
        return self.one_copy.empty((self._storage.size,), dtype, f"slot of {self.name!r}")

    def _change(self, verb: str, change: Callable[[Any], None], sets_all: bool = False) -> None:
        storage = self._to_write(sets_all)
        with self.one_copy.changes(self._call(verb), [self]):
            if self.one_copy.rank == 0:
                change(storage)
        if sets_all:
            self._torn = None

    def _call(self, verb: str) -> Call:
        if verb not in self._calls:
            self._calls[verb] = Call(verb, [(self.name, self.dtype, self.shape)])
        return self._calls[verb]

    def _of_own_dtype(self, values: Any) -> Any:
        """Return values in the variable's dtype, and in the host's memory, where it is."""
        return super()._of_own_dtype(arrays.on_host(values))

    @property
    def _is_shared(self) -> bool:
        return True
