"""Arrays of JAX on a CUDA device, and CuPy's that share their memory.  All Local.

JAX and CuPy compute on streams of their own, so each is waited for before the other reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy

from mpidist import arrays
from mpidist.arrays import GET_CUPY
from mpidist.errors import MissingDependencyError


def has(placement: Any) -> bool:
    """Return whether arrays of a sharding lie on one CUDA device."""
    return len(placement.device_set) == 1 and next(iter(placement.device_set)).platform == "gpu"


def knows(dtype: numpy.dtype[Any]) -> bool:
    """Return whether arrays of a dtype are moved on the device: NumPy's own, and of what JAX adds bfloat16 alone."""
    # 2 is for dtypes of other libraries; NumPy's own have 1, or 0, as they were made
    return dtype.isbuiltin != 2 or dtype.name == "bfloat16"


def require_cupy(instead: str = "give jax.device_get(tree), and jax.device_put the result") -> None:
    """Raise MissingDependencyError unless CuPy, by which arrays on a device are moved, can be imported.

    `instead` is what goes without it.
    """
    try:
        import mpidist.device.foreign  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"arrays of JAX on a GPU are reduced, broadcast and gathered by way of CuPy: {GET_CUPY} ({error}). Or "
            f"{instead}"
        ) from error


def array_of(leaf: jax.Array, dtype: numpy.dtype[Any]) -> Any:
    """Return the CuPy array that shares a leaf's memory, which is not written, when the leaf has its values."""
    from mpidist.device import foreign

    found = foreign.array_of(leaf.block_until_ready())
    return (
        found if found.dtype == dtype else found.view(f"i{dtype.itemsize}").view(dtype)
    )  # CuPy knows no bfloat16 here


def given(results: Sequence[Any], dtypes: Sequence[Any], placements: Sequence[Any]) -> list[jax.Array]:
    """Return copies of results as arrays of JAX, when the device has made them; `dtypes` are those of the copies.

    They are in memory of JAX: users donate arrays, and nothing orders CuPy's use of memory behind JAX's streams.
    """
    from mpidist.device import foreign

    found = [each.astype(dtype, order="C", copy=False) for each, dtype in zip(results, dtypes, strict=True)]
    foreign.wait()
    with jax.enable_x64(True):
        copies = [jax.numpy.array(_shared(each), copy=True) for each in found]
        made: list[jax.Array] = jax.block_until_ready(jax.device_put(copies, list(placements)))
    return made


def _shared(array: Any) -> jax.Array:
    """Return the array of JAX that shares a CuPy array's memory, or has its values."""
    if not array.size:
        return jax.numpy.zeros(array.shape, array.dtype)
    if array.dtype.name == "bfloat16":
        bits = jax.dlpack.from_dlpack(array.view(numpy.uint16))
        return jax.lax.bitcast_convert_type(bits, jax.numpy.bfloat16)
    return jax.dlpack.from_dlpack(array)


def zeros(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """Return an array of zeros of the kind of `like`."""
    found = arrays.empty(shape, dtype, like)
    found[...] = 0
    return found


def near(placement: Any) -> AbstractContextManager[None]:
    """Have what is done to arrays be done on the device of a sharding; None for the host."""
    if placement is None:
        return nullcontext()
    from mpidist.device import foreign

    (device,) = placement.device_set
    return foreign.on_stream(0, device.local_hardware_id or 0)
