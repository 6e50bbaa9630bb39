"""Data sets that a user's function makes on every rank: `InputContext`, and the loop that keeps the ranks in step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mpidist.input import structure
from mpidist.input.dataset import Dataset


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


class DatasetFromFunction:
    """This rank's own batches, until every rank is out of them; a rank that is out early gets empty ones.

    Collective: every rank iterates, and before each batch the ranks tell each other whether there is one.

    Parameters
    ----------
    dataset : iterable
        Of batches for one replica: nested tuples and dicts of arrays.
    any_fn : callable
        ``any_fn(flag)`` returns whether the flag is true on any rank.  Collective.
    """

    def __init__(self, dataset: Iterable[Any], any_fn: Callable[[bool], bool]) -> None:
        self.dataset = dataset
        self._any_fn = any_fn

    def __iter__(self) -> Iterator[Any]:
        batches, out = iter(self.dataset), object()
        # empty arrays are like the last batch, or like the source when there never was one
        like = self.dataset.arrays if isinstance(self.dataset, Dataset) else out
        while True:
            batch = next(batches, out)
            if not self._any_fn(batch is not out):
                return
            like = like if batch is out else batch
            if like is out:
                raise ValueError("this rank's data set gave no batch, while other ranks' did: its shapes are unknown")
            yield structure.map_leaves(lambda leaf: leaf[:0], like) if batch is out else batch
