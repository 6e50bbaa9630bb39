"""`Variable`: an array that every replica holds a copy of, and the rules by which the copies stay together.

A rank holds one copy.  Writing goes through `assign*`, reading through the read-only `value`; optimizers and
checkpoints work on the array behind it: who writes takes it by `storage`, and nobody else does.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy
from numpy.typing import ArrayLike, DTypeLike

from mpidist import arrays, context
from mpidist.device.memory import kept_empty
from mpidist.errors import TornVariableError, UnsupportedDtypeError
from mpidist.options import ReduceOp, VariableAggregation, VariableSynchronization
from mpidist.variables.arenas import BlockSlice
from mpidist.variables.array_reading import ArrayReading
from mpidist.variables.indexed_slices import IndexedSlices
from mpidist.variables.one_copy import OneCopy
from mpidist.variables.partition import check_partition
from mpidist.variables.snapshots import Snapshot, are_needed, read_only

#: What variables are called that no user has named, with a number from the second one on.
DEFAULT_NAME = "Variable"
#: The methods that write, and the NumPy function by which each changes an element; None sets it.
VERBS: dict[str, Any] = {
    "assign": None,
    "assign_add": numpy.add,
    "assign_sub": numpy.subtract,
    "scatter_update": None,
    "scatter_add": numpy.add,
    "scatter_sub": numpy.subtract,
    "scatter_mul": numpy.multiply,
    "scatter_div": numpy.divide,
    "scatter_max": numpy.maximum,
    "scatter_min": numpy.minimum,
}
#: Sums and means of rows have no meaning for these.
_NOT_OF_AGGREGATES = ("scatter_min", "scatter_max", "scatter_update")
#: The mean of factors is not that of what they make of a row.
_WITHOUT_MEAN = ("scatter_mul", "scatter_div")
#: The dtypes that TensorFlow gives Python numbers, by the kind of NumPy's.
_TENSORFLOW_DTYPES = {"f": numpy.dtype("float32"), "i": numpy.dtype("int32")}
#: What mends a variable that belongs to another strategy.
OWN_SCOPE = "create it inside `with strategy.scope():` of the strategy whose `run` you call"


def Variable(  # noqa: N802 - a factory with the name of what it makes, as in TensorFlow
    initial_value: ArrayLike | Callable[[], ArrayLike],
    trainable: bool | None = None,
    name: str | None = None,
    dtype: DTypeLike | None = None,
    synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
    aggregation: VariableAggregation | str = VariableAggregation.NONE,
    partition_dimensions: Sequence[int] | None = None,
) -> DistributedVariable:
    """Return a new variable of the current strategy.

    Collective in the scope of a strategy with several replicas: every rank calls it in the same order.  All copies
    begin with the chief's value.  Local outside of all scopes.

    Parameters
    ----------
    initial_value : array, number, nested lists of numbers, or callable that returns one
        Copied.  Python floats become float32 and Python integers int32, as in TensorFlow; arrays keep their dtype.
    trainable : bool, optional
        True by default, but False for variables that are synchronized on read.
    name : str, optional
        A name that is taken gets a number: ``Variable``, ``Variable_1``, ...
    dtype : dtype, optional
    synchronization : VariableSynchronization or str
        AUTO is ON_WRITE: copies are kept alike when written.  ON_READ copies differ, and reading them aggregates.
    aggregation : VariableAggregation or str
        What becomes of the values that replicas write (ON_WRITE), or of the copies when read (ON_READ).
    partition_dimensions : sequence of int, optional
        For `TPUStrategy`, whose replicas may be groups of ranks: how many parts to cut each axis into.  Each rank of
        the group holds one part, of what is here given whole.

    Raises
    ------
    UnsupportedDtypeError
        The initial value, or `dtype`, is of something else than numbers or truth values: text, Python objects.
    ValueError
        The initial value is None.  In the scope of a strategy: synchronization NONE, or the MEAN of integers.  Parts
        that are not equal, or not as many as a replica has ranks.
    CollectiveMismatchError
        On all ranks: they created different variables; names ranks, variable, shapes and dtypes.
    """
    strategy = context.get_strategy()
    is_plain = context.is_default(strategy)
    synchronization = VariableSynchronization.parse(synchronization)
    if not is_plain and synchronization is VariableSynchronization.NONE:
        raise ValueError(
            "`NONE` variable synchronization mode is not supported with tf.distribute strategy. Please change the "
            f"`synchronization` for variable: {name}; it is one of AUTO, ON_WRITE, ON_READ"
        )
    if synchronization is not VariableSynchronization.ON_READ:
        synchronization = VariableSynchronization.ON_WRITE
    aggregation = VariableAggregation.parse(aggregation)
    storage = _storage(initial_value() if callable(initial_value) else initial_value, dtype, name)
    if not is_plain:
        arrays.check_movable(storage.dtype)
        if aggregation is VariableAggregation.MEAN and storage.dtype.kind in "biu":
            raise ValueError(
                "creating distributed tf.Variable with aggregation=MEAN and a non-floating dtype is not supported, "
                f"please use a different aggregation or dtype; variable {name} is {storage.dtype}"
            )
    if partition_dimensions is not None:
        check_partition(storage.shape, partition_dimensions, strategy.extended.num_logical_devices)
    variable = strategy.extended.new_variable(
        storage,
        name=strategy.extended.unique_name(name or DEFAULT_NAME),
        trainable=synchronization is not VariableSynchronization.ON_READ if trainable is None else trainable,
        synchronization=synchronization,
        aggregation=aggregation,
    )
    return variable if partition_dimensions is None else strategy.extended.split(variable, partition_dimensions)


class Place(enum.Enum):
    """Where code that reads or writes a variable runs."""

    COPY = "on one copy, which is meant as such"
    REPLICA = "in a replica"
    ACROSS = "across replicas"


class DistributedValues:
    """Base of what has a component on every replica.

    Only variables are such objects.  All other values are plain: each rank has its own.
    """


class DistributedVariable(ArrayReading, DistributedValues):
    """One array with a copy on every replica of a strategy.  Made by `Variable`.

    It can stand where an array is read: arithmetic, comparisons, NumPy's functions and ``variable[key]`` read its
    `value` and give arrays of their own.  Only `assign*` change it: ``variable += x`` is a TypeError.

    Attributes
    ----------
    strategy : Strategy
        The strategy in whose scope it was created.
    storage : array, C-contiguous
        This rank's copy, writable.  For optimizers, who keep the copies alike themselves; taken anew for each write.
    name : str
    trainable : bool
    synchronization : VariableSynchronization
    aggregation : VariableAggregation
    """

    #: Where it lies among its neighbours; None where its array is by itself.
    block_slice: BlockSlice | None = None
    #: What the ranks of a node keep it in together, where there is one copy for all; None where each has its own.
    one_copy: OneCopy | None = None
    #: Whether this process holds its array; if not, `value` is what was read from elsewhere last.
    is_here = True
    #: Why its value is neither the old nor the new one: an update was broken off in the middle.  None when it is whole.
    _torn: str | None = None

    def __init__(
        self,
        storage: Any,
        *,
        strategy: Any,
        name: str,
        trainable: bool,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
        block_slice: BlockSlice | None = None,
    ) -> None:
        if block_slice is not None:
            values = block_slice.block[block_slice.start : block_slice.stop].reshape(storage.shape)
            values[...] = storage
            storage, self.block_slice = values, block_slice
        self._storage = storage
        self.strategy = strategy
        self.name = name
        self.trainable = trainable
        self.synchronization = synchronization
        self.aggregation = aggregation
        self._view: Any = None if storage is None else read_only(storage)  # None: it is elsewhere
        self._snapshot = Snapshot()
        self._changes = 0

    @property
    def storage(self) -> Any:
        """This rank's copy, for who is about to write to it.

        Raises
        ------
        TornVariableError
            An update was broken off in the middle.
        """
        return self._to_write()

    @property
    def live(self) -> Any:
        """This rank's copy, for library code that reads it at once: a read-only view.

        Raises
        ------
        TornVariableError
            An update was broken off in the middle.
        """
        if self._torn is not None:
            raise self._torn_error()
        return self._view

    def note_change(self) -> None:
        """Take note that the array is about to be written, or has been, by this rank or one that shares it.  Local."""
        self._changes += 1

    def _to_write(self, sets_all: bool = False) -> Any:
        """Return the array to be written; whoever writes gets it from here.  Local."""
        if self._torn is not None and not sets_all:
            raise self._torn_error()
        self.note_change()
        return self._storage

    def tear(self, cause: str) -> None:
        """Mark the value as neither old nor new: reading and saving it raise until it is set or restored.  Local.

        Parameters
        ----------
        cause : str
            What happened, for the message.
        """
        self._torn = cause

    def empty_slot(self, dtype: Any) -> Any:
        """Return a flat array of as many elements in the same kind of memory, for an optimizer.

        Local, but collective where ranks share one copy.
        """
        return kept_empty(self._storage.size, dtype, self._storage)

    # -- what checkpoints hold; a variable of which each rank has a part holds it whole --------------------------------

    @property
    def saved_shape(self) -> tuple[int, ...]:
        """The shape of the value in a checkpoint."""
        return self.shape

    def own_part(self, whole: Any) -> Any:
        """Return what this rank holds of an array of `saved_shape`: all of it.  Local."""
        return whole

    def joined(self, part: Any) -> Any:
        """Return the array of `saved_shape` of which this rank holds a part; here the part is the whole.

        Local, but collective where ranks hold parts.
        """
        return part

    def saved_value(self) -> Any:
        """Return what a checkpoint holds of this variable.

        Collective where reading `value` is, and where ranks hold parts; local otherwise.
        """
        return self.joined(self.value)

    def restore(self, value: Any) -> None:
        """Set this rank's copy from an array of `saved_shape`, whatever the context; for checkpoints.  Local.

        A torn variable is whole again.  Copies that are summed on read get their shares, of integers the first replica
        all that is left, so that the sum is `value`.
        """
        value = self._converted(self.own_part(value))
        if self._is_on_read and not self._is_plain:
            value = self._share_to_restore(value)
        _set(self._to_write(sets_all=True), value)
        self.note_change()
        self._torn = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of every copy."""
        return self._storage.shape

    @property
    def dtype(self) -> numpy.dtype[Any]:
        """The dtype of every copy."""
        return self._storage.dtype

    @property
    def array_type(self) -> type:
        """The type of its array: of a host's, where that is elsewhere."""
        return numpy.ndarray if self._storage is None else type(self._storage)

    @property
    def value(self) -> numpy.ndarray:
        """The value, read-only.

        Local, and a live view of this rank's copy.  In a process that has imported a library that reads arrays later
        than it gets them (JAX, PyTorch), it is a snapshot: a copy, made at the first reading after a write, that stays
        as it is.  It is the same object until the next write.

        The exception is a variable that is synchronized on read, outside of a replica: reading it is collective and
        gives a new array, the aggregate of all copies.

        Raises
        ------
        TornVariableError
            An update was broken off in the middle; assign or restore the variable first.
        """
        if self._torn is not None:
            raise self._torn_error()
        if self._is_on_read and self._place() is Place.ACROSS:
            return self._aggregate_of_copies()
        return self._snapshot.of(self._view, self._changes) if are_needed() else self._view

    def read_value(self) -> numpy.ndarray:
        """Return a copy of the value.  Local or collective, as `value`."""
        return self.value.copy()

    def assign(self, value: ArrayLike) -> DistributedVariable:
        """Set the variable.

        In a replica, a variable with an aggregation is set to the aggregate of all replicas' values (collective), one
        without sets its own copy (local).  Across replicas every rank sets its copy (local): give the same value.
        Variables that are synchronized on read set their own copy in a replica; across replicas with SUM every copy
        is set to its share, so that the sum is `value`.

        Parameters
        ----------
        value : array or number
            Of the variable's shape, and of a dtype that converts to the variable's without losing its kind.

        Returns
        -------
        DistributedVariable
            This one.

        Raises
        ------
        ValueError
            Another shape.
        TypeError
            A dtype of another kind, such as floats for an integer variable.
        """
        return self._write("assign", value)

    def assign_add(self, value: ArrayLike) -> DistributedVariable:
        """Add to the variable; aggregation and errors as for `assign`."""
        return self._write("assign_add", value)

    def assign_sub(self, value: ArrayLike) -> DistributedVariable:
        """Subtract from the variable; aggregation and errors as for `assign`."""
        return self._write("assign_sub", value)

    def scatter_add(self, sparse_delta: IndexedSlices) -> DistributedVariable:
        """Add to rows: row ``indices[i]`` is changed by ``values[i]``, and one that is named twice is changed twice.

        Collective in a replica where there is an aggregation, else Local.  Contexts and aggregations are those of
        `assign`: in a replica, a variable with an aggregation is changed by the rows of all replicas: with SUM each of
        them is added, or multiplied with; with MEAN, they are divided by the number of replicas.

        Raises
        ------
        TypeError
            The argument is no `IndexedSlices`.
        ValueError
            These are no rows of the variable.
        NotImplementedError
            The variable is synchronized on read; or the least, greatest or last of rows is asked for, and the
            aggregation is SUM or MEAN; or, in a replica, a product or quotient, and the aggregation is MEAN.
        """
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices) -> DistributedVariable:
        """Subtract from rows; contexts and errors as for `scatter_add`."""
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices) -> DistributedVariable:
        """Multiply rows; contexts and errors as for `scatter_add`."""
        return self._scatter("scatter_mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices) -> DistributedVariable:
        """Divide rows (of floats); contexts and errors as for `scatter_add`."""
        return self._scatter("scatter_div", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices) -> DistributedVariable:
        """Set rows to the least of them and the values; contexts and errors as for `scatter_add`."""
        return self._scatter("scatter_min", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices) -> DistributedVariable:
        """Set rows to the greatest of them and the values; contexts and errors as for `scatter_add`."""
        return self._scatter("scatter_max", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices) -> DistributedVariable:
        """Set rows; of several for one row the last counts.  Contexts and errors as for `scatter_add`."""
        return self._scatter("scatter_update", sparse_delta)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds: its own array, and none of its neighbours'."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_view", "block_slice")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what a pickle holds."""
        self.__dict__.update(state)
        self._view = read_only(self._storage)

    def __copy__(self) -> DistributedVariable:
        """Return this variable: what shares its array is the same variable.  Local."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedVariable:
        """Return a new variable of the same strategy that begins with this one's value, copy by copy.

        Collective where making a variable is: every rank copies in the same order.  The name gets a number.
        """
        extended = self.strategy.extended
        new = self._cut_alike(
            extended.new_variable(
                self._whole_copy(),
                name=extended.unique_name(self.name),
                trainable=self.trainable,
                synchronization=self.synchronization,
                aggregation=self.aggregation,
            )
        )
        if self._is_on_read:
            _set(new.storage, self.live)
        memo[id(self)] = new
        return new

    def _whole_copy(self) -> Any:
        """Return a copy of the array of `saved_shape`.  Collective where ranks hold parts."""
        return self.joined(self.live).copy()

    def _cut_alike(self, whole: DistributedVariable) -> DistributedVariable:
        """Return the part of a new whole variable that this variable is of its own; here the whole."""
        return whole

    def __repr__(self) -> str:
        copy = "torn" if self._torn is not None else f"copy={self._view!r}"
        return f"<DistributedVariable {self.name!r} shape={self.shape} dtype={self.dtype} {copy}>"

    @property
    def _is_on_read(self) -> bool:
        return self.synchronization is VariableSynchronization.ON_READ

    @property
    def _is_plain(self) -> bool:
        """Whether it was made outside of all scopes, and so belongs to this rank alone."""
        return context.is_default(self.strategy)

    def _place(self) -> Place:
        """Return where the code runs, as this variable's strategy sees it; RuntimeError in another one's replicas."""
        if self._is_plain:
            return Place.COPY
        mode = context.current_mode()
        if mode.strategy is not self.strategy:
            self._require_own_replica(mode)
            return Place.ACROSS
        if mode.is_update:
            return Place.COPY
        return Place.ACROSS if mode.replica_context is None else Place.REPLICA

    def _require_own_replica(self, mode: context.Mode) -> None:
        """Raise RuntimeError in a replica of a strategy that is not the variable's: values would not be joined."""
        if mode.replica_context is None or context.is_default(mode.strategy):
            return
        if max(mode.strategy.num_replicas_in_sync, self.strategy.num_replicas_in_sync) > 1:
            raise RuntimeError(mixed_text(self, "is used", mode.strategy))

    def _write(self, verb: str, value: Any) -> DistributedVariable:
        value, place = self._converted(value), self._place()
        if place is Place.ACROSS and self._is_on_read:
            value = self._share_of(verb, value)
        elif place is Place.REPLICA and not self._is_on_read:
            value = self._aggregated(value)
        self._put(verb, value)
        return self

    def _put(self, verb: str, value: Any) -> None:
        """Set all of it, or add or subtract."""
        function = VERBS[verb]
        if function is None:
            self._change(verb, lambda storage: _set(storage, value), sets_all=True)
        else:
            self._change(verb, lambda storage: function(storage, value, out=storage))

    def _scatter(self, verb: str, rows: Any) -> DistributedVariable:
        self._put_rows(verb, self._rows_for(verb, rows))
        return self

    def _put_rows(self, verb: str, rows: IndexedSlices) -> None:
        """Change some rows."""
        self._change(verb, lambda storage: arrays.change_rows(storage, rows.indices, rows.values, VERBS[verb]))

    def _rows_for(self, verb: str, rows: Any) -> IndexedSlices:
        """Return what is written, after a look at the argument; Collective or Local as the methods are."""
        if not isinstance(rows, IndexedSlices):
            raise TypeError(f"sparse_delta is not IndexedSlices: {verb} got {type(rows).__name__}")
        if not self._is_plain:
            self._check_scatter(verb)
        rows.check(self.shape)
        if verb in _WITHOUT_MEAN and self.aggregation is VariableAggregation.MEAN and self._place() is Place.REPLICA:
            raise NotImplementedError(
                f"{verb} in a replica has no mean over the replicas (variable {self.name!r}): each would multiply the "
                "row by its factor. Use the aggregation ONLY_FIRST_REPLICA, or SUM, which applies the factors of all; "
                "or write across replicas, in the function given to `get_replica_context().merge_call`"
            )
        return self._rows_to_write(IndexedSlices(self._of_own_dtype(rows.values), rows.indices))

    def _check_scatter(self, verb: str) -> None:
        """Raise NotImplementedError for what rows of several replicas, or of copies that differ, cannot do."""
        if self._is_on_read:
            raise NotImplementedError(
                f"{verb} is not supported for variables that are synchronized on read (variable {self.name!r})"
            )
        if verb in _NOT_OF_AGGREGATES and self.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
            raise NotImplementedError(
                f"{verb} is only supported for mirrored variable (variable created within certain "
                "`tf.distribute.Strategy` scope) with NONE or `ONLY_FIRST_REPLICA` aggregation, got: "
                f"VariableAggregation.{self.aggregation.name} (variable {self.name!r})."
            )

    def _change(self, verb: str, change: Callable[[Any], None], sets_all: bool = False) -> None:
        """Call what changes the array; `sets_all` if it sets every element.  Local.

        TornVariableError where the variable is torn, and `change` does not set all of it.
        """
        change(self._to_write(sets_all))
        self.note_change()
        if sets_all:
            self._torn = None

    def _torn_error(self) -> TornVariableError:
        return TornVariableError(
            f"variable {self.name!r} is torn: {self._torn}. Its value is neither the old nor the new one. Set all of "
            "it with `assign`, or restore a checkpoint"
        )

    def _converted(self, value: Any) -> Any:
        value = value.value if isinstance(value, DistributedVariable) else value
        array = arrays.to_array(value)
        if array.shape != self.shape:
            raise ValueError(f"variable {self.name!r} has shape {self.shape}, got a value of shape {array.shape}")
        return self._of_own_dtype(array)

    def _of_own_dtype(self, values: Any) -> Any:
        if values.dtype == self.dtype:
            return arrays.in_memory_of(self._storage, values)
        return arrays.in_memory_of(self._storage, as_dtype(self.name, values, self.dtype))

    @property
    def _is_shared(self) -> bool:
        """Whether several replicas write to one copy, and not each to its own."""
        return False

    def _require_aggregation(self) -> None:
        """Raise ValueError for one copy without an aggregation: the values of several replicas could not be joined."""
        if self._is_shared and self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                "You must specify an aggregation method to update a AggregatingVariable in Replica Context: the "
                f"replicas share one copy of variable {self.name!r}, and each gives a value of its own. Make it with "
                "`aggregation` SUM, MEAN or ONLY_FIRST_REPLICA, or write it across replicas, in the function given to "
                "`get_replica_context().merge_call`"
            )

    def _aggregated(self, value: Any) -> Any:
        """Return what a write in a replica writes to every copy."""
        self._require_aggregation()
        if self.aggregation is VariableAggregation.NONE:
            return value
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self.strategy.extended.broadcast_to(value, self)
        return self.strategy.extended.reduce_arrays(self._reduce_op(), [value], destinations=[self])[0]

    def _rows_to_write(self, rows: IndexedSlices) -> IndexedSlices:
        if self._place() is not Place.REPLICA:
            return rows
        self._require_aggregation()
        if self.aggregation is VariableAggregation.NONE:
            return rows
        extended = self.strategy.extended
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA and extended.replica_id:
            rows = IndexedSlices(rows.values[:0], rows.indices[:0])
        if self.aggregation is VariableAggregation.MEAN:
            rows = IndexedSlices(rows.values / self.dtype.type(extended.num_replicas), rows.indices)
        return extended.gather_rows(rows)

    def _aggregate_of_copies(self) -> Any:
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self.strategy.extended.broadcast_to(self.live.copy(), self)
        return self.strategy.extended.reduce_arrays(self._reduce_op(), [self.live.copy()], destinations=[self])[0]

    def _share_of(self, verb: str, value: Any) -> Any:
        """Return what a write across replicas does to every copy of a variable that is synchronized on read."""
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA or self._reduce_op() is ReduceOp.MEAN:
            return value
        if verb != "assign":
            raise ValueError(
                f"SyncOnReadVariable does not support `{verb}` in cross-replica context when aggregation is set to "
                f"`tf.VariableAggregation.SUM` (variable {self.name!r})."
            )
        replicas = self.strategy.num_replicas_in_sync
        if self.dtype.kind not in "iu":
            return value / self.dtype.type(replicas)
        return numpy.sign(value) * (numpy.abs(value) // replicas)  # towards zero, as TensorFlow: 7 on 2 is 3 and 3

    def _share_to_restore(self, total: Any) -> Any:
        """Return what this rank's copy is to be of a saved aggregate."""
        share, extended = self._share_of("assign", total), self.strategy.extended
        is_summed = self.aggregation is VariableAggregation.SUM and self.dtype.kind in "iu"
        return total - share * (extended.num_replicas - 1) if is_summed and extended.replica_id == 0 else share

    def _reduce_op(self) -> ReduceOp:
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"Could not convert from `tf.VariableAggregation` {self.aggregation} to `tf.distribute.ReduceOp` type: "
                f"variable {self.name!r} is synchronized on read and has no aggregation, so its copies have no common "
                "value; read it in `strategy.run`"
            )
        return ReduceOp[self.aggregation.name]


