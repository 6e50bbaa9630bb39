"""`ParameterServerStrategy`: variables lie on servers, and workers train each at its own pace."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy

from mpidist import own_process, transports
from mpidist.cluster.resolvers.base import ClusterResolver
from mpidist.cluster.resolvers.simple import SimpleClusterResolver
from mpidist.cluster.server_roles import RanksPerWorker, Roles
from mpidist.collectives.communicator import Communicator
from mpidist.device.cards import card_text
from mpidist.errors import PeerLostError
from mpidist.output import say
from mpidist.parameter_server import registry
from mpidist.parameter_server.client.client import Client
from mpidist.parameter_server.client.group_client import GroupClient
from mpidist.parameter_server.client.local_client import LocalClient
from mpidist.parameter_server.consistency import Consistency
from mpidist.parameter_server.placement import Placement
from mpidist.parameter_server.server.server import Server
from mpidist.strategies import server_cluster, workers
from mpidist.strategies.base import Strategy
from mpidist.strategies.devices_of_ranks import OWN_DEVICE, own_device, take_device
from mpidist.strategies.parameter_server_extended import GroupExtended, ServedExtended, SingleExtended
from mpidist.transports.connections.base import Connection
from mpidist.transports.connections.open import open_connections
from mpidist.world import launched_communicator, world_communicator

_log = logging.getLogger("mpidist")

#: What becomes of the job when a server dies, where it is started so that it can go on.
_ON_SERVER_FAILURE = ("end", "restore")

#: What is said of a server that has ended the job.
_SERVER_LOST = (
    "The variables that it held are lost: start the job again from its newest checkpoint (to go on without a server, "
    "on_server_failure='restore' needs a ClusterCoordinator and a fault-tolerant job)"
)


class ParameterServerStrategy(Strategy):
    """Asynchronous training: servers hold the variables, workers read them, and push gradients, each at its own pace.

    Collective: every rank makes it, as the first thing that it does.  On the ranks that are servers this line is the
    last of the program: they serve until all others have ended, and then end too.  On the chief, on workers and on an
    evaluator it returns.

    A script that goes on with `mpidist.coordinator.ClusterCoordinator` has its program on the chief, and the workers
    run what that schedules.  In a script without, each worker, the chief among them, runs the whole program by itself
    (*between-graph*).  Variables that are made before are matched by the order of creation, and begin with the
    chief's values.

    One rank alone keeps the variables itself.  There is one such strategy in a job.

    Parameters
    ----------
    cluster_resolver : ClusterResolver, optional
        By default what MPIDIST_ROLES says, else TF_CONFIG if it names servers, else the components of a heterogeneous
        Slurm job (the last has the servers), else a chief, `num_ps` servers, and workers.
    variable_partitioner : callable, optional
        From shape and dtype of a variable to the numbers of parts to cut its axes into, such as those of
        `mpidist.experimental.partitioners`: rows are spread over servers then.
    num_ps : int, optional
        How many servers; one for each node by default.
    ranks_per_worker : int or "node"
        How many ranks make a worker, which is synchronous inside; ``"node"``: the ranks of a node that are workers.
    consistency : Consistency, optional
        When workers may go on; by default `Asynchronous`.
    placement : {"round_robin", "bytes"}
        The server of a new variable, or shard: the next in turn, or the one that holds the fewest bytes.
    push_dtype : dtype, optional
        What gradients are sent as, such as ``"float16"``; what is lost is added to the next gradient.
    on_server_failure : {"end", "restore"}
        What becomes of a fault-tolerant job whose server dies.

    Raises
    ------
    ValueError
        The ranks cannot be dealt to these roles; the message has a split that is possible.
    RuntimeError
        There is one already.
    """

    extended: ServedExtended

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        num_ps: int | None = None,
        ranks_per_worker: RanksPerWorker = 1,
        consistency: Consistency | None = None,
        placement: str = "round_robin",
        push_dtype: Any = None,
        on_server_failure: str = "end",
    ) -> None:
        _check_arguments(cluster_resolver, variable_partitioner, consistency, placement, on_server_failure)
        _check_push_dtype(push_dtype)
        _check_place()
        self._whole = transports.world()  # whose control channel and exit hooks stay in force
        communicator = launched_communicator()
        self._rank = communicator.rank
        self._roles = server_cluster.settle(cluster_resolver, communicator, num_ps, ranks_per_worker)
        self._cluster_coordinator: Any = None
        self._consistency, self._on_server_failure = consistency, on_server_failure
        self._name_vital_ranks()
        self._cluster_resolver = cluster_resolver or self._described(communicator)
        if communicator.size > 1 and communicator.rank == 0:
            say(self._roles.table(communicator.topology.hosts))
        task = self._roles.tasks[self._rank]
        self._device = own_device(communicator, takes_gpu=task.type != "ps")
        notes = dict.fromkeys(self._roles.servers, "a server: variables in host memory")
        cards = take_device(self._device.name, communicator, notes=notes)
        number = self._roles.number_of(self._rank)
        self._connections = (
            open_connections(self._whole, _peers(self._roles, self._rank)) if communicator.size > 1 else {}
        )
        own_world = _own_world(self._roles, self._whole, number)
        if task.type == "ps":
            clients = [self._connections[ranks[0]] for ranks in self._roles.trainers]
            Server(clients, task.index, consistency).serve()
            sys.exit(0)
        transports.enter(own_world)
        self._client, self.extended = self._joined(number, push_dtype)
        world_communicator().adapters[OWN_DEVICE] = self._device.name
        self.extended.card_text = card_text(self._rank, cards)  # who shares it, other workers too
        servers = max(1, len(self._roles.servers))
        self.extended.serves(self._client, number or 0, variable_partitioner, Placement(servers, placement))
        if not isinstance(self._client, LocalClient):
            workers.install(self.extended)
        if self._connections and threading.current_thread() is threading.main_thread():
            own_process.at_exit(self._leave)
        if number == 0 and self.extended.replica_id == 0:
            self._log_start()

    def _name_vital_ranks(self) -> None:
        """Tell the control channel which ranks a fault-tolerant job cannot do without, and which are servers."""
        servers, control = self._roles.servers, self._whole.control
        # a server does not know whether there is a coordinator, which could restore the other servers
        are_restored = self._on_server_failure == "restore" and self._rank in servers
        control.vital_ranks = frozenset([self._roles.trainers[0][0], *(() if are_restored else servers)])
        control.duties = {rank: (f"ps {number}", _SERVER_LOST) for number, rank in enumerate(servers)}

    def _described(self, communicator: Communicator) -> ClusterResolver:
        """Return a resolver of the roles that the ranks have dealt out."""
        hosts, task = communicator.topology.hosts, self._roles.tasks[self._rank]
        spec = self._roles.cluster_spec(hosts)
        return SimpleClusterResolver(spec, task_type=task.type, task_id=task.index, rpc_layer="")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a reference: it is the same strategy in any process of the job."""
        return registry.strategy_here, ()

    def _leave(self) -> None:
        """Leave the servers at the end of the program: what they could not apply is an error of the program."""
        try:
            self._client.leave()
        except PeerLostError as error:
            self._whole.control.warn(f"at the end of its program: {error}")
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)

    def _is_coordinated(self) -> None:
        """Take note that there is a coordinator: it has the metrics of all workers, and may bring back lost servers."""
        self.extended.serve_metrics()
        if self._on_server_failure == "restore":
            self._whole.control.vital_ranks = frozenset(self._roles.trainers[0][:1])

    def _joined(self, number: int | None, push_dtype: Any) -> tuple[Any, ServedExtended]:
        """Return the client of this rank, and what library code uses of this strategy."""
        group = world_communicator()
        client: Any = LocalClient()
        if self._connections:
            assert number is not None
            connections: list[Connection] = [self._connections[rank] for rank in self._roles.servers]
            client = Client(connections, number, len(self._roles.trainers), number == 0, push_dtype)
        if group.size == 1:
            return client, SingleExtended(self)
        assert number is not None
        client = GroupClient(group, client if self._connections else None, number == 0)
        return client, GroupExtended(self, group)

    def _log_start(self) -> None:
        _log.info(
            "`tf.distribute.experimental.ParameterServerStrategy` is initialized with cluster_spec: %r",
            self.cluster_resolver.cluster_spec().as_dict(),
        )
        _log.info(
            "ParameterServerStrategy (CentralStorageStrategy if you are using a single machine) with "
            "compute_devices = %r, variable_device = %r",
            list(self.extended.worker_devices),
            list(self.extended.parameter_devices),
        )


