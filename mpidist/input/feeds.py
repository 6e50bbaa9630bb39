"""`Feed`: where the batches of one rank come from.  `ExactFeed`: this replica's rows of every global batch.

`own_feeds` has the feeds of ranks that go through rows of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy

from mpidist.collectives.mismatch import fact
from mpidist.errors import InputError
from mpidist.input import structure
from mpidist.input.agreement import Agreement, watched
from mpidist.input.mapping import maps_batches, maps_rows
from mpidist.input.sharding import MeasuredPart, RowPart, Share
from mpidist.input.sources import Foreign
from mpidist.input.stage import Stage
from mpidist.input.walks import Read, Walk

#: In place of a batch: the epoch has no more.
END: Any = object()


class InputPosition(NamedTuple):
    """The next batch of a data set, and the batches before it."""

    epoch: int = 0
    step: int = 0
    #: Number of the batch's first row in the epoch, or of the batch; see `Stage.by_row`.
    offset: int = 0
    #: What was read before it, of batches that somebody else makes.
    read: Read | None = None
    #: Where ranks have rows of their own: the rows that every pipeline has handed out in this epoch.
    handed: numpy.ndarray | None = None
    #: The order of the rows of every pipeline, where it is still to be compared.
    orders: list[list[str]] | None = None

    def after(self, **where: Any) -> InputPosition:
        """Return the position one step further."""
        return InputPosition(self.epoch, self.step + 1, **where)


class Feed:
    """Where the batches of one rank come from."""

    #: A name for messages.
    title = ""

    def __init__(self, stage: Stage, agreement: Agreement) -> None:
        self.agreement = agreement
        self._stage = stage
        self._foreign = stage if isinstance(stage, Foreign) else None

    def open(self, position: InputPosition) -> Iterator[tuple[Any, Any]]:
        """Yield (batch, note) from a position on; may run in a thread.  The note is for `agreed`."""
        raise NotImplementedError(type(self).__name__)

    def agreed(self, batch: Any, note: Any, position: InputPosition) -> tuple[Any, InputPosition, Share | None]:
        """Return the batch that this rank gets (or END), the position after it, and the `Share` of several replicas.

        Collective where ranks keep in step.  `batch` is END where this rank has none.
        """
        raise NotImplementedError(type(self).__name__)

    def part_rows(self, batch_size: int) -> int | None:
        """Return the rows of this replica's part of a full batch, if it never varies.  Local."""
        return None

    def state(self, position: InputPosition) -> dict[str, Any]:
        """Return a position as numbers and small arrays, with the order of its rows.  Local."""
        return {"feed": self.title, "epoch": position.epoch, **self._state(position)}

    def position(self, state: Mapping[str, Any]) -> InputPosition:
        """Return the position of a state; InputError in the middle of an epoch of another data set.  Local."""
        if not any(numpy.any(state.get(name, 0)) for name in ("step", "rows")):
            return InputPosition(int(state["epoch"]))
        if "feed" not in state and "step" in state:
            raise on_all_ranks(
                f"step {state['step']} of epoch {state['epoch']} comes without the data set that it is a step of; "
                "give what `state` returned, or begin with an epoch (`restore({'epoch': 1})`)"
            )
        require_same([state.get("feed", self.title)], [self.title])
        return self._position(state)

    def at_step(self, epoch: int, step: int) -> InputPosition:
        """Return the position of a batch by its number.  Local."""
        return InputPosition(epoch, step, self._stage.offset_of(step))

    def _state(self, position: InputPosition) -> dict[str, Any]:
        """Return the other entries of a state."""
        raise NotImplementedError(type(self).__name__)

    def _position(self, state: Mapping[str, Any]) -> InputPosition:
        """Return the position of a state of such a feed, in the middle of an epoch."""
        raise NotImplementedError(type(self).__name__)

    @cached_property
    def _order(self) -> list[str]:
        return self._stage.order(not self._stage.by_row)


