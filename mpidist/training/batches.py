"""The data of `fit`, `evaluate` and `predict` as this replica's batches, epoch after epoch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy

from mpidist.input import structure
from mpidist.input.dataset import Dataset
from mpidist.input.distributed import DistributedDataset, DistributedIterator, as_dataset, batched
from mpidist.input.sharding import Share

#: Default rows of a batch of arrays, as in Keras.
BATCH_SIZE = 32


def distributed(
    strategy: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int | None = None,
    seed: int | None = None,
) -> Any:
    """Return an iterable of this replica's parts of the global batches.  Collective where there are several."""
    if strategy.extended.has_coordinator:
        raise ValueError(
            "a Trainer has every worker train by itself, and a ClusterCoordinator has been made, which calls functions "
            "on the workers: schedule the steps with it, or make no coordinator"
        )
    if y is None:
        _require_no_rows_of_a_list(x)
    if are_arrays(x if y is None else (x,)):
        if y is None and sample_weight is not None:
            raise ValueError("sample_weight needs y: batches are (inputs, labels, weights)")
        given = tuple(part for part in (x, y, sample_weight) if part is not None)
        dataset = Dataset.from_arrays(given if len(given) > 1 else x)
        dataset = dataset if seed is None else dataset.shuffle(seed=seed)
        return strategy.experimental_distribute_dataset(dataset.batch(BATCH_SIZE if batch_size is None else batch_size))
    named = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
    if wrong := [name for name, value in named.items() if value is not None]:
        raise ValueError(
            f"{', '.join(wrong)} cannot be given with a {type(x).__name__}, which gives batches of its own"
        )
    if isinstance(x, (DistributedDataset, DistributedIterator)):
        return x
    if isinstance(x, Dataset):
        batched(x, strategy.num_replicas_in_sync)
    found = strategy.experimental_distribute_dataset(x)
    # strategies that distribute nothing leave to the user what is not theirs; here it gets a position
    return strategy.experimental_distribute_dataset(as_dataset(x)) if found is x else found


def are_arrays(value: Any) -> bool:
    """Return whether these are arrays, and not something that gives batches.  Local.

    A list of arrays gives batches; as a part of something, it is one array.
    """
    if isinstance(value, list):
        return not any(map(_is_batch, value))
    return all(map(_is_array, structure.leaves(value)))


def _require_no_rows_of_a_list(x: Any) -> None:
    """Raise ValueError if this is a list of arrays that may be rows as well as batches."""
    shapes = {getattr(item, "shape", None) for item in x} if isinstance(x, list) else set()
    if len(shapes) == 1 and len(shape := shapes.pop() or ()) == 1:
        raise ValueError(
            f"a list of {len(x)} arrays of shape {tuple(shape)} may be rows, or batches of numbers; give "
            "`numpy.stack(x)` for rows, or `[(batch,) for batch in x]` for batches"
        )


def _is_batch(item: Any) -> bool:
    """Return whether an item of a list is arrays, and not a number, or a row of numbers."""
    if isinstance(item, list):
        return any(map(_is_batch, item))
    return bool(getattr(item, "shape", ())) or _has_arrays(item)


def _has_arrays(item: Any) -> bool:
    return isinstance(item, (tuple, dict)) and any(map(numpy.ndim, structure.leaves(item)))


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, list):
        return not any(map(_has_arrays, leaf))
    return hasattr(leaf, "__array__") or hasattr(leaf, "__dlpack__")


class Batches:
    """The batches of one epoch after another."""

    def __init__(self, data: Any, steps_per_epoch: int | None = None) -> None:
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ValueError(f"the number of steps must be 1 or more, got {steps_per_epoch}")
        self.data = data
        self.steps_per_epoch = steps_per_epoch
        self._running: Iterator[Any] | None = None
        self._source: Iterable[Any] = ()

    @classmethod
    def of_evaluation(cls, data: Any, steps: int | None) -> Batches:
        """Return the batches of an evaluation; ValueError where it would not end."""
        owner = data._owner if isinstance(data, DistributedIterator) else data
        dataset = getattr(owner, "dataset", None)
        if steps is None and isinstance(dataset, Dataset) and dataset.cardinality() == -1:
            raise ValueError("the data set repeats forever; give validation_steps, or steps")
        return cls(data, steps)

    @property
    def share(self) -> Share | None:
        """What all replicas together have of the batch that was given last; None where there is one replica."""
        return getattr(self._source, "share", None)

    @property
    def are_left(self) -> bool:
        """Whether the data were restored since the batch that was given last: the next one is of another place."""
        return getattr(self._running, "_is_left", False)

    @property
    def steps(self) -> int | None:
        """Batches of an epoch, None where that is not known before its end."""
        if self.steps_per_epoch is not None:
            return self.steps_per_epoch
        try:
            return len(self.data)
        except TypeError:
            return None

    def epoch(self, first_step: int = 0) -> Iterator[Any]:
        """Yield the batches of the next epoch, from a step on."""
        if self.steps_per_epoch is None:
            self._running = None
            while (batch := self._next(may_begin=False)) is not _NONE:
                yield batch
            return
        for step in range(first_step, self.steps_per_epoch):
            batch = self._next(may_begin=step == 0)
            if batch is _NONE:
                warnings.warn(
                    f"the data ended after {step} of {self.steps_per_epoch} steps of an epoch; give it `repeat()`, or "
                    "fewer steps",
                    stacklevel=3,
                )
                return
            yield batch

    def from_the_start(self) -> Iterator[Any]:
        """Yield the batches of an epoch that does not go on where the one before has ended."""
        self._running = None
        return self.epoch()

    def _next(self, may_begin: bool) -> Any:
        """Return the next batch; begins a new iteration where the last one, or a restored position, is at its end."""
        if self._running is None or self.are_left:
            self._running = iter(self.data)
        batch = next(self._running, _NONE)
        if batch is _NONE:
            self._running = iter(self.data) if may_begin else None
            batch = next(self._running, _NONE) if self._running is not None else _NONE
        self._source = self._running or ()
        return batch


_NONE = object()
