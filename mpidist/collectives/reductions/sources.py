"""A caller's tensors as they lie in memory: gradients are often transposed views."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, eq
from typing import Any

from mpidist import arrays

_strides = attrgetter("strides")


class Sources:
    """How tensors of some shapes and strides are made contiguous ones, once a list.

    A transposed tensor is taken in the order of memory, which costs nothing.  A tensor with gaps is copied.

    Parameters
    ----------
    tensors : sequence of array
        No reference to them is kept.
    in_memory_order : bool
        False where ranks differ in the order: then all are taken in the order of their axes.

    Attributes
    ----------
    orders : dict of int to tuple of int
        The order of axes in memory, for tensors where it is not the usual one.
    in_memory_order : bool
    """

    def __init__(self, tensors: Sequence[Any], in_memory_order: bool = True) -> None:
        self.in_memory_order = in_memory_order
        self._strides = list(map(_strides, tensors))
        self.orders: dict[int, tuple[int, ...]] = {}
        self._copies: list[tuple[int, Any]] = []
        for position, tensor in enumerate(tensors):
            if tensor.flags.c_contiguous:
                continue
            order = tuple(sorted(range(tensor.ndim), key=lambda axis: -tensor.strides[axis]))
            if in_memory_order and tensor.transpose(order).flags.c_contiguous:
                self.orders[position] = order
            else:
                self._copies.append((position, arrays.empty(tensor.shape, tensor.dtype, tensor)))

    def are_like(self, tensors: Sequence[Any]) -> bool:
        """Whether tensors of the same shapes lie in memory in the same way."""
        return all(map(eq, map(_strides, tensors), self._strides))

    def in_order(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the tensors as C-contiguous ones, those that need no copy as views."""
        if not self.orders and not self._copies:
            return tensors
        found = list(tensors)
        for position, order in self.orders.items():
            found[position] = found[position].transpose(order)
        for position, copy in self._copies:
            copy[...] = found[position]
            found[position] = copy
        return found
