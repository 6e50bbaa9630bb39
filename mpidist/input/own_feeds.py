"""The feeds of ranks that go through rows of their own, each by a *pipeline*.

At every step the ranks ask whether any of them has a batch left.  A rank without one gets an empty batch.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy

from mpidist.input import autoshard, sharding, structure
from mpidist.input.agreement import Agreement
from mpidist.input.batches import Batch, rebatched
from mpidist.input.dataset import Dataset
from mpidist.input.feeds import END, Feed, InputPosition, on_all_ranks, require_same
from mpidist.input.options import AutoShardPolicy
from mpidist.input.sharding import Share
from mpidist.input.stage import Stage
from mpidist.input.walks import Read, Walk

#: The vote of a rank at a step: it has nothing; it knows shapes; it has a batch, whose rows are added.
_NOTHING, _SHAPES, _BATCH = range(3)


class _OwnFeed(Feed):
    """A feed whose ranks may be out of batches at different steps."""

    def __init__(self, stage: Stage, pipeline: int, pipelines: int, agreement: Agreement) -> None:
        super().__init__(stage, agreement)
        self._pipeline, self._pipelines = pipeline, pipelines
        self._empty: Any = END
        self._orders: list[list[str]] | None = None

    def agreed(self, batch: Any, note: Any, position: InputPosition) -> tuple[Any, InputPosition, Share | None]:
        self._require_orders(position.orders, batch)
        batch, handed, share = self._vote(batch, self._own(note, position), position.step)
        if batch is END:
            return END, InputPosition(position.epoch + 1), None
        return batch, position.after(handed=handed), share

    def _own(self, note: Any, position: InputPosition) -> numpy.ndarray:
        """Return the rows that this rank's pipelines have handed out; zeros for the others."""
        raise NotImplementedError(type(self).__name__)

    def _require_orders(self, saved: list[list[str]] | None, batch: Any) -> None:
        """Exchange the orders of all ranks and the dtypes of a batch; compare with the saved orders.  Collective."""
        if self._orders is None:
            own = [self._order, {} if batch is END else structure.known_dtypes(batch)]
            answers = [json.loads(raw) for raw in self.agreement.exchange(json.dumps(own).encode(), "order of rows")]
            self._orders = [order for order, _ in answers]
            _require_same_dtypes([dtypes for _, dtypes in answers])
        if saved is None or len(saved) != len(self._orders):
            return
        for rank, (before, now) in enumerate(zip(saved, self._orders, strict=True)):
            require_same(before, now, f"on rank {rank} ")

    def _vote(self, batch: Any, handed: numpy.ndarray, step: int) -> tuple[Any, numpy.ndarray, Share | None]:
        """Return a batch (END where no rank has one), the rows that all pipelines have handed out, and the share."""
        if not self.agreement.needed:
            return batch, handed, None
        if batch is not END:
            self._empty = _emptied(batch)
        offers = numpy.zeros(self._pipelines, numpy.int64)
        offers[self._pipeline] = self._offer(batch)
        known = self.agreement.largest(numpy.concatenate([offers, handed.reshape(-1)]))
        offers, handed = known[: self._pipelines], known[self._pipelines :].reshape(handed.shape)
        if offers.max() < _BATCH:
            return END, handed, None
        if offers.min() == _NOTHING:
            self._share_shapes(numpy.flatnonzero(offers == _NOTHING).tolist(), step)
        counts = numpy.maximum(offers - _BATCH, 0)
        share = Share(int(counts.sum()), bool((counts == counts[0]).all()))
        return (self._empty if batch is END else batch), handed, share

    def _offer(self, batch: Any) -> int:
        if batch is END:
            return _NOTHING if self._empty is END else _SHAPES
        return _BATCH + structure.first_length(batch)

    def _share_shapes(self, without: list[int], step: int) -> None:
        """Send the shapes of a batch to the ranks that never had one.  Collective."""
        mine = b"" if self._empty is END else json.dumps(structure.outline(self._empty)).encode()
        answers = self.agreement.exchange(mine, "shapes of an empty batch")
        known = next((answer for answer in answers if answer), None)
        if known is None:
            raise on_all_ranks(
                f"ranks {without} of {self._pipelines} have no element for step {step}, and those that the others have "
                "have no rows, so that none can be empty; give every rank as many elements, or call `batch`"
            )
        if self._empty is END:
            self._empty = structure.without_rows(json.loads(known))


