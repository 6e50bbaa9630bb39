"""A pretended device: arrays whose content the host cannot reach, to prove that nobody copies it there unasked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpidist import arrays


class DeviceArray:
    """An array in pretended device memory; it refuses everything by which NumPy would get at its content.

    Parameters
    ----------
    hidden : numpy.ndarray
        The content.  Tests make device arrays with `on_device` and look into them with `mpidist.arrays.as_host`.
    base : DeviceArray, optional
        Of which it is a view, as CuPy's arrays have it: the one that has the memory.
    """

    #: Makes numpy's functions and operators refuse these arrays, instead of treating them as objects.
    __array_ufunc__ = None

    def __init__(self, hidden: np.ndarray, base: DeviceArray | None = None) -> None:
        self._hidden = hidden
        self.base = base
        self.dtype, self.shape, self.size = hidden.dtype, hidden.shape, hidden.size
        self.itemsize, self.nbytes, self.ndim = hidden.itemsize, hidden.nbytes, hidden.ndim
        self.flags, self.strides = hidden.flags, hidden.strides

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("this array is in device memory; something wanted to copy it to the host unasked")

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("this array is in device memory; something wanted to read it element by element")

    def __getitem__(self, key: Any) -> DeviceArray:
        return self._view(self._hidden[key])

    def _view(self, hidden: np.ndarray) -> DeviceArray:
        return DeviceArray(hidden, self if self.base is None else self.base)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._hidden[key] = _inside(value)

    def __len__(self) -> int:
        return len(self._hidden)

    def reshape(self, *shape: Any) -> DeviceArray:
        """Return the array with another shape."""
        return self._view(self._hidden.reshape(*shape))

    def view(self, *dtype: Any) -> DeviceArray:
        """Return the same memory, by default as values of the same dtype."""
        return self._view(self._hidden.view(*dtype))

    def copy(self) -> DeviceArray:
        """Return a copy, on the device."""
        return DeviceArray(self._hidden.copy())

    def astype(self, dtype: Any) -> DeviceArray:
        """Return a copy as another dtype, on the device."""
        return DeviceArray(self._hidden.astype(dtype))

    @property
    def T(self) -> DeviceArray:  # noqa: N802 - numpy's name
        """The array with its axes reversed."""
        return self._view(self._hidden.T)


def _inside(value: Any) -> np.ndarray | float:
    """Return the hidden content of a device array; Python numbers travel with a kernel, host arrays do not."""
    if isinstance(value, DeviceArray):
        return value._hidden
    if isinstance(value, (bool, int, float)):
        return value
    raise TypeError(f"expected an array in device memory, got {type(value).__name__}")


class _Namespace:
    """The pretended library: numpy's functions, on device arrays only."""

    @staticmethod
    def empty(shape: Any, dtype: Any = float) -> DeviceArray:
        return DeviceArray(np.empty(shape, dtype))

    @staticmethod
    def copyto(destination: DeviceArray, source: Any) -> None:
        np.copyto(destination._hidden, _inside(source))

    @staticmethod
    def concatenate(pieces: Any, axis: int | None = 0, out: DeviceArray | None = None) -> DeviceArray:
        hidden = [piece._hidden for piece in pieces]
        return DeviceArray(np.concatenate(hidden, axis=axis, out=None if out is None else out._hidden))

    def __getattr__(self, name: str) -> Any:
        ufunc = getattr(np, name)
        if not isinstance(ufunc, np.ufunc):
            raise AttributeError(f"the pretended device has no function {name!r}")

        def on_device(*operands: Any, out: Any = None) -> DeviceArray:
            *inputs, last = operands
            if out is None and len(operands) > ufunc.nin:
                out = last
            else:
                inputs.append(last)
            results = ufunc(*map(_inside, inputs), out=None if out is None else _inside(out))
            return DeviceArray(results) if out is None else out

        return on_device


def on_device(array: Any) -> DeviceArray:
    """Return a copy of a host array in pretended device memory."""
    return DeviceArray(np.array(array, order="C"))


@contextmanager
def pretended_device() -> Iterator[None]:
    """Make `DeviceArray` known to `mpidist.arrays` inside the block."""
    library = _Namespace()
    kind = arrays.ArrayKind(
        "pretended", "device", lambda value: isinstance(value, DeviceArray), lambda: library, lambda a: a._hidden.copy()
    )
    arrays.register(kind)
    try:
        yield
    finally:
        arrays.unregister(kind.name)
