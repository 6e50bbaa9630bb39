"""Several clusters as one."""

from __future__ import annotations

from typing import Any

from mpidist.cluster.resolvers.base import ClusterResolver
from mpidist.cluster.spec import ClusterSpec


class UnionResolver(ClusterResolver):
    """A resolver for the union of several clusters.

    This process's task, the master, the environment and the devices are those of the first resolver.

    Parameters
    ----------
    *resolvers : ClusterResolver
    rpc_layer : str, optional
        The first resolver's by default.

    Raises
    ------
    ValueError
        There are no resolvers.
    TypeError
        One is no `ClusterResolver`.
    """

    def __init__(self, *resolvers: ClusterResolver, rpc_layer: str | None = None) -> None:
        if not resolvers:
            raise ValueError("a union needs at least one cluster resolver, got none")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"a union is of cluster resolvers, got {resolver!r}")
        first = resolvers[0]
        super().__init__(rpc_layer=first.rpc_layer if rpc_layer is None else rpc_layer, environment=first.environment)
        self._resolvers = resolvers

    def _value(self, name: str) -> Any:
        value = super()._value(name)
        return getattr(self._resolvers[0], name) if value is None and name in ("task_type", "task_id") else value

    def cluster_spec(self) -> ClusterSpec:
        """Return all jobs of all clusters.

        A job in several of them has its lists put one after the other; as soon as one gives its tasks with indices,
        all are taken by index, and the same index twice is a KeyError.
        """
        found = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        jobs = dict.fromkeys(job for cluster in found for job in cluster)
        return ClusterSpec({job: _merged(job, [cluster[job] for cluster in found if job in cluster]) for job in jobs})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of the task asked for, else the first resolver's `master`."""
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return what the first resolver says."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)


def _merged(job: str, several: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    if all(isinstance(tasks, list) for tasks in several):
        return [address for tasks in several for address in tasks]  # type: ignore[misc]
    merged: dict[int, str] = {}
    for tasks in several:
        for index, address in tasks.items() if isinstance(tasks, dict) else enumerate(tasks):
            if index in merged:
                raise KeyError(f"two clusters have a task {index} of job {job!r}: {merged[index]!r} and {address!r}")
            merged[index] = address
    return merged
