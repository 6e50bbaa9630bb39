"""Over which ranks adapters reduce: the replicas of the strategy in force, or all ranks of the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from weakref import ref

import numpy

from mpidist import context, transports
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.engine import Engine
from mpidist.collectives.handle import Handle
from mpidist.collectives.persistent_all_reduce import BoundAllReduce
from mpidist.collectives.reductions.plan import Signature
from mpidist.compression import Compression
from mpidist.compression.coded_list import CodedList
from mpidist.compression.compressed import bind_all_reduce, is_coded
from mpidist.options import ReduceOp
from mpidist.strategies.extended import StrategyExtended
from mpidist.variables import IndexedSlices
from mpidist.variables.row_reduction import reduce_rows
from mpidist.world import launched_communicator

#: ``reduce(arrays)`` puts reduced values in place of a list's own.
InPlace = Callable[[Sequence[Any]], Any]


class Replicas:
    """The ranks that train together.

    `extended` is that of the strategy whose replicas these are, which may reduce in a way of its own.  `kept` has by
    name what adapters keep of these ranks, as long as they are there.
    """

    def __init__(self, communicator: Communicator, extended: StrategyExtended | None = None) -> None:
        self.communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self.kept: dict[str, Any] = {}
        self._extended = extended
        self._numbers = count()

    def next_number(self) -> int:
        """Return how often this was called before: it numbers what all ranks make in the same order.  Local."""
        return next(self._numbers)

    # -- bound ---------------------------------------------------------------------------------------------------------

    def bind(
        self, arrays: Sequence[Any], op: str, names: Sequence[str], compression: Compression | None = None
    ) -> BoundAllReduce:
        """Return the all-reduce of lists like this one, to new arrays.  Collective.

        `op` is ``"sum"`` or ``"mean"``; without a compression also ``"min"``, ``"max"`` or ``"prod"``.  `names` are for
        messages.
        """
        if self._extended is None or compression is not None:
            return bind_all_reduce(self.communicator, arrays, op, compression, names)
        engine = self._extended.engine()
        if engine is None:
            return _ByStrategy(self._in_own_way(op))
        return engine.bind(arrays, op)

    def bind_in_place(
        self, op: str, signatures: Sequence[Signature], compression: Compression | None = None, kind: Any = None
    ) -> InPlace:
        """Return what reduces lists of such arrays in place; operations and compression as for `bind`.  Collective.

        `kind` is an array of the kind that will be reduced; by default they are NumPy's.
        """
        if self.size == 1:
            return list
        engine = self.engine()
        if compression is None and engine is not None:
            return engine.bind_in_place(signatures, op, kind)
        if compression is None:
            reduce = self._in_own_way(op)
        else:
            like = [numpy.empty(shape, dtype) for _, dtype, shape in signatures]
            reduce = bind_all_reduce(self.communicator, like, op, compression, [name for name, *_ in signatures])
        return _Copied(reduce)

    def engine(self) -> Engine | None:
        """Return the engine of these ranks; None where the strategy reduces in a way of its own.  Local."""
        return self.communicator.engine() if self._extended is None else self._extended.engine()

    def _in_own_way(self, op: str) -> Callable[[list[Any]], list[Any]]:
        """Return what reduces lists as the strategy does, past which nothing is bound."""
        extended, reduce_op = self._extended, ReduceOp.parse(op)
        assert extended is not None
        return lambda arrays: extended.reduce_arrays(reduce_op, arrays)

    # -- at once -------------------------------------------------------------------------------------------------------

    def reduce(self, op: str, arrays: Sequence[Any], name: str = "", compression: Compression | None = None) -> None:
        """Reduce a few arrays in place; a compression, which has no error feedback, is for arrays of one dtype.

        Collective: every rank calls it in the same order.  Operations as for `bind`.
        """
        if self.size == 1:
            return
        engine = self.engine()
        if compression is not None and all(map(is_coded, arrays)):
            results = self._coded(op, arrays, name, compression)
        elif engine is not None:
            engine.reduce_in_place(arrays, op, name)
            return
        else:
            results = self._in_own_way(op)(list(arrays))
        for array, result in zip(arrays, results, strict=True):
            array[...] = result

    def _coded(self, op: str, arrays: Sequence[Any], name: str, compression: Compression) -> list[Any]:
        """Return sums or means of arrays of one dtype that is coded.  Collective."""
        signatures = [(name, each.dtype, each.shape) for each in arrays]
        key = ("coded", op, repr(compression), *signatures)
        like = (self.communicator, signatures, op, compression)
        results: list[Any] = self.communicator.bindings.call(key, CodedList, like, arrays, None)
        return results

    def reduce_rows(self, op: str, rows: IndexedSlices) -> IndexedSlices:
        """Return the rows of all replicas reduced, each named once.  Collective."""
        if self.size == 1:
            return rows.coalesced()
        if self._extended is None:
            return reduce_rows(self.communicator, ReduceOp.parse(op), rows, None)
        (found,) = self._extended.reduce_arrays(ReduceOp.parse(op), [rows])
        return found

    def check(self, what: str, signatures: Sequence[Signature]) -> None:
        """Raise CollectiveMismatchError on all ranks unless all have these names, dtypes and shapes.  Collective."""
        if self.size > 1:
            self.communicator.check(self.communicator.call(what, signatures))

    def shares_of(self, weight: float) -> float | None:
        """Return this rank's part of the weights of all ranks; None where all weigh the same.  Collective.

        ValueError, on all ranks, where a weight is negative or not finite (names the rank), or all of them are 0.
        """
        return _share(self._of_all(weight, "(weights of the ranks)"), self.rank)

    def own_part(self, length: int) -> slice:
        """Return where this rank's elements are among those of all ranks, in rank order.  Collective."""
        first = int(self._of_all(length, "(lengths of the ranks)")[: self.rank].sum())
        return slice(first, first + length)

    def _of_all(self, number: float, what: str) -> Any:
        """Return the number that each rank gives, by rank; `what` is for messages.  Collective."""
        given = numpy.zeros(self.size)
        given[self.rank] = number
        self.reduce("sum", [given], what)
        return given


