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
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy

from mpidist.collectives.mismatch import fact
from mpidist.errors import InputError
from mpidist.input import autoshard, sharding, structure
from mpidist.input.agreement import Agreement, watched
from mpidist.input.batches import Batch, rebatched
from mpidist.input.dataset import Dataset
from mpidist.input.node import Node, with_rows
from mpidist.input.options import AutoShardPolicy
from mpidist.input.sharding import MeasuredPart, Part, Share
from mpidist.input.sources import Foreign, Read

#: What a feed gives in place of a batch when there are no more.
END: Any = object()

#: What a rank has to offer at a step: nothing, not even shapes; shapes; a batch, to which its rows are added.
_NOTHING, _SHAPES, _BATCH = range(3)


class Position(NamedTuple):
    """How far a data set has been walked through."""

    epoch: int = 0
    step: int = 0
    offset: int = 0
    read: Read | None = None
    handed: numpy.ndarray | None = None
    orders: list[list[str]] | None = None


class Feed:
    """Where the batches of one rank come from."""

    #: What messages call the way in which rows are dealt.
    title = ""

    def __init__(self, node: Node, agreement: Agreement) -> None:
        self.agreement = agreement
        self._node = node
        self._foreign = node if isinstance(node, Foreign) else None

    def open(self, position: Position) -> Iterator[tuple[Any, Any]]:
        """Yield (batch, note) from a position on; may run in a thread.  The note is for `agreed`."""
        raise NotImplementedError(type(self).__name__)

    def agreed(self, batch: Any, note: Any, position: Position) -> tuple[Any, Position, Share | None]:
        """Return the batch that this rank gets (or END), the position after it, and the replicas' `Share`."""
        raise NotImplementedError(type(self).__name__)

    def state(self, position: Position) -> dict[str, Any]:
        return {"feed": self.title, "epoch": position.epoch, **self._state(position)}

    def position(self, state: Mapping[str, Any]) -> Position:
        """Return the position that a state of any number of ranks is for this feed.  Local."""
        if not any(numpy.any(state.get(name, 0)) for name in ("step", "rows")):
            return Position(int(state["epoch"]))
        if "feed" not in state and "step" in state:
            return self._at_old_step(state)
        _require_same([state.get("feed", self.title)], [self.title])
        return self._position(state)

    def at_step(self, epoch: int, step: int) -> Position:
        """Return the position of a batch by its number.  Local."""
        return Position(epoch, step, self._node.offset_of(step))

    def _state(self, position: Position) -> dict[str, Any]:
        """Return what else a state has."""
        raise NotImplementedError(type(self).__name__)

    def _position(self, state: Mapping[str, Any]) -> Position:
        """Return the position that a state of such a feed is, in the middle of an epoch."""
        raise NotImplementedError(type(self).__name__)

    @cached_property
    def _order(self) -> list[str]:
        return self._node.order(not self._node.by_row)

    def _at_old_step(self, state: Mapping[str, Any]) -> Position:
        epoch, step = int(state["epoch"]), int(state["step"])
        warnings.warn(
            f"step {step} of epoch {epoch} was saved by an earlier mpidist, without the data set that it is a step of. "
            f"That is taken to be this one: {', '.join(self._node.order())}. If the batch size or anything else was "
            "another, rows come again or are left out: begin with an epoch then",
            RuntimeWarning,
            stacklevel=4,
        )
        return self.at_step(epoch, step)


