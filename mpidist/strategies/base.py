"""`Strategy`: the base of all strategies.  Its other two parts are `StrategyExtended` and `ReplicaContext`.

A strategy says what each rank is, which variables are mirrored, and when values are reduced.  It writes the facts that
users look for (devices, ranks) to the logger ``mpidist``, on the chief; ``logging.basicConfig(level="INFO")`` shows
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from mpidist import context
from mpidist.cluster.resolvers.base import ClusterResolver
from mpidist.context import T
from mpidist.options import ReduceOp
from mpidist.strategies import reduction
from mpidist.strategies.extended import StrategyExtended
from mpidist.strategies.input_methods import InputMethods
from mpidist.strategies.keras_guard import guarded_keras
from mpidist.strategies.mirrored_extended import MirroredExtended
from mpidist.strategies.replica_context import ReplicaContext
from mpidist.strategies.run_options import RunOptions
from mpidist.variables.components import component, dense_component

if TYPE_CHECKING:
    import numpy
    from numpy.typing import ArrayLike

__all__ = ["MirroredExtended", "ReplicaContext", "Strategy", "StrategyExtended"]


class Strategy(InputMethods):
    """How training is spread over replicas; each replica is one rank on one device.

    A rank's plain value is its component of a distributed value: `run` returns what the function returned on this rank,
    `reduce` and `gather` take this rank's component and return the same on every rank.

    Attributes
    ----------
    extended : StrategyExtended
        For library code.  Set by the subclass.
    """

    extended: StrategyExtended
    _cluster_resolver: ClusterResolver | None = None

    # -- contexts -----------------------------------------------------------------------------------------------------

    def scope(self) -> AbstractContextManager[Strategy]:
        """Return a context manager that makes this strategy current: variables created inside are its own.  Local.

        The code inside is in a cross-replica context.  A scope may be entered again inside itself.

        Raises
        ------
        RuntimeError
            On entering: inside the scope of another strategy, or inside `run`.
        NotImplementedError
            Inside, on several ranks: a Keras model is made, compiled or trained, which would not be distributed.
        """
        return self._scope()

    @contextmanager
    def _scope(self) -> Iterator[Strategy]:
        context.require_cross_replica(self)
        guard = guarded_keras() if self.extended.spans_ranks else nullcontext()
        with context.entered(context.Mode(self, None)), guard:
            yield self

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> T:
        """Call `fn` as this rank's replica and return what it returns.

        Collective: every rank calls it in the same order, as far as `fn` calls collectives.  An exception of `fn` is
        raised here as it is.  The other ranks raise RemoteReplicaError in their next collective, inside `run` or after
        it; if all of them catch it, they can go on together.

        Parameters
        ----------
        fn : callable
            May ask `get_replica_context` for its replica number, and for collectives.
        args : tuple or list
            This rank's components, as a distributed data set gives them; anything else is passed as it is.
        kwargs : dict, optional
        options : RunOptions, optional
            Accepted for TensorFlow's sake; they concern compilation for TPUs.

        Raises
        ------
        ValueError
            `args` is neither a tuple nor a list.
        RuntimeError
            Inside `run`, or inside the scope of another strategy.
        RemoteReplicaError
            In a collective of `fn`: on another rank, the function raised.
        """
        if not isinstance(args, (list, tuple)):
            raise ValueError(f"positional args must be a list or tuple, got {type(args)}")
        return self.extended.call_for_each_replica(fn, args, kwargs)

    experimental_run_v2 = run

    # -- communication ------------------------------------------------------------------------------------------------

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: reduction.Axis | None) -> Any:
        """Return `value` reduced over the replicas, and over some of its axes; the same on every rank.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM or MEAN, also by name in any case.
        value : array or number
            This rank's component.
        axis : int, tuple of int, or None
            None reduces over replicas only; all components must have the same shape.  Axes (negative ones count from
            the end) are summed over first, and may differ in length between replicas: a mean divides by the lengths of
            all replicas together, so replicas with more rows weigh more and empty ones nothing.

        Returns
        -------
        array or scalar
            In the dtype of the values; means of integers are float64.  The caller's own.

        Raises
        ------
        ValueError
            An axis out of range, or a name that is no `ReduceOp`.
        TypeError
            `reduce_op` is neither a `ReduceOp` nor a name.
        RuntimeError
            Inside `run`; use `ReplicaContext.all_reduce` there.
        CollectiveMismatchError
            On all ranks, when shapes or dtypes differ between them.
        """
        context.require_cross_replica(self)
        reduce_op = ReduceOp.parse(reduce_op)
        if axis is None:
            return self._reduce_over_replicas(reduce_op, value)
        array = dense_component(value, "reduce over an axis")
        axes = reduction.normalized_axes(axis, array.ndim)
        total = reduction.local_sum(array, axes, for_mean=reduce_op is ReduceOp.MEAN)
        if reduce_op is ReduceOp.SUM:
            (total,) = self.extended.reduce_arrays(ReduceOp.SUM, [total])
            return reduction.like_given(total.astype(array.dtype, copy=False), None)
        total, count = self.extended.reduce_arrays(ReduceOp.SUM, [total, reduction.local_count(array, axes)])
        return reduction.like_given(reduction.quotient(total, count, array.dtype), None)

    def _reduce_over_replicas(self, reduce_op: ReduceOp, value: Any) -> Any:
        (result,) = self.extended.reduce_arrays(reduce_op, [component(value)])
        return reduction.like_given(result, value)

    def gather(self, value: ArrayLike, axis: int) -> numpy.ndarray:
        """Return the components of all replicas joined along `axis`, in replica order; the same on every rank.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        value : array of at least one dimension
            This rank's component.  Replicas may differ in the length of `axis`, and in nothing else.
        axis : int
            Negative counts from the end.

        Raises
        ------
        ValueError
            A scalar, or `axis` out of range.
        RuntimeError
            Inside `run`; use `ReplicaContext.all_gather` there.
        CollectiveMismatchError
            On all ranks, when their components do not fit together.
        """
        if context.get_strategy() is self and not context.in_cross_replica_context() and context.has_strategy():
            raise RuntimeError(
                "tf.distribute.Strategy.gather method requires cross-replica context, use "
                "get_replica_context().all_gather() instead"
            )
        context.require_cross_replica(self)
        return self.extended.gather_array(dense_component(value, "gather"), axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return this rank's components of a value: ``(value,)``, as a rank is one replica.  Local."""
        return (value,)

    # -- facts --------------------------------------------------------------------------------------------------------

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas' gradients are summed."""
        return self.extended.num_replicas

    @property
    def cluster_resolver(self) -> ClusterResolver | Any:  # Any, so that others than those need not ask for None
        """What the cluster was read from; None for strategies of one machine."""
        return self._cluster_resolver

    # -- copies -------------------------------------------------------------------------------------------------------

    def __copy__(self) -> Strategy:
        raise RuntimeError("Must only deepcopy DistributionStrategy.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        """Refuse: ranks, plans and variables belong to this object, and a second one would be another strategy."""
        raise ValueError(f"{self!r} cannot be copied: make one strategy and pass it on")

    def __repr__(self) -> str:
        replicas = f"replica {self.extended.replica_id} of {self.extended.num_replicas}"
        return f"<{type(self).__name__}, {replicas}, on {self.extended.device_name}>"
