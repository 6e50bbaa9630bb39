"""CUDA tensors: arrays that share their memory, and the stream on which PyTorch computes them.  All Local.

Nothing here but `awaited` waits for the device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import numpy
import torch

from mpidist.device.waiting import has_links
from mpidist.errors import MissingDependencyError


def has(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in the memory of a CUDA device."""
    return tensor.is_cuda


def require_cupy(instead: str = "pass staging='host', which copies them through host memory") -> None:
    """Raise MissingDependencyError unless CuPy, by which CUDA tensors are reduced, can be imported.

    `instead` is what goes without it.
    """
    try:
        import mpidist.device.foreign  # noqa: F401
    except ImportError as error:
        version = (torch.version.cuda or "13").partition(".")[0]
        raise MissingDependencyError(
            f"CUDA tensors are reduced by way of CuPy: pip install cupy-cuda{version}x ({error}); or {instead}"
        ) from error


def array_of(tensor: torch.Tensor, dtype: numpy.dtype[Any], is_kept: bool = True) -> Any:
    """Return the CuPy array that shares a tensor's memory.

    `dtype` is what the tensor's elements are.  With `is_kept` the array keeps the memory; else it is good as long as
    the tensor is there.
    """
    from mpidist.device import foreign

    strides, nbytes = None, tensor.nbytes
    if not tensor.is_contiguous():
        strides = [each * dtype.itemsize for each in tensor.stride()]
        nbytes = tensor.untyped_storage().nbytes() - tensor.storage_offset() * dtype.itemsize
    owner = tensor if is_kept else None
    return foreign.array_at(tensor.data_ptr(), nbytes, tuple(tensor.shape), strides, dtype, owner, tensor.get_device())


def tensor_of(array: Any) -> torch.Tensor:
    """Return the tensor that shares a CuPy array's memory; of bfloat16 values their bits, as int16."""
    return torch.from_dlpack(array.view(numpy.int16) if array.dtype.name == "bfloat16" else array)


def in_order_of(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Have what is done to arrays be ordered with PyTorch's work on a tensor's device, for a ``with`` block."""
    if not has(tensor):
        return nullcontext()
    from mpidist.device import foreign

    device = tensor.get_device()
    return foreign.on_stream(torch.cuda.current_stream(device).cuda_stream, device)


def awaited(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of any kind that the host is about to read, when its device has come so far.

    PyTorch would wait without a look at the other ranks, for whom the device may be waiting; errors as for `wait_for`.
    """
    if has_links() and has(tensor):
        from mpidist.device import foreign

        with in_order_of(tensor):
            foreign.wait()
    return tensor


def now(tensor: torch.Tensor) -> Any:
    """Return the time when a tensor's device has come to this point; of one of the host in seconds."""
    if not has(tensor):
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(tensor.get_device()))
    return event


def has_come(moment: Any) -> bool:
    """Return whether a time of `now` has come."""
    return isinstance(moment, (int, float)) or bool(moment.query())


def seconds_between(begun: Any, ended: Any) -> float:
    """Return the seconds from one time of `now` to another, of the same tensor, that have come."""
    return float(ended - begun) if isinstance(ended, (int, float)) else float(begun.elapsed_time(ended)) / 1000
