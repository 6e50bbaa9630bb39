"""`StepBatches`: what an `input_fn` returns, as this replica's batch of every step; `StepPosition`: how far that is.

A worker calls its `input_fn` once, and every replica takes a batch of what it returns at each step.  Under
`MirroredStrategy` and `CentralStorageStrategy` all ranks are one worker: each of n ranks makes the same data set, and
takes every n-th batch.  Elsewhere each rank is a worker, and takes all batches of its own data set.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpidist.input import structure
from mpidist.input.agreement import described
from mpidist.input.dataset import Dataset
from mpidist.input.distributed import as_dataset
from mpidist.input.from_function import InputContext
from mpidist.input.sharding import Share

_END = object()
_NUMBERS = ("global_step", "batches_read", "batch_size")
_RETURNS = "return a mpidist.data.Dataset with batches, or another iterable of batches (features, labels)"


class StepPosition:
    """The global step, and the batches that the present call of `train` has read.  All Local.

    `global_step` counts the steps of all calls of `train`; `batches_read` the batches that all replicas together have
    taken in the present call, 0 when it has come to its end; they have `batch_size` rows, 0 where that is not known.
    """

    def __init__(self) -> None:
        self.global_step = self.batches_read = self.batch_size = 0

    def state(self) -> dict[str, int]:
        """Return all numbers."""
        return {name: getattr(self, name) for name in _NUMBERS}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a number is missing in a state."""
        for name in _NUMBERS:
            if name not in state:
                raise ValueError(f"it has no {name!r}: no Estimator has saved it")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state; errors as for `check`."""
        self.check(state)
        for name in _NUMBERS:
            setattr(self, name, int(state[name]))


class StepBatches:
    """The batches of this replica, step by step; the first is looked at when it is made.

    Collective: every rank makes and iterates it in the same order.  `named` is what `input_fn` may ask for by the names
    of its parameters, besides ``input_context``; the batches of `read`, of all data sets together, are passed over.
    `share` is what all replicas have of the batch given last, None where there is one replica, and `pipelines` how many
    batches they take at a step.  `batch_size` is 0 where it is not known.  TypeError or ValueError where `input_fn`
    returns something else than batches with rows, or no rank gets a batch.
    """

    def __init__(
        self, input_fn: Callable[..., Any], strategy: Any, named: Mapping[str, Any], read: StepPosition | None = None
    ) -> None:
        read = StepPosition() if read is None else read
        self.pipelines = strategy.extended.num_replicas
        self.share: Share | None = None
        dataset = _dealt(input_fn, strategy, named, read)
        self.batch_size = dataset.dataset.batch_size or 0
        self._iterator = iter(dataset)
        self._first = next(self._iterator, _END)
        if self._first is _END:
            passed = f" after the {read.batches_read} that were read before" if read.batches_read else ""
            raise ValueError(f"{_name(input_fn)} gives no batch{passed}: its data set is empty")
        self._first = _checked(self._first)
        self._share_of_first = self._iterator.share

    @property
    def outline(self) -> Any:
        """Structure, dtypes and shapes of rows."""
        return structure.outline(self._first)

    def __iter__(self) -> Iterator[Any]:
        batch, self._first, self.share = self._first, _END, self._share_of_first
        while batch is not _END:
            yield batch
            batch = next(self._iterator, _END)
            if batch is not _END:
                batch, self.share = _checked(batch), self._iterator.share


def _dealt(input_fn: Callable[..., Any], strategy: Any, named: Mapping[str, Any], read: StepPosition) -> Any:
    """Return this replica's batches as a distributed data set."""
    extended, replicas = strategy.extended, strategy.extended.num_replicas

    def of_worker(context: InputContext) -> Dataset:
        dataset = called(input_fn, {**named, "input_context": context})
        return dataset.skip(_passed_over(read, dataset, replicas))

    def of_stream(context: InputContext) -> Dataset:
        dataset = called(input_fn, {**named, "input_context": InputContext(1, 0, replicas)})
        extended._agreement().compare(f"data set of {_name(input_fn)}", described(dataset))
        return dataset.skip(_passed_over(read, dataset, 1)).shard(replicas, extended.replica_id)

    is_stream = extended.is_one_worker and replicas > 1
    return strategy.distribute_datasets_from_function(of_stream if is_stream else of_worker)


def _passed_over(read: StepPosition, dataset: Dataset, workers: int) -> int:
    """Return how many batches a worker passes over, as its part of those that were read; fewer, with a warning."""
    number, rest, size = read.batches_read, 0, dataset.batch_size
    if read.batch_size and size:
        number, rest = divmod(number * read.batch_size, size)
    number, more = divmod(number, workers)
    if rest or more:
        warnings.warn(
            f"the training goes on with rows that it has seen: {read.batches_read} batches of {read.batch_size or '?'} "
            f"rows were read, which is no whole number of steps with {size or '?'} rows on {workers} workers",
            RuntimeWarning,
            stacklevel=2,
        )
    return number


def called(input_fn: Callable[..., Any], named: Mapping[str, Any]) -> Dataset:
    """Return the data set of an `input_fn`, called with what it names of `named`.  Local; errors as above."""
    accepted = inspect.signature(input_fn).parameters
    data = input_fn(**{name: value for name, value in named.items() if name in accepted})
    if data is None:
        raise TypeError(f"{_name(input_fn)} returned None (is a `return` missing?); {_RETURNS}")
    if isinstance(data, (tuple, dict)) or not hasattr(data, "__iter__") or hasattr(data, "shape"):
        raise TypeError(f"{_name(input_fn)} returned a {type(data).__name__}; {_RETURNS}")
    return as_dataset(data)


def _checked(batch: Any) -> Any:
    """Return a batch as (features, labels) or (features,)."""
    try:
        structure.rows_of(batch)
    except ValueError as error:
        raise ValueError(f"an element of input_fn's data set is no batch: {error}; call `batch`") from error
    if type(batch) is not tuple:
        return (batch,)
    if len(batch) > 2:
        raise ValueError(f"a batch must be (features, labels) or features, got a tuple of {len(batch)}")
    return batch


def require_input_fn(input_fn: Any) -> None:
    """Raise TypeError unless `input_fn` is a function.  Local."""
    if not callable(input_fn):
        raise TypeError(f"input_fn must be a function that returns a data set, got {type(input_fn).__name__}")


def _name(input_fn: Any) -> str:
    return str(getattr(input_fn, "__name__", type(input_fn).__name__))
