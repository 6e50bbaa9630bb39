"""`ClusterCoordinator`: the chief has the program, and schedules functions on the workers."""

from __future__ import annotations

import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mpidist import nest, own_process
from mpidist.cluster.server_roles import Roles
from mpidist.input.dataset import Dataset
from mpidist.input.distributed import DistributedDataset
from mpidist.parameter_server.coordinator import functions
from mpidist.parameter_server.coordinator.calls import Calls
from mpidist.parameter_server.coordinator.conversation import Conversation, Topic
from mpidist.parameter_server.coordinator.executor import FunctionExecutor
from mpidist.parameter_server.coordinator.functions import PROTOCOL, NotAnArgument
from mpidist.parameter_server.coordinator.group_executor import GroupExecutor
from mpidist.parameter_server.coordinator.packed import PackedValue, packed
from mpidist.parameter_server.coordinator.recovery import Restore
from mpidist.parameter_server.coordinator.values import PerWorkerDataset, PerWorkerIterator, RemoteValue
from mpidist.world import world_communicator

if TYPE_CHECKING:
    from mpidist.training.checkpoint_manager import CheckpointManager

#: How many scheduled functions may wait before `schedule` waits too.
_CAPACITY = 262144
#: How often `schedule` looks for answers, in seconds, when all workers have enough to do.
_LOOK_SECONDS = 1e-4