class ExactFeed(Feed):
    """This replica's rows of every global batch."""

    title = "global batches"

    def __init__(self, node: Node, part: Part, agreement: Agreement) -> None:
        super().__init__(node, agreement)
        self._part = part
        self._watched = watched(node) if agreement.needed else []

    def open(self, position: Position) -> Iterator[tuple[Any, Any]]:
        replica, replicas = self._part.replica_id, self._part.num_replicas
        if self._foreign is not None:
            self._foreign.expected = position.read
        for offset, item in self._node.batches_from(position.epoch, position.offset):
            part = MeasuredPart(replica, replicas)
            read = None if self._foreign is None else self._foreign.read
            seen = [source.seen for source in self._watched]
            batch = item(part)
            yield batch, (offset, read, seen, self._share(batch, part))

    def _share(self, batch: Any, part: Part) -> Share | None:
        """Return what all replicas have, by index arithmetic; ValueError if this one has other rows than that says."""
        if part.num_replicas == 1:
            return None
        assert part.rows is not None, "a batch was made without a look at its part"
        found, expected = structure.first_length(batch), len(self._part.of(part.rows))
        if found != expected:
            raise ValueError(
                f"map(..., by_rows=True) has made {found} rows of {expected}; a function that changes the number of "
                "rows has to get whole batches: leave by_rows out"
            )
        return Share(part.rows, part.rows % part.num_replicas == 0)

    def agreed(self, batch: Any, note: Any, position: Position) -> tuple[Any, Position, Share | None]:
        if self._watched:
            read = "none: the data set has ended" if batch is END else " ".join(f"{each:#010x}" for each in note[2])
            facts = [fact("step", position.step), fact(f"checksum of what was read for step {position.step}", read)]
            self.agreement.compare("next batch of a distributed data set", facts)
        if batch is END:
            return END, Position(position.epoch + 1), None
        return batch, Position(position.epoch, position.step + 1, note[0], note[1]), note[3]

    def _state(self, position: Position) -> dict[str, Any]:
        found = {"rows" if self._node.by_row else "step": position.offset, "of": self._order}
        if position.read is not None:
            found |= {"rows": position.read.rows, "checksum": position.read.checksum}
        return found

    def _position(self, state: Mapping[str, Any]) -> Position:
        _require_same(state.get("of", self._order), self._order)
        offset = int(state["step"] if "step" in state else state["rows"])
        read = Read(int(state["rows"]), int(state["checksum"])) if "checksum" in state else None
        return Position(int(state["epoch"]), self._node.step_of(offset), offset, read)


class _VotingFeed(Feed):
    """A feed whose ranks may be out of batches at different steps."""

    def __init__(self, node: Node, pipeline: int, pipelines: int, agreement: Agreement) -> None:
        super().__init__(node, agreement)
        self._pipeline, self._pipelines = pipeline, pipelines
        self._empty: Any = END
        self._orders: list[list[str]] | None = None

    def _require_orders(self, saved: list[list[str]] | None) -> None:
        """Let all ranks know the orders of all, which may differ, and compare them with those saved.  Collective."""
        if self._orders is None:
            answers = self.agreement.exchange(json.dumps(self._order).encode(), "order of rows")
            self._orders = [json.loads(answer) for answer in answers]
        if saved is None or len(saved) != len(self._orders):
            return
        for rank, (before, now) in enumerate(zip(saved, self._orders, strict=True)):
            _require_same(before, now, f"on rank {rank} ")

    def _vote(self, batch: Any, handed: numpy.ndarray, step: int) -> tuple[Any, numpy.ndarray, Share | None]:
        """Return this rank's batch, an empty one, or END where no rank has one; what all handed out; and the share."""
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
        """Let a rank that never had a batch know from another what batches are like.  Collective."""
        mine = b"" if self._empty is END else json.dumps(_described(self._empty)).encode()
        answers = self.agreement.exchange(mine, "shapes of an empty batch")
        known = next((answer for answer in answers if answer), None)
        if known is None:
            raise _on_all_ranks(
                f"ranks {without} of {self._pipelines} have no element for step {step}, and those that the others have "
                "have no rows, so that none can be empty; give every rank as many elements, or call `batch`"
            )
        if self._empty is END:
            self._empty = _made(json.loads(known))


