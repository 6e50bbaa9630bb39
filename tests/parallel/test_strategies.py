"""Strategies under a real mpirun, at any number of ranks: closed forms in rank and size."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist import transports
from mpidist.input import Dataset
from mpidist.transports import World

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def world() -> World:
    return transports.world()


@pytest.fixture(params=["mirrored", "central", "multi_worker", "ring", "one_device_reduction"])
def strategy(request):
    """The strategies whose replicas are the ranks, and their routes.  Parametrized alike on every rank."""
    if request.param == "multi_worker":
        return mpidist.MultiWorkerMirroredStrategy()
    if request.param == "central":
        return mpidist.CentralStorageStrategy()
    ops = {"ring": mpidist.RingAllReduce, "one_device_reduction": mpidist.ReductionToOneDevice}.get(request.param)
    return mpidist.MirroredStrategy(cross_device_ops=ops() if ops else None)


def test_every_rank_is_a_replica(strategy, world):
    size = world.topology.size

    def fn():
        replica = mpidist.get_replica_context()
        return replica.replica_id_in_sync_group, replica.num_replicas_in_sync

    assert strategy.run(fn) == (world.transport.rank, size)
    assert strategy.num_replicas_in_sync == size
    assert strategy.gather([world.transport.rank], axis=0).tolist() == list(range(size))


def test_gradients_are_summed_fused(strategy, world):
    rank, size = world.transport.rank, world.topology.size
    triangle = size * (size - 1) // 2
    gradients = {
        "kernel": numpy.full((300, 70), rank, "float32"),
        "bias": [numpy.float64(rank), numpy.arange(5) + rank],
        "empty": numpy.zeros((0, 3), "float32"),
    }
    for _ in range(3):
        sums = strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", gradients))
        numpy.testing.assert_array_equal(sums["kernel"], numpy.full((300, 70), triangle))
        assert sums["bias"][0] == triangle
        numpy.testing.assert_array_equal(sums["bias"][1], size * numpy.arange(5) + triangle)
        assert sums["empty"].shape == (0, 3)
    means = strategy.run(lambda: mpidist.get_replica_context().all_reduce("MEAN", gradients))
    numpy.testing.assert_allclose(means["kernel"], triangle / size, rtol=1e-6)
    numpy.testing.assert_allclose(means["bias"][1], numpy.arange(5) + triangle / size, rtol=1e-12)


def test_all_ranks_hold_the_same_bits(strategy, world):
    values = numpy.random.default_rng(world.transport.rank).standard_normal(10_001).astype("float32")
    total = strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", values))
    everybodys = strategy.gather(total[None].view("uint32"), axis=0)
    assert (everybodys == everybodys[0]).all()


def test_the_mean_over_uneven_rows_is_that_of_all_rows(strategy, world):
    rank, size = world.transport.rank, world.topology.size
    rows = numpy.arange(3.0 * rank).reshape(rank, 3) + 1  # rank 0 has none
    whole = numpy.concatenate([numpy.arange(3.0 * other).reshape(other, 3) + 1 for other in range(size)])
    mean = strategy.reduce("MEAN", rows, axis=0)
    if size == 1:
        assert numpy.isnan(mean).all()
    else:
        numpy.testing.assert_allclose(mean, whole.mean(axis=0), rtol=1e-12)
    numpy.testing.assert_array_equal(strategy.reduce("sum", rows, axis=(0, 1)), whole.sum())
    numpy.testing.assert_array_equal(strategy.gather(rows, axis=0), whole)
    columns = strategy.run(lambda: mpidist.get_replica_context().all_gather(rows.T.copy(), axis=-1))
    numpy.testing.assert_array_equal(columns, whole.T)


def test_variables_begin_alike_and_follow_their_aggregation(strategy, world):
    rank, size = world.transport.rank, world.topology.size
    has_copies = size == 1 or not isinstance(strategy, mpidist.CentralStorageStrategy)  # which replicas write alone
    names = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")[0 if has_copies else 1 :]
    with strategy.scope():
        variables = {name: mpidist.Variable(lambda: 100.0 + rank, aggregation=name) for name in names}
        counter = mpidist.Variable(0, synchronization="ON_READ", aggregation="SUM")

    def fn():
        assert {float(variable.value) for variable in variables.values()} == {100.0}
        for variable in variables.values():
            variable.assign_add(rank + 1.0)
        counter.assign_add(rank + 1)
        return int(counter.value)

    total = size * (size + 1) // 2
    assert strategy.run(fn) == rank + 1
    values = [float(variables[name].value) for name in names]
    expected = [101 + rank, 100 + total, 100 + total / size, 101]
    assert values == pytest.approx(expected[-len(names) :])
    assert counter.value == total


def test_merge_call_and_reduce(strategy, world):
    size = world.topology.size

    def merge_fn(merging, value):
        assert mpidist.in_cross_replica_context()
        return merging.reduce("SUM", value, axis=None)

    assert strategy.run(lambda: mpidist.get_replica_context().merge_call(merge_fn, (2.0,))) == 2.0 * size


def test_the_parts_of_a_batch_are_the_batch(strategy):
    rows = numpy.arange(22).reshape(11, 2)
    parts = strategy.experimental_distribute_dataset(Dataset.from_arrays(rows).batch(4))
    batches = [strategy.gather(part, axis=0) for part in parts]
    assert [len(batch) for batch in batches] == [4, 4, 3]
    numpy.testing.assert_array_equal(numpy.concatenate(batches), rows)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_pass_different_shapes_are_all_told(strategy, world):
    rank, size = world.transport.rank, world.topology.size
    gradient = numpy.ones(4 if rank == size - 1 else 3)
    with pytest.raises(mpidist.errors.CollectiveMismatchError, match=rf"rank.* {size - 1}.*\(4,\)"):
        strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", [numpy.ones(2), gradient]))
    assert strategy.reduce("SUM", 1.0, axis=None) == size  # the ranks still agree on where they are


@pytest.mark.mpi(min_size=2)
def test_ranks_that_create_different_variables_are_all_told(strategy, world):
    with strategy.scope(), pytest.raises(mpidist.errors.CollectiveMismatchError, match="'kernel'"):
        mpidist.Variable(numpy.zeros(2 + (world.transport.rank == 0)), name="kernel")


@pytest.mark.mpi(min_size=2)
def test_a_list_of_devices_for_other_ranks(world):
    count = world.topology.size + 1
    with pytest.raises(ValueError, match=f"mpidist run -n {count} "):
        mpidist.MirroredStrategy(devices=[f"/cpu:{index}" for index in range(count)])
