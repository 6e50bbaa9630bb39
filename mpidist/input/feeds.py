"""`Feed`: where the batches of one rank come from, and how the ranks keep in step over them.

- `ExactFeed`: this replica's rows of every global batch.  Step s is the same rows on any number of ranks.
- `WorkerFeed`: every rank goes through rows of its own (FILE, OFF) in batches that sum to the global batch.
- `FunctionFeed`: every rank has a data set of its own, as its batches come.

The last two ask at every step whether any rank has a batch left; who has none gets an empty one.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy

from mpidist.collectives.mismatch import fact
from mpidist.input import autoshard, sharding, structure
from mpidist.input.agreement import Agreement, watched
from mpidist.input.batches import Batch, rebatched
from mpidist.input.cache import Prefetch
from mpidist.input.dataset import Dataset
from mpidist.input.node import Node, with_rows
from mpidist.input.options import AutoShardPolicy
from mpidist.input.sharding import MeasuredPart, Part, Share

#: What a feed gives in place of a batch when there are no more.
END: Any = object()

#: What a rank has to offer at a step: nothing, not even shapes; shapes; a batch, to which its rows are added.
_NOTHING, _SHAPES, _BATCH = range(3)


class Position(NamedTuple):
    """How far a data set has been walked through.

    Parameters
    ----------
    epoch, step : int
        Of the next batch.
    rows : array of int64, shape (pipelines,), or None
        How many rows every pipeline has handed out in this epoch, where each has rows of its own.
    """

    epoch: int = 0
    step: int = 0
    rows: numpy.ndarray | None = None


class Feed:
    """Where the batches of one rank come from.

    Parameters
    ----------
    agreement : Agreement
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement

    def open(self, position: Position) -> Iterator[tuple[Any, Any]]:
        """Yield (batch, note) from a position on; may run in a thread.  The note is for `agreed`."""
        raise NotImplementedError(type(self).__name__)

    def agreed(self, batch: Any, note: Any, position: Position) -> tuple[Any, numpy.ndarray | None, Share | None]:
        """Return the batch that this rank gets (or END), the rows of `Position` after it, and the replicas' `Share`.

        Collective where the ranks have to keep in step.  `batch` is END where this rank has none.  One replica alone
        has no `Share`.
        """
        raise NotImplementedError(type(self).__name__)

    def state(self, position: Position) -> dict[str, Any]:
        """Return a position as numbers and small arrays.  Local."""
        return {"epoch": position.epoch, "step": position.step}

    def position(self, state: Mapping[str, Any]) -> Position:
        """Return the position that a state of any number of ranks is for this feed.  Local."""
        return Position(int(state["epoch"]), int(state["step"]))


class ExactFeed(Feed):
    """This replica's rows of every global batch.

    Parameters
    ----------
    node : Node
        Of global batches.
    part : Part
    agreement : Agreement
    """

    def __init__(self, node: Node, part: Part, agreement: Agreement) -> None:
        super().__init__(agreement)
        self._node, self._part = node, part
        self._watched = watched(node) if agreement.needed else []

    def open(self, position: Position) -> Iterator[tuple[Any, Any]]:
        """Yield the parts; the note is the replicas' share, and the checksum of what was read for it."""
        replica, replicas = self._part.replica_id, self._part.num_replicas
        for item in self._node.items(position.epoch, position.step):
            part = MeasuredPart(replica, replicas)
            batch = item(part)
            yield batch, (self._share(batch, part), [source.seen for source in self._watched])

    def _share(self, batch: Any, part: Part) -> Share | None:
        """Return what all replicas have, by index arithmetic; ValueError if this one has other rows than that says."""
        if part.num_replicas == 1:
            return None
        assert part.rows is not None, "a batch was made without a look at its part"
        found, expected = _rows_of(batch), len(self._part.of(part.rows))
        if found != expected:
            raise ValueError(
                f"map(..., by_rows=True) has made {found} rows of {expected}; a function that changes the number of "
                "rows has to get whole batches: leave by_rows out"
            )
        return Share(part.rows, part.rows % part.num_replicas == 0)

    def agreed(self, batch: Any, note: Any, position: Position) -> tuple[Any, numpy.ndarray | None, Share | None]:
        """Return the batch, after a comparison where only reading tells whether the ranks have the same."""
        share, seen = note or (None, [])
        if self._watched:
            read = "none: the data set has ended" if batch is END else " ".join(f"{each:#010x}" for each in seen)
            facts = [fact("step", position.step), fact(f"checksum of what was read for step {position.step}", read)]
            self.agreement.compare("next batch of a distributed data set", facts)
        return batch, None, share


