"""The metrics that a Keras model was compiled with, as metrics of an `Estimator`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy

from mpidist.frameworks.keras import metrics
from mpidist.frameworks.keras.backends import to_numpy
from mpidist.frameworks.keras.classes import is_of_keras
from mpidist.frameworks.keras.own_methods import put_over
from mpidist.training.metrics import Metric
from mpidist.training.metrics.base import Sums

#: Names whose meaning depends on the shapes of labels and predictions; mpidist's metric of that name is the same.
_BY_SHAPE = ("accuracy", "acc")


class KeptMetric(Metric):
    """A metric of Keras whose variables are sums over rows."""

    def __init__(self, name: str, metric: keras.metrics.Metric, output: str) -> None:
        super().__init__(name)
        self._metric, self._output = metric, output
        self._zeros = [to_numpy(each) for each in metric.variables]
        if any(zeros.any() for zeros in self._zeros):
            raise NotImplementedError(
                f"metric {name!r} begins with other numbers than zeros, and so is no sum over rows"
            )
        if any(metrics.rule_of(each) != "sum" for each in metric.variables):
            raise NotImplementedError(f"metric {name!r} has variables with an aggregation, and so is no sum over rows")
        for place, zeros in enumerate(self._zeros):
            self.add_sums(str(place), zeros.shape)

    def update_state(self, y_true: Any, y_pred: Any) -> None:
        """Take rows into account.  Local."""
        sums, args = self._tensors(self._zeros), (y_true, y_pred[self._output])
        if not is_of_keras(type(self._metric).update_state):
            odd = metrics.no_sums(self._metric, sums, args, {})
            metrics.require_sums({metrics.says_more(path): is_odd for path, is_odd in odd.items()})
        with put_over(metrics.functions_of_rows([self._metric])):
            found = self._metric.stateless_update_state(sums, *args)
        for place, value in enumerate(found):
            self.sums[str(place)] += to_numpy(value)

    def compute(self, sums: Sums) -> float:
        """Return what Keras makes of the sums.  Local."""
        values = [sums[str(place)].astype(zeros.dtype) for place, zeros in enumerate(self._zeros)]
        return float(to_numpy(self._metric.stateless_result(self._tensors(values))))

    def _tensors(self, values: list[numpy.ndarray]) -> list[Any]:
        return [keras.ops.convert_to_tensor(value) for value in values]


def kept_metrics(model: keras.Model, output: str) -> Callable[[], dict[str, Any]]:
    """Return a function that makes ``eval_metric_ops`` of the metrics of a compiled model.  Local.

    NotImplementedError: they are for several outputs, weighted, or cannot be made anew.
    """
    config = model.get_compile_config()
    given = config.get("metrics") or []
    if config.get("weighted_metrics") or not isinstance(given, list) or any(isinstance(each, list) for each in given):
        raise NotImplementedError("model_to_estimator converts one list of metrics, which are not weighted")
    named = dict(_named(each) for each in given)
    return lambda: {
        name: (metric, output) if isinstance(metric, str) else KeptMetric(name, metric(), output)
        for name, metric in named.items()
    }


def _named(given: Any) -> tuple[str, Any]:
    """Return the name of a metric, and the name of mpidist's or a function that makes one of Keras'."""
    if given in _BY_SHAPE:
        return given, "accuracy"
    try:
        metric = keras.metrics.get(given)
    except (ValueError, TypeError) as error:
        raise NotImplementedError(
            f"metric {given!r} cannot be made anew; name it, or register it with "
            "keras.saving.register_keras_serializable"
        ) from error
    if not isinstance(metric, keras.metrics.Metric):
        fn, name = metric, given if isinstance(given, str) else str(getattr(metric, "__name__", "metric"))
        return name, lambda: keras.metrics.MeanMetricWrapper(fn, name=name)
    return (given if isinstance(given, str) else metric.name), lambda: keras.metrics.get(given)