class ExactFeed(Feed):
    """This replica's rows of every global batch.  Step s is the same rows on any number of ranks."""

    title = "global batches"

    def __init__(self, stage: Stage, part: RowPart, agreement: Agreement) -> None:
        super().__init__(stage, agreement)
        self._part = part
        self._watched = watched(stage) if agreement.needed else []
        self._maps_rows = stage.indexed and maps_rows(stage)
        self._maps_batches = agreement.needed and maps_batches(stage)
        self._dtypes: dict[str, str] | None = None

    def open(self, position: InputPosition) -> Iterator[tuple[Any, Any]]:
        walk, before = Walk(position.read), position.offset
        for offset, item in walk.through(self._stage.batches_from(position.epoch, position.offset)):
            part = MeasuredPart(self._part.replica_id, self._part.num_replicas)
            read = None if self._foreign is None else walk.read(self._foreign)
            seen = [walk.read(stage).checksum for stage in self._watched]
            batch = item(part)
            dtypes = structure.map_leaves(structure.dtype_name, batch) if self._watched else ""
            if self._maps_rows:
                self._require_dtypes(batch)
            # what a function makes of a batch is each rank's own to know; indexed data sets send nothing else
            size = offset - before if self._stage.by_row else self._stage.batch_size
            rows = part.rows if self._watched or (self._maps_batches and part.rows != size) else None
            yield batch, (offset, read, (seen, dtypes, rows), self._share(batch, part))
            before = offset

    def _require_dtypes(self, batch: Any) -> None:
        """Raise InputError unless a batch has the dtypes of the first row, which every rank maps.  Local.

        No other rank maps this rank's rows, and indexed data sets send nothing.
        """
        dtypes = structure.known_dtypes(batch)
        if self._dtypes is None:
            self._dtypes = (self._first_dtypes() if self.agreement.needed else None) or dtypes
        if any(self._dtypes.get(path, dtype) != dtype for path, dtype in dtypes.items()):
            raise InputError(
                f"an array has one dtype in all elements: replica {self._part.replica_id} of "
                f"{self._part.num_replicas} got {structure.shown_dtypes(dtypes)} from `map`, and the first element has "
                f"{structure.shown_dtypes(self._dtypes)}; have the function return one dtype, as by "
                "numpy.float32(value)"
            )

    def _first_dtypes(self) -> dict[str, str] | None:
        try:
            first = next(self._stage.items(0))(RowPart(0, self._stage.batch_size or 1))
        except Exception:  # the rank whose row it is raises it
            return None
        return structure.known_dtypes(first)

    def _share(self, batch: Any, part: RowPart) -> Share | None:
        """Return the share of all replicas, by index arithmetic; ValueError if this one has other rows."""
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

    def agreed(self, batch: Any, note: Any, position: InputPosition) -> tuple[Any, InputPosition, Share | None]:
        seen, dtypes, rows = ([], "", None) if batch is END else note[2]
        if self._watched or rows is not None:
            read = "none: the data set has ended" if batch is END else " ".join(f"{each:#010x}" for each in seen)
            facts = [
                fact("step", position.step),
                fact(f"checksum of what was read for step {position.step}", read),
                fact("dtypes, one for all elements of an array", dtypes),
                fact("rows of the global batch", rows),
            ]
            self.agreement.compare("next batch of a distributed data set", facts)
        if batch is END:
            return END, InputPosition(position.epoch + 1), None
        offset, read, _, share = note
        return batch, position.after(offset=offset, read=read), share

    def part_rows(self, batch_size: int) -> int | None:
        return len(self._part.of(batch_size))

    def _state(self, position: InputPosition) -> dict[str, Any]:
        found = {"rows" if self._stage.by_row else "step": position.offset, "of": self._order}
        if position.read is not None:
            found |= {"rows": position.read.rows, "checksum": position.read.checksum}
        return found

    def _position(self, state: Mapping[str, Any]) -> InputPosition:
        require_same(state.get("of", self._order), self._order)
        offset = int(state["step"] if "step" in state else state["rows"])
        read = Read(int(state["rows"]), int(state["checksum"])) if "checksum" in state else None
        return InputPosition(int(state["epoch"]), self._stage.step_of(offset), offset, read)


def on_all_ranks(message: str) -> InputError:
    """Return an error that every rank raises.  Local."""
    error = InputError(message)
    error.on_all_ranks = True
    return error


def require_same(saved: Sequence[str], now: Sequence[str], where: str = "") -> None:
    """Raise InputError, on all ranks, if a position is one in other rows, or in rows in another order.  Local."""
    if list(saved) == list(now):
        return
    pairs = zip(saved, now, strict=True) if len(saved) == len(now) else [(", ".join(saved), ", ".join(now))]
    differ = "; ".join(f"{before} when saved, {after} now" for before, after in pairs if before != after)
    raise on_all_ranks(
        f"the position is one in another data set: {where}{differ}. In the middle of an epoch rows would come again or "
        "be left out: make the data set as it was, or begin with an epoch (`restore({'epoch': 1})`). Only the batch "
        "size may differ, where no more than `map`, `prefetch`, `cache` or `repeat` follow `batch`"
    )
