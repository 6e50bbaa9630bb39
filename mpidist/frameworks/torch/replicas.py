"""The replicas that a model trains on: those of a strategy, or all ranks of the job where no strategy is in force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

import numpy

from mpidist import context
from mpidist.arrays import empty
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.reductions.plan import Signature
from mpidist.compression import CompressedAllReduce, Compression
from mpidist.options import ReduceOp
from mpidist.strategies.extended import StrategyExtended
from mpidist.strategies.parameter_server import ParameterServerStrategy
from mpidist.variables import IndexedSlices
from mpidist.variables.row_reduction import reduce_rows
from mpidist.world import launched_communicator

#: ``reduce(arrays)`` puts reduced values in place of a list's own.
InPlace = Callable[[Sequence[Any]], Any]


class TorchReplicas:
    """One replica's view of all that train together.

    Parameters
    ----------
    communicator : Communicator or None
        None for one replica.
    extended : StrategyExtended, optional
        Of the strategy whose replicas these are, which reduces in its own way.

    Attributes
    ----------
    size, rank : int
    """

    def __init__(self, communicator: Communicator | None, extended: StrategyExtended | None = None) -> None:
        self.size = 1 if communicator is None else communicator.size
        self.rank = 0 if communicator is None else communicator.rank
        self._communicator = communicator
        self._extended = extended
        self._bound: dict[Any, InPlace] = {}
        self._numbers = count()

    @property
    def communicator(self) -> Communicator:
        """The ranks; AssertionError for one replica, which has nobody to talk to."""
        assert self._communicator is not None
        return self._communicator

    def next_number(self) -> int:
        """Return how often this was called before: it numbers what all ranks make in the same order.  Local."""
        return next(self._numbers)

    def bind(
        self, op: str, signatures: Sequence[Signature], compression: Compression | None = None, kind: Any = None
    ) -> InPlace:
        """Return what reduces lists of such arrays in place.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        op : str
            ``"sum"`` or ``"mean"``; without a strategy also ``"min"``, ``"max"`` or ``"prod"``.
        signatures : sequence of (name, dtype, shape)
        compression : Compression, optional
            How values are coded on the wire.
        kind : array, optional
            An array of the kind that will be reduced; by default they are NumPy's.
        """
        if self.size == 1:
            return list
        if compression is not None:
            return self._bind_coded(op, signatures, compression)
        if self._extended is None:
            return self.communicator.engine().bind_in_place(signatures, op, kind)
        extended, reduce_op = self._extended, ReduceOp.parse(op)

        def reduce(arrays: Sequence[Any]) -> None:
            for array, result in zip(arrays, extended.reduce_arrays(reduce_op, list(arrays)), strict=True):
                array[...] = result

        engine = extended.engine()
        return reduce if engine is None else engine.bind_in_place(signatures, reduce_op.verb, kind)

    def _bind_coded(self, op: str, signatures: Sequence[Signature], compression: Compression) -> InPlace:
        like = [numpy.empty(shape, dtype) for _, dtype, shape in signatures]
        coded = CompressedAllReduce(self.communicator, like, op, compression, [name for name, _, _ in signatures])

        def reduce(arrays: Sequence[Any]) -> None:
            for array, result in zip(arrays, coded(arrays), strict=True):
                array[...] = result

        return reduce

    def reduce(self, op: str, arrays: Sequence[Any], name: str = "", compression: Compression | None = None) -> None:
        """Reduce a few arrays in place; what is bound for them is kept.  Parameters as for `bind`.

        Collective: every rank calls it in the same order.
        """
        key = op, name, compression, *((type(each), each.dtype, each.shape) for each in arrays)
        if key not in self._bound:
            signatures = [(name, each.dtype, each.shape) for each in arrays]
            self._bound[key] = self.bind(op, signatures, compression, empty(0, arrays[0].dtype, arrays[0]))
        self._bound[key](arrays)

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

    def broadcast(self, array: Any, root: int) -> None:
        """Give all ranks the contiguous array of rank `root`, in place.  Collective."""
        if not 0 <= root < self.size:
            raise ValueError(f"root_rank {root} is no rank of {self.size}")
        if self.size > 1:
            self.communicator.broadcast(array, root)

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Return the small byte string that every rank gave, in rank order.  Collective."""
        return [payload] if self.size == 1 else self.communicator.exchange(payload, what)

    def broadcast_bytes(self, payload: bytes, root: int) -> bytes:
        """Return the byte string of rank `root`.  Collective."""
        length = numpy.array([len(payload)], numpy.int64)
        self.broadcast(length, root)
        buffer = numpy.empty(int(length[0]), numpy.uint8)
        if self.rank == root:
            buffer[...] = numpy.frombuffer(payload, numpy.uint8)
        self.broadcast(buffer, root)
        return buffer.tobytes()


def replicas_of(strategy: Any = None) -> TorchReplicas:
    """Return the replicas of a strategy; None for the strategy in force, or all ranks of the job where there is none.

    Collective at the first call, which may start MPI.

    Raises
    ------
    NotImplementedError
        A strategy on which PyTorch's models are not trained.
    """
    if strategy is None and context.has_strategy():
        strategy = context.get_strategy()
    if strategy is None or context.is_default(strategy):
        return _kept(launched_communicator(), None)
    extended = strategy.extended
    if isinstance(strategy, ParameterServerStrategy) or extended.num_logical_devices > 1:
        raise NotImplementedError(
            f"a PyTorch model is not trained under {strategy!r}: use MultiWorkerMirroredStrategy or MirroredStrategy, "
            "whose replicas are whole and stay alike"
        )
    if extended.num_replicas == 1:
        return TorchReplicas(None)
    return _kept(extended.communicator, extended)


#: So that what is bound for small values is found again.
_kept = lru_cache(maxsize=16)(TorchReplicas)
