"""Which lists a bound reduction takes: those like an example, or arrays of exact shapes that are written to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import attrgetter, eq
from typing import Any

import numpy

from mpidist import arrays
from mpidist.collectives.reductions.adjustment import Zeros
from mpidist.collectives.reductions.plan import Plan
from mpidist.collectives.ways.packed import pack
from mpidist.device.memory import DeviceMemory, kept_empty

_shape, _dtype = attrgetter("shape"), attrgetter("dtype")
_is_contiguous = attrgetter("flags.c_contiguous")


class Intake:
    """Which lists a reduction takes, and in which form; this one takes flat arrays that whoever calls has looked at.

    All methods are Local.
    """

    def takes(self, tensors: Sequence[Any]) -> bool:
        """Whether the reduction is for such tensors; ValueError where it cannot be for any like them."""
        return True

    def pack(self, tensors: Sequence[Any], slot: Any) -> bool:
        """Put tensors where all ranks see them; return whether the reduction is for such tensors."""
        slot[...] = tensors[0]
        return True

    def in_order(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return tensors that it takes as C-contiguous ones."""
        return tensors


class ListIntake(Intake):
    """Lists like the one that an all-reduce was bound for.

    No reference to the tensors is kept.  `any_strides`: they may lie in memory otherwise.  `in_memory_order`: a tensor
    may be taken in the order in which its axes lie in memory.  `is_long`: long tensors that may lie anyhow are made
    contiguous, since a span of one that is not would be found by copying all of it.  ``pack_flat(tensors, out)`` copies
    contiguous tensors into a flat array.  `sources` makes tensors contiguous ones; `kind` is an empty array of their
    kind.
    """

    def __init__(
        self,
        tensors: Sequence[Any],
        any_strides: bool,
        in_memory_order: bool,
        is_long: bool,
        pack_flat: Callable[[Sequence[Any], Any], object],
    ) -> None:
        self.sources = Sources([] if any_strides else tensors, in_memory_order)
        on_host = not (tensors and arrays.is_device(tensors[0]))
        self.kind = numpy.empty(0) if on_host else arrays.empty(0, tensors[0].dtype, tensors[0])
        self._any_strides, self._is_loose = any_strides, any_strides and is_long
        self._count = len(tensors)
        self._kinds = set(map(type, tensors))
        self._shapes, self._dtypes = list(map(_shape, tensors)), list(map(_dtype, tensors))
        self._only_dtype = set(self._dtypes) if len(set(self._dtypes)) == 1 else None
        self._pack_flat = pack_flat

    def takes(self, tensors: Sequence[Any]) -> bool:
        """Whether tensors are of the same kind, shapes and dtypes, and lie in memory alike.  Local."""
        return (
            len(tensors) == self._count
            and set(map(type, tensors)) == self._kinds
            and all(map(eq, map(_shape, tensors), self._shapes))  # makes no list of tuples: that takes twice as long
            and self._are_of_dtypes(tensors)
            and (self._any_strides or self._lie_alike(tensors))
        )

    def in_order(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the tensors as contiguous ones.  Local."""
        tensors = self.sources.in_order(tensors)
        if self._is_loose:
            tensors = [each if each.flags.c_contiguous else numpy.ascontiguousarray(each) for each in tensors]
        return tensors

    def pack(self, tensors: Sequence[Any], slot: Any) -> bool:
        """Pack the tensors; return whether they are such.  Local."""
        if not self.takes(tensors):
            return False
        self._pack_flat(self.sources.in_order(tensors), slot)
        return True

    def _are_of_dtypes(self, tensors: Sequence[Any]) -> bool:
        if self._only_dtype is not None:
            return set(map(_dtype, tensors)) == self._only_dtype
        return list(map(_dtype, tensors)) == self._dtypes

    def _lie_alike(self, tensors: Sequence[Any]) -> bool:
        if not self.sources.are_like(tensors):
            sources = Sources(tensors, self.sources.in_memory_order)
            if sources.orders != self.sources.orders:
                return False
            self.sources = sources
        return True


class OptionalIntake(Intake):
    """Lists in which any tensor may be None.

    `zeros` stands in for these; `like` takes the lists without None, and `pack_whole` packs them.
    """

    def __init__(self, zeros: Zeros, like: ListIntake, pack_whole: Callable[[Sequence[Any], Any], bool]) -> None:
        self._zeros, self._like, self._pack = zeros, like, pack_whole

    def takes(self, tensors: Sequence[Any]) -> bool:
        """Whether the tensors that are there are like those it was bound for; ValueError for another number.  Local."""
        return self._like.takes(self._zeros.filled(tensors))

    def pack(self, tensors: Sequence[Any], slot: Any) -> bool:
        """Pack the tensors, and which are there; return whether they are such.  Local."""
        return self._pack(self._zeros.counted(tensors), slot)

    def in_order(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the tensors as contiguous ones, and which are there.  Local."""
        return self._like.in_order(self._zeros.counted(tensors))


class InPlaceIntake(Intake):
    """Lists of C-contiguous arrays of exact shapes and dtypes, which are written to.

    With `are_apart` each must lie in memory of its own: else results are written while other values are still to be
    read, and what arrays share is reduced twice.
    """

    def __init__(self, what: str, plan: Plan, memory: DeviceMemory | None, are_apart: bool) -> None:
        self._what, self._memory, self._are_apart = what, memory, are_apart
        self._shapes = [shape for _, _, shape in plan.signatures]
        self._dtypes = [dtype for _, dtype, _ in plan.signatures]

    def takes(self, tensors: Sequence[Any]) -> bool:
        """Return True; ValueError unless these are such arrays.  Local."""
        if list(map(_shape, tensors)) != self._shapes or list(map(_dtype, tensors)) != self._dtypes:
            raise ValueError(f"{self._what} was bound to other arrays: {self._difference(tensors)}; bind another one")
        if not all(map(_is_contiguous, tensors)):
            raise ValueError(f"{self._what} is for C-contiguous arrays; pass copies of those that are not")
        if not all(getattr(each.flags, "writeable", True) for each in tensors):  # those on devices have no such flag
            raise ValueError(f"{self._what} writes results in place of values; got an array that is read-only")
        if self._are_apart and len(tensors) > 1:
            self._check_apart(self._spans(tensors))
        return True

    def pack(self, tensors: Sequence[Any], slot: Any) -> bool:
        """Pack such arrays; errors as `takes`.  Local."""
        self.takes(tensors)
        pack(tensors, slot)
        return True

    def _difference(self, tensors: Sequence[Any]) -> str:
        """Return how many arrays there are, if that is what differs, else the first of them that does."""
        if len(tensors) != len(self._shapes):
            return f"expected {len(self._shapes)} arrays, got {len(tensors)}"
        pairs = zip(self._dtypes, self._shapes, tensors, strict=True)
        expected = [(f"{dtype}{list(shape)}", f"{each.dtype}{list(each.shape)}") for dtype, shape, each in pairs]
        at, (own, got) = next((at, pair) for at, pair in enumerate(expected) if pair[0] != pair[1])
        return f"expected {own} as number {at}, got {got}"

    def _spans(self, tensors: Sequence[Any]) -> Iterable[tuple[int, int]]:
        if self._memory is not None:
            return self._memory.spans(tensors)
        return ((each.__array_interface__["data"][0], each.nbytes) for each in tensors)

    def _check_apart(self, spans: Iterable[tuple[int, int]]) -> None:
        """Raise ValueError where arrays with these addresses and bytes share memory, which would be reduced twice."""
        places = sorted(span for span in spans if span[1])
        if any(start + nbytes > after for (start, nbytes), (after, _) in pairwise(places)):
            raise ValueError(f"{self._what} got arrays that share memory; pass each of them once, or copies")


_strides = attrgetter("strides")


class Sources:
    """How tensors of some shapes and strides are made contiguous ones, once a list.

    A transposed tensor is taken in the order of memory, which costs nothing.  A tensor with gaps is copied.  No
    reference to the tensors is kept.  Where ranks differ in the order of memory, `in_memory_order` is False: all are
    taken in the order of their axes.  `orders` has the order in memory where it is not the usual one.
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
                self._copies.append((position, kept_empty(tensor.shape, tensor.dtype, tensor)))

    def are_like(self, tensors: Sequence[Any]) -> bool:
        """Whether tensors of the same shapes lie in memory in the same way."""
        return all(map(eq, map(_strides, tensors), self._strides))

    def in_order(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the tensors as C-contiguous ones, those that need no copy as views."""
        if not self.orders and not self._copies:
            return tensors
        ordered = list(tensors)
        for position, order in self.orders.items():
            ordered[position] = ordered[position].transpose(order)
        for position, copy in self._copies:
            copy[...] = ordered[position]
            ordered[position] = copy
        return ordered
