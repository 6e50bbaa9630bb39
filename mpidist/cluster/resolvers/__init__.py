"""Where the cluster is read from: one launcher or source a file, loaded on first use.

This module is public as ``mpidist.cluster_resolver``.  To add a resolver, write its file and add its line here.
"""

from __future__ import annotations

import importlib
from typing import Any

#: Public name -> "module:class".
RESOLVERS = {
    "ClusterResolver": "mpidist.cluster.resolvers.base:ClusterResolver",
    "MPIClusterResolver": "mpidist.cluster.resolvers.mpi:MPIClusterResolver",
    "SimpleClusterResolver": "mpidist.cluster.resolvers.simple:SimpleClusterResolver",
    "SlurmClusterResolver": "mpidist.cluster.resolvers.slurm:SlurmClusterResolver",
    "TFConfigClusterResolver": "mpidist.cluster.resolvers.tf_config:TFConfigClusterResolver",
    "TPUClusterResolver": "mpidist.cluster.resolvers.tpu:TPUClusterResolver",
    "UnionClusterResolver": "mpidist.cluster.resolvers.union:UnionResolver",
    "UnionResolver": "mpidist.cluster.resolvers.union:UnionResolver",
}

__all__ = ["RESOLVERS", *RESOLVERS]  # noqa: F822 - the names are made by __getattr__


def __getattr__(name: str) -> Any:
    if name not in RESOLVERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; the resolvers are {', '.join(RESOLVERS)}")
    module, _, attribute = RESOLVERS[name].partition(":")
    value = globals()[name] = getattr(importlib.import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
