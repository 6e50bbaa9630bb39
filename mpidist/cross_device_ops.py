"""Where values meet collectives: how a strategy reduces, broadcasts and gathers.

A `CrossDeviceOps` works on this rank's component of a value, and every rank gets the result.  The classes here differ
only in the algorithm that they ask for; tensors reduced together are fused, whichever it is.  To write your own,
subclass `CrossDeviceOps` and give it to a strategy::

    class Doubling(mpidist.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            ...  # collectives of self.communicator

"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy

from mpidist import arrays
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.engine import Engine
from mpidist.collectives.from_chief import from_chief
from mpidist.collectives.ways.selection import PINNED
from mpidist.errors import MissingDependencyError, quoted
from mpidist.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from mpidist.variables import DistributedVariable, IndexedSlices
from mpidist.variables.components import component, dense_component
from mpidist.variables.row_reduction import reduce_rows

_log = logging.getLogger("mpidist")

#: How many times "Reduce to ... then broadcast to ..." is logged.
_LOGGED_REDUCTIONS = 10


class CrossDeviceOps:
    """How values of several replicas become one.

    Users call `reduce`, `batch_reduce` and `broadcast`, which check their arguments; subclasses write the
    ``*_implementation`` methods.  All values are this rank's components, all results are on every rank, and results
    never share memory with what was given.

    Attributes
    ----------
    communicator : Communicator
        The ranks it works on; there once a strategy, or `bind`, has given it.
    devices : tuple of str
        The devices of those ranks, for log lines.
    options : CommunicationOptions
        Those of the strategy, for calls that have none of their own.
    """

    communicator: Communicator
    devices: tuple[str, ...] = ()
    options = CommunicationOptions()

    def bind(self, communicator: Communicator, devices: Sequence[str] = ()) -> None:
        """Give it the ranks to work on, and their devices; a strategy does so when it is made.  Local."""
        self.communicator = communicator
        self.devices = tuple(devices)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce one value over all replicas.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        reduce_op : ReduceOp or str
        per_replica_value : array or number
            This rank's component.
        destinations : str, array or variable
            Where the result is wanted, as in TensorFlow.  Every rank gets it anyway.
        options : CommunicationOptions, optional

        Returns
        -------
        array
            The sum in the dtype given; means of integers are float64.
        """
        _check_destinations(destinations)
        options = options or CommunicationOptions()
        reduce_op, value = ReduceOp.parse(reduce_op), component(per_replica_value)
        if isinstance(value, IndexedSlices):
            return reduce_rows(self.communicator, reduce_op, value, options.timeout_seconds)
        return self.reduce_implementation(reduce_op, value, destinations, options)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several values over all replicas; return the results in the same order.

        Collective: every rank calls it in the same order, with as many pairs.  Errors and values as for `reduce`.

        Raises
        ------
        ValueError
            Something in the list is not a pair, or a destination is empty.
        """
        pairs = list(value_destination_pairs)
        check_pairs(pairs)
        for _, destinations in pairs:
            _check_destinations(destinations)
        reduce_op, options = ReduceOp.parse(reduce_op), options or CommunicationOptions()
        if not pairs:
            return self.communicator.all_reduce_list([], reduce_op.verb, timeout_seconds=options.timeout_seconds)
        pairs = [(component(value), destinations) for value, destinations in pairs]
        dense = [pair for pair in pairs if not isinstance(pair[0], IndexedSlices)]
        reduced = iter(self.batch_reduce_implementation(reduce_op, dense, options) if dense else [])
        return [
            reduce_rows(self.communicator, reduce_op, value, options.timeout_seconds)
            if isinstance(value, IndexedSlices)
            else next(reduced)
            for value, _ in pairs
        ]

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Return replica 0's `tensor` on every rank, as a new array.

        Collective: every rank calls it in the same order, with the same shape and dtype.
        """
        _check_destinations(destinations)
        return self.broadcast_implementation(component(tensor), destinations)

    def _gather(
        self, per_replica_value: Any, destinations: Any, axis: int, options: CommunicationOptions | None = None
    ) -> Any:
        """Return the components of all replicas joined along `axis`.  Collective."""
        _check_destinations(destinations)
        options = options or CommunicationOptions()
        value = dense_component(per_replica_value, "gather")
        return self._gather_implementation(value, destinations, axis, options)

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: Any, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """Reduce one array; to be written by subclasses.  Collective."""
        raise NotImplementedError("_reduce method must be implemented in descendants: reduce_implementation")

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[Any, Any]], options: CommunicationOptions
    ) -> list[Any]:
        """Reduce some arrays (at least one); to be written by subclasses.  Collective."""
        raise NotImplementedError("batch_reduce_implementation method must be implemented in descendants.")

    def reduce_list(
        self,
        reduce_op: ReduceOp,
        values: Sequence[Any],
        destinations: Sequence[Any] | None,
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce some arrays (at least one), through the ``*_implementation`` methods.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        reduce_op : ReduceOp
        values : sequence of array
        destinations : sequence or None
            What they are for; None: they themselves.
        options : CommunicationOptions
        """
        destinations = values if destinations is None else destinations
        if len(values) == 1:
            return [self.reduce_implementation(reduce_op, values[0], destinations[0], options)]
        pairs = list(zip(values, destinations, strict=True))
        return self.batch_reduce_implementation(reduce_op, pairs, options)

    def engine(self, options: CommunicationOptions) -> Engine | None:
        """Return what reduces lists of arrays under these options; None: each value passes through `reduce_list`.

        Local; the same on all ranks.
        """
        return None

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Broadcast one array from rank 0; subclasses may do it in another way.  Collective."""
        copy = _contiguous_copy(tensor)
        self.communicator.broadcast(copy, timeout_seconds=self.options.timeout_seconds)
        return copy

    def _gather_implementation(
        self, per_replica_value: Any, destinations: Any, axis: int, options: CommunicationOptions
    ) -> Any:
        """Join arrays along an axis; subclasses may do it in another way.  Collective."""
        return self.communicator.all_gather(per_replica_value, axis, timeout_seconds=options.timeout_seconds)


class AllReduceCrossDeviceOps(CrossDeviceOps):
    """Fused all-reduce by the algorithm that the options ask for, by default one that is chosen for each size.

    Parameters
    ----------
    num_packs : int
        0 sends every tensor by itself.  Any other number fuses tensors; into how many units follows from cache and
        network, or from `CommunicationOptions.bytes_per_pack`.
    """

    #: The all-reduce algorithm of the subclass; None leaves it to the options.
    algorithm: str | None = None
    #: What error messages call the subclass.
    title = "All-reduce"

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(f"{self.title} requires num_packs >= 0, but {num_packs} is specified")
        self.num_packs = num_packs

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: Any, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """Reduce one array."""
        return self._reduce_all(reduce_op, [per_replica_value], [destinations], options)[0]

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[Any, Any]], options: CommunicationOptions
    ) -> list[Any]:
        """Reduce some arrays, fused."""
        values, destinations = zip(*value_destination_pairs, strict=True)
        return self._reduce_all(reduce_op, values, destinations, options)

    def reduce_list(
        self,
        reduce_op: ReduceOp,
        values: Sequence[Any],
        destinations: Sequence[Any] | None,
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce some arrays, fused, unless a subclass has a way of its own.  Collective."""
        if self._has_own_way():
            return super().reduce_list(reduce_op, values, destinations, options)
        return self._reduce_all(reduce_op, values, destinations, options)

    def engine(self, options: CommunicationOptions) -> Engine | None:
        """Return what reduces lists of arrays, unless a subclass has a way of its own, or nothing is fused.  Local."""
        return None if self._has_own_way() or not self.num_packs else self._engine(options)

    @classmethod
    @cache
    def _has_own_way(cls) -> bool:
        """Whether a subclass wants every value to pass through a method of its own."""
        return overrides(cls, AllReduceCrossDeviceOps, *_REDUCING)

    def _reduce_all(
        self,
        reduce_op: ReduceOp,
        values: Sequence[Any],
        destinations: Sequence[Any] | None,
        options: CommunicationOptions,
    ) -> list[Any]:
        engine, op, names = self._engine(options), reduce_op.verb, names_of(destinations)
        if self.num_packs:
            return engine(values, op, names)
        labels = [None] * len(values) if names is None else [[name] for name in names]
        return [engine([value], op, label)[0] for value, label in zip(values, labels, strict=True)]

    def algorithm_for(self, options: CommunicationOptions) -> str | None:
        """Return the algorithm that the options or the class ask for; None for one by size.  Local."""
        pinned = PINNED if options.deterministic else None
        return self.algorithm or _ALGORITHMS[options.implementation] or pinned

    def _engine(self, options: CommunicationOptions) -> Engine:
        algorithm = self.algorithm_for(options)
        if algorithm == "nccl":
            require_nccl(self.communicator, "CommunicationImplementation.NCCL")
        return self.communicator.engine(options.bytes_per_pack, algorithm, options.timeout_seconds)


#: Who overrides one of these wants every gradient to pass through it.
_REDUCING = (
    "reduce",
    "batch_reduce",
    "reduce_list",
    "reduce_implementation",
    "batch_reduce_implementation",
    "_reduce_all",
)

#: Algorithm by the implementation that options ask for.
_ALGORITHMS = {
    CommunicationImplementation.AUTO: None,
    CommunicationImplementation.RING: "ring",
    CommunicationImplementation.NCCL: "nccl",
}


class RingAllReduce(AllReduceCrossDeviceOps):
    """All-reduce around a ring: every byte is sent about twice, whatever the number of ranks; for large tensors."""

    algorithm = "ring"
    title = "Ring all-reduce"


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """All-reduce inside the nodes first, then between them, then inside again."""

    algorithm = "hierarchical"
    title = "HierarchicalCopy"


class NcclAllReduce(AllReduceCrossDeviceOps):
    """All-reduce by NVIDIA's NCCL, between GPUs.

    Arrays of the host are reduced as by default, and so is what NCCL cannot do (products of complex numbers), on copies
    in host memory.

    Raises
    ------
    MissingDependencyError
        When a strategy is made with it where no GPU can be used; at the first reduction of GPU arrays, on all ranks,
        where NCCL cannot be used between them.
    """

    algorithm = "nccl"
    title = "NCCL all-reduce"

    def bind(self, communicator: Communicator, devices: Sequence[str] = ()) -> None:
        """Give it the ranks to work on; MissingDependencyError without a GPU.  Local."""
        require_nccl(communicator, type(self).__name__)
        super().bind(communicator, devices)


def require_nccl(communicator: Communicator, asked: str) -> None:
    """Raise MissingDependencyError unless this rank has a GPU to use NCCL on.  Local.

    `asked` is what asks for NCCL, for the message.
    """
    problem, cure = arrays.gpu_problem()
    if not problem:
        return
    raise MissingDependencyError(
        f"rank {communicator.rank} of {communicator.size}: {asked} needs an NVIDIA GPU and CuPy, and this rank has "
        f"no GPU that CuPy can use ({problem}). {cure}; or use "
        "RingAllReduce or HierarchicalCopyAllReduce (CommunicationImplementation.RING or AUTO), which work on CPUs"
    )


class ReductionToOneDevice(AllReduceCrossDeviceOps):
    """Reduce to one rank, then broadcast from there.

    Parameters
    ----------
    reduce_to_device : str, optional
        The device to reduce on, such as ``"/cpu:0"``; its number is that of the rank.  By default rank 0's.
    accumulation_fn : callable, optional
        ``accumulation_fn(values)`` returns the sum of a list of arrays, one a replica, in the shape that each of them
        has.  It is called on that rank only; an error in it is raised on all ranks.  It gets 16-bit floats as float32,
        and the integers of a mean as float64.
        By default sums are made along a binomial tree.
    """

    algorithm = "binomial"
    title = "Reduction to one device"

    def __init__(
        self, reduce_to_device: str | None = None, accumulation_fn: Callable[[list[Any]], Any] | None = None
    ) -> None:
        super().__init__()
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn
        self._logged = 0

    @property
    def root(self) -> int:
        """The rank that is reduced to."""
        if self.reduce_to_device is None:
            return 0
        index = self.reduce_to_device.rpartition(":")[2]
        root = int(index) if index.isdigit() else -1
        if not 0 <= root < self.communicator.size:
            raise ValueError(
                f"reduce_to_device {self.reduce_to_device!r} names no device of {self.communicator.size} ranks; "
                "expected a name like '/cpu:0', with the number of a rank"
            )
        return root

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: Any, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """Reduce one array."""
        self._log_route()
        return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)

    def _reduce_all(
        self,
        reduce_op: ReduceOp,
        values: Sequence[Any],
        destinations: Sequence[Any] | None,
        options: CommunicationOptions,
    ) -> list[Any]:
        if self.accumulation_fn is None:
            return super()._reduce_all(reduce_op, values, destinations, options)
        return [self._accumulated(self.accumulation_fn, reduce_op, value, options) for value in values]

    def _accumulated(
        self, accumulation_fn: Callable[..., Any], reduce_op: ReduceOp, value: Any, options: CommunicationOptions
    ) -> Any:
        """Gather one array to all ranks, accumulate on the root, broadcast from there."""
        if not reduce_op.adds:
            raise ValueError(f"accumulation_fn makes sums, and {reduce_op.name} was asked for; leave it out")
        ranks, root, seconds = self.communicator, self.root, options.timeout_seconds
        wide, given_back = arrays.reduction_dtypes(value.dtype, reduce_op.verb)
        gathered = ranks.all_gather(value[None], timeout_seconds=seconds)
        result = arrays.empty(value.shape, wide, value)

        def add() -> str:
            values = gathered.astype(wide, copy=False)
            return _put(accumulation_fn([values[replica] for replica in range(ranks.size)]), result)

        told = from_chief(ranks, add, "accumulation_fn", root, seconds)
        where = f"on rank {root} of {ranks.size}"
        if told.kind:
            raise told.error or ValueError(f"accumulation_fn raised {told.kind} {where}: {told.text}")
        if told.result:
            raise ValueError(
                f"accumulation_fn returned {told.result} {where}: return their sum as {wide}, element by element, as "
                "sum(values) does"
            )
        ranks.broadcast(result, root, timeout_seconds=seconds)
        if reduce_op is ReduceOp.MEAN:
            result /= ranks.size
        return result.astype(given_back, copy=False)

    def _log_route(self) -> None:
        if self.communicator.rank == 0 and self._logged < _LOGGED_REDUCTIONS:
            self._logged += 1
            target = self.reduce_to_device or (self.devices or ("rank 0",))[0]
            _log.info("Reduce to %s then broadcast to %r.", target, self.devices)


def _put(total: Any, result: Any) -> str:
    """Copy a sum of the user's own to an array, or return why it would be spread or cut there."""
    total = total if hasattr(total, "dtype") else numpy.asarray(total)
    difference = f"{total.dtype} of shape {total.shape} for arrays of {result.dtype} and of shape {result.shape}"
    integers = total.dtype.kind in "iu" and result.dtype.kind in "iu"
    if total.shape != result.shape or not (integers or numpy.can_cast(total.dtype, result.dtype, "same_kind")):
        return difference
    result[...] = total
    return f"{difference}, which has no room for its values" if integers and not (result == total).all() else ""


def overrides(kind: type, base: type, *names: str) -> bool:
    """Return whether a subclass of `base` has methods of its own under any of these names.  Local."""
    return any(getattr(kind, name) is not getattr(base, name) for name in names)


class ValueName(str):
    """The name of a value that is for no variable, in the place of its destination: ranks compare it."""

    @property
    def name(self) -> str:
        """The name."""
        return str(self)


def value_names(names: Sequence[str] | None) -> list[ValueName] | None:
    """Return what goes in the place of the destinations of values of these names; None where they have none."""
    return None if names is None else [*map(ValueName, names)]


def names_of(destinations: Sequence[Any] | None) -> list[str] | None:
    """Return how messages call the values: by the variables that they are for; None when there are none.  Local."""
    named = (DistributedVariable, ValueName)
    if destinations is None or not any(isinstance(each, named) for each in destinations):
        return None
    return [each.name if isinstance(each, named) else "" for each in destinations]


def _contiguous_copy(array: Any) -> Any:
    """Return a C-contiguous copy of the same shape, zero dimensions included."""
    copy = arrays.empty_like(array)
    copy[...] = array
    return copy


def check_pairs(pairs: Iterable[Any]) -> None:
    """Raise ValueError unless each is a tuple of a value and its destinations.  Local."""
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                f"each of value_destination_pairs must be a tuple (value, destinations), got {quoted(pair)}"
            )


def _check_destinations(destinations: Any) -> None:
    """Raise unless `destinations` is a place: a device's name, an array, a number or a variable."""
    if isinstance(destinations, (list, tuple, dict, set)):
        raise TypeError(f"destinations must be one device, array or variable, got a {type(destinations).__name__}")
    if destinations is None or (isinstance(destinations, str) and not destinations):
        raise ValueError(f"destinations can not be empty, got {destinations!r}: give a device, an array or a variable")
