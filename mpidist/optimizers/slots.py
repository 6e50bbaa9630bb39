"""`Slots`: the arrays that an optimizer keeps for every variable, flat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpidist import arrays
from mpidist.arrays import aligned
from mpidist.optimizers.saved_slots import SavedSlots, bind_by_name
from mpidist.optimizers.slices import compute_dtype


class Slots:
    """The slots of all variables of one optimizer.  All Local, unless said otherwise.

    Every variable has the arrays `names`, which begin with `initial`, or with 0.  `has_unbound`: there are restored
    slots whose variables are not known yet.
    """

    def __init__(self, names: Sequence[str], initial: Mapping[str, float]) -> None:
        self.names = tuple(names)
        self._initial = dict(initial)
        # (Variable, its slots), in the order of first use.  The reference keeps the id, by which a variable is found,
        # from being reused.
        self._known: list[tuple[Any, list[Any] | None]] = []
        self._number_of_id: dict[int, int] = {}
        # Slots of variables in a block of an arena lie like these: id(block) -> arrays, and for how many variables.
        self._blocks: dict[int, tuple[list[Any], int]] = {}
        #: Another one whenever slots have moved.
        self.version = 0
        # Restored for variables that have not been met yet.
        self._waiting: list[SavedSlots] = []
        self.has_unbound = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds; where variables are, and in which blocks, is another matter there."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_number_of_id", "_blocks")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what a pickle holds: variables lie by themselves, and so do their slots."""
        self.__dict__.update(state)
        self._number_of_id = {id(variable): number for number, (variable, _) in enumerate(self._known)}
        self._blocks = {}

    def of(self, variable: Any) -> list[Any]:
        """Return the slots of a variable as flat arrays in the order of `names`; made at the first call for it.

        ValueError as for `expect`.
        """
        number = self._number_of_id.get(id(variable))
        if number is None:
            return self._register(variable)
        slots = self._known[number][1]
        assert slots is not None, f"the slots of {variable.name!r} are kept in slices"
        return slots

    @property
    def has_met(self) -> bool:
        """Whether it has met variables."""
        return bool(self._known)

    def give_up(self, variable: Any) -> None:
        """Drop the slots of a variable, which somebody else keeps from now on; its number stays."""
        number = self._number_of_id[id(variable)]
        self._known[number] = (variable, None)
        self.version += 1
        if variable.block_slice is not None:
            key = id(variable.block_slice.block)
            arrays_there, users = self._blocks.pop(key)
            if users > 1:
                self._blocks[key] = arrays_there, users - 1

    def take_back(self, variable: Any, slots: list[Any]) -> None:
        """Keep the slots of a variable again, with the values of these."""
        own = self._empty(variable)
        for slot, values in zip(own, slots, strict=True):
            slot[...] = values
        self._known[self._number_of_id[id(variable)]] = (variable, own)
        self.version += 1

    def beside(self, block: Any) -> list[Any]:
        """Return the arrays in which slots of variables in a block of an arena lie, in slices as the variables do."""
        return self._blocks[id(block)][0]

    def by_name(self, variable: Any) -> dict[str, Any]:
        """Return the slots of a variable by name, in its shape, as live views."""
        found = self.of(variable)
        return {name: slot.reshape(variable.shape) for name, slot in zip(self.names, found, strict=True)}

    def saved(self, elsewhere: Mapping[int, list[Any]]) -> list[SavedSlots]:
        """Return all slots as live views, those of variables not met yet included.

        Collective where a variable is split over ranks: its slots are put together.  Local otherwise.
        `elsewhere` has those that somebody else keeps, flat, by the id of their variable.
        """
        slots_of_all = []
        for variable, slots in self._known:
            flat = elsewhere[id(variable)] if slots is None else slots
            whole = [variable.joined(slot.reshape(variable.shape)) for slot in flat]
            slots_of_all.append(SavedSlots(variable.name, dict(zip(self.names, whole, strict=True)), variable))
        return slots_of_all + self._waiting

    def match(self, saved: Sequence[SavedSlots]) -> None:
        """Bind saved slots to the variables that have been met; errors as for `bind_by_name`."""
        bind_by_name(saved, [variable for variable, _ in self._known])

    def restore(self, saved: Sequence[SavedSlots]) -> None:
        """Take over slots that have been matched; variables without any begin anew."""
        of_variable = {id(each.variable): each for each in saved if each.variable is not None}
        for number, (variable, slots) in enumerate(self._known):
            slots = self._empty(variable) if slots is None else slots
            self._fill(variable, slots, of_variable.pop(id(variable), None))
            self._known[number] = (variable, slots)
        self.version += 1
        self._waiting = [each for each in saved if each.variable is None or id(each.variable) in of_variable]
        self.has_unbound = any(each.variable is None for each in self._waiting)

    def expect(self, variables: Sequence[Any]) -> None:
        """Find what was restored for variables that are about to be updated.  Errors as for `bind_by_name`."""
        bind_by_name(self._waiting, [each for each in variables if id(each) not in self._number_of_id])
        self.has_unbound = any(each.variable is None for each in self._waiting)

    def _empty(self, variable: Any) -> list[Any]:
        dtype, block_slice = compute_dtype(variable.dtype), variable.block_slice
        if block_slice is None:
            return [variable.empty_slot(dtype) for _ in self.names]
        key = id(block_slice.block)
        arrays_there, users = self._blocks.get(key, (None, 0))
        if arrays_there is None:
            arrays_there = [aligned(len(block_slice.block), dtype) for _ in self.names]
        self._blocks[key] = arrays_there, users + 1
        return [array[block_slice.start : block_slice.stop] for array in arrays_there]

    def _register(self, variable: Any) -> list[Any]:
        if self.has_unbound:
            self.expect([variable])
        slots = self._empty(variable)
        restored = next((each for each in self._waiting if each.variable is variable), None)
        self._fill(variable, slots, restored)
        if restored is not None:
            self._waiting.remove(restored)
        self._number_of_id[id(variable)] = len(self._known)
        self._known.append((variable, slots))
        return slots

    def _fill(self, variable: Any, slots: list[Any], restored: SavedSlots | None) -> None:
        """Set slots to what was restored for them, or to their initial value."""
        for name, slot in zip(self.names, slots, strict=True):
            if restored is None:
                slot[...] = self._initial.get(name, 0)
            else:
                part = variable.own_part(restored.arrays[name])
                slot[...] = arrays.in_memory_of(slot, part).reshape(-1)
