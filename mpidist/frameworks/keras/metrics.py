"""Metrics over all replicas: what their variables hold is added up, and the results follow from the sums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy

from mpidist.frameworks.keras.backends import to_numpy
from mpidist.frameworks.keras.classes import is_of_keras
from mpidist.frameworks.keras.own_methods import put_over
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.frameworks.keras.row_sums import RowSum, Trials, added, trials_of
from mpidist.frameworks.keras.row_values import by_first_axis, require_row_values

#: The metrics that take the mean of what a function returns.
_FUNCTION = keras.metrics.MeanMetricWrapper

#: By so much of its numbers a sum may differ that is computed in another order.
_ROUNDING = {"float64": 2.0**-47, "float32": 2.0**-18, "float16": 2.0**-5, "bfloat16": 2.0**-3}

_ADVICE = (
    "Keep sums and counts, of which result() makes the metric, or say what becomes of the values of several ranks: "
    'add_variable(..., aggregation="mean"), or "only_first_replica"'
)


def results(replica: ModelReplica, variables: Sequence[Any], values: Sequence[Any], compute: Any) -> Any:
    """Return what ``compute()`` says where the variables of metrics have their values over all replicas.

    Collective: every rank calls it in the same order.  The variables keep what they hold of this replica.

    `values`: of the variables, on this replica.
    """
    own = [to_numpy(value) for value in values]
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
    rules = [rule_of(variable) for variable in variables]
    if not replica.is_chief:
        pairs = zip(rules, values, strict=True)
        values = [numpy.zeros_like(value) if rule == "only_first_replica" else value for rule, value in pairs]
    total = replica.sum(numpy.concatenate([value.reshape(-1) for value in values], dtype="float64"))
    parts = numpy.split(total, numpy.cumsum([value.size for value in values])[:-1])
    found = []
    for rule, part, value in zip(rules, parts, values, strict=True):
        found.append((part / replica.count if rule == "mean" else part).reshape(value.shape).astype(value.dtype))
    return found


def rule_of(variable: Any) -> str:
    """Return "mean" or "only_first_replica" where a variable of a metric says so, and else "sum"."""
    rule = str(getattr(variable, "aggregation", None))
    return rule if rule in ("mean", "only_first_replica") else "sum"


def agreed(replica: ModelReplica, logs: dict[str, Any], rows: int) -> dict[str, float]:
    """Return logs that are the same on all replicas.

    What is the result of a metric, as that of this replica's rows, becomes that of all rows.  Of other numbers that the
    replicas have alike they are as they are, and the means of others, weighted by rows.

    Collective: every rank calls it in the same order.

    `rows`: what this replica's numbers weigh.  CollectiveMismatchError: on all ranks: they have numbers of other names.
    """
    logs = flat(logs)
    names = sorted(name for name, value in logs.items() if numpy.ndim(value) == 0)
    replica.replicas.check("logs of Keras", [(name, numpy.dtype("float64"), ()) for name in names])
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
    """Return whether two numbers are the same, or both NaN, but for rounding: one may be that of compiled code."""
    return isinstance(other, float) and bool(numpy.isclose(float(value), other, rtol=1e-5, atol=0, equal_nan=True))


@contextmanager
def counted(
    model: keras.Model, count: int, replica: ModelReplica | None = None, is_part: bool = True
) -> Iterator[dict[str, Any]]:
    """Let metrics count a part of a batch as a part of it, for the time of a ``with`` block.  Local.

    Yields a mapping for `require_sums`, in which updates of the user's own metrics put, by what is wrong, whether it
    is.

    `count`: how many add up.  `replica`: where numbers are to weigh as its rows that a step gives to `Mean` metrics,
    and those that the user's own metrics add and that are means over rows: such a number counts once for a batch, so
    its parts count once together.  `is_part`: whether this is a part of a batch.  ValueError, when a metric is updated
    with one: a function is one number for all rows; NotImplementedError: a `Sum` is given one number.
    """
    metrics = _every(model)
    odd: dict[str, Any] = {}
    methods = [(each, "update_state", _watching(each, odd, replica)) for each, _ in _own_sums(metrics, count)]
    if replica is not None:
        means = [each for each in metrics if type(each).update_state is keras.metrics.Mean.update_state]
        methods += [(each, "update_state", _weighing(each, replica)) for each in means]
        sums = [each for each in metrics if type(each).update_state is keras.metrics.Sum.update_state]
        methods += [(each, "update_state", _of_values(each)) for each in sums] if count > 1 else []
    with put_over([*methods, *(functions_of_rows(metrics) if is_part else ())]):
        yield odd


def _every(model: Any) -> list[Any]:
    """Return the metrics of a model, in the place of what Keras keeps those of `compile` in."""
    found: list[Any] = []
    for each in model.metrics:
        found += each.metrics if is_of_keras(type(each)) and hasattr(each, "metrics") else [each]
    return found


def _weighing(metric: Any, replica: ModelReplica) -> Callable[..., None]:
    def update_state(values: Any, sample_weight: Any = None) -> None:
        if sample_weight is None and keras.ops.ndim(values) == 0:
            sample_weight = replica.weight
        type(metric).update_state(metric, values, sample_weight)

    return update_state


def _of_values(metric: Any) -> Callable[..., None]:
    def update_state(values: Any, sample_weight: Any = None) -> None:
        if sample_weight is None:
            _require_rows(metric, (values,))
        type(metric).update_state(metric, values, sample_weight)

    return update_state


def _require_rows(metric: Any, given: Any) -> None:
    """Raise NotImplementedError if a metric is given numbers, and nothing that has rows.  Local."""
    tensors = [leaf for leaf in keras.tree.flatten(given) if keras.ops.is_tensor(leaf)]
    if tensors and not any(map(keras.ops.ndim, tensors)):
        raise NotImplementedError(
            f"the metric {metric.name!r}, a {type(metric).__name__}, is given one number, of which is not known "
            "whether it is a sum or a mean over the rows of a batch, and a replica is given a part of them. Give it "
            "the values of rows, as update_state(values) in place of update_state(keras.ops.sum(values)), or give a "
            "mean, such as a loss, to a keras.metrics.Mean"
        )


def functions_of_rows(metrics: Iterable[Any]) -> list[tuple[Any, str, Any]]:
    """Return what is put over the functions in metrics, so that they refuse to be no values of rows.  Local."""
    # Private: the function that a metric takes the mean of
    return [(each, "_fn", _of_rows(each, each._fn)) for each in metrics if isinstance(each, _FUNCTION)]


def _of_rows(metric: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    def of_rows(y_true: Any, y_pred: Any, **kwargs: Any) -> Any:
        values = fn(y_true, y_pred, **kwargs)
        function = functools.partial(fn, **kwargs)
        who = f"metric {metric.name!r}"
        require_row_values(metric, who, function, (y_true, y_pred), values, by_first_axis)
        return values

    return of_rows


# -- metrics of the user's own ----------------------------------------------------------------------------------------


def _own_sums(metrics: Iterable[Any], count: int) -> list[tuple[Any, list[Any]]]:
    """Return metrics that do not update as Keras' do, with those of their variables of which several are added up."""
    own = [each for each in metrics if not is_of_keras(type(each).update_state)] if count > 1 else []
    return [(each, [variable for variable in each.variables if rule_of(variable) == "sum"]) for each in own]