def _share(weights: Any, rank: int) -> float | None:
    wrong = [each for each, weight in enumerate(weights) if not (numpy.isfinite(weight) and weight >= 0)]
    if wrong:
        shown = ", ".join(f"{weights[each]:g} on rank {each}" for each in wrong[:8])
        raise RowsError(f"weights must be numbers of rows, finite and not negative; got {shown}")
    total = weights.sum()
    if total == 0:
        raise RowsError(
            f"the weights of all {len(weights)} ranks are 0, so there is no mean; leave the step out on all ranks"
        )
    return None if (weights == weights[0]).all() else float(weights[rank] / total)


class RowsError(ValueError):
    """A value that is wrong on one rank, and known to all of them."""

    on_all_ranks = True


def replicas_in_force() -> Replicas:
    """Return the replicas of the strategy in force; all ranks of the job where there is none.

    Collective at the first call, which may start MPI; local later.  Errors as for `replicas_of`.
    """
    return replicas_of(context.get_strategy())


def replicas_of(strategy: Any) -> Replicas:
    """Return the replicas of a strategy, the same object at every call; of the default one, all ranks of the job.

    Collective at the first call, which may start MPI; local later.  NotImplementedError for a strategy that reduces
    nothing over replicas: its gradients go to servers.
    """
    if context.is_default(strategy):
        communicator = launched_communicator()
        return _kept(communicator.adapters, lambda: Replicas(communicator))
    extended = strategy.extended
    if extended.num_replicas == 1 and extended.num_logical_devices == 1:
        return _kept(extended.adapters, lambda: Replicas(Communicator(transports.alone())))
    if getattr(extended, "communicator", None) is None:
        raise NotImplementedError(
            f"{type(strategy).__name__} reduces nothing over replicas; use MultiWorkerMirroredStrategy, or call it "
            "outside of strategies"
        )
    return _kept(extended.adapters, lambda: Replicas(extended.communicator, extended))


def _kept(adapters: dict[str, Any], make: Callable[[], Replicas]) -> Replicas:
    """Return the replicas that a world, or a strategy, keeps; made at the first call."""
    if "replicas" not in adapters:
        adapters["replicas"] = make()
    found: Replicas = adapters["replicas"]
    return found


class _Copied:
    """Puts the results of an all-reduce, `reduce`, in place of a list's own values."""

    def __init__(self, reduce: Any) -> None:
        self.reduce = reduce

    def __call__(self, arrays: Sequence[Any]) -> None:
        for array, result in zip(arrays, self.reduce(list(arrays)), strict=True):
            array[...] = result


class _ByStrategy:
    """Reduces by a strategy's own way, which nothing is bound past; what is started is reduced by `wait`."""

    def __init__(self, reduce: Callable[[list[Any]], list[Any]]) -> None:
        self._reduce = reduce
        self._under_way: Callable[[], Any] = lambda: None

    def __call__(self, arrays: list[Any]) -> list[Any]:
        return self._reduce(list(arrays))

    def start(self, arrays: list[Any]) -> Handle:
        """Return a handle; RuntimeError while there is another one, as for `Bound`: callers put values in one place."""
        if self._under_way() is not None:
            raise RuntimeError("a reduction is under way; wait() for its handle before the next start")

        def finish() -> list[Any]:
            return self._reduce(list(arrays))

        self._under_way = ref(finish)  # the handle has it until it is waited for or dropped
        return Handle(finish)
