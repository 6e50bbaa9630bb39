"""The cluster as a value: which jobs there are, and at which address each task of a job is found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

#: The tasks of one job: addresses in task order, or (when indices are missing) task index -> address; an index may be
#: text, as it is in JSON.
Tasks = Sequence[str] | Mapping[int, str] | Mapping[str, str]


@dataclass(frozen=True, order=True)
class Task:
    """One task of a cluster: its job ("chief", "worker", "ps", "evaluator") and its place in that job."""

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type} {self.index}"


class ClusterSpec:
    """A cluster: jobs, and the address of every task of a job.  A value: equal when jobs and addresses are.

    Local.

    Parameters
    ----------
    cluster : mapping or ClusterSpec
        Job name -> list of addresses, or job name -> {task index: address} where indices are missing.

    Raises
    ------
    TypeError
        `cluster` is no mapping, the tasks of a job are neither a list nor a mapping, or a name or an address is no
        string.
    ValueError
        A task index is not an integer of 0 or more.
    """

    def __init__(self, cluster: Mapping[str, Tasks] | ClusterSpec) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        if not isinstance(cluster, Mapping):
            raise TypeError(f"cluster must map job names to lists of addresses, got {cluster!r}")
        self._jobs = {job: _addresses(job, tasks) for job, tasks in cluster.items()}

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return job -> list of addresses, or job -> {index: address} where indices are missing."""
        return {
            job: list(tasks.values()) if list(tasks) == list(range(len(tasks))) else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    @property
    def jobs(self) -> list[str]:
        """The job names, in the order given."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Return how many tasks the job has; ValueError when there is no such job."""
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of the job's tasks, ascending; ValueError when there is no such job."""
        return list(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of one task; ValueError when there is no such job or task."""
        tasks = self._tasks(job_name)
        if not isinstance(task_index, Integral) or isinstance(task_index, bool) or task_index not in tasks:
            raise ValueError(f"no task {task_index!r} in job {job_name!r}; its tasks are {named(tasks)}")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the job's addresses by index, None where an index is missing; ValueError when there is no such job."""
        tasks = self._tasks(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _tasks(self, job_name: str) -> dict[int, str]:
        if not isinstance(job_name, str) or job_name not in self._jobs:
            raise ValueError(f"no job {job_name!r} in the cluster; its jobs are {named(self._jobs)}")
        return self._jobs[job_name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return self._jobs == other._jobs if isinstance(other, ClusterSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((job, tuple(tasks.items())) for job, tasks in self._jobs.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def _addresses(job: str, tasks: Tasks) -> dict[int, str]:
    """Return index -> address, in ascending order of the index."""
    if not isinstance(job, str):
        raise TypeError(f"the names of jobs must be strings, got {job!r}")
    if isinstance(tasks, Mapping):
        addresses = {_index(job, index): address for index, address in tasks.items()}
    elif isinstance(tasks, (list, tuple)):
        addresses = dict(enumerate(tasks))
    else:
        raise TypeError(
            f"the tasks of job {job!r} must be a list of addresses or a mapping from index to address, got {tasks!r}"
        )
    for index, address in addresses.items():
        if not isinstance(address, str):
            raise TypeError(f"the address of task {index} of job {job!r} must be a string, got {address!r}")
    return dict(sorted(addresses.items()))


def _index(job: str, index: object) -> int:
    """Return the task index as an int."""
    is_text = isinstance(index, str) and index.isascii() and index.isdigit()
    if is_text or (isinstance(index, int) and not isinstance(index, bool) and index >= 0):
        return int(index)  # type: ignore[call-overload]
    raise ValueError(f"the indices of the tasks of job {job!r} must be integers of 0 or more, got {index!r}")


def named(names: Iterable[object]) -> str:
    """Return jobs or indices for a message."""
    return ", ".join(map(repr, names)) or "none"


def task_count(spec: ClusterSpec, job: str) -> int:
    """Return how many tasks a job has; 0 where there is none of the name."""
    return spec.num_tasks(job) if job in spec.jobs else 0
