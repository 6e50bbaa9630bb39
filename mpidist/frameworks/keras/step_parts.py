"""Steps of several batches, under `BackupWorkers`: all see the same variables, and one update has all their gradients.

Workers give the chief the gradients of their batches, and push none.  So it does not matter which worker computes which
batch, nor how many there are, nor whether one dies: the numbers are those of one process on the batches put together,
except for dropout, by the seeds of the worker, and batch normalization, by the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy

from mpidist.frameworks.keras import checks
from mpidist.frameworks.keras.layer_state import LayerVariable, layer_variables
from mpidist.frameworks.keras.served_replica import ServedReplica
from mpidist.optimizers.slices import compute_dtype


class StepPart(NamedTuple):
    """What a worker has computed of a step.

    `rows`: of its batch.  `gradients`: by trainable variable.  `changes`: see `ServedReplica.changes`.
    """

    rows: int
    gradients: Sequence[numpy.ndarray | None]
    changes: dict[int, numpy.ndarray]


def require_parts(model: keras.Model, has_dataset_fn: bool) -> None:
    """Raise unless the update of several batches follows from those of each.  Local.

    NotImplementedError: a loss is no mean over rows, a layer computes with the rows of a whole batch, or workers have
    data of their own.
    """
    checks.require_trainable(model)
    if has_dataset_fn:
        raise NotImplementedError(
            "consistency=BackupWorkers(count) makes a step of the next count batches, and a function that makes a data "
            "set for each worker has no next ones: give fit the arrays or the data set itself"
        )
    if checks.reductions_of(model) == {"sum"}:
        raise NotImplementedError(
            "under consistency=BackupWorkers(count) a step has the mean of its batches, and a loss with reduction "
            '"sum" is no mean over rows: use "sum_over_batch_size"'
        )


def update(model: keras.Model, replica: ServedReplica, parts: Sequence[StepPart]) -> None:
    """Have servers make one update of the batches of a step; workers that read afterwards see it.  On the chief."""
    rows = sum(part.rows for part in parts)
    weights = [part.rows / rows for part in parts]
    changes = list(_changes(model, replica, parts, weights))  # or an error, before servers have a part of the step
    pairs = []
    for variable, *gradients in zip(model.trainable_variables, *(part.gradients for part in parts), strict=True):
        weighted = [
            weight * gradient.astype(compute_dtype(gradient.dtype), copy=False)
            for weight, gradient in zip(weights, gradients, strict=True)
            if gradient is not None
        ]
        if weighted:
            served = replica.served[id(variable)]
            pairs.append((sum(weighted[1:], weighted[0]).astype(served.dtype), served))
    assert replica.own_optimizer is not None
    replica.own_optimizer.apply_gradients(pairs)
    for variable, change in changes:
        replica.add(variable, change)
    replica.strategy.extended.pull()  # waits until servers have applied it


def _changes(
    model: keras.Model, replica: ServedReplica, parts: Sequence[StepPart], weights: Sequence[float]
) -> Iterator[tuple[Any, numpy.ndarray]]:
    """Yield variables, and what becomes of the changes that several batches make of each."""
    rules = {id(each.variable): each for each in layer_variables(model)}
    variables = replica.shared(model)
    for place in sorted({place for part in parts for place in part.changes}):
        variable = variables[place]
        is_float = keras.backend.is_float_dtype(variable.dtype)
        rule = rules.get(id(variable)) or LayerVariable(-1, variable, "mean" if is_float else "only_first_replica")
        zeros = numpy.zeros(variable.shape, next(part.changes[place].dtype for part in parts if place in part.changes))
        changes = [
            rule.given(numpy, zeros, part.changes.get(place, zeros), weight, number)
            for number, (part, weight) in enumerate(zip(parts, weights, strict=True))
        ]
        yield variable, sum(changes[1:], changes[0])
