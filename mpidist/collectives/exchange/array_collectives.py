"""The collectives of one array: which bound object is the one for an array, and on what it is bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from mpidist import arrays
from mpidist.collectives.exchange.all_to_all import AllToAll, NodeAllToAll
from mpidist.collectives.exchange.array_bound import ArrayBound
from mpidist.collectives.exchange.broadcasts import bind_broadcast
from mpidist.collectives.exchange.gathers import bind_gather
from mpidist.collectives.exchange.outbox import Outbox
from mpidist.collectives.exchange.own_results import OwnResults
from mpidist.collectives.exchange.plain import check_contiguous, checked_axis
from mpidist.collectives.exchange.reduce_scatters import bind_reduce_scatter
from mpidist.collectives.ranks import Ranks
from mpidist.collectives.ways.device_ways import StagedArray


class ArrayCollectives:
    """Binds the collectives of one array for some ranks, or calls what was bound for one like it.

    All methods raise before any communication what is wrong with an array; those that bind are Local.

    Parameters
    ----------
    ranks : Ranks
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._results = OwnResults()
        self._bindings = ranks.bindings
        segments = ranks.segments
        self._segments = segments
        #: For what shows each other rank a part of its own; None if there is no room for so many.
        self._in_parts = segments if segments is not None and Outbox(segments, ranks.rank).has_parts else None

    # -- called: what is bound for an array is the communicator's to keep ------------------------------------------

    def all_gather(self, array: Any, axis: int, timeout_seconds: float | None) -> Any:
        """Return the arrays of all ranks.  Collective."""
        others = array.shape[1:] if axis == 0 else (axis, array.shape[:axis], array.shape[axis:][1:])
        key = ("all_gather", type(array), array.dtype, array.ndim, others)
        return self._bindings.call(key, self.bind_gather, (array, axis, None), array, timeout_seconds)

    def gather(self, array: Any, root: int, axis: int, timeout_seconds: float | None) -> Any:
        """Return the arrays of all ranks on `root`.  Collective."""
        others = array.shape[:axis], array.shape[axis:][1:]
        key = ("gather", root, axis, type(array), array.dtype, array.ndim, others)
        return self._bindings.call(key, self.bind_gather, (array, axis, root), array, timeout_seconds)

    def broadcast(self, array: Any, root: int, timeout_seconds: float | None) -> None:
        """Give all ranks the array of `root` in place of theirs, which must be C-contiguous.  Collective."""
        key = ("broadcast", root, type(array), array.dtype, array.shape)
        self._bindings.call(key, self.bind_broadcast, (array, root, True), array, timeout_seconds)

    def broadcast_copy(self, array: Any, root: int, timeout_seconds: float | None) -> Any:
        """Return the array of `root`.  Collective."""
        key = ("broadcast_copy", root, type(array), array.dtype, array.shape)
        return self._bindings.call(key, self.bind_broadcast, (array, root), array, timeout_seconds)

    def reduce_scatter(self, array: Any, op: str, timeout_seconds: float | None) -> Any:
        """Return this rank's rows of the reduced array.  Collective."""
        key = ("reduce_scatter", op, type(array), array.dtype, array.shape)
        return self._bindings.call(key, self.bind_reduce_scatter, (array, op), array, timeout_seconds)

    def all_to_all(self, array: Any, splits: Any, timeout_seconds: float | None) -> Any:
        """Return the rows that each rank has for this one, and how many.  Collective."""
        key = ("all_to_all", type(array), array.dtype, array.ndim, array.shape[1:])
        return self._bindings.call(key, self.bind_all_to_all, (array,), (array, splits), timeout_seconds)

    # -- bound ----------------------------------------------------------------------------------------------------

    def bind_gather(self, like: Any, axis: int, root: int | None) -> ArrayBound:
        """Return a new all_gather, or gather to `root`."""
        like = self.checked(like)
        if root is not None:
            self._check_root(root, "gather")
        axis = checked_axis(like, axis, "all_gather" if root is None else "gather")
        return self._staged(like, axis, lambda host: self.bind_gather(host, axis, root)) or bind_gather(
            self._ranks, self._segments_for(like), like, axis, root, self._results
        )

    def bind_broadcast(self, like: Any, root: int, in_place: bool = False) -> ArrayBound:
        """Return a new broadcast."""
        like = self.checked(like)
        self._check_root(root, "broadcast")
        if in_place:
            check_contiguous("broadcast", like)
        staged = self._staged(like, None, lambda host: self.bind_broadcast(host, root, in_place), in_place)
        results = None if in_place else self._results
        return staged or bind_broadcast(self._ranks, self._segments_for(like), like, root, results)

    def bind_reduce_scatter(self, like: Any, op: str) -> ArrayBound:
        """Return a new reduce_scatter."""
        like = self.checked(like, "sum" if op == "mean" else op)
        checked_axis(like, 0, "reduce_scatter")
        staged = self._staged(like, None, lambda host: self.bind_reduce_scatter(host, op))
        segments = self._segments_for(like, in_parts=True)
        return staged or bind_reduce_scatter(self._ranks, segments, like, op, self._results)

    def bind_all_to_all(self, like: Any) -> ArrayBound:
        """Return a new all_to_all."""
        like = self.checked(like)
        checked_axis(like, 0, "all_to_all")
        staged = self._staged(like, 0, self.bind_all_to_all)
        if staged is not None:
            return staged
        segments = self._segments_for(like, in_parts=True)
        if segments is None or segments.segment_bytes <= 8 * self._ranks.size + 64:
            return AllToAll(self._ranks, like)
        return NodeAllToAll(self._ranks, segments, like, self._results)

    def checked(self, array: Any, op: str | None = None) -> Any:
        """Return an array as `arrays.plain` does; raise if it cannot be moved, or reduced by `op`.

        Raises
        ------
        TypeError, UnsupportedDtypeError
        ValueError
            There is no reduction `op`.
        """
        array = arrays.plain(array)
        arrays.kind_of(array)
        if op is not None:
            arrays.check_reducible(array.dtype, op)
        arrays.check_movable(array.dtype)
        if self._ranks.size > 1 and self._ranks.devices.memory(array) is None:
            arrays.check_memory(array, self._ranks.transport.memory, self._ranks.transport.name)
        return array

    def _staged(
        self, like: Any, axis: int | None, bind: Callable[[Any], ArrayBound], in_place: bool = False
    ) -> ArrayBound | None:
        """Return the collective of device arrays through the host, ``bind(host array)``; None for other arrays."""
        devices = self._ranks.devices
        memory = devices.memory(like) if self._ranks.size > 1 else None
        if memory is None:
            return None
        host = numpy.broadcast_to(numpy.zeros((), like.dtype), like.shape)
        inner = bind(numpy.ascontiguousarray(host) if in_place else host)
        return StagedArray(devices, self._ranks, memory, like, axis, inner, in_place)

    def _segments_for(self, like: Any, in_parts: bool = False) -> Any:
        return None if arrays.is_device(like) else self._in_parts if in_parts else self._segments

    def _check_root(self, root: int, name: str) -> None:
        if not 0 <= root < self._ranks.size:
            raise ValueError(f"{name}: root {root} is no rank of a world of {self._ranks.size}")
