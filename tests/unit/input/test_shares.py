"""What a rank knows of the rows of all replicas in a step, with no message that was not there anyway."""

from __future__ import annotations

import re

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.errors import CollectiveMismatchError, InputError
from mpidist.input import Dataset, DistributedDataset
from mpidist.input.options import AutoShardPolicy, Options
from mpidist.input.sharding import Share
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.testing import run_ranks
from mpidist.world import world_communicator

ROWS = 23
SOURCES = {
    "arrays": lambda: Dataset.from_arrays(numpy.arange(ROWS)),
    "shuffled": lambda: Dataset.from_arrays(numpy.arange(ROWS)).shuffle(seed=3).repeat(2),
    "generated": lambda: Dataset.from_generator(lambda: range(ROWS)),
    "filtered": lambda: Dataset.range(40).filter(lambda x: x % 3 > 0),
    "unbatched": lambda: Dataset.range(ROWS).batch(4).unbatch(),
}
BEHIND = {
    "nothing": lambda d: d,
    "map": lambda d: d.map(lambda batch: batch[1:]),  # another number of rows
    "map by rows": lambda d: d.map(lambda batch: 2 * batch, by_rows=True),
    "repeat": lambda d: d.repeat(2),
    "shuffle": lambda d: d.shuffle(3, seed=8),
    "cache": lambda d: d.cache(),
    "filter": lambda d: d.filter(lambda batch: batch.sum() % 2 == 0),
    "window": lambda d: d.skip(1).take(4),
    "prefetch": lambda d: d.prefetch(2),
    "joined": lambda d: d.concatenate(Dataset.range(7).batch(7)),
    "zip": lambda d: Dataset.zip((d, d)).map(lambda a, b: a, by_rows=True),
}


def expected_of(parts):
    """Return the share of parts by their definition."""
    counts = [len(part) for part in parts]
    return Share(sum(counts), len(set(counts)) == 1)


@pytest.mark.parametrize("source", SOURCES)
@settings(max_examples=25)
@given(batch=st.integers(1, 9), drop=st.booleans(), behind=st.sampled_from(sorted(BEHIND)), replicas=st.integers(2, 5))
def test_exact_parts_know_the_rows_of_the_whole_batch(source, batch, drop, behind, replicas):
    made = BEHIND[behind](SOURCES[source]().batch(batch, drop_remainder=drop))
    for _ in range(2):  # what is cached knows it too
        iterators = [iter(DistributedDataset(made, replica, replicas)) for replica in range(replicas)]
        for parts in zip(*iterators, strict=True):
            assert {each.share for each in iterators} == {expected_of(parts)}


def test_lists_of_batches_too():
    batches = [numpy.arange(5), numpy.arange(0), numpy.arange(6)]

    def on_rank():
        iterator = iter(MultiWorkerMirroredStrategy().experimental_distribute_dataset(batches))
        return [(part, iterator.share) for part in iterator]

    for step in zip(*run_ranks(3, on_rank), strict=True):
        parts, shares = zip(*step, strict=True)
        assert set(shares) == {expected_of(parts)}


def test_one_replica_has_none():
    iterator = iter(DistributedDataset(Dataset.range(4).batch(3), 0, 1))
    next(iterator)
    assert iterator.share is None


def shares_of(dataset):
    """Return (rows of this rank, share) of every step, and how many calls a step has taken."""
    iterator, channel = iter(dataset), world_communicator().control
    found = [(next(iterator), iterator.share)]  # the first step may agree on shapes
    before = channel.call
    found += [(part, iterator.share) for part in iterator]
    return found, (channel.call - before) / len(found)


def made_by_ranks(sizes):
    """Return what ranks find whose own data sets have batches of so many rows."""

    def on_rank():
        def make(context):
            mine = sizes[context.input_pipeline_id]
            return [numpy.arange(rows) for rows in mine]

        return shares_of(MultiWorkerMirroredStrategy().distribute_datasets_from_function(make))

    return run_ranks(len(sizes), on_rank)


@settings(max_examples=15)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=2, max_size=3))
def test_ranks_with_data_of_their_own_tell_in_the_vote_for_a_step(sizes):
    results = made_by_ranks(sizes)
    for step in zip(*(found for found, _ in results), strict=True):
        parts, shares = zip(*step, strict=True)
        assert set(shares) == {expected_of(parts)}
    assert {calls for _, calls in results} == {1.0}


@pytest.mark.parametrize("policy", [AutoShardPolicy.FILE, AutoShardPolicy.OFF])
def test_ranks_that_read_files_of_their_own_tell_too(policy, tmp_path):
    for number, rows in enumerate([5, 0, 3, 9]):
        numpy.save(tmp_path / f"{number}.npy", numpy.arange(rows))

    def on_rank():
        options = Options()
        options.experimental_distribute.auto_shard_policy = policy
        dataset = Dataset.from_npy(tmp_path / "*.npy").batch(4).with_options(options)
        return shares_of(MultiWorkerMirroredStrategy().experimental_distribute_dataset(dataset))

    results = run_ranks(3, on_rank)
    for step in zip(*(found for found, _ in results), strict=True):
        parts, shares = zip(*step, strict=True)
        assert set(shares) == {expected_of(parts)}
    assert {calls for _, calls in results} == {1.0}


def test_a_function_that_works_by_rows_must_keep_their_number():
    dataset = Dataset.range(8).batch(4).map(lambda batch: batch[batch > 1], by_rows=True)
    with pytest.raises(InputError, match=r"rank 0 of 2: .*by_rows=True\) has made 0 rows of 2; .* leave by_rows out"):
        list(DistributedDataset(dataset, 0, 2))


@pytest.mark.parametrize("behind", [lambda d: d, lambda d: d.repeat(2), lambda d: d.filter(len)])
@pytest.mark.parametrize("first", [0, 1])
def test_a_function_that_makes_another_number_of_rows_on_another_rank(first, behind):
    """Parts of several global batches would be weighted by several numbers of rows."""

    def on_rank():
        rank = world_communicator().rank
        dataset = behind(Dataset.range(8).batch(4)).map(lambda batch: batch[first + rank :])
        iterator = iter(MultiWorkerMirroredStrategy().experimental_distribute_dataset(dataset))
        expected = re.escape("rows of the global batch: 2 on rank 1, 3 on rank 0") if first else "rank 1 called|rows of"
        with pytest.raises(CollectiveMismatchError, match=expected):
            next(iterator)
            world_communicator().barrier("a step")

    run_ranks(2, on_rank)


def test_numbers_of_rows_are_compared_only_where_a_function_changes_them():
    def on_rank(function):
        dataset = Dataset.range(10).batch(4).map(function)
        return shares_of(MultiWorkerMirroredStrategy().experimental_distribute_dataset(dataset))

    for same in run_ranks(2, lambda: on_rank(lambda batch: 2 * batch)):
        assert same[1] == 0
    found = run_ranks(2, lambda: on_rank(lambda batch: batch[batch % 4 != 3]))
    assert [calls for _, calls in found] == [1 / 3] * 2  # the first is not counted, and the last is as it was
    for step in zip(*(steps for steps, _ in found), strict=True):
        parts, shares = zip(*step, strict=True)
        assert set(shares) == {expected_of(parts)}
