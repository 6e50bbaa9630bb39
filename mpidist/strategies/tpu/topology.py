"""`MeshTopology`, the public `Topology`: the mesh that the ranks form."""

from __future__ import annotations

import logging
from typing import Any

import numpy

from mpidist.cluster import topology as cluster
from mpidist.cluster.resolvers.base import ClusterResolver
from mpidist.world import world_communicator

_log = logging.getLogger("mpidist")


class MeshTopology:
    """The ranks as cells of a mesh with four axes, as TPU cores are.  Local.

    The first axis is the node, the last one the rank in its node; the two between have length 1.  Where nodes have
    different numbers of ranks, the mesh is one row of all ranks.

    Parameters
    ----------
    ranks : array of int, four dimensions
        The rank at each place.

    Attributes
    ----------
    mesh_rank : int
        The number of axes: 4.
    """

    mesh_rank = 4

    def __init__(self, ranks: Any) -> None:
        self.ranks = numpy.array(ranks, dtype=int)
        if self.ranks.ndim != self.mesh_rank or sorted(self.ranks.flat) != list(range(self.ranks.size)):
            raise ValueError(
                f"a mesh has {self.mesh_rank} axes and every rank from 0 once, got an array of shape "
                f"{self.ranks.shape} with the ranks {sorted(self.ranks.flat)}"
            )
        self.mesh_shape = tuple(int(length) for length in self.ranks.shape)

    @classmethod
    def of(cls, topology: cluster.Topology) -> MeshTopology:
        """Return the mesh of a world's ranks.  Local."""
        if not topology.is_uniform:
            return cls(numpy.arange(topology.size).reshape(1, 1, 1, -1))
        return cls(numpy.array(topology.ranks_of_node)[:, None, None, :])

    @property
    def num_tasks(self) -> int:
        """The number of nodes, 1 where they differ in their numbers of ranks."""
        return self.mesh_shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """The number of ranks of each node."""
        return self.ranks.size // self.num_tasks

    def __repr__(self) -> str:
        return f"<Topology mesh_shape={list(self.mesh_shape)}>"


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> MeshTopology:
    """Return the mesh that the ranks form.

    Collective: every rank calls it in the same order; it may start MPI.  There is no TPU to be initialized, and
    nothing is wiped: calling it again returns the same.
    """
    communicator = world_communicator()
    topology = MeshTopology.of(communicator.topology)
    if communicator.rank == 0:
        _log.info("Finished initializing TPU system: a mesh of MPI ranks, of shape %s", list(topology.mesh_shape))
    return topology


def shutdown_tpu_system(cluster_resolver: ClusterResolver | None = None) -> None:
    """Do nothing: there is no TPU.  Local."""
