"""What has become of gradients since somebody looked: a few are marked, and stand for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from weakref import ref

import torch

#: How many gradients are marked.
_COUNT = 3


class MarkState(Enum):
    """What has become of gradients since they were marked."""

    CLEARED = "set to None or zero, or replaced"
    CHANGED = "changed in place, as by clipping"
    KEPT = "as they were"


class GradientMarks:
    """Marks gradients of the smallest parameters that have one.

    Parameters
    ----------
    parameters : sequence of Parameter
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._all = self._used = sorted(parameters, key=torch.numel)
        self._marked: list[tuple[torch.Tensor, ref[torch.Tensor], int]] = []

    def narrow(self, parameters: Iterable[torch.Tensor]) -> None:
        """Mark only gradients of these from now on."""
        wanted = {id(each) for each in parameters}
        self._used = [each for each in self._all if id(each) in wanted]

    def set(self) -> None:
        """Mark the gradients as they are now.  Local."""
        self._marked = marked = []
        for parameter in self._used:
            gradient = parameter.grad
            if gradient is not None:
                marked.append((parameter, ref(gradient), gradient._version))
                if len(marked) == _COUNT:
                    return

    def state(self, added: torch.Tensor | None = None) -> MarkState:
        """Return what has become of the gradients since.  Local.

        Parameters
        ----------
        added : Parameter, optional
            Whose gradient a backward pass has just added to; it is asked only where there is no other.
        """
        found = MarkState.CLEARED
        for parameter, mark, version in self._marked:
            gradient = parameter.grad
            is_same = gradient is mark()
            if gradient is None or not is_same:
                continue
            now = gradient._version
            if parameter is added:
                if len(self._marked) > 1:
                    continue
                now -= 1
            if now == version:
                return MarkState.KEPT
            if parameter is not added and _has_values(gradient):
                found = MarkState.CHANGED
        return found


def _has_values(gradient: torch.Tensor) -> bool:
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce().values()
    return bool(gradient.any())
