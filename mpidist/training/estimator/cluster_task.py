"""`ClusterTask`: which task of a cluster this process is, as a `RunConfig` tells it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpidist.cluster.spec import ClusterSpec, task_count

_CHIEF, _WORKER, _PS, _EVALUATOR = "chief", "worker", "ps", "evaluator"


@dataclass(frozen=True)
class ClusterTask:
    """The task of this process.

    `cluster_spec` is empty for one process alone, and for an evaluator, which is outside of the cluster.  Nothing here
    connects to `master` and `evaluation_master`, which are addresses as TensorFlow has them.  `num_worker_replicas`
    counts chief and workers.  In `global_id_in_cluster` the chief is 0, then come workers, then servers; None for an
    evaluator.  `has_evaluator`: another process is the evaluator.
    """

    task_type: str = _WORKER
    task_id: int = 0
    is_chief: bool = True
    cluster_spec: ClusterSpec = ClusterSpec({})
    master: str = ""
    evaluation_master: str = ""
    num_ps_replicas: int = 0
    num_worker_replicas: int = 1
    global_id_in_cluster: int | None = 0
    has_evaluator: bool = False

    @property
    def is_evaluator(self) -> bool:
        """Whether this process evaluates what others train."""
        return self.task_type == _EVALUATOR


def of_environment(environ: Mapping[str, str]) -> ClusterTask:
    """Return the task that ``TF_CONFIG`` names; one process alone without it.  Local.

    ValueError where the cluster has not one chief, or does not have this task, or no task is named.
    """
    config = _config(environ)
    spec, task = ClusterSpec(config.get("cluster") or {}), config.get("task") or {}
    if not spec:
        return _alone(task)
    _require_one_chief(spec)
    task_type, task_id = _named_task(task)
    if task_type == _EVALUATOR:
        return _evaluator(task_id)
    address = _address(spec, task_type, task_id)
    master = f"grpc://{address}" if sum(map(spec.num_tasks, spec.jobs)) > 1 else ""
    return _task_of(spec, task_type, task_id, task_type == _CHIEF, master)


def of_strategy(strategy: Any, environ: Mapping[str, str]) -> ClusterTask:
    """Return the task of this rank of a strategy, or the evaluator of ``TF_CONFIG``.  Local."""
    config = _config(environ)
    task, spec = config.get("task") or {}, ClusterSpec(config.get("cluster") or {})
    if task.get("type") == _EVALUATOR:
        return _evaluator(int(task.get("index", 0)))
    resolver = strategy.cluster_resolver
    spec = spec if resolver is None else resolver.cluster_spec()
    if resolver is None or not resolver.task_type:
        return ClusterTask(is_chief=strategy.extended.is_chief, has_evaluator=_EVALUATOR in spec.jobs)
    task_type, task_id = resolver.task_type, int(resolver.task_id or 0)
    if task_type == _EVALUATOR:
        return _evaluator(task_id)
    return _task_of(spec, task_type, task_id, strategy.extended.is_chief)


def _config(environ: Mapping[str, str]) -> dict[str, Any]:
    config = json.loads(environ.get("TF_CONFIG") or "{}")
    if not isinstance(config, dict) or not isinstance(config.get("task", {}), dict):
        raise ValueError(f"TF_CONFIG must be a JSON object with a task that is one, got {config!r}")
    return config


def _alone(task: Mapping[str, Any]) -> ClusterTask:
    task_type, task_id = task.get("type", _WORKER), int(task.get("index", 0))
    if task_type == _EVALUATOR:
        return _evaluator(task_id)
    if task_type != _WORKER or task_id != 0:
        raise ValueError(f"Without a cluster in TF_CONFIG, the task must be worker 0, got {task_type} {task_id}")
    return ClusterTask()


def _evaluator(task_id: int) -> ClusterTask:
    return ClusterTask(_EVALUATOR, task_id, False, num_worker_replicas=0, global_id_in_cluster=None, has_evaluator=True)


def _require_one_chief(spec: ClusterSpec) -> None:
    if _CHIEF not in spec.jobs:
        raise ValueError('If "cluster" is set in TF_CONFIG, it must have one "chief" node.')
    if spec.num_tasks(_CHIEF) > 1:
        raise ValueError('The "cluster" in TF_CONFIG must have only one "chief" node.')


def _named_task(task: Mapping[str, Any]) -> tuple[str, int]:
    for name in ("type", "index"):
        if task.get(name) is None:
            raise ValueError(f'If "cluster" is set in TF_CONFIG, task {name} must be set.')
    index = int(task["index"])
    if index < 0:
        raise ValueError(f"Task index must be non-negative number, got {index}")
    return str(task["type"]), index


def _address(spec: ClusterSpec, task_type: str, task_id: int) -> str:
    whence = "Note that these values may be coming from the TF_CONFIG environment variable."
    if task_type not in spec.jobs:
        raise ValueError(f"{task_type} is not a valid task_type in the cluster_spec: {spec}  {whence}")
    if task_id not in spec.task_indices(task_type):
        raise ValueError(
            f"{task_id} is not a valid task_id for task_type {task_type} in the cluster_spec: {spec}  {whence}"
        )
    return spec.task_address(task_type, task_id)


def _task_of(spec: ClusterSpec, task_type: str, task_id: int, is_chief: bool, master: str = "") -> ClusterTask:
    """Return a task of a cluster; in the numbers of all tasks the chief is first, then workers, then servers."""
    before = {_CHIEF: (), _WORKER: (_CHIEF,), _PS: (_CHIEF, _WORKER)}.get(task_type, ())
    return ClusterTask(
        task_type,
        task_id,
        is_chief,
        spec,
        master,
        num_ps_replicas=task_count(spec, _PS),
        num_worker_replicas=task_count(spec, _CHIEF) + task_count(spec, _WORKER) or 1,
        global_id_in_cluster=task_id + sum(task_count(spec, job) for job in before),
        has_evaluator=_EVALUATOR in spec.jobs,
    )
