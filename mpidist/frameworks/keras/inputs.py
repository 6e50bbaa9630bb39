"""What `fit`, `evaluate` and `predict` are given, as this replica's parts of the global batches.

Arrays are cut here: a rank takes its own rows only.  Of everything else Keras makes the global batches, as it does for
one process, and this replica's rows are taken out of each.  The order of shuffled rows is the one that Keras draws on
the chief, so the batches are those of one process.
"""

from __future__ import annotations

import multiprocessing
import random
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from multiprocessing.pool import ThreadPool
from typing import Any

import keras
import numpy

# Private: everything that Keras takes as input, as batches; `tests/frameworks/test_keras_canaries.py` looks after them.
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from mpidist.arrays import as_host
from mpidist.frameworks.keras import backends, facts
from mpidist.frameworks.keras.backends import to_numpy
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.frameworks.keras.shares import BatchShare
from mpidist.input.dataset import Dataset
from mpidist.input.distributed import DistributedDataset, DistributedIterator

#: In a process that loads batches: the PyDataset that they are of.
_of_process: Any = None


class InputAdapter(DataAdapter):
    """An input of Keras that is not Keras' own: what `_iterate` yields, with every backend."""

    batch_size = has_partial_batch = partial_batch_size = None

    def __init__(self) -> None:
        if keras.backend.backend() == "jax":
            backends.seam().take_in_turn()

    def _iterate(self, iterator_name: str) -> Iterator[Any]:
        """Yield the batches of an epoch as the iterator of this name gives them."""
        raise NotImplementedError(type(self).__name__)

    def get_numpy_iterator(self) -> Iterator[Any]:
        return self._iterate("get_numpy_iterator")

    def get_jax_iterator(self, **options: Any) -> Iterator[Any]:
        if options.get("super_batch"):
            raise NotImplementedError(
                f"Keras {keras.__version__} stacks batches for steps_per_execution, which mpidist cannot take apart "
                "yet; compile the model with steps_per_execution=1"
            )
        return self._iterate("get_jax_iterator")

    def get_torch_dataloader(self) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        """Return the batches anew, as ``iter()`` of a DataLoader of PyTorch does."""
        return self._iterate("get_torch_dataloader")


class PartAdapter(InputAdapter):
    """An input of Keras: this replica's parts of global batches.

    `replica`: is told the share of each batch that is handed out.  `adapter`: of Keras, which has the global batches.
    `handed_out`: of the iterator that gave a batch last.
    """

    def __init__(self, replica: ModelReplica, adapter: DataAdapter) -> None:
        super().__init__()
        self._replica, self._adapter = replica, adapter
        self.handed_out: list[BatchShare] = []

    def parts(self, iterator_name: str) -> Iterator[tuple[BatchShare, Any]]:
        """Return what yields the replica's share of each batch of an epoch, and its rows.

        Keras' own iterator begins at once, as in one process, and not at the first batch, which Keras may never ask
        for: a loader of PyTorch draws a seed when it begins, from the generator that shuffles.
        """
        return self._parts(iter(getattr(self._adapter, iterator_name)()))

    def _parts(self, batches: Iterator[Any]) -> Iterator[tuple[BatchShare, Any]]:
        """Yield shares and rows, given an epoch of the adapter's batches."""
        raise NotImplementedError(type(self).__name__)

    def _iterate(self, iterator_name: str) -> Iterator[Any]:
        return self._handed_out(self.parts(iterator_name))

    def _handed_out(self, parts: Iterator[tuple[BatchShare, Any]]) -> Iterator[Any]:
        shares: deque[BatchShare] = deque()
        handed_out: list[BatchShare] = []
        for share, rows in parts:
            shares.append(share)
            handed_out.append(share)
            # Keras makes iterators to look at one batch only: the one that gives batches now is the one that counts
            self._replica.shares, self.handed_out = shares, handed_out
            yield rows

    def batches(self) -> Iterator[Any]:
        """Yield the parts of an epoch, as Keras takes them with this backend."""
        is_torch = keras.backend.backend() == "torch"
        return iter(self) if is_torch else self.get_jax_iterator()

    @property
    def num_batches(self) -> int | None:
        return self._adapter.num_batches

    def on_epoch_begin(self) -> None:
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._adapter.on_epoch_end()