class WorkerFeed(_OwnFeed):
    """Batches that sum to the global batch, of the rows of this rank's files (FILE) or of all rows (OFF).

    An epoch has a pipeline for each rank there was at its beginning.  A run that was resumed on other ranks deals them
    to these, each from where it was, until the end of the epoch.
    """

    def __init__(self, dataset: Dataset, pipeline: int, pipelines: int, agreement: Agreement) -> None:
        super().__init__(dataset._stage, pipeline, pipelines, agreement)
        policy = autoshard.policy_of(dataset)
        self._by_file = policy is AutoShardPolicy.FILE
        self.title = f"batches of each rank's own by {policy.name}"
        self._batch_size = dataset.batch_size or 1
        # all batches but the last have as many rows
        self._is_even = isinstance(self._stage, Batch)
        if self._by_file:
            autoshard.by_file(self._stage, pipelines, pipeline)  # raises where it cannot be

    @cached_property
    def _order(self) -> list[str]:
        return self._stage.order(not self._is_even)

    def _sizes(self, pipeline: int) -> list[int]:
        return sharding.rotated_batch_sizes(self._batch_size, pipeline, self._pipelines, 1)

    def open(self, position: InputPosition) -> Iterator[tuple[Any, Any]]:
        rows = self._rows(position)
        begun: list[tuple[int, int]] = []  # (pipeline, rows of this rank before it)
        sizes = itertools.islice(itertools.cycle(self._sizes(self._pipeline)), position.step % self._pipelines, None)
        handed = 0
        for batch in rebatched(self._batches(position.epoch, rows, begun), sizes):
            handed += structure.rows_of(batch)
            yield batch, _progress(rows, begun, handed)

    def _rows(self, position: InputPosition) -> numpy.ndarray:
        return numpy.zeros(self._pipelines, numpy.int64) if position.handed is None else position.handed

    def _mine(self, rows: numpy.ndarray) -> Sequence[int]:
        return range(self._pipeline, len(rows), self._pipelines) if self._by_file else [self._pipeline]

    def _batches(self, epoch: int, rows: numpy.ndarray, begun: list[tuple[int, int]]) -> Iterator[Any]:
        read = 0
        for pipeline in self._mine(rows):
            stage = autoshard.by_file(self._stage, len(rows), pipeline) if self._by_file else self._stage
            begun.append((pipeline, read))
            for batch in self._from_row(stage, epoch, int(rows[pipeline])):
                read += structure.rows_of(batch)
                yield batch

    def _from_row(self, stage: Stage, epoch: int, first: int) -> Iterator[Any]:
        """Yield the batches of an epoch from row number `first` on; those before it are read where need be."""
        size = self._batch_size if stage.indexed and self._is_even else 0
        step = first // size if size else 0
        left = first - step * size
        for item in stage.items(epoch, step):
            batch = item()
            rows = structure.rows_of(batch)
            if left < rows:
                yield structure.rows(batch, range(left, rows)) if left else batch
            left = max(left - rows, 0)

    def _own(self, note: Any, position: InputPosition) -> numpy.ndarray:
        rows = self._rows(position)
        mine, own = self._mine(rows), numpy.zeros(len(rows), numpy.int64)
        own[mine] = (rows if note is None else note)[mine]
        return own

    def _require_orders(self, saved: list[list[str]] | None, batch: Any) -> None:
        if not self._by_file:
            super()._require_orders(saved, batch)

    def _state(self, position: InputPosition) -> dict[str, Any]:
        found = {"step": position.step, "rows": self._rows(position).copy()}
        orders = self._order if self._by_file else position.orders or self._orders
        return found if orders is None else {**found, "of": orders}

    def _position(self, state: Mapping[str, Any]) -> InputPosition:
        rows = numpy.asarray(state["rows"], numpy.int64)
        if self._by_file:
            require_same(state["of"], self._order)
        elif len(rows) != self._pipelines:  # ranks that are new begin where the slowest was
            rows = numpy.full(self._pipelines, rows.min())
        orders = None if self._by_file else state["of"]
        return InputPosition(int(state["epoch"]), int(state["step"]), handed=rows, orders=orders)

    def at_step(self, epoch: int, step: int) -> InputPosition:
        """Return the position of a step if every rank has rows enough for those before it."""
        rounds, more = divmod(step, self._pipelines)
        sizes = map(self._sizes, range(self._pipelines))
        return InputPosition(epoch, step, handed=numpy.array([rounds * sum(each) + sum(each[:more]) for each in sizes]))