class ClusterCoordinator:
    """Schedules functions on the workers of a `ParameterServerStrategy`.

    On the chief it is made and returns.  On a worker this line is the last of the program: the rank runs the functions
    that the chief schedules, and ends when the chief's program ends.  Variables, optimizers and functions that the
    script makes before this line exist on all ranks; make variables there, in the same order everywhere.

    There is one for each strategy: making it again gives the same object.

    Parameters
    ----------
    strategy : ParameterServerStrategy

    Notes
    -----
    Functions travel by name where the workers have them, which are those of modules, and those of the script above this
    line; they use the worker's own global variables.  All others are carried by value, by the package cloudpickle,
    once, as they are when they are first scheduled: what changes later is to be passed as an argument.

    No thread works in the background.  Workers are given work, and results are taken in, whenever the program calls
    `schedule`, `join`, `done`, `fetch` or `RemoteValue.fetch`; each worker has a few milliseconds of work ahead.

    All methods are Local to the chief, and for one thread.

    Examples
    --------
    ::

        strategy = mpidist.ParameterServerStrategy(num_ps=1)
        with strategy.scope():
            w = mpidist.Variable(numpy.zeros(10, "float32"))
            optimizer = mpidist.optimizers.SGD(0.1)

        def step(iterator):
            x, y = next(iterator)
            ...
            optimizer.apply_gradients([(gradient, w)])
            return loss

        coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(1000)]
        coordinator.join()
        print(coordinator.fetch(losses[-1]))
    """

    strategy: Any
    _calls: Calls

    def __new__(cls, strategy: Any) -> ClusterCoordinator:
        """Return the coordinator of `strategy`; on a worker, run functions until the program of the chief ends."""
        coordinator = strategy._cluster_coordinator  # an AttributeError for other strategies, as in TensorFlow
        if coordinator is None:
            coordinator = super().__new__(cls)
            coordinator._begin(strategy)
            strategy._cluster_coordinator = coordinator
        return coordinator

    def _begin(self, strategy: Any) -> None:
        self.strategy = strategy
        rank = strategy._rank
        workers = _workers(strategy._roles)
        strategy._is_coordinated()
        for index, ranks in enumerate(workers):
            if rank in ranks:
                _execute(strategy, index, workers)
        if rank == strategy._roles.evaluator:
            raise RuntimeError(
                f"rank {rank} is the evaluator, which takes no part in the training: give it a SidecarEvaluator, "
                'and no ClusterCoordinator, where `strategy.cluster_resolver.task_type == "evaluator"`'
            )
        if workers:
            strategy._client.stand_aside()
            talks: dict[int, Conversation] = {
                index: Conversation(strategy._connections[ranks[0]]) for index, ranks in enumerate(workers)
            }
        else:
            talks = {0: WorkerHere(strategy._client)}
        self._calls = Calls(talks, _CAPACITY, f"rank {rank} (chief)", strategy._client.refresh)
        if workers and strategy._whole.control.settings.fault_tolerant:
            servers = {number: strategy._connections[server] for number, server in enumerate(strategy._roles.servers)}
            self._calls.watch_servers(strategy._client, servers, strategy._on_server_failure == "restore")
        self._next_look = 0.0
        own_process.at_exit(self._end)

    # -- scheduling ---------------------------------------------------------------------------------------------------

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Have `fn` run on some worker, at some time from now on, and return what stands for its result.

        Does not wait, unless 262144 functions wait already.  A function whose worker dies runs again on another one: it
        may have run before, in part or as a whole.

        Parameters
        ----------
        fn : callable
            Runs in the strategy's scope, on a worker.
        args : tuple or list
            Copied at once.  Each worker gets its own component of `PerWorkerValues`, such as the iterator of a
            `create_per_worker_dataset`.
        kwargs : dict, optional

        Raises
        ------
        Exception
            What a function that was scheduled earlier raised, once: then all that had not begun are cancelled.
        ValueError
            There is a `RemoteValue` among the arguments; or `args` is neither a tuple nor a list.
        TypeError
            An argument cannot be pickled.
        """
        calls = self._calls
        if calls.error is not None:
            calls.surface()
        if not args and not kwargs:
            payload: Any = None
        elif not kwargs and type(args) is tuple and len(args) == 1 and type(args[0]) is PerWorkerIterator:
            payload = args[0].number
        else:
            payload = _packed(fn, args, kwargs)
        call = RemoteValue(calls, calls.function(fn), payload)
        if len(calls.waiting) >= _CAPACITY:
            calls.make_room()
            calls.surface()
        calls.waiting.append(call)
        now = time.monotonic()
        if now > self._next_look:
            self._next_look = now + _LOOK_SECONDS
            calls.pump()
        elif calls.hungry:
            calls.feed()
        return call

    def join(self, timeout: float | None = None) -> None:
        """Wait until all scheduled functions are done; none is running on return.

        After MPIDIST_WARN_SECONDS a warning says which worker has been running which function for how long, and again
        each time twice as long has passed.

        Parameters
        ----------
        timeout : float, optional
            After how many seconds to give up waiting; never by default.  The functions go on.

        Raises
        ------
        Exception
            What the first function that failed raised, once.  All that had not begun are cancelled.
        FunctionTimeoutError
            The time is over; names the workers, their functions, and for how long they have been running them.
        ValueError
            The timeout is negative, or no number.
        """
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"the timeout of join must be 0 or more seconds, or None for no limit; got {timeout!r}")
        self._calls.wait_for_all(timeout)
        self._calls.surface()

    def done(self) -> bool:
        """Return whether all scheduled functions are done, without waiting.

        Raises
        ------
        Exception
            As `join`.
        """
        self._calls.pump()
        self._calls.surface()
        return not self._calls.waiting and not self._calls.running

    def fetch(self, val: Any) -> Any:
        """Return nested tuples, lists and dicts with the results in place of every `RemoteValue`, waiting for them.

        Raises
        ------
        Exception, CancelledError
            As `RemoteValue.fetch`.
        """
        leaves = [leaf.fetch() if isinstance(leaf, RemoteValue) else leaf for leaf in nest.flatten(val)]
        return nest.pack(val, leaves)

    # -- data sets of the workers -------------------------------------------------------------------------------------

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Give every worker a data set of its own.

        Every worker has all of it: nothing is dealt, unless it comes from `Strategy.distribute_datasets_from_function`,
        whose context counts the workers.  Shuffle with a seed that depends on
        `experimental_get_current_worker_index` to have them go through it in different orders.

        Parameters
        ----------
        dataset_fn : callable or Dataset
            A function that returns a data set is called on every worker.

        Returns
        -------
        PerWorkerDataset
            ``iter()`` of it is an iterator on every worker, to be passed to scheduled functions.  A function that asks
            for more elements than there are fails with an OutOfRangeError.

        Raises
        ------
        ValueError
            The data set was distributed before there was a coordinator, and has the chief's part of the rows.
        """
        if isinstance(dataset_fn, DistributedDataset) and self.strategy._connections:
            raise ValueError(
                "this data set was distributed before the ClusterCoordinator was made, and has the chief's part of "
                "the rows, which every worker would get. Distribute it below the ClusterCoordinator line, or in the "
                "function that you give to create_per_worker_dataset"
            )
        calls = self._calls
        is_function = callable(dataset_fn) and not isinstance(dataset_fn, Dataset)
        spec = getattr(dataset_fn, "element_spec", None)
        if is_function:
            function = calls.function(dataset_fn)
            number, definition = function.number, function.definition
        else:
            number, definition = calls.new_number(), _carried_dataset(dataset_fn)
        made = calls.new_number()
        calls.tell(Topic.DATASET, made, number, definition)
        return PerWorkerDataset(made, self._iterate, spec)

    def _iterate(self, dataset: int) -> PerWorkerIterator:
        number = self._calls.new_number()
        self._calls.tell(Topic.ITERATOR, number, dataset)
        return PerWorkerIterator(number)

    # -- servers that die ---------------------------------------------------------------------------------------------

    def restore_from(
        self, checkpoint_manager: CheckpointManager, on_restore: Callable[[Restore], object] | None = None
    ) -> None:
        """Say what to restore when a server dies, in a fault-tolerant job with ``on_server_failure="restore"``.

        The dead server's variables are made again on the others.  All that the newest checkpoint holds goes back to
        what it was there, so that it belongs together.  Functions that could not be finished run again, and so does a
        read, write or save of the chief's program that met the end of the server.  Functions that had finished since
        the checkpoint are undone, and do not run again: `on_restore` and `restores` say how many.

        Parameters
        ----------
        checkpoint_manager : CheckpointManager
            Of a checkpoint with all variables and optimizers.  A metric that is not in it, and whose server dies,
            begins anew.
        on_restore : callable, optional
            Called on the chief as ``on_restore(restore)`` after each `Restore`, in the call that has noticed the loss.
            It may schedule functions.
        """
        if self._calls.recovery is not None:
            self._calls.recovery.manager = checkpoint_manager
            self._calls.recovery.on_restore = on_restore

    @property
    def restores(self) -> tuple[Restore, ...]:
        """What was restored after servers had died, in order.  Local."""
        return () if self._calls.recovery is None else tuple(self._calls.recovery.restores)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Let the workers end, when the program of the chief does."""
        own_process.not_at_exit(self._end)
        self._calls.end()

    def __reduce__(self) -> NoReturn:
        raise NotAnArgument("a ClusterCoordinator belongs to the chief: scheduled functions cannot schedule functions")

    def __repr__(self) -> str:
        return f"<ClusterCoordinator of {len(self._calls.worker_ends)} workers>"


def _workers(roles: Roles) -> list[tuple[int, ...]]:
    """Return the ranks of every worker; none where there is one process only, which is its own worker."""
    if not roles.servers:
        return []
    workers = [ranks for ranks in roles.trainers if roles.chief not in ranks]
    if roles.chief is None:
        raise ValueError(
            f"a ClusterCoordinator needs a rank whose role is chief, and there is none ({roles.source}): start one "
            f"rank more, or set MPIDIST_ROLES=chief:1,worker:{sum(map(len, workers))},ps:{len(roles.servers)}"
        )
    return workers


def _execute(strategy: Any, index: int, workers: Sequence[Sequence[int]]) -> NoReturn:
    """Be a worker, or one of its ranks, until the chief's program ends."""
    name = f"rank {strategy._rank} (worker {index})"
    connection = strategy._connections.get(strategy._roles.chief)
    chief = None if connection is None else Conversation(connection)
    place = (strategy._client, index, len(workers), name)
    if len(workers[index]) > 1:
        executor: FunctionExecutor = GroupExecutor(chief, *place, world_communicator())
    else:
        assert chief is not None
        executor = FunctionExecutor(chief, *place)
    with strategy.scope():
        executor.serve()
    sys.exit(0)


