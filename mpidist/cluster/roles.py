"""What a task is: chief, worker, ps or evaluator, and the rules that follow from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from numbers import Integral

from mpidist.cluster.spec import ClusterSpec, Task, named, task_count

#: The jobs a task may belong to.
ROLES = ("chief", "worker", "ps", "evaluator")

#: Jobs that have one task at most.
_SINGLE = ("chief", "evaluator")


def validate(cluster_spec: ClusterSpec, task_type: str | None = None, task_id: int | None = None) -> None:
    """Check that the cluster has known jobs, one chief and one evaluator at most, and this task.  Local."""
    _check_jobs(cluster_spec)
    if task_type is None:
        return
    if task_type not in ROLES:
        raise ValueError(f"unknown task type {task_type!r}; it is one of {', '.join(ROLES)}")
    if task_type in cluster_spec.jobs:
        _check_id(task_type, task_id, cluster_spec.num_tasks(task_type))
    elif task_type != "evaluator":
        raise ValueError(f"task type {task_type!r} is not in the cluster; its jobs are {named(cluster_spec.jobs)}")


def is_chief(cluster_spec: ClusterSpec, task_type: str | None, task_id: int | None) -> bool:
    """Return whether the task writes checkpoints and summaries.  Local.

    That is the chief if the cluster has one, else worker 0; an evaluator is its own chief, a ps never one, and a
    process that is no task of any cluster is alone and so the chief.  ValueError as `validate`.
    """
    validate(cluster_spec, task_type, task_id)
    if task_type in (None, "chief", "evaluator"):
        return True
    return task_type == "worker" and task_id == 0 and "chief" not in cluster_spec.jobs


def worker_count(cluster_spec: ClusterSpec, task_type: str) -> int:
    """Return how many tasks train together with a task of this type: chief and workers, or one evaluator.  Local."""
    validate(cluster_spec, task_type, 0)
    _check_trains(task_type)
    if task_type == "evaluator":
        return 1  # there is never a second one, and the cluster need not list it
    return task_count(cluster_spec, "chief") + task_count(cluster_spec, "worker")


def parse_roles(text: str, size: int) -> tuple[Task, ...]:
    """Return the task of every rank, from a list such as ``"chief:1,worker:*,ps:2"``.  Local.

    Ranks take the roles in the order written.  A role without a number is one rank; ``*``, once, is all that are left.
    ValueError for an unknown role, a number that cannot be read, two chiefs or evaluators, or not `size` ranks in all.
    """
    entries = [_entry(entry, text) for entry in text.split(",")]
    rest = size - sum(count for _, count in entries if count is not None)
    stars = sum(count is None for _, count in entries)
    if stars > 1:
        raise ValueError(f"roles {text!r}: only one role can take the ranks that are left (*), got {stars}")
    if rest < 0 or (rest > 0 and not stars):
        raise ValueError(f"roles {text!r} are for {size - rest} ranks, but there are {size}")
    return number_roles(role for role, count in entries for _ in range(rest if count is None else count))


def number_roles(roles: Iterable[str]) -> tuple[Task, ...]:
    """Return a `Task` for each role, numbered in order within its job; ValueError as `parse_roles`.  Local."""
    seen: Counter[str] = Counter()
    tasks = []
    for role in roles:
        _check_role(role)
        tasks.append(Task(role, seen[role]))
        seen[role] += 1
    for role in _SINGLE:
        _check_single(role, seen[role])
    return tuple(tasks)


def _entry(entry: str, text: str) -> tuple[str, int | None]:
    """Return (role, number of ranks or None for the rest)."""
    role, colon, count = (part.strip() for part in entry.partition(":"))
    _check_role(role)
    if count == "*":
        return role, None
    if not colon:
        return role, 1
    if not (count.isascii() and count.isdigit()):
        raise ValueError(f"roles {text!r}: expected role:number or role:*, got {entry!r}")
    return role, int(count)


def _check_role(role: str) -> None:
    if role not in ROLES:
        raise ValueError(f"unknown role {role!r}; it is one of {', '.join(ROLES)}")


def _check_single(job: str, count: int) -> None:
    if count > 1:
        raise ValueError(f"a cluster has at most one {job}, got {count}")


def _check_jobs(cluster_spec: ClusterSpec) -> None:
    unknown = [job for job in cluster_spec.jobs if job not in ROLES]
    if unknown:
        raise ValueError(f"the cluster has unknown jobs {named(unknown)}; known are {', '.join(ROLES)}")
    for job in _SINGLE:
        _check_single(job, task_count(cluster_spec, job))


def _check_id(task_type: str, task_id: int | None, count: int) -> None:
    if not isinstance(task_id, Integral) or isinstance(task_id, bool) or not 0 <= int(task_id) < count:
        raise ValueError(f"there is no {task_type} {task_id}: the cluster has {count} of them, counted from 0")


def _check_trains(task_type: str | None) -> None:
    if task_type is None:
        raise ValueError(f"the task type is None, expected one of {', '.join(ROLES)}")
    if task_type == "ps":
        raise ValueError("a ps has no place among the workers: it holds variables and computes nothing")
