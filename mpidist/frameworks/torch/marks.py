"""What has become of gradients since somebody looked: a few are marked and stand for all, or all are.

Values of gradients on a device are put aside there, and are read when an answer depends on them.  That waits for the
device; where gradients are set to None before each pass, it never happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any
from weakref import ref
from zlib import adler32, crc32

import torch

from mpidist.frameworks.torch import cuda
from mpidist.frameworks.torch.tensors import bytes_of

#: How many gradients are marked, and of how many the values are looked at.
_COUNT = 3

#: How many values of these are looked at: memory may be written without PyTorch's notice, as by ``.data`` or NumPy.
_VALUES = 16

#: Of how many gradients on a device values are put aside: of the smallest, and of the largest.
_SMALLEST, _LARGEST = 6, 2

#: Values that no gradient has.
_UNKNOWN = b"unknown"

#: A parameter, its gradient, the gradient's version, and some of its values.
_Mark = tuple[torch.Tensor, "ref[torch.Tensor] | None", int, bytes]


class MarkState(Enum):
    """What has become of gradients since they were marked."""

    CLEARED = "set to None or zero"
    REPLACED = "other tensors with values"
    CHANGED = "changed in place, as by clipping"
    KEPT = "as they were"


class GradientMarks:
    """Marks gradients of the smallest parameters that have one, or those of all."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = sorted(parameters, key=torch.numel)
        self._marked: list[_Mark] = []
        self._aside: _Aside | None = None  # what is on a device, and not marked yet
        self._is_for_all = False
        self._places: list[_Mark] = []  # of all, without values, where that was asked for

    def set(self, with_places: bool) -> None:
        """Mark a few gradients as they are now: those that are not zeros tell most.  Local.

        `with_places`: `state` may be asked for marks of a whole model.
        """
        present = [each for each in self._parameters if each.grad is not None]
        self._places = [_mark_of(each, each.grad, b"") for each in present] if with_places else []
        if present and cuda.has(present[0]):
            few = present if len(present) <= _SMALLEST + _LARGEST else [*present[:_SMALLEST], *present[-_LARGEST:]]
            self._marked, self._aside, self._is_for_all = [], _Aside(few), False
        else:
            self._aside = None
            self._mark(_mark_of(each, each.grad, _values(each.grad)) for each in present)

    def set_places(self) -> None:
        """Note the places of gradients with values, behind a `set` without; waits for a device.  Local.

        What was done to them since then is not known: they count as changed.
        """
        found = [(each, each.grad) for each in self._parameters]
        left = [(each, it if it is not None and has_values(it) else None) for each, it in found]
        self._places = [_mark_of(*each, _UNKNOWN) for each in left]

    def _mark(self, candidates: Iterable[_Mark]) -> None:
        """Mark the first that are not zeros, and where these are too few, some that are."""
        marked: list[_Mark] = []
        zeros: list[_Mark] = []
        self._marked = marked
        for mark in candidates:
            if not any(mark[3]):
                zeros.append(mark)
                continue
            marked.append(mark)
            if len(marked) == _COUNT:
                return
        marked += zeros[: _COUNT - len(marked)]

    def _read(self) -> None:
        """Mark what was put aside on a device."""
        if self._aside is not None:
            aside, self._aside = self._aside, None
            if self._is_for_all:
                self._marked += aside.marks()
            else:
                self._mark(aside.marks())

    def set_all(self) -> None:
        """Mark all gradients as they are now, and those that are not there.  Local."""
        self._places = []
        marked: list[_Mark] = []
        there: list[torch.Tensor] = []
        last = len(self._parameters) - _COUNT
        for number, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            is_one_of_few = number < _COUNT or number >= last
            if gradient is None:
                marked.append((parameter, None, 0, b""))
            elif is_one_of_few and cuda.has(gradient):
                there.append(parameter)
            else:
                values = _values(gradient) if is_one_of_few else b""
                marked.append((parameter, ref(gradient), gradient._version, values))
        self._marked, self._aside, self._is_for_all = marked, _Aside(there) if there else None, True

    def are_cleared(self, is_whole: bool, with_zeros: bool) -> bool:
        """Return whether the gradients were set to None or zero since.  Local.

        `is_whole`: a few do not stand for the others.  `with_zeros`: zeros that were there before are not cleared.
        """
        if is_whole and any(map(_is_left, self._parameters)):
            return False
        return (is_whole and not with_zeros) or self._state_of_marked() is MarkState.CLEARED

    def state(self, is_whole: bool = False) -> MarkState:
        """Return what has become of the gradients since: of the one to which least was done.  Local.

        `is_whole`: a few that are cleared do not stand for the others.
        """
        least = self._state_of_marked()
        if least is not MarkState.CLEARED or not is_whole:
            return least
        states = [_state(each) for each in self._places if _is_left(each[0])]
        return max(states, key=[*MarkState].index, default=least)

    def _state_of_marked(self) -> MarkState:
        if self._aside is not None:
            if not self._is_for_all and self._aside.is_cleared():
                return MarkState.CLEARED
            if any(_state(each) is MarkState.KEPT for each in self._marked):
                return MarkState.KEPT
            self._read()
        least = MarkState.CLEARED
        for mark in self._marked:
            state = _state(mark)
            if state is MarkState.KEPT:
                return state
            if state is MarkState.CHANGED or least is MarkState.CLEARED:
                least = state
        return least

    def are_changed(self) -> bool:
        """Return whether any of the gradients has other values since, and is not set to None or zero.  Local."""
        self._read()
        return any(_state(each) in (MarkState.CHANGED, MarkState.REPLACED) for each in self._marked)


