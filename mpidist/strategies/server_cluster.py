"""Which rank is what under `ParameterServerStrategy`: from a cluster resolver, the environment, or the ranks alone."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from mpidist.cluster import server_roles
from mpidist.cluster.resolvers.base import ClusterResolver
from mpidist.cluster.resolvers.mpi import MPIClusterResolver
from mpidist.cluster.resolvers.tf_config import TFConfigClusterResolver
from mpidist.cluster.roles import ROLES
from mpidist.cluster.server_roles import RanksPerWorker, Roles
from mpidist.cluster.spec import ClusterSpec, Task, task_count
from mpidist.collectives.communicator import Communicator
from mpidist.options import settings


def settle(
    resolver: ClusterResolver | None, communicator: Communicator, num_ps: int | None, ranks_per_worker: RanksPerWorker
) -> Roles:
    """Return who is who."""
    topology = communicator.topology
    text = settings().roles
    if resolver is None and not text and os.environ.get("TF_CONFIG"):
        of_config = TFConfigClusterResolver()
        resolver = of_config if "ps" in of_config.cluster_spec().jobs else None
    if resolver is None:
        return server_roles.choose(
            topology, num_ps=num_ps, text=text, ranks_per_worker=ranks_per_worker, environ=os.environ
        )
    spec = resolver.cluster_spec()
    check(spec)
    if num_ps is not None and num_ps != spec.num_tasks("ps"):
        raise ValueError(f"the cluster of {resolver!r} has {spec.num_tasks('ps')} ps, but num_ps={num_ps}; drop one")
    if isinstance(resolver, MPIClusterResolver):
        tasks: Sequence[Task] = resolver.tasks
    else:
        tasks = _tasks_of_ranks(resolver, spec, communicator)
    return server_roles.deal(tasks, topology, ranks_per_worker, type(resolver).__name__)


def check(spec: ClusterSpec) -> None:
    """Raise ValueError unless a cluster can train with servers.  Local."""
    if not spec:
        raise ValueError("Cluster spec must be non-empty in `tf.distribute.cluster_resolver.ClusterResolver`.")
    unknown = [job for job in spec.jobs if job not in ROLES]
    if unknown:
        raise ValueError(
            f"Disallowed task type found in cluster spec. Allowed types are {list(ROLES)} and the cluster spec is "
            f"{spec!r}."
        )
    for job in ("chief", "evaluator"):
        if task_count(spec, job) > 1:
            raise ValueError(f"There must be at most one '{job}' job.")
    for job in ("worker", "ps"):
        if task_count(spec, job) < 1:
            raise ValueError(f"There must be at least one {job}.")


def _tasks_of_ranks(resolver: ClusterResolver, spec: ClusterSpec, communicator: Communicator) -> Sequence[Task]:
    """Return the task of every rank: what its own resolver says, or in the order of the jobs where none says."""
    mine = json.dumps([resolver.task_type, resolver.task_id])
    answers: list[list[Any]] = [json.loads(raw) for raw in communicator.exchange(mine.encode(), what="roles")]
    if all(kind is None for kind, _ in answers):
        return _in_order(spec, communicator.size)
    unsaid = [rank for rank, (kind, index) in enumerate(answers) if kind is None or index is None]
    if unsaid:
        raise ValueError(f"the cluster resolver of ranks {unsaid} says no task type and id, but that of others does")
    tasks = [Task(kind, int(index)) for kind, index in answers]
    wanted = {Task(job, index) for job in spec.jobs for index in spec.task_indices(job)}
    if missing := sorted(wanted - {*tasks}):
        raise ValueError(
            f"{_listed(missing)} of the cluster is no rank of this job, whose {communicator.size} ranks are "
            f"{_listed(tasks)}: start as many processes as the cluster has tasks, each as another task, in one job: "
            f"`mpidist run -n {len(wanted)} SCRIPT`"
        )
    extra = sorted({task for task in tasks if tasks.count(task) > 1 and task.type != "worker"} | ({*tasks} - wanted))
    if extra := [task for task in extra if task.type not in ("chief", "evaluator") or tasks.count(task) > 1]:
        raise ValueError(f"{_listed(extra)}: such a task is not in the cluster, or several ranks say that they are it")
    return tasks


def _in_order(spec: ClusterSpec, size: int) -> Sequence[Task]:
    """Return tasks for ranks that do not know theirs: chief, workers, servers, evaluator.

    A rank more than the cluster has tasks is the chief, which in TensorFlow's programs is no part of it.
    """
    tasks = [Task(job, index) for job in ROLES if job in spec.jobs for index in spec.task_indices(job)]
    if len(tasks) + 1 == size and not task_count(spec, "chief"):
        tasks.insert(0, Task("chief", 0))
    if len(tasks) != size:
        raise ValueError(
            f"the cluster {spec.as_dict()} has {len(tasks)} tasks, but there are {size} ranks: start "
            f"`mpidist run -n {len(tasks)} SCRIPT`"
            + ("" if task_count(spec, "chief") else f", or -n {len(tasks) + 1} for a chief (coordinator) besides")
        )
    return tasks


def _listed(tasks: Sequence[Task]) -> str:
    return ", ".join(map(str, tasks))
