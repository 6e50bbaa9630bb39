"""Leaves of pytrees: what they are to a collective, as arrays of the host or a device, and how results become leaves.

A leaf comes back as what it was: an array of JAX with its sharding and weak type, an array of NumPy, or a number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy
from jax import numpy as jnp

from mpidist.errors import UnsupportedDtypeError
from mpidist.frameworks.jax import cuda

#: The types of Python's numbers, each with the dtype in which its values are reduced.
_NUMBERS: dict[type, str] = {bool: "?", int: "i8", float: "f8", complex: "c16"}


class LeafKind(NamedTuple):
    """What must be alike for one bound collective to serve two leaves.

    `type` is `jax.Array`, or the leaf's own; `placement` is that of an array of JAX.  `is_weak`: JAX may take the dtype
    of what the array is combined with.  `is_committed`: JAX keeps the array, and what is computed from it, where it is.
    """

    type: type
    dtype: Any
    shape: tuple[int, ...]
    placement: Any = None
    is_weak: bool = False
    is_committed: bool = True


class Leaf:
    """How leaves of one kind are taken, and given back: those of NumPy, unless a class says otherwise.

    `dtype` and `shape` are those of the host array.  `has_sum`: values are numbers that can be added up.  `in_jax`:
    `given` gets an array of JAX; then `placement` is where JAX has the leaf, None where that is left to JAX.  `device`
    is the CUDA device on which the leaf is reduced and broadcast; None for the host.
    """

    has_sum, in_jax = True, False
    placement: Any = None
    device: Any = None

    def __init__(self, dtype: Any, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = numpy.dtype(dtype), shape

    def check(self, leaf: Any) -> None:
        """Raise ValueError for a leaf whose values are gone.  Local."""

    def taken(self, leaf: Any) -> Any:
        """Return the leaf as an array where it is reduced, which is not written.  Local."""
        return self.on_host(leaf)

    def on_host(self, leaf: Any) -> Any:
        """Return the leaf as a host array, which is not written.  Local."""
        return leaf

    def result_dtype(self, dtype: Any) -> Any:
        """Return in which dtype results are given back that were computed in `dtype`.  Local.

        A mean of integers is float64, of arrays of JAX what JAX computes means in.
        """
        if dtype == self.dtype or self.dtype.kind not in "iu":
            return self.dtype
        return jax.dtypes.canonicalize_dtype(numpy.float64) if self.in_jax else numpy.dtype(numpy.float64)

    def given(self, result: Any, leaf: Any) -> Any:
        """Return a result as what the leaf was.  Local."""
        return result


def kind_of(leaf: Any) -> LeafKind:
    """Return the kind of a leaf.  Local."""
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        is_weak = getattr(leaf, "weak_type", False)  # which keys have not
        return LeafKind(jax.Array, leaf.dtype, leaf.shape, leaf.sharding, is_weak, leaf.committed)
    if isinstance(leaf, (numpy.ndarray, numpy.generic)):
        return LeafKind(type(leaf), leaf.dtype, leaf.shape)
    if getattr(leaf, "dtype", None) == jax.dtypes.float0:  # in a type of JAX's own
        return LeafKind(type(leaf), leaf.dtype, leaf.shape)
    return LeafKind(type(leaf), None, ())


def leaf_of(kind: LeafKind, name: str, what: str) -> Leaf:
    """Return how leaves of a kind are taken and given back.  Local.

    `name`, the leaf's path in its tree, and `what`, the function that was called, are for messages.  TypeError for a
    tracer, and for what is no array and no number; UnsupportedDtypeError for an array that lies neither in this
    process's host memory nor on one CUDA device.
    """
    if issubclass(kind.type, jax.core.Tracer):
        raise TypeError(
            f"{what} was called inside jit, grad or another transformation of JAX (leaf {name!r} has no value yet): it "
            "communicates, so call it outside, between jitted functions"
        )
    if kind.type is jax.Array:
        _check_placement(kind, name, what)
        if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
            return _KeyLeaf(kind, name)
        is_near = cuda.has(kind.placement) and cuda.knows(kind.dtype)
        return _CudaLeaf(kind, name) if is_near else _JaxLeaf(kind, name)
    if kind.dtype == jax.dtypes.float0:
        return _NoGradientLeaf(numpy.uint8, (0,))
    if issubclass(kind.type, numpy.generic):
        return _ScalarLeaf(kind.dtype, kind.shape)
    if kind.type is numpy.ndarray:
        return Leaf(kind.dtype, kind.shape)
    if kind.type in _NUMBERS:
        return _NumberLeaf(_NUMBERS[kind.type], ())
    raise TypeError(
        f"{what}: leaf {name!r} is a {kind.type.__module__}.{kind.type.__qualname__}; expected arrays of JAX or NumPy, "
        "and numbers. Keep what is no array out of the tree, as by equinox.partition(model, equinox.is_array), or "
        "convert it"
    )


def _check_placement(kind: LeafKind, name: str, what: str) -> None:
    """Raise unless an array lies in the host memory of this process, or on one CUDA device."""
    if not kind.placement.is_fully_addressable:
        raise UnsupportedDtypeError(
            f"{what}: leaf {name!r} is sharded over several processes of jax.distributed, which reduces it by itself; "
            "give arrays that this process has as a whole"
        )
    platforms = {device.platform for device in kind.placement.device_set}
    if platforms != {"cpu"} and not cuda.has(kind.placement):
        raise UnsupportedDtypeError(
            f"{what}: leaf {name!r} lies on {len(kind.placement.device_set)} {'/'.join(sorted(platforms))} devices; "
            f"arrays are reduced on one GPU or in host memory, and are not copied unasked. Call {what} with "
            "jax.device_get(tree), and jax.device_put what it returns"
        )


#: Values in the weak type of another array.
_like = jax.jit(lambda leaf, values: leaf.at[...].set(values))


class _JaxLeaf(Leaf):
    """An array of JAX on CPU devices."""

    in_jax = True

    def __init__(self, kind: LeafKind, name: str) -> None:
        super().__init__(kind.dtype, kind.shape)
        is_anywhere = not kind.is_committed and kind.placement == jnp.zeros(()).sharding
        self.placement = None if is_anywhere else kind.placement
        self._name, self._is_weak = name, kind.is_weak

    def check(self, leaf: Any) -> None:
        """Raise ValueError for an array that was donated."""
        if leaf.is_deleted():
            raise ValueError(
                f"leaf {self._name!r} was deleted: a jitted function that donates its arguments has taken its memory. "
                "Pass the tree on before you donate it, or jit the function without donate_argnums"
            )

    def on_host(self, leaf: Any) -> Any:
        """Return a view, after waiting for the values; of an array elsewhere than on one CPU device, a copy."""
        self.check(leaf)
        return numpy.asarray(leaf)

    def given(self, result: Any, leaf: Any) -> Any:
        """Return an array with the leaf's weak type, if it has one."""
        return _like(leaf, result) if self._is_weak and result.dtype == leaf.dtype else result