class FunctionFeed(_OwnFeed):
    """The batches of a data set of this rank's own, as they come."""

    title = "batches from a function"

    def open(self, position: InputPosition) -> Iterator[tuple[Any, Any]]:
        first, *read = self._next(position)
        walk = Walk(None if self._foreign is None or position.handed is None else Read(*read))
        for offset, item in walk.through(self._stage.batches_from(position.epoch, first)):
            seen = Read() if self._foreign is None else walk.read(self._foreign)
            yield item(), (offset, seen.rows, seen.checksum)

    def _next(self, position: InputPosition) -> Sequence[int]:
        """Return this rank's offset, and the rows and the checksum that it has read."""
        if position.handed is None:
            return self._stage.offset_of(position.step), 0, 0
        return position.handed[self._pipeline].tolist()

    def _own(self, note: Any, position: InputPosition) -> numpy.ndarray:
        own = numpy.zeros((self._pipelines, 3), numpy.int64)
        own[self._pipeline] = self._next(position) if note is None else note
        return own

    def _state(self, position: InputPosition) -> dict[str, Any]:
        found = {"step": position.step, "pipelines": self._pipelines}
        if position.handed is None:
            return found
        return {**found, "handed": position.handed.copy(), "of": position.orders or self._orders}

    def _position(self, state: Mapping[str, Any]) -> InputPosition:
        epoch, step, pipelines = int(state["epoch"]), int(state["step"]), int(state["pipelines"])
        if pipelines == self._pipelines:
            handed = numpy.asarray(state["handed"], numpy.int64) if "handed" in state else None
            return InputPosition(epoch, step, handed=handed, orders=state.get("of"))
        warnings.warn(
            f"epoch {epoch} of a data set from a function begins again: it was left at step {step} of {pipelines} data "
            f"sets, and the function has made {self._pipelines} others now",
            RuntimeWarning,
            stacklevel=4,
        )
        return InputPosition(epoch)


def _progress(rows: numpy.ndarray, begun: list[tuple[int, int]], handed: int) -> numpy.ndarray:
    """Return the rows of each pipeline that are handed out, when this rank has handed out `handed` rows."""
    handed_rows = rows.copy()
    ends = [first for _, first in begun[1:]] + [handed]
    for (pipeline, first), end in zip(begun, ends, strict=True):
        handed_rows[pipeline] += max(min(end, handed) - first, 0)
    return handed_rows


def _require_same_dtypes(dtypes: Sequence[dict[str, str]]) -> None:
    """Raise InputError, on all ranks, if an array of a rank's batch has another dtype than that of a rank before."""
    first: dict[str, tuple[str, int]] = {}
    for rank, known in enumerate(dtypes):
        for place, dtype in known.items():
            expected, before = first.setdefault(place, (dtype, rank))
            if dtype != expected:
                name = f"array {place}" if place else "the array"
                raise on_all_ranks(
                    f"an array has one dtype in all elements: {name} is {dtype} on rank {rank}, and {expected} on rank "
                    f"{before}; convert it with `map`"
                )


def _emptied(batch: Any) -> Any:
    """Return a batch without its rows, or END if its arrays have none."""
    if all(numpy.shape(leaf) for leaf in structure.leaves(batch)):
        return structure.rows(batch, range(0))
    return END
