"""Distributed data sets on the ranks of an mpirun: joined in rank order, their parts are the global batches."""

from __future__ import annotations

import h5py
import numpy
import pytest

import mpidist
from mpidist.input import Dataset, DistributedDataset

pytestmark = pytest.mark.mpi


def global_batches(dataset):
    """Return the batches of the next epoch, as one rank would see them, as lists."""
    return [batch.tolist() for batch in DistributedDataset(dataset, 0, 1)]


def joined(strategy, distributed):
    return [strategy.gather(part, axis=0).tolist() for part in distributed]


@pytest.fixture
def shared_folder(mpi_tmp_path):
    """A folder with four HDF5 files of 7, 0, 3 and 11 rows, and the number of rows in all."""
    strategy, sizes = mpidist.MultiWorkerMirroredStrategy(), [7, 0, 3, 11]
    if strategy.extended.replica_id == 0:
        for number, size in enumerate(sizes):
            with h5py.File(mpi_tmp_path / f"{number}.h5", "w") as file:
                file.create_dataset("x", data=numpy.arange(size) + 100.0 * number, chunks=(2,) if size else None)
    strategy.extended.communicator.barrier()
    return mpi_tmp_path


@pytest.mark.parametrize(("rows", "batch"), [(40, 8), (23, 7), (5, 2), (1, 64)])
def test_parts_joined_in_rank_order_are_the_global_batches(rows, batch):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    values = numpy.arange(2 * rows, dtype="float32").reshape(rows, 2)
    dataset = Dataset.from_arrays(values).shuffle(seed=7).batch(batch)
    distributed = strategy.experimental_distribute_dataset(dataset)
    alone = DistributedDataset(dataset, 0, 1)
    for _ in range(2):
        assert joined(strategy, distributed) == [part.tolist() for part in alone]


def test_more_replicas_than_rows_get_empty_parts_and_join_the_reduction():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    dataset = Dataset.from_arrays(numpy.ones((2, 3), "float32")).batch(2)
    sums = [strategy.reduce("SUM", part, axis=0) for part in strategy.experimental_distribute_dataset(dataset)]
    assert [total.tolist() for total in sums] == [[2.0, 2.0, 2.0]]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_rows_of_files_and_of_streams(shared_folder, prefetch):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    files = Dataset.from_hdf5(shared_folder / "*.h5", "x").shuffle(seed=1)
    streams = [files, files.filter(lambda x: x % 3 > 0), Dataset.from_generator(lambda: numpy.arange(17.0))]
    for dataset in streams:
        batches = dataset.map(lambda x: x + 1, num_parallel_calls=2).batch(4).prefetch(prefetch)
        assert joined(strategy, strategy.experimental_distribute_dataset(batches)) == global_batches(batches)


def test_files_are_dealt_whole_and_ranks_that_are_out_get_empty_batches(shared_folder):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    options = mpidist.data.Options()
    options.experimental_distribute.auto_shard_policy = mpidist.AutoShardPolicy.FILE
    dataset = Dataset.from_hdf5(shared_folder / "*.h5", "x").batch(4).with_options(options)
    if strategy.num_replicas_in_sync > 4:
        with pytest.raises(ValueError, match="not enough for the required"):
            strategy.experimental_distribute_dataset(dataset)
        return
    distributed = strategy.experimental_distribute_dataset(dataset)
    first = next(iter(distributed))
    resumed = strategy.experimental_distribute_dataset(dataset)
    resumed.restore(distributed.state())
    seen = [*strategy.gather(first, axis=0).tolist(), *sum(joined(strategy, resumed), [])]
    assert sorted(seen) == [row + 100.0 * number for number, rows in enumerate([7, 0, 3, 11]) for row in range(rows)]


def test_data_sets_of_each_rank_end_together():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    size = strategy.num_replicas_in_sync

    def dataset_fn(ctx):
        return Dataset.range(2 * ctx.input_pipeline_id + 1).batch(2)

    steps = [part.shape[0] for part in strategy.distribute_datasets_from_function(dataset_fn)]
    assert len(steps) == size
    assert sum(steps) == 2 * strategy.extended.replica_id + 1


def test_batches_of_somebody_else_must_be_alike():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    batches = [numpy.arange(5) + 10 * number for number in range(3)]
    assert joined(strategy, strategy.experimental_distribute_dataset(batches)) == [batch.tolist() for batch in batches]
    if strategy.num_replicas_in_sync > 1:
        mine = strategy.experimental_distribute_dataset([numpy.arange(5) + strategy.extended.replica_id])
        with pytest.raises(mpidist.errors.CollectiveMismatchError, match="checksum of what was read for step 0"):
            next(iter(mine))


def test_an_epoch_goes_on_at_another_batch_size_and_other_data_are_refused():
    strategy = mpidist.MultiWorkerMirroredStrategy()

    def made(batch, seed=1):
        return strategy.experimental_distribute_dataset(Dataset.range(40).shuffle(seed=seed).batch(batch))

    first = made(4)
    seen = [row for _, part in zip(range(6), first, strict=False) for row in strategy.gather(part, axis=0).tolist()]
    resumed = made(7)
    resumed.restore(first.state())
    assert seen + sum(joined(strategy, resumed), []) == global_batches(Dataset.range(40).shuffle(seed=1).batch(40))[0]
    with pytest.raises(mpidist.errors.InputError, match=r"shuffle\(seed=1\) when saved, shuffle\(seed=2\) now"):
        made(4, seed=2).restore(first.state())


def test_numbers_from_a_function_are_given_until_a_rank_has_none():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    size = strategy.num_replicas_in_sync
    alike = strategy.distribute_datasets_from_function(lambda ctx: Dataset.range(ctx.input_pipeline_id, 9).take(1))
    assert [int(number) for number in alike] == [strategy.extended.replica_id]
    uneven = strategy.distribute_datasets_from_function(
        lambda ctx: Dataset.range(1 + (ctx.input_pipeline_id == size - 1))
    )
    if size > 1:
        with pytest.raises(mpidist.errors.InputError, match="have no element for step 1"):
            list(uneven)
    assert strategy.reduce("SUM", numpy.ones(1), axis=None).tolist() == [size]
