"""Predictions of a built model, row by row."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy

from mpidist import arrays, nest
from mpidist.training.estimator.built_model import BuiltModel
from mpidist.training.estimator.hooks import Hooks, Session, SessionRunHook
from mpidist.training.estimator.step_batches import StepBatches
from mpidist.training.train_step import rows_of


def predicted(
    built: BuiltModel,
    batches: StepBatches,
    keys: Collection[str] | None,
    by_rows: bool,
    hooks: Sequence[SessionRunHook],
) -> Iterator[Any]:
    """Yield the predictions for each row, or each batch, of this rank's data.  Local.

    ValueError where none of the keys is among the predictions, or they have not one row for each row of the features.
    """
    called = Hooks([*hooks, *built.spec.prediction_hooks], Session(built.position.global_step))
    called.begin()
    built.strategy.run(built.model.read_variables)
    called.created()
    for batch in batches:
        rows = rows_of(batch)
        called.before()
        predictions = _wanted(built.strategy.run(built.model.predict, (batch[0],)), keys) if rows else None
        stops = called.after()
        if rows:
            predictions = nest.pack(predictions, [_on_host(leaf, rows) for leaf in nest.flatten(predictions)])
            yield from _rows(predictions, rows) if by_rows else (predictions,)
        if stops:
            break
    called.end()


def _wanted(found: Any, keys: Collection[str] | None) -> Any:
    if keys is None:
        return found
    if not isinstance(found, dict):
        raise ValueError(f"predict_keys names entries, and the predictions are a {type(found).__name__}, not a dict")
    kept = {key: value for key, value in found.items() if key in keys}
    if not kept:
        raise ValueError(f"Expected to run at least one output from {list(found)}, provided {list(keys)}.")
    return kept


def _on_host(leaf: Any, rows: int) -> numpy.ndarray:
    array = arrays.to_array(leaf)
    if array.shape[:1] != (rows,):
        raise ValueError(f"predictions of shape {array.shape} for {rows} rows: there must be one for each row")
    return numpy.asarray(arrays.on_host(array))


def _rows(found: Any, rows: int) -> Iterator[Any]:
    leaves = nest.flatten(found)
    for row in range(rows):
        yield nest.pack(found, [leaf[row] for leaf in leaves])