class WorkerFeed(_VotingFeed):
    """Batches of rows that every rank goes through by itself: those of its files, or all."""

    def __init__(self, dataset: Dataset, pipeline: int, pipelines: int, agreement: Agreement) -> None:
        super().__init__(dataset._node, pipeline, pipelines, agreement)
        policy = autoshard.policy_of(dataset)
        self._by_file = policy is AutoShardPolicy.FILE
        self.title = f"batches of each rank's own by {policy.name}"
        self._batch_size = dataset.batch_size or 1
        self._sizes = sharding.rotated_batch_sizes(self._batch_size, pipeline, pipelines, 1)
        if self._by_file:
            autoshard.by_file(self._node, pipelines, pipeline)  # raises where it cannot be

    @cached_property
    def _order(self) -> list[str]:
        return self._node.order(not _is_even(self._node))

    def open(self, position: Position) -> Iterator[tuple[Any, Any]]:
        rows = self._rows(position)
        begun: list[tuple[int, int]] = []  # (pipeline, rows of this rank before it)
        sizes = itertools.islice(itertools.cycle(self._sizes), position.step % len(self._sizes), None)
        handed = 0
        for batch in rebatched(self._batches(position.epoch, rows, begun), sizes):
            handed += structure.rows_of(batch)
            yield batch, _progress(rows, begun, handed)

    def _rows(self, position: Position) -> numpy.ndarray:
        return numpy.zeros(self._pipelines, numpy.int64) if position.handed is None else position.handed

    def _mine(self, rows: numpy.ndarray) -> Sequence[int]:
        return range(self._pipeline, len(rows), self._pipelines) if self._by_file else [self._pipeline]

    def _batches(self, epoch: int, rows: numpy.ndarray, begun: list[tuple[int, int]]) -> Iterator[Any]:
        read = 0
        for pipeline in self._mine(rows):
            node = autoshard.by_file(self._node, len(rows), pipeline) if self._by_file else self._node
            begun.append((pipeline, read))
            for batch in _from_row(node, epoch, int(rows[pipeline])):
                read += structure.rows_of(batch)
                yield batch

    def agreed(self, batch: Any, note: Any, position: Position) -> tuple[Any, Position, Share | None]:
        if not self._by_file:
            self._require_orders(position.orders)
        rows = self._rows(position)
        mine = self._mine(rows)
        own = numpy.zeros(len(rows), numpy.int64)
        own[mine] = (rows if note is None else note)[mine]
        batch, handed, share = self._vote(batch, own, position.step)
        if batch is END:
            return END, Position(position.epoch + 1), None
        return batch, Position(position.epoch, position.step + 1, handed=handed), share

    def _state(self, position: Position) -> dict[str, Any]:
        found = {"step": position.step, "rows": self._rows(position).copy()}
        orders = self._order if self._by_file else position.orders or self._orders
        return found if orders is None else {**found, "of": orders}

    def _position(self, state: Mapping[str, Any]) -> Position:
        rows = numpy.asarray(state["rows"], numpy.int64)
        if self._by_file:
            _require_same(state["of"], self._order)
        elif len(rows) != self._pipelines:
            rows = numpy.full(self._pipelines, rows.min())
        orders = None if self._by_file else state["of"]
        return Position(int(state["epoch"]), int(state["step"]), handed=rows, orders=orders)

    def _at_old_step(self, state: Mapping[str, Any]) -> Position:
        found = super()._at_old_step(state)
        return self._position({"of": self._order if self._by_file else None, **state}) if "rows" in state else found

    def at_step(self, epoch: int, step: int) -> Position:
        """Return the position of a step if every rank has rows enough for those before it."""
        rounds, more = divmod(step, self._pipelines)
        sizes = [
            sharding.rotated_batch_sizes(self._batch_size, each, self._pipelines, 1) for each in range(self._pipelines)
        ]
        return Position(epoch, step, handed=numpy.array([rounds * sum(each) + sum(each[:more]) for each in sizes]))