def mixed_text(variable: DistributedVariable, what: str, strategy: Any) -> str:
    """Return the message about a variable in a replica of a strategy which is not its own."""
    return (
        f"Mixing different tf.distribute.Strategy objects: variable {variable.name!r} was created in the scope of "
        f"{variable.strategy}, and {what} in `run` of {strategy}; make one strategy, or {OWN_SCOPE}"
    )


def begin_writing(variables: Sequence[DistributedVariable]) -> None:
    """Take note that the arrays of variables are about to be written, as `storage` does for one.  Local.

    TornVariableError where an update of one of them was broken off in the middle.
    """
    for variable in variables:
        if variable._torn is not None:
            raise variable._torn_error()
    note_changes(variables)


def note_changes(variables: Sequence[DistributedVariable]) -> None:
    """Do what `DistributedVariable.note_change` does for each of some variables.  Local."""
    for variable in variables:
        variable._changes += 1


def _storage(value: Any, dtype: Any, name: str | None) -> Any:
    """Return a C-contiguous array of our own with the initial value."""
    if value is None:
        raise ValueError(f"variable {name or 'Variable'!r} needs an initial value, got None")
    is_array = hasattr(value, "dtype")
    array = arrays.to_array(value.value if isinstance(value, DistributedVariable) else value)
    if dtype is None:
        dtype = array.dtype if is_array else _TENSORFLOW_DTYPES.get(array.dtype.kind, array.dtype)
    for each in (array.dtype, numpy.dtype(dtype)):  # of the value first: text that looks like a number could be cast
        if not arrays.has_numbers(each):
            raise UnsupportedDtypeError(
                f"variable {name or 'Variable'!r} holds numbers or truth values, got dtype {each}: {repr(value)[:80]}"
            )
    with numpy.errstate(invalid="ignore"):  # what is cut off is an error below
        own = array.astype(numpy.dtype(dtype).newbyteorder("="), order="C", copy=True)
    _require_same(name or "Variable", array, own)
    return own


def as_dtype(name: str, values: Any, dtype: Any) -> Any:
    """Return values in a variable's dtype, as new ones.  Local.

    TypeError for another kind of numbers, such as floats for integers; ValueError for integers that it does not hold.
    """
    if not numpy.can_cast(values.dtype, dtype, "same_kind"):
        raise TypeError(f"variable {name!r} is {dtype}, got a value of dtype {values.dtype}; convert it")
    own = values.astype(dtype)
    _require_same(name, values, own)
    return own


def _require_same(name: str, values: Any, own: Any) -> None:
    """Raise ValueError where integers are others than the values that they were made of: cut off, or wrapped."""
    if own.dtype.kind in "iu" and values.dtype != own.dtype and values.dtype.kind != "b" and (own != values).any():
        raise ValueError(
            f"variable {name!r} is {own.dtype}, which does not hold all of its values: give whole numbers between "
            f"{numpy.iinfo(own.dtype).min} and {numpy.iinfo(own.dtype).max}, or another dtype"
        )


def _set(storage: Any, value: Any) -> None:
    storage[...] = value
