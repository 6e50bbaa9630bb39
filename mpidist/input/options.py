"""`Options` of data sets and `InputOptions` of their distribution."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class AutoShardPolicy(enum.Enum):
    """How the elements of a data set are dealt to ranks.

    Attributes
    ----------
    AUTO
        As DATA, after a look at whether FILE would spare reading.
    DATA
        Step s is exactly the global rows of step s, each on one rank, whatever the number of ranks.
    FILE
        A rank reads whole files, those whose number is its own modulo the ranks; an epoch has all rows once, in which
        step is up to the files.
    OFF
        Every rank goes through all rows.
    HINT
        As OFF.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class InputReplicationMode(enum.Enum):
    """How often the function of `distribute_datasets_from_function` is called; here a rank is a replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(frozen=True)
class InputOptions:
    """How `experimental_distribute_dataset` hands out parts of batches.

    Parameters
    ----------
    experimental_fetch_to_device : bool
        Whether parts are copied to the replica's device, where that is not the host.  Without any options they stay
        where the data set has them.
    experimental_replication_mode : InputReplicationMode
        With one replica a rank, both are the same.
    experimental_place_dataset_on_device : bool
        Needs PER_REPLICA and `experimental_fetch_to_device` False.
    experimental_per_replica_buffer_size : int
        How many parts are made and copied ahead of time; 0 is none.

    Raises
    ------
    ValueError
        If the options do not go together.
    """

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1

    def __post_init__(self) -> None:
        if self.experimental_per_replica_buffer_size < 0:
            size = self.experimental_per_replica_buffer_size
            raise ValueError(f"experimental_per_replica_buffer_size must be 0 or more, got {size}")
        per_replica = self.experimental_replication_mode is InputReplicationMode.PER_REPLICA
        if self.experimental_place_dataset_on_device and (self.experimental_fetch_to_device or not per_replica):
            raise ValueError(
                "experimental_place_dataset_on_device needs experimental_replication_mode=PER_REPLICA and "
                f"experimental_fetch_to_device=False, got {self}"
            )


@dataclass
class DistributeOptions:
    """Options of a data set that is distributed."""

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "auto_shard_policy":
            raise AttributeError(f"there is no option {name!r}; known: auto_shard_policy")
        super().__setattr__(name, AutoShardPolicy(value))


@dataclass
class Options:
    """Options of a data set, for `Dataset.with_options`; the place and names are those of ``tf.data.Options``.

    Attributes
    ----------
    experimental_distribute : DistributeOptions
        ``options.experimental_distribute.auto_shard_policy = AutoShardPolicy.FILE``
    """

    experimental_distribute: DistributeOptions = field(default_factory=DistributeOptions)
