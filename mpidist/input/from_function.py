"""`InputContext`: the argument of a function that makes a rank's own data set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InputContext:
    """What the function that makes a rank's data set is told.

    Parameters
    ----------
    num_input_pipelines : int
        How many ranks read data.
    input_pipeline_id : int
        This rank's number among them.
    num_replicas_in_sync : int
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the rows of one replica; ValueError when the global batch cannot be cut evenly.  Local."""
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size} is not divisible by `num_replicas_in_sync` "
                f"{self.num_replicas_in_sync}"
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True)
class ValueContext:
    """What the function of `experimental_distribute_values_from_function` is told.

    Parameters
    ----------
    replica_id_in_sync_group : int
    num_replicas_in_sync : int
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
