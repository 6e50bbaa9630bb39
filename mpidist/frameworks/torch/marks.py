"""What has become of gradients since somebody looked: a few are marked and stand for all, or all are."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any
from weakref import ref
from zlib import adler32, crc32

import torch

from mpidist.frameworks.torch.tensors import bytes_of

#: How many gradients are marked, and of how many the values are looked at.
_COUNT = 3

#: How many values of these are looked at: memory may be written without PyTorch's notice, as by ``.data`` or NumPy.
_VALUES = 16

#: A parameter, its gradient, the gradient's version, and some of its values.
_Mark = tuple[torch.Tensor, "ref[torch.Tensor] | None", int, bytes]


class MarkState(Enum):
    """What has become of gradients since they were marked."""

    CLEARED = "set to None or zero"
    REPLACED = "other tensors with values"
    CHANGED = "changed in place, as by clipping"
    KEPT = "as they were"


class GradientMarks:
    """Marks gradients of the smallest parameters that have one, or those of all.

    Parameters
    ----------
    parameters : sequence of Parameter
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = sorted(parameters, key=torch.numel)
        self._marked: list[_Mark] = []

    def set(self) -> None:
        """Mark a few gradients as they are now: those that are not zeros tell most.  Local."""
        marked: list[_Mark] = []
        zeros: list[_Mark] = []
        self._marked = marked
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None:
                values = _values(gradient)
                mark: _Mark = (parameter, ref(gradient), gradient._version, values)
                if not any(values):
                    zeros.append(mark)
                    continue
                marked.append(mark)
                if len(marked) == _COUNT:
                    return
        marked += zeros[: _COUNT - len(marked)]

    def set_all(self) -> None:
        """Mark all gradients as they are now, and those that are not there.  Local."""
        marked: list[_Mark] = []
        self._marked = marked
        last = len(self._parameters) - _COUNT
        for number, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None:
                marked.append((parameter, None, 0, b""))
            else:
                values = _values(gradient) if number < _COUNT or number >= last else b""
                marked.append((parameter, ref(gradient), gradient._version, values))

    def state(self, added: torch.Tensor | None = None) -> MarkState:
        """Return what has become of the gradients since: of the one to which least was done.  Local.

        Parameters
        ----------
        added : Parameter, optional
            Whose gradient a backward pass has just added to; it is asked only where there is no other.
        """
        found = MarkState.CLEARED
        is_sole = len(self._marked) == 1
        for mark in self._marked:
            if mark[0] is not added:
                state = _state(mark)
            elif is_sole and mark[1] is not None and added.grad is mark[1]():
                state = MarkState.KEPT if _version(added) == mark[2] + 1 else MarkState.CLEARED
            else:
                continue
            if state is MarkState.KEPT:
                return state
            if state is MarkState.CHANGED or found is MarkState.CLEARED:
                found = state
        return found

    def are_changed(self) -> bool:
        """Return whether any of the gradients has other values since, and is not set to None or zero.  Local."""
        return any(_state(each) in (MarkState.CHANGED, MarkState.REPLACED) for each in self._marked)


def _state(mark: _Mark) -> MarkState:
    parameter, marked, version, values = mark
    gradient = parameter.grad
    if gradient is None:
        return MarkState.CLEARED
    is_same = marked is not None and gradient is marked()
    if is_same and gradient._version == version and (not values or values == _values(gradient)):
        return MarkState.KEPT
    if not has_values(gradient):
        return MarkState.CLEARED
    return MarkState.CHANGED if is_same else MarkState.REPLACED


def _version(parameter: torch.Tensor) -> int:
    assert parameter.grad is not None
    return parameter.grad._version


def _values(gradient: torch.Tensor) -> bytes:
    """Return a few values that stand for all."""
    try:
        array = gradient.numpy()
        flat = array.reshape(-1) if array.flags.c_contiguous else array.flat[:_VALUES]
    except (TypeError, RuntimeError):  # of another kind, or somewhere else
        flat = bytes_of(_strided(gradient).reshape(-1)[:_VALUES].cpu())
    found: bytes = flat[:: max(1, len(flat) // _VALUES)].tobytes()
    return found


def has_values(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is not all zeros."""
    return bool(_strided(gradient).any())


def _strided(gradient: torch.Tensor) -> Any:
    return gradient.detach() if gradient.layout is torch.strided else gradient.coalesce().values().detach()


def digest_of(parameters: Sequence[torch.Tensor]) -> bytes:
    """Return a few bytes that stand for all values of the gradients; none where no gradient has any.  Local."""
    found = [0, 0]
    for number, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is not None and has_values(gradient):
            raw = bytes_of(gradient.cpu() if gradient.layout is torch.strided else gradient.to_dense().cpu())
            found = [crc32(raw, found[0] + number), adler32(raw, found[1])]
    return b"%x %x" % (*found,) if any(found) else b""
