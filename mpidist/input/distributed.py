"""`DistributedDataset`: this replica's part of every global batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from mpidist.input import sharding
from mpidist.input.dataset import Dataset


class DistributedDataset:
    """This replica's part of every global batch of a data set, epoch after epoch.

    Every rank computes the same global batches and takes its own rows out of the source; nothing is sent.  A part
    may be empty (shape ``(0, ...)``): its replica still joins the collectives of the step.  Every ``iter()`` is
    the next epoch, with a shuffle of its own, from its beginning.

    Parameters
    ----------
    dataset : Dataset
        Batched by the global batch.
    replica_id, num_replicas : int

    Raises
    ------
    ValueError
        If `dataset` has no batches.
    """

    def __init__(self, dataset: Dataset, replica_id: int, num_replicas: int) -> None:
        if dataset.batch_size is None:
            raise ValueError(
                "Call the `batch` method on the input Dataset in order to be able to split your input across "
                f"{num_replicas} replicas; the size given to it is the global one."
            )
        self.dataset = dataset
        self.replica_id = replica_id
        self.num_replicas = num_replicas
        self._position = (0, 0)
        self._next_start = (0, 0)

    @property
    def element_spec(self) -> Any:
        """`ArraySpec` of every array of this replica's part; the number of rows is None unless it never varies."""
        if not self.dataset.drop_remainder or self.dataset.batch_size is None:
            return self.dataset.element_spec
        return self.dataset.batch_spec(len(sharding.part(self.dataset.batch_size, self.replica_id, self.num_replicas)))

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next part belongs to, from 0."""
        return self._position[0]

    def state(self) -> dict[str, int]:
        """Return the position of the next part as plain numbers, for a checkpoint.  Local."""
        epoch, step = self._position
        return {"epoch": epoch, "step": step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` begin at a position that `state` gave, on any number of replicas.  Local."""
        self._position = self._next_start = (int(state["epoch"]), int(state["step"]))

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        epoch, step = self._position = self._next_start
        self._next_start = (epoch + 1, 0)
        return self._parts(epoch, step)

    def _parts(self, epoch: int, first_step: int) -> Iterator[Any]:
        batches = itertools.islice(self.dataset.rows_of_batches(epoch), first_step, None)
        for step, rows in enumerate(batches, first_step):
            mine = sharding.part(len(rows), self.replica_id, self.num_replicas)
            # A part that is handed out counts as used: a checkpoint after its step goes on with the next one.
            self._position = (epoch, step + 1)
            yield self.dataset.take_rows(rows[mine.start : mine.stop])
        self._position = (epoch + 1, 0)
