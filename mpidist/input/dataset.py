"""`Dataset`: elements from arrays, files and functions, in an order that is the same on every rank."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpidist.input import structure
from mpidist.input.batches import Batch, Unbatch
from mpidist.input.cache import Cache
from mpidist.input.files import FileRows, expanded, tables_of
from mpidist.input.hdf5 import Hdf5Table, OpenFiles
from mpidist.input.mapping import Filter, Map
from mpidist.input.numpy_files import npy_table, npz_table
from mpidist.input.options import Options
from mpidist.input.order import Repeat, Shard, Shuffle, Window
from mpidist.input.prefetching import prefetched
from mpidist.input.sources import Arrays, Generated, Range
from mpidist.input.stage import ArraySpec, Stage
from mpidist.input.text import CsvTable, TextTable
from mpidist.input.zipped import Concatenate, Zip

__all__ = ["AUTOTUNE", "ArraySpec", "Dataset"]

#: One file or several; ``*`` and ``?`` are patterns.
Paths = str | Path | Iterable[str | os.PathLike[str]]

#: For `num_parallel_calls` and `prefetch`: leaves the number to mpidist.
AUTOTUNE = -1

#: The elements that `prefetch(AUTOTUNE)` makes ahead.
_AHEAD = 2


@dataclass(frozen=True, eq=False)
class Dataset:
    """Elements, and the order in which they come.  All methods are Local.

    Made by one of the ``from_...`` methods; every other method returns a new data set and leaves this one as it is.
    Elements are arrays, or nested tuples and dicts of them; a list is one array, as in TensorFlow.  Iterating gives the
    global batches, ``strategy.experimental_distribute_dataset`` each replica its part of them.  Every ``iter()`` is the
    next epoch, with orders of its own in every `shuffle`.

    Data sets of arrays and files stay *indexed* through all that is index arithmetic: `shuffle`, `batch`, `repeat`,
    `take`, `skip`, `shard`, `zip`, `enumerate`, `concatenate`, and through `map` and `cache`.  Of those a rank reads
    its own rows only, and a run resumes at once.  `from_generator`, `filter` and `unbatch` make a *stream*: every rank
    walks through all of it, but maps its own rows only.
    """

    _stage: Stage
    _options: Options = field(default_factory=Options)
    _ahead: int = 0
    _epochs: Iterator[int] = field(default_factory=itertools.count, repr=False)

    # -- sources ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_arrays(cls, arrays: Any) -> Dataset:
        """Return the data set whose elements are the rows of `arrays`.

        Parameters
        ----------
        arrays : array, or nested tuples and dicts of arrays
            NumPy or CuPy arrays, or what `numpy.asarray` takes, all with the same first dimension.  They are not
            copied, and not changed.

        Raises
        ------
        ValueError
            If there is no array, one is a scalar, or the first dimensions differ.
        """
        return cls(Arrays(arrays))

    from_tensor_slices = from_arrays

    @classmethod
    def from_tensors(cls, arrays: Any) -> Dataset:
        """Return the data set with one element, which is `arrays`."""
        return cls.from_arrays(structure.map_leaves(lambda leaf: leaf[None], structure.to_arrays(arrays)))

    @classmethod
    def range(cls, *args: int) -> Dataset:
        """Return the data set of the numbers of ``range(*args)``, as int64."""
        numbers = range(*args)
        return cls(Range(numbers.start, numbers.stop, numbers.step))

    @classmethod
    def from_generator(
        cls, generator: Callable[..., Iterable[Any]], output_signature: Any = None, args: tuple[Any, ...] = ()
    ) -> Dataset:
        """Return the data set of what a function's iterable gives; a stream.

        Parameters
        ----------
        generator : callable
            ``generator(*args)`` returns an iterable of elements.  It is called again for every epoch, on every rank,
            and must give the same elements everywhere: seed random numbers alike.  It may write to an array again
            that it has given: elements are copied.
        output_signature : ArraySpec, or nested tuples and dicts of these, optional
            What elements are converted to; lists in them become arrays.
        args : tuple

        Raises
        ------
        TypeError
            It is no function: an iterator can be used once only.
        """
        if not callable(generator):
            raise TypeError(
                f"from_generator needs a function that returns an iterable, got {type(generator).__name__}: "
                "`from_generator(lambda: ...)`"
            )
        return cls(Generated(generator, tuple(args), output_signature))

    @classmethod
    def from_hdf5(cls, paths: Paths, names: Any = None) -> Dataset:
        """Return the data set of the rows of arrays in HDF5 files.

        Nothing but the rows of a batch is read, in slices, where HDF5 reads the chunks that they touch.

        Parameters
        ----------
        paths : str, path, or list of these
            Files one after the other; ``*`` and ``?`` are patterns, taken in the order of the names.
        names : str, or nested tuples and dicts of str, optional
            The arrays that make up an element, such as ``("images", "labels")``.  None is a dict of all arrays at the
            top of the file.

        Raises
        ------
        FileNotFoundError, KeyError, ValueError
            There is no such file or array; arrays or files do not fit together.
        """
        files = OpenFiles()
        return cls(tables_of(paths, lambda path: Hdf5Table(path, names, files)))

    @classmethod
    def from_npy(cls, paths: Any) -> Dataset:
        """Return the data set of the rows of ``.npy`` files, mapped into memory.

        Parameters
        ----------
        paths : str, path or list of these; or nested tuples and dicts of these
            ``("x.npy", "y.npy")`` are two arrays side by side, ``["a.npy", "b.npy"]`` two files one after the other.
        """
        lists = structure.map_leaves(expanded, paths)
        counts = {len(each) for each in structure.leaves(lists)}
        if len(counts) != 1:
            raise ValueError(f"arrays side by side need the same number of files each, got {sorted(counts)}")
        tables = [npy_table(structure.map_leaves(lambda each: each[n], lists)) for n in range(counts.pop())]  # noqa: B023
        return cls(FileRows.checked(tables))

    @classmethod
    def from_npz(cls, paths: Paths, names: Any = None) -> Dataset:
        """Return the data set of the rows of arrays in ``.npz`` files, mapped into memory unless compressed.

        Parameters
        ----------
        paths : str, path, or list of these
        names : str, or nested tuples and dicts of str, optional
            As for `from_hdf5`.
        """
        return cls(tables_of(paths, lambda path: npz_table(path, names)))

    @classmethod
    def from_text(cls, paths: Paths, encoding: str = "utf-8") -> Dataset:
        """Return the data set of the lines of text files, as str without their line ends.

        Parameters
        ----------
        paths : str, path, or list of these
        encoding : str
        """
        return cls(tables_of(paths, lambda path: TextTable(path, encoding)))

    @classmethod
    def from_csv(
        cls,
        paths: Paths,
        columns: Sequence[str] | Sequence[int] | None = None,
        dtype: Any = "float32",
        header: bool = True,
        delimiter: str = ",",
        encoding: str = "utf-8",
    ) -> Dataset:
        """Return the data set of the rows of CSV files: dicts of columns, or tuples where there is no header.

        Parameters
        ----------
        paths : str, path, or list of these
        columns : list of str, optional
            Those wanted, by name, or by number where there is no header; None is all.
        dtype : dtype or mapping
            Of all columns, or of each; those that a mapping leaves out are float32.  ``str`` keeps the text, ``bool``
            is 0, 1, false or true in any case.
        header : bool
            Whether the first line of every file has the names.
        delimiter, encoding : str
        """
        return cls(tables_of(paths, lambda path: CsvTable(path, columns, dtype, header, delimiter, encoding)))

    # -- order --------------------------------------------------------------------------------------------------------

    def shuffle(
        self, buffer_size: int | None = None, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> Dataset:
        """Return the data set in another order every epoch, the same on all ranks.

        Parameters
        ----------
        buffer_size : int, optional
            Indexed data sets with an end are shuffled as a whole, whatever it is.  A stream goes through a buffer of so
            many elements (None: of all), what repeats forever is shuffled in blocks of so many.
        seed : int, optional
            Of the orders of all epochs.  None is the seed 0: without a word the orders are the same on all ranks, and
            again in the next run.
        reshuffle_each_iteration : bool
            False keeps the first order in every epoch.

        Raises
        ------
        ValueError, TypeError
            `buffer_size` is less than 1; `seed` is no whole number.
        """
        if buffer_size is not None and buffer_size < 1:
            raise ValueError(f"buffer_size must be 1 or more, got {buffer_size}")
        number = 0 if seed is None else operator.index(seed)
        return self._then(Shuffle(self._stage, buffer_size, number, reshuffle_each_iteration))

    def repeat(self, count: int | None = None) -> Dataset:
        """Return the data set `count` times over; None or a negative count is forever.

        A shuffle before it gives every repetition an order of its own.
        """
        if self._stage.length == math.inf:
            return self if count != 0 else self.take(0)
        return self._then(Repeat(self._stage, None if count is None or count < 0 else count))

    def take(self, count: int) -> Dataset:
        """Return the first `count` elements; all of them if it is negative."""
        return self if count < 0 else self._then(Window(self._stage, 0, count))

    def skip(self, count: int) -> Dataset:
        """Return the elements without the first `count`; none if it is negative."""
        return self.take(0) if count < 0 else self._then(Window(self._stage, count))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Return every `num_shards`-th element, from number `index` on.

        Distributed data sets are dealt to the ranks anyway; this is for `distribute_datasets_from_function`.
        """
        if num_shards < 1 or not 0 <= index < num_shards:
            raise ValueError(f"shard needs 0 <= index < num_shards, got num_shards={num_shards} and index={index}")
        return self._then(Shard(self._stage, num_shards, index))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Return the elements of this data set, and then those of another.

        Raises
        ------
        TypeError
            Both are indexed, and their elements have other dtypes or another structure; to see them, the first element
            of each is made where it is mapped.
        """
        if self._stage.length == math.inf:
            return self
        return self._then(Concatenate(self._stage, dataset._stage), dataset._ahead)

    @staticmethod
    def zip(*datasets: Any) -> Dataset:
        """Return the elements of several data sets side by side, as many as the shortest has.

        Parameters
        ----------
        *datasets : Dataset, or one nested tuple or dict of data sets
            The elements are structured in the same way.
        """
        nested = datasets[0] if len(datasets) == 1 and not isinstance(datasets[0], Dataset) else datasets
        ahead = max((each._ahead for each in structure.leaves(nested)), default=0)
        return Dataset(Zip(structure.map_leaves(lambda each: each._stage, nested)), _ahead=ahead)

    def enumerate(self, start: int = 0) -> Dataset:
        """Return pairs of a number and an element; the numbers count from `start`."""
        return self._then(Zip((Range(start, None, 1), self._stage)))

    # -- what becomes of the elements ---------------------------------------------------------------------------------

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool = True,
        by_rows: bool = False,
    ) -> Dataset:
        """Return the data set of what a function makes of every element.

        Parameters
        ----------
        map_func : callable
            Gets an element; the items of a tuple are its arguments.  A rank calls it for its own rows only.
        num_parallel_calls : int, optional
            How many rows of a batch are mapped at the same time, in threads; `AUTOTUNE` is one for each core.  The
            order of the elements stays.
        deterministic : bool
            Accepted for TensorFlow's sake: the order always stays.
        by_rows : bool
            After `batch`, `map_func` gets whole global batches, on every rank.  True says that it works row by row, and
            returns as many rows as it gets, so that a rank may give it its own rows only, which is quicker.
        """
        threads = len(os.sched_getaffinity(0)) if num_parallel_calls == AUTOTUNE else num_parallel_calls or 1
        if threads < 1:
            raise ValueError(f"num_parallel_calls must be 1 or more, or AUTOTUNE (-1), got {num_parallel_calls}")
        return self._then(Map(self._stage, map_func, threads, by_rows))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Return the elements of which a function says True, the same on every rank; a stream."""
        return self._then(Filter(self._stage, predicate))

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool = True,
    ) -> Dataset:
        """Return the data set in global batches of `batch_size` rows.

        Parameters
        ----------
        batch_size : int
            Rows over all replicas together.
        drop_remainder : bool
            Whether the last batch is left out when it has fewer rows.
        num_parallel_calls, deterministic
            Accepted for TensorFlow's sake.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
        return self._then(Batch(self._stage, batch_size, drop_remainder))

    def unbatch(self) -> Dataset:
        """Return the rows of batches as elements."""
        stage = self._stage
        return self._then(stage.child if isinstance(stage, Batch) and not stage.drop else Unbatch(stage))

    def cache(self) -> Dataset:
        """Return the data set that keeps in memory the elements that this rank has made, in their first order."""
        return self._then(Cache(self._stage))

    def prefetch(self, buffer_size: int = AUTOTUNE) -> Dataset:
        """Return the data set whose iterators make so many elements ahead of time, in a thread.

        Wherever it stands, it is the last elements of the chain that are made ahead.  The thread ends with its
        iterator.
        """
        return self._then(self._stage, _AHEAD if buffer_size < 0 else buffer_size)

    def with_options(self, options: Options) -> Dataset:
        """Return the data set with options for its distribution."""
        if not isinstance(options, Options):
            raise TypeError(f"options must be a mpidist.data.Options, got {type(options).__name__}")
        return Dataset(self._stage, options, self._ahead)

    def _then(self, stage: Stage, ahead: int = 0) -> Dataset:
        return Dataset(stage, self._options, max(ahead, self._ahead))

    # -- what is in it ------------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int | None:
        """Rows of a global batch; None before `batch`."""
        return self._stage.batch_size

    @property
    def is_batched(self) -> bool:
        """Whether elements are batches, which can be cut into parts."""
        return self._stage.batched

    @property
    def drop_remainder(self) -> bool:
        """Whether all batches have `batch_size` rows."""
        return self._stage.drop_remainder

    @property
    def element_spec(self) -> Any:
        """`ArraySpec` of every array of an element; the size of a batch is None unless remainders are dropped.

        Where elements are mapped or generated, the first one is made to see what it is.
        """
        return self._stage.spec()

    def options(self) -> Options:
        """Return the options."""
        return self._options

    def cardinality(self) -> int:
        """Return the number of elements; -1 is no end, -2 that only iterating tells."""
        length = self._stage.length
        return -2 if length is None else -1 if length == math.inf else int(length)

    def __len__(self) -> int:
        """Return the number of elements: rows, or batches after `batch`; TypeError where there is none."""
        length = self._stage.length
        if length is None:
            raise TypeError("this data set is a stream (of a generator, or filtered): only iterating tells its length")
        if length == math.inf:
            raise TypeError("this data set repeats forever and has no length")
        return int(length)

    def __iter__(self) -> Iterator[Any]:
        return self._pass_of(self._next_epoch())

    def _next_epoch(self) -> int:
        """Return the number of the epoch that an iterator made now would be, which no other one will be."""
        return next(self._epochs)

    def _pass_of(self, epoch: int) -> Iterator[Any]:
        """Return an iterator over the elements of an epoch, given by its number."""
        elements = (item() for item in self._stage.items(epoch))
        return prefetched(elements, self._ahead)

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Return an iterator over the next epoch's elements."""
        return iter(self)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Return ``reduce_func(state, element)`` over all elements of the next epoch, begun with `initial_state`."""
        return functools.reduce(reduce_func, self, initial_state)

    def __repr__(self) -> str:
        words = "".join(f".{word}" for word in self._stage.words())
        return f"<Dataset of {' and '.join(type(source).__name__ for source in self._stage.sources())}{words}>"
