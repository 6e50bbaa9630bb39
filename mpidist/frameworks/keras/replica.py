"""`ModelReplica`: what a distributed model knows of its strategy and of the step under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy

from mpidist import context
from mpidist.arrays import byte_view
from mpidist.errors import CollectiveMismatchError
from mpidist.frameworks.keras.current_step import current_step, step_of
from mpidist.frameworks.keras.random_numbers import own_random_numbers
from mpidist.frameworks.keras.shares import BatchShare
from mpidist.frameworks.replicas import Replicas, replicas_of
from mpidist.options import ReduceOp

#: So many calls of `train_on_batch`, or of an optimizer in a loop of the user's own, have one comparison of weights.
_CALLS_PER_COMPARISON = 50


class ModelReplica:
    """One replica of a model, or of an optimizer alone: of the strategy that distributes it.

    Parameters
    ----------
    strategy : Strategy
        Of several replicas, each of one rank.
    replicas : Replicas, optional
        By default those of the strategy.

    Attributes
    ----------
    number, count : int
        Of this replica, from 0; of all.
    shares : deque of BatchShare
        Of the batches that were handed out and are not trained with yet, in order.
    share : BatchShare or None
        Of the step under way.
    collected : list or None
        Where gradients are put in place of being applied, while the first half of a step is traced, and in a step whose
        gradients go to servers.
    weight : number
        What a loss that is scaled is multiplied by in the step under way: this replica's part of the global batch.
    weighted : set of int
        The ids of the optimizers that have scaled, and weighted, the loss of the step under way.
    factor : number or None
        What the loss is multiplied by, where its reduction is a sum.
    is_for_one_batch : bool
        Whether `train_on_batch` or `test_on_batch` is under way.
    has_chiefs_weights : bool
        Whether the model began with the weights that the chief's has.
    is_synchronized : bool
        Whether all replicas have the chief's weights, and the state of its optimizer.
    compilations : int
        How often the model was compiled.
    steps : object
        What the seam of the backend keeps for the model's steps.
    last_share : BatchShare or None
        Of the last step.
    last_results : tuple of dict
        What the metrics said last: of all rows, and of this replica's.
    is_vote : bool
        Whether this rank votes for an end of the training; the votes go along with the next reduction.
    is_stopped : bool
        Whether any rank did, as all ranks know.
    """

    def __init__(self, strategy: Any, replicas: Replicas | None = None) -> None:
        self.strategy = strategy
        self.number: int = strategy.extended.replica_id
        self.count: int = strategy.extended.num_replicas
        self.replicas = replicas_of(strategy) if replicas is None else replicas
        self.communicator = self.replicas.communicator
        self.has_chiefs_weights = self.is_synchronized = False
        self.halves: set[int] = set()
        self.compilations = 0
        self.steps: Any = None
        self.last_share: BatchShare | None = None
        self._depth = 0
        self._calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._forget_step()

    def _forget_step(self) -> None:
        self.shares: deque[BatchShare] = deque()
        self.share: BatchShare | None = None
        self.collected: list[Any] | None = None
        self.weight: Any = 1.0
        self.weighted: set[int] = set()
        self.factor: Any = None
        self.is_for_one_batch = False
        self.last_results: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self.is_vote = self.is_stopped = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelReplica:
        return self

    # -- where it is ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """How messages call this rank."""
        return f"rank {self.number} of {self.count}"

    @property
    def is_chief(self) -> bool:
        """Whether this rank writes files and shows progress."""
        return self.number == 0

    @property
    def is_in_force(self) -> bool:
        """Whether the code runs in a replica of the strategy, so that all ranks run it."""
        present = context.get_replica_context()
        return present is not None and present.strategy is self.strategy

    @property
    def is_running(self) -> bool:
        """Whether a method of the model that is distributed is under way."""
        return self._depth > 0

    @property
    def is_nested(self) -> bool:
        """Whether a method of the model that is distributed calls the present one, as `fit` calls `evaluate`."""
        return self._depth > 1

    def run(self, fn: Callable[[], Any]) -> Any:
        """Call a function as this replica; an error in it is told to the other ranks.  Collective.

        RuntimeError, in a step: the function would take this replica's rows for those of all replicas.
        """
        if current_step.replica is not None:
            raise RuntimeError(
                f"{self.name}: fit, evaluate, predict, train_on_batch and test_on_batch of a distributed Keras model "
                "take the rows of all replicas, and a step has those of one: inside of train_step, test_step or a "
                "layer, call the model itself"
            )
        self._depth += 1
        try:
            if self._depth > 1:
                return fn()
            return self.strategy.run(fn)
        finally:
            self._depth -= 1
            if not self._depth:
                self._forget_step()

    # -- the step under way --------------------------------------------------------------------------------------------

    def next_share(self, rows: int) -> BatchShare:
        """Return the share of the batch that is trained with, or tested, now.  Local.

        RuntimeError: the batch was not handed out by this replica, or has another number of rows.
        """
        if not self.shares:
            raise RuntimeError(
                f"{self.name}: train_step and test_step of a distributed Keras model know their part of the global "
                "batch in fit, evaluate, train_on_batch and test_on_batch only; call one of these"
            )
        share = self.last_share = self.shares.popleft()
        if share.given_rows != rows:
            raise RuntimeError(
                f"{self.name}: a step was given {rows} rows, expected {share.given_rows} of a global batch of "
                f"{share.rows}: the inputs of one batch differ in their number of rows, or came in another order"
            )
        return share

    @contextmanager
    def step(self, share: BatchShare) -> Iterator[None]:
        """Take a step on a part of a batch."""
        self.share, self.weight = share, share.weight
        self.weighted.clear()
        try:
            with step_of(self), own_random_numbers(self.number):
                yield
        finally:
            self.share = None

    # -- communication -------------------------------------------------------------------------------------------------

    def reduce(self, op: ReduceOp, arrays: list[numpy.ndarray]) -> list[numpy.ndarray]:
        """Return arrays reduced over the replicas.  Collective, in a replica."""
        results: list[numpy.ndarray] = context.get_replica_context().all_reduce(op, arrays)
        return results

    def places(self, has: Sequence[bool]) -> list[numpy.ndarray]:
        """Return what is reduced with gradients of which some are None, for `require_same_places`.  Local."""
        return [] if all(has) else [numpy.array(has, "float32")]

    def require_same_places(self, totals: Sequence[numpy.ndarray], of_all: float) -> None:
        """Raise CollectiveMismatchError, on all ranks, where replicas have gradients for different variables.  Local.

        `totals`: of `places`, reduced over the replicas.  `of_all`: what stands there for a variable of which all
        replicas have a gradient.
        """
        # a mean may be rounded, and is nearer to one of the two than half a replica where all are alike
        counts = [(place, total / of_all * self.count) for has in totals for place, total in enumerate(has)]
        differ = [place for place, count in counts if 0.5 < count < self.count - 0.5]
        if differ:
            raise CollectiveMismatchError(
                f"{self.name}: some replicas have a gradient, and others None, for variables "
                f"{', '.join(map(str, differ))} of those that an optimizer of Keras was given (counted from 0): give "
                "gradients for the same variables on every rank, of zeros where there are none"
            )

    def sum(self, values: Any) -> numpy.ndarray:
        """Return the sums of numbers, a sequence or an array of one axis, over the replicas, float64.  Collective."""
        total = numpy.array(values, "float64")
        self.communicator.all_reduce(total)
        return total

    def from_chief(self, arrays: Sequence[numpy.ndarray]) -> list[numpy.ndarray]:
        """Return the chief's arrays, as new ones; every rank gives some of the same shapes and dtypes.  Collective."""
        results = [numpy.array(each, order="C") for each in arrays]
        places = [byte_view(each) for each in results]  # bytes, since there are more dtypes than MPI knows
        if not places:
            return []
        flat = numpy.concatenate(places)
        self.communicator.broadcast(flat)
        for place, values in zip(places, numpy.split(flat, numpy.cumsum([len(each) for each in places])), strict=False):
            place[...] = values
        return results

    def is_due(self, owner: Any) -> bool:
        """Return whether weights are compared in this call, of those for a model or an optimizer.  Local."""
        before = self._calls.get(owner, 0)
        self._calls[owner] = before + 1
        return before % _CALLS_PER_COMPARISON == 0
