"""`Metric`: a number about the rows of all ranks.  Every rank keeps sums, which are added up when it is read.

Sums are float64, so counts of rows are exact, and a sum over the ranks is the sum over all rows.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from mpidist import arrays, context
from mpidist.cross_device_ops import ValueName
from mpidist.errors import UnsupportedDtypeError
from mpidist.options import ReduceOp

#: The state of a metric: name -> sums.
Sums = Mapping[str, numpy.ndarray]


class Metric(abc.ABC):
    """Base of the metrics.

    A subclass names its sums in its constructor (`add_sums`).  Its `update_state` adds to them, and its `compute` works
    out the value from them.  A metric belongs to the strategy in whose scope it is made.  A `Trainer` takes a metric
    that was made outside of all scopes into its own strategy.

    Parameters
    ----------
    name : str
        What logs and histories call it.

    Attributes
    ----------
    strategy : Strategy
        `result` is over its replicas.
    sums : dict of str to numpy.ndarray
        Sums over the rows that this rank has seen, float64.  With a `ClusterCoordinator`, sums that servers do not have
        yet.
    """

    #: The sums of all processes on a server, where there is a `ClusterCoordinator`.
    remote: Any = None
    #: Whether it is better when it grows; None where nobody knows.
    grows: bool | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.strategy = context.get_strategy()
        self.sums: dict[str, numpy.ndarray] = {}
        self.strategy.extended.adopt_metric(self)

    @abc.abstractmethod
    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Take some rows into account.  Local, with any number of rows, none included.

        Parameters
        ----------
        y_true, y_pred : array, shape (rows, ...)
            `Mean` takes one array of values in their place.  Arrays of a device are copied to the host.
        sample_weight : array, optional
            One weight for each row, or what can be broadcast to the values.
        """

    @abc.abstractmethod
    def compute(self, sums: Sums) -> Any:
        """Return the metric's value for these sums, which are not changed.  Local."""

    def add_sums(self, name: str, shape: tuple[int, ...] = ()) -> None:
        """Give the metric an array of sums that start at 0; for constructors of subclasses.  Local."""
        self.sums[name] = numpy.zeros(shape)

    def result(self) -> Any:
        """Return the value over all replicas; in a replica (in `strategy.run`), over the rows that it has seen.

        Collective outside of replicas: every rank calls it in the same order.  Local in a replica.

        With a `ClusterCoordinator` it is over the rows that scheduled functions have seen on any worker, and those that
        the chief's program has seen.  It is Local then; collective among the ranks of a worker that has several.

        Returns
        -------
        float or array
            An array for several thresholds.
        """
        mode = context.current_mode()
        if self.remote is None and mode.strategy is self.strategy and mode.replica_context is not None:
            return self.compute(self.sums)
        return self.compute(self._over_replicas())

    def reset_state(self) -> None:
        """Begin anew.  Local; every rank calls it.  With a `ClusterCoordinator` the chief does, for all workers."""
        if self.remote is not None:
            self.remote.set({name: numpy.zeros_like(sums) for name, sums in self.sums.items()})
        for sums in self.sums.values():
            sums[...] = 0

    def state(self) -> dict[str, numpy.ndarray]:
        """Return the sums over all replicas, for a checkpoint.  Collective: every rank calls it in the same order."""
        return {name: sums.copy() for name, sums in self._over_replicas().items()}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if something is missing in a state, or has another shape.  Local."""
        for name, sums in self.sums.items():
            value = state.get(name)
            if value is None or numpy.shape(value) != sums.shape:
                got = "nothing" if value is None else f"shape {numpy.shape(value)}"
                raise ValueError(f"metric {self.name!r}: {name!r} was saved with {got}, expected shape {sums.shape}")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave, on any number of replicas.

        Local; every rank calls it with the same state.  Errors as for `check`.
        """
        self.check(state)
        if self.remote is not None:
            self.remote.set({name: numpy.asarray(state[name], "float64") for name in self.sums})
            return
        for name, sums in self.sums.items():
            # the first replica has it all, so the sum over the replicas is what was saved, to the last bit
            sums[...] = state[name] if self.strategy.extended.replica_id == 0 else 0

    def _over_replicas(self) -> dict[str, numpy.ndarray]:
        if self.remote is not None:
            return self.remote.totals()
        return over_replicas([self], self.strategy.extended)[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a reference, where there is one metric for all processes of the job."""
        return super().__reduce_ex__(protocol) if self.remote is None else self.remote.reference()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, this rank's sums {self.sums}>"


def over_replicas(metrics: Sequence[Metric], extended: Any) -> list[dict[str, numpy.ndarray]]:
    """Return the sums of each metric over all replicas, in one call.  Collective."""
    sums = [array for metric in metrics for array in metric.sums.values()]
    # sums of two metrics are alike but for their names, by which ranks that give them in another order are told apart
    names = [ValueName(f"{name} of metric {metric.name}") for metric in metrics for name in metric.sums]
    reduced = iter(extended.reduce_arrays(ReduceOp.SUM, sums, destinations=names))
    return [{name: next(reduced) for name in metric.sums} for metric in metrics]


def on_host(value: Any) -> numpy.ndarray:
    """Return a value as a NumPy array; arrays of a device are copied.  Local.

    UnsupportedDtypeError for complex numbers, times or records, which a float cannot hold; ValueError for several
    arrays.
    """
    if isinstance(value, tuple) and any(map(numpy.ndim, value)):  # they would be taken for rows
        raise ValueError(
            f"metrics are about one array of labels and one of predictions, got a tuple of {len(value)}: of several "
            "outputs, have a mpidist.metrics.Metric of your own pick one in update_state"
        )
    array = arrays.to_array(value)
    if array.dtype.kind not in "OSU" and not arrays.keeps_meaning(array.dtype, "float64"):
        raise UnsupportedDtypeError(f"metrics are about real numbers, got an array of dtype {array.dtype}")
    return arrays.on_host(array)


def same_rank(first: numpy.ndarray, second: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return both with as many dimensions, where they differ in a last dimension of 1 only.  Local."""
    if first.ndim == second.ndim + 1 and first.shape[-1] == 1:
        return (first, second[:, None]) if second.ndim == 1 else (first[..., 0], second)
    if second.ndim == first.ndim + 1 and second.shape[-1] == 1:
        return (first[:, None], second) if first.ndim == 1 else (first, second[..., 0])
    return first, second


def same_shape(name: str, y_true: numpy.ndarray, y_pred: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return both as `same_rank` does; ValueError where shapes differ: values would be spread over rows.  Local."""
    y_true, y_pred = same_rank(y_true, y_pred)
    if y_true.shape != y_pred.shape:
        raise ValueError(f"metric {name!r}: y_true has shape {y_true.shape}, y_pred {y_pred.shape}")
    return y_true, y_pred


def require_classes(name: str, y_pred: numpy.ndarray, needs: str = "it") -> None:
    """Raise ValueError unless there are scores by class: of one axis, rows would be taken for classes.  Local."""
    if y_pred.ndim < 2:
        raise ValueError(f"metric {name!r}: {needs} needs y_pred of shape (rows, classes), got {y_pred.shape}")


def quotient(total: Any, count: Any) -> Any:
    """Return total / count, and 0 where the count is 0; a float for scalars.  Local."""
    total, count = numpy.asarray(total, "float64"), numpy.asarray(count, "float64")
    result = numpy.divide(total, count, out=numpy.zeros_like(total), where=count != 0)
    return result if result.ndim else float(result)
