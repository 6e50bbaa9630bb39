"""`Slots`: the arrays that an optimizer keeps for every variable, flat, in the order in which it met the variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpidist import arrays
from mpidist.optimizers.slices import compute_dtype


class Slots:
    """The slots of all variables of one optimizer.  All Local.

    Parameters
    ----------
    names : sequence of str
        The arrays that every variable has.
    initial : mapping of str to float
        What they are filled with at first; 0 for those that are not named.
    """

    def __init__(self, names: Sequence[str], initial: Mapping[str, float]) -> None:
        self.names = tuple(names)
        self._initial = dict(initial)
        # (Variable, its slots), in the order of first use.  The reference keeps the id, by which a variable is found,
        # from being reused.
        self._known: list[tuple[Any, list[Any] | None]] = []
        self._number_of_id: dict[int, int] = {}
        self._restored: dict[str, Any] = {}

    def of(self, variable: Any) -> list[Any]:
        """Return the slots of a variable as flat arrays in the order of `names`; made at the first call for it."""
        number = self._number_of_id.get(id(variable))
        if number is None:
            return self._register(variable)
        slots = self._known[number][1]
        assert slots is not None, f"the slots of {variable.name!r} are kept in slices"
        return slots

    @property
    def variable_names(self) -> list[str]:
        """Names of the variables met, in the order of their numbers; none where no slots are kept."""
        return [variable.name for variable, _ in self._known]

    def give_up(self, variable: Any) -> None:
        """Drop the slots of a variable, which somebody else keeps from now on; its number stays."""
        number = self._number_of_id[id(variable)]
        self._known[number] = (variable, None)

    def take_back(self, variable: Any, slots: list[Any]) -> None:
        """Keep the slots of a variable again: flat arrays that are nobody else's."""
        number = self._number_of_id[id(variable)]
        self._known[number] = (variable, slots)

    def by_name(self, variable: Any) -> dict[str, Any]:
        """Return the slots of a variable by name, in its shape, as live views."""
        found = self.of(variable)
        return {name: slot.reshape(variable.shape) for name, slot in zip(self.names, found, strict=True)}

    def state(self, elsewhere: Mapping[int, list[Any]]) -> dict[str, Any]:
        """Return all slots as ``"number/slot"`` to live views, what was restored and not yet asked for included.

        Collective where a variable is split over ranks: its slots are put together.  Local otherwise.
        `elsewhere` has those that somebody else keeps, flat, by the id of their variable.
        """
        found = dict(self._restored)
        for number, (variable, slots) in enumerate(self._known):
            flat = elsewhere[id(variable)] if slots is None else slots
            whole = [variable.joined(slot.reshape(variable.shape)) for slot in flat]
            found.update({f"{number}/{name}": slot for name, slot in zip(self.names, whole, strict=True)})
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave, for variables not met yet too.

        Raises
        ------
        ValueError
            A slot's shape is not its variable's; for variables not met yet, when they are.
        """
        self._restored = dict(state)
        for number, (variable, slots) in enumerate(self._known):
            slots = self._empty(variable) if slots is None else slots
            self._fill(number, variable, slots)
            self._known[number] = (variable, slots)

    def _empty(self, variable: Any) -> list[Any]:
        dtype = compute_dtype(variable.dtype)
        return [variable.empty_slot(dtype) for _ in self.names]

    def _register(self, variable: Any) -> list[Any]:
        slots, number = self._empty(variable), len(self._known)
        self._fill(number, variable, slots)
        self._known.append((variable, slots))
        self._number_of_id[id(variable)] = number
        return slots

    def _fill(self, number: int, variable: Any, slots: list[Any]) -> None:
        """Set slots to what was restored for them, or to their initial value."""
        for name, slot in zip(self.names, slots, strict=True):
            value = self._restored.pop(f"{number}/{name}", None)
            if value is None:
                slot[...] = self._initial.get(name, 0)
                continue
            if value.shape != variable.saved_shape:
                raise ValueError(
                    f"slot {name!r} for variable {variable.name!r} was saved with shape {value.shape}, "
                    f"expected {variable.saved_shape}: the variables were first updated in another order, or the model "
                    "has changed"
                )
            slot[...] = arrays.namespace(slot).asarray(variable.own_part(value)).reshape(-1)