class _VotingFeed(Feed):
    """A feed whose ranks may be out of batches at different steps.

    Parameters
    ----------
    pipeline, pipelines : int
        This rank's number among those that read, and how many there are.
    agreement : Agreement
    """

    def __init__(self, pipeline: int, pipelines: int, agreement: Agreement) -> None:
        super().__init__(agreement)
        self._pipeline, self._pipelines = pipeline, pipelines
        self._empty: Any = END

    def _vote(self, batch: Any, rows: numpy.ndarray) -> tuple[Any, numpy.ndarray, Share | None]:
        """Return this rank's batch, an empty one where it has none, or END where nobody has; and everybody's rows."""
        if not self.agreement.needed:
            return batch, rows, None
        if batch is not END:
            self._empty = structure.rows(batch, range(0))
        offers = numpy.zeros(self._pipelines, numpy.int64)
        offers[self._pipeline] = self._offer(batch)
        known = self.agreement.largest(numpy.concatenate([offers, rows]))
        offers, rows = known[: self._pipelines], known[self._pipelines :]
        if offers.max() < _BATCH:
            return END, rows, None
        if offers.min() == _NOTHING:
            self._share_shapes()
        counts = numpy.maximum(offers - _BATCH, 0)
        share = Share(int(counts.sum()), bool((counts == counts[0]).all()))
        return (self._empty if batch is END else batch), rows, share

    def _offer(self, batch: Any) -> int:
        if batch is END:
            return _NOTHING if self._empty is END else _SHAPES
        return _BATCH + _rows_of(batch)

    def _share_shapes(self) -> None:
        """Let a rank that never had a batch know from another what batches are like.  Collective."""
        mine = b"" if self._empty is END else json.dumps(_described(self._empty)).encode()
        answers = self.agreement.exchange(mine, "shapes of an empty batch")
        if self._empty is END:
            self._empty = _made(json.loads(next(answer for answer in answers if answer)))


class WorkerFeed(_VotingFeed):
    """Batches of rows that every rank goes through by itself: those of its files, or all.

    An epoch is walked by *pipelines*, one for each rank there was at its beginning.  A run that was resumed on other
    ranks deals the pipelines to them, each from where it was, until the end of the epoch.

    Parameters
    ----------
    dataset : Dataset
    pipeline, pipelines : int
    agreement : Agreement
    """

    def __init__(self, dataset: Dataset, pipeline: int, pipelines: int, agreement: Agreement) -> None:
        super().__init__(pipeline, pipelines, agreement)
        self._node = dataset._node
        self._by_file = autoshard.policy_of(dataset) is AutoShardPolicy.FILE
        self._sizes = sharding.rotated_batch_sizes(dataset.batch_size or 1, pipeline, pipelines, 1)
        if self._by_file:
            autoshard.by_file(self._node, pipelines, pipeline)  # raises where it cannot be

    def open(self, position: Position) -> Iterator[tuple[Any, Any]]:
        """Yield batches; the note is how many rows of each pipeline have been handed out with it."""
        rows = self._rows(position)
        begun: list[tuple[int, int]] = []  # (pipeline, rows of this rank before it)
        sizes = itertools.islice(itertools.cycle(self._sizes), position.step % len(self._sizes), None)
        handed = 0
        for batch in rebatched(self._batches(position.epoch, rows, begun), sizes):
            handed += structure.rows_of(batch)
            yield batch, _progress(rows, begun, handed)

    def _rows(self, position: Position) -> numpy.ndarray:
        return numpy.zeros(self._pipelines, numpy.int64) if position.rows is None else position.rows

    def _batches(self, epoch: int, rows: numpy.ndarray, begun: list[tuple[int, int]]) -> Iterator[Any]:
        read = 0
        mine = range(self._pipeline, len(rows), self._pipelines) if self._by_file else [self._pipeline]
        for pipeline in mine:
            node = autoshard.by_file(self._node, len(rows), pipeline) if self._by_file else self._node
            begun.append((pipeline, read))
            for batch in _from_row(node, epoch, int(rows[pipeline])):
                read += structure.rows_of(batch)
                yield batch

    def agreed(self, batch: Any, note: Any, position: Position) -> tuple[Any, numpy.ndarray | None, Share | None]:
        """Return the batch, an empty one, or END."""
        rows = self._rows(position)
        mine = range(self._pipeline, len(rows), self._pipelines) if self._by_file else [self._pipeline]
        own = numpy.zeros(len(rows), numpy.int64)
        own[mine] = (rows if note is None else note)[mine]
        return self._vote(batch, own)

    def state(self, position: Position) -> dict[str, Any]:
        """Return a position with the rows that every pipeline has handed out."""
        return {**super().state(position), "rows": self._rows(position).copy()}

    def position(self, state: Mapping[str, Any]) -> Position:
        """Return the position; without files, ranks that are new begin where the slowest was."""
        found, rows = super().position(state), numpy.asarray(state.get("rows", ()), numpy.int64)
        if not rows.any():
            return Position(found.epoch, found.step)
        if not self._by_file and len(rows) != self._pipelines:
            rows = numpy.full(self._pipelines, rows.min())
        return Position(found.epoch, found.step, rows)


