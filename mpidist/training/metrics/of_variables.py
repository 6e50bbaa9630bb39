"""`MetricOfVariables`: a metric of Keras, or of its like, as one of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from mpidist.input import structure
from mpidist.training.metrics.base import Metric, Sums


class MetricOfVariables(Metric):
    """A metric that keeps sums in variables, known by its methods: over all replicas, the sums are added up.

    The metric has ``name``, ``variables``, ``update_state``, ``result`` and ``reset_state``, as Keras' metrics.  Each
    variable begins with zeros, and rows only add to it; it has ``numpy()`` and ``assign(array)``.  TypeError where it
    has no variables yet, or some that are no sums; ValueError in the first update with several rows, where these add
    something else together than one by one: then the metric would depend on the number of ranks.
    """

    def __init__(self, metric: Any) -> None:
        super().__init__(metric.name)
        self._metric, self._is_known_to_add = metric, False
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
        rows = structure.first_length((args, kwargs))
        if not rows:
            if not any(map(numpy.shape, structure.leaves((args, kwargs)))):
                raise TypeError(f"metric {self.name!r} takes rows: give it arrays, (1,) where it is one number")
            return
        added = self._added(args, kwargs)
        if rows > 1 and not self._is_known_to_add:
            self._require_sums(added, args, kwargs)
            self._is_known_to_add = True
        for sums, each in zip(self.sums.values(), added, strict=True):
            sums += each

    def _added(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[numpy.ndarray]:
        """Return what some rows add to the variables."""
        self._metric.reset_state()
        self._metric.update_state(*args, **kwargs)
        return [numpy.array(variable.numpy(), "float64") for variable in self._metric.variables]

    def _require_sums(self, added: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ValueError unless the first row and the others add what all rows add together."""
        first, others = (self._added(*_rows_of((args, kwargs), rows)) for rows in (slice(1), slice(1, None)))
        for both, *parts in zip(added, first, others, strict=True):
            if not numpy.allclose(sum(parts), both, 1e-3, 1e-5 * numpy.abs(both).max(initial=0), equal_nan=True):
                raise ValueError(
                    f"metric {self.name!r} adds something else for several rows together than for each of them, so it "
                    "would depend on the number of ranks; give it one array of labels and one of predictions, of shape "
                    "(rows, 1) where a row is one number, or take one of mpidist.metrics"
                )

    def compute(self, sums: Sums) -> Any:
        """Return what the metric says of these sums.  Local."""
        for value, variable in zip(sums.values(), self._metric.variables, strict=True):
            variable.assign(value)
        result = numpy.asarray(self._metric.result())
        return result if result.ndim else float(result)


def _rows_of(given: Any, rows: slice) -> Any:
    return structure.map_leaves(lambda leaf: leaf[rows] if numpy.shape(leaf) else leaf, given)


def is_metric(value: Any) -> bool:
    """Return whether an object has the methods of a metric with variables.  Local."""
    methods = ("update_state", "result", "reset_state")
    return hasattr(value, "variables") and all(callable(getattr(value, name, None)) for name in methods)
