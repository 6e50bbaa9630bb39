"""Where the cluster is read from: one launcher or source a file.

This module is public as ``mpidist.cluster_resolver``.  To add a resolver, write its file and add it here.
"""

from __future__ import annotations

from mpidist.cluster.resolvers.base import ClusterResolver
from mpidist.cluster.resolvers.mpi import MPIClusterResolver, TPUClusterResolver
from mpidist.cluster.resolvers.simple import SimpleClusterResolver
from mpidist.cluster.resolvers.slurm import SlurmClusterResolver
from mpidist.cluster.resolvers.tf_config import TFConfigClusterResolver
from mpidist.cluster.resolvers.union import UnionResolver

UnionClusterResolver = UnionResolver

__all__ = [
    "ClusterResolver",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionClusterResolver",
    "UnionResolver",
]