class ArrayBatches(PartAdapter):
    """Batches of rows of arrays, which all ranks have.

    `arrays`: inputs, labels and weights, as Keras packs them for a step.  `batch_size`: of a global batch.  `shuffle`:
    as for `fit` of Keras.
    """

    def __init__(self, replica: ModelReplica, arrays: Any, batch_size: int, shuffle: bool | str) -> None:
        self._arrays = arrays
        self._rows = rows_of(arrays)
        self._batch_size = batch_size
        self._floatx = keras.config.floatx()
        self._is_shuffled = bool(shuffle)
        # the order as Keras draws it, of numbers of rows in place of rows
        super().__init__(replica, get_data_adapter(numpy.arange(self._rows), batch_size=batch_size, shuffle=shuffle))

    def _parts(self, drawn: Iterator[Any]) -> Iterator[tuple[BatchShare, Any]]:
        order = self._chiefs_order(drawn)
        for start in range(0, self._rows, self._batch_size):
            rows = min(self._batch_size, self._rows - start)
            share = BatchShare.of(rows, self._replica.number, self._replica.count)
            given = slice(start + share.given.start, start + share.given.stop)
            chosen = given if order is None else order[given]
            yield (
                share,
                keras.tree.map_structure(
                    lambda leaf, chosen=chosen: None if leaf is None else as_given(leaf[chosen], self._floatx),
                    self._arrays,
                ),
            )

    def _chiefs_order(self, drawn: Iterator[Any]) -> numpy.ndarray | None:
        """Return the order of the rows in this epoch, as the chief draws it; None where it is theirs.  Collective."""
        if not self._is_shuffled:
            return None
        numbers = keras.tree.flatten(list(drawn))  # on every rank: generators that are alike remain so
        order = numpy.concatenate([to_numpy(each) for each in numbers], dtype="int64")
        return self._replica.from_chief([order])[0]


class DatasetInput(InputAdapter):
    """A data set of mpidist as an input of Keras: its global batches; each pass is its next epoch,
    but for one that stopped after its first batch, which begins again.

    Parameters
    ----------
    dataset : Dataset

    Raises
    ------
    TypeError
        It is something else.
    ValueError
        It has no batches.
    """

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, (DistributedDataset, DistributedIterator)):
            raise TypeError(
                f"a {type(dataset).__name__} gives one replica's rows, and a Keras model takes those out of global "
                "batches itself; give it the mpidist.data.Dataset that the distributed one was made of"
            )
        if not isinstance(dataset, Dataset):
            raise TypeError(f"expected a mpidist.data.Dataset, got a {type(dataset).__name__}")
        if not dataset.is_batched:
            raise ValueError(f"{dataset!r} has no batches; call batch(n), n rows over all replicas, first")
        super().__init__()
        self._dataset = dataset
        self._epoch: int | None = None  # of a pass that gave one batch so far

    @property
    def is_endless(self) -> bool:
        """Whether it repeats forever."""
        return self._dataset.cardinality() == -1

    @property
    def num_batches(self) -> int | None:
        count = self._dataset.cardinality()
        return None if count < 0 else count

    def _iterate(self, iterator_name: str) -> Iterator[Any]:
        floatx = keras.config.floatx()
        # Keras begins passes to look at one batch only: the next one is of the same epoch
        epoch = self._dataset._next_epoch() if self._epoch is None else self._epoch
        for place, batch in enumerate(self._dataset._pass_of(epoch)):
            self._epoch = epoch if place == 0 and self.num_batches != 1 else None
            yield keras.tree.map_structure(lambda leaf: as_given(as_host(leaf), floatx), batch)


def as_given(rows: numpy.ndarray, floatx: str) -> Any:
    """Return rows of an array as Keras gives them to a step: floats in its own dtype, tensors with PyTorch.  Local."""
    is_float = rows.dtype.kind == "f" or rows.dtype.kind == "V" and keras.backend.is_float_dtype(rows.dtype)  # bfloat16
    rows = rows.astype(floatx) if is_float and rows.dtype != floatx else rows
    return keras.ops.convert_to_tensor(rows) if keras.backend.backend() == "torch" else rows


