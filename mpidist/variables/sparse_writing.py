"""`SparseWriting`: the `scatter_*` methods of variables, which write some rows of them."""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable
from typing import Any, TypeVar

from mpidist import arrays
from mpidist.options import VariableAggregation
from mpidist.variables.indexed_slices import IndexedSlices

_V = TypeVar("_V", bound="SparseWriting")

#: Sums and means of rows have no meaning for these.
_NOT_OF_AGGREGATES = ("scatter_min", "scatter_max", "scatter_update")

#: The mean of factors is not that of what they make of a row.
_WITHOUT_MEAN = ("scatter_mul", "scatter_div")

_AGGREGATE_ERROR = (
    "{verb} is only supported for mirrored variable (variable created within certain `tf.distribute.Strategy` scope) "
    "with NONE or `ONLY_FIRST_REPLICA` aggregation, got: {aggregation} (variable {name!r})."
)


class SparseWriting(abc.ABC):
    """Writes rows of a variable's array.

    All methods take `IndexedSlices`: row ``indices[i]`` of the variable is changed by ``values[i]``, and a row that is
    named twice is changed twice.  Contexts and aggregations are those of `assign`: in a replica, a variable with an
    aggregation is changed by the rows of all replicas (collective): with SUM each of them is added, or multiplied with;
    with MEAN, they are divided by the number of replicas.

    Raises
    ------
    TypeError
        The argument is no `IndexedSlices`.
    ValueError
        These are no rows of the variable.
    NotImplementedError
        The variable is synchronized on read; or the least, greatest or last of rows is asked for, and the aggregation
        is SUM or MEAN; or, in a replica, a product or quotient, and the aggregation is MEAN.
    """

    name: str
    aggregation: VariableAggregation

    def scatter_add(self: _V, sparse_delta: IndexedSlices) -> _V:
        """Add to rows.  Collective in a replica where there is an aggregation, else Local."""
        return self._scatter("scatter_add", _by("add"), sparse_delta)

    def scatter_sub(self: _V, sparse_delta: IndexedSlices) -> _V:
        """Subtract from rows.  Collective in a replica where there is an aggregation, else Local."""
        return self._scatter("scatter_sub", _by("subtract"), sparse_delta)

    def scatter_mul(self: _V, sparse_delta: IndexedSlices) -> _V:
        """Multiply rows.  Collective in a replica where there is an aggregation, else Local."""
        return self._scatter("scatter_mul", _by("multiply"), sparse_delta)

    def scatter_div(self: _V, sparse_delta: IndexedSlices) -> _V:
        """Divide rows (of floats).  Collective in a replica where there is an aggregation, else Local."""
        return self._scatter("scatter_div", _by("divide"), sparse_delta)

    def scatter_min(self: _V, sparse_delta: IndexedSlices) -> _V:
        """Set rows to the least of them and the values.  Collective or Local, as `scatter_add`."""
        return self._scatter("scatter_min", _by("minimum"), sparse_delta)

    def scatter_max(self: _V, sparse_delta: IndexedSlices) -> _V:
        """Set rows to the greatest of them and the values.  Collective or Local, as `scatter_add`."""
        return self._scatter("scatter_max", _by("maximum"), sparse_delta)

    def scatter_update(self: _V, sparse_delta: IndexedSlices) -> _V:
        """Set rows; of several for one row the last counts.  Collective or Local, as `scatter_add`."""
        return self._scatter("scatter_update", operator.setitem, sparse_delta)

    def _scatter(self: _V, verb: str, write_fn: Callable[[Any, Any, Any], None], rows: IndexedSlices) -> _V:
        rows = self._rows_for(verb, rows)
        indices = arrays.in_memory_of(self.live, rows.indices)
        self._change(verb, lambda storage: write_fn(storage, indices, rows.values))
        return self

    def _rows_for(self, verb: str, rows: Any) -> IndexedSlices:
        """Return what is written, after a look at the argument; Collective or Local as the methods are."""
        if not isinstance(rows, IndexedSlices):
            raise TypeError(f"sparse_delta is not IndexedSlices: {verb} got {type(rows).__name__}")
        self._check_scatter(verb)
        rows.check(self.shape)
        if verb in _WITHOUT_MEAN and self.aggregation is VariableAggregation.MEAN and self._is_in_replica:
            raise NotImplementedError(
                f"{verb} in a replica has no mean over the replicas (variable {self.name!r}): each would multiply the "
                "row by its factor. Use the aggregation ONLY_FIRST_REPLICA, or SUM, which applies the factors of all; "
                "or write across replicas, in the function given to `get_replica_context().merge_call`"
            )
        return self._rows_to_write(IndexedSlices(self._of_own_dtype(rows.values), rows.indices))

    def _check_scatter(self, verb: str) -> None:
        """Raise NotImplementedError for what rows of several replicas, or of copies that differ, cannot do."""
        if self._is_plain:
            return
        if self._is_on_read:
            raise NotImplementedError(
                f"{verb} is not supported for variables that are synchronized on read (variable {self.name!r})"
            )
        aggregates = (VariableAggregation.SUM, VariableAggregation.MEAN)
        if verb in _NOT_OF_AGGREGATES and self.aggregation in aggregates:
            raise NotImplementedError(
                _AGGREGATE_ERROR.format(
                    verb=verb, aggregation=f"VariableAggregation.{self.aggregation.name}", name=self.name
                )
            )

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abc.abstractmethod
    def live(self) -> Any: ...

    @property
    @abc.abstractmethod
    def _is_plain(self) -> bool: ...

    @property
    @abc.abstractmethod
    def _is_on_read(self) -> bool: ...

    @property
    @abc.abstractmethod
    def _is_in_replica(self) -> bool: ...

    @abc.abstractmethod
    def _change(self, verb: str, change: Callable[[Any], None], sets_all: bool = False) -> None:
        """Call what changes the array."""

    @abc.abstractmethod
    def _of_own_dtype(self, values: Any) -> Any:
        """Return values in the variable's dtype and memory."""

    @abc.abstractmethod
    def _rows_to_write(self, rows: IndexedSlices) -> IndexedSlices:
        """Return what is written to every copy when this replica gives `rows`."""


def _by(ufunc: str) -> Callable[[Any, Any, Any], None]:
    """Return what applies a ufunc to rows of an array, again for each time that a row is named."""

    def write(storage: Any, indices: Any, values: Any) -> None:
        getattr(arrays.namespace(storage), ufunc).at(storage, indices, values)

    return write
