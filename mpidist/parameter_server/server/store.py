"""`Store`: the variables of one server, and every way in which they change.

Most variables lie side by side in `Buffers`, and a change writes the next copy of them.  Those that have seen a sparse
operation are *tables*: each has memory of its own, is changed in place, and is read by asking.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy

from mpidist.errors import TornVariableError
from mpidist.optimizers.slices import compute_dtype
from mpidist.parameter_server.copies import Buffers, NoCopy
from mpidist.parameter_server.layout import Key, Layout, PushPlan, VariableSpec
from mpidist.parameter_server.server.stored_optimizer import StoredOptimizer, StoredVariable
from mpidist.parameter_server.update import Update
from mpidist.variables import IndexedSlices
from mpidist.variables.variable import VERBS


@dataclass
class _Target:
    """What a plan means with one optimizer and the present layout.

    `alone` are tables with a gradient of all of them, and where it is in the payload; `mean` is memory for the mean of
    several payloads, once it was needed.
    """

    update: Update
    plan: PushPlan
    alone: list[tuple[StoredVariable, slice, numpy.dtype]]
    mean: Any = None

    def mean_of(self, payloads: Sequence[Any], weights: Sequence[float]) -> Any:
        """Return the mean of gradients of whole variables, each times its weight, in memory that is used again."""
        if self.mean is None:
            self.mean = numpy.empty(self.plan.dense_nbytes, numpy.uint8)
        _mean(self.plan, payloads, weights, self.mean)
        return self.mean

    def tables_in(self, payload: Any) -> list[tuple[StoredVariable, Any, Any]]:
        """Return the tables with a gradient of all of them, and that, as `Store._rows` returns those of rows."""
        return [(variable, None, payload[where].view(dtype)) for variable, where, dtype in self.alone]


#: What a push brings: how many rows of each table, its gradients, and what these are to be multiplied by.
Pushed = tuple[Sequence[int], Any, float]


class Planned:
    """A plan, and what is known of it here.  Made by `Store.planned`, and kept by whoever pushes by it."""

    def __init__(self, plan: PushPlan) -> None:
        self.plan = plan
        self.targets: dict[int, _Target] = {}


class Store:
    """The variables of a server.  All Local."""

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self.variables: dict[Key, StoredVariable] = {}
        self.optimizers: dict[int, StoredOptimizer] = {}
        self._tables: set[Key] = set()
        self._table_versions: dict[Key, int] = {}
        self._fresh: set[Key] = set()
        #: Variables that a push has changed in part, and why it got no further.
        self._torn: dict[Key, str] = {}
        #: Change with the layout; with settings of optimizers, and with where their slots lie.
        self.layout_number = self.rules_number = 0
        self.buffers = Buffers(Layout([]), readers)
        #: Those that somebody keeps.
        self.plans: WeakValueDictionary[PushPlan, Planned] = WeakValueDictionary()

    # -- variables ----------------------------------------------------------------------------------------------------

    def create(self, spec: VariableSpec, value: Any) -> None:
        """Begin to hold a variable, whose value is copied."""
        storage = numpy.array(value, spec.dtype, order="C").reshape(spec.shape)
        self.variables[spec.key] = StoredVariable(spec, storage)
        self._fresh.add(spec.key)

    @property
    def is_laid_out(self) -> bool:
        """Whether all variables have their places."""
        return not self._fresh

    def is_table(self, key: Key) -> bool:
        """Whether a variable has memory of its own."""
        return key in self._tables

    def lay_out(self) -> None:
        """Put variables that were created since the last time among the others."""
        if self._fresh:
            self._lay_out()

    def _lay_out(self) -> None:
        before = self.buffers
        keys = [key for key in self.variables if key not in self._tables]
        versions = {key: self.version(key) for key in keys}
        values = {key: self._value(key) for key in keys}
        buffers = Buffers(Layout(self.variables[key].spec for key in keys), self._readers)
        views = buffers.views(0)
        for key in keys:
            views[key][...] = values[key]
            self.variables[key].storage = views[key]
        for index, spec in enumerate(buffers.layout.specs):
            buffers.versions[0][index] = versions[spec.key]
        for optimizer in self.optimizers.values():
            optimizer.lay_out(before, buffers, self.variables)
        self.buffers, self._fresh = buffers, set()
        for planned in self.plans.values():
            planned.targets.clear()
        self.layout_number += 1
        before.close()

    def make_table(self, key: Key) -> StoredVariable:
        """Give a variable memory of its own, if it has none, and return it."""
        variable = self.variables[key]
        if key in self._tables:
            return variable
        self._table_versions[key] = self.version(key)
        if key in self._fresh:  # nobody has seen it among the others
            self._fresh.remove(key)
            self._tables.add(key)
            return variable
        storage = self._value(key).copy()
        self._tables.add(key)
        try:
            self._lay_out()
        except OSError:  # no memory for another layout: all is as it was
            self._tables.remove(key)
            raise
        variable.storage = storage
        return variable

    def read(self, key: Key) -> Any:
        """Return the value of a variable: a view, until the next change; TornVariableError if it has none."""
        self.require_whole([key])
        return self._value(key)

    @property
    def is_torn(self) -> bool:
        """Whether a variable or a slot is torn."""
        return bool(self._torn) or any(optimizer.is_torn for optimizer in self.optimizers.values())

    def require_whole(self, keys: Container[Key] | None = None) -> None:
        """Raise TornVariableError if one of these variables, or of all, was changed in part and not set since."""
        for key, cause in self._torn.items() if self._torn else ():
            if keys is None or key in keys:
                raise TornVariableError(
                    f"{self.variables[key].spec} is torn: {cause}. Its value is neither the old nor the new one. Set "
                    "all of it with assign, or restore a checkpoint"
                )

    def _value(self, key: Key) -> Any:
        if key in self._tables or key in self._fresh:
            return self.variables[key].storage
        return self.buffers.views(self.buffers.current)[key]

    def version(self, key: Key) -> int:
        """Return how often a variable was changed."""
        if key in self._tables:
            return self._table_versions[key]
        if key in self._fresh:
            return 0
        buffers = self.buffers
        return int(buffers.versions[buffers.current][buffers.layout.index[key]])

    def close(self) -> None:
        """Give memory back; clients that have mapped it keep it."""
        self.buffers.close()
        for optimizer in self.optimizers.values():
            if optimizer.slots is not None:
                optimizer.slots.close()

    # -- changes ------------------------------------------------------------------------------------------------------

    def assign(self, key: Key, verb: str, value: Any) -> None:
        """Set all of a variable, or add to it, or subtract from it."""
        operation = VERBS[verb]
        if operation is not None:
            self.require_whole([key])
        self._assign(key, operation, value)
        self._torn.pop(key, None)

    def _assign(self, key: Key, operation: Any, value: Any) -> None:
        if key in self._tables:
            _write(self.variables[key].storage, ..., operation, value)
            self._table_versions[key] += 1
            return
        self.lay_out()
        buffers = self.buffers
        changed = buffers.layout.places_of([key])
        before = buffers.views(buffers.current)[key]
        buffer = buffers.begin(changed)
        after = buffers.views(buffer)[key]
        if operation is None:
            after[...] = value
        else:
            operation(before, value, out=after, casting="same_kind")  # looks at dtypes before it writes
        buffers.commit(buffer, changed)

    def scatter(self, key: Key, verb: str, indices: Any, rows: Any) -> None:
        """Change some rows of a variable; a row that is named twice is changed twice."""
        _check_rows(self.variables[key].spec, indices)
        self.require_whole([key])
        table = self.make_table(key).storage
        operation = VERBS[verb]
        if operation is None:
            table[indices] = rows
        else:
            operation.at(table, indices, rows)
        self._table_versions[key] += 1

    def lookup(self, key: Key, indices: Any) -> Any:
        """Return some rows of a variable, as a copy."""
        _check_rows(self.variables[key].spec, indices)
        self.require_whole([key])
        return self.make_table(key).storage[indices]

    def planned(self, plan: PushPlan) -> Planned:
        """Return what is known of a plan here, the same object for equal ones."""
        unknown = [spec.name for spec in (*plan.dense, *plan.sparse) if spec.key not in self.variables]
        if unknown:
            raise KeyError(f"this server has no variables {unknown}")
        found = self.plans.get(plan)
        if found is None:
            found = self.plans[plan] = Planned(plan)
        return found

    def push(self, number: int, planned: Planned, pushed: Sequence[Pushed]) -> None:
        """Apply the mean of some gradients for the same variables, each scaled, as one step of an optimizer.

        Shapes and row numbers are checked before anything is changed.  If the optimizer's rule itself raises, what it
        may have changed is torn: slots, until they are restored; tables, and variables of which there is no copy for
        clients, until they are set.  All else is as it was.
        """
        target = planned.targets.get(number) or self.target(number, planned)
        update, (_, payload, scale) = target.update, pushed[0]
        weights = [1.0]
        if len(pushed) > 1:
            # the largest for the mean, which keeps the loss scale: its dtype may have 16 bits
            scale = max(own for *_, own in pushed) or 1.0
            weights = [own / scale for *_, own in pushed]
        optimizer = self.optimizers[number]
        optimizer.require_whole()
        if self._torn:
            self.require_whole([spec.key for spec in (*target.plan.dense, *target.plan.sparse)])
        rows = self._rows(target.plan, pushed, weights) if target.plan.sparse else []
        if len(pushed) > 1:
            payload = target.mean_of([each for _, each, _ in pushed], weights)
        tables = target.tables_in(payload) + rows
        rule, steps = optimizer.optimizer, optimizer.optimizer.iterations
        rate = rule.learning_rate
        begun: list[Key] = []
        copy = -1
        try:
            if not update.is_empty:
                if self.buffers.count == 1:  # in place
                    begun += [spec.key for spec in target.plan.dense if spec.key not in self._tables]
                copy = update.write(payload, rate, scale, steps)
            for variable, indices, values in tables:
                begun.append(variable.spec.key)
                optimizer.update_rows(variable, indices, values, rate, scale)
        except NoCopy:
            raise
        except BaseException as error:
            if begun:  # what may have been changed in place
                cause = f"its update ended with {type(error).__name__}: {error}"
                self._torn.update(dict.fromkeys(begun, cause))
                optimizer.tear(cause)
            raise
        if copy >= 0:
            update.commit(copy)
        for variable, *_ in tables:
            self._table_versions[variable.spec.key] += 1
        rule.iterations = steps + 1

    def target(self, number: int, planned: Planned) -> _Target:
        """Return what a plan means with an optimizer and the present layout."""
        self.make_room(number, planned.plan)
        if number not in planned.targets:
            plan = planned.plan
            alone = []
            for spec, (section, first) in zip(plan.dense, plan.places, strict=True):
                if spec.key in self._tables:
                    wire = plan.sections[section]
                    begin, end = (wire.start + (first + n) * wire.dtype.itemsize for n in (0, spec.size))
                    alone.append((self.variables[spec.key], slice(begin, end), wire.dtype))
            planned.targets[number] = _Target(Update(self.optimizers[number], plan, self.buffers), plan, alone)
        return planned.targets[number]

    def make_room(self, number: int, plan: PushPlan) -> None:
        """Have places for the variables of a plan, and for an optimizer's slots of them."""
        for spec in plan.sparse:
            self.make_table(spec.key)
        self.lay_out()
        beside = [spec.key for spec in plan.dense if spec.key not in self._tables]
        if self.optimizers[number].admit(self.buffers, beside):
            self.slots_moved(number)

    def slots_moved(self, number: int) -> None:
        """Forget where slots of an optimizer were, here and in clients."""
        for each in self.plans.values():
            each.targets.pop(number, None)
        self.rules_number += 1

    def restore(self, number: int, state: dict[str, Any]) -> None:
        """Take over the state of an optimizer."""
        self.lay_out()
        if self.optimizers[number].restore(state, self.variables, self.buffers):
            self.slots_moved(number)

    def _rows(
        self, plan: PushPlan, pushed: Sequence[Pushed], weights: Sequence[float]
    ) -> list[tuple[StoredVariable, Any, Any]]:
        """Return the rows that pushes carry: variable, numbers of rows, rows, each row once."""
        places = [plan.row_places(counts) for counts, *_ in pushed]
        pushed_rows = []
        for number, spec in enumerate(plan.sparse):
            parts = [
                _rows_of(plan, spec, payload, *place[number])
                for (_, payload, _), place in zip(pushed, places, strict=True)
            ]
            indices, values = parts[0]
            if len(parts) > 1:
                parts = [(rows, _times(each, weight)) for (rows, each), weight in zip(parts, weights, strict=True)]
                indices, values = (numpy.concatenate(each) for each in zip(*parts, strict=True))
                # a sum of 16-bit floats may be too large for them
                values = values.astype(compute_dtype(values.dtype), copy=False)
                joined = IndexedSlices(values, indices, spec.shape).coalesced()
                indices, values = joined.indices, joined.values / joined.dtype.type(len(parts))
            pushed_rows.append((self.variables[spec.key], indices, values))
        return pushed_rows


