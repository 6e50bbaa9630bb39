"""What is done to the values of an all-reduce besides the reduction, and what stands in for arrays that are None."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy

from mpidist import arrays
from mpidist.device.memory import kept_empty
from mpidist.errors import UnsupportedDtypeError


class Adjustment(NamedTuple):
    """What is done to the values of an all-reduce besides the reduction; the same on all ranks.

    Attributes
    ----------
    prescale, postscale : float or None
        What values are multiplied by before they are reduced, and what results are multiplied by.
    none_as_zeros : bool
        Whether an array of a list may be None on some ranks, where it counts as zeros.  One that is None on all ranks
        is None in the result.
    """

    prescale: float | None = None
    postscale: float | None = None
    none_as_zeros: bool = False


#: Nothing is done to the values.
AS_IT_IS = Adjustment()


class Zeros:
    """Stands in for the arrays of a list that are None, and tells the other ranks which these are.

    A list has one array more: a number for each array, 1 where it is there.  Its sum is above 0 for those that any rank
    has.  `counts` is like the array that is added.  ValueError where the operation is neither a sum nor a mean: zeros
    would change its result.
    """

    def __init__(self, examples: Sequence[Any], op: str) -> None:
        if op not in ("sum", "mean"):
            raise ValueError(f"none_as_zeros is for sums and means, got {op!r}: zeros would change its result")
        if any(each is None for each in examples):
            raise ValueError("none_as_zeros: in the list to which an all-reduce is bound no array may be None")
        kind = examples[0] if examples else numpy.empty(0)
        self.counts = kept_empty(len(examples), _dtype_of_counts([each.dtype for each in examples]), kind)
        self._signatures = [(each.shape, each.dtype) for each in examples]
        self._kind = arrays.empty(0, self.counts.dtype, kind)
        self._zeros: dict[Any, Any] = {}

    def counted(self, given: Sequence[Any]) -> list[Any]:
        """Return a list without None, and the array of counts behind it, which is made anew.  Local."""
        found = self.filled(given)
        there = numpy.array([each is not None for each in given], self.counts.dtype)
        self.counts[...] = arrays.in_memory_of(self.counts, there)
        return found

    def named(self, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Return the names of a list, and one for the counts.  Local."""
        return None if names is None else (*names, "counts")

    def filled(self, given: Sequence[Any]) -> list[Any]:
        """Return a list without None, and the array of counts behind it, as it is.  Local."""
        if len(given) != len(self._signatures):
            raise ValueError(f"this all-reduce was bound to {len(self._signatures)} arrays, got {len(given)}")
        values = [
            self._zeros_of(*signature) if each is None else each
            for each, signature in zip(given, self._signatures, strict=True)
        ]
        return [*values, self.counts]

    def _zeros_of(self, shape: tuple[int, ...], dtype: Any) -> Any:
        zeros = self._zeros.get((shape, dtype))
        if zeros is None:
            zeros = kept_empty(shape, dtype, self._kind)
            zeros[...] = 0
            self._zeros[shape, dtype] = zeros
        return zeros

    def emptied(self, results: Sequence[Any]) -> list[Any]:
        """Return the results without the counts, None where all ranks had None.  Local."""
        *found, counts = results
        counts = arrays.on_host(counts)
        return [each if count else None for each, count in zip(found, (counts != 0).tolist(), strict=True)]


def _dtype_of_counts(dtypes: Sequence[Any]) -> Any:
    """Return in which dtype counts are reduced with the fewest reductions more, and multiplied like the arrays."""
    floats = [dtype for dtype in dtypes if arrays.wire_dtype(dtype).kind == "f"]
    is_complex = any(dtype.kind == "c" for dtype in dtypes)
    return floats[0] if floats else numpy.dtype(numpy.float64 if is_complex else numpy.int64)


def checked_factors(
    prescale: float | None, postscale: float | None, dtypes: Iterable[tuple[Any, Any]], op: str
) -> tuple[float | None, float | None]:
    """Return the factors as Python's floats; raise, before any communication, where one cannot be used.  Local.

    NumPy multiplies by a number of its own in the wider of two dtypes, and by one of Python's in that of the array.
    `dtypes` are pairs: that of the values, and that in which they are multiplied.  ValueError where a factor is 0 or
    not finite, or becomes so in such a dtype, since results would tell nothing; UnsupportedDtypeError for whole numbers
    and truth values, to which products would be rounded.
    """
    for what, value in (("prescale", prescale), ("postscale", postscale)):
        if value is None:
            continue
        if not math.isfinite(value) or value == 0:
            raise ValueError(f"{what} must be a finite number other than 0, got {value}")
        for dtype, multiplied in dtypes:
            if multiplied.kind not in "fc":
                raise UnsupportedDtypeError(
                    f"{what} {value} of all_reduce({op}) for {dtype} arrays, whose values would be rounded to whole "
                    "numbers; cast them first, as by array.astype('float32')"
                )
            with numpy.errstate(over="ignore"):
                rounded = multiplied.type(value)
            if not numpy.isfinite(rounded) or rounded == 0:
                where = f"in {multiplied}, in which {dtype} is multiplied"
                raise ValueError(f"{what} must be a finite number other than 0 {where}, got {value}")
    return None if prescale is None else float(prescale), None if postscale is None else float(postscale)


def adjusted(
    reduce: Callable[[list[Any], tuple[str, ...] | None], list[Any]],
    examples: Sequence[Any],
    op: str,
    adjustment: Adjustment,
    names: tuple[str, ...] | None = None,
) -> Callable[[list[Any]], list[Any]]:
    """Return ``fn(arrays)`` that does the same around a reduction that knows nothing of it.  Local.

    ``reduce(arrays, names)``, which returns the reduced arrays, is collective.
    """
    if adjustment == AS_IT_IS:
        return lambda given: reduce(given, names)
    dtypes = [(each.dtype, arrays.wire_dtype(each.dtype)) for each in examples]
    prescale, postscale = checked_factors(adjustment.prescale, adjustment.postscale, dtypes, op)
    zeros = Zeros(examples, op) if adjustment.none_as_zeros else None

    def fn(given: list[Any]) -> list[Any]:
        values = given if zeros is None else zeros.counted(given)
        results = reduce(_times(values, prescale), names if zeros is None else zeros.named(names))
        results = _times(results, postscale)
        return results if zeros is None else zeros.emptied(results)

    return fn


def _times(values: list[Any], factor: float | None) -> list[Any]:
    """Return new arrays, the values multiplied."""
    if factor is None:
        return values
    products = []
    for each in map(arrays.to_array, values):  # a reduction of a user's own may give numbers
        product = arrays.empty_like(each)
        arrays.namespace(product).multiply(each, factor, out=product)
        products.append(product)
    return products