def _check_arguments(resolver: Any, partitioner: Any, consistency: Any, placement: str, on_server_failure: str) -> None:
    if resolver is not None and not isinstance(resolver, ClusterResolver):
        raise ValueError(f"cluster_resolver must be a ClusterResolver, got {resolver!r}")
    if partitioner is not None and not callable(partitioner):
        raise ValueError(f"variable_partitioner must be a function of shape and dtype, got {partitioner!r}")
    if consistency is not None and not isinstance(consistency, Consistency):
        raise ValueError(f"consistency must be one of mpidist.parameter_server.consistency, got {consistency!r}")
    Placement(1, placement)
    if on_server_failure not in _ON_SERVER_FAILURE:
        raise ValueError(f"on_server_failure must be 'end' or 'restore', got {on_server_failure!r}")
    if workers.of_job().train_apart:
        raise RuntimeError(
            "the ranks of this job have their roles already: there is one ParameterServerStrategy in a job; pass it on"
        )


def _check_place() -> None:
    """Raise RuntimeError inside ``with world:``: workers leave the world for their own, and servers end in it."""
    if transports.innermost() is not None:
        raise RuntimeError(
            "ParameterServerStrategy deals out all ranks of this process's world, and cannot be made inside "
            "`with world:`. Make it outside, after mpidist.init(comm) if these ranks are to be a communicator's"
        )