def _rows_of(plan: PushPlan, spec: VariableSpec, payload: Any, numbers: slice, where: slice) -> tuple[Any, Any]:
    indices = payload[numbers].view(numpy.int64)
    _check_rows(spec, indices)
    return indices, payload[where].view(plan.wire_dtype(spec)).reshape(len(indices), *spec.shape[1:])


def _times(values: Any, weight: float) -> Any:
    """Return gradients times a weight, 16-bit floats in float32; themselves if it is 1."""
    if weight == 1.0:
        return values
    dtype = compute_dtype(values.dtype)
    return numpy.multiply(values, dtype.type(weight), dtype=dtype)


def _mean(plan: PushPlan, payloads: Sequence[Any], weights: Sequence[float], mean: Any) -> None:
    """Write the mean of weighted gradients of whole variables to `mean`; 16-bit floats are added in float32."""
    for section in plan.sections:
        total = _times(section.of(payloads[0]), weights[0]).astype(compute_dtype(section.dtype))
        for payload, weight in zip(payloads[1:], weights[1:], strict=True):
            total += _times(section.of(payload), weight)
        total /= total.dtype.type(len(payloads))
        section.of(mean)[...] = total


def _write(array: Any, where: Any, operation: Any, value: Any) -> None:
    if operation is None:
        array[where] = value
    else:
        operation(array[where], value, out=array[where], casting="same_kind")


def _check_rows(spec: VariableSpec, indices: Any) -> None:
    """Raise IndexError unless these are numbers of rows of a variable."""
    rows = spec.shape[0] if spec.shape else 0
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < rows:
        raise IndexError(f"row numbers from {int(indices.min())} to {int(indices.max())} are outside of {spec}")
