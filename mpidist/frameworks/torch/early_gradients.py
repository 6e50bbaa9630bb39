"""Gradients that are copied in the backward pass, and whether they are at its end what was copied.  All Local."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref
from zlib import crc32

import numpy
import torch

from mpidist.collectives.early_buckets import Buckets, DeviceBuckets
from mpidist.device.answers import Answer
from mpidist.frameworks.torch.tensors import array_of, dtype_of, is_dense, is_flat

_BY_ROWS = torch.contiguous_format

#: Arrays of so many bytes are told by sums of blocks of so many, with odd multiples of a number as weights.
_LONG_BYTES, _BLOCK_BYTES, _WEIGHT = 1 << 16, 1 << 12, numpy.uint64(0x9E3779B97F4A7C15)


def early_gradients(
    buckets: Buckets, parameters: Sequence[Sequence[torch.Tensor]], scale: float | None
) -> HostGradients | DeviceGradients:
    """Return the gradients of parameters, which are given by bucket; sums are multiplied by `scale`."""
    if isinstance(buckets, DeviceBuckets):
        return DeviceGradients(buckets, parameters, scale)
    return HostGradients(buckets, parameters, scale)


class HostGradients:
    """Gradients in host memory, known again by check sums."""

    def __init__(self, buckets: Buckets, parameters: Sequence[Sequence[torch.Tensor]], scale: float | None) -> None:
        self._buckets, self._parameters, self._scale = buckets, parameters, scale
        self._seen: list[list[int | None]] = [[] for _ in parameters]

    def copy(self, index: int) -> bool:
        """Copy those of a bucket, zeros for those that there are not; False, and nothing done, where that cannot be."""
        arrays: list[Any] = []
        seen: list[int | None] = []
        for parameter in self._parameters[index]:
            gradient = parameter.grad
            if gradient is not None and not _is_plain(gradient, parameter):
                return False
            array = numpy.zeros(parameter.shape, dtype_of(parameter)) if gradient is None else array_of(gradient)
            arrays.append(array if array.flags.c_contiguous else array.copy(order="C"))
            seen.append(None if gradient is None else _check_sum(arrays[-1]))
        self._buckets.fill(index, arrays)
        self._seen[index] = seen
        return True

    def are_as_copied(self, count: int) -> bool:
        """Return whether those of the first `count` buckets are what was copied."""
        pairs = zip(self._parameters[:count], self._seen, strict=False)
        return not any(_has_changed(*pair) for each in pairs for pair in zip(*each, strict=True))

    def were_wrong(self) -> bool:
        """Return False: `are_as_copied` tells all."""
        return False

    def forget(self) -> None:
        """Do nothing."""

    def put(self, index: int, has: Sequence[bool]) -> None:
        """Put the sums of a bucket in place of the gradients that any replica `has`."""
        gradients = map(_gradient_of, self._parameters[index], has)
        self._buckets.take(index, [each if each is None else array_of(each) for each in gradients], self._scale)


class DeviceGradients:
    """Gradients on a device, known again by what PyTorch says of them.

    What was changed without its notice comes to light later, when the device has looked at all bytes.
    """

    def __init__(
        self, buckets: DeviceBuckets, parameters: Sequence[Sequence[torch.Tensor]], scale: float | None
    ) -> None:
        self._buckets, self._parameters, self._scale = buckets, parameters, scale
        self._seen: list[list[Any]] = [[] for _ in parameters]
        self._changed: Answer | None = None

    def copy(self, index: int) -> bool:
        """Copy those of a bucket, zeros for those that there are not; False, and nothing done, where that cannot be."""
        own = self._parameters[index]
        if not all(each.grad is None or _is_plain(each.grad, each) for each in own):
            return False
        arrays = self._arrays(index)
        self._buckets.fill(index, arrays)
        self._buckets.mark(index, arrays, is_first=True)
        self._seen[index] = [_seen(each.grad) for each in own]
        return True

    def _arrays(self, index: int) -> list[Any]:
        """Return the gradients of a bucket as they are copied."""
        found = [torch.zeros_like(each) if each.grad is None else each.grad for each in self._parameters[index]]
        return [array_of(each.detach().contiguous()) for each in found]

    def are_as_copied(self, count: int) -> bool:
        """Return whether those of the first `count` buckets are what was copied, as far as PyTorch knows."""
        pairs = zip(self._parameters[:count], self._seen, strict=False)
        if not all(_is_seen(*pair) for each in pairs for pair in zip(*each, strict=True)):
            return False
        for index in range(count):
            self._buckets.mark(index, self._arrays(index), is_first=False)
        self._changed = self._buckets.have_changed(count) if count else None
        return True

    def were_wrong(self) -> bool:
        """Return whether those of the last `are_as_copied` were not; waits for the device."""
        changed = self._changed
        self.forget()
        return changed is not None and changed()

    def forget(self) -> None:
        """Never mind what was copied last."""
        self._changed = None

    def put(self, index: int, has: Sequence[bool]) -> None:
        """Put the sums of a bucket in place of the gradients that any replica `has`."""
        own = self._parameters[index]
        gradients = list(map(_gradient_of, own, has))
        targets = [
            each if each is not None and is_flat(each) else torch.empty_like(parameter, memory_format=_BY_ROWS)
            for each, parameter in zip(gradients, own, strict=True)
        ]
        self._buckets.take(index, [array_of(each) for each in targets], self._scale)
        for gradient, target in zip(gradients, targets, strict=True):
            if gradient is not None and gradient is not target:
                gradient.copy_(target)


def _gradient_of(parameter: torch.Tensor, has: bool) -> torch.Tensor | None:
    """Return a parameter's gradient, a new one if it has none; None where nobody has one."""
    if has and parameter.grad is None:
        parameter.grad = torch.empty_like(parameter, memory_format=_BY_ROWS)
    return parameter.grad if has else None


