"""`StoredOptimizer`: a user's optimizer at its server, with the slots that the server holds."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import numpy

from mpidist.errors import TornVariableError
from mpidist.optimizers.rule import Rule, by_name
from mpidist.optimizers.slices import compute_dtype
from mpidist.optimizers.updates.parts import update_part
from mpidist.parameter_server.copies import Buffers, OwnSlotCopies
from mpidist.parameter_server.layout import Key, VariableSpec, slots_of
from mpidist.parameter_server.served_optimizer import ServedOptimizer, is_ours
from mpidist.variables import IndexedSlices


class StoredVariable:
    """A variable, or a shard of one, on its server: what rules need of it.

    `storage` is the value of a table; of a variable among others, in whichever copy it was made.
    """

    def __init__(self, spec: VariableSpec, storage: Any) -> None:
        self.spec = spec
        self.storage = storage
        self.name, self.whole_name, self.shape, self.dtype = spec.name, spec.whole_name, spec.shape, spec.dtype


class StoredOptimizer(ServedOptimizer):
    """An optimizer of a server."""

    slots: OwnSlotCopies | None = None

    def __init__(self, content: bytes, number: int) -> None:
        super().__init__(content, number)
        self._made_as = _described(self.optimizer)
        #: Steps that workers have left out.
        self.skipped_steps = 0
        # Tables, with slots of their own.
        self._tables: dict[Key, tuple[StoredVariable, list[Any]]] = {}
        self._torn: str | None = None

    def require_same(self, content: bytes, client: int) -> None:
        """Raise ValueError unless a client has made the same optimizer; its learning rate may have been set since."""
        other = _described(pickle.loads(content))
        if other != self._made_as:
            raise ValueError(
                f"optimizer number {self.number} is {self._made_as} at this server, and client {client} has {other}; "
                "all clients must make the same optimizers in the same order, and go by the settings that the servers "
                "got first"
            )

    # -- slots --------------------------------------------------------------------------------------------------------

    def admit(self, buffers: Buffers, keys: Iterable[Key]) -> bool:
        """Have slots for variables of a layout; return whether those that were there lie elsewhere now."""
        if not self.optimizer.slot_names:
            return False
        if self.slots is None:
            self.slots = self._made(buffers, keys)
            return False
        if self.slots.admit(keys):
            return False
        before, side = self.slots, buffers.side(self.number)
        self.slots = self._made(buffers, [*before.keys, *keys], shares=False)
        for key in before.keys:
            self.slots.set(key, side, before.of(key, side))
        before.close()
        return True

    def _made(self, buffers: Buffers, keys: Iterable[Key], shares: bool = True) -> OwnSlotCopies:
        names, initial, sides = self.optimizer.slot_names, self.optimizer.initial_slots(), min(2, buffers.count)
        keys = list(keys)
        if shares and sides > 1:
            slots = OwnSlotCopies(buffers.layout, names, sides, initial, shares=True)
            if slots.admit(keys):
                return slots
            slots.close()
        slots = OwnSlotCopies(buffers.layout, names, sides, initial, shares=False)
        slots.admit(keys)
        return slots

    def lay_out(self, before: Buffers, after: Buffers, variables: Mapping[Key, StoredVariable]) -> None:
        """Take the slots to a new layout, and those of variables that have become tables out of it."""
        slots = self.slots
        if slots is None:
            return
        side, index = before.side(self.number), after.layout.index
        self.slots = self._made(after, [key for key in slots.keys if key in index])
        for key in slots.keys:
            values = slots.of(key, side)
            if key in index:
                self.slots.set(key, 0, values)
            else:
                for slot, array in zip(self._slots_of(variables[key]), values.values(), strict=True):
                    slot[...] = array
        slots.close()

    def tear(self, cause: str) -> None:
        """Take note that an update in place was broken off: slots have no value until they are restored."""
        if self.optimizer.slot_names:
            self._torn = cause

    @property
    def is_torn(self) -> bool:
        """Whether slots are torn."""
        return self._torn is not None

    def require_whole(self) -> None:
        """Raise TornVariableError if slots have been torn."""
        if self._torn is not None:
            raise TornVariableError(
                f"the slots of {type(self.optimizer).__name__} are torn: {self._torn}. They are neither the old "
                "nor the new ones. Restore a checkpoint that has the optimizer"
            )

    # -- tables -------------------------------------------------------------------------------------------------------

    def update_rows(self, variable: StoredVariable, indices: Any | None, rows: Any, rate: float, scale: float) -> None:
        """Apply the gradient of a table, in place: of some rows, each once, or of all of it."""
        optimizer = self.optimizer
        coefficients = optimizer.coefficients(rate, optimizer.iterations)
        step = optimizer.step_of(variable, rate, coefficients, scale)
        rows = rows.astype(variable.dtype, copy=False)
        gradient = rows.reshape(variable.shape) if indices is None else IndexedSlices(rows, indices, variable.shape)
        update_part(optimizer, gradient, variable, self._slots_of(variable), step)

    def _slots_of(self, table: StoredVariable) -> list[Any]:
        """Return the slots of a table, flat; new ones at the first call for it."""
        if table.spec.key not in self._tables:
            initial, dtype = self.optimizer.initial_slots(), compute_dtype(table.dtype)
            slots = [numpy.full(table.spec.size, initial.get(name, 0), dtype) for name in self.optimizer.slot_names]
            self._tables[table.spec.key] = table, slots
        return self._tables[table.spec.key][1]

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self, buffers: Buffers) -> dict[str, Any]:
        """Return steps and settings, and slots as ``"variable/shard/slot"``; TornVariableError if slots are torn."""
        self.require_whole()
        state = {"iterations": self.optimizer.iterations, "skipped_steps": self.skipped_steps}
        state |= self.optimizer._rate_to_save()
        values: dict[Key, dict[str, Any]] = {}
        for key, (table, slots) in self._tables.items():
            named = zip(self.optimizer.slot_names, slots, strict=True)
            values[key] = {name: slot.reshape(table.shape) for name, slot in named}
        if self.slots is not None:
            side = buffers.side(self.number)
            for key in self.slots.keys:
                shape = buffers.layout.spec(key).shape
                values[key] = {name: array.reshape(shape) for name, array in self.slots.of(key, side).items()}
        state.update({f"{key[0]}/{key[1]}/{name}": each for key, own in values.items() for name, each in own.items()})
        return state

    def restore(self, state: dict[str, Any], variables: dict[Key, StoredVariable], buffers: Buffers) -> bool:
        """Take over what `state` gave, for variables of this server; return what `admit` returns."""
        values = slots_of(state)
        beside = [key for key in values if key in buffers.layout.index]
        has_moved = self.admit(buffers, beside)
        for key in values:
            if key not in buffers.layout.index:
                self._slots_of(variables[key])
        initial, names = self.optimizer.initial_slots(), self.optimizer.slot_names
        for key, (_, slots) in self._tables.items():
            for name, slot in zip(names, slots, strict=True):
                slot[...] = values[key][name].reshape(-1) if key in values else initial.get(name, 0)
        self.optimizer.iterations = int(state["iterations"])
        self.skipped_steps = int(state.get("skipped_steps", 0))
        self.optimizer._restore_rate(state)
        if self.slots is not None:
            for key in self.slots.keys:
                self.slots.set(key, buffers.side(self.number), values.get(key, {}))
        self._torn = None
        return has_moved


def _described(rule: Rule) -> str:
    """Return a rule as it was made: its class and settings; of one of somebody else, class and learning rate."""
    kind, rate = type(rule), rule._first_learning_rate
    told = getattr(rate, "__qualname__", type(rate).__qualname__) if callable(rate) else repr(float(rate))
    if not is_ours(kind):
        return f"{kind.__qualname__}({told})"
    made = {**vars(rule), "without_decay": [by_name(each).pattern for each in rule._without_decay]}
    told_of = {name: value for name, value in made.items() if not (name in _OF_EACH or value is None)}
    # a number of NumPy is told as the same one of Python; nothing of a list that is empty
    plain = {name.lstrip("_"): numpy.asarray(value).tolist() for name, value in told_of.items() if numpy.size(value)}
    settings = [f"{name}={value!r}" for name, value in sorted(plain.items())]
    return f"{kind.__name__}({', '.join([told, *settings])})"


#: What is each process's own, or follows from the other settings.
_OF_EACH = frozenset(
    ("_learning_rate", "_first_learning_rate", "_iterations", "_scratch", "_without_decay")
    + ("slot_names", "zero_gradient_changes_nothing")
)
