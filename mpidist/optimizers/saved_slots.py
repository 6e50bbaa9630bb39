"""`SavedSlots`: the slots of one variable in a saved state, and the variable here to which they belong.

A checkpoint knows the paths of its variables; what has a path that is known here belongs to the variable of that path.
The rest is matched by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpidist.errors import listed
from mpidist.variables.variable import DEFAULT_NAME

#: A name that no user gave; its number tells the order of creation, and nothing else.
_DEFAULT_NAME = re.compile(rf"{DEFAULT_NAME}(?:_(\d+))?")
_SLOT = re.compile(r"(\d+)/(.*)", re.DOTALL)


#: Where a state has names and paths: of the variables of slots, and of those of accumulated gradients.
SLOTS = "slot_variables", "slot_paths"
ACCUMULATED = "accumulated_names", "accumulated_paths"


def is_default_name(name: str) -> bool:
    """Return whether a variable that no user has named can have this name.  Local."""
    return _DEFAULT_NAME.fullmatch(name) is not None


@dataclass(eq=False)
class SavedSlots:
    """Arrays that were saved for one variable.

    `name` is the variable's when it was saved; empty where the state does not say.  `arrays` are by the name of the
    slot, in the shape of the whole variable.  `variable` is that to which they belong here; None while that is not
    known.
    """

    name: str
    arrays: dict[str, Any] = field(default_factory=dict)
    variable: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the variable when it was saved."""
        return next((tuple(array.shape) for array in self.arrays.values()), ())

    def bind(self, variable: Any) -> None:
        """Take note to which variable the arrays belong; ValueError where they have not its shape."""
        self.variable = variable
        for slot, array in self.arrays.items():
            if tuple(array.shape) != tuple(variable.saved_shape):
                raise ValueError(
                    f"slot {slot!r} for variable {variable.name!r} was saved with shape {tuple(array.shape)}, expected "
                    f"{tuple(variable.saved_shape)}: the model has changed"
                )


def described(saved: Sequence[SavedSlots], keys: tuple[str, str], paths: Mapping[int, str]) -> dict[str, Any]:
    """Return names and paths, as entries of a state; an empty path where a checkpoint has no such variable.  Local.

    ValueError where two variables have one name.
    """
    names = [each.name if each.variable is None else each.variable.name for each in saved]
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise ValueError(f"an optimizer has two variables of the name {twice[0]!r}; give each a name of its own")
    return {keys[0]: names, keys[1]: [paths.get(id(each.variable), "") for each in saved]}


def slots_in(state: Mapping[str, Any], variables: Mapping[str, Any]) -> list[SavedSlots]:
    """Return the slots of a state, by number; those whose path is known here have their variable.  Local.

    ValueError where a shape is not that of the variable.
    """
    by_number: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        if match := _SLOT.fullmatch(key):
            by_number.setdefault(int(match[1]), {})[match[2]] = value
    names, paths = _names_and_paths(state, SLOTS)
    saved = [SavedSlots(_at(names, number), arrays) for number, arrays in sorted(by_number.items())]
    _bind_by_path(saved, [_at(paths, number) for number in sorted(by_number)], variables)
    return saved


def accumulated_in(state: Mapping[str, Any], variables: Mapping[str, Any]) -> list[SavedSlots]:
    """Return the accumulated gradients of a state, in order; errors as for `slots_in`.  Local."""
    names, paths = _names_and_paths(state, ACCUMULATED)
    saved = [
        SavedSlots(name, {"accumulated gradient": state[f"accumulated/{number}"]}) for number, name in enumerate(names)
    ]
    _bind_by_path(saved, [_at(paths, number) for number in range(len(names))], variables)
    return saved


def _names_and_paths(state: Mapping[str, Any], keys: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Return what `described` gave; files of earlier versions have names only, as lines of a text."""
    names = state.get(keys[0], [])
    return names.split("\n") if isinstance(names, str) else list(names), list(state.get(keys[1], []))


def _bind_by_path(saved: Sequence[SavedSlots], paths: Sequence[str], variables: Mapping[str, Any]) -> None:
    """Bind what has a path that is known here."""
    for each, path in zip(saved, paths, strict=True):
        if path in variables:
            each.bind(variables[path])


def bind_by_name(saved: Sequence[SavedSlots], variables: Sequence[Any]) -> None:
    """Bind saved slots that have no variable yet to variables that have none.  Local.

    Names that users gave must be equal.  Names by default count anew in every strategy, and may be others in another
    script: as many as were saved are matched in the order of creation.  Without names, by shapes that come once, and
    one to one.  ValueError where some of the saved slots and some of the variables are left over, or a shape is not
    that of the variable.
    """
    taken = {id(each.variable) for each in saved}
    free = [variable for variable in variables if id(variable) not in taken]
    unbound = [each for each in saved if each.variable is None]
    pairs = [*_equal_names(unbound, free), *_in_order_of_creation(unbound, free), *_only_shapes(unbound, free)]
    for each, variable in pairs:
        each.bind(variable)
    matched = {id(variable) for _, variable in pairs}
    lost = [(each.name, each.shape) for each in unbound if each.variable is None]
    new = [(each.name, tuple(each.saved_shape)) for each in free if id(each) not in matched]
    if lost and new:
        raise ValueError(
            f"it cannot be told which variable is which: arrays were saved for {_shown(lost)}, which are not here, "
            f"and none for {_shown(new)}. Save the variables in the same checkpoint as the optimizer, or give them "
            "the names under which they were saved"
        )


def _shown(named: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return listed((f"{name!r} of shape {shape}" for name, shape in named), most=3)


Pairs = list[tuple[SavedSlots, Any]]


def _equal_names(saved: Sequence[SavedSlots], variables: Sequence[Any]) -> Pairs:
    here = {variable.name: variable for variable in variables}
    return [(each, here[each.name]) for each in saved if each.name in here and not is_default_name(each.name)]


def _in_order_of_creation(saved: Sequence[SavedSlots], variables: Sequence[Any]) -> Pairs:
    then, now = ([each for each in them if is_default_name(each.name)] for them in (saved, variables))
    if len(then) != len(now):
        return []
    return list(zip(sorted(then, key=_creation), sorted(now, key=_creation), strict=True))


def _only_shapes(saved: Sequence[SavedSlots], variables: Sequence[Any]) -> Pairs:
    nameless = [each for each in saved if not each.name]
    if len(nameless) == len(variables) == 1:
        return [(nameless[0], variables[0])]
    pairs = []
    for each in nameless:
        fitting = [variable for variable in variables if tuple(variable.saved_shape) == each.shape]
        if len(fitting) == 1 and sum(other.shape == each.shape for other in nameless) == 1:
            pairs.append((each, fitting[0]))
    return pairs


def _creation(named: Any) -> int:
    match = _DEFAULT_NAME.fullmatch(named.name)
    return int(match[1] or 0) if match else 0


def _at(texts: Sequence[str], number: int) -> str:
    return texts[number] if number < len(texts) else ""
