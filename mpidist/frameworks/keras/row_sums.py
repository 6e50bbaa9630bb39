"""What an update of a metric of the user's own adds for the rows of a batch: their sum, their mean, or neither."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import keras
import numpy

from mpidist.errors import quoted
from mpidist.frameworks.keras import backends
from mpidist.frameworks.keras.backends import to_numpy
from mpidist.frameworks.keras.own_methods import kept

#: So many rows are looked at one by one.
_FEW = 3

#: Of 16 bits.
_SHORT = ("float16", "bfloat16")

#: By so much of its parts a sum may differ from them, and one of 16-bit numbers.
_NEAR, _NEAR_16 = 2.0**-10, 2.0**-4


#: So many of the first updates of a metric are tried, and of later ones one of so many.
_FIRST, _SELDOM = 8, 64


class RowSum(NamedTuple):
    """What an update adds to a variable.

    `is_known`: whether that tells of other updates.  `is_mean`: whether it does not grow with the number of rows.
    `is_neither`: whether it is no sum of what single rows add, and no mean.  All are arrays like the variable.
    """

    is_known: Any
    is_mean: Any
    is_neither: Any


class Trials:
    """What trials have told of the updates of a metric with arguments of one kind.

    The first updates are tried, one of many later ones, and each that adds to what is not known yet.  `are_all_sums`:
    whether it is known of all variables that sums are added.
    """

    def __init__(self) -> None:
        self._updates = 0
        self._known: dict[str, tuple[Any, Any]] = {}
        self.are_all_sums = False

    def is_due(self) -> bool:
        """Count an update, and return whether it is tried whatever it adds.  Local."""
        self._updates += 1
        return self._updates <= _FIRST or self._updates % _SELDOM == 0

    def has_new(self, changes: dict[str, Any]) -> bool:
        """Return whether any variable, by path, has changed where nothing is known of it.  Local."""
        arrays = {path: to_numpy(change) for path, change in changes.items()}
        return any(((array != 0) & ~self._known[path][0]).any() for path, array in arrays.items())

    def is_mean(self, path: str) -> Any:
        """Return where means are added to a variable.  Local."""
        return self._known[path][1]

    def note(self, path: str, is_known: Any, is_mean: Any) -> bool:
        """Take note of a trial; return whether it has told another thing than an earlier one.  Local."""
        is_known, is_mean = to_numpy(is_known), to_numpy(is_mean)
        was_known, was_mean = self._known.get(path, (numpy.zeros_like(is_known), is_mean))
        self._known[path] = was_known | is_known, numpy.where(is_known, is_mean, was_mean)
        self.are_all_sums = all(each.all() and not means.any() for each, means in self._known.values())
        return bool((was_known & is_known & (was_mean != is_mean)).any())


#: By metrics, and by the kinds of arguments.
_trials: dict[int, dict[Hashable, Trials]] = {}


def trials_of(metric: Any, args: Sequence[Any], kwargs: dict[str, Any], rows: int | None) -> Trials | None:
    """Return the trials of a metric with such arguments; None in code that is compiled, which is made once.  Local."""
    values = [each.value for each in metric.variables]
    leaves = keras.tree.flatten((args, kwargs))
    if not all(map(backends.seam().is_concrete, [*values, *(each for each in leaves if keras.ops.is_tensor(each))])):
        return None
    kind = rows, len(args), *kwargs, *map(_kind, leaves)
    return kept(_trials, metric, dict).setdefault(kind, Trials())


def _kind(leaf: Any) -> Hashable:
    if hasattr(leaf, "shape"):
        return tuple(leaf.shape), str(leaf.dtype)
    return leaf if isinstance(leaf, (bool, str)) else type(leaf).__qualname__


def added(
    metric: Any, changes: dict[str, Any], args: Sequence[Any], kwargs: dict[str, Any], rows: int
) -> dict[str, RowSum]:
    """Return what an update adds to variables of a metric, by path.  Local.

    `changes`: what it has added.  NotImplementedError: it fails for other numbers of rows.
    """
    few = list(range(min(rows, _FEW))) if rows > 1 else [0, 0]
    zeros = [keras.ops.zeros_like(each.value) for each in metric.variables]

    def of(places: list[int]) -> Any:
        def taken(leaf: Any) -> Any:
            return keras.ops.take(leaf, places, axis=0) if tuple(getattr(leaf, "shape", ()))[:1] == (rows,) else leaf

        some_args, some_kwargs = keras.tree.map_structure(taken, (tuple(args), kwargs))
        by_update = metric.stateless_update_state(zeros, *some_args, **some_kwargs)
        return [keras.ops.cast(each, "float32") for each in by_update]

    every = list(range(rows))
    try:
        by_update = [of(every + every), of(few), *(of([place]) for place in few)]
    except Exception as error:
        raise NotImplementedError(
            f"update_state of the metric {metric.name!r} fails for other numbers of rows than {rows}, so it is not "
            f"known what the parts of a batch add up to: {quoted(error)}. Let it take any number of rows"
        ) from error
    leaves = [leaf for leaf in keras.tree.flatten((args, kwargs, metric.variables)) if hasattr(leaf, "dtype")]
    near = _NEAR_16 if any(keras.backend.standardize_dtype(leaf.dtype) in _SHORT for leaf in leaves) else _NEAR
    by_path = zip([each.path for each in metric.variables], *by_update, strict=True)
    return {path: _added(near, changes[path], *each) for path, *each in by_path if path in changes}


def _added(near: float, number: Any, twice: Any, of_few: Any, *singles: Any) -> RowSum:
    ops = keras.ops
    total = sum(singles[1:], singles[0])
    bound = near * sum((ops.abs(each) for each in singles), ops.abs(of_few))
    is_no_sum = ops.abs(of_few - total) > bound
    is_no_mean = ops.abs(len(singles) * of_few - total) > bound
    number = ops.cast(number, "float32")
    apart_as_mean, apart_as_sum = ops.abs(twice - number), ops.abs(twice - 2 * number)
    is_near = ops.minimum(apart_as_mean, apart_as_sum) <= near * ops.abs(number)  # no rounding of a sum that is 0
    is_known = ops.logical_and(number != 0, is_near)
    return RowSum(is_known, apart_as_mean < apart_as_sum, ops.logical_and(is_no_sum, is_no_mean))