def _seen(gradient: torch.Tensor | None) -> Any:
    """Return what PyTorch knows of a gradient: the tensor, how often it was written, and where it lies."""
    return None if gradient is None else (ref(gradient), gradient._version, gradient.data_ptr())


def _is_seen(parameter: torch.Tensor, seen: Any) -> bool:
    """Return whether that is what PyTorch knows of a parameter's gradient."""
    gradient = parameter.grad
    if gradient is None or seen is None:
        return gradient is None and seen is None
    return gradient is seen[0]() and (gradient._version, gradient.data_ptr()) == seen[1:]


def _is_plain(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a gradient can be copied, and sums put in its place."""
    is_like = gradient.layout is torch.strided and gradient.dtype is parameter.dtype
    is_near = gradient.device == parameter.device
    return is_like and is_near and (is_flat(gradient) or is_dense(gradient))  # the first is quicker


def _has_changed(parameter: torch.Tensor, check_sum: int | None) -> bool:
    """Return whether a parameter's gradient is not what was copied."""
    gradient = parameter.grad
    if gradient is None or check_sum is None:
        return gradient is not None or check_sum is not None
    return not _is_plain(gradient, parameter) or _check_sum(array_of(gradient)) != check_sum


def _check_sum(array: Any) -> int:
    """Return 64 bits that stand for the bytes of an array, wherever it lies.

    Long arrays by sums of blocks, each with a weight of its own, and the first block as it is: a plain sum may stay
    where all signs change.
    """
    raw = array.reshape(-1).view(numpy.uint8)
    count = raw.size // _BLOCK_BYTES if raw.size >= _LONG_BYTES else 0
    whole = count * _BLOCK_BYTES
    sums = raw[:whole].view(numpy.uint64).reshape(count, _BLOCK_BYTES // 8).sum(axis=1)
    weights = _WEIGHT * numpy.arange(1, 2 * count, 2, dtype=numpy.uint64)
    return int((sums * weights).sum()) ^ crc32(raw[whole:], crc32(raw[:_BLOCK_BYTES]))
