"""The mesh of `TPUStrategy` under a real mpirun: replicas of all ranks, and of two where ranks are even."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.cluster.topology import Topology as ClusterTopology
from mpidist.errors import RemoteReplicaError
from mpidist.tpu.experimental import DeviceAssignment, Topology
from tests.helpers.identical import assert_identical

pytestmark = pytest.mark.mpi


@pytest.fixture(params=["whole", "pairs", "single"])
def strategy(request):
    size = mpidist.MultiWorkerMirroredStrategy().num_replicas_in_sync
    devices = {"whole": size, "pairs": 2, "single": 1}[request.param]
    if size % devices:
        pytest.skip(f"{size} ranks are no pairs")
    # One row of ranks, whatever the nodes: replicas may then lie on two nodes as well.
    topology = Topology.of(ClusterTopology(["any"] * size))
    return mpidist.TPUStrategy(experimental_device_assignment=DeviceAssignment.build(topology, [1, 1, 1, devices]))


def test_sums_over_replicas_and_over_logical_devices(strategy):
    extended = strategy.extended
    rank, size, devices = extended.whole.rank, extended.whole.size, extended.num_logical_devices
    group = range(rank // devices * devices, rank // devices * devices + devices)
    across = range(rank % devices, size, devices)

    def step(elements):
        replica = mpidist.get_replica_context()
        value = numpy.full(elements, rank, "float32")
        shape = (replica.replica_id_in_sync_group + 1, 3)
        return (
            replica.all_reduce("SUM", [value, value * 2]),
            replica.logical_all_reduce("SUM", numpy.full(shape, float(rank))),
            replica.logical_all_gather(numpy.full((rank % 2, 2), rank), axis=0),
            replica.all_gather(numpy.array([rank]), axis=0),
        )

    for elements in (1, 100_000):
        (first, second), inside, joined, ranks = strategy.run(step, (elements,))
        numpy.testing.assert_array_equal(first, numpy.full(elements, sum(across), "float32"))
        numpy.testing.assert_array_equal(second, numpy.full(elements, 2 * sum(across), "float32"))
        numpy.testing.assert_array_equal(inside, numpy.full((rank // devices + 1, 3), sum(group)))
        assert joined.tolist() == [[other] * 2 for other in group if other % 2]
        assert ranks.tolist() == list(across)


def test_values_are_placed_and_split(strategy):
    extended = strategy.extended
    devices, device, mine = extended.num_logical_devices, extended.logical_device, extended.replica_id
    last = devices - 1
    placed = strategy.experimental_assign_to_logical_device(
        numpy.full(mine + 1, mine, "float32") if device == last else None, last
    )
    assert_identical(placed, numpy.full(mine + 1, mine, "float32"))
    whole = numpy.arange(4.0 * devices).reshape(2, 2 * devices)
    part = strategy.experimental_split_to_logical_devices(whole, [1, devices])
    numpy.testing.assert_array_equal(part, whole[:, 2 * device : 2 * device + 2])
    with strategy.scope():
        variable = mpidist.Variable(whole + extended.whole.rank, partition_dimensions=[1, devices])
    numpy.testing.assert_array_equal(variable.value, part)
    numpy.testing.assert_array_equal(variable.saved_value(), whole)


def test_an_error_on_one_rank_reaches_all(strategy):
    size = strategy.extended.whole.size

    def step():
        if strategy.extended.whole.rank == size - 1:
            raise LookupError("row 7")
        return mpidist.get_replica_context().logical_all_reduce("SUM", 1.0)

    for _ in range(3):
        with pytest.raises((LookupError, RemoteReplicaError), match="row 7"):
            strategy.run(step)
    assert strategy.reduce("SUM", 1.0, axis=None) == strategy.num_replicas_in_sync
