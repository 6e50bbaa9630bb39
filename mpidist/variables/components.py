"""A rank's component of a distributed value, as an array.  All Local."""

from __future__ import annotations

from typing import Any

import numpy

from mpidist import arrays
from mpidist.variables.indexed_slices import IndexedSlices
from mpidist.variables.variable import DistributedVariable


def component(value: Any) -> Any:
    """Return the array of a variable, of an array or of numbers; `IndexedSlices` as they are; TypeError for None."""
    if type(value) is numpy.ndarray:  # the common case, thousands of times a step
        return value
    if value is None:
        raise TypeError("got None in place of an array; leave it out on every replica, or pass zeros")
    if isinstance(value, IndexedSlices):
        return value
    return value.value if isinstance(value, DistributedVariable) else arrays.to_array(value)


def dense_component(value: Any, verb: str) -> Any:
    """Return the array as `component` does; NotImplementedError, which names the `verb`, for `IndexedSlices`."""
    if isinstance(value, IndexedSlices):
        raise NotImplementedError(f"{verb} does not support IndexedSlices; give it `rows.to_dense(shape)`")
    return component(value)
