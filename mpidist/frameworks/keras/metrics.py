"""Metrics over all replicas: what their variables hold is added up, and the results follow from the sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy

from mpidist.frameworks.keras.replica import ModelReplica


def results(replica: ModelReplica, variables: Sequence[Any], values: Sequence[Any], compute: Any) -> Any:
    """Return what ``compute()`` says where the variables of metrics have their values over all replicas.

    Collective: every rank calls it in the same order.  The variables keep what they hold of this replica.

    `values`: of the variables, on this replica.
    """
    own = [keras.ops.convert_to_numpy(value) for value in values]
    totals = over_replicas(replica, variables, own)
    found = with_values(variables, totals, compute)
    replica.last_results = found, with_values(variables, own, compute)
    return found


def with_values(variables: Sequence[Any], values: Sequence[Any], compute: Any) -> dict[str, Any]:
    """Return what ``compute()`` says where the variables of metrics have these values; they keep theirs.  Local."""
    pairs = zip(variables, values, strict=True)
    mapping = [(variable, keras.ops.convert_to_tensor(value, variable.dtype)) for variable, value in pairs]
    with keras.StatelessScope(state_mapping=mapping):
        return {name: number(value) for name, value in compute().items()}


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
    """Return logs that are the same on all replicas.

    What is the result of a metric, as that of this replica's rows, becomes that of all rows.  Of other numbers that the
    replicas have alike they are as they are, and the means of others, weighted by rows.

    Collective: every rank calls it in the same order.

    `rows`: what this replica's numbers weigh.  CollectiveMismatchError: on all ranks: they have numbers of other names.
    """
    logs = flat(logs)
    names = sorted(name for name, value in logs.items() if numpy.ndim(value) == 0)
    replica.compare("logs of Keras", [(name, numpy.dtype("float64"), ()) for name in names])
    of_all, own_results = replica.last_results
    own = numpy.array([float(logs[name]) for name in names])
    is_without_rows = replica.last_share is not None and not replica.last_share.own_rows
    is_result = [is_without_rows or is_close(logs[name], own_results.get(name)) for name in names]
    every = replica.communicator.all_gather(numpy.concatenate([own, is_result, [rows]])[None], axis=0)
    values, are_results, weights = numpy.split(every, [len(names), 2 * len(names)], axis=1)
    is_alike = ((values == values[0]) | numpy.isnan(values) & numpy.isnan(values[0])).all(axis=0)
    means = (values * weights).sum(axis=0) / max(weights.sum(), 1)
    found = dict(zip(names, numpy.where(is_alike, values[0], means).tolist(), strict=True))
    is_result_everywhere = dict(zip(names, [bool(each.all()) for each in are_results.T], strict=True))
    results_of_all = {name: value for name, value in of_all.items() if is_result_everywhere.get(name)}
    return {**logs, **found, **results_of_all}


def flat(logs: dict[str, Any]) -> dict[str, Any]:
    """Return logs without mappings in them, as Keras takes them."""
    pairs = [flat(value).items() if isinstance(value, dict) else [(name, value)] for name, value in logs.items()]
    return {name: value for each in pairs for name, value in each}


def is_close(value: Any, other: Any) -> bool:
    """Return whether two numbers are the same but for rounding: one may have been computed in compiled code."""
    return isinstance(other, float) and bool(numpy.isclose(float(value), other, rtol=1e-5, atol=0))


@contextmanager
def weighted_means(model: keras.Model, replica: ModelReplica) -> Iterator[None]:
    """Let numbers that a step gives to `Mean` metrics weigh as its rows, for the time of a ``with`` block.  Local.

    Such a number is a mean over the rows, as a loss is.  It counts once for a batch, so its parts count once together.
    """
    means = [each for each in model.metrics if type(each).update_state is keras.metrics.Mean.update_state]
    for metric in means:
        vars(metric)["update_state"] = _weighing(metric, replica)
    try:
        yield
    finally:
        for metric in means:
            vars(metric).pop("update_state", None)


def _weighing(metric: Any, replica: ModelReplica) -> Callable[..., None]:
    def update_state(values: Any, sample_weight: Any = None) -> None:
        if sample_weight is None and keras.ops.ndim(values) == 0:
            sample_weight = replica.weight
        type(metric).update_state(metric, values, sample_weight)

    return update_state


def number(value: Any) -> Any:
    """Return what a metric says as a float; other results as they are.  Local."""
    array = keras.ops.convert_to_numpy(value) if not isinstance(value, dict) else value
    return float(array) if not isinstance(array, dict) and array.ndim == 0 else value
