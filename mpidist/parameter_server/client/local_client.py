"""`LocalClient`: what a `Client` is to a job with servers, for a process without any: it holds the variables itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from mpidist.collectives.reductions.plan_cache import PlanCache
from mpidist.optimizers.base import Optimizer
from mpidist.parameter_server.layout import Key, PushPlan, VariableSpec, in_order
from mpidist.parameter_server.pickles import packed
from mpidist.parameter_server.server.store import Store
from mpidist.parameter_server.server.stored_optimizer import StoredOptimizer
from mpidist.variables import IndexedSlices, read_only


class LocalClient:
    """The interface of `Client`, over variables of this process.  All Local.

    Every push is applied when the call returns, and a value is that of the moment.
    """

    is_chief = True
    #: There is no other process that reads or writes the variables.
    is_alone = True
    #: `value` has to be asked for each.
    snapshot: Mapping[Key, Any] = {}
    #: Grows when `value` may give something else.
    moment = 0

    def __init__(self) -> None:
        self._store = Store(0)
        self._plans = PlanCache()
        #: Where the gradients of any list are packed.
        self._packed = numpy.empty(0, numpy.uint8)

    # -- variables ----------------------------------------------------------------------------------------------------

    def create(self, spec: VariableSpec, server: int, value: Any) -> None:
        """Begin to hold a variable."""
        self._store.create(spec, value)

    def value(self, key: Key) -> Any:
        """Return a read-only view of the value; valid until the variable changes."""
        self._store.lay_out()
        return read_only(self._store.read(key))

    def read(self, key: Key) -> Any:
        """Return a copy of the value."""
        return self._store.read(key).copy()

    def refresh(self) -> None:
        """Do nothing: values are fresh."""

    def assign(self, key: Key, value: Any, verb: str = "assign") -> None:
        """Set a variable, add to it, or subtract from it."""
        self.moment += 1
        self._store.assign(key, verb, value)

    def lookup(self, key: Key, indices: Any) -> Any:
        """Return some rows, as a copy."""
        return self._store.lookup(key, numpy.asarray(indices, numpy.int64))

    def scatter(self, key: Key, verb: str, indices: Any, rows: Any) -> None:
        """Change some rows."""
        self.moment += 1
        self._store.scatter(key, verb, numpy.asarray(indices, numpy.int64), rows)

    def add(self, key: Key, values: Any) -> None:
        """Add to all rows of a variable, which is kept apart from then on."""
        self.scatter(key, "scatter_add", numpy.arange(len(values)), values)

    def version(self, key: Key) -> int:
        """Return how often a variable was changed."""
        return self._store.version(key)

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def register_optimizer(self, optimizer: Optimizer, number: int) -> int:
        """Take over an optimizer's rule and settings under a number; nothing if there is one."""
        if number not in self._store.optimizers:
            self._store.optimizers[number] = StoredOptimizer(packed(optimizer), number)
        return number

    def push(
        self, number: int, pairs: Sequence[tuple[Key, Any]], learning_rate: float | None = None, scale: float = 1.0
    ) -> None:
        """Apply gradients, or rows of them, as one step."""
        self.moment += 1
        gradients = dict(pairs)
        specs = [self._store.variables[key].spec for key in gradients]
        dense = in_order(spec for spec in specs if not isinstance(gradients[spec.key], IndexedSlices))
        sparse = in_order(spec for spec in specs if isinstance(gradients[spec.key], IndexedSlices))
        plan = PushPlan(tuple(dense), tuple(sparse))
        counts = [len(gradients[spec.key].indices) for spec in sparse]
        nbytes = plan.nbytes(counts)
        if self._packed.size < nbytes:
            self._packed = numpy.empty(nbytes, numpy.uint8)
        payload = self._packed[:nbytes]
        _pack(plan, counts, gradients, payload)
        rate = math.nan if learning_rate is None else learning_rate
        planned = self._store.planned(plan)
        self._store.push(number, planned, [(counts, payload)], rate, scale)
        self._plans.use(planned)

    def flush(self) -> None:
        """Do nothing: every push is applied at once."""

    def iterations(self, number: int) -> int:
        """Return how many steps an optimizer has made."""
        return self._store.optimizers[number].optimizer.iterations

    def set_iterations(self, number: int, value: int) -> None:
        """Count steps from `value` on."""
        self._store.optimizers[number].optimizer.iterations = value

    def set_learning_rate(self, number: int, value: Any) -> None:
        """Set the learning rate of later steps."""
        self._store.optimizers[number].optimizer.learning_rate = value

    def optimizer_state(self, number: int) -> dict[str, Any]:
        """Return steps, settings, and slots as ``"variable/shard/slot"``."""
        return {name: numpy.copy(each) if hasattr(each, "dtype") else each for name, each in self._state(number)}

    def _state(self, number: int) -> Sequence[tuple[str, Any]]:
        return list(self._store.optimizers[number].state(self._store.buffers).items())

    def restore_optimizer(self, number: int, state: Mapping[str, Any]) -> None:
        """Take over what `optimizer_state` gave."""
        self._store.restore(number, dict(state))

    def undivided(self, act: Callable[[], Any]) -> Any:
        """Return what `act` returns."""
        return act()

    def leave(self) -> None:
        """Do nothing: nobody waits."""


def _pack(plan: PushPlan, counts: Sequence[int], gradients: Mapping[Key, Any], payload: Any) -> None:
    """Copy gradients to where a plan has them."""
    for spec, (section, first) in zip(plan.dense, plan.places, strict=True):
        plan.sections[section].of(payload)[first : first + spec.size] = gradients[spec.key].reshape(-1)
    for spec, (numbers, where) in zip(plan.sparse, plan.row_places(counts), strict=True):
        rows = gradients[spec.key]
        payload[numbers].view(numpy.int64)[:] = rows.indices
        payload[where].view(spec.dtype)[:] = rows.values.reshape(-1)
