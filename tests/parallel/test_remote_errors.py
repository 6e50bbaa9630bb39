"""An exception in `run` on one rank reaches all ranks of a real job, which go on in step."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.errors import RemoteReplicaError

pytestmark = pytest.mark.mpi


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("elements", [1, 300_000])
def test_all_ranks_learn_of_it_and_go_on(elements):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    rank, size = strategy.extended.replica_id, strategy.num_replicas_in_sync

    def total(value):
        return mpidist.get_replica_context().all_reduce("SUM", numpy.full(elements, value, "float32"))

    def step(number):
        first = total(number)
        if rank == number % size:
            raise LookupError(f"step {number}")
        return first, total(1)

    for number in range(2 * size):
        with pytest.raises((LookupError, RemoteReplicaError)) as raised:
            strategy.run(step, (number,))
        assert f"step {number}" in str(raised.value)
        assert (raised.type is LookupError) == (rank == number % size)
        numpy.testing.assert_array_equal(strategy.run(total, (rank,)), numpy.float32(size * (size - 1) / 2))


@pytest.mark.mpi(min_size=2)
def test_unequal_merge_calls_are_an_error_on_all_ranks():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    rank, size = strategy.extended.replica_id, strategy.num_replicas_in_sync

    def step():
        if rank == 0:
            mpidist.get_replica_context().merge_call(lambda merging: None)

    with pytest.raises(RuntimeError, match="different number of replica_context"):
        strategy.run(step)
        strategy.reduce("SUM", 1.0, axis=None)
    assert strategy.reduce("SUM", 1.0, axis=None) == size
