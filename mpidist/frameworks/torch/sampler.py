"""`DistributedSampler`: which rows of a data set a replica reads."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from mpidist.frameworks.torch.replicas import replicas_of


class DistributedSampler(torch.utils.data.Sampler[int]):
    """The rows of a data set that one replica reads: every n-th of a permutation that all replicas make alike.

    Names and meaning are those of `torch.utils.data.distributed.DistributedSampler`.  So batch k of all replicas
    together is batch k of one process, with the rows of all replicas' batches.

    Parameters
    ----------
    dataset : sized
        Only its length counts.
    num_replicas, rank : int, optional
        By default those of the strategy in force, or all ranks.
    shuffle : bool
    seed : int
        The same on all ranks.
    drop_last : bool
        Whether rows that are left over are not read.
    padding : bool
        Whether some rows are read twice where the number of rows is no multiple of the number of replicas, so that all
        read as many; a warning says so.  False gives some replicas a row less, as `DistributedDataParallel.join` takes
        it.

    Raises
    ------
    ValueError
        `rank` is no rank of `num_replicas`.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        padding: bool = True,
    ) -> None:
        if num_replicas is None or rank is None:
            replicas = replicas_of()
            num_replicas = replicas.size if num_replicas is None else num_replicas
            rank = replicas.rank if rank is None else rank
        self.num_replicas, self.rank = num_replicas, rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank {self.rank} is no rank of {self.num_replicas}")
        self.dataset, self.shuffle, self.seed, self.drop_last, self.padding = dataset, shuffle, seed, drop_last, padding
        self.epoch = 0
        left = len(dataset) % self.num_replicas
        if left and padding and not drop_last and self.rank == 0:
            warnings.warn(
                f"{len(dataset)} rows over {self.num_replicas} replicas: {self.num_replicas - left} rows are read "
                "twice in each epoch. drop_last=True leaves rows out; padding=False gives some replicas a row less",
                stacklevel=2,
            )

    @property
    def num_samples(self) -> int:
        """How many rows this replica reads."""
        rows, replicas = len(self.dataset), self.num_replicas
        if self.drop_last:
            return rows // replicas
        return math.ceil(rows / replicas) if self.padding else max(0, math.ceil((rows - self.rank) / replicas))

    @property
    def total_size(self) -> int:
        """How many rows all replicas read, repeated ones included."""
        if self.drop_last or self.padding:
            return self.num_samples * self.num_replicas
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        rows = len(self.dataset)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(rows, generator=generator).tolist()
        else:
            order = list(range(rows))
        total = self.total_size
        if total > rows and rows:
            order *= math.ceil(total / rows)
        return iter(order[self.rank : total : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass shuffle by this number; the same on all ranks.  Local."""
        self.epoch = epoch
