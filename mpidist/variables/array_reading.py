"""`ArrayReading`: what lets an object stand where an array is read, and nowhere where one is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpidist import arrays

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


class ArrayReading(NDArrayOperatorsMixin):
    """Operators, NumPy's functions, indexing and conversions, all on `value`; they give arrays of their own."""

    name: str

    @property
    def value(self) -> numpy.ndarray:
        """The array that is read."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `value`, known without reading it."""
        raise NotImplementedError

    @property
    def dtype(self) -> numpy.dtype[Any]:
        """The dtype of `value`, known without reading it."""
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray:
        value = self.value
        if copy is False and dtype is not None and numpy.dtype(dtype) != self.dtype:
            raise ValueError(f"variable {self.name!r} is {self.dtype}; it cannot be {dtype} without a copy")
        return numpy.array(value, dtype=dtype) if copy else numpy.asarray(value, dtype=dtype)

    #: Above CuPy's arrays, whose operators then leave it to ours.
    __array_priority__ = 1000

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: tuple[Any, ...] = (), **kwargs: Any) -> Any:
        if written := [each for each in out if isinstance(each, ArrayReading)]:
            raise TypeError(
                f"variable {written[0].name!r} cannot be changed by operators such as += (here {ufunc.__name__}); use "
                "`assign_add`, `assign_sub` or `assign`, or write `variable + x` for a new array"
            )
        values = [each.value if isinstance(each, ArrayReading) else each for each in inputs]
        return getattr(ufunc, method)(*values, **({"out": out} if out else {}), **kwargs)

    def __eq__(self, other: Any) -> Any:
        return False if other is None else super().__eq__(other)

    def __ne__(self, other: Any) -> Any:
        return True if other is None else super().__ne__(other)

    # Comparing looks at values; as a key of a dict a variable is itself.
    __hash__ = object.__hash__

    def numpy(self) -> numpy.ndarray:
        """Return the value as a new NumPy array, copied from the device if it is there.  Local, or as `value`."""
        return arrays.as_host(self.value)

    def sparse_read(self, indices: ArrayLike) -> NDArray[Any]:
        """Return the rows with these numbers, in the shape of `indices` with rows behind, as a new array."""
        return arrays.namespace(self.value).take(self.value, arrays.in_memory_of(self.value, indices), axis=0)

    def __getitem__(self, key: Any) -> Any:
        return self.value[key].copy()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"variable {self.name!r} is a scalar and has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value.copy())

    def __bool__(self) -> bool:
        return bool(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return self.value.__index__()

    def __float__(self) -> float:
        return float(self.value)

    def __complex__(self) -> complex:
        return complex(self.value)