def _check_push_dtype(push_dtype: Any) -> None:
    """Raise ValueError unless gradients can be sent as this: whole numbers would not do."""
    if push_dtype == "bfloat16":
        with suppress(ImportError):  # which makes NumPy know the name
            importlib.import_module("ml_dtypes")
    try:
        dtype = numpy.dtype(push_dtype or "float64")
    except TypeError as error:
        raise ValueError(f"push_dtype must be a dtype such as 'float16', got {push_dtype!r}: {error}") from error
    if dtype.kind not in "fV":  # ml_dtypes' floats, bfloat16 for one, are of kind V
        raise ValueError(f"push_dtype must be a dtype of floats such as 'float16', got {push_dtype!r}")


def _peers(roles: Roles, rank: int) -> list[int]:
    """Return the ranks to connect with: first ranks of trainers with servers, and the chief with all others."""
    firsts = [ranks[0] for ranks in roles.trainers]
    if rank in roles.servers:
        return firsts
    if rank not in firsts:
        return []
    if roles.chief is None:
        return list(roles.servers)
    others = [first for first in firsts if first != rank] if rank == roles.chief else [roles.chief]
    return [*roles.servers, *others]


def _own_world(roles: Roles, whole: transports.World, number: int | None) -> transports.World:
    """Return the world of this rank's own worker.  Collective where workers are several ranks."""
    if all(len(ranks) == 1 for ranks in roles.trainers):
        return transports.alone() if len(roles.tasks) > 1 else whole
    others = len(roles.trainers) + whole.transport.rank
    return whole.part(others if number is None else number)
