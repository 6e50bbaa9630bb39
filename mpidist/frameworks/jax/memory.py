"""Memory that JAX takes over without a copy: nobody writes it again while JAX, or anybody else, refers to it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy

#: What JAX needs for taking host memory over as it is.
_ALIGNMENT = 64

#: Pieces of memory that are kept: one is mostly let go when the next is taken.
_KEPT = 2


class ResultMemory:
    """Arrays of fixed shapes and dtypes, each at an aligned place of one piece of memory.

    Parameters
    ----------
    signatures : sequence of (dtype, shape)
    """

    def __init__(self, signatures: Sequence[tuple[Any, tuple[int, ...]]]) -> None:
        self._places: list[tuple[int, int, Any, tuple[int, ...]]] = []
        end = 0
        for dtype, shape in signatures:
            nbytes = numpy.dtype(dtype).itemsize * int(numpy.prod(shape, dtype=int))
            self._places.append((end, end + nbytes, numpy.dtype(dtype), tuple(shape)))
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._nbytes = end
        self._kept: list[_ResultPiece] = []

    def take(self) -> list[Any]:
        """Return arrays with anything in them, which are the caller's, and to which nobody else refers.  Local."""
        whole = self.whole()
        return self.cut(whole)

    def whole(self) -> Any:
        """Return the piece of memory of new arrays, as bytes.  Local."""
        return self._free().take()

    def cut(self, whole: Any) -> list[Any]:
        """Return the arrays in a piece of memory.  Local."""
        return [whole[first:last].view(dtype).reshape(shape) for first, last, dtype, shape in self._places]

    def _free(self) -> _ResultPiece:
        for piece in self._kept:
            if piece.is_free():
                return piece
        self._kept = [*self._kept, _ResultPiece(self._nbytes)][-_KEPT:]
        return self._kept[-1]


class _ResultPiece:
    """Memory that knows whether anybody refers to the array made of it last.

    What lies behind the array is no array, so all views of it have the array itself as their base.
    """

    def __init__(self, nbytes: int) -> None:
        self._bytes = bytearray(nbytes + _ALIGNMENT)
        self._start = -numpy.frombuffer(self._bytes, numpy.uint8).ctypes.data % _ALIGNMENT
        self._nbytes = nbytes
        self._taken: Any = None

    def is_free(self) -> bool:
        return self._taken() is None

    def take(self) -> Any:
        array: Any = numpy.ndarray(self._nbytes, numpy.uint8, self._bytes, self._start)
        self._taken = weakref.ref(array)
        return array
