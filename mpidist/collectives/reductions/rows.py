"""Many short tensors that differ in the length of their first axis at most: packed and checked at one go.

Whether each of a thousand new tensors has the shape and dtype that a plan was made for takes as long to ask as to copy
them.  NumPy asks most of it itself, when it joins them along the first axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy


class Rows:
    """What lists of such tensors have in common.

    `lengths` are those of their first axes, `others` those of the other axes.
    """

    def __init__(self, lengths: Sequence[int], others: tuple[int, ...]) -> None:
        self._lengths = list(lengths)
        self._kinds = [numpy.ndarray] * len(self._lengths)  # to compare lists is quicker than to make a set
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
            # before anything is copied, which would push what tensors say of themselves out of the cache
            if list(map(len, tensors)) != self._lengths:
                return False
            numpy.concatenate(tensors, out=out.reshape(self._shape), casting="no")
        except (TypeError, ValueError):  # another dtype, other axes, or no arrays
            return False
        return True

    def pack_arrays(self, tensors: Sequence[Any], out: Any) -> bool:
        """Do as `pack`, for NumPy's own arrays only: a subclass may mean something else by joining, and a list too."""
        return list(map(type, tensors)) == self._kinds and self.pack(tensors, out)
