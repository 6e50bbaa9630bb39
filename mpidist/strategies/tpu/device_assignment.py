"""`DeviceAssignment`: which ranks form which replica, and which logical device each of them is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from mpidist.strategies.tpu.topology import MeshTopology


class DeviceAssignment:
    """The ranks of every replica.  Local.

    Parameters
    ----------
    topology : MeshTopology
    core_assignment : array of int, shape (replicas, logical devices, 4)
        The place in the mesh of each logical device of each replica.  Every rank must have one.

    Attributes
    ----------
    topology : MeshTopology
    core_assignment : array
    num_replicas, num_cores_per_replica : int
        The number of groups, and of ranks in each.

    Raises
    ------
    ValueError
        The places are not in the mesh, or a rank belongs to no replica, or to two.
    """

    def __init__(self, topology: MeshTopology, core_assignment: Any) -> None:
        if not isinstance(topology, MeshTopology):
            raise ValueError(f"topology is not a Topology object: got {type(topology).__name__}")
        core_assignment = numpy.asarray(core_assignment, dtype=int)
        if core_assignment.ndim != 3 or core_assignment.shape[2] != topology.mesh_rank:
            raise ValueError(
                f"core_assignment must have the shape [replicas, logical devices, {topology.mesh_rank}], got "
                f"{list(core_assignment.shape)}"
            )
        outside = (core_assignment < 0) | (core_assignment >= topology.mesh_shape)
        if outside.any():
            raise ValueError(f"core_assignment has places outside of a mesh of shape {list(topology.mesh_shape)}")
        self.topology = topology
        self.core_assignment = core_assignment
        self.num_replicas, self.num_cores_per_replica = core_assignment.shape[:2]
        #: By replica and logical device: the rank.
        self.ranks = topology.ranks[tuple(numpy.moveaxis(core_assignment, 2, 0))]
        _check_every_rank(self.ranks, topology.ranks.size)

    @staticmethod
    def build(
        topology: MeshTopology,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: int | None = None,
    ) -> DeviceAssignment:
        """Deal the ranks into replicas: blocks of `computation_shape` in the mesh, in rank order.  Local.

        Parameters
        ----------
        topology : MeshTopology
        computation_shape : sequence of 4 int, optional
            ``[1, 1, 1, 2]`` makes two ranks of a node one replica; by default each rank is one.
        computation_stride : sequence of 4 int, optional
            The distance of a replica's ranks along each axis; 1 by default.
        num_replicas : int, optional
            As many as there are ranks for, which is also the default: no rank may be left over.

        Raises
        ------
        ValueError
            Shapes and strides are not 4 positive numbers, or blocks do not fit into the mesh, or not evenly.
        """
        if not isinstance(topology, MeshTopology):
            raise ValueError(f"topology is not a Topology object: got {type(topology).__name__}")
        shape = _lengths("computation_shape", computation_shape, topology)
        stride = _lengths("computation_stride", computation_stride, topology)
        footprint = shape * stride
        mesh = numpy.array(topology.mesh_shape)
        if (footprint > mesh).any():
            raise ValueError(
                f"computation footprint {footprint.tolist()} does not fit in TPU topology shape {mesh.tolist()}, the "
                f"mesh of {topology.ranks.size} ranks; start more of them, or choose a smaller computation_shape"
            )
        places = numpy.array(list(_blocks(mesh // footprint, footprint, shape, stride)))
        if num_replicas is not None and num_replicas > len(places):
            raise ValueError(
                f"requested {num_replicas} replicas but only {len(places)} replicas with shape {shape.tolist()} and "
                f"stride {stride.tolist()} fit in a mesh of shape {mesh.tolist()}"
            )
        return DeviceAssignment(topology, places[:num_replicas])

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Return the place in the mesh of a logical device.  Local."""
        return tuple(int(place) for place in self.core_assignment[replica, logical_core])

    def rank(self, replica: int, logical_core: int) -> int:
        """Return the rank that is a logical device of a replica.  Local."""
        return int(self.ranks[replica, logical_core])

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the replica that a rank belongs to, and which of its logical devices it is.  Local."""
        ((replica, logical_device),) = numpy.argwhere(self.ranks == rank)
        return int(replica), int(logical_device)

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Return the replicas whose logical device is on a node.  Local."""
        nodes = self.core_assignment[:, logical_core, 0]
        return [replica for replica, node in enumerate(nodes.tolist()) if node == task_id]

    def __repr__(self) -> str:
        return f"<DeviceAssignment {self.num_replicas} replicas of {self.num_cores_per_replica} ranks>"


def _lengths(name: str, given: Sequence[int] | None, topology: MeshTopology) -> Any:
    lengths = numpy.ones(topology.mesh_rank, int) if given is None else numpy.asarray(given, dtype=int)
    if lengths.shape != (topology.mesh_rank,):
        raise ValueError(f"{name} must have shape [{topology.mesh_rank}]; got {list(lengths.shape)}")
    if (lengths < 1).any():
        raise ValueError(f"{name} must be positive; got {name}={lengths.tolist()}")
    return lengths


def _blocks(counts: Any, footprint: Any, shape: Any, stride: Any) -> Iterator[list[Any]]:
    """Yield for each replica the places of its logical devices; those of a block interleave by the stride."""
    for block in numpy.ndindex(*counts):
        for offset in numpy.ndindex(*stride):
            yield [block * footprint + offset + place * stride for place in map(numpy.array, numpy.ndindex(*shape))]


def _check_every_rank(ranks: Any, size: int) -> None:
    counts = numpy.bincount(ranks.reshape(-1), minlength=size)
    if (counts == 1).all():
        return
    twice, never = numpy.flatnonzero(counts > 1).tolist(), numpy.flatnonzero(counts == 0).tolist()
    problems = ([f"ranks {twice} are in several replicas"] if twice else []) + (
        [f"ranks {never} belong to no replica"] if never else []
    )
    raise ValueError(
        f"{ranks.shape[0]} replicas of {ranks.shape[1]} ranks do not make up a job of {size} ranks: "
        f"{'; '.join(problems)}. Choose a computation_shape that divides the mesh, or start another number of ranks"
    )
