"""The update of one variable, or of a part of it, from a summed gradient or from rows of one.  All Local."""

from __future__ import annotations

import math
from typing import Any

from mpidist.optimizers import slices, sparse
from mpidist.optimizers.rule import Rule, Step
from mpidist.variables import IndexedSlices


def elements_to_update(rule: Rule, gradient: Any, variable: Any, step: Step) -> int:
    """Return how many elements the update of a variable goes through."""
    return gradient.values.size if updates_rows(rule, gradient, step) else math.prod(variable.shape)


def update_part(
    rule: Rule, gradient: Any, variable: Any, slots: list[Any], step: Step, start: int = 0, stop: int | None = None
) -> None:
    """Update a part of the `elements_to_update` of one variable, by default all of them.

    `gradient` is that of the whole variable, an array or rows that come once each; `slots` are whole, flat arrays.  Of
    rows of which some elements are before `stop`, those are meant that begin after `start` or there.
    """
    parameter = variable.storage
    if updates_rows(rule, gradient, step):
        rows = gradient if stop is None else sparse.rows_within(gradient, start, stop)
        _update_rows(rule, parameter, rows, slots, step)
        return
    where = slice(start, parameter.size if stop is None else stop)
    is_sparse = isinstance(gradient, IndexedSlices)
    flat = sparse.dense_within(gradient, where) if is_sparse else rule._scratch.flat(gradient)[where]
    rule.update(parameter.reshape(-1)[where], flat, slices.pick(slots, where), step)


def updates_rows(rule: Rule, gradient: Any, step: Step) -> bool:
    """Whether only those rows of the variable are touched that have a gradient."""
    return isinstance(gradient, IndexedSlices) and rule.zero_gradient_changes_nothing and not step.decay


def _update_rows(rule: Rule, parameter: Any, gradient: IndexedSlices, slots: list[Any], step: Step) -> None:
    """Update the rows that have a gradient, each once."""
    rows, whole = gradient.indices, [parameter, *(slot.reshape(parameter.shape) for slot in slots)]
    taken = [array[rows] for array in whole]
    flat_parameter, *flat_slots = [array.reshape(-1) for array in taken]
    rule.update(flat_parameter, gradient.values.reshape(-1), flat_slots, step)
    for array, new in zip(whole, taken, strict=True):
        array[rows] = new
