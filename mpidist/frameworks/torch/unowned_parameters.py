"""Parameters that a module gets, or thaws, after its optimizer was distributed, and whose gradients nobody reduces."""

from __future__ import annotations

from collections.abc import Set
from inspect import getgeneratorlocals
from types import GeneratorType
from typing import Any
from weakref import ref

import torch

from mpidist.errors import listed
from mpidist.frameworks.torch.contents import Contents
from mpidist.frameworks.torch.ownership import is_owned
from mpidist.frameworks.torch.tensors import Named


class UnownedParameters:
    """Looks for later parameters of a module, and for thawed ones, with gradients that nobody reduces.

    Trained parameters of which gradients are not reduced from the beginning are meant to be so: an optimizer may have
    some of a module's.  `prefix` stands before names in messages.
    """

    def __init__(self, module: torch.nn.Module, prefix: str) -> None:
        self._module, self._prefix = ref(module), prefix
        self._first = {id(each): (name, ref(each), each.requires_grad) for name, each in module.named_parameters()}
        self._frozen = [(name, each) for name, each, is_trained in self._first.values() if not is_trained]
        self._contents = Contents(module)
        self._later: list[Named] = []

    def _note(self, module: torch.nn.Module) -> None:
        """Take note of what is where in the module now."""
        self._contents.note(module)
        # what is no leaf stands there for a forward pass only, and has no gradient of its own
        self._later = [pair for pair in module.named_parameters() if pair[1].is_leaf and not self._is_first(pair[1])]

    def _is_first(self, parameter: torch.Tensor) -> bool:
        found = self._first.get(id(parameter))
        return found is not None and found[1]() is parameter

    def found(self, taken: Set[int] | None = None) -> str:
        """Return which there are, and what was expected, for a message; nothing where all is well.  Local.

        `taken`, by ids, are those that an optimizer takes: there is nothing where it takes none of them.
        """
        module = self._module()
        if module is None:
            self._contents.forget()
            self._later = []
            return ""
        if not self._contents.are_as_noted():
            self._note(module)
        late = [(name, each) for name, each in self._later if self._is_unowned(each)]
        thawed = [(name, each()) for name, each in self._frozen if self._is_unowned(each())]
        if taken is not None and taken.isdisjoint(id(each) for _, each in (*late, *thawed)):
            return ""
        return self._told(module, [name for name, _ in late], [name for name, _ in thawed])

    def _is_unowned(self, parameter: torch.Tensor | None) -> bool:
        has_gradient = parameter is not None and parameter.requires_grad and parameter.grad is not None
        return has_gradient and not is_owned(parameter)

    def _told(self, module: torch.nn.Module, late: list[str], thawed: list[str]) -> str:
        """Return what to say of later parameters; nothing where they are to be each rank's own."""
        if not (late or thawed):
            return ""
        there = {id(each) for each in module.parameters()}
        first = [(name, each()) for name, each, _ in self._first.values()]
        owned = [(name, each) for name, each in first if is_owned(each)]
        lost = [name for name, each in owned if id(each) not in there]
        if late and lost:
            return f"got new {self._quoted(late)}, expected {self._quoted(lost)} as the optimizer has it"
        trained = [each() for _, each, was_trained in self._first.values() if was_trained]
        if not owned or not all(map(is_owned, trained)):
            return ""
        if late:
            return f"got new {self._quoted(late)}, expected only those that were there before"
        return f"got thawed {self._quoted(thawed)}, expected only those that were trained before"

    def _quoted(self, names: list[str]) -> str:
        return listed(f"'{self._prefix}{name}'" for name in names)


def module_of(named_parameters: Any) -> torch.nn.Module | None:
    """Return the module whose ``named_parameters()`` has not been iterated yet; None for anything else.  Local."""
    found = getgeneratorlocals(named_parameters).get("self") if isinstance(named_parameters, GeneratorType) else None
    return found if isinstance(found, torch.nn.Module) else None
