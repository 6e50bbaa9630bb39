"""Memory of results that are their holders': long ones are used again when nobody refers to them any more."""

from __future__ import annotations

from math import prod
from sys import getrefcount
from typing import Any

import numpy

#: Shorter results are made anew each time: no page of them has to be mapped.
LEAST_BYTES = 1 << 17

#: Together what is kept has no more bytes than this, or than three times the longest piece.
_KEPT_BYTES = 1 << 26

#: A piece that was not used for so many results is dropped.
_IDLE_RESULTS = 256

#: References to an array in a list that nobody else refers to, as they are counted here.
_UNUSED = next(map(getrefcount, [object()]))


class OwnResults:
    """Hands out arrays that are the callers'.  A piece of memory is used again when no view of it is left."""

    def __init__(self) -> None:
        self._owners: list[Any] = []
        self._used: list[int] = []
        self._count = 0

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array whose content is undefined.  Local."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < LEAST_BYTES:
            return numpy.empty(shape, dtype)
        self._count += 1
        at = self._free(nbytes)
        if at is None:
            self._owners.append(numpy.empty(nbytes, numpy.uint8))
            self._used.append(0)
            at = len(self._owners) - 1
        self._used[at] = self._count
        found = self._owners[at][:nbytes].view(dtype).reshape(shape)
        self._drop()
        return found

    def _free(self, nbytes: int) -> int | None:
        """Return which piece is free and neither too short nor more than twice as long, the shortest of them."""
        counts = list(map(getrefcount, self._owners))  # before a loop refers to any of them
        fitting = [
            (self._owners[at].size, at)
            for at, count in enumerate(counts)
            if count == _UNUSED and nbytes <= self._owners[at].size <= 2 * nbytes
        ]
        return min(fitting)[1] if fitting else None

    def _drop(self) -> None:
        """Keep no more than is allowed: those that were used last."""
        latest = sorted(range(len(self._owners)), key=lambda at: -self._used[at])
        limit, kept, total = max(_KEPT_BYTES, 3 * max(owner.size for owner in self._owners)), [], 0
        for at in latest:
            total += self._owners[at].size
            if total <= limit and self._count - self._used[at] < _IDLE_RESULTS:
                kept.append(at)
        if len(kept) < len(latest):
            self._owners = [self._owners[at] for at in kept]
            self._used = [self._used[at] for at in kept]