class KerasBatches(PartAdapter):
    """Batches of all inputs but arrays: a data set, a PyDataset, a generator, a loader of PyTorch, Grain or TensorFlow.

    Every rank has the whole batches, which are compared at each step.
    """

    def __init__(self, replica: ModelReplica, x: Any, shuffle: bool | str, class_weight: Any) -> None:
        if isinstance(x, keras.utils.PyDataset):
            if x.num_batches is not None:
                x = _FiniteBatches(replica, x, bool(shuffle), class_weight)
            shuffle = False
        with warnings.catch_warnings():
            if not replica.is_chief:
                warnings.filterwarnings("ignore", "`shuffle=True` was passed")
            super().__init__(replica, get_data_adapter(x, shuffle=shuffle, class_weight=class_weight))

    def _parts(self, batches: Iterator[Any]) -> Iterator[tuple[BatchShare, Any]]:
        count = 0
        for batch in batches:
            count += 1
            leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
            rows = rows_of(leaves)
            facts.compare_batch(self._replica, rows, [to_numpy(leaf) for leaf in leaves])
            share = BatchShare.of(rows, self._replica.number, self._replica.count)
            yield share, cut(batch, share)
        facts.compare_ends(self._replica, count)


class _FiniteBatches(PyDatasetAdapter):
    """Batches of a PyDataset of known length, in an order that is drawn on the chief as Keras draws it.

    Workers only load batches before they are asked for.  Those of Keras begin before the epoch does, and what they have
    loaded when an epoch ends comes in the next one, as many batches as there was time for: others on each rank.
    """

    def __init__(self, replica: ModelReplica, batches: keras.utils.PyDataset, shuffle: bool, class_weight: Any) -> None:
        super().__init__(batches, class_weight, shuffle)
        self._replica, self.enqueuer = replica, None

    def _finite_generator(self) -> Iterator[Any]:
        order = list(range(self.py_dataset.num_batches))
        if self.shuffle:
            random.shuffle(order)
            order = self._replica.from_chief([numpy.array(order, "int64")])[0].tolist()
        for batch in _loaded(self.py_dataset, order):
            yield self._standardize_batch(batch)


def _loaded(batches: keras.utils.PyDataset, order: Sequence[int]) -> Iterator[Any]:
    """Yield batches in this order, while workers load the next ones."""
    if batches.workers < 1 or (batches.workers == 1 and not batches.use_multiprocessing):
        yield from map(batches.__getitem__, order)
        return
    if batches.use_multiprocessing:
        pool, load = multiprocessing.Pool(batches.workers, _take, (batches,)), _batch_of_process
    else:
        pool, load = ThreadPool(batches.workers), batches.__getitem__
    waiting: deque[Any] = deque()
    with closing(pool):
        for index in order:
            waiting.append(pool.apply_async(load, (index,)))
            if len(waiting) > (batches.max_queue_size or len(order)):
                yield waiting.popleft().get()
    while waiting:
        yield waiting.popleft().get()


def _take(batches: keras.utils.PyDataset) -> None:
    """Have this process of a pool load batches of a PyDataset."""
    global _of_process
    _of_process = batches


def _batch_of_process(index: int) -> Any:
    return _of_process[index]


def rows_of(batch: Any) -> int:
    """Return how many rows the arrays of a batch have.  Local.

    ValueError: they differ in it, or there is no array.
    """
    found = {int(leaf.shape[0]) for leaf in keras.tree.flatten(batch) if leaf is not None}
    if len(found) != 1:
        raise ValueError(f"the arrays of a batch must have one number of rows, got {sorted(found) or 'no array'}")
    return found.pop()


def given_rows(part: Any) -> int:
    """Return how many rows a part that was cut here has, by its first array: in each step, so it is quick.  Local."""
    return int(next(leaf for leaf in keras.tree.flatten(part) if leaf is not None).shape[0])


def cut(batch: Any, share: BatchShare) -> Any:
    """Return a replica's rows of a global batch.  Local."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[share.given], batch)
