"""Many short tensors that differ in the length of their first axis at most: packed and checked at one go.

Whether each of a thousand new tensors has the shape and dtype that a plan was made for takes as long to ask as to copy
them.  NumPy asks most of it itself, when it joins them along the first axis; and a memoryview asks all of it, in less
time, before it lets a buffer be copied into it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import setitem
from typing import Any, cast

import numpy

#: ``pack(tensors)`` copies tensors to where it puts them every time, and returns whether they are such tensors.
Pack = Callable[[Sequence[Any]], bool]

#: Kinds of dtypes that memoryviews copy: what NumPy has and Python too.
_KINDS = "biuf"

_ALL, _set = slice(None), cast(Callable[[Any, Any, Any], None], setitem)


class Rows:
    """What lists of such tensors have in common.

    Parameters
    ----------
    lengths : sequence of int
        Of the tensors' first axes.
    others : tuple of int
        The lengths of their other axes.
    """

    def __init__(self, lengths: Sequence[int], others: tuple[int, ...]) -> None:
        self._lengths = list(lengths)
        self._shape = (sum(lengths), *others)

    @classmethod
    def of(cls, tensors: Sequence[Any], dtype: Any) -> Rows | None:
        """Return what these have in common; None unless all are of `dtype`, and of one shape but for the first axis."""
        return None if {tensor.dtype for tensor in tensors} != {dtype} else cls.like([each.shape for each in tensors])

    @classmethod
    def like(cls, shapes: Sequence[tuple[int, ...]]) -> Rows | None:
        """Return what tensors of these shapes have in common; None unless they are alike but for the first axis."""
        shape = shapes[0]
        if not shape or any(each[1:] != shape[1:] or not each for each in shapes):
            return None
        return cls([each[0] for each in shapes], shape[1:])

    def pack(self, tensors: Sequence[Any], out: Any) -> bool:
        """Copy the tensors, one after the other in C order, into the flat `out`, which has their dtype.

        Local.  Return whether they are such tensors: if not, what is in `out` is nothing.
        """
        try:
            numpy.concatenate(tensors, out=out.reshape(self._shape), casting="no")
        except (TypeError, ValueError):  # another dtype, other axes, another length in all, or no arrays
            return False
        return list(map(len, tensors)) == self._lengths

    def _pack_arrays(self, tensors: Sequence[Any], out: Any) -> bool:
        return set(map(type, tensors)) == {numpy.ndarray} and self.pack(tensors, out)

    def into(self, out: Any) -> Pack:
        """Return what does as `pack` for this `out`, again and again, and takes arrays only.  Local.

        Where tensors have one axis, a buffer of a tensor's length and dtype is as good as an array.
        """
        if len(self._shape) > 1 or out.dtype.kind not in _KINDS:
            return partial(self._pack_arrays, out=out)
        stops = numpy.cumsum(self._lengths).tolist()
        places = [memoryview(out[stop - length : stop]) for stop, length in zip(stops, self._lengths, strict=True)]
        return partial(_put, places)


def _put(places: Sequence[memoryview], tensors: Sequence[Any]) -> bool:
    """Copy each tensor to its place; return whether there is one for each, of its length and dtype."""
    try:
        deque(map(_set, places, repeat(_ALL), tensors), maxlen=0)
    except (TypeError, ValueError, BufferError):
        return False
    return len(tensors) == len(places)
