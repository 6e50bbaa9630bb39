"""What clients and servers say to each other: kinds of messages, and their headers.

A push has a header of fixed form, since there is one each step; all else is JSON.  Arrays are never pickled: they
travel as the message's payload.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from mpidist.parameter_server.layout import aligned, dtype_name


class Kind(enum.IntEnum):
    """The first byte of a header."""

    #: Client to server: gradients; no answer.
    PUSH = 1
    #: Client to server: anything that is answered, in order, by ANSWER or FAILURE.
    REQUEST = 2
    #: Client to server: something to take note of; no answer.
    NOTE = 3
    #: Server to client.
    ANSWER = 4
    FAILURE = 5
    #: Server to client: an earlier push of this client could not be applied.
    PUSH_FAILURE = 6


#: A push's header without its counts: kind, then the fields of `PushHeader`.
PUSH = struct.Struct("<BxHIqd")


#: The kinds of each step as plain numbers, which compare in half the time.
PUSH_KIND, REQUEST_KIND = int(Kind.PUSH), int(Kind.REQUEST)


class PushHeader(NamedTuple):
    """The header of a push."""

    optimizer: int
    plan: int
    iteration: int
    scale: float
    counts: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """Return the header's bytes."""
        optimizer, plan, iteration, scale, counts = self
        fixed = PUSH.pack(PUSH_KIND, optimizer, plan, iteration, scale)
        return fixed + struct.pack(f"<{len(counts)}q", *counts) if counts else fixed

    @classmethod
    def unpack(cls, header: bytes) -> PushHeader:
        """Return what `pack` packed."""
        _, optimizer, plan, iteration, scale = PUSH.unpack_from(header)
        rest = len(header) - PUSH.size
        counts = struct.unpack_from(f"<{rest // 8}q", header, PUSH.size) if rest else ()
        return cls(optimizer, plan, iteration, scale, counts)


def pack(kind: Kind, content: Any) -> bytes:
    """Return a header of any kind but PUSH."""
    return bytes([kind]) + json.dumps(content, separators=(",", ":")).encode()


def unpack(header: bytes) -> Any:
    """Return the content of a header that `pack` made."""
    return json.loads(bytes(memoryview(header)[1:]))


def described(array: Any) -> list[Any]:
    """Return dtype and shape of an array that travels as a payload."""
    return [dtype_name(array.dtype), list(array.shape)]


def as_described(payload: Any, description: list[Any]) -> Any:
    """Return the array of this dtype and shape that a payload holds, as a view."""
    dtype, shape = numpy.dtype(description[0]), tuple(description[1])
    size = int(numpy.prod(shape, dtype=numpy.int64))
    raw = payload if payload is not None else numpy.empty(0, numpy.uint8)
    return raw[: size * dtype.itemsize].view(dtype).reshape(shape)


def joined(arrays: Mapping[str, Any]) -> tuple[list[list[Any]], Any]:
    """Return names, dtypes and shapes of some arrays, and their bytes, each beginning at a multiple of 64."""
    memory = numpy.zeros(sum(aligned(array.nbytes) for array in arrays.values()), numpy.uint8)
    start = 0
    for array in arrays.values():
        memory[start : start + array.nbytes].view(array.dtype)[...] = array.reshape(-1)
        start += aligned(array.nbytes)
    return [[name, *described(array)] for name, array in arrays.items()], memory


def parted(descriptions: Sequence[Sequence[Any]], memory: Any) -> dict[str, Any]:
    """Return the arrays that `joined` put together, as views."""
    arrays, start = {}, 0
    for name, *description in descriptions:
        array = arrays[name] = as_described(memory[start:], description)
        start += aligned(array.nbytes)
    return arrays
