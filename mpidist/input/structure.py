"""Nested structures of arrays: tuples and dicts, as elements of a data set are.

A list is not a structure but one array, as in TensorFlow: ``([1.0], [2.0])`` is a pair of arrays.
"""

from __future__ import annotations

import functools
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy

from mpidist import arrays

#: NumPy takes microseconds for it.  Records that are equal may have other texts.
_text_of = functools.lru_cache(str)


def leaves(structure: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples and dicts, in order.  Local."""
    if isinstance(structure, dict):
        for value in structure.values():
            yield from leaves(value)
    elif isinstance(structure, tuple):
        for value in structure:
            yield from leaves(value)
    else:
        yield structure


def paths(structure: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (place, leaf) for everything in `structure`; a place is such as ``"0/x"``.  Local."""
    if isinstance(structure, (dict, tuple)):
        for key, item in structure.items() if isinstance(structure, dict) else enumerate(structure):
            yield from paths(item, f"{prefix}/{key}" if prefix else str(key))
    else:
        yield prefix, structure


def map_leaves(function: Callable[..., Any], structure: Any, *others: Any) -> Any:
    """Return `structure` with ``function(leaf, ...)`` in place of every leaf; named tuples keep their type.  Local."""
    if isinstance(structure, dict):
        if others and any(not isinstance(other, dict) or other.keys() != structure.keys() for other in others):
            raise _different(structure, others)
        return {key: map_leaves(function, structure[key], *(other[key] for other in others)) for key in structure}
    if isinstance(structure, tuple):
        if others and any(not isinstance(other, tuple) or len(other) != len(structure) for other in others):
            raise _different(structure, others)
        mapped = [map_leaves(function, *items) for items in zip(structure, *others, strict=True)]
        return type(structure)(*mapped) if hasattr(structure, "_fields") else tuple(mapped)
    if others and any(isinstance(other, (dict, tuple)) for other in others):
        raise _different(structure, others)
    return function(structure, *others)


def _different(structure: Any, others: Sequence[Any]) -> ValueError:
    shapes = [map_leaves(lambda leaf: "*", each) for each in (structure, *others)]
    other = next(shape for shape in shapes if shape != shapes[0])
    return ValueError(f"elements of one data set must have one structure, got {shapes[0]} and {other}")


def to_arrays(structure: Any) -> Any:
    """Return `structure` with every leaf as an array; a list is one array.  Local."""
    return map_leaves(leaf_array, structure)


def leaf_array(leaf: Any) -> Any:
    """Return a leaf as an array; one of NumPy's, of a subclass too, is given out as it is.  Local."""
    if isinstance(leaf, numpy.ndarray):
        return leaf
    try:
        return arrays.to_array(leaf)
    except ValueError as error:
        raise ValueError(f"{error}. A list is taken as one array; for several arrays use a tuple or a dict") from error


def from_batch(batch: Any) -> Any:
    """Return a batch of somebody else's making: a list of arrays is a tuple, every leaf an array.  Local."""
    if isinstance(batch, dict):
        return {key: from_batch(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        items = [from_batch(value) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if isinstance(batch, list) and any(hasattr(item, "shape") or isinstance(item, (dict, tuple)) for item in batch):
        return tuple(from_batch(item) for item in batch)
    return leaf_array(batch)


def known_dtypes(structure: Any) -> dict[str, str]:
    """Return the name of the dtype of every array by its place, without arrays that have masked values only.  Local.

    NumPy has no dtype for a number that is masked.
    """
    hidden = numpy.ma.MaskedArray
    found = ((place, leaf) for place, leaf in paths(structure) if not (isinstance(leaf, hidden) and leaf.mask.all()))
    return {place: dtype_name(leaf) for place, leaf in found}


def shown_dtypes(known: Mapping[str, str]) -> str:
    """Return such dtypes for messages: ``x: float32, y: int64``.  Local."""
    return ", ".join(f"{place}: {name}" if place else name for place, name in known.items())


def dtype_name(leaf: Any) -> str:
    """Return the name of the dtype of an array, a number or a spec; of text, whatever its width.  Local."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else numpy.asarray(leaf).dtype
    kind = getattr(dtype, "kind", "")
    return {"U": "str", "S": "bytes"}.get(kind) or (str(dtype) if kind == "V" else _text_of(dtype))


def stack(elements: Sequence[Any]) -> Any:
    """Return elements of one structure joined along a new first axis.  Local."""
    first = elements[0]
    if not isinstance(first, (dict, tuple)):
        return _stacked(*elements)
    return map_leaves(_stacked, *elements)


def _stacked(*items: Any) -> Any:
    items = tuple(numpy.asarray(item) if isinstance(item, list) else item for item in items)
    _require_one_dtype(items)
    try:
        if arrays.is_device(items[0]):
            return arrays.namespace(items[0]).stack(items)
    except TypeError:  # a number or a string, which NumPy makes an array of
        pass
    if not numpy.shape(items[0]):
        return _masked_numbers(items) if _has_mask(items) else _numbers(items)
    try:
        return numpy.ma.stack(items) if _has_mask(items) else numpy.stack(items)
    except ValueError:
        shapes = sorted({numpy.shape(item) for item in items}, key=repr)
        raise ValueError(f"elements of one batch must have one shape, got {shapes}; pad them with `map`") from None


def concatenate(batches: Sequence[Any]) -> Any:
    """Return batches of one structure joined along their first axis.  Local."""
    if len(batches) == 1:
        return batches[0]
    return map_leaves(_concatenated, *batches)


def _concatenated(*items: Any) -> Any:
    _require_one_dtype(items)
    return numpy.ma.concatenate(items) if _has_mask(items) else arrays.namespace(items[0]).concatenate(items)


def _require_one_dtype(items: Sequence[Any]) -> None:
    """Raise TypeError where some arrays or numbers of a batch would be converted to the dtype of others.

    Which rows are in a batch depends on the number of ranks, and so would its dtype.
    """
    items = [item for item in items if item is not numpy.ma.masked]
    kinds = {item.dtype if hasattr(item, "dtype") else type(item) for item in items}
    if len(kinds) > 1:
        _require_one_name(items)


def _require_one_name(items: Sequence[Any]) -> None:
    names = sorted({dtype_name(item) for item in items})
    if len(names) > 1:
        raise TypeError(
            f"elements of one batch must have one dtype, got {' and '.join(names)}; convert them with `map`, or give "
            "`from_generator` an output_signature"
        )


def _numbers(items: Sequence[Any]) -> Any:
    """Return numbers, or text, as an array; NumPy has no integers that hold both -1 and 2**63."""
    found = numpy.array(items)
    if isinstance(items[0], int) and found.dtype.kind not in "biu":
        _require_one_name(items)
    return found


def _masked_numbers(items: Sequence[Any]) -> Any:
    """Return numbers, some of which are masked, as an array of the dtype that the others have."""
    mask = [item is numpy.ma.masked for item in items]
    filler = next((item for item in items if item is not numpy.ma.masked), 0.0)
    return numpy.ma.array([filler if hidden else item for item, hidden in zip(items, mask, strict=True)], mask=mask)


def _has_mask(items: Sequence[Any]) -> bool:
    """Return whether any of some arrays has a mask, which NumPy's own functions drop."""
    return any(isinstance(item, numpy.ma.MaskedArray) for item in items)


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch.  Local."""
    shapes = [numpy.shape(leaf) for leaf in leaves(batch)]
    if not shapes or any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"the arrays of a batch need one common first dimension; got the shapes {shapes}")
    return shapes[0][0]


def first_length(element: Any) -> int:
    """Return the length of an element's first array that has one; 0 where none has, and so no rows to be counted."""
    return next((length for leaf in leaves(element) for length in numpy.shape(leaf)[:1]), 0)


def outline(batch: Any) -> Any:
    """Return structure, dtypes and shapes of rows of a batch, for JSON.  Local."""
    if isinstance(batch, dict):
        return {"dict": [[key, outline(item)] for key, item in batch.items()]}
    if hasattr(batch, "_fields"):
        kind = type(batch)
        named = [kind.__module__, kind.__qualname__, batch._fields]
        return {"named": named, "tuple": [outline(item) for item in batch]}
    if isinstance(batch, (list, tuple)):
        return {"list" if isinstance(batch, list) else "tuple": [outline(item) for item in batch]}
    dtype = numpy.dtype(batch.dtype)
    return {"dtype": dtype.name if dtype.kind == "V" else dtype.str, "row": list(batch.shape[1:])}


def without_rows(outlined: Any) -> Any:
    """Return a batch of such an outline that has no rows.  Local."""
    if "dict" in outlined:
        return {key: without_rows(item) for key, item in outlined["dict"]}
    for kind in (list, tuple):
        if kind.__name__ in outlined:
            parts = map(without_rows, outlined[kind.__name__])
            return _named_tuple(*outlined["named"])(*parts) if "named" in outlined else kind(parts)
    return numpy.empty((0, *outlined["row"]), outlined["dtype"])


def _named_tuple(module: str, name: str, fields: Sequence[str]) -> Any:
    """Return the type of named tuples, as this process has it; one of these fields where it has none of that name."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if getattr(found, "_fields", None) == tuple(fields) else namedtuple(name.split(".")[-1], fields)


def row(batch: Any, number: int) -> Any:
    """Return one row of a batch, without a copy.  Local."""
    return map_leaves(lambda leaf: leaf[number], batch)


def copied(element: Any) -> Any:
    """Return a copy of an element; of numbers, text and other objects themselves.  Local."""
    return map_leaves(lambda leaf: leaf.copy() if hasattr(leaf, "copy") else leaf, element)


def rows(batch: Any, wanted: range) -> Any:
    """Return these contiguous rows of a batch, without a copy.  Local."""
    return map_leaves(lambda leaf: leaf[wanted.start : wanted.stop], batch)
