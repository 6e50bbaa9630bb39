"""What TensorFlow's programs call to connect to a cluster; MPI has done it when a program starts."""

from __future__ import annotations

from typing import Any


def experimental_connect_to_cluster(cluster_spec_or_resolver: Any, *args: Any, **kwargs: Any) -> None:
    """Do nothing: a launcher and MPI connect the ranks.  Local."""


def experimental_connect_to_host(remote_host: Any = None, job_name: str = "worker") -> None:
    """Do nothing: a launcher and MPI connect the ranks.  Local."""
