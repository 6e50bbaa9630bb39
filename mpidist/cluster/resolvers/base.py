"""The interface of cluster resolvers: which tasks there are, and which of them this process is."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

from mpidist.cluster import roles
from mpidist.cluster.spec import ClusterSpec


class ClusterResolver(abc.ABC):
    """Tells which tasks there are and which of them this process is; a new source of that subclasses it.

    A resolver only tells: it changes neither the environment nor any device's settings.  `cluster_spec` must be
    written; `task_type`, `task_id`, `environment` and the rest have defaults.  All methods are Local unless a
    resolver says otherwise.

    Parameters
    ----------
    task_type : str, optional
        What this process is: "chief", "worker", "ps" or "evaluator".
    task_id : int, optional
        Its index among the tasks of that type.
    rpc_layer : str, optional
        The protocol to put before addresses, as in ``grpc://``.
    environment : str, optional
        A name for where the cluster runs.
    num_accelerators : mapping of str to int, optional
        Devices of each kind that this task has, such as ``{"GPU": 2}``.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = "",
        num_accelerators: Mapping[str, int] | None = None,
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster as it is now; ClusterResolutionError when it cannot be made out."""

    @property
    def task_type(self) -> str | Any:  # Any, so that tasks of a cluster need not ask for None
        """What this process is: "chief", "worker", "ps", "evaluator"; None when it is no task of a cluster."""
        return self._value("task_type")

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | Any:
        """This process's index among the tasks of its type; None when it is no task of a cluster."""
        return self._value("task_id")

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol put before addresses, or None."""
        return self._value("rpc_layer")

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str | None:
        """A name for where the cluster runs."""
        return self._value("environment")

    def _value(self, name: str) -> Any:
        """Return a property as it was given; a subclass may look elsewhere for one that was not."""
        return getattr(self, f"_{name}")

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints and summaries; see `roles.is_chief`."""
        return roles.is_chief(self.cluster_spec(), self.task_type, self.task_id)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, of this one by default; "" when this process is no task of a cluster.

        Parameters
        ----------
        task_type : str, optional
        task_id : int, optional
        rpc_layer : str, optional
            The protocol to put before it, the resolver's own by default.

        Raises
        ------
        ValueError
            There is no such task.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        return with_protocol(self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return how many devices of each kind a task has, such as ``{"GPU": 2}``: what the resolver was told.

        The arguments are TensorFlow's; every task is taken to have as many devices as this one.
        """
        return dict(self._num_accelerators)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.task_type} {self.task_id}>"


def with_protocol(address: str, rpc_layer: str | None) -> str:
    """Return ``rpc_layer://address``; an empty address stays empty."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address