def _packed(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes | PackedValue:
    """Return arguments as they are now."""
    if not isinstance(args, (list, tuple)):
        raise ValueError(f"positional args must be a list or tuple, got {type(args)}")
    arguments = (tuple(args), dict(kwargs or {}))
    try:
        return packed(arguments)
    except (pickle.PicklingError, AttributeError, TypeError):
        return functions.carried(arguments, f"an argument of {functions.name_of(fn)}")


def _carried_dataset(dataset: Any) -> bytes:
    try:
        return pickle.dumps((dataset, ""), PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        return functions.carried((dataset, ""), "a function of the data set")


class WorkerHere(Conversation):
    """The talk of the chief with itself as a worker."""

    def __init__(self, client: Any) -> None:
        self._answers: deque[tuple[Any, ...]] = deque()
        self._executor = FunctionExecutor(_ChiefHere(self._answers), client, 0, 1, "this process")

    def say(self, *content: Any) -> None:
        """Have it done, now; its optimizers are the chief's, which have been restored already."""
        if content[0] not in (Topic.CANCEL, Topic.END, Topic.RESTORED):
            self._executor.do(*content)

    def hear(self) -> tuple[Any, ...] | None:
        return self._answers.popleft() if self._answers else None

    @property
    def peer_name(self) -> str:
        return "this process"

    @property
    def is_lost(self) -> bool:
        return False


class _ChiefHere(Conversation):
    """The other end: what the worker says is an answer, and there is never more to be heard."""

    def __init__(self, answers: deque[tuple[Any, ...]]) -> None:
        self._answers = answers

    def say(self, *content: Any) -> None:
        self._answers.append(content)

    def hear(self) -> None:
        return None

    def patience(self, what: str) -> NoReturn:
        """Raise: a function that this process knows by name uses something that it does not have, nor anybody else."""
        _, _, why = self._answers.pop()
        raise NameError(f"{why}: not defined")
