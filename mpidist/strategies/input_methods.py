"""`InputMethods`: the part of a strategy that deals data to replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mpidist import context
from mpidist.input.dataset import Dataset
from mpidist.input.distributed import DistributedDataset
from mpidist.input.from_function import InputContext, ValueContext
from mpidist.input.options import InputOptions
from mpidist.strategies.extended import StrategyExtended


class InputMethods:
    """What `Strategy` has for input.

    Attributes
    ----------
    extended : StrategyExtended
    """

    extended: StrategyExtended

    def experimental_distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> Any:
        """Return an iterable of this replica's parts of the global batches of `dataset`.

        Collective: every rank calls it in the same order, with the same data set: all rows, on every rank.  The ranks
        compare the arrays' shapes and dtypes, a checksum of some of their rows, batches and order; later, nothing is
        sent for data sets of arrays and files.

        Parameters
        ----------
        dataset : mpidist.data.Dataset, or iterable of batches
            Batched by the global batch, which is cut into contiguous parts of ``ceil(rows / replicas)`` rows.  Any
            other iterable of batches (a list, a PyTorch DataLoader) must give the same batches on every rank, which is
            checked at every step.
        options : InputOptions, optional
            With options, parts are copied to the replica's device; without, they stay where the data set has them.

        Returns
        -------
        DistributedDataset
            Strategies that distribute nothing give back what has no batches as it is.

        Raises
        ------
        TypeError, ValueError
            It cannot be iterated, has no batches, or cannot be dealt by file.
        CollectiveMismatchError
            On all ranks: their data sets differ; says in what.  Data that are meant to differ by rank are for
            `distribute_datasets_from_function`.
        """
        context.require_cross_replica(self)
        return self.extended.distribute_dataset(dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return an iterable of the batches of ``dataset_fn(input_context)``, which is called once on every rank.

        Collective when iterated: it goes on until all ranks are out of batches; who is out early gets empty ones.

        Parameters
        ----------
        dataset_fn : callable
            Gets an `InputContext` and returns this rank's data set, batched for one replica: nothing is split here.
            Lists of arrays in its elements become tuples.  Elements without rows, which cannot be empty, must be as
            many on every rank: otherwise iterating raises InputError on all ranks.
        options : InputOptions, optional
            As for `experimental_distribute_dataset`.
        """
        context.require_cross_replica(self)
        return self.extended.distribute_from_function(dataset_fn, options)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def make_experimental_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Dataset:
        """Return the data set of the rows of an array, or of nested arrays.  Local.

        Parameters
        ----------
        numpy_input : array, or nested tuples and dicts of arrays
            All with the same first dimension.
        session
            Accepted for TensorFlow's sake.
        """
        return Dataset.from_arrays(numpy_input)

    experimental_make_numpy_dataset = make_experimental_numpy_dataset

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return ``value_fn(value_context)``: this replica's component of a value.  Local.

        Parameters
        ----------
        value_fn : callable
            Gets a `ValueContext`, which tells the number of the replica.
        """
        context.require_cross_replica(self)
        return value_fn(ValueContext(self.extended.replica_id, self.extended.num_replicas))
