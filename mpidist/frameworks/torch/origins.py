"""Where the gradients of a model come from: backward passes of this replica, a reduction, or both.

There are three facts: whether passes have given what is not reduced; how many; and, of each optimizer's parameters,
whether what was reduced is still in their gradients.  Each optimizer sets its own to zero when it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch

from mpidist.frameworks.torch.marks import GradientMarks, MarkState


class GradientOrigins:
    """The gradients of some parameters, since they were reduced last.

    `has_local`: a pass has given what is not reduced, also one that was broken off.  `passes` counts those since
    gradients were reduced last, or cleared.  `is_whole`: what was reduced must not be reduced again, as in a sum; then
    no gradient that was not set to zero is overlooked.
    """

    def __init__(self, is_whole: bool) -> None:
        self.has_local, self.passes = False, 0
        self.is_whole = is_whole
        self.parameters: Sequence[torch.Tensor] = []
        self._rest = _Share(None, [])
        self._shares: list[_Share] = []

    def bind(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take these parameters from now on."""
        self.parameters = parameters
        self._divide(self.optimizers())
        self.mark()

    def take(self, optimizer: Any) -> None:
        """Take note that an optimizer has made a step: it has a share of the parameters."""
        if not any(each.optimizer() is optimizer for each in self._shares):
            self._divide([*self.optimizers(), optimizer])
            self.mark()

    def optimizers(self) -> list[Any]:
        """Return the optimizers that have made a step, in the order of their first ones."""
        return [found for each in self._shares if (found := each.optimizer()) is not None]

    def _divide(self, optimizers: Sequence[Any]) -> None:
        """Divide the parameters among optimizers; nobody may set those of the rest to zero."""
        before, self._shares = self._shares, []
        taken: set[int] = set()
        for optimizer in optimizers:
            ids = {id(each) for group in optimizer.param_groups for each in group["params"]}
            own = [each for each in self.parameters if id(each) in ids]
            found = next((each for each in before if each.optimizer() is optimizer), self._rest)
            self._shares.append(_Share(optimizer, own, found))
            taken |= ids
        self._rest = _Share(None, [each for each in self.parameters if id(each) not in taken], self._rest)

    def _of(self, optimizer: Any) -> list[_Share]:
        """Return the share of an optimizer, or all; of one that has made no step yet the rest."""
        if optimizer is None:
            return [*self._shares, self._rest]
        return [next((each for each in self._shares if each.optimizer() is optimizer), self._rest)]

    def look(self, is_inside: bool) -> None:
        """Look whether gradients are cleared now, before a pass adds to the first.  Local.

        `is_inside`: another pass is going on, or was broken off.
        """
        for each in self._of(None):
            if not (is_inside and each.is_cleared):
                each.is_found_cleared = each.marks.are_cleared(self.is_whole, self.has_local)

    def begin(self) -> bool:
        """Take note of a pass behind a `look`; return whether gradients were cleared before it.  Local."""
        for each in self._of(None):
            each.begin()
        self.has_local = True
        is_cleared = all(each.is_cleared for each in self._shares or [self._rest])
        if is_cleared:
            self.passes = 0
        return is_cleared

    def mark(self) -> None:
        """Mark the gradients as they are: a few, or all that are not reduced, as whatever is done to them counts."""
        for gradients in self._of(None):
            if self.has_local:
                gradients.marks.set_all()
            else:
                gradients.marks.set(self.is_whole)

    def overlook_none(self) -> None:
        """Overlook no gradient from now on, marked before or not.  Local."""
        if not self.is_whole:
            for each in self._of(None):
                each.marks.set_places()
        self.is_whole = True

    def are_reduced(self, is_twice: bool = False) -> None:
        """Take note that the gradients are reduced.

        `is_twice`: what was reduced before has counted again, as in a sum; such gradients stay mixed.
        """
        self.has_local, self.passes = False, 0
        for each in self._of(None):
            each.is_reduced, each.is_mixed = True, each.is_mixed and is_twice
        self.mark()

    @property
    def is_new(self) -> bool:
        """Whether nothing was reduced yet."""
        return not any(each.is_reduced for each in self._of(None))

    @property
    def is_mixed_in_part(self) -> bool:
        """Whether what was reduced is still there beside what passes have given, or in it."""
        return any(each.is_mixed for each in self._of(None))

    def is_mixed(self, optimizer: Any = None) -> bool:
        """Return whether passes have added to what was reduced; to an optimizer's, or to all that they have given."""
        if optimizer is not None:
            return self._of(optimizer)[0].is_mixed
        return self.is_mixed_in_part and not any(each.is_fresh() for each in self._of(None))

    def are_changed(self, optimizer: Any = None) -> bool:
        """Return whether somebody has changed what passes have given; to an optimizer's parameters, or to any."""
        return any(each.marks.are_changed() for each in self._of(optimizer))

    def left(self, optimizer: Any = None) -> MarkState:
        """Return what was done to gradients since they were reduced; to an optimizer's, or to all."""
        found = [each.marks.state(self.is_whole) for each in self._of(optimizer)]
        return max(found, key=[*MarkState].index)


class _Share:
    """The parameters of one optimizer, and what their gradients have in them."""

    def __init__(self, optimizer: Any, parameters: Sequence[torch.Tensor], like: _Share | None = None) -> None:
        self.optimizer: Any = (lambda: None) if optimizer is None else ref(optimizer)
        self.parameters, self.marks = parameters, GradientMarks(parameters)
        self.is_reduced = self.is_mixed = False
        self.is_cleared = self.is_found_cleared = False  # before the pass that is going on; when somebody looked last
        if like is not None:
            self.is_reduced, self.is_mixed = like.is_reduced, like.is_mixed
            self.is_cleared, self.is_found_cleared = like.is_cleared, like.is_found_cleared

    def begin(self) -> None:
        """Take note of a pass."""
        self.is_cleared = self.is_found_cleared
        if self.is_cleared:
            self.is_reduced = False
        self.is_mixed = self.is_reduced

    def is_fresh(self) -> bool:
        """Return whether all that the gradients have in them comes from passes since they were cleared."""
        return self.is_cleared and any(each.grad is not None for each in self.parameters)
