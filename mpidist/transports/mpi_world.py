"""How the ranks of an MPI communicator become a world: that of the whole job, or one that the user's program made."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from mpidist import own_process
from mpidist.cluster.devices import may_see_gpus
from mpidist.cluster.join_notes import joining, note_joined
from mpidist.cluster.launchers import Launcher, detect_launcher
from mpidist.cluster.resolvers.mpi import skip_finalize, start_mpi
from mpidist.cluster.topology import Topology
from mpidist.errors import TransportError, TransportTimeoutError
from mpidist.options import Settings, settings
from mpidist.output import say
from mpidist.runtime.board import StatusBoard
from mpidist.runtime.control import ControlChannel
from mpidist.runtime.control_mpi import MpiMessenger
from mpidist.runtime.exit_hooks import ExitHooks
from mpidist.runtime.process_hooks import of_process
from mpidist.runtime.standoff import Standoffs
from mpidist.runtime.watch import yield_processor
from mpidist.transports.membership import World, share_memory
from mpidist.transports.mpi import MpiTransport

#: Seconds that a rank which has asked for the end of the job waits to be ended.
_ABORT_SECONDS = 2.0

#: Of this process.
_standoffs = Standoffs()

#: How often a rank that waits for the other ranks of its communicator looks for them.
_LOOK_SECONDS = 0.0005


def connect(launcher: Launcher | None = None) -> World:
    """Start MPI if nobody has, and return the world of this process: all ranks of the job.

    Collective: every rank of the job calls it in the same order.  LaunchError, on all ranks, when the launcher's ranks
    did not become one world, with both MPIs and the cure.
    """
    launcher = detect_launcher() if launcher is None else launcher
    mpi = start_mpi(launcher)
    with joining(launcher):
        world = _meet(mpi, mpi.COMM_WORLD, launcher)
        note_joined(launcher)
    return replace(world, closing_fn=None)


def connect_members(comm: Any, what: str, is_only: bool) -> World:
    """Return a new world of the ranks of a communicator of the user's, in its rank order.

    Collective: every rank of `comm` calls it, in the same order as its other collectives on `comm`, which stays the
    user's own: nothing but a barrier and a copy is made of it.  `check_communicator` lets `comm` pass; `what` is the
    public name of the call, for messages.  `is_only`: the process is to have no other world; then ranks are called by
    their numbers in COMM_WORLD only where these are others.  LaunchError where the thread level of MPI is too low.
    """
    launcher = detect_launcher()
    mpi = start_mpi(launcher)
    job_ranks = _job_ranks(mpi, comm)
    _await_members(mpi, comm, job_ranks, what)
    is_whole = is_only and job_ranks == tuple(range(mpi.COMM_WORLD.Get_size()))
    world = _meet(mpi, comm, launcher, () if is_whole else job_ranks)
    note_joined(launcher)
    return replace(world, closing_fn=None) if is_only else world


def check_communicator(comm: Any, what: str) -> None:
    """Raise unless `comm` is a communicator of which a world can be made.  Local.

    TypeError where it is no communicator of mpi4py; ValueError where it is COMM_NULL, freed, or an inter-communicator;
    RuntimeError where MPI has been finalized.
    """
    mpi = sys.modules.get("mpi4py.MPI")  # loaded by whoever has made a communicator
    if mpi is None or not isinstance(comm, mpi.Comm):
        raise TypeError(f"{what}: expected a communicator of mpi4py, such as MPI.COMM_WORLD.Split(color), got {comm!r}")
    if mpi.Is_finalized():
        raise RuntimeError(f"{what}: MPI has been finalized, and does not start again: call it before MPI.Finalize()")
    if comm == mpi.COMM_NULL:
        raise ValueError(
            f"{what}: got COMM_NULL. The communicator has been freed, or this rank is in none (Split with "
            "MPI.UNDEFINED): then it takes no part, and must not call this"
        )
    if not mpi.Is_initialized():
        return  # it is COMM_WORLD or COMM_SELF, which live when MPI starts
    try:
        is_inter = comm.Is_inter()
    except mpi.Exception as error:
        raise ValueError(f"{what}: the communicator has been freed, or is not valid: {error}") from error
    if is_inter:
        raise ValueError(
            f"{what}: got an inter-communicator, whose ranks are in two groups; give comm.Merge(), or the local group's"
        )


def is_of(world: World, comm: Any) -> bool:
    """Return whether a world has the ranks of a communicator, in the same order.  Local."""
    mpi, own = sys.modules["mpi4py.MPI"], world.transport.mpi_communicator
    if own is None:
        return bool(world.size == 1 == comm.Get_size())
    return type(comm).Compare(own, comm) in (mpi.IDENT, mpi.CONGRUENT)


def _job_ranks(mpi: Any, comm: Any) -> tuple[int, ...]:
    """Return by rank of `comm` its rank in COMM_WORLD; nothing where one has none, such as a spawned process."""
    groups = comm.Get_group(), mpi.COMM_WORLD.Get_group()
    try:
        ranks = mpi.Group.Translate_ranks(groups[0], range(comm.Get_size()), groups[1])
    finally:
        for group in groups:
            group.Free()
    return () if mpi.UNDEFINED in ranks else tuple(ranks)


def _await_members(mpi: Any, comm: Any, job_ranks: Sequence[int], what: str) -> None:
    """Return when all ranks of `comm` have come here; what is done together afterwards waits for nobody."""
    chosen, start, warned = settings(), time.monotonic(), False
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(_LOOK_SECONDS)
        waited = time.monotonic() - start
        is_late = 0 < chosen.timeout_seconds < waited
        if not is_late and (warned or not 0 < chosen.warn_seconds < waited):
            continue
        numbers = f" (ranks {', '.join(map(str, job_ranks))} of COMM_WORLD)" if job_ranks else ""
        text = (
            f"rank {comm.Get_rank()} of {comm.Get_size()}: {what} has waited {waited:.1f} s for the other ranks of its "
            f"communicator{numbers}. Every rank of it must call {what}; look at what they do instead (py-spy dump), or "
            "give more time with MPIDIST_TIMEOUT_SECONDS"
        )
        if is_late:
            own_process.at_exit(mpi.COMM_WORLD.Abort, 1)  # MPI cannot be finalized: the barrier is under way
            raise TransportTimeoutError(text)
        warned = True
        say(f"mpidist: {text}")


def _meet(mpi: Any, comm: Any, launcher: Launcher | None, job_ranks: Sequence[int] = ()) -> World:
    """Return the world of the ranks of `comm`, which all come here."""
    own = comm.Dup()
    own.Set_errhandler(mpi.ERRORS_RETURN)  # a program's own communicator may end the job at the first error
    chosen = own.bcast(settings(), root=0)  # one environment for all: ranks that chose differently would not meet
    machine = own.Split_type(mpi.COMM_TYPE_SHARED, key=own.Get_rank())
    node, hosts, has_gpus = _nodes(mpi, own, machine, chosen)
    topology = Topology(hosts)
    node_ranks = topology.ranks_of_node[topology.node_of[own.Get_rank()]]
    board, segments, problem = share_memory(node.allgather, node.Get_rank(), node.Get_size(), chosen)
    if board is None:
        board, node_ranks = StatusBoard(bytearray(StatusBoard.nbytes(1)), 1), (own.Get_rank(),)
    is_on_board = len(node_ranks) == own.Get_size()
    extra = [] if is_on_board else [own.Dup(), own.Dup()]  # for notices, and for the farewell
    if topology.node_count > 1 and not all(own.allgather(segments is not None)):
        segments = None  # all ranks must take the same way
    control = ControlChannel(
        own.Get_rank(),
        own.Get_size(),
        board,
        node_ranks,
        hosts=hosts,
        messenger=MpiMessenger(extra[0]) if extra else None,
        # a message between nodes takes longer than to let others run, and hosts may share cores unseen
        pause=yield_processor() if topology.node_count > 1 or _crowded(machine, launcher) else None,
        chosen=chosen,
        job_ranks=job_ranks,
    )
    if problem and node.Get_rank() == 0:
        control.warn(f"{problem}; small all-reduces use messages instead")
    control.standoffs = _standoffs
    _standoffs.add(control)
    # begins the farewell, and returns its test
    all_left = (lambda: extra[1].Ibarrier().Test) if extra else None
    of_process.add(ExitHooks(control, _end_of(mpi, control), all_left, skip_finalize))
    transport = MpiTransport(own.Dup(), control, range(own.Get_size()))
    own.Barrier()  # every rank has signed on to its board before any looks who is missing
    for each in {id(each): each for each in (own, machine, node)}.values():
        each.Free()
    name = launcher.name if launcher else "mpi4py"
    return World(transport, topology, control, name, segments, partial(_release, extra), has_gpus)


def _release(extra: Sequence[Any], world: World) -> None:
    """Free the communicators of a world, and have it forgotten where the process ends; all its ranks are here."""
    control = world.control
    of_process.remove(control)
    _standoffs.remove(control)
    world.transport.close()
    for comm in extra:
        comm.Free()
    control.breaks(control.error(TransportError, "this world has been closed; make another one"))


def _nodes(mpi: Any, world: Any, machine: Any, chosen: Settings) -> tuple[Any, list[str], bool]:
    """Return the communicator of this rank's node, the host of every rank, and whether any may have a GPU.

    A node is a set of ranks that can share memory, those of `machine`, or a part of them where virtual nodes were asked
    for: two containers of one host name are two nodes.
    """
    node = machine
    if chosen.virtual_nodes > 1:
        part = machine.Get_rank() * chosen.virtual_nodes // machine.Get_size()
        node = machine.Split(part, machine.Get_rank())
    leader = node.bcast(world.Get_rank(), root=0)
    places = world.allgather((mpi.Get_processor_name(), leader, may_see_gpus()))
    leaders: dict[str, list[int]] = {}
    for host, first, _ in places:
        if first not in leaders.setdefault(host, []):
            leaders[host].append(first)
    hosts = [host if len(leaders[host]) == 1 else f"{host}#{leaders[host].index(first)}" for host, first, _ in places]
    return node, hosts, any(sees for _, _, sees in places)


def _crowded(machine: Any, launcher: Launcher | None) -> bool:
    """Return whether this machine's ranks outnumber the cores they may use; ranks of other worlds count where known."""
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set().union(*machine.allgather(sorted(mine)))
    started = (launcher.local_size if launcher else None) or 0
    return machine.Get_size() > len(cores) or started > (os.cpu_count() or 1)


def _end_of(mpi: Any, control: ControlChannel) -> Callable[[int], None]:
    """Return what ends all ranks of the job, whatever world they are in, and does not return."""

    def end(code: int) -> None:
        if control.settings.fault_tolerant:
            _end_by_signals(control)
            os._exit(code)
        mpi.COMM_WORLD.Abort(code)
        # MPICH under Slurm's PMI2 has only asked for the end, and comes back.  Slurm ends this process in a moment; it
        # may overlook what was asked by a process that is gone already.
        time.sleep(_ABORT_SECONDS)
        os._exit(code)

    return end


def _end_by_signals(control: ControlChannel) -> None:
    """End the other ranks of this node: MPI_Abort does not, when the launcher was told to tolerate faults."""
    board = control.board
    others = [index for index in range(board.size) if index != control.board_index and board.pids[index]]
    for number, seconds in ((signal.SIGTERM, _ABORT_SECONDS), (signal.SIGKILL, _ABORT_SECONDS)):
        for index in others:
            if board.alive(index):
                with suppress(ProcessLookupError):  # it has ended just now
                    os.kill(board.pids[index], number)
        deadline = time.monotonic() + seconds
        while any(map(board.alive, others)) and time.monotonic() < deadline:
            time.sleep(0.005)
