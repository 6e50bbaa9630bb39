"""`KeptMemory`: memory of results, which are their holders', is used again when nobody refers to it any more.

Each view of memory, and each view of a view, refers to its *owner*, the array that it belongs to.  So references tell
whether memory is held: nobody has to give anything back, and what is held for ever is never written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from operator import attrgetter
from sys import getrefcount
from typing import Any

import numpy

from mpidist.arrays import aligned

#: An array's memory that was not used for so many arrays is dropped; it is looked for now and then.
_IDLE_ARRAYS = 256


class Owners:
    """Memory of `nbytes`, by its owners.  Other references of ours to them are those that `settle` counts."""

    def __init__(self, owners: Sequence[Any], nbytes: int) -> None:
        self.nbytes, self.last_use = nbytes, 0
        self.references = partial(getrefcount, *owners) if len(owners) == 1 else partial(_references, owners)
        self.idle: Any = None

    def settle(self) -> None:
        """Count the references there are while nobody else has any: after construction, whose locals hold some."""
        self.idle = self.references()

    def is_free(self) -> bool:
        """Whether nobody else refers to the memory.  Local."""
        return bool(self.references() == self.idle)


def _references(owners: Sequence[Any]) -> list[int]:
    return list(map(getrefcount, owners))


class _Bytes(Owners):
    """Memory for one array."""

    def __init__(self, nbytes: int) -> None:
        self.view = aligned(nbytes, numpy.uint8)
        super().__init__([self.view.base], nbytes)


class KeptMemory:
    """Memory that is kept for later results.  All is Local, and for one thread at a time.

    What is kept has at most `times_largest` times the bytes of the largest (of one size, so many are kept), but
    `room_bytes` in any case.  Arrays shorter than `least_bytes` are made anew each time, and begin anywhere.
    """

    def __init__(self, times_largest: int, room_bytes: int = 0, least_bytes: int = 0) -> None:
        self._times_largest, self._room_bytes, self._least_bytes = times_largest, room_bytes, least_bytes
        self._kept: list[Any] = []
        self._uses = 0

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array whose content is undefined, and which is the caller's."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < self._least_bytes:
            return numpy.empty(shape, dtype)
        self._uses += 1
        if not self._uses % _IDLE_ARRAYS:
            self._drop()
        found = self.take(nbytes) or self.keep(_Bytes(nbytes))
        found.last_use = self._uses
        return numpy.ndarray(shape, dtype, found.view)

    def take(self, nbytes: int) -> Any | None:
        """Return what is free, and neither too short nor more than twice as long, the shortest; None for nothing."""
        for each in self._kept:
            if each.nbytes == nbytes and each.references() == each.idle:  # `is_free`, in one function less
                return each
        longer = [each for each in self._kept if nbytes < each.nbytes <= 2 * nbytes and each.is_free()]
        return min(longer, key=attrgetter("nbytes"), default=None)

    def keep(self, made: Any) -> Any:
        """Return what was made, of class `Owners`; others may be dropped for it."""
        made.settle()
        self._uses += 1
        made.last_use = self._uses
        self._kept.append(made)
        self._drop()
        return made

    def free(self) -> None:
        """Keep nothing: memory goes with its holders."""
        self._kept = []

    def _drop(self) -> None:
        """Keep what was used last, and not too long ago, as far as there is room."""
        sizes = [1 + each.nbytes for each in self._kept]  # empty ones count, too
        room, kept = max(self._room_bytes, self._times_largest * max(sizes, default=0)), []
        for each in sorted(self._kept, key=attrgetter("last_use"), reverse=True):
            room -= 1 + each.nbytes
            if room >= 0 and self._uses - each.last_use < _IDLE_ARRAYS:
                kept.append(each)
        self._kept = kept
