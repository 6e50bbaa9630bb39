"""Who reduces the gradient of a parameter: nobody, or one reduction."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch

from mpidist.frameworks.torch.tensors import Named

#: By the id of a parameter: itself, and something that is known of it.
_Table = dict[int, tuple["ref[torch.Tensor]", Any]]

#: Of all parameters: the ownership that has taken each.
_owners: _Table = {}

#: All that there are.
_ownerships: WeakSet[Ownership] = WeakSet()


class Ownership:
    """The parameters whose gradients one reduction reduces.

    Those that it has taken, and of the others, which came later or were frozen, those that nobody else has taken: their
    gradients are reduced from the end of their first pass on.  ``named()`` returns the (name, parameter) pairs that
    there are now.  ``look_at(parameter)`` is called once with each that may have a gradient.  `owner` says who reduces,
    for messages.
    """

    def __init__(
        self, owner: str, named: Callable[[], Sequence[Named]], look_at: Callable[[torch.Tensor], None]
    ) -> None:
        self.owner, self._named, self._look_at = owner, named, look_at
        self._watched: _Table = {}
        _ownerships.add(self)

    def watch(self) -> None:
        """Look at the parameters that there are now; also at those that are frozen, which may be thawed.  Local."""
        for _, each in self._named():
            if not _noted(self._watched, each) and _may_have_gradient(each):
                self._look_at(each)
                _note(self._watched, each, True)

    def take(self, named: Iterable[Named]) -> None:
        """Have nobody else reduce the gradients of these; ValueError if somebody does already.  Local."""
        for name, parameter in named:
            if self.has_taken(parameter):
                continue
            if _owner_of(parameter) is not None:
                gc.collect()  # it may have been dropped
            other = _owner_of(parameter)
            if other is not None:
                raise ValueError(
                    f"{self.owner}: the gradient of {name!r} is reduced by {other.owner} already; use one of the two"
                )
            _note(_owners, parameter, ref(self))

    def has_taken(self, parameter: torch.Tensor) -> bool:
        """Return whether nobody else may reduce a parameter's gradient.  Local."""
        return _owner_of(parameter) is self

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter's gradient is reduced here, perhaps from the end of this pass on.  Local."""
        if not _noted(self._watched, parameter):
            return False
        owner = _owner_of(parameter)
        return owner is self or (owner is None and any(each is parameter for _, each in self._named()))

    def are_changed_by(self, optimizer: Any) -> bool:
        """Return whether an optimizer changes any of these parameters.  Local."""
        return any(
            self.has(each) and (each.requires_grad or self.has_taken(each))
            for group in optimizer.param_groups
            for each in group["params"]
            if id(each) in self._watched  # quick where all are another's
        )


def is_owned(parameter: torch.Tensor | None) -> bool:
    """Return whether somebody reduces a parameter's gradient; of None False.  Local."""
    return parameter is not None and any(each.has(parameter) for each in _ownerships)


def _owner_of(parameter: torch.Tensor) -> Ownership | None:
    found = _noted(_owners, parameter)
    return found() if found is not None else None


def _noted(table: _Table, parameter: torch.Tensor) -> Any:
    """Return what is known of a parameter; None where that is nothing, or of another one that was there before."""
    found = table.get(id(parameter))
    return found[1] if found is not None and found[0]() is parameter else None


def _note(table: _Table, parameter: torch.Tensor, known: Any) -> None:
    """Take note of a parameter, as long as there is that."""
    key = id(parameter)
    table[key] = ref(parameter, lambda _: table.pop(key, None)), known


def _may_have_gradient(parameter: torch.Tensor) -> bool:
    """Return whether a parameter may have a gradient, now or when it is thawed."""
    if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin) or parameter.is_inference():
        return False
    return parameter.is_leaf and (parameter.is_floating_point() or parameter.is_complex())
