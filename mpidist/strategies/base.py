"""`Strategy`, the base of all strategies, and `ReplicaContext`, which the code inside `Strategy.run` gets.

A strategy says what each rank is, which variables are mirrored, and when values are reduced.  It writes the facts that
users look for (devices, ranks) to the logger ``mpidist``, on the chief; ``logging.basicConfig(level="INFO")`` shows
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, overload

import numpy
from numpy.typing import ArrayLike

from mpidist import arrays, context
from mpidist.cluster.resolvers.base import ClusterResolver
from mpidist.collectives.engine import Repeat, no_repeat
from mpidist.collectives.exchange.plain import whole
from mpidist.collectives.structures import Paths, like_given, of_leaves
from mpidist.context import T
from mpidist.cross_device_ops import value_names
from mpidist.input.dataset import Dataset
from mpidist.input.distributed import DistributedDataset
from mpidist.input.from_function import InputContext, ValueContext
from mpidist.input.options import InputOptions
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.strategies import distribution
from mpidist.strategies.bound_collectives import BoundCollectives
from mpidist.strategies.extended import StrategyExtended
from mpidist.strategies.keras_hook import keras_hook
from mpidist.strategies.mirrored_extended import MirroredExtended
from mpidist.strategies.replica_collectives import ReplicaCollectives, broadcast_value, by_leaf
from mpidist.variables.components import component, dense_component

__all__ = ["MirroredExtended", "ReplicaContext", "Strategy", "StrategyExtended"]

#: The types in most lists of gradients.
_ARRAYS = {numpy.ndarray}

Axis = int | Sequence[int]


@dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`: they concern compilation for TPUs, and change nothing here.

    Parameters
    ----------
    experimental_enable_dynamic_batch_size, experimental_bucketizing_dynamic_shape : bool
    experimental_xla_options : object, optional
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


class Strategy(BoundCollectives):
    """How training is spread over replicas; each replica is one rank on one device.

    Values are plain arrays and numbers, each rank's own.  `run` returns the result of this rank.  `reduce` and `gather`
    take the value of each rank, and return the same on every rank.

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

        The code inside is in a cross-replica context.  A scope may be entered again inside itself.  Where Keras models
        were made inside, leaving it is collective: they get the weights of rank 0.

        Raises
        ------
        RuntimeError
            On entering: inside the scope of another strategy, or inside `run`.
            Inside, on several ranks: a Keras model that was made elsewhere is compiled or trained.
        NotImplementedError
            Inside, on several ranks: a Keras model is made that this strategy does not distribute.
        CollectiveMismatchError
            On leaving it, on all ranks: they have made different Keras models.
        """
        return self._scope()

    @contextmanager
    def _scope(self) -> Iterator[Strategy]:
        context.require_cross_replica(self)
        hook = nullcontext() if self.extended.is_alone else keras_hook()
        with context.entered(context.Mode(self, None)), hook:
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

    @overload
    def distribute(self, obj: T, /, **options: Any) -> T: ...

    @overload
    def distribute(self, obj: Any, /, *others: Any, **options: Any) -> tuple[Any, ...]: ...

    def distribute(self, obj: Any, /, *others: Any, **options: Any) -> Any:
        """Return a framework's model, its optimizer, or both, so that they train over the replicas of this strategy.

        Collective: every rank calls it in the same order, with the same kinds of objects.

        Parameters
        ----------
        obj, *others
            Models and optimizers of PyTorch or of Keras 3, of one framework in a call.
        **options
            The framework's own; see the page of that framework.

        Returns
        -------
        object, or tuple of objects
            What stands for each of the objects, in their order.

        Raises
        ------
        TypeError
            An object of another kind, objects of several frameworks, or an option that the framework's adapter does not
            have; the message names the frameworks that are known.
        """
        return distribution.distribute(self, (obj, *others), options)

    def _make_replica_context(self) -> ReplicaContext:
        """Return the context of this rank's replica.  Local."""
        return ReplicaContext(self, self.extended.replica_id)

    # -- communication ------------------------------------------------------------------------------------------------

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Axis | None) -> Any:
        """Return `value` reduced over the replicas, and over some of its axes; the same on every rank.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PRODUCT, also by name in any case; SUM or MEAN where there is an `axis`.
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
            An axis out of range, an axis with another operation than SUM and MEAN, or a name that is no `ReduceOp`.
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
            (result,) = self.extended.reduce_arrays(reduce_op, [component(value)])
            return like_given(result, value)
        if not reduce_op.adds:
            raise ValueError(f"reduce over an axis is for SUM and MEAN, got {reduce_op.name}; reduce the axis first")
        array = dense_component(value, "reduce over an axis")
        axes = _normalized_axes(axis, array.ndim)
        wide, dtype = arrays.reduction_dtypes(array.dtype, reduce_op.verb)
        arrays.check_reducible(array.dtype, "sum")
        total = arrays.to_array(array.sum(axis=axes, dtype=wide))
        if reduce_op is ReduceOp.SUM:
            (total,) = self.extended.reduce_arrays(ReduceOp.SUM, [total])
            return like_given(total.astype(dtype, copy=False), None)
        own_count = numpy.array(math.prod(array.shape[each] for each in axes), dtype=numpy.int64)  # integers are exact
        values = [total, arrays.in_memory_of(array, own_count)]
        total, count = self.extended.reduce_arrays(ReduceOp.SUM, values)
        return like_given(_quotient(total, count, dtype), None)

    def gather(self, value: ArrayLike, axis: int) -> numpy.ndarray:
        """Return the components of all replicas joined along `axis`, in replica order; the same on every rank.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        value : array of at least one dimension
            This rank's component.  Replicas may differ in the length of `axis`, text in its width, and in nothing else.
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

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the value of replica `root` on every rank, as new arrays.

        Collective: every rank calls it in the same order, with values of the same structure, shapes and dtypes.

        Parameters
        ----------
        value : array or number, or nested tuples, lists and dicts of them
            This rank's component.
        root : int

        Raises
        ------
        ValueError
            There is no replica `root`.
        RuntimeError
            Inside `run`; use `ReplicaContext.broadcast` there.
        CollectiveMismatchError
            On all ranks, when shapes or dtypes differ between them.
        """
        context.require_cross_replica(self)
        return broadcast_value(self.extended, value, root, None)

    def barrier(self) -> None:
        """Return when all replicas have come here.

        Collective: every rank calls it in the same order, across replicas.
        """
        context.require_cross_replica(self)
        self.extended.collectives.barrier(timeout_seconds=self.extended.timeout_seconds(None))

    def _here(self) -> StrategyExtended:
        context.require_cross_replica(self)
        return self.extended

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return this rank's components of a value: ``(value,)``, as a rank is one replica.  Local."""
        return (value,)

    # -- input ------------------------------------------------------------------------------------------------------

    def experimental_distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> Any:
        """Return an iterable of this replica's parts of the global batches of `dataset`.

        Collective: every rank calls it in the same order, with the same data set: all rows, on every rank.  The ranks
        compare the arrays' shapes and dtypes, a checksum of some of their rows, batches and order; later, nothing is
        sent for data sets of arrays and files.

        Parameters
        ----------
        dataset : mpidist.data.Dataset, or iterable of batches
            Batched by the global batch, which is cut into contiguous parts of ``ceil(rows / replicas)`` rows.  Any
            other iterable of batches (a list, a PyTorch DataLoader) must give the same batches on every rank, which is
            checked at every step.
        options : InputOptions, optional
            With options, parts are copied to the replica's device; without, they stay where the data set has them.

        Returns
        -------
        DistributedDataset
            Strategies that distribute nothing give back what has no batches as it is.

        Raises
        ------
        TypeError, ValueError
            It cannot be iterated, has no batches, or cannot be dealt by file.
        CollectiveMismatchError
            On all ranks: their data sets differ; says in what.  Data that are meant to differ by rank are for
            `distribute_datasets_from_function`.
        """
        context.require_cross_replica(self)
        return self.extended.distribute_dataset(dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return an iterable of the batches of ``dataset_fn(input_context)``, which is called once on every rank.

        Collective when iterated: it goes on until all ranks are out of batches; who is out early gets empty ones.

        Parameters
        ----------
        dataset_fn : callable
            Gets an `InputContext` and returns this rank's data set, batched for one replica: nothing is split here.
            Lists of arrays in its elements become tuples.  Elements without rows, which cannot be empty, must be as
            many on every rank: otherwise iterating raises InputError on all ranks.
        options : InputOptions, optional
            As for `experimental_distribute_dataset`.
        """
        context.require_cross_replica(self)
        return self.extended.distribute_from_function(dataset_fn, options)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def make_experimental_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Dataset:
        """Return the data set of the rows of an array, or of nested arrays.  Local.

        Parameters
        ----------
        numpy_input : array, or nested tuples and dicts of arrays
            All with the same first dimension.
        session
            Accepted for TensorFlow's sake.
        """
        return Dataset.from_arrays(numpy_input)

    experimental_make_numpy_dataset = make_experimental_numpy_dataset

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return ``value_fn(value_context)``: this replica's component of a value.  Local.

        Parameters
        ----------
        value_fn : callable
            Gets a `ValueContext`, which tells the number of the replica.
        """
        context.require_cross_replica(self)
        return value_fn(ValueContext(self.extended.replica_id, self.extended.num_replicas))

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


class ReplicaContext(ReplicaCollectives):
    """The context inside `Strategy.run`: one replica of a strategy.

    Attributes
    ----------
    strategy : Strategy
    replica_id_in_sync_group : int
        This replica's number among all that train together, from 0.
    """

    strategy: Strategy

    def __init__(self, strategy: Strategy, replica_id_in_sync_group: int) -> None:
        self.strategy = strategy
        self.replica_id_in_sync_group = replica_id_in_sync_group
        # By operation as it was given, without options: what reduces a list like one that was reduced before.
        self._repeats: dict[ReduceOp | str, Repeat] = {}

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
            SUM, MEAN, MIN, MAX or PRODUCT, also by name in any case; SUM or MEAN for IndexedSlices.
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
        repeat = self._repeats.get(reduce_op) if options is None else None
        if repeat is None:
            repeat = self._repeat(reduce_op, options)
        if type(value) is numpy.ndarray:  # the quick way for the smallest case
            results = repeat([value])
            if results is None:
                results = self.strategy.extended.reduce_arrays(ReduceOp.parse(reduce_op), [value], options)
            return results[0]
        if type(value) is list and value and type(value[0]) is numpy.ndarray:  # and for the commonest
            results = repeat(value)
            if results is not None:
                return results
        return self._reduce(ReduceOp.parse(reduce_op), value, options, repeat)

    def _repeat(self, reduce_op: ReduceOp | str, options: CommunicationOptions | None) -> Repeat:
        """Return what reduces a list like one that was reduced before.  Local."""
        engine, op = self.strategy.extended.engine(options), ReduceOp.parse(reduce_op)
        found: Repeat = no_repeat if engine is None else engine.recent(op.verb)
        if options is None:
            self._repeats[reduce_op] = found
        return found

    def _reduce(self, reduce_op: ReduceOp, value: Any, options: CommunicationOptions | None, repeat: Repeat) -> Any:
        """Reduce a nested structure, or a list unlike those before.  Collective."""
        extended = self.strategy.extended
        if type(value) is list and set(map(type, value)) == _ARRAYS:
            return extended.reduce_arrays(reduce_op, value, options)

        def collective(arrays: list[Any], paths: Paths) -> list[Any]:
            results = repeat(arrays, paths)
            if results is None:
                results = extended.reduce_arrays(reduce_op, arrays, options, value_names(paths))
            return results

        return of_leaves(value, component, collective)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Return the values of all replicas joined along `axis`, in replica order; a nested structure leaf by leaf.

        Collective: every replica calls it in the same order.

        Parameters
        ----------
        value : array of at least one dimension, or nested tuples, lists and dicts of them
            Replicas may differ in the length of `axis`, text in its width, and in nothing else.
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
        if type(value) is numpy.ndarray:  # the quick way for the commonest case
            return extended.gather_array(value, axis, options)
        ranks, seconds = extended.collectives, extended.timeout_seconds(options)
        return by_leaf(
            ranks, "all_gather", seconds, value, lambda leaf, paths: extended.gather_array(leaf, axis, options, paths)
        )

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


def _normalized_axes(axis: Axis, dimensions: int) -> tuple[int, ...]:
    """Return axes counted from the front; ValueError when one is out of range or comes twice."""
    given: Iterable[Any] = [axis]
    if isinstance(axis, Iterable) and getattr(axis, "shape", None) != ():  # an array of no dimensions is one axis
        given = axis
    axes = tuple(whole(each, "reduce: axis") for each in given)
    for each in axes:
        if not -dimensions <= each < dimensions:
            raise ValueError(f"Invalid reduction dimension {each} for input with {dimensions} dimensions")
    counted = tuple(each % dimensions for each in axes)
    if len(set(counted)) < len(counted):
        raise ValueError(f"Invalid reduction arguments: axes {axes} name the same dimension more than once")
    return counted


def _quotient(total: Any, count: Any, dtype: numpy.dtype) -> Any:
    """Return the mean in this dtype, NaN where nothing was summed."""
    with numpy.errstate(divide="ignore", invalid="ignore"):
        mean = total / (count if arrays.is_device(total) else numpy.float64(count))
    return mean.astype(dtype)
