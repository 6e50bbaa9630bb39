"""What a scheduler has given to this job: hosts, and how many ranks and CPUs on each; a table of schedulers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpidist.cluster.hostlist import expand_hostlist, expand_tasks_per_node, short_host
from mpidist.errors import ClusterResolutionError


@dataclass(frozen=True)
class HostShare:
    """What the job has of a host."""

    places: int  # the ranks that the scheduler counts on there, which launchers call slots
    cpus: int | None = None  # cores, or hardware threads where the scheduler counts those; None: it does not say


@dataclass(frozen=True)
class Allocation:
    """The hosts of a job.

    `shares` are by host, in the scheduler's order; of a heterogeneous job those of its first component.  `ranks` is how
    many the job was asked for in all its `components`; 1 for each host where the places may be meant for threads.
    """

    scheduler: str
    job: str
    shares: Mapping[str, HostShare]
    ranks: int = 1
    components: int = 1

    @property
    def title(self) -> str:
        """Such as ``Slurm job 41``."""
        return f"{self.scheduler} job {self.job}"

    @property
    def places(self) -> dict[str, int]:
        """How many ranks each host takes."""
        return {host: share.places for host, share in self.shares.items()}

    def share_of(self, host: str) -> HostShare | None:
        """Return what the job has of a host, by its name with or without a domain; None of a host that is not its."""
        found = (share for name, share in self.shares.items() if short_host(name) == short_host(host))
        return next(found, None)


@dataclass(frozen=True)
class AllocationSource:
    """The variables of one scheduler."""

    name: str
    job: str  # the variable with the job's number
    hosts: str  # the variable with the hosts, or with the file that has them
    read: Callable[[Mapping[str, str]], dict[str, HostShare]]


def given_allocation(environ: Mapping[str, str] | None = None) -> Allocation | None:
    """Return what a scheduler has given to this job, None outside of jobs.  Local.

    ClusterResolutionError where the variables of a scheduler cannot be read.
    """
    environ = os.environ if environ is None else environ
    for scheduler in SCHEDULERS:
        if scheduler.job in environ and scheduler.hosts in environ:
            try:
                shares = scheduler.read(environ)
                ranks, components = len(shares), 1
                if scheduler.name == "Slurm":
                    # the tasks asked for; where none were, its variables of tasks count CPUs, but for this one
                    ranks = max(slurm_tasks(environ), len(shares))
                    components = component_count(environ) or 1
            except (OSError, ValueError) as error:
                raise ClusterResolutionError(f"the hosts of {scheduler.name}'s job cannot be read: {error}") from error
            return Allocation(scheduler.name, environ[scheduler.job], shares, ranks, components)
    return None


def component_count(environ: Mapping[str, str]) -> int:
    """Return how many components a heterogeneous Slurm job has, 0 of any other job; ValueError for no number; Local."""
    size = environ.get("SLURM_HET_SIZE", "")
    if size and not size.isdecimal():
        raise ValueError(f"SLURM_HET_SIZE: expected the number of the Slurm job's components; got {size!r}")
    return int(size or 0)


def slurm_tasks(environ: Mapping[str, str]) -> int:
    """Return how many tasks a Slurm job was asked for, in all its components; 1 for each that does not say.  Local."""
    components = range(component_count(environ))
    names = [f"SLURM_NTASKS_HET_GROUP_{number}" for number in components] or ["SLURM_NTASKS"]
    return sum(int(environ.get(name, 1)) for name in names)


def het_group_option(components: int) -> str:
    """Return the option of srun that starts ranks in so many components, such as ``--het-group=0,1``; "" for one."""
    return f"--het-group={','.join(map(str, range(components)))}" if components > 1 else ""


def _slurm(environ: Mapping[str, str]) -> dict[str, HostShare]:
    """Return the shares of a step, where there is one, else of the job."""
    hosts = expand_hostlist(environ["SLURM_JOB_NODELIST"])
    cpus = _for_each(hosts, "SLURM_JOB_CPUS_PER_NODE", environ) if "SLURM_JOB_CPUS_PER_NODE" in environ else []
    if "SLURM_STEP_NODELIST" in environ:  # SLURM_TASKS_PER_NODE is the step's, then
        members = expand_hostlist(environ["SLURM_STEP_NODELIST"])
        places = dict(zip(members, _for_each(members, "SLURM_STEP_TASKS_PER_NODE", environ), strict=True))
    else:
        places = dict(zip(hosts, _for_each(hosts, "SLURM_TASKS_PER_NODE", environ), strict=True))
    cpus_of = dict(zip(hosts, cpus, strict=False))
    return {host: HostShare(count, cpus_of.get(host)) for host, count in places.items()}


def _for_each(hosts: list[str], name: str, environ: Mapping[str, str]) -> list[int]:
    """Return the number for each of the hosts of a list such as ``4(x2),1``."""
    if name not in environ:
        raise ValueError(f"environment variable {name} is not set")
    found = expand_tasks_per_node(environ[name])
    if len(found) != len(hosts):
        raise ValueError(f"{name}={environ[name]} is for {len(found)} hosts, and there are {len(hosts)}: {hosts}")
    return found


def _pbs(environ: Mapping[str, str]) -> dict[str, HostShare]:
    """Return the shares by a file with a line for each rank."""
    lines = Path(environ["PBS_NODEFILE"]).read_text().split()
    return {host: HostShare(count) for host, count in Counter(lines).items()}


def _lsf(environ: Mapping[str, str]) -> dict[str, HostShare]:
    """Return the shares by a list such as ``host1 4 host2 2``; what it counts is cores."""
    words = environ["LSB_MCPU_HOSTS"].split()
    return {host: HostShare(int(count), int(count)) for host, count in zip(words[::2], words[1::2], strict=True)}


def _grid_engine(environ: Mapping[str, str]) -> dict[str, HostShare]:
    """Return the shares by a file with a line ``host count queue range`` for each queue; what it counts is cores."""
    counts: Counter[str] = Counter()
    for line in Path(environ["PE_HOSTFILE"]).read_text().splitlines():
        host, count = line.split()[:2]
        counts[host] += int(count)
    return {host: HostShare(count, count) for host, count in counts.items()}


#: Asked in this order.
SCHEDULERS = (
    AllocationSource("Slurm", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", _slurm),
    AllocationSource("PBS", "PBS_JOBID", "PBS_NODEFILE", _pbs),
    AllocationSource("LSF", "LSB_JOBID", "LSB_MCPU_HOSTS", _lsf),
    AllocationSource("Grid Engine", "JOB_ID", "PE_HOSTFILE", _grid_engine),
)