class _CudaLeaf(_JaxLeaf):
    """An array of JAX on a CUDA device, where it is reduced."""

    def __init__(self, kind: LeafKind, name: str) -> None:
        super().__init__(kind, name)
        self.device = kind.placement

    def taken(self, leaf: Any) -> Any:
        """Return an array that shares its memory, after waiting for the values."""
        self.check(leaf)
        return cuda.array_of(leaf, self.dtype)


class _KeyLeaf(_JaxLeaf):
    """An array of random keys, by the numbers that they are made of; there are no sums of keys."""

    has_sum = False

    def __init__(self, kind: LeafKind, name: str) -> None:
        numbers = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(kind.shape, kind.dtype))
        super().__init__(LeafKind(jax.Array, numbers.dtype, numbers.shape, kind.placement), name)

    def on_host(self, leaf: Any) -> Any:
        """Return the numbers of the keys."""
        self.check(leaf)
        return numpy.asarray(jax.random.key_data(leaf))

    def given(self, result: Any, leaf: Any) -> Any:
        """Return keys of the leaf's kind, where the leaf is."""
        return jax.device_put(jax.random.wrap_key_data(result, impl=jax.random.key_impl(leaf)), leaf.sharding)


class _NoGradientLeaf(Leaf):
    """The gradient of an integer, float0: it has no values, and comes back as it is."""

    def on_host(self, leaf: Any) -> Any:
        """Return an array without elements."""
        return numpy.empty(self.shape, self.dtype)

    def given(self, result: Any, leaf: Any) -> Any:
        """Return the leaf."""
        return leaf


class _ScalarLeaf(Leaf):
    """A scalar of NumPy."""

    def on_host(self, leaf: Any) -> Any:
        """Return an array of it; OverflowError for an integer of Python of more than 64 bits."""
        return numpy.asarray(leaf, self.dtype)

    def given(self, result: Any, leaf: Any) -> Any:
        """Return a scalar."""
        return result[()]


class _NumberLeaf(_ScalarLeaf):
    """A number of Python."""

    def given(self, result: Any, leaf: Any) -> Any:
        """Return a number."""
        return result.item()
