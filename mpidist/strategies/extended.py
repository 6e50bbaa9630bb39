"""`StrategyExtended`: what library code asks of a strategy; here of one replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy

from mpidist import context, transports
from mpidist.arrays import empty, is_device
from mpidist.cluster.resolvers.tf_config import check_all_joined, tasks_that_train
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.engine import Engine
from mpidist.collectives.structures import like_given
from mpidist.context import T
from mpidist.cross_device_ops import check_pairs
from mpidist.device.cards import card_text
from mpidist.errors import quoted
from mpidist.input.agreement import Agreement
from mpidist.input.dataset import Dataset
from mpidist.input.distributed import DistributedDataset, as_dataset, copies_to, distributed
from mpidist.input.from_function import InputContext
from mpidist.input.options import InputOptions
from mpidist.input.own_feeds import FunctionFeed
from mpidist.optimizers.base import Optimizer
from mpidist.optimizers.updates.local import LocalUpdates
from mpidist.optimizers.updates.updates import Updates
from mpidist.options import CommunicationOptions, ReduceOp, VariableSynchronization
from mpidist.strategies.devices_of_ranks import take_device
from mpidist.variables import Arenas, DistributedVariable, IndexedSlices
from mpidist.variables.components import component


class StrategyExtended:
    """The part of a strategy that library code uses: `Strategy.extended`.  Here for one replica.

    With one replica every reduction, broadcast and gathering gives back what it got.

    Parameters
    ----------
    strategy : Strategy
    device_name : str
        The full name of this replica's device.  A GPU becomes CuPy's current device, in this thread.
    communicator : Communicator, optional
        Of the ranks that train together.

    Attributes
    ----------
    num_replicas : int
    replica_id : int
        This rank's replica.
    device_name : str
    cards : tuple of Card or None
        By rank its GPU; empty where no rank may have one.
    card_text : str
        This rank's GPU and the ranks that share it; empty where it has none.
    """

    num_replicas = 1
    replica_id = 0
    #: How many ranks a replica is made of, and which of them this one is: more than one for `TPUStrategy` only.
    num_logical_devices = 1
    logical_device = 0
    #: Whether all replicas count as one worker, so that data sets are cut exactly whatever their sharding policy.
    is_one_worker = False
    #: What TensorFlow asks of TPUs only.
    experimental_require_static_shapes = False
    #: Whether all ranks see the same variables, of which there is one copy.
    has_one_copy = False
    #: Whether somebody made the strategy to train with it: then the tasks of TF_CONFIG must be in its world.
    is_for_training = True
    #: Whether the chief has a coordinator, which calls functions on the workers.
    has_coordinator = False
    #: Counts the collective calls of this rank: a control channel, where there are any.
    _control: Any = SimpleNamespace(call=0)

    def __init__(self, strategy: Any, device_name: str, communicator: Communicator | None = None) -> None:
        if self.is_for_training:
            _check_tasks()
        self._strategy = strategy
        self.made_in = transports.innermost()  # and so it is in force inside `scope` and `run`
        self._call_inside: Callable[..., Any] = context.call_inside
        self._replica_mode: context.Mode | None = None  # made by the first run, and the same in all
        self._told: BaseException | None = None  # by a run inside the one that is under way: its last error
        # By the ids of variables that the entry keeps: the variables, and their buffers.
        self._gradient_buffers: dict[tuple[int, ...], tuple[list[DistributedVariable], list[Any]]] = {}
        self.device_name = device_name
        self.cards = take_device(device_name, communicator)
        self.card_text = card_text(0 if communicator is None else communicator.rank, self.cards)
        self._arenas = Arenas()
        self._lone_communicator: Communicator | None = None
        self.adapters: dict[str, Any] = {}  # by name: what is kept of this strategy above, as long as it is there
        self._names: dict[str, int] = {}  # name -> the number that the next variable of that name gets

    # -- running ------------------------------------------------------------------------------------------------------

    def call_for_each_replica(
        self, fn: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> T:
        """Call `fn` in this rank's replica context and return what it returns.  Local; `fn` may call collectives."""
        begun_at, told_outside, self._told = self._control.call, self._told, None
        try:
            context.require_cross_replica(self._strategy)
            if self._replica_mode is None:
                self._replica_mode = context.Mode(self._strategy, self._strategy._make_replica_context())
            result = self._call_inside(self._replica_mode, fn, args, kwargs)
        except BaseException as error:
            is_known = self._tell(error, begun_at)
            # only while a run outside lasts: an error keeps all that the step had
            self._told = error if is_known and context.is_inside_replica() else None
            told_outside = None
            raise
        self._told = told_outside
        return result

    def _tell(self, error: BaseException, begun_at: int) -> bool:
        """Tell the other ranks of an error in a run begun after that many calls; return whether they know of it."""
        return False

    @property
    def spans_ranks(self) -> bool:
        """Whether several ranks train the variables of this strategy."""
        return self.num_replicas * self.num_logical_devices > 1

    @property
    def trainers(self) -> tuple[int, tuple[int, ...]] | None:
        """This rank of the job and the ranks that train, where these train by themselves; None where together."""
        return None

    @property
    def is_alone(self) -> bool:
        """Whether no other process trains anything together with this one."""
        return not self.spans_ranks

    @property
    def is_chief(self) -> bool:
        """Whether this rank is the one that writes files and shows progress."""
        return self.replica_id == 0

    def any_in_replica(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank of this replica.  Local; Collective where a replica is a group."""
        return flag

    def first_in_replica(self, value: float) -> float:
        """Return the number of this replica's first rank.  Local; Collective where a replica is a group."""
        return value

    def update(
        self,
        variable: DistributedVariable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(variable, *args, **kwargs)`` where writing sets this rank's copy as it is.  Local.

        It may be called in a replica as well; the code of `fn` is in a cross-replica context.

        Parameters
        ----------
        variable : DistributedVariable
            Of this strategy.
        fn : callable
        args, kwargs
            What every rank passes alike, or copies will differ.
        group : bool
            False returns a tuple with the result of each local copy, of which there is one.

        Raises
        ------
        ValueError
            The variable belongs to another strategy.
        """
        if not self.variable_created_in_scope(variable):
            raise ValueError(
                f"`update` must be given a variable created in the scope of {self._strategy!r}: {quoted(variable)}"
            )
        with context.entered(context.Mode(self._strategy, None, is_update=True)):
            result = fn(variable, *args, **(kwargs or {}))
        return result if group else (result,)

    # -- communication ------------------------------------------------------------------------------------------------

    def reduce_arrays(
        self,
        reduce_op: ReduceOp,
        values: list[Any],
        options: CommunicationOptions | None = None,
        destinations: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Return arrays reduced over all replicas, in one fused call.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        reduce_op : ReduceOp
        values : list of array
            This rank's components, none too: that is a call nevertheless, or the next one would be taken for it.
            `IndexedSlices` are reduced to those of the rows that any replica has.
        options : CommunicationOptions, optional
        destinations : sequence, optional
            What the values are for; a variable lends its name to messages about its gradient.
        """
        self._before_collective()
        return values

    def engine(self, options: CommunicationOptions | None = None) -> Engine | None:
        """Return what reduces lists of arrays over all replicas; None: each value passes through `reduce_arrays`.

        Local; the same on all ranks.
        """
        return None

    def updates(self, optimizer: Optimizer, present: Updates | None) -> Updates:
        """Return what carries out an optimizer's steps on variables of this strategy: `present` if it can.  Local.

        Parameters
        ----------
        optimizer : Optimizer
        present : Updates or None
            What has done so until now; None for a new optimizer, which is made in this strategy's scope.
        """
        return LocalUpdates(optimizer.slot_names, optimizer.initial_slots()) if present is None else present

    def pull(self, own_first: bool = True) -> None:
        """Have the next reading give what servers have then; `own_first`, with this worker's gradients.  Local."""

    def adopt_metric(self, metric: Any) -> None:
        """Take note of a metric that was made in this strategy's scope.  Local."""

    def gradient_buffers(self, variables: Sequence[DistributedVariable]) -> list[Any]:
        """Return arrays to write the gradients of these variables into; on one node, all its ranks see them.

        Given to `apply_gradients` or to the replica context's `all_reduce`, the whole list in its order, they are
        reduced where they are, without being copied first.  What `all_reduce` returns for them can only be read: it
        is one array for all ranks.  The memory, twice the model's size and one more for each result that is held, is
        kept as long as the strategy is.

        Collective: every rank calls it in the same order.  The same variables get the same arrays again.

        Parameters
        ----------
        variables : sequence of Variable

        Returns
        -------
        list of array
            In each variable's shape and dtype; zeros at first.  Where the ranks share no memory, or there is one only,
            arrays like any other.

        Raises
        ------
        UnsupportedDtypeError
            A variable of 16 bits.
        TransportError
            On all ranks: there is not so much shared memory.
        """
        key = tuple(map(id, variables))
        if key not in self._gradient_buffers:
            self._gradient_buffers[key] = (list(variables), self._make_gradient_buffers(variables))
        return list(self._gradient_buffers[key][1])

    def _make_gradient_buffers(self, variables: Sequence[DistributedVariable]) -> list[Any]:
        buffers = [empty(variable.shape, variable.dtype, variable.live) for variable in variables]
        for buffer in buffers:
            buffer[...] = 0
        return buffers

    @property
    def collectives(self) -> Communicator:
        """The communicator of the replicas; here of one rank."""
        self._before_collective()
        if self._lone_communicator is None:
            self._lone_communicator = Communicator(transports.alone())
        return self._lone_communicator

    def timeout_seconds(self, options: CommunicationOptions | None) -> float | None:
        """Return how long a call with these options waits for other replicas; None for the default.  Local."""
        return None if options is None else options.timeout_seconds

    def begin_merge_call(self) -> None:
        """Return when all replicas have come to this `merge_call`.  Collective."""

    def gather_rows(self, rows: IndexedSlices) -> IndexedSlices:
        """Return the rows of all replicas, one after another in replica order.  Collective."""
        self._before_collective()
        return rows

    def gather_array(
        self, value: Any, axis: int, options: CommunicationOptions | None = None, paths: tuple[str, ...] = ()
    ) -> numpy.ndarray:
        """Return the arrays of all replicas joined along `axis`; ranks compare the `paths`.  Collective."""
        self._before_collective()
        return value

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Return replica 0's `tensor` on every rank.  Collective."""
        self._before_collective()
        return tensor

    def _before_collective(self) -> None:
        """Take note that one replica is about to reduce nothing.  Local."""

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce a value over all replicas; every rank gets the result, whatever the `destinations`.  Collective."""
        return self.batch_reduce_to(reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several values over all replicas in one fused call; the results are in the order of the pairs.

        Collective: every rank calls it in the same order, across replicas.
        """
        context.require_cross_replica(self._strategy)
        pairs = list(value_destination_pairs)
        check_pairs(pairs)
        values, destinations = [value for value, _ in pairs], [wanted for _, wanted in pairs]
        for wanted in destinations:
            if isinstance(wanted, (list, tuple)):
                raise TypeError(f"destinations must be one device, array or variable, got {wanted!r}")
        results = self.reduce_arrays(ReduceOp.parse(reduce_op), [*map(component, values)], options, destinations)
        return [like_given(*pair) for pair in zip(results, values, strict=True)]

    # -- input --------------------------------------------------------------------------------------------------------

    def distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> Any:
        """Return this replica's parts of global batches: here all rows, and what has no batches as it is.  Local."""
        if not isinstance(dataset, Dataset) or not dataset.is_batched:
            return dataset
        return distributed(dataset, 0, 1, self._agreement(), True, options, copies_to(self.device_name))

    def distribute_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return the batches of the data set that a function makes on every rank.  Collective when iterated."""
        number, replicas = self.replica_id, self.num_replicas
        dataset = dataset_fn(InputContext(replicas, number, replicas))
        feed = FunctionFeed(as_dataset(dataset)._stage, number, replicas, self._agreement())
        return DistributedDataset(dataset, number, replicas, feed, options, copies_to(self.device_name))

    def _agreement(self) -> Agreement:
        """Return what has the ranks compare their data sets."""
        return Agreement()

    # -- variables ----------------------------------------------------------------------------------------------------

    def unique_name(self, name: str) -> str:
        """Return `name`, with a number if the strategy has a variable of that name.  Local."""
        candidate = name
        while candidate in self._names:
            candidate = f"{name}_{self._names[name]}"
            self._names[name] += 1
        self._names[candidate] = 1
        return candidate

    def new_variable(self, storage: Any, **attributes: Any) -> DistributedVariable:
        """Return a variable with these attributes (see `DistributedVariable`) that begins with the chief's `storage`.

        Collective where there are several replicas: every rank calls it in the same order.
        """
        block_slice = None
        is_mirrored = attributes["synchronization"] is VariableSynchronization.ON_WRITE
        if is_mirrored and attributes["trainable"] and not is_device(storage):
            block_slice = self._arenas.take(storage.size, storage.dtype)
        variable = DistributedVariable(storage, strategy=self._strategy, block_slice=block_slice, **attributes)
        self.share_initial_value(variable)
        return variable

    def share_initial_value(self, variable: DistributedVariable) -> None:
        """Give every copy of a new variable the chief's value.  Collective where there are several replicas."""

    def split(self, variable: DistributedVariable, partition_dimensions: Sequence[int]) -> DistributedVariable:
        """Return a variable of which each logical device of a replica holds a part.  Local; here there is one part."""
        return variable

    def variable_created_in_scope(self, variable: DistributedVariable) -> bool:
        """Return whether the variable was created in this strategy's scope.  Local."""
        return variable.strategy is self._strategy

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: DistributedVariable) -> Iterator[None]:
        """Create variables beside another one.  Local; here all variables are on all replicas anyway.

        Raises
        ------
        RuntimeError
            Outside of this strategy's scope.
        ValueError
            The variable belongs to another strategy.
        """
        if context.get_strategy() is not self._strategy:
            raise RuntimeError(f'Need to be inside "with strategy.scope()" for {self._strategy!r}')
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(
                f"`colocate_vars_with` must only be passed a variable created in this tf.distribute.Strategy.scope(), "
                f"not: {colocate_with_variable!r}"
            )
        yield

    def value_container(self, value: Any) -> Any:
        """Return what holds the components of a value: the value itself, which is this rank's.  Local."""
        return value

    # -- devices ------------------------------------------------------------------------------------------------------

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices of the replicas that this strategy knows by name."""
        return (self.device_name,)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold copies of the variables."""
        return self.worker_devices

    def non_slot_devices(self, variables: Sequence[DistributedVariable]) -> tuple[str, ...]:
        """Return the devices for an optimizer's variables that belong to no other variable.  Local."""
        return self.parameter_devices


def _check_tasks() -> None:
    """Raise LaunchError if TF_CONFIG has more tasks that train than the world this process joined."""
    tasks = tasks_that_train()
    whole = transports.joined() if tasks > 1 else None  # a world that the user gave is the user's to know
    if whole is not None:
        check_all_joined(tasks, whole.topology.size)