class FunctionFeed(_VotingFeed):
    """The batches of a data set of this rank's own, as they come.

    Parameters
    ----------
    dataset : Dataset or iterable of batches
    pipeline, pipelines : int
    agreement : Agreement
    """

    def __init__(self, dataset: Any, pipeline: int, pipelines: int, agreement: Agreement) -> None:
        super().__init__(pipeline, pipelines, agreement)
        self._dataset = dataset

    def open(self, position: Position) -> Iterator[tuple[Any, Any]]:
        """Yield the batches."""
        if isinstance(self._dataset, Dataset):
            for item in self._dataset._node.items(position.epoch, position.step):
                yield item(), None
        else:
            for batch in itertools.islice(self._dataset, position.step, None):
                yield (structure.from_batch(batch) if self.agreement.needed else batch), None

    def agreed(self, batch: Any, note: Any, position: Position) -> tuple[Any, numpy.ndarray | None, Share | None]:
        """Return the batch, an empty one, or END."""
        batch, _, share = self._vote(batch, numpy.zeros(0, numpy.int64))
        return batch, None, share

    def state(self, position: Position) -> dict[str, Any]:
        """Return a position with the number of data sets."""
        return {**super().state(position), "pipelines": self._pipelines}

    def position(self, state: Mapping[str, Any]) -> Position:
        """Return the position; in the middle of an epoch, of as many data sets only."""
        found, pipelines = super().position(state), int(state.get("pipelines", self._pipelines))
        if found.step == 0 or pipelines == self._pipelines:
            return found
        warnings.warn(
            f"epoch {found.epoch} of a data set from a function begins again: it was left at step {found.step} of "
            f"{pipelines} data sets, and the function has made {self._pipelines} others now",
            RuntimeWarning,
            stacklevel=2,
        )
        return Position(found.epoch)


# -- rows of pipelines -------------------------------------------------------------------------------------------------


def _from_row(node: Node, epoch: int, first: int) -> Iterator[Any]:
    """Yield the batches of an epoch from row number `first` on; those before it are not read if they can be told."""
    size = node.batch_size or 0
    # what batches have before them is known of an index of batches made of rows; elsewhere all are walked through
    step = first // size if size and node.indexed and _is_even(node) else 0
    left = first - step * size
    for item in node.items(epoch, step):
        batch = item()
        rows = structure.rows_of(batch)
        if left < rows:
            yield structure.rows(batch, range(left, rows)) if left else batch
        left = max(left - rows, 0)


def _is_even(node: Node) -> bool:
    """Return whether all batches but the last have the same number of rows: nothing is done to them behind `batch`."""
    return isinstance(node.child if isinstance(node, Prefetch) else node, Batch)


def _progress(rows: numpy.ndarray, begun: list[tuple[int, int]], handed: int) -> numpy.ndarray:
    """Return how many rows of each pipeline are handed out when this rank has handed out `handed` of its own."""
    found = rows.copy()
    ends = [first for _, first in begun[1:]] + [handed]
    for (pipeline, first), end in zip(begun, ends, strict=True):
        found[pipeline] += max(min(end, handed) - first, 0)
    return found


def _rows_of(batch: Any) -> int:
    """Return the length of a batch's first array; 0 where it has none, and so no rows that could be counted."""
    return next((length for leaf in structure.leaves(batch) for length in numpy.shape(leaf)[:1]), 0)


# -- shapes as text ----------------------------------------------------------------------------------------------------


def _described(value: Any) -> Any:
    if isinstance(value, dict):
        return {"dict": [[key, _described(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_described(item) for item in value]}
    dtype = numpy.dtype(value.dtype)
    return [dtype.name if dtype.kind == "V" else dtype.str, list(value.shape)]


def _made(described: Any) -> Any:
    if isinstance(described, list):
        return numpy.empty(described[1], described[0])
    if "dict" in described:
        return {key: _made(item) for key, item in described["dict"]}
    return tuple(_made(item) for item in described["tuple"])


# -- which feed --------------------------------------------------------------------------------------------------------


def feed_of(dataset: Dataset, pipeline: int, pipelines: int, agreement: Agreement, is_one_worker: bool) -> Feed:
    """Return the feed that the policy of a data set asks for.  Local.

    Parameters
    ----------
    dataset : Dataset
    pipeline, pipelines : int
        This replica, and how many there are.
    agreement : Agreement
    is_one_worker : bool
        Whether the replicas count as one worker, to which no policy applies.
    """
    policy = autoshard.policy_of(dataset)
    if is_one_worker or policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA):
        if pipeline == 0 and not is_one_worker:
            autoshard.warn_of_reading_all(dataset, pipelines)
        return ExactFeed(dataset._node, Part(pipeline, pipelines), agreement)
    return WorkerFeed(dataset, pipeline, pipelines, agreement)


def part_spec(dataset: Dataset, part: Part, exact: bool) -> Any:
    """Return the `ArraySpec` of every array of this replica's parts.  Local."""
    if dataset.drop_remainder and dataset.batch_size is not None:
        return with_rows(dataset.element_spec, len(part.of(dataset.batch_size)) if exact else None)
    return dataset.element_spec
