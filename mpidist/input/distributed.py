"""`DistributedDataset`: this replica's part of every global batch, and its iterators."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpidist import context
from mpidist.cluster.devices import gpu_of_name
from mpidist.errors import InputError, MpidistError, OutOfRangeError
from mpidist.input import autoshard, structure
from mpidist.input.agreement import Agreement
from mpidist.input.dataset import Dataset
from mpidist.input.feeds import END, ExactFeed, Feed, InputPosition
from mpidist.input.options import AutoShardPolicy, InputOptions
from mpidist.input.own_feeds import FunctionFeed, WorkerFeed
from mpidist.input.prefetching import prefetched
from mpidist.input.sharding import RowPart, Share
from mpidist.input.sources import Foreign, explained
from mpidist.input.stage import with_rows


class DistributedDataset:
    """This replica's part of every global batch of a data set, epoch after epoch.

    Every rank computes the same global batches and takes its own rows out of the source; nothing is sent.  A part
    may be empty (shape ``(0, ...)``): its replica still joins the collectives of the step.  Every ``iter()`` is
    the next epoch, with a shuffle of its own, from its beginning.

    Iterating is Local for data sets of arrays and files.  It is Collective (every rank iterates, in the same order)
    where a generator or somebody else's batches are read, or elements filtered, which are compared at every step; where
    `map` behind `batch` makes another number of rows, which is compared then; and where ranks have rows of their own
    (FILE, OFF, `distribute_datasets_from_function`), of which one may be out before the others.

    Parameters
    ----------
    dataset : Dataset
        Batched by the global batch.
    replica_id, num_replicas : int
    feed : Feed, optional
        Where the parts come from; None is exact parts of global batches.
    options : InputOptions, optional
        Whether parts are copied to the replica's device, and how many of them ahead of time, in a thread.
    copies_fn : callable, optional
        ``copies_fn()`` returns what copies the arrays of an iterator to the device; None where it is the host.

    Raises
    ------
    ValueError
        If `dataset` has no batches.
    """

    def __init__(
        self,
        dataset: Any,
        replica_id: int,
        num_replicas: int,
        feed: Feed | None = None,
        options: InputOptions | None = None,
        copies_fn: Callable[[], Any] | None = None,
    ) -> None:
        if feed is None:
            feed = ExactFeed(batched(dataset, num_replicas)._stage, RowPart(replica_id, num_replicas), Agreement())
        self.dataset = dataset
        self.replica_id = replica_id
        self.num_replicas = num_replicas
        self._feed = feed
        self._ahead = dataset._ahead if isinstance(dataset, Dataset) else 0
        self._copies_fn = None
        if copies_fn is not None and options is not None and options.experimental_fetch_to_device:
            self._ahead = max(self._ahead, options.experimental_per_replica_buffer_size)
            self._copies_fn = copies_fn
        self._position = self._next_start = InputPosition()
        self._walks = 0  # of iterators that go on from one another, up to a restore
        self._latest: Callable[[], DistributedIterator | None] = lambda: None

    @property
    def element_spec(self) -> Any:
        """`ArraySpec` of every array of this replica's part; the number of rows is None unless it never varies."""
        if not isinstance(self.dataset, Dataset):
            raise TypeError(f"a {type(self.dataset).__name__} does not tell what it will give: it has no element_spec")
        spec, size = self.dataset.element_spec, self.dataset.batch_size
        return with_rows(spec, self._feed.part_rows(size)) if self.dataset.drop_remainder and size else spec

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next part belongs to, from 0."""
        return self._position.epoch

    def state(self) -> dict[str, Any]:
        """Return the position of the next part as numbers and small arrays, for a checkpoint.  Local."""
        return self._feed.state(self._position)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise the errors of `restore`, and change nothing.  Local."""
        self._feed.position(state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` begin at a position that `state` gave, on any number of replicas.

        Local.  Where batches are cut out of rows, they may have another size than before: each row that is left comes
        once.

        Parameters
        ----------
        state : mapping
            ``{"epoch": n}`` is the beginning of an epoch.

        Raises
        ------
        InputError
            In the middle of an epoch, it is a position in another data set; says in what they differ.  Where ranks have
            rows of their own it is raised, on all ranks, when the first batch is asked for.
        """
        self._place(self._feed.position(state))

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a global batch, as far as that is known."""
        return None if isinstance(self._feed, FunctionFeed) else self.dataset.batch_size

    def begin(self, epoch: int, step: int = 0) -> None:
        """Let the next ``iter()`` begin with a batch by its number.  Local."""
        self._place(self._feed.at_step(epoch, step))

    def _place(self, position: InputPosition) -> None:
        """Let the next walk begin there."""
        self._position = self._next_start = position
        self._walks += 1

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Return ``reduce_func(state, part)`` over all parts of the next epoch, begun with `initial_state`.

        Local, or Collective as iterating is; the result is this replica's.
        """
        return functools.reduce(reduce_func, self, initial_state)

    def __len__(self) -> int:
        """Return the number of steps of an epoch; TypeError where only iterating tells."""
        if not isinstance(self._feed, ExactFeed):
            raise TypeError("how many steps an epoch has is not known: ranks have rows of their own")
        return len(self.dataset)

    def __iter__(self) -> DistributedIterator:
        self._position = self._next_start
        self._next_start = InputPosition(self._position.epoch + 1)
        iterator = DistributedIterator(self, self._position)
        self._latest = weakref.ref(iterator)
        return iterator

    def _moved(self, iterator: DistributedIterator, position: InputPosition) -> None:
        """Take the position of the last iterator that was made as the position of the data set."""
        if self._latest() is iterator:
            self._position = position


class Optional:
    """An element, or none; all methods are Local.

    Parameters
    ----------
    elements : tuple
        Of one element or none.
    """

    def __init__(self, *elements: Any) -> None:
        self._elements = elements

    def has_value(self) -> bool:
        """Return whether there is an element."""
        return bool(self._elements)

    def get_value(self) -> Any:
        """Return the element; ValueError if there is none."""
        if not self._elements:
            raise ValueError("this Optional has no value: the data set has ended")
        return self._elements[0]


class DistributedIterator(Iterator[Any]):
    """One walk through a distributed data set; made by ``iter(distributed_dataset)``.

    Taking an element is Local or Collective as it is for the data set.

    Attributes
    ----------
    share : Share or None
        What all replicas together have of the element that was taken last; None where there is one replica.
    """

    def __init__(self, owner: DistributedDataset, position: InputPosition) -> None:
        self._owner, self._walk = owner, owner._walks
        self.share: Share | None = None
        self._open(position)

    def _open(self, position: InputPosition) -> None:
        self._position = position
        self._ended = False
        # not a generator of its own around them: it would hold on to a batch while the next one is made
        batches, copies_fn = self._owner._feed.open(position), self._owner._copies_fn
        self._copies = copies = None if copies_fn is None else copies_fn()
        if copies is not None:
            batches = ((structure.map_leaves(copies.begin, batch), note) for batch, note in batches)
        self._batches = prefetched(batches, self._owner._ahead)

    def __next__(self) -> Any:
        mode = context.current_mode()
        if mode.replica_context is not None and not context.is_default(mode.strategy):
            raise ValueError(
                "next(iterator) should be called from outside of replica_fn. e.g. strategy.run(replica_fn, "
                "args=(next(iterator),))"
            )
        if self._ended:
            raise StopIteration
        # A part that is handed out counts as used: a checkpoint after its step goes on with the next one.
        made = self._made()
        self._ended = True  # unless there is a batch: an error ends it too
        batch, self._position, self.share = self._owner._feed.agreed(*made, self._position)
        self._ended = batch is END
        self._owner._moved(self, self._position)
        if self._ended:
            raise StopIteration
        return batch

    @property
    def _is_left(self) -> bool:
        """Whether the data set was restored since: its next iterator begins there.  Local."""
        return self._walk != self._owner._walks

    def _made(self) -> tuple[Any, Any]:
        try:
            batch, note = next(self._batches, (END, None))
            if self._copies is not None and batch is not END:
                batch = structure.map_leaves(self._copies.end, batch)
            return batch, note
        except Exception as error:
            self._ended = True
            if isinstance(error, MpidistError) and not isinstance(error, InputError):
                raise
            rank, size = self._owner.replica_id, self._owner.num_replicas
            is_ours = isinstance(error, InputError)
            raise InputError(
                f"rank {rank} of {size}: no batch for step {self._position.step} of epoch {self._position.epoch}: "
                f"{error if is_ours else explained(error)}"
            ) from (error.__cause__ if is_ours else error)

    def get_next(self) -> Any:
        """Return the next element.  Local, or Collective as it is for the data set.

        Raises
        ------
        OutOfRangeError
            There are no more.
        """
        for element in self:
            return element
        raise OutOfRangeError("End of sequence: the distributed data set has no more elements in this epoch")

    def get_next_as_optional(self) -> Optional:
        """Return the next element as an `Optional`, without a value at the end.  Local, or Collective as above."""
        for element in self:
            return Optional(element)
        return Optional()

    @property
    def element_spec(self) -> Any:
        """As of the data set."""
        return self._owner.element_spec

    def state(self) -> dict[str, Any]:
        """Return the position of the next element as numbers and small arrays, for a checkpoint.  Local."""
        return self._owner._feed.state(self._position)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise the errors of `restore`, and change nothing.  Local."""
        self._owner._feed.position(state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position that `state` gave, on any number of replicas.  Local."""
        self._open(self._owner._feed.position(state))
        self._owner._moved(self, self._position)


def batched(dataset: Any, num_replicas: int) -> Dataset:
    """Return the data set; ValueError unless it has batches.  Local."""
    if not isinstance(dataset, Dataset) or not dataset._stage.batched:
        raise ValueError(
            "Call the `batch` method on the input Dataset in order to be able to split your input across "
            f"{num_replicas} replicas; the size given to it is the global one."
        )
    return dataset


def distributed(
    dataset: Any,
    replica_id: int,
    num_replicas: int,
    agreement: Agreement,
    is_one_worker: bool = False,
    options: InputOptions | None = None,
    copies_fn: Callable[[], Any] | None = None,
) -> DistributedDataset:
    """Return this replica's parts of a data set, by its policy unless there is one worker.  Local."""
    policy = autoshard.policy_of(batched(dataset, num_replicas))
    feed: Feed
    if is_one_worker or policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA):
        if replica_id == 0 and not is_one_worker:
            autoshard.warn_of_reading_all(dataset, num_replicas)
        feed = ExactFeed(dataset._stage, RowPart(replica_id, num_replicas), agreement)
    else:
        feed = WorkerFeed(dataset, replica_id, num_replicas, agreement)
    return DistributedDataset(dataset, replica_id, num_replicas, feed, options, copies_fn)


def as_dataset(dataset: Any) -> Dataset:
    """Return a data set, or any iterable of batches as one; TypeError if it cannot be iterated.  Local."""
    if isinstance(dataset, Dataset):
        return dataset
    if not hasattr(dataset, "__iter__") or hasattr(dataset, "shape"):
        raise TypeError(
            f"a data set to be distributed must be a mpidist.data.Dataset or an iterable of batches, got "
            f"{type(dataset).__name__}: make one with `mpidist.data.Dataset.from_arrays(arrays).batch("
            "global_batch_size)`, or give each rank its own batches with `distribute_datasets_from_function`"
        )
    return Dataset(Foreign(dataset))


def copies_to(device_name: str) -> Callable[[], Any] | None:
    """Return what makes the `InputCopies` to a device; None for the host.  Local."""
    gpu = gpu_of_name(device_name)
    if gpu is None:
        return None
    from mpidist.device.input_copies import InputCopies

    return functools.partial(InputCopies, gpu)
