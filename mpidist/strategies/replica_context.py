"""`ReplicaContext`: what the code inside `Strategy.run` knows about its replica, and the collectives it can call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from mpidist import context, nest
from mpidist.context import T
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.strategies.persistent_all_reduce import PersistentAllReduce, persistent_all_reduce
from mpidist.strategies.reduction import like_given
from mpidist.variables.components import component, dense_component

#: The types in most lists of gradients.
_ARRAYS = {numpy.ndarray}


class ReplicaContext:
    """The context inside `Strategy.run`: one replica of a strategy.

    Attributes
    ----------
    strategy : Strategy
    replica_id_in_sync_group : int
        This replica's number among all that train together, from 0.
    """

    def __init__(self, strategy: Any, replica_id_in_sync_group: int) -> None:
        self.strategy = strategy
        self.replica_id_in_sync_group = replica_id_in_sync_group

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas train together."""
        return self.strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """The name of this replica's device, in a tuple."""
        return (self.strategy.extended.device_name,)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Reduce a value, or all values of a nested structure in one fused call, over all replicas.

        Collective: every replica calls it in the same order, with the same structure, shapes and dtypes.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM or MEAN, also by name in any case.
        value : array or IndexedSlices, or nested tuples, lists and dicts of them
            Unchanged.
        options : CommunicationOptions, optional
            Fields that are set win over the strategy's.

        Returns
        -------
        array or nested structure
            As `value`, with new arrays that are the caller's; the same on every replica.  Means of integers are
            float64.

        Raises
        ------
        RuntimeError
            Outside of this replica: in `Strategy.scope` or in a `merge_call`.
        CollectiveMismatchError
            On all replicas, when they passed different tensors; names ranks, tensor and both shapes.
        """
        context.require_replica(self)
        if type(reduce_op) is not ReduceOp:
            reduce_op = ReduceOp.parse(reduce_op)
        extended = self.strategy.extended
        if type(value) is numpy.ndarray:  # the quick way for the smallest case
            results = extended.reduce_again(reduce_op, [value], options)
            return (extended.reduce_arrays(reduce_op, [value], options) if results is None else results)[0]
        if type(value) is list and value and type(value[0]) is numpy.ndarray:  # and for the commonest
            results = extended.reduce_again(reduce_op, value, options)
            if results is None and set(map(type, value)) == _ARRAYS:
                results = extended.reduce_arrays(reduce_op, value, options)
            if results is not None:
                return results
        leaves = nest.flatten(value)
        results = extended.reduce_arrays(reduce_op, [component(leaf) for leaf in leaves], options)
        pairs = zip(results, leaves, strict=True)
        return nest.pack(value, [like_given(result, leaf) for result, leaf in pairs])

    def all_reduce_init(
        self, reduce_op: ReduceOp | str, like: Any, options: CommunicationOptions | None = None
    ) -> PersistentAllReduce:
        """Bind an all-reduce to the shapes and dtypes of a value, for tight loops.

        What `all_reduce` finds out at each call is settled once.  The result is called with values, or started and
        waited for.  Where the strategy reduces in a way of its own (a `CrossDeviceOps` or an `extended` of the user's),
        every value goes that way.

        Collective: every replica calls it in the same order, with the same structure, shapes and dtypes.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM or MEAN, also by name in any case.
        like : array, or nested tuples, lists and dicts of arrays
            No reference to it is kept.
        options : CommunicationOptions, optional
            Fields that are set win over the strategy's.

        Raises
        ------
        RuntimeError
            Outside of this replica: in `Strategy.scope` or in a `merge_call`.
        TypeError
            An IndexedSlices: its rows differ from step to step.
        """
        context.require_replica(self)
        if type(reduce_op) is not ReduceOp:
            reduce_op = ReduceOp.parse(reduce_op)
        return persistent_all_reduce(self.strategy.extended, reduce_op, like, options)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Return the values of all replicas joined along `axis`, in replica order; a nested structure leaf by leaf.

        Collective: every replica calls it in the same order.

        Parameters
        ----------
        value : array of at least one dimension, or nested tuples, lists and dicts of them
            Replicas may differ in the length of `axis`, and in nothing else.
        axis : int

        Raises
        ------
        ValueError
            A scalar, or `axis` out of range.
        CollectiveMismatchError
            On all replicas, when their arrays do not fit together.
        """
        context.require_replica(self)
        extended = self.strategy.extended
        leaves = [dense_component(leaf, "all_gather") for leaf in nest.flatten(value)]
        return nest.pack(value, [extended.gather_array(leaf, axis, options) for leaf in leaves])

    def merge_call(
        self, merge_fn: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> T:
        """Call ``merge_fn(strategy, *args, **kwargs)`` in a cross-replica context and return what it returns.

        Collective: every replica calls it in the same order.  It begins when all have come.  `merge_fn` runs on every
        rank, with this rank's components as arguments, and may use the methods of the strategy: what
        ``strategy.reduce`` gives is the same everywhere.

        Raises
        ------
        RuntimeError
            Outside of this replica.
        MergeCallError
            On all replicas (it is a RuntimeError): some of them called something else in its place.
        """
        context.require_replica(self)
        self.strategy.extended.begin_merge_call()
        return context.call_inside(context.Mode(self.strategy, None), merge_fn, (self.strategy, *args), kwargs)

    def __repr__(self) -> str:
        return f"<ReplicaContext {self.replica_id_in_sync_group} of {self.num_replicas_in_sync} of {self.strategy!r}>"
