"""Whether the values of a loss or a metric belong to rows: by the shapes that it returns for other numbers of rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable
from fractions import Fraction
from typing import Any

import keras

# Private: the shape of what a function returns, without values
from keras.src.backend import compute_output_spec

from mpidist.errors import quoted
from mpidist.frameworks.keras.own_methods import kept

#: The other numbers of rows are multiples of this one: a loss may take rows by twos, threes or fours.
_MULTIPLE = 12

#: The shapes that were found right, by losses and metrics.
_right_shapes: dict[int, set[Hashable]] = {}

_ADVICE = (
    "return a value for each row, as keras.ops.mean(keras.ops.abs(labels - outputs), axis=-1) is of outputs of two axes"
)

Shape = tuple[int, ...]


def by_number(shape: Shape, rows: int) -> Hashable:
    """Return what losses have alike for any number of rows: they are the mean of all values.  Local."""
    return Fraction(math.prod(shape), rows)


def by_first_axis(shape: Shape, rows: int) -> Hashable:
    """Return what metrics have alike for any number of rows: they count along the first axis.  Local."""
    return Fraction(shape[0], rows), shape[1:]


def require_row_values(
    owner: Any,
    who: str,
    function: Callable[[Any, Any], Any],
    given: tuple[Any, Any],
    values: Any,
    measure: Callable[[Shape, int], Hashable],
) -> None:
    """Raise ValueError unless the values of a function belong to rows, so that parts of a batch add up.  Local.

    What it returns for other numbers of rows is the same on all replicas, so all raise it, also one with a single row.
    Shapes that were found right are not looked at again.

    `owner`: the loss or the metric.  `who`: how the message calls it.  `given`: labels and outputs.  `values`: of them.
    `measure`: `by_number` or `by_first_axis`.
    """
    leaves = [leaf for leaf in keras.tree.flatten(given) if getattr(leaf, "shape", ())]
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    shape, rows = tuple(keras.ops.shape(values)), shapes[0][0]
    right = kept(_right_shapes, owner, set)
    if (shape, shapes) in right:
        return
    says = f"{who} returned values of shape {shape} for {rows} rows"
    if not shape:
        raise ValueError(f"{says}: {_ADVICE}")
    columns = {size for each in shapes for size in each[1:]}
    fewer, more = itertools.islice((n for n in itertools.count(2 * _MULTIPLE, _MULTIPLE) if n not in columns), 2)
    others = {n: _shape_of(function, *_of_rows(given, rows, n, n)) for n in (fewer, more)}
    known = {n: each for n, each in others.items() if isinstance(each, tuple)}
    if len({measure(shape, rows), *(measure(each, n) if each else None for n, each in known.items())}) > 1:
        would = ", ".join(f"{each} for {n}" for n, each in known.items())
        raise ValueError(f"{says}, and would return {would}: {_ADVICE}")
    if len(known) < len(others):
        if shape[0] % rows:
            raise ValueError(f"{says}: {_ADVICE}")
        is_by_chance = rows == 1 or rows in columns
        if is_by_chance and isinstance(_shape_of(function, *_of_rows(given, rows, rows, rows)), tuple):
            error = next(each for each in others.values() if isinstance(each, Exception))
            raise ValueError(
                f"{says}, and fails for {fewer} or {more} rows, as where rows meet columns: {_ADVICE}. The failure: "
                f"{quoted(error)}"
            ) from error
    mixed = _of_rows(given, rows, fewer, more)
    if isinstance(_shape_of(function, *mixed), tuple) and not isinstance(
        _shape_of(function, *_of_like_axes(*mixed)), tuple
    ):
        raise ValueError(
            f"{says}, each of which depends on all rows: labels and outputs have the shapes "
            f"{' and '.join(map(str, shapes))}, and rows of the one meet the last axis of the other. Expand labels of "
            "shape (rows,) to (rows, 1), as labels[:, None], or let the function do so"
        )
    right.add((shape, shapes))


def require_row_weights(who: str, values: Any, weights: Any) -> None:
    """Raise ValueError where Keras would multiply values of rows by the weights of other rows.  Local.

    It does so where the rows of the weights meet another axis of the values, of the same size by chance.  Of nested
    `weights`, one array has to fit.
    """
    shape = tuple(keras.ops.shape(values))
    shapes = [tuple(keras.ops.shape(each)) for each in keras.tree.flatten(weights) if each is not None]
    if shapes and not any(_is_for(each, shape) for each in shapes):
        raise ValueError(
            f"{who} returned values of shape {shape}, and sample_weight has the shape {shapes[0]}, of which the rows "
            f"meet the last axis of the values: give weights of {len(shape)} axes, such as "
            f"(rows{', 1' * (len(shape) - 1)})"
        )


def _is_for(weights: Shape, values: Shape) -> bool:
    """Return whether weights have the axes of values, as Keras takes them, or are one for all."""
    fewer, more = sorted((weights, values), key=len)
    return not weights or len(fewer) == len(more) or len(fewer) + 1 == len(more) and more[-1] == 1


def _shape_of(function: Callable[[Any, Any], Any], labels: Any, outputs: Any) -> Shape | Exception:
    """Return the shape of what a function returns, or its error."""
    try:
        spec = compute_output_spec(lambda *given: keras.ops.convert_to_tensor(function(*given)), labels, outputs)
    except Exception as error:
        return error
    return tuple(spec.shape)


def _of_rows(given: tuple[Any, Any], rows: int, labels: int, outputs: int) -> tuple[Any, Any]:
    """Return what has the shapes of labels and outputs, of other numbers of rows."""

    def spec(leaf: Any, count: int) -> Any:
        if not getattr(leaf, "shape", ()) or leaf.shape[0] % rows:
            return leaf
        shape = leaf.shape[0] // rows * count, *leaf.shape[1:]
        return keras.KerasTensor(shape, keras.backend.standardize_dtype(leaf.dtype))

    return tuple(
        keras.tree.map_structure(lambda leaf, count=count: spec(leaf, count), each)
        for each, count in zip(given, (labels, outputs), strict=True)
    )


def _of_like_axes(labels: Any, outputs: Any) -> tuple[Any, Any]:
    """Return labels and outputs, where one of the two has a last axis of size 1 that the other lacks with that axis."""
    shapes = getattr(labels, "shape", ()), getattr(outputs, "shape", ())
    if shapes[1][-1:] == (1,) and len(shapes[0]) + 1 == len(shapes[1]):
        labels = keras.KerasTensor((*shapes[0], 1), labels.dtype)
    if shapes[0][-1:] == (1,) and len(shapes[1]) + 1 == len(shapes[0]):
        outputs = keras.KerasTensor((*shapes[1], 1), outputs.dtype)
    return labels, outputs
