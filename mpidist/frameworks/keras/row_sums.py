"""What an update of a metric of the user's own adds for the rows of a batch: their sum, their mean, or neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from mpidist.errors import quoted

#: So many rows are looked at one by one.
_FEW = 3

#: Of 16 bits.
_SHORT = ("float16", "bfloat16")

#: By so much of its parts a sum may differ from them, and one of 16-bit numbers.
_NEAR, _NEAR_16 = 2.0**-10, 2.0**-4


class RowSum(NamedTuple):
    """What an update adds to a variable.

    `number`: that of all rows.  `is_mean`: whether it does not grow with the number of rows.  `is_neither`: whether it
    is no sum of what single rows add, and no mean.  All are arrays like the variable.
    """

    number: Any
    is_mean: Any
    is_neither: Any


def added(metric: Any, args: Sequence[Any], kwargs: dict[str, Any], rows: int) -> list[RowSum]:
    """Return what an update adds to each variable of a metric, which begins with zeros.  Local.

    NotImplementedError: it fails for other numbers of rows.
    """
    few = list(range(min(rows, _FEW))) if rows > 1 else [0, 0]
    zeros = [keras.ops.zeros_like(each.value) for each in metric.variables]

    def of(places: list[int]) -> Any:
        taken = keras.tree.map_structure(_taking(places, rows), (tuple(args), kwargs))
        by_update = metric.stateless_update_state(zeros, *taken[0], **taken[1])
        return [keras.ops.cast(each, "float32") for each in by_update]

    every = list(range(rows))
    try:
        by_update = [of(every), of(every + every), of(few), *(of([place]) for place in few)]
    except Exception as error:
        raise NotImplementedError(
            f"update_state of the metric {metric.name!r} fails for other numbers of rows than {rows}, so it is not "
            f"known what the parts of a batch add up to: {quoted(error)}. Let it take any number of rows"
        ) from error
    leaves = [leaf for leaf in keras.tree.flatten((args, kwargs, metric.variables)) if hasattr(leaf, "dtype")]
    near = _NEAR_16 if any(keras.backend.standardize_dtype(leaf.dtype) in _SHORT for leaf in leaves) else _NEAR
    return [_added(near, *each) for each in zip(*by_update, strict=True)]


def _taking(places: list[int], rows: int) -> Callable[[Any], Any]:
    def taken(leaf: Any) -> Any:
        return keras.ops.take(leaf, places, axis=0) if tuple(getattr(leaf, "shape", ()))[:1] == (rows,) else leaf

    return taken


def _added(near: float, number: Any, twice: Any, of_few: Any, *singles: Any) -> RowSum:
    ops = keras.ops
    total = sum(singles[1:], singles[0])
    bound = near * sum((ops.abs(each) for each in singles), ops.abs(of_few))
    is_no_sum = ops.abs(of_few - total) > bound
    is_no_mean = ops.abs(len(singles) * of_few - total) > bound
    is_mean = ops.abs(twice - number) < ops.abs(twice - 2 * number)
    return RowSum(number, is_mean, ops.logical_and(is_no_sum, is_no_mean))