class _Aside:
    """Values of a few gradients, as they are now, on their device.  All parameters have a gradient."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        found = [each.grad for each in parameters if each.grad is not None]
        self._parameters = parameters
        self._marks = [(ref(each), each._version) for each in found]
        parts = [_spread(each) for each in found]
        self._lengths = [len(each) for each in parts]
        with torch.no_grad():
            is_one = len({(each.dtype, each.device) for each in parts}) == 1
            self._values = torch.cat(parts) if is_one else [each.clone() for each in parts]

    def is_cleared(self) -> bool:
        """Return whether all that was there is gone."""
        return all(each.grad is None for each in self._parameters)

    def marks(self) -> list[_Mark]:
        """Return the marks; waits for the device."""
        values = self._values
        parts = values if isinstance(values, list) else torch.split(cuda.awaited(values).cpu(), self._lengths)
        found = zip(self._parameters, self._marks, parts, strict=True)
        return [(parameter, *mark, bytes_of(cuda.awaited(each).cpu()).tobytes()) for parameter, mark, each in found]


def _spread(gradient: torch.Tensor) -> torch.Tensor:
    """Return a few values that stand for all, on the gradient's device; of a gradient that is not contiguous views."""
    flat = _strided(gradient)
    if flat.is_contiguous():
        flat = flat.reshape(-1)
        return flat[:: max(1, len(flat) // _VALUES)]
    while flat.dim() > 1:
        flat = flat[0]
    return flat.reshape(-1)[:_VALUES]


def _mark_of(parameter: torch.Tensor, gradient: torch.Tensor | None, values: bytes) -> _Mark:
    return (parameter, None, 0, b"") if gradient is None else (parameter, ref(gradient), gradient._version, values)


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


def _is_left(parameter: torch.Tensor) -> bool:
    """Return whether a parameter that is trained has a gradient that is not all zeros."""
    return parameter.requires_grad and parameter.grad is not None and has_values(parameter.grad)


def _values(gradient: torch.Tensor) -> bytes:
    """Return a few values that stand for all; waits for the device where they lie on one."""
    if cuda.has(gradient):
        of_device: bytes = bytes_of(cuda.awaited(_spread(gradient)).cpu()).tobytes()
        return of_device
    try:
        array = gradient.numpy()
        flat = array.reshape(-1) if array.flags.c_contiguous else array.flat[:_VALUES]
    except (TypeError, RuntimeError):  # of another kind, or somewhere else
        flat = bytes_of(_strided(gradient).reshape(-1)[:_VALUES].cpu())
    found: bytes = flat[:: max(1, len(flat) // _VALUES)].tobytes()
    return found


def has_values(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is not all zeros."""
    return bool(_strided(cuda.awaited(gradient)).any())


def _strided(gradient: torch.Tensor) -> Any:
    return gradient.detach() if gradient.layout is torch.strided else gradient.coalesce().values().detach()


def digest_of(parameters: Sequence[torch.Tensor]) -> bytes:
    """Return a few bytes that stand for all values of the gradients; none where no gradient has any.  Local."""
    checksums = [0, 0]
    for number, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is not None and has_values(gradient):
            raw = bytes_of(gradient.cpu() if gradient.layout is torch.strided else gradient.to_dense().cpu())
            checksums = [crc32(raw, checksums[0] + number), adler32(raw, checksums[1])]
    return b"%x %x" % (*checksums,) if any(checksums) else b""
