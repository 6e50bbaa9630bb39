"""Parameters that a module gets after its optimizer was distributed, and whose gradients nobody reduces."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getgeneratorlocals
from operator import is_
from types import GeneratorType
from typing import Any
from weakref import ref

import torch

from mpidist.errors import listed
from mpidist.frameworks.torch.tensors import Named


class UnownedParameters:
    """Looks for later parameters of a module with gradients that nobody reduces.

    Parameters of which gradients are not reduced from the beginning are meant to be so: an optimizer may have some of a
    module's.  `prefix` stands before names in messages.  ``is_owned(parameter)`` returns whether somebody reduces its
    gradient; of None False.
    """

    def __init__(self, module: torch.nn.Module, prefix: str, is_owned: Callable[[Any], bool]) -> None:
        self._module, self._prefix, self._is_owned = ref(module), prefix, is_owned
        self._first = {id(each): (name, ref(each), each.requires_grad) for name, each in module.named_parameters()}
        self._later: list[Named] = []
        self._note(module)

    def _note(self, module: torch.nn.Module) -> None:
        """Take note of what is where in the module now."""
        tables: list[Any] = [each for part in module.modules() for each in (part._parameters, part._modules)]
        self._full, self._empty = [each for each in tables if len(each)], [each for each in tables if not len(each)]
        self._contents = self._current()
        # what is no leaf stands there for a forward pass only, and has no gradient of its own
        self._later = [pair for pair in module.named_parameters() if pair[1].is_leaf and not self._is_first(pair[1])]

    def _current(self) -> list[Any]:
        return [each for table in self._full for each in table.values()]

    def _is_as_noted(self) -> bool:
        now, before = self._current(), self._contents
        return len(now) == len(before) and all(map(is_, now, before)) and not any(self._empty)

    def _is_first(self, parameter: torch.Tensor) -> bool:
        found = self._first.get(id(parameter))
        return found is not None and found[1]() is parameter

    def found(self) -> str:
        """Return which there are, and what was expected, for a message; nothing where all is well.  Local."""
        module = self._module()
        if module is None:
            self._full, self._empty, self._contents, self._later = [], [], [], []
            return ""
        if not self._is_as_noted():
            self._note(module)
        late = [
            name
            for name, each in self._later
            if each.grad is not None and each.requires_grad and not self._is_owned(each)
        ]
        return self._told(module, late) if late else ""

    def _told(self, module: torch.nn.Module, late: list[str]) -> str:
        """Return what to say of later parameters; nothing where they are to be each rank's own."""
        there = {id(each) for each in module.parameters()}
        first = [(name, each()) for name, each, _ in self._first.values()]
        owned = [(name, each) for name, each in first if self._is_owned(each)]
        lost = [name for name, each in owned if id(each) not in there]
        if lost:
            return f"got new {self._quoted(late)}, expected {self._quoted(lost)} as the optimizer has it"
        trained = [each() for _, each, was_trained in self._first.values() if was_trained or _is_trained(each())]
        if not owned or not all(map(self._is_owned, trained)):
            return ""
        return f"got new {self._quoted(late)}, expected only those that were there before"

    def _quoted(self, names: list[str]) -> str:
        return listed(f"'{self._prefix}{name}'" for name in names)


def _is_trained(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and parameter.requires_grad


def module_of(named_parameters: Any) -> torch.nn.Module | None:
    """Return the module whose ``named_parameters()`` has not been iterated yet; None for anything else.  Local."""
    found = getgeneratorlocals(named_parameters).get("self") if isinstance(named_parameters, GeneratorType) else None
    return found if isinstance(found, torch.nn.Module) else None
