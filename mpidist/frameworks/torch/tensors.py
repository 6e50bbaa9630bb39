"""Tensors of PyTorch in host memory as NumPy arrays that share it.  All Local."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy
import torch

from mpidist.errors import MissingDependencyError, UnsupportedDtypeError

Named = tuple[str, torch.Tensor]

#: What `staging` may be: nothing is copied, or tensors of a device pass through host memory.
STAGING = (None, "host")

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def array_of(tensor: torch.Tensor) -> Any:
    """Return the array that shares a tensor's memory; UnsupportedDtypeError where NumPy has no such values."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_bfloat16())
    try:
        return tensor.numpy()
    except TypeError as error:
        raise UnsupportedDtypeError(
            f"{tensor.dtype} tensors cannot be reduced over ranks: {error}; cast them first, as by tensor.float()"
        ) from error


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor as an array: of a contiguous one in host memory its own, else copies.

    Any dtype has them, also those that NumPy does not know.
    """
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()


def bits_of(tensor: torch.Tensor) -> Any:
    """Return the array that shares a contiguous tensor's memory, in the integers that are as long as its elements."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()]).numpy()


@cache
def is_known(dtype: torch.dtype) -> bool:
    """Return whether NumPy has such values."""
    try:
        array_of(torch.empty(0, dtype=dtype))
    except (UnsupportedDtypeError, MissingDependencyError):
        return False
    return True


def dtype_of(tensor: torch.Tensor) -> numpy.dtype[Any]:
    """Return the dtype of `array_of` a tensor."""
    return array_of(torch.empty(0, dtype=tensor.dtype)).dtype


def tensor_of(array: Any) -> torch.Tensor:
    """Return the tensor that shares an array's memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(numpy.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in memory that NumPy reads."""
    return tensor.device.type == "cpu"


def check_memory(named: Iterable[tuple[str, torch.Tensor]], staging: str | None) -> None:
    """Raise NotImplementedError for a tensor of a device, unless the user asked for it to be staged in host memory."""
    if staging not in STAGING:
        raise ValueError(f"staging={staging!r}: it is None, or 'host'")
    for name, tensor in named:
        if staging is None and not is_on_host(tensor):
            raise NotImplementedError(
                f"{name!r} lies on {tensor.device}: there is no path for tensors of a device yet, and mpidist copies "
                "nothing unasked. staging='host' reduces them through host memory, which takes two copies a step; "
                "model.cpu() trains on the host"
            )


def is_flat(tensor: torch.Tensor) -> bool:
    """Return whether the elements lie one after the other in host memory, as they are."""
    return is_on_host(tensor) and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def expanded_axes(tensor: torch.Tensor) -> list[int]:
    """Return the axes along which all elements lie in one place, as `expand` makes them."""
    return [axis for axis, stride in enumerate(tensor.stride()) if stride == 0 and tensor.shape[axis] > 1]


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingDependencyError(
            f"bfloat16 tensors need the package ml_dtypes: pip install 'mpidist[torch]' ({error})"
        ) from error
    return ml_dtypes.bfloat16
