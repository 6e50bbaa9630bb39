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
from mpidist.frameworks.torch.tensors import array_of, is_dense, is_flat

_BY_ROWS = torch.contiguous_format

#: Arrays of so many bytes are told by sums of blocks of so many, with odd multiples of a number as weights.
_LONG_BYTES, _BLOCK_BYTES, _WEIGHT = 1 << 16, 1 << 12, numpy.uint64(0x9E3779B97F4A7C15)


def early_gradients(
    buckets: Buckets, parameters: Sequence[Sequence[torch.Tensor]], scale: float | None
) -> EarlyGradients:
    """Return the gradients of parameters, which are given by bucket; sums are multiplied by `scale`."""
    kind = DeviceGradients if isinstance(buckets, DeviceBuckets) else EarlyGradients
    return kind(buckets, parameters, scale)


class EarlyGradients:
    """Gradients in host memory, known again by check sums."""

    def __init__(self, buckets: Any, parameters: Sequence[Sequence[torch.Tensor]], scale: float | None) -> None:
        self._buckets, self._parameters, self._scale = buckets, parameters, scale
        self._seen: list[list[Any]] = [[] for _ in parameters]
        self._changed: Answer | None = None  # where it is known later

    def copy(self, index: int) -> bool:
        """Copy those of a bucket, zeros for missing ones; False, and nothing done, where one cannot be copied."""
        own = self._parameters[index]
        if not all(each.grad is None or _is_plain(each.grad, each) for each in own):
            return False
        arrays = self._arrays(index)
        self._buckets.fill(index, arrays)
        pairs = zip((each.grad for each in own), arrays, strict=True)
        self._seen[index] = [None if gradient is None else self._see(gradient, array) for gradient, array in pairs]
        return True

    def _arrays(self, index: int) -> list[Any]:
        """Return the gradients of a bucket as they are copied."""
        found = [torch.zeros_like(each) if each.grad is None else each.grad for each in self._parameters[index]]
        return [array_of(each.detach().contiguous()) for each in found]

    def are_as_copied(self, count: int) -> bool:
        """Return whether those of the first `count` buckets are what was copied, as far as it is known by now."""
        pairs = zip(self._parameters[:count], self._seen, strict=False)
        return all(
            each.grad is seen if each.grad is None or seen is None else self._is_seen(each.grad, each, seen)
            for pair in pairs
            for each, seen in zip(*pair, strict=True)
        )

    def _see(self, gradient: torch.Tensor, array: Any) -> Any:
        """Return by what a gradient is known again; `array` has its values."""
        return _check_sum(array)

    def _is_seen(self, gradient: torch.Tensor, parameter: torch.Tensor, seen: Any) -> bool:
        """Return whether a parameter's gradient is the one that was seen."""
        return _is_plain(gradient, parameter) and bool(_check_sum(array_of(gradient)) == seen)

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
        gradients = map(_gradient_of, self._parameters[index], has)
        self._buckets.take(index, [each if each is None else array_of(each) for each in gradients], self._scale)


class DeviceGradients(EarlyGradients):
    """Gradients on a device, known again by what PyTorch says of them.

    What was changed without its notice comes to light later, when the device has looked at all bytes.
    """

    def are_as_copied(self, count: int) -> bool:
        """Return whether they are, as far as PyTorch knows; `were_wrong` tells later of the rest."""
        if not super().are_as_copied(count):
            return False
        for index in range(count):
            self._buckets.mark(index, self._arrays(index))
        self._changed = self._buckets.have_changed(count) if count else None
        return True

    def _see(self, gradient: torch.Tensor, array: Any) -> Any:
        """Return the tensor, how often it was written, and where it lies."""
        return ref(gradient), gradient._version, gradient.data_ptr()

    def _is_seen(self, gradient: torch.Tensor, parameter: torch.Tensor, seen: Any) -> bool:
        return gradient is seen[0]() and (gradient._version, gradient.data_ptr()) == seen[1:]

    def put(self, index: int, has: Sequence[bool]) -> None:
        """Put the sums in place by copies where gradients do not lie as the sums do."""
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


def _is_plain(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a gradient can be copied, and sums put in its place."""
    is_like = gradient.layout is torch.strided and gradient.dtype is parameter.dtype
    is_near = gradient.device == parameter.device
    return is_like and is_near and (is_flat(gradient) or is_dense(gradient))  # the first is quicker


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
