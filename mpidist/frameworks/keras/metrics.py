"""Metrics over all replicas: what their variables hold is added up, and the results follow from the sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy

from mpidist.frameworks.keras.replica import ModelReplica


def results(replica: ModelReplica, variables: Sequence[Any], values: Sequence[Any], compute: Any) -> Any:
    """Return what ``compute()`` says where the variables of metrics have their values over all replicas.

    Collective: every rank calls it in the same order.  The variables keep what they hold of this replica.

    Parameters
    ----------
    replica : ModelReplica
    variables : sequence of keras.Variable
    values : sequence of array
        Of the variables, on this replica.
    compute : callable
    """
    totals = over_replicas(replica, variables, [keras.ops.convert_to_numpy(value) for value in values])
    tensors = [
        keras.ops.convert_to_tensor(total, variable.dtype) for total, variable in zip(totals, variables, strict=True)
    ]
    with keras.StatelessScope(state_mapping=list(zip(variables, tensors, strict=True))):
        found = compute()
    return {name: _number(value) for name, value in found.items()}


def over_replicas(
    replica: ModelReplica, variables: Sequence[Any], values: Sequence[numpy.ndarray]
) -> list[numpy.ndarray]:
    """Return the values of all replicas put together: their sum, or what else a variable says.  Collective.

    Others are their mean, and that of the first replica.
    """
    if not values:
        return []
    rules = [getattr(variable, "aggregation", "sum") for variable in variables]
    if not replica.is_chief:
        pairs = zip(rules, values, strict=True)
        values = [numpy.zeros_like(value) if rule == "only_first_replica" else value for rule, value in pairs]
    total = replica.sum(numpy.concatenate([value.reshape(-1) for value in values], dtype="float64"))
    parts = numpy.split(total, numpy.cumsum([value.size for value in values])[:-1])
    found = []
    for rule, part, value in zip(rules, parts, values, strict=True):
        found.append((part / replica.count if rule == "mean" else part).reshape(value.shape).astype(value.dtype))
    return found


def agreed(replica: ModelReplica, logs: dict[str, Any], rows: int) -> dict[str, float]:
    """Return numbers that all replicas have alike as they are, and the means of others, weighted by rows.

    Collective: every rank calls it in the same order.

    Parameters
    ----------
    replica : ModelReplica
    logs : dict of str to number
    rows : int
        What this replica's numbers weigh.

    Raises
    ------
    CollectiveMismatchError
        On all ranks: they have numbers of other names.
    """
    names = sorted(name for name, value in logs.items() if numpy.ndim(value) == 0)
    replica.compare("logs of Keras", [(name, numpy.dtype("float64"), ()) for name in names])
    own = numpy.array([float(logs[name]) for name in names])
    all_values = replica.communicator.all_gather(numpy.append(own, rows)[None], axis=0)
    values, weights = all_values[:, :-1], all_values[:, -1]
    is_alike = ((values == values[0]) | numpy.isnan(values) & numpy.isnan(values[0])).all(axis=0)
    means = (values * weights[:, None]).sum(axis=0) / max(weights.sum(), 1)
    found = numpy.where(is_alike, values[0], means)
    return {**logs, **dict(zip(names, found.tolist(), strict=True))}


def _number(value: Any) -> Any:
    array = keras.ops.convert_to_numpy(value) if not isinstance(value, dict) else value
    return float(array) if not isinstance(array, dict) and array.ndim == 0 else value