class FunctionFeed(_VotingFeed):
    """The batches of a data set of this rank's own, as they come."""

    title = "batches from a function"

    def open(self, position: Position) -> Iterator[tuple[Any, Any]]:
        first, *read = self._own(position)
        if self._foreign is not None:
            self._foreign.expected = Read(*read) if position.handed is not None else None
        for offset, item in self._node.batches_from(position.epoch, first):
            seen = Read() if self._foreign is None else self._foreign.read
            yield item(), (offset, seen.rows, seen.checksum)

    def _own(self, position: Position) -> Sequence[int]:
        """Return this rank's offset, and rows and checksum of what was read."""
        if position.handed is None:
            return self._node.offset_of(position.step), 0, 0
        return position.handed[self._pipeline].tolist()

    def agreed(self, batch: Any, note: Any, position: Position) -> tuple[Any, Position, Share | None]:
        self._require_orders(position.orders)
        own = numpy.zeros((self._pipelines, 3), numpy.int64)
        own[self._pipeline] = self._own(position) if note is None else note
        batch, handed, share = self._vote(batch, own, position.step)
        if batch is END:
            return END, Position(position.epoch + 1), None
        return batch, Position(position.epoch, position.step + 1, handed=handed), share

    def _state(self, position: Position) -> dict[str, Any]:
        found = {"step": position.step, "pipelines": self._pipelines}
        if position.handed is None:
            return found
        return {**found, "handed": position.handed.copy(), "of": position.orders or self._orders}

    def _position(self, state: Mapping[str, Any]) -> Position:
        epoch, step, pipelines = int(state["epoch"]), int(state["step"]), int(state.get("pipelines", self._pipelines))
        if pipelines == self._pipelines:
            handed = numpy.asarray(state["handed"], numpy.int64) if "handed" in state else None
            return Position(epoch, step, handed=handed, orders=state.get("of"))
        warnings.warn(
            f"epoch {epoch} of a data set from a function begins again: it was left at step {step} of {pipelines} data "
            f"sets, and the function has made {self._pipelines} others now",
            RuntimeWarning,
            stacklevel=4,
        )
        return Position(epoch)

    def _at_old_step(self, state: Mapping[str, Any]) -> Position:
        super()._at_old_step(state)
        return self._position(state)


def _on_all_ranks(message: str) -> InputError:
    error = InputError(message)
    error.on_all_ranks = True
    return error


def _require_same(saved: Sequence[str], now: Sequence[str], where: str = "") -> None:
    """Raise InputError, on all ranks, if a position is one in other rows, or in rows in another order."""
    if list(saved) == list(now):
        return
    pairs = zip(saved, now, strict=True) if len(saved) == len(now) else [(", ".join(saved), ", ".join(now))]
    differ = "; ".join(f"{before} when saved, {after} now" for before, after in pairs if before != after)
    raise _on_all_ranks(
        f"the position is one in another data set: {where}{differ}. In the middle of an epoch rows would come again or "
        "be left out: make the data set as it was, or begin with an epoch (`restore({'epoch': 1})`). Only the batch "
        "size may differ, where no more than `map`, `prefetch`, `cache` or `repeat` follow `batch`"
    )


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
    return isinstance(node, Batch)


def _progress(rows: numpy.ndarray, begun: list[tuple[int, int]], handed: int) -> numpy.ndarray:
    """Return how many rows of each pipeline are handed out when this rank has handed out `handed` of its own."""
    found = rows.copy()
    ends = [first for _, first in begun[1:]] + [handed]
    for (pipeline, first), end in zip(begun, ends, strict=True):
        found[pipeline] += max(min(end, handed) - first, 0)
    return found


# -- empty batches ----------------------------------------------------------------------------------------------------


def _emptied(batch: Any) -> Any:
    """Return a batch without its rows, or END if its arrays have none."""
    if all(numpy.shape(leaf) for leaf in structure.leaves(batch)):
        return structure.rows(batch, range(0))
    return END


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
    """Return the feed that the policy of a data set asks for.  Local."""
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
