"""`ServedVariable`: a variable of which this process holds nothing: it lies on a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from mpidist import arrays
from mpidist.parameter_server.layout import Key, VariableSpec
from mpidist.parameter_server.registry import variable_of
from mpidist.variables import DistributedVariable, IndexedSlices
from mpidist.variables.snapshots import are_needed
from mpidist.variables.variable import as_dtype

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


class ServedVariable(DistributedVariable):
    """A variable on a server.  Made by `Variable` in the scope of a `ParameterServerStrategy`.

    Reading gives what the server had when this worker last *pulled*: at the first reading in each `Strategy.run` (or
    scheduled function), and again after this worker has changed a variable itself.  Writing changes the one value
    that there is: an `assign_add` of every worker adds up.  In a worker of several ranks, writing is collective
    among them, by the variable's aggregation; and so is reading outside of `run`.

    It is pickled as a reference, and is the same variable in any process of the job.

    Attributes
    ----------
    number : int
        Of the variable, in the order of creation.
    servers : tuple of int
        The server that holds it; of a `ShardedVariable`, by shard.
    specs : tuple of VariableSpec
        What the server knows of it; of a `ShardedVariable`, by shard.
    """

    is_here = False

    def __init__(self, client: Any, specs: Sequence[VariableSpec], servers: Sequence[int], **attributes: Any) -> None:
        super().__init__(None, **attributes)
        self._client = client
        self.specs = tuple(specs)
        self.servers = tuple(servers)
        self.number = specs[0].key[0]
        self.key = specs[0].key

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all of it."""
        return self.specs[0].shape

    @property
    def dtype(self) -> numpy.dtype[Any]:
        """The dtype."""
        return self.specs[0].dtype

    @property
    def device(self) -> str:
        """The full name of the server's device."""
        return self.strategy.extended.parameter_devices[self.servers[0]]

    @property
    def storage(self) -> Any:
        """There is none here.

        Raises
        ------
        RuntimeError
            Always.
        """
        raise RuntimeError(
            f"variable {self.name!r} is held by ps {', '.join(map(str, self.servers))}, not by this process: read its "
            "`value`, and write with `assign` or an optimizer of mpidist"
        )

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def value(self) -> numpy.ndarray:
        """The value, as last pulled: read-only, and unchanged until the next pull.

        In a process that has imported a library that reads arrays later than it gets them, it is a copy that stays as
        it is; the same object until the next pull.
        """
        value = self._pulled()
        return self._snapshot.of(value, self._client.moment) if are_needed() else value

    @property
    def live(self) -> numpy.ndarray:
        """The value, as last pulled."""
        return self.value

    def _pulled(self) -> numpy.ndarray:
        """Return the value as last pulled, in memory that the next pull may write."""
        value = self._client.snapshot.get(self.key)
        return self._client.value(self.key) if value is None else value

    def read_value(self) -> numpy.ndarray:
        """Return the value that the server has now, as a new array."""
        return self._client.read(self.key)

    def sparse_read(self, indices: ArrayLike) -> numpy.ndarray:
        """Return the rows with these numbers, as the server has them now, in the shape of `indices` with rows behind.

        Only these rows are sent.  A variable that is read so once is kept apart by its server, and no longer sent
        with others.
        """
        rows = self._checked_rows(indices)
        return self._lookup(rows.reshape(-1)).reshape(*rows.shape, *self.shape[1:])

    @property
    def version(self) -> int:
        """How often it had been changed when the value was made that `value` returns."""
        return max(self._client.version(spec.key) for spec in self.specs)

    def _whole_copy(self) -> Any:
        return self.read_value()

    def restore(self, value: Any) -> None:
        """Set the value from an array of `saved_shape`; for checkpoints."""
        self._put("assign", self._converted(value))

    # -- writing ------------------------------------------------------------------------------------------------------

    def pushed(self, gradient: Any) -> list[tuple[Key, Any]]:
        """Return what to push to servers of a gradient of all of it, or of some rows.  Local."""
        return [(self.key, gradient)]

    def _put(self, verb: str, value: Any) -> None:
        self._client.assign(self.key, value, verb)

    def _put_rows(self, verb: str, rows: IndexedSlices) -> None:
        self._client.scatter(self.key, verb, arrays.on_host(rows.indices), rows.values)

    def _lookup(self, indices: Any) -> Any:
        """Return rows, by a flat array of their numbers."""
        return self._client.lookup(self.key, indices)

    @property
    def _is_shared(self) -> bool:
        return self.strategy.extended.num_replicas > 1  # of this worker

    @property
    def _is_on_read(self) -> bool:
        return False  # there is one value, on the server, however it is synchronized elsewhere

    def _of_own_dtype(self, values: Any) -> Any:
        values = arrays.on_host(values)
        return values if values.dtype == self.dtype else as_dtype(self.name, values, self.dtype)

    def _checked_rows(self, indices: Any) -> Any:
        indices = numpy.asarray(arrays.on_host(indices) if arrays.is_known(indices) else indices)
        if indices.size == 0:
            indices = indices.astype(numpy.int64)
        if indices.dtype.kind not in "iu":
            raise TypeError(f"row numbers of variable {self.name!r} must be integers, got {indices.dtype}")
        rows = self.shape[0] if self.shape else 0
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < rows:
            raise IndexError(
                f"row numbers from {int(indices.min())} to {int(indices.max())} are outside of variable {self.name!r} "
                f"of {rows} rows"
            )
        return indices.astype(numpy.int64, copy=False)

    # -- pickling -----------------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        description = {
            "name": self.name,
            "trainable": self.trainable,
            "synchronization": self.synchronization,
            "aggregation": self.aggregation,
            "specs": [spec.described() for spec in self.specs],
            "servers": list(self.servers),
        }
        return variable_of, (self.number, description)

    def __repr__(self) -> str:
        where = f"on ps {', '.join(map(str, self.servers))}"
        return f"<{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype} {where}>"


