"""Tensors of PyTorch as arrays that share their memory: NumPy's in host memory, CuPy's on a CUDA device.  All Local."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from operator import is_
from typing import Any

import numpy
import torch

from mpidist import arrays
from mpidist.errors import MissingDependencyError, UnsupportedDtypeError
from mpidist.frameworks.torch import cuda
from mpidist.packages import pip_install

Named = tuple[str, torch.Tensor]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def array_of(tensor: torch.Tensor) -> Any:
    """Return the array that shares a tensor's memory; UnsupportedDtypeError where NumPy has no such values."""
    tensor = tensor.detach()
    if cuda.has(tensor):
        return cuda.array_of(tensor, dtype_of(tensor))
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_bfloat16())
    try:
        return tensor.numpy()
    except TypeError as error:
        raise UnsupportedDtypeError(
            f"{tensor.dtype} tensors cannot be reduced over ranks: {error}; cast them first, as by tensor.float()"
        ) from error


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor as an array: of a contiguous one its own, else copies.

    Any dtype has them, also those that NumPy does not know.
    """
    return array_of(as_bytes(flat_of(tensor)))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of the bytes of a contiguous tensor; that of one element may have any stride."""
    return tensor.unsqueeze(-1).view(torch.uint8).reshape(-1)


def integers_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor as integers; a complex number of 16 bytes is two of them."""
    if tensor.element_size() > 8:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements lie one after the other, as they are: the given one if its do."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


@cache
def is_known(dtype: torch.dtype) -> bool:
    """Return whether NumPy has such values."""
    try:
        _dtype(dtype)
    except (UnsupportedDtypeError, MissingDependencyError):
        return False
    return True


def dtype_of(tensor: torch.Tensor) -> numpy.dtype[Any]:
    """Return the dtype of `array_of` a tensor."""
    return _dtype(tensor.dtype)


@cache
def _dtype(dtype: torch.dtype) -> numpy.dtype[Any]:
    found: numpy.dtype[Any] = array_of(torch.empty(0, dtype=dtype, device="cpu")).dtype
    return found


def tensor_of(array: Any) -> torch.Tensor:
    """Return the tensor that shares an array's memory."""
    if arrays.is_device(array):
        found = cuda.tensor_of(array)
    else:
        found = torch.from_numpy(array.view(numpy.int16) if array.dtype.name == "bfloat16" else array)
    return found.view(torch.bfloat16) if array.dtype.name == "bfloat16" else found


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in memory that NumPy reads."""
    return tensor.device.type == "cpu"


def check_memory(named: Sequence[Named], staging: str | None) -> None:
    """Raise unless tensors lie in host memory, or all on one CUDA device, or are staged in host memory.

    NotImplementedError for a tensor of another kind of device that the user has not asked to stage; ValueError for
    tensors on several devices; MissingDependencyError for CUDA tensors without CuPy.
    """
    if staging not in (None, "host"):
        raise ValueError(f"staging={staging!r}: it is None, or 'host'")
    if staging is not None or not named:
        return
    first, tensor = named[0]
    for name, other in named:
        if not (is_on_host(other) or cuda.has(other)):
            raise NotImplementedError(
                f"{name!r} lies on {other.device}: there is no path for tensors of such a device, and mpidist copies "
                "nothing unasked. staging='host' reduces them through host memory, which takes two copies a step; "
                "model.cpu() trains on the host"
            )
        if other.device != tensor.device:
            raise ValueError(
                f"{first!r} lies on {tensor.device}, and {name!r} on {other.device}: they are reduced together where "
                "all lie on one device; move the model as a whole, as by model.to(device), or pass staging='host'"
            )
    if cuda.has(tensor):
        cuda.require_cupy()


def trainable(named: Iterable[Named]) -> list[Named]:
    """Return those that are to have a gradient."""
    return [pair for pair in named if pair[1].requires_grad]


def are_same(found: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two lists have the same objects, not only equal ones."""
    return len(found) == len(others) and all(map(is_, found, others))


def is_flat(tensor: torch.Tensor) -> bool:
    """Return whether the elements lie one after the other, as they are."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a piece of memory, as they are, in any order of the axes."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).is_contiguous()


def expanded_axes(tensor: torch.Tensor) -> list[int]:
    """Return the axes along which all elements lie in one place, as `expand` makes them."""
    return [axis for axis, stride in enumerate(tensor.stride()) if stride == 0 and tensor.shape[axis] > 1]


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingDependencyError(
            f"bfloat16 tensors need the package ml_dtypes: {pip_install('torch')} ({error})"
        ) from error
    return ml_dtypes.bfloat16
