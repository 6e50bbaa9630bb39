"""CUDA memory and streams of other libraries, as CuPy's own: nothing is copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import cupy

from mpidist.device.waiting import recorded, wait_for


def array_at(
    address: int, nbytes: int, shape: Sequence[int], strides: Sequence[int] | None, dtype: Any, owner: Any, device: int
) -> Any:
    """Return the array that lies at an address.  Local.

    `address`, `nbytes`: of the memory from the array's first element on.  `strides`: in bytes; None for an array that
    is C-contiguous.  `owner`: what the array keeps alive; None where somebody else does.  `device`: the number of the
    GPU.
    """
    memory = cupy.cuda.UnownedMemory(address, nbytes, owner, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def array_of(value: Any) -> Any:
    """Return the array that shares the memory of what DLPack knows.  Local."""
    return cupy.from_dlpack(value)


@contextmanager
def on_stream(pointer: int, device: int) -> Iterator[None]:
    """Have all work of the ``with`` block begun on a stream of another library, on a GPU.  Local.

    The stream lasts as long as the process: later work, in whichever stream, is ordered behind it.
    """
    with cupy.cuda.Device(device), _stream_at(pointer, device):
        yield


@lru_cache(maxsize=64)
def _stream_at(pointer: int, device: int) -> Any:
    """Return CuPy's name for a stream."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Handle(pointer))
    return cupy.cuda.ExternalStream(pointer, device)  # before CuPy 14


class _Handle:
    """A stream as CUDA's protocol has it."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, and the stream."""
        return 0, self._pointer


def wait() -> None:
    """Wait for all that was begun on the current stream; errors as for `wait_for`.  Local."""
    wait_for(recorded())