def require_zeros(model: keras.Model, count: int) -> None:
    """Raise NotImplementedError if a variable that is added up begins with another number than 0.  Local.

    `count`: how many add up.
    """
    for _, variables in _own_sums(_every(model), count):
        for variable in variables:
            if to_numpy(variable).any():
                raise NotImplementedError(
                    f"the metric variable {variable.path!r} begins with other numbers than zeros, which would count "
                    f"{count} times: the variables of metrics are added up. {_ADVICE}"
                )


def _watching(metric: Any, odd: dict[str, Any], replica: ModelReplica | None) -> Callable[..., Any]:
    def update_state(*args: Any, **kwargs: Any) -> Any:
        watching = vars(metric).pop("update_state")
        try:
            rows = replica.share.given_rows if replica is not None and replica.share is not None else None
            if rows is not None and not isinstance(metric, keras.metrics.Mean):  # a number counts by rows in a mean
                _require_rows(metric, (args, kwargs))
            trials = trials_of(metric, args, kwargs, rows)
            is_tried = trials is None or trials.is_due()
            if trials is not None and trials.are_all_sums and not is_tried:
                return metric.update_state(*args, **kwargs)
            before = [keras.ops.copy(each.value) for each in metric.variables]
            result = metric.update_state(*args, **kwargs)
            pairs = [each for each in zip(metric.variables, before, strict=True) if _is_added_up(each[0])]
            changes = {variable.path: variable.value - value for variable, value in pairs}
            if trials is None or is_tried or trials.has_new(changes):
                means = _tried(metric, before, changes, (args, kwargs), rows, odd, trials)
            else:
                means = {path: trials.is_mean(path) for path in changes}
            for variable, value in pairs:
                if replica is not None and rows is not None and keras.backend.is_float_dtype(variable.dtype):
                    part = keras.ops.cast(replica.weight * changes[variable.path], variable.dtype)
                    variable.assign(keras.ops.where(means[variable.path], value + part, variable.value))
            return result
        finally:
            vars(metric)["update_state"] = watching

    return update_state


