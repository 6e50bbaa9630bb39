"""Names that TensorFlow has under ``tf.config``."""

from __future__ import annotations

from typing import Any

from mpidist.arrays import list_physical_devices
from mpidist.hints import public_module

__all__ = ["experimental_connect_to_cluster", "experimental_connect_to_host", "list_physical_devices"]

public_module(__name__)


def experimental_connect_to_cluster(cluster_spec_or_resolver: Any, *args: Any, **kwargs: Any) -> None:
    """Do nothing: a launcher and MPI connect the ranks.  Local."""


def experimental_connect_to_host(remote_host: Any = None, job_name: str = "worker") -> None:
    """Do nothing: a launcher and MPI connect the ranks.  Local."""
