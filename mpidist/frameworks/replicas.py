"""Over which ranks adapters reduce: the replicas of the strategy in force, or all ranks of the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import numpy

from mpidist import context, transports
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.handle import Handle
from mpidist.compression import Compression
from mpidist.compression.compressed import bind_all_reduce
from mpidist.options import ReduceOp
from mpidist.world import launched_communicator


class HostReduction(Protocol):
    """An all-reduce bound to lists of host arrays."""

    def __call__(self, arrays: Any) -> Any:
        """Return the results; ValueError for other arrays, where nothing is done.  Collective."""

    def start(self, arrays: Any) -> Any:
        """Return a handle, whose ``wait()`` returns the results.  Collective."""


class Replicas:
    """The ranks that train together.

    Parameters
    ----------
    communicator : Communicator
    bind : callable, optional
        ``bind(arrays, op)`` returns the strategy's own bound all-reduce.

    Attributes
    ----------
    communicator : Communicator
    rank, size : int
    kept : dict
        By name: what adapters keep of these ranks, as long as they are there.
    """

    def __init__(self, communicator: Communicator, bind: Callable[[Any, str], Any] | None = None) -> None:
        self.communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self.kept: dict[str, Any] = {}
        self._bind = bind
        self._numbers: dict[str, HostReduction] = {}

    def bind(
        self, arrays: Sequence[Any], op: str, names: Sequence[str], compression: Compression | None = None
    ) -> HostReduction:
        """Return the all-reduce of lists like this one.  Collective: every rank calls it in the same order."""
        if self._bind is not None and compression is None:
            return self._bind(arrays, op)
        return bind_all_reduce(self.communicator, arrays, op, compression, names)

    def shares_of(self, weight: float) -> float | None:
        """Return this rank's part of the weights of all ranks; None where all weigh the same.

        Collective: every rank calls it in the same order.

        Raises
        ------
        ValueError
            On all ranks: a weight is negative or not finite (names the rank), or all of them are 0.
        """
        return _share(self._of_all(weight, "(weights of the ranks)"), self.rank)

    def own_part(self, length: int) -> slice:
        """Return where this rank's elements are among those of all ranks, in rank order.

        Collective: every rank calls it in the same order.
        """
        first = int(self._of_all(length, "(lengths of the ranks)")[: self.rank].sum())
        return slice(first, first + length)

    def _of_all(self, number: float, what: str) -> Any:
        """Return the number that each rank gives, by rank; `what` is for messages.  Collective."""
        given = numpy.zeros(self.size)
        given[self.rank] = number
        if self.size > 1:
            if what not in self._numbers:
                self._numbers[what] = self.bind([given], "sum", [what])
            (given,) = self._numbers[what].start([given]).wait()
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


_of_strategies: WeakKeyDictionary[Any, Replicas] = WeakKeyDictionary()


def replicas_in_force() -> Replicas:
    """Return the replicas of the strategy in force; all ranks of the job where there is none.

    Collective at the first call, which may start MPI; local later.

    Raises
    ------
    NotImplementedError
        The strategy reduces nothing over replicas: its gradients go to servers.
    """
    if context.has_strategy():
        return _of_strategy(context.get_strategy())
    communicator = launched_communicator()
    found = communicator.adapters.get("replicas")
    if found is None:
        found = communicator.adapters["replicas"] = Replicas(communicator)
    return found


def _of_strategy(strategy: Any) -> Replicas:
    found = _of_strategies.get(strategy)
    if found is None:
        found = _of_strategies[strategy] = _made(strategy)
    return found


def _made(strategy: Any) -> Replicas:
    extended: Any = strategy.extended
    if extended.num_replicas == 1 and extended.num_logical_devices == 1:
        return _alone()
    communicator = getattr(extended, "communicator", None)
    if communicator is None:
        raise NotImplementedError(
            f"{type(strategy).__name__} reduces nothing over replicas; use MultiWorkerMirroredStrategy, or call it "
            "outside of strategies"
        )

    alive: Any = ref(extended)  # what is kept of a strategy must not keep the strategy

    def reduce(given: list[Any], op: ReduceOp) -> list[Any]:
        return alive().reduce_arrays(op, given)

    def bind(arrays: list[Any], op: str) -> Any:
        engine, parsed = alive().engine(), ReduceOp.parse(op)
        if engine is None or not arrays:
            return _ByStrategy(lambda given: reduce(given, parsed))
        return engine.bind(arrays, parsed.verb)

    return Replicas(communicator, bind)


@cache
def _alone() -> Replicas:
    return Replicas(Communicator(transports.alone()))


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
