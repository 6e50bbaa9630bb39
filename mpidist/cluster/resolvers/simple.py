"""A cluster that is given."""

from __future__ import annotations

from collections.abc import Mapping

from mpidist.cluster.resolvers.base import ClusterResolver, with_protocol
from mpidist.cluster.spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """A resolver for a cluster that is given.

    Parameters
    ----------
    cluster_spec : ClusterSpec
    master : str
        What `master()` returns when it is asked for no task.
    task_type, task_id, environment, num_accelerators, rpc_layer
        See `ClusterResolver`.

    Raises
    ------
    TypeError
        `cluster_spec` is no `ClusterSpec`.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(f"cluster_spec must be a ClusterSpec, got {cluster_spec!r}; wrap it: ClusterSpec(...)")
        super().__init__(task_type, task_id, rpc_layer, environment, num_accelerators)
        self._cluster_spec = cluster_spec
        self._master = master

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster given."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of the task asked for, else the `master` given."""
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        return with_protocol(self._master, rpc_layer or self.rpc_layer)
