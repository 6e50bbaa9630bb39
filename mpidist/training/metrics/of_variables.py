"""`MetricOfVariables`: a metric of another library, such as Keras, that adds to variables of its own."""

from __future__ import annotations

from typing import Any

import numpy

from mpidist.training.metrics.base import Metric, Sums


class MetricOfVariables(Metric):
    """A metric that keeps sums in variables, known by its methods: over all replicas, the sums are added up.

    Parameters
    ----------
    metric : object
        With ``name``, ``variables``, ``update_state``, ``result`` and ``reset_state``, as Keras' metrics.  Each
        variable begins with zeros, and rows only add to it; it has ``numpy()`` and ``assign(array)``.

    Raises
    ------
    TypeError
        It has no variables yet, or some that are no sums.
    """

    def __init__(self, metric: Any) -> None:
        super().__init__(metric.name)
        self._metric = metric
        self.grows = {"up": True, "down": False}.get(str(getattr(metric, "_direction", "")))  # as Keras' callbacks ask
        variables = list(metric.variables)
        others = [each for each in variables if getattr(each, "aggregation", "sum") != "sum"]
        if not variables or others:
            why = "has no variables before it has seen rows" if not variables else f"has {others[0]!r}, which is no sum"
            raise TypeError(
                f"metric {metric.name!r} ({type(metric).__name__}) {why}, so it is not known over all ranks; take one "
                "of mpidist.metrics, or a function that returns a value for each row"
            )
        for number, variable in enumerate(variables):
            self.add_sums(str(number), tuple(variable.shape))

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Take some rows into account.  Local; parameters as for the metric itself."""
        if args and not len(args[0]):
            return
        self._metric.reset_state()
        self._metric.update_state(*args, **kwargs)
        for sums, variable in zip(self.sums.values(), self._metric.variables, strict=True):
            sums += variable.numpy()

    def compute(self, sums: Sums) -> Any:
        """Return what the metric says of these sums.  Local."""
        for value, variable in zip(sums.values(), self._metric.variables, strict=True):
            variable.assign(value)
        result = numpy.asarray(self._metric.result())
        return result if result.ndim else float(result)


def is_metric(value: Any) -> bool:
    """Return whether an object has the methods of a metric with variables.  Local."""
    methods = ("update_state", "result", "reset_state")
    return hasattr(value, "variables") and all(callable(getattr(value, name, None)) for name in methods)
