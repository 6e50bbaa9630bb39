"""Distributed data sets on the ranks of an mpirun: joined in rank order, their parts are the global batches."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.input import Dataset

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(("rows", "batch"), [(40, 8), (23, 7), (5, 2), (1, 64)])
def test_parts_joined_in_rank_order_are_the_global_batches(rows, batch):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    values = numpy.arange(2 * rows, dtype="float32").reshape(rows, 2)
    dataset = Dataset.from_arrays(values).shuffle(seed=7).batch(batch)
    distributed = strategy.experimental_distribute_dataset(dataset)
    for epoch in range(2):
        expected = [values[index] for index in dataset.rows_of_batches(epoch)]
        joined = [strategy.gather(part, axis=0) for part in distributed]
        assert [each.tolist() for each in joined] == [each.tolist() for each in expected]


def test_more_replicas_than_rows_get_empty_parts_and_join_the_reduction():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    dataset = Dataset.from_arrays(numpy.ones((2, 3), "float32")).batch(2)
    sums = [strategy.reduce("SUM", part, axis=0) for part in strategy.experimental_distribute_dataset(dataset)]
    assert [total.tolist() for total in sums] == [[2.0, 2.0, 2.0]]
