"""`ServedSums`: the sums of a metric, on a server, for all workers of a coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy

from mpidist.options import ReduceOp
from mpidist.parameter_server import registry

if TYPE_CHECKING:
    from mpidist.parameter_server.client.served_variable import ServedVariable


class ServedSums:
    """The sums of one metric, as one variable of a server, to which every process adds what it has counted.

    The metric's own `sums` are what its process has counted, and not added yet.
    """

    def __init__(self, extended: Any, metric: Any, number: int, variable: ServedVariable | None = None) -> None:
        self._extended = extended
        self.metric = metric
        self._number = number
        self._variable = variable

    @property
    def is_made(self) -> bool:
        """Whether there is the variable already."""
        return self._variable is not None

    @property
    def variable(self) -> ServedVariable:
        """All sums, one after the other."""
        if self._variable is None:
            self._variable = self._extended.new_sums(f"{self.metric.name}/sums", _joined(self.metric.sums))
            self.forget()
        return self._variable

    def add(self) -> None:
        """Add what this process has counted, and count from 0 on.  Local; collective among the ranks of a worker."""
        key = self.variable.key
        counted = _joined(dict(enumerate(self._extended.reduce_arrays(ReduceOp.SUM, list(self.metric.sums.values())))))
        if counted.any():
            registry.installed().client.add(key, counted)
            self.forget()

    def totals(self) -> dict[str, Any]:
        """Return the sums of all processes, with what this one has counted.  As `add`."""
        self.add()
        whole, by_name, start = self.variable.read_value(), {}, 0
        for name, sums in self.metric.sums.items():
            by_name[name] = whole[start : start + sums.size].reshape(sums.shape)
            start += sums.size
        return by_name

    def set(self, sums: Mapping[str, Any]) -> None:
        """Have these sums instead of all there are.  As `add`."""
        key = self.variable.key
        self.forget()
        registry.installed().client.assign(key, _joined(sums))

    def forget(self) -> None:
        """Count from 0 on in this process.  Local."""
        for sums in self.metric.sums.values():
            sums[...] = 0

    def reference(self) -> tuple[Any, ...]:
        """Return what a pickle holds of the metric: where to find it in a process of the job, and how to make it."""
        own = {name: value for name, value in vars(self.metric).items() if name not in ("strategy", "remote", "sums")}
        shapes = {name: sums.shape for name, sums in self.metric.sums.items()}
        return registry.metric_of, (self._number, type(self.metric), own, shapes, self.variable)


def _joined(sums: Mapping[Any, Any]) -> Any:
    """Return sums as one array, in their order."""
    return numpy.concatenate([numpy.empty(0), *(numpy.reshape(each, -1) for each in sums.values())])
