"""What library code uses of `ParameterServerStrategy`: how its variables are made, and what they are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

import mpidist.errors
from mpidist import context
from mpidist.arrays import on_host
from mpidist.cluster.devices import Device
from mpidist.collectives.communicator import Communicator
from mpidist.context import T
from mpidist.cross_device_ops import AllReduceCrossDeviceOps
from mpidist.errors import MpidistError
from mpidist.input.from_function import InputContext
from mpidist.optimizers.base import Optimizer
from mpidist.optimizers.updates.updates import Updates
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.parameter_server import registry
from mpidist.parameter_server.client.served_sums import ServedSums
from mpidist.parameter_server.client.served_updates import ServedUpdates
from mpidist.parameter_server.client.served_variable import ServedVariable, ShardedVariable
from mpidist.parameter_server.coordinator.values import on_worker
from mpidist.parameter_server.layout import VariableSpec
from mpidist.parameter_server.placement import Placement, shard_count, shard_offsets
from mpidist.strategies.extended import StrategyExtended
from mpidist.strategies.mirrored_extended import MirroredExtended
from mpidist.strategies.workers import Workers
from mpidist.variables import DistributedVariable

if TYPE_CHECKING:
    from mpidist.input.options import InputOptions
    from mpidist.strategies.parameter_server import ParameterServerStrategy


#: How long a word of the first worker is.
_WORD_BYTES = 1 << 12


class ServedExtended(Workers, StrategyExtended):
    """The part for workers of any number of ranks; `number` counts the workers, the chief first."""

    _strategy: ParameterServerStrategy
    number: int
    _colocated: ServedVariable | None = None
    _words = 0
    _serves_metrics = False
    train_apart = True

    @property
    def is_alone(self) -> bool:
        """Never: servers hold the variables, and any number of workers write them."""
        return False

    def serves(self, client: Any, number: int, partitioner: Callable[..., Any] | None, placement: Placement) -> None:
        """Begin to use a client, as the worker of a number."""
        self._client, self.number = client, number
        self._partitioner, self._placement = partitioner, placement
        self._registry = registry.Registry(client, self)
        registry.install(self._registry)

    # -- who this is --------------------------------------------------------------------------------------------------

    @property
    def is_chief(self) -> bool:
        """Whether this rank writes files and shows progress: the first of the first worker."""
        return self.number == 0 and self.replica_id == 0

    @property
    def spans_ranks(self) -> bool:
        """Whether the job has other ranks: servers hold the variables, or other workers train them."""
        return len(self._strategy._roles.tasks) > 1

    @property
    def trainers(self) -> tuple[int, tuple[int, ...]]:
        """This rank of the job, and the ranks of all workers."""
        return self._strategy._rank, tuple(sorted(rank for each in self._strategy._roles.trainers for rank in each))

    @property
    def has_other_workers(self) -> bool:  # type: ignore[override]
        """Whether other workers train besides this one."""
        return len(self._strategy._roles.trainers) > 1

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices of the servers."""
        count = len(self._strategy._roles.servers)
        if not count:
            return self.worker_devices
        return tuple(Device("CPU", 0).name_in("ps", index) for index in range(count))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def writes_checkpoints(self) -> bool:  # type: ignore[override]
        """Whether this worker writes checkpoints, and restores what servers hold: the first does.

        RuntimeError in a scheduled function, whose chief does both.
        """
        if self._serves_metrics and not self.has_coordinator and self.number:
            raise RuntimeError(
                "a function that a ClusterCoordinator has scheduled saves and restores no checkpoints: let the program "
                "of the chief do it, below coordinator.join()"
            )
        return self.number == 0

    def undivided(self, act: Callable[[], T]) -> T:
        """See `Client.undivided`."""
        return self._client.undivided(act)

    def note_saved(self, path: Path) -> None:
        """Have what watches the servers know the checkpoint to go back to.  Local."""
        if self._registry.on_save is not None:
            self._registry.on_save(path)

    def pull(self, own_first: bool = True) -> None:
        """Have the next reading give what servers have then.  Local; collective among the ranks of a worker."""
        if own_first:
            self._client.flush()
        self._client.refresh()

    def by_first_worker(self, fn: Callable[[], str | None], timeout_seconds: float | None = None) -> str | None:
        """Call a function in the first worker; return its short text, or raise its MpidistError, in all of them.

        Before, all that workers have pushed is applied: no step from before it changes what it restores.  Collective
        where every worker runs the program; a chief with a coordinator calls it alone, and waits for all functions
        that it has scheduled.
        """
        is_first = self.writes_checkpoints
        if self.has_coordinator:
            return self._strategy._cluster_coordinator._calls.between_calls(fn)
        self._client.meet(self._words, timeout_seconds)
        # the word goes by way of server 0, as a variable
        spec = VariableSpec(
            (registry.WORDS + self._words, 0), f"word {self._words}", (_WORD_BYTES,), numpy.dtype("uint8")
        )
        self._words += 1
        if is_first:
            try:
                text = fn()
            except MpidistError as error:
                self._client.create(spec, 0, _encoded(type(error).__name__, str(error)))
                raise
            self._client.create(spec, 0, _encoded("", text))
            return text
        self._client.create(spec, 0, None)
        kind, text = json.loads(bytes(self._client.lookup(spec.key, numpy.arange(_WORD_BYTES))).rstrip(b"\0"))
        if kind:
            raise getattr(mpidist.errors, kind)(f"in the first worker: {text}")
        return text

    # -- running ------------------------------------------------------------------------------------------------------

    def call_for_each_replica(
        self, fn: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> T:
        """Call `fn` in this rank's replica context, with the servers' values of now.  Collective in a worker."""
        context.require_cross_replica(self._strategy)
        self._client.refresh()
        return super().call_for_each_replica(fn, args, kwargs)

    # -- variables ----------------------------------------------------------------------------------------------------

    def new_variable(self, storage: Any, **attributes: Any) -> DistributedVariable:
        """Return a variable on a server, or in shards on several; other workers wait until the chief has made it."""
        value = on_host(storage)
        return self._new_variable(value, self._shards(value, attributes["name"]), attributes)

    def _new_variable(self, value: numpy.ndarray, shards: int, attributes: Mapping[str, Any]) -> ServedVariable:
        number = max(self._registry.variables, default=-1) + 1
        offsets = shard_offsets(value.shape[0], shards) if shards > 1 else [0, 0]
        specs, servers = [], []
        for shard in range(shards):
            part = value[offsets[shard] : offsets[shard + 1]] if shards > 1 else value
            name = f"{attributes['name']}/part_{shard}" if shards > 1 else attributes["name"]
            spec = VariableSpec((number, shard), name, part.shape, part.dtype)
            server = self._place(spec.nbytes)
            self._client.create(spec, server, part if self._client.is_chief else None)
            specs.append(spec)
            servers.append(server)
        variable = self._variable(specs, servers, attributes)
        self._registry.variables[number] = variable
        return variable

    def described_variable(self, description: Mapping[str, Any]) -> ServedVariable:
        """Return a variable that another process of the job has made."""
        attributes = dict(description)
        specs = [VariableSpec.from_description(each) for each in attributes.pop("specs")]
        servers = attributes.pop("servers")
        for spec, server in zip(specs, servers, strict=True):
            self._client.create(spec, server, None)
        return self._variable(specs, servers, attributes)

    def _variable(
        self, specs: Sequence[VariableSpec], servers: Sequence[int], attributes: Mapping[str, Any]
    ) -> ServedVariable:
        kind = ShardedVariable if len(specs) > 1 else ServedVariable
        return kind(self._client, specs, servers, strategy=self._strategy, **attributes)

    def _shards(self, value: numpy.ndarray, name: str) -> int:
        if self._partitioner is None or self._colocated is not None or not value.shape:
            return 1
        return shard_count(self._partitioner(shape=value.shape, dtype=value.dtype), value.shape, name)

    def _place(self, nbytes: int) -> int:
        if self._colocated is None:
            return self._placement.place(nbytes)
        server = self._colocated.servers[0]
        self._placement.place_on(server, nbytes, counts=False)
        return server

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: DistributedVariable) -> Iterator[None]:
        """Create variables on the server of another one, and never in shards.  Local; errors as elsewhere."""
        with super().colocate_vars_with(colocate_with_variable):
            assert isinstance(colocate_with_variable, ServedVariable)
            before, self._colocated = self._colocated, colocate_with_variable
            try:
                yield
            finally:
                self._colocated = before

    # -- metrics ------------------------------------------------------------------------------------------------------

    def adopt_metric(self, metric: Any, number: int | None = None, variable: ServedVariable | None = None) -> None:
        """Number a metric; under a coordinator a server has its sums, perhaps in another process's variable.  Local."""
        # a metric that a scheduled function makes for itself is its worker's own
        if self._serves_metrics and not self.has_coordinator and number is None:
            return
        metrics = self._registry.metrics
        number = max(metrics, default=-1) + 1 if number is None else number
        metrics[number] = metric
        metric.strategy = self._strategy
        if self._serves_metrics:
            metric.remote = ServedSums(self, metric, number, variable)

    def serve_metrics(self) -> None:
        """Have servers keep the sums of all metrics from now on, as every rank does before a coordinator is made."""
        self._serves_metrics = True
        for number, metric in self._registry.metrics.items():
            metric.remote = ServedSums(self, metric, number)
            metric.remote.add()

    def new_sums(self, name: str, values: Any) -> ServedVariable:
        """Return a variable for the sums of a metric, which is never cut into shards."""
        attributes = {
            "name": self.unique_name(name),
            "trainable": False,
            "synchronization": VariableSynchronization.ON_READ,
            "aggregation": VariableAggregation.SUM,
        }
        variable = self._new_variable(values, 1, attributes)
        if self._client.is_chief:
            self._client.add(variable.key, numpy.zeros_like(values))
        return variable

    @property
    def has_coordinator(self) -> bool:  # type: ignore[override]
        """Whether this rank is a chief that has a coordinator."""
        return self._strategy._cluster_coordinator is not None

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def updates(self, optimizer: Optimizer, present: Updates | None) -> ServedUpdates:
        """Return what has the servers update an optimizer's variables; numbers the optimizer.  Local.

        RuntimeError where the optimizer was made outside of the scope, and has steps already, which servers would not
        know.
        """
        if isinstance(present, ServedUpdates):
            return present
        if present is not None and (present.iterations or present.has_met):
            raise RuntimeError(
                f"this {type(optimizer).__name__} has {present.iterations} steps and slots that are in this process, "
                "and updates a variable of servers for the first time; make it in `with strategy.scope():`, and "
                "restore it there"
            )
        return ServedUpdates(self._registry, optimizer, self._registry.add_optimizer(optimizer))

    def adopt_optimizer(self, optimizer: Optimizer, number: int) -> None:
        """Have the servers make the steps of an optimizer that came from another process.  Local."""
        optimizer._updates = ServedUpdates(self._registry, optimizer, number)

    def _make_gradient_buffers(self, variables: Sequence[DistributedVariable]) -> list[Any]:
        return StrategyExtended._make_gradient_buffers(self, variables)  # gradients go to the servers

    # -- input --------------------------------------------------------------------------------------------------------

    def distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> Any:
        """Return this replica's parts of a worker's batches; on a coordinator's chief, for its workers alone."""
        if self.has_coordinator and on_worker.index is None:  # one process alone is the chief and its worker by turns
            return _ForWorkers(self._strategy.experimental_distribute_dataset, dataset)
        return super().distribute_dataset(dataset, options)

    def distribute_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Return the batches of a function's data set; each rank that trains is an input pipeline.

        On a coordinator's chief, which does not train, for its workers alone.
        """
        if self.has_coordinator and self.has_other_workers:
            return _ForWorkers(self._strategy.distribute_datasets_from_function, dataset_fn)
        trainers = self._input_workers()
        before = sum(map(len, trainers[: trainers.index(self._strategy._roles.trainers[self.number])]))
        pipelines = sum(map(len, trainers))

        def make(own: InputContext) -> Any:
            return dataset_fn(InputContext(pipelines, before + self.replica_id, own.num_replicas_in_sync))

        return super().distribute_from_function(make, options)

    def _input_workers(self) -> list[tuple[int, ...]]:
        """Return the ranks of every worker that reads data: all but a chief that schedules."""
        roles = self._strategy._roles
        is_coordinated = self._serves_metrics and self.has_other_workers
        return [ranks for ranks in roles.trainers if not (is_coordinated and roles.chief in ranks)]


class SingleExtended(ServedExtended):
    """For workers of one rank."""

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        super().__init__(strategy, _device_name(strategy))


class GroupExtended(ServedExtended, MirroredExtended):
    """For workers of several ranks, those of `communicator`, which train in step with each other."""

    def __init__(self, strategy: ParameterServerStrategy, communicator: Communicator) -> None:
        device = _device_name(strategy)
        MirroredExtended.__init__(self, strategy, communicator, device, (device,), AllReduceCrossDeviceOps())


class _ForWorkers:
    """A data set on a chief that has a coordinator: not to be iterated there."""

    def __init__(self, method: Callable[[Any], Any], given: Any) -> None:
        self._method, self._given = method, given

    def __iter__(self) -> Iterator[Any]:
        raise ValueError(
            "To use this dataset, you need to pass this dataset to ClusterCoordinator.create_per_worker_dataset."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the call, which is a worker's, of its strategy."""
        return self._method, (self._given,)


def _encoded(kind: str, text: str | None) -> numpy.ndarray:
    """Return a word as bytes of the fixed length; a long text is cut off."""
    while len(raw := json.dumps([kind, text]).encode()) > _WORD_BYTES:
        text = text[: len(text) // 2] if text else ""
    return numpy.frombuffer(raw.ljust(_WORD_BYTES, b"\0"), numpy.uint8)


def _device_name(strategy: ParameterServerStrategy) -> str:
    """Return this rank's device as a device of its task."""
    task = strategy._roles.tasks[strategy._rank]
    return strategy._device.name_in(task.type, task.index)
