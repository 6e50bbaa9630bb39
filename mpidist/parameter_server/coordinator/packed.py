"""Values on their way between chief and workers: pickled, but for the memory of large arrays, which goes as it is.

An array is copied three times: when the value is packed, since the program may change it then, into the memory that the
connection sends from, and out of the memory that the other side received it in.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy

from mpidist.parameter_server.coordinator.functions import PROTOCOL
from mpidist.parameter_server.layout import aligned

#: Buffers of fewer bytes are pickled with the rest.
_LARGE_BYTES = 1 << 12


class PackedValue:
    """A pickled value beside which its large buffers lie."""

    __slots__ = ("_text", "_buffers")

    def __init__(self, text: bytes, buffers: Sequence[Any]) -> None:
        self._text = text
        self._buffers = buffers

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self._text) + sum(memoryview(buffer).nbytes for buffer in self._buffers)

    def value(self) -> Any:
        """Return the value, once: its arrays lie in the buffers."""
        return pickle.loads(self._text, buffers=self._buffers)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return PackedValue, (self._text, [pickle.PickleBuffer(buffer) for buffer in self._buffers])


def packed(value: Any) -> bytes | PackedValue:
    """Return a value as it is now, with copies of its arrays."""
    text, buffers = parted(value)
    return PackedValue(text, [buffer.copy() for buffer in buffers]) if buffers else text


def unpacked(value: bytes | PackedValue) -> Any:
    """Return what was packed; once."""
    return value.value() if type(value) is PackedValue else pickle.loads(value)  # type: ignore[arg-type]


def size_of(payload: Any) -> int:
    """Return the size in bytes of what was packed, 0 of anything else."""
    return len(payload) if type(payload) is bytes else payload.nbytes if type(payload) is PackedValue else 0


def parted(value: Any) -> tuple[bytes, list[Any]]:
    """Return a value pickled without its large buffers, and these: views of bytes."""
    buffers: list[Any] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LARGE_BYTES:
            return True
        buffers.append(numpy.frombuffer(raw, numpy.uint8))
        return False

    return pickle.dumps(value, PROTOCOL, buffer_callback=is_small), buffers


# -- in one piece of memory -------------------------------------------------------------------------------------------


def places(lengths: Sequence[int]) -> list[slice]:
    """Return where pieces of so many bytes lie, one after the other, each at a multiple of 64."""
    slices, end = [], 0
    for length in lengths:
        start = aligned(end)
        end = start + length
        slices.append(slice(start, end))
    return slices


def fill(memory: Any, pieces: Sequence[Any], where: Sequence[slice]) -> None:
    """Copy pieces, bytes or arrays of them, to their places in an array of bytes."""
    for piece, place in zip(pieces, where, strict=True):
        memory[place] = numpy.frombuffer(piece, numpy.uint8)


def joined(memory: Any, where: Sequence[slice]) -> Any:
    """Return the value of which the pickled text and then the buffers lie in these places; they are copied."""
    return pickle.loads(memory[where[0]], buffers=[memory[place].copy() for place in where[1:]])
