"""The cluster from the variables of a Slurm job step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from mpidist.cluster.hostlist import expand_hostlist, expand_tasks_per_node
from mpidist.cluster.resolvers.base import ClusterResolver
from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.cluster.topology import Topology
from mpidist.errors import ClusterResolutionError

_T = TypeVar("_T")


class SlurmClusterResolver(ClusterResolver):
    """A resolver for processes started by ``srun``, from the ``SLURM_STEP_*`` variables alone, without MPI.

    Hosts and ranks keep Slurm's order, and ranks dealt in turn (``srun --distribution=cyclic``) or in planes are where
    Slurm put them.  Task addresses are ``host:port``, with `port_base` plus the local rank for a port.  CPU-only
    clusters are clusters.  Nothing in the environment is changed.

    Parameters
    ----------
    jobs : mapping of str to int, optional
        How many tasks each job has; ranks go to the jobs in alphabetical order.  All ranks are workers by default.
    port_base : int
    gpus_per_node : int, optional
        By default SLURM_GPUS_ON_NODE, else as many as CUDA_VISIBLE_DEVICES lists, else 0.
    gpus_per_task : int, optional
        By default an equal share of `gpus_per_node`, which is 0 when tasks outnumber GPUs.
    tasks_per_node : int or mapping of str to int, optional
        The same number for all nodes, or by host, each of the step's; SLURM_STEP_TASKS_PER_NODE by default.
    auto_set_gpu : bool
        Accepted for TensorFlow's sake.  CUDA_VISIBLE_DEVICES is never set; `task_gpus` is what it would be.
    rpc_layer : str
    environ : mapping, optional
        Where to look the variables up; the process's environment by default.

    Raises
    ------
    ClusterResolutionError
        A variable is missing or cannot be read, the jobs' tasks are not as many as the step's, `tasks_per_node` is for
        other hosts than the step's, or a node has fewer GPUs than its tasks are to have.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str = "grpc",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._environ = os.environ if environ is None else environ
        hosts = self._read("SLURM_STEP_NODELIST", expand_hostlist)
        counts = self._counts(hosts, tasks_per_node)
        self.topology = Topology(_deal(hosts, counts, self._plane(max(counts))))
        self._tasks = _assign(jobs, self.topology.size)
        self._port_base = port_base
        self._rank = self._read("SLURM_PROCID", int)
        if not 0 <= self._rank < self.topology.size:
            raise ClusterResolutionError(f"SLURM_PROCID={self._rank}, but the step has {self.topology.size} tasks")
        self._gpus_per_task = self._share_of_gpus(gpus_per_node, gpus_per_task, max(counts))
        task = self._tasks[self._rank]
        super().__init__(task.type, task.index, rpc_layer, "", {"GPU": self._gpus_per_task})

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs, with the address of each task."""
        jobs: dict[str, list[str]] = {}
        for task, host, local_rank in zip(self._tasks, self.topology.hosts, self.topology.local_rank_of, strict=True):
            jobs.setdefault(task.type, []).append(f"{host}:{self._port_base + local_rank}")
        return ClusterSpec(jobs)

    @property
    def task_gpus(self) -> tuple[int, ...]:
        """The numbers, on its node, of the GPUs that are this task's share."""
        first = self.topology.local_rank_of[self._rank] * self._gpus_per_task
        return tuple(range(first, first + self._gpus_per_task))

    def _counts(self, hosts: Sequence[str], tasks_per_node: int | Mapping[str, int] | None) -> list[int]:
        """Return how many ranks each node has."""
        if isinstance(tasks_per_node, Mapping):
            _check_hosts(tasks_per_node, hosts)
            counts = [tasks_per_node[host] for host in hosts]
        elif tasks_per_node is not None:
            counts = [tasks_per_node] * len(hosts)
        else:
            counts = self._read("SLURM_STEP_TASKS_PER_NODE", expand_tasks_per_node)
        if len(counts) != len(hosts) or sum(counts) == 0 or min(counts) < 0:
            raise ClusterResolutionError(f"the step has nodes {list(hosts)}, but tasks per node are {counts}")
        return counts

    def _plane(self, most: int) -> int:
        """Return how many ranks in a row Slurm put on a node before it went on to the next one."""
        distribution = self._environ.get("SLURM_DISTRIBUTION", "block").partition(":")[0]
        if distribution == "arbitrary":
            raise ClusterResolutionError(
                "ranks were placed with --distribution=arbitrary, and no variable says where; "
                "use MPIClusterResolver, which asks the ranks"
            )
        if distribution == "plane":
            return self._read("SLURM_DIST_PLANESIZE", int)
        return 1 if distribution == "cyclic" else most

    def _share_of_gpus(self, per_node: int | None, per_task: int | None, tasks: int) -> int:
        """Return the number of GPUs of a task, checked against those of its node."""
        per_node = self._gpus_of_node() if per_node is None else per_node
        share = per_node // tasks if per_task is None else per_task
        if share * tasks > per_node:
            raise ClusterResolutionError(
                f"{tasks} tasks with {share} GPUs each need {share * tasks} GPUs on a node, but it has {per_node}; "
                f"lower gpus_per_task, or ask Slurm for more with --gpus-per-node"
            )
        return share

    def _gpus_of_node(self) -> int:
        if "SLURM_GPUS_ON_NODE" in self._environ:
            return self._read("SLURM_GPUS_ON_NODE", int)
        listed = self._environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        return sum(device.strip() not in ("", "-1", "NoDevFiles") for device in listed)

    def _read(self, name: str, convert: Callable[[str], _T]) -> _T:
        if name not in self._environ:
            raise ClusterResolutionError(
                f"environment variable {name} is not set: this process was not started by srun. Start it with "
                "`srun --mpi=PLUGIN python SCRIPT` (pmix for Open MPI, pmi2 for MPICH), or use MPIClusterResolver "
                "under mpirun"
            )
        try:
            return convert(self._environ[name])
        except ValueError as error:
            raise ClusterResolutionError(f"environment variable {name} cannot be read: {error}") from error


def _check_hosts(tasks_per_node: Mapping[str, int], hosts: Sequence[str]) -> None:
    """Raise unless the numbers of tasks are for these hosts, for all of them and for no others."""
    if {*tasks_per_node} != {*hosts}:
        unknown, missing = sorted({*tasks_per_node} - {*hosts}), sorted({*hosts} - {*tasks_per_node})
        raise ClusterResolutionError(
            f"tasks_per_node must have the step's nodes {list(hosts)}, 0 for one without tasks; it has {unknown}, "
            f"which are not among them, and does not have {missing}"
        )


def _deal(hosts: Sequence[str], counts: Sequence[int], plane: int) -> list[str]:
    """Return the host of every rank: nodes take up to `plane` ranks in turn until each has its count."""
    if plane < 1:
        raise ClusterResolutionError(f"Slurm's plane size must be 1 or more, got {plane}")
    left = list(counts)
    ranks: list[str] = []
    while any(left):
        for node, host in enumerate(hosts):
            taken = min(plane, left[node])
            ranks += [host] * taken
            left[node] -= taken
    return ranks


def _assign(jobs: Mapping[str, int] | None, size: int) -> list[Task]:
    """Return the task of every rank."""
    jobs = {"worker": size} if jobs is None else jobs
    if sum(jobs.values()) != size:
        raise ClusterResolutionError(f"jobs {dict(jobs)} are for {sum(jobs.values())} tasks, but the step has {size}")
    return [Task(job, index) for job in sorted(jobs) for index in range(jobs[job])]
