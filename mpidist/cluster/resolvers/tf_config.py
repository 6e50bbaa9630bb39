"""The cluster from the ``TF_CONFIG`` environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from mpidist.cluster.resolvers.base import ClusterResolver, with_protocol
from mpidist.cluster.spec import ClusterSpec
from mpidist.errors import ClusterResolutionError, LaunchError

#: The type of a task that does not train with the others: it is started as a job of its own.
_EVALUATOR = "evaluator"

_UNREADABLE = "TF_CONFIG cannot be read:"

#: Properties of a resolver -> their names in the ``task``.
_OF_TASK = {"task_type": "type", "task_id": "index"}

#: Messages quote so many characters of the variable.
_QUOTED = 1000


class TFConfigClusterResolver(ClusterResolver):
    """A resolver for ``TF_CONFIG``, a JSON text with the cluster and this process's task.

    ::

        TF_CONFIG='{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 1}}'

    It may also have ``rpc_layer``, ``environment`` and ``session_master``.  The variable is read again at each call;
    arguments win over it.

    Parameters
    ----------
    task_type, task_id, rpc_layer, environment
        See `ClusterResolver`.
    environ : mapping, optional
        Where to look the variable up; the process's environment by default.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer, environment)
        self._environ = os.environ if environ is None else environ

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster, an empty one when the variable is not set; ValueError when it cannot be read."""
        cluster = self._config().get("cluster", {})
        try:
            return ClusterSpec(cluster)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{_UNREADABLE} its cluster: {error}; got {cluster!r}") from None

    def _value(self, name: str) -> Any:
        value = super()._value(name)
        if value is not None:
            return int(value) if name == "task_id" else value
        entry = _OF_TASK.get(name, name)
        config = self._config()
        if name in _OF_TASK:
            config = _object(config.get("task", {}), "the task of TF_CONFIG")
        value = config.get(entry)
        return _index(value) if name == "task_id" else _text(value, entry)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the ``session_master`` if there is one, "" for a cluster of one task, else the task's address.

        Raises
        ------
        ClusterResolutionError
            The cluster has several tasks, and neither TF_CONFIG nor the arguments say which one is meant.
        ValueError
            There is no such task.
        """
        session_master = _text(self._config().get("session_master"), "session_master")
        if session_master is not None:
            return session_master
        cluster = self.cluster_spec()
        if sum(map(cluster.num_tasks, cluster.jobs)) <= 1:
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            raise ClusterResolutionError(
                f"TF_CONFIG has {cluster}, but does not say which task this process is; "
                f'add "task": {{"type": ..., "index": ...}} to it'
            )
        try:
            address = cluster.task_address(task_type, task_id)
        except ValueError as error:
            raise ValueError(f"TF_CONFIG: {error}") from None
        return with_protocol(address, rpc_layer or self.rpc_layer)

    def _config(self) -> dict[str, Any]:
        """Return the variable's content; json.JSONDecodeError (a ValueError) when it is no JSON."""
        text = self._environ.get("TF_CONFIG", "{}")
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            hint = ", where the quotes of the shell are part of it" if text[:1] == text[-1:] == "'" else ""
            what = f"{_UNREADABLE} got {text[:_QUOTED]!r}{hint}: {error.msg}"
            raise json.JSONDecodeError(what, error.doc, error.pos) from None
        return _object(config, "TF_CONFIG")


def tasks_that_train(environ: Mapping[str, str] | None = None) -> int:
    """Return how many tasks ``TF_CONFIG`` starts to train with this process: 0 without it, and in an evaluator.  Local.

    ValueError where TF_CONFIG cannot be read.
    """
    environ = os.environ if environ is None else environ
    if not environ.get("TF_CONFIG"):
        return 0
    resolver = TFConfigClusterResolver(environ=environ)
    try:
        spec, task_type = resolver.cluster_spec(), resolver.task_type
    except (ValueError, TypeError) as error:
        text = str(error) if str(error).startswith(_UNREADABLE) else f"{_UNREADABLE} {error}"
        raise ValueError(f"{text}; got {environ['TF_CONFIG'][:_QUOTED]!r}") from error
    return 0 if task_type == _EVALUATOR else sum(spec.num_tasks(job) for job in spec.jobs if job != _EVALUATOR)


def check_all_joined(tasks: int, size: int) -> None:
    """Check that the tasks which train are ranks of one world of `size` ranks: alone, each would train a model.  Local.

    A LaunchError says how to start them.
    """
    if tasks > size:
        ranks = "1 rank" if size == 1 else f"{size} ranks"
        raise LaunchError(
            f"TF_CONFIG has {tasks} tasks that train (all but evaluators), but MPI connects only {ranks} "
            "here: each would train a model of its own. Processes do not find each other by the addresses in "
            f"TF_CONFIG: start them as one job, with `mpidist run -n {tasks} SCRIPT` (--hosts for several machines), "
            f"`mpirun -n {tasks} python SCRIPT` or `srun --mpi=PLUGIN -n {tasks} python SCRIPT` (pmix for Open MPI, "
            "pmi2 for MPICH). To train on the ranks there are, unset TF_CONFIG"
        )


def _index(value: Any) -> int | None:
    """Return the index of the task; ValueError for what is no whole number of 0 or more, or the text of one."""
    is_text = isinstance(value, str) and value.isascii() and value.isdigit()
    if value is None or is_text or (type(value) is int and value >= 0):
        return None if value is None else int(value)
    raise ValueError(f'{_UNREADABLE} the "index" of its task must be an integer of 0 or more, got {value!r}')


def _text(value: Any, entry: str) -> str | None:
    """Return an entry that is text, or None; ValueError for anything else."""
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f'{_UNREADABLE} "{entry}" must be text, got {value!r}')


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, got {value!r}")
    return value