def _is_added_up(variable: Any) -> bool:
    return rule_of(variable) == "sum" and keras.backend.standardize_dtype(variable.dtype) != "bool"


def _put(odd: dict[str, Any], what: str, is_odd: Any) -> None:
    odd[what] = keras.ops.logical_or(odd.get(what, False), keras.ops.any(is_odd))


def _tried(
    metric: Any,
    before: Sequence[Any],
    changes: dict[str, Any],
    given: tuple[Any, dict[str, Any]],
    rows: int | None,
    odd: dict[str, Any],
    trials: Trials | None,
) -> dict[str, Any]:
    """Return, by path, where an update has added means to variables; put in `odd` what is wrong, whether it is.

    `before`: the values of the variables.  `given`: to the update.  `rows`: None where means are not looked for.
    """
    ops = keras.ops
    no_sum = no_sums(metric, before, *given)
    for path, is_odd in no_sum.items():
        _put(odd, says_more(path), is_odd)
    by_rows = added(metric, changes, *given, rows) if rows is not None else {}
    means: dict[str, Any] = {}
    for variable in filter(_is_added_up, metric.variables):
        path = variable.path
        nowhere = ops.zeros_like(changes[path], dtype="bool")
        sums = by_rows.get(path, RowSum(changes[path] != 0, nowhere, nowhere))
        means[path], is_other = sums.is_mean, False
        if trials is not None:
            is_other = trials.note(path, sums.is_known, sums.is_mean)
            means[path] = trials.is_mean(path)
        is_sum = ops.logical_not(no_sum[path])
        _put(odd, _says_neither(path), ops.logical_and(is_sum, ops.logical_or(sums.is_neither, is_other)))
        if not keras.backend.is_float_dtype(variable.dtype):
            _put(odd, _says_whole(variable), ops.logical_and(is_sum, means[path]))
    return means


def says_more(path: str) -> str:
    """Return what is wrong with a variable that is more than added to.  Local."""
    return (
        f"update_state of a metric does more than add to its variable {path!r}, and the variables of metrics are added "
        f"up: the sum of several maxima, or of last values, is none of all rows. {_ADVICE}"
    )


def _says_neither(path: str) -> str:
    return (
        f"update_state of a metric adds to its variable {path!r} what is neither a sum nor a mean over the rows that "
        f"it is given, and a replica is given a part of them. {_ADVICE}"
    )


def _says_whole(variable: Any) -> str:
    return (
        f"update_state of a metric adds to its variable {variable.path!r} a number that does not grow with the rows, "
        f"and counts once for a batch: of it each replica adds a part, which {variable.dtype} cannot hold. Make the "
        'variable with dtype="float32"'
    )


def no_sums(metric: Any, values: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return, by path, whether an update changes a variable by another number where it has another value.  Local.

    What is added does not depend on the value; a maximum, a last value and a moving average do.
    """
    ops = keras.ops
    numbers = [keras.backend.standardize_dtype(each.dtype) != "bool" for each in metric.variables]

    def change(sign: int) -> list[tuple[Any, Any]]:
        shifts = [sign * (1 + ops.abs(value)) if has else value for value, has in zip(values, numbers, strict=True)]
        shifted = [value + shift if has else value for value, shift, has in zip(values, shifts, numbers, strict=True)]
        after = metric.stateless_update_state(shifted, *args, **kwargs)
        return list(zip(shifted, after, strict=True))

    by_path = {}
    for variable, has, *pairs in zip(metric.variables, numbers, change(0), change(-1), change(1), strict=True):
        if rule_of(variable) != "sum":
            continue
        if not has:
            by_path[variable.path] = ops.ones((), dtype="bool")
            continue
        rounding = _ROUNDING.get(keras.backend.standardize_dtype(variable.dtype), 0)
        (first, *others), bound = [after - given for given, after in pairs], 0.0
        for shifted, after in pairs:
            bound = bound + rounding * (ops.abs(shifted) + ops.abs(after))
        by_path[variable.path] = ops.any(ops.stack([ops.abs(each - first) > bound for each in others]))
    return by_path


def require_sums(odd: Mapping[str, Any]) -> None:
    """Raise NotImplementedError with what is wrong with the updates of the user's own metrics, if it is.  Local."""
    for what, is_odd in odd.items():
        if to_numpy(is_odd):
            raise NotImplementedError(what)


def number(value: Any) -> Any:
    """Return what a metric says as a float; other results as they are.  Local."""
    array = to_numpy(value) if not isinstance(value, dict) else value
    return float(array) if not isinstance(array, dict) and array.ndim == 0 else value