class ShardedVariable(ServedVariable):
    """A variable whose rows are spread over servers.  Made by `Variable` where there is a `variable_partitioner`.

    Its rows are cut into shards as even as can be, the longer ones first.  Slices along the first axis, `sparse_read`
    and the `scatter_*` methods involve only the shards that they concern; reading `value` puts all together.  A
    checkpoint has it whole, and restores into any number of shards.

    Attributes
    ----------
    variables : list of ServedVariable
        The shards, each as a variable: ``name/part_0``, ``name/part_1``, ...
    """

    def __init__(self, client: Any, specs: Sequence[VariableSpec], servers: Sequence[int], **attributes: Any) -> None:
        super().__init__(client, specs, servers, **attributes)
        lengths = [spec.shape[0] for spec in specs]
        self._offsets = numpy.concatenate([[0], numpy.cumsum(lengths)]).astype(numpy.int64)
        parts = [{**attributes, "name": spec.name} for spec in specs]
        self.variables = [
            ServedVariable(client, [spec], [server], **part)
            for spec, server, part in zip(self.specs, self.servers, parts, strict=True)
        ]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all shards together."""
        return (int(self._offsets[-1]), *self.specs[0].shape[1:])

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self.specs)

    def _pulled(self) -> numpy.ndarray:
        """Return the value of all shards together, as last pulled, as a new array."""
        whole = self._client.undivided(lambda: numpy.concatenate([each._pulled() for each in self.variables]))
        whole.flags.writeable = False
        return whole

    def read_value(self) -> numpy.ndarray:
        """Return the value that the servers have now, as a new array."""
        return self._client.undivided(lambda: numpy.concatenate([each.read_value() for each in self.variables]))

    def __getitem__(self, key: Any) -> Any:
        first, *rest = key if isinstance(key, tuple) else (key,)
        if self._is_shared:  # the ranks of a worker may ask for other shards each, and read each shard together
            return super().__getitem__(key)
        if isinstance(first, (int, numpy.integer)) and not isinstance(first, (bool, numpy.bool_)):
            row = self._row(int(first))
            shard = self._shard_of(row)
            return self.variables[shard].value[(row - int(self._offsets[shard]), *rest)].copy()
        if isinstance(first, slice) and (first.step is None or first.step > 0):
            pieces = self._client.undivided(
                lambda: [self.variables[shard].value[where] for shard, where in self._slices(first)]
            )
            picked = numpy.concatenate(pieces) if pieces else numpy.empty((0, *self.shape[1:]), self.dtype)
            return picked[(slice(None), *rest)] if rest else picked
        return super().__getitem__(key)

    def pushed(self, gradient: Any) -> list[tuple[Key, Any]]:
        """Return what to push of a gradient, by shard: none of its rows, too, is a step of a shard.  Local."""
        if isinstance(gradient, IndexedSlices):
            none = gradient.values[:0], arrays.on_host(gradient.indices)[:0]
            found = {spec.key: IndexedSlices(*none, spec.shape) for spec in self.specs}
            found.update({self.specs[shard].key: rows for shard, rows in self._rows_by_shard(gradient)})
            return list(found.items())
        return [(spec.key, part) for spec, part in zip(self.specs, self._cut(gradient), strict=True)]

    def _put(self, verb: str, value: Any) -> None:
        def put() -> None:
            for each, part in zip(self.variables, self._cut(value), strict=True):
                each._put(verb, part)

        self._client.undivided(put)

    def _put_rows(self, verb: str, rows: IndexedSlices) -> None:
        def put() -> None:
            for shard, some in self._rows_by_shard(rows):
                self.variables[shard]._put_rows(verb, some)

        self._client.undivided(put)

    def _lookup(self, indices: Any) -> Any:
        rows = numpy.empty((len(indices), *self.shape[1:]), self.dtype)
        places_in = dict(self._places(indices))
        # each rank of a worker has rows of its own, and those of a shard are looked up for all of them together
        shards = range(self.num_shards) if self._is_shared else places_in

        def look_up() -> None:
            for shard in shards:
                places = places_in.get(shard, numpy.empty(0, numpy.intp))
                rows[places] = self.variables[shard]._lookup(indices[places] - self._offsets[shard])

        self._client.undivided(look_up)
        return rows

    def _row(self, row: int) -> int:
        rows = self.shape[0]
        if not -rows <= row < rows:
            raise IndexError(f"row {row} is outside of variable {self.name!r} of {rows} rows")
        return row % rows

    def _shard_of(self, row: Any) -> Any:
        return numpy.searchsorted(self._offsets, row, side="right") - 1

    def _slices(self, rows: slice) -> Iterator[tuple[int, slice]]:
        """Yield by shard what a slice with a positive step has of it."""
        start, stop, step = rows.indices(self.shape[0])
        for shard in range(self.num_shards):
            first, end = int(self._offsets[shard]), int(self._offsets[shard + 1])
            begin = start if start >= first else start + -(-(first - start) // step) * step
            if begin < min(end, stop):
                yield shard, slice(begin - first, min(end, stop) - first, step)

    def _cut(self, whole: Any) -> list[Any]:
        return [whole[a:b] for a, b in zip(self._offsets[:-1], self._offsets[1:], strict=True)]

    def _places(self, indices: Any) -> Iterator[tuple[int, Any]]:
        """Yield each shard that has some of these rows, and where they stand among the numbers."""
        shards = self._shard_of(indices)
        for shard in numpy.unique(shards):
            yield int(shard), numpy.flatnonzero(shards == shard)

    def _rows_by_shard(self, rows: IndexedSlices) -> list[tuple[int, IndexedSlices]]:
        indices, values = arrays.on_host(rows.indices), rows.values
        return [
            (shard, IndexedSlices(values[places], indices[places] - self._offsets[shard], self.specs[shard].shape))
            for shard, places in self._places(indices)
        ]
