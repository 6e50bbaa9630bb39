"""`TPUStrategy`: replicas of several ranks, on a mesh; closed forms, and one rank's results on the whole problem."""

from __future__ import annotations

import copy

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import context
from mpidist.arrays import as_host
from mpidist.cluster.topology import Topology as ClusterTopology
from mpidist.collectives.reductions import update
from mpidist.errors import CollectiveMismatchError, RemoteReplicaError
from mpidist.input import Dataset
from mpidist.optimizers import LAMB, LARS, SGD, Adam
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.strategies.tpu.strategy import TPUStrategy
from mpidist.testing import run_ranks
from mpidist.testing.device import on_device, pretended_device
from mpidist.tpu.experimental import DeviceAssignment, Topology, initialize_tpu_system
from mpidist.training.checkpoint import Checkpoint
from mpidist.variables import Variable
from mpidist.variables.partition import part_of
from tests.helpers.identical import assert_identical


def mesh(devices=2):
    """Return a strategy whose replicas have so many ranks."""
    topology = initialize_tpu_system()
    return TPUStrategy(experimental_device_assignment=DeviceAssignment.build(topology, [1, 1, 1, devices]))


def replica():
    return context.get_replica_context()


# -- topology and assignment ------------------------------------------------------------------------------------------


def test_the_mesh_has_nodes_first_and_ranks_last():
    block, cyclic = Topology.of(ClusterTopology("aabb")), Topology.of(ClusterTopology("abab"))
    assert block.mesh_shape == cyclic.mesh_shape == (2, 1, 1, 2)
    assert block.ranks[:, 0, 0].tolist() == [[0, 1], [2, 3]] and cyclic.ranks[:, 0, 0].tolist() == [[0, 2], [1, 3]]
    assert Topology.of(ClusterTopology("aab")).mesh_shape == (1, 1, 1, 3)
    assert (block.num_tasks, block.num_tpus_per_task) == (2, 2)


@pytest.mark.parametrize(
    ("shape", "stride", "ranks"),
    [
        (None, None, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        ([1, 1, 1, 2], None, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([2, 1, 1, 1], None, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ([1, 1, 1, 2], [1, 1, 1, 2], [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ([2, 1, 1, 4], None, [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_blocks_of_the_mesh_are_replicas(shape, stride, ranks):
    assignment = DeviceAssignment.build(Topology.of(ClusterTopology("aaaabbbb")), shape, stride)
    assert assignment.ranks.tolist() == ranks
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (len(ranks), len(ranks[0]))
    last = ranks[-1][-1]
    assert assignment.place_of(last) == (len(ranks) - 1, len(ranks[0]) - 1)
    assert assignment.coordinates(0, 0) == (0, 0, 0, 0) and assignment.rank(0, 0) == 0
    assert assignment.lookup_replicas(0, 0) == [r for r, row in enumerate(ranks) if row[0] < 4]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1, 1, 2],), r"computation_shape must have shape \[4\]; got \[3\]"),
        (([1, 1, 1, 0],), "computation_shape must be positive"),
        (([1, 1, 1, 2], [1, 1, 1, 0]), "computation_stride must be positive"),
        (([1, 1, 1, 5],), r"footprint \[1, 1, 1, 5\] does not fit in TPU topology shape \[2, 1, 1, 4\]"),
        (([1, 1, 1, 2], None, 5), "requested 5 replicas but only 4 replicas"),
        (([1, 1, 1, 2], None, 3), r"ranks \[6, 7\] belong to no replica"),
        (([1, 1, 1, 3],), r"ranks \[3, 7\] belong to no replica"),
    ],
)
def test_what_does_not_fit_the_mesh(arguments, text):
    with pytest.raises(ValueError, match=text):
        DeviceAssignment.build(Topology.of(ClusterTopology("aaaabbbb")), *arguments)


def test_assignments_by_hand():
    topology = Topology.of(ClusterTopology("aaaa"))
    places = [[[0, 0, 0, 3], [0, 0, 0, 1]], [[0, 0, 0, 2], [0, 0, 0, 0]]]
    assert DeviceAssignment(topology, places).ranks.tolist() == [[3, 1], [2, 0]]
    with pytest.raises(ValueError, match=r"ranks \[3\] are in several replicas; ranks \[0\] belong to no replica"):
        DeviceAssignment(topology, [[[0, 0, 0, 3], [0, 0, 0, 1]], [[0, 0, 0, 2], [0, 0, 0, 3]]])
    with pytest.raises(ValueError, match="outside of a mesh"):
        DeviceAssignment(topology, [[[0, 0, 0, 4]]])
    with pytest.raises(ValueError, match="must have the shape"):
        DeviceAssignment(topology, [[0, 0, 0, 1]])
    for build in (DeviceAssignment, DeviceAssignment.build):
        with pytest.raises(ValueError, match="topology is not a Topology object: got str"):
            build("aaaa", places)
    with pytest.raises(ValueError, match="a mesh has 4 axes and every rank"):
        Topology([[[[0, 2]]]])

    def use_descending():
        TPUStrategy(experimental_device_assignment=DeviceAssignment(initialize_tpu_system(), places))

    with pytest.raises(ValueError, match="must be ascending"):
        run_ranks(4, use_descending)


def test_arguments_of_the_strategy():
    with pytest.raises(TypeError, match="must be a DeviceAssignment, got 2"):
        TPUStrategy(experimental_device_assignment=2)
    with pytest.raises(TypeError, match="must be a ClusterResolver, got 'local'"):
        TPUStrategy("local")
    with pytest.raises(ValueError, match="is for 4 ranks.*mpidist run -n 4"):
        TPUStrategy(device_assignment=DeviceAssignment.build(Topology.of(ClusterTopology("aaaa"))))


# -- replicas of one rank: what TensorFlow's identities are -----------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_without_an_assignment_every_rank_is_a_replica(size):
    def fn():
        strategy = TPUStrategy()
        value = numpy.arange(4.0).reshape(2, 2)
        same = [
            strategy.experimental_assign_to_logical_device(value, 0),
            strategy.experimental_split_to_logical_devices(value, [1, 1]),
            strategy.experimental_replicate_to_logical_devices(value),
        ]
        assert all(each is value for each in same)
        with pytest.raises(ValueError, match="not consistent with total number of partitions.*got 1, expected 0 to 0"):
            strategy.experimental_assign_to_logical_device(value, 1)
        total = strategy.run(lambda: replica().all_reduce("SUM", float(replica().replica_id_in_sync_group)))
        return strategy.num_replicas_in_sync, total

    assert run_ranks(size, fn) == [(size, size * (size - 1) / 2)] * size


# -- replicas of several ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "devices"), [(2, 2), (4, 2), (6, 3), (4, 4), (8, 2)])
def test_who_is_what_and_what_is_summed_where(size, devices):
    def fn():
        strategy = mesh(devices)
        rank = strategy.extended.whole.rank

        def step():
            return (
                replica().replica_id_in_sync_group,
                replica().logical_device,
                replica().all_reduce("SUM", numpy.array([float(rank)])).item(),
                replica().logical_all_reduce("SUM", {"a": numpy.float32(rank), "b": [rank]}),
                replica().logical_all_reduce("mean", float(rank)),
                replica().logical_all_gather(numpy.full((1, rank // devices), rank), axis=0).tolist(),
                replica().all_gather(numpy.full(rank + 1, rank), axis=0).tolist(),
            )

        return rank, strategy.num_replicas_in_sync, strategy.run(step), strategy.reduce("SUM", 1.0, axis=None)

    replicas = size // devices
    for rank, count, seen, ones in run_ranks(size, fn):
        mine, device = divmod(rank, devices)
        group, across = range(mine * devices, (mine + 1) * devices), range(device, size, devices)
        assert (count, ones) == (replicas, replicas)
        assert seen[:3] == (mine, device, sum(across))
        assert seen[3] == {"a": sum(group), "b": [sum(group)]} and seen[3]["a"].dtype == "float32"
        assert seen[4] == sum(group) / devices
        assert seen[5] == [[other] * mine for other in group]  # replicas may differ in lengths
        assert seen[6] == [other for other in across for _ in range(other + 1)]


def test_logical_devices_compare_the_keys_of_dicts():
    """Those of a replica; another replica may have others."""

    def fn():
        strategy = mesh(2)
        rank, own = strategy.extended.whole.rank, numpy.ones(2)
        keys = "ab"[rank // 2], f"{rank}"
        calls = [lambda value: replica().logical_all_reduce("sum", value)]
        calls += [lambda value: replica().logical_all_gather(value, 0)]
        for call in calls:
            assert list(strategy.run(call, ({keys[0]: own},))) == [keys[0]]
            with pytest.raises(CollectiveMismatchError, match=r"leaf 0: \['\d'\] on rank"):
                strategy.run(call, ({keys[1]: own},))

    run_ranks(4, fn)


@pytest.mark.parametrize(("size", "devices"), [(2, 2), (4, 2), (3, 3)])
@pytest.mark.parametrize(
    ("dtype", "value"), [("int8", 100), ("uint8", 200), ("int32", 2**31 - 1), ("int64", 2**62), ("float16", 60000)]
)
def test_a_mean_over_logical_devices_holds_what_all_of_them_have(dtype, value, size, devices):
    def fn():
        strategy, given = mesh(devices), numpy.array([value], dtype)
        return strategy.run(lambda: (replica().logical_all_reduce("MEAN", given), replica().all_reduce("MEAN", given)))

    for inside, across in run_ranks(size, fn):
        assert inside.dtype == across.dtype == ("float16" if dtype == "float16" else "float64")
        assert inside.tolist() == across.tolist() == [value]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.lists(st.integers(0, 2), min_size=3, max_size=3))
def test_parts_of_an_array_are_numbered_in_c_order_and_make_it_up(parts, factors):
    shape = [count * factor for count, factor in zip(parts, factors, strict=False)]
    whole = numpy.arange(numpy.prod(shape)).reshape(shape)
    joined = numpy.full(shape, -1)
    for index, cell in enumerate(numpy.ndindex(*parts)):
        part = part_of(whole, parts, index)
        assert part.shape == tuple(factors[: len(parts)])
        part_of(joined, parts, index)[...] = part
        bounds = [slice(at * length, (at + 1) * length) for at, length in zip(cell, part.shape, strict=True)]
        numpy.testing.assert_array_equal(part, whole[tuple(bounds)])
    numpy.testing.assert_array_equal(joined, whole)


@pytest.mark.parametrize(("parts", "size"), [([2, 1], 4), ([1, 2], 2), ([2, 2], 4), ([1, 4], 8)])
def test_splitting_a_tensor(parts, size):
    whole = numpy.arange(32.0).reshape(4, 8)

    def fn():
        strategy = mesh(numpy.prod(parts))
        split = strategy.run(lambda: strategy.experimental_split_to_logical_devices(whole, parts))
        assert split.flags.c_contiguous and not numpy.shares_memory(split, whole)
        return strategy.extended.logical_device, split

    for device, split in run_ranks(size, fn):
        numpy.testing.assert_array_equal(split, part_of(whole, parts, device))


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([2], r"Length of `partition_dimensions` must equal the rank .*\[2\] for a tensor of shape \(4, 9\)"),
        ([1, 2], r"dimension 1 .* must be divisible by `partition_dimensions\[1\]`, which is 2"),
        ([4, 1], r"product of `partition_dimensions` must be .* \(2\), got \[4, 1\] with the product 4"),
        ([-1, 1], "must be 1 or more"),
    ],
)
@pytest.mark.parametrize("of", ["tensor", "variable"])
def test_what_cannot_be_split(parts, text, of):
    def fn():
        strategy = mesh(2)
        with strategy.scope():
            if of == "tensor":
                strategy.experimental_split_to_logical_devices(numpy.zeros((4, 9)), parts)
            Variable(numpy.zeros((4, 9)), partition_dimensions=parts)

    with pytest.raises(ValueError, match=text):
        run_ranks(2, fn)


@pytest.mark.parametrize("device", [0, 1])
def test_the_value_of_one_logical_device_is_given_to_the_others(device):
    def fn():
        strategy = mesh(2)

        def step():
            mine = replica().replica_id_in_sync_group
            computed = numpy.full((mine, 2), mine, "float32") if replica().logical_device == device else None
            return strategy.experimental_assign_to_logical_device(computed, device)

        placed = strategy.run(step)
        rank = strategy.extended.whole.rank
        return placed, strategy.experimental_replicate_to_logical_devices(numpy.array([rank]))

    for rank, (placed, replicated) in enumerate(run_ranks(4, fn)):
        assert_identical(placed, numpy.full((rank // 2, 2), rank // 2, "float32"))
        assert replicated.tolist() == [rank // 2 * 2]


@pytest.mark.parametrize("value", [["a", "bcd"], [b"a", b"bc"], [True, False], numpy.zeros(2, "f4,U3"), [1e300j, 2]])
def test_what_is_not_summed_is_given_to_the_other_logical_devices(value):
    value = numpy.array(value)
    for found in run_ranks(2, lambda: mesh(2).experimental_replicate_to_logical_devices(value)):
        assert_identical(found, value)


@pytest.mark.parametrize("in_run", [True, False])
@pytest.mark.parametrize("name", ["logical_all_gather", "logical_all_reduce", "replicate", "assign"])
def test_objects_are_refused_on_all_logical_devices_and_the_next_call_works(name, in_run):
    def fn():
        strategy, value = mesh(2), numpy.array([None, 1], object)
        calls = {
            "logical_all_gather": lambda: replica().logical_all_gather(value, 0),
            "logical_all_reduce": lambda: replica().logical_all_reduce("sum", value),
            "replicate": lambda: strategy.experimental_replicate_to_logical_devices(value),
            "assign": lambda: strategy.experimental_assign_to_logical_device(value, 1),
        }
        with pytest.raises(TypeError, match="object arrays"):
            strategy.run(calls[name]) if in_run or "all" in name else calls[name]()
        return strategy.run(lambda: replica().logical_all_reduce("sum", numpy.ones(2))).tolist()

    assert run_ranks(4, fn) == [[2, 2]] * 4


@pytest.mark.parametrize("logical_device_id", [-1, 2])
def test_there_is_no_such_logical_device(logical_device_id):
    with pytest.raises(ValueError, match=f"not consistent with total number.*got {logical_device_id}, expected 0 to 1"):
        run_ranks(2, lambda: mesh(2).experimental_assign_to_logical_device(1.0, logical_device_id))


# -- variables --------------------------------------------------------------------------------------------------------


def test_variables_begin_with_the_chiefs_value_whole_or_in_parts():
    def fn():
        strategy = mesh(2)
        rank = strategy.extended.whole.rank
        with strategy.scope():
            whole = Variable(lambda: numpy.full(2, 100.0 + rank))
            split = Variable(numpy.arange(8.0).reshape(2, 4) + 100 * rank, partition_dimensions=[1, 2], name="w")
        assert split.shape == (2, 2) and split.whole_shape == split.saved_shape == (2, 4)
        return whole.value.tolist(), split.value.tolist(), split.whole().tolist()

    parts = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    for rank, (whole, split, joined) in enumerate(run_ranks(4, fn)):
        assert whole == [100, 100]
        assert split == parts[rank % 2]
        assert joined == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_writes_are_aggregated_over_replicas_and_stay_on_their_logical_device():
    def fn():
        strategy = mesh(2)
        with strategy.scope():
            split = Variable(numpy.zeros(2), partition_dimensions=[2], aggregation="SUM")
            count = Variable(0, synchronization="ON_READ", aggregation="SUM")
        rank = strategy.extended.whole.rank
        strategy.run(lambda: (split.assign_add([float(rank)]), count.assign_add(rank)))
        return split.whole().tolist(), int(count.value)

    assert run_ranks(4, fn) == [([2.0, 4.0], 2 if rank % 2 == 0 else 4) for rank in range(4)]


def test_a_deep_copy_is_cut_alike():
    def fn():
        with mesh(2).scope():
            split = Variable(numpy.arange(4.0), partition_dimensions=[2], name="w")
        split.assign_add(numpy.ones(2))
        new = copy.deepcopy(split)
        split.assign_add(numpy.ones(2))
        return new.whole().tolist(), new.partition_dimensions, new.name, new.value.shape, split.whole().tolist()

    assert run_ranks(4, fn) == [([1.0, 2.0, 3.0, 4.0], (2,), "w_1", (2,), [2.0, 3.0, 4.0, 5.0])] * 4


def test_other_strategies_split_nothing():
    with MirroredStrategy().scope():
        assert Variable(numpy.zeros((2, 2)), partition_dimensions=[1, 1]).shape == (2, 2)
        with pytest.raises(ValueError, match=r"number of logical devices of a replica \(1\)"):
            Variable(numpy.zeros((2, 2)), partition_dimensions=[1, 2])


def test_a_checkpoint_holds_split_variables_whole(tmp_path):
    whole = numpy.arange(12.0).reshape(3, 4)

    def save():
        strategy = mesh(2)
        with strategy.scope():
            variable = Variable(whole, partition_dimensions=[1, 2])
        Checkpoint(w=variable).save(tmp_path / "w.h5")

    def restore(devices, parts):
        strategy = mesh(devices)
        with strategy.scope():
            variable = Variable(numpy.zeros((3, 4)), partition_dimensions=parts)
        Checkpoint(w=variable).restore(tmp_path / "w.h5")
        return variable.whole().tolist()

    run_ranks(4, save)
    assert run_ranks(3, restore, 3, [3, 1]) == [whole.tolist()] * 3
    plain = Variable(numpy.zeros((3, 4)))
    Checkpoint(w=plain).restore(tmp_path / "w.h5")
    numpy.testing.assert_array_equal(plain.value, whole)


@pytest.mark.parametrize(("size", "parts"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_slots_of_split_variables_are_saved_whole_and_go_on(tmp_path, size, parts):
    """Two steps, a checkpoint at two ranks, and a third step at any mesh: the same as three steps at one rank."""
    gradient = numpy.arange(8.0).reshape(2, 4)

    def objects(devices):
        strategy = mesh(devices)
        with strategy.scope():
            variable = Variable(numpy.zeros((2, 4)), partition_dimensions=[1, devices])
        optimizer = SGD(0.5, momentum=0.5)
        mine = strategy.experimental_split_to_logical_devices(gradient, [1, devices]) / strategy.num_replicas_in_sync
        return (
            Checkpoint(w=variable, o=optimizer),
            variable,
            lambda: strategy.run(lambda: optimizer.apply_gradients([(mine, variable)])),
        )

    def begin():
        checkpoint, _, step = objects(2)
        step(), step()
        checkpoint.save(tmp_path / "c.h5")

    def go_on():
        checkpoint, variable, step = objects(parts)
        checkpoint.restore(tmp_path / "c.h5")
        step()
        return variable.saved_value().copy()

    run_ranks(2, begin)
    moved = -0.5 * gradient * (1 + 1.5 + 1.75)  # momentum: 1, 1 + 1 / 2, 1 + 1 / 2 + 1 / 4
    for value in run_ranks(size, go_on):
        numpy.testing.assert_allclose(value, moved, rtol=1e-15)


# -- training ---------------------------------------------------------------------------------------------------------


ROWS, INPUTS, HIDDEN, OUTPUTS = 22, 3, 4, 2


OPTIMIZERS = {
    "momentum": lambda: SGD(0.1, momentum=0.9),
    "accumulated": lambda: Adam(0.01, gradient_accumulation_steps=2),
    "clipnorm": lambda: SGD(0.1, momentum=0.9, clipnorm=0.2),
    "global": lambda: Adam(0.01, global_clipnorm=0.2),
    "lars": lambda: LARS(0.5, trust_coefficient=0.1),
    "lamb": lambda: LAMB(0.05, weight_decay=0.01),
}


def trained(strategy, parts, steps=5, make=OPTIMIZERS["momentum"]):
    """Train two layers, the first split by columns and the second by rows; return both matrices whole."""
    rng = numpy.random.default_rng(0)
    x, y = rng.standard_normal((ROWS, INPUTS)), rng.standard_normal((ROWS, OUTPUTS))
    with strategy.scope():
        first = Variable(rng.standard_normal((INPUTS, HIDDEN)), partition_dimensions=[1, parts])
        second = Variable(rng.standard_normal((HIDDEN, OUTPUTS)), partition_dimensions=[parts, 1])
        optimizer = make()

    def step(batch):
        rows, targets = batch
        hidden = numpy.tanh(rows @ first.value)
        outputs = hidden @ second.value
        if parts > 1:
            outputs = replica().logical_all_reduce("SUM", outputs)
        error = (outputs - targets) / 8
        back = (error @ second.value.T) * (1 - hidden**2)
        optimizer.apply_gradients([(rows.T @ back, first), (hidden.T @ error, second)])

    dataset = Dataset.from_arrays((x, y)).batch(8).repeat(steps)
    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(step, (batch,))
    return (first.whole(), second.whole()) if parts > 1 else (first.value.copy(), second.value.copy())


@pytest.mark.parametrize(("size", "parts"), [(2, 2), (4, 2), (4, 4), (8, 2), (6, 2)])
def test_n_ranks_equal_one_rank_on_the_global_batch(size, parts):
    expected = trained(TPUStrategy(), 1)
    for result in run_ranks(size, lambda: trained(mesh(parts), parts)):
        numpy.testing.assert_allclose(result[0], expected[0], rtol=1e-12)
        numpy.testing.assert_allclose(result[1], expected[1], rtol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("least_bytes", [1, update.LEAST_BYTES])
def test_every_optimizer_sees_split_variables_whole(name, least_bytes, monkeypatch):
    monkeypatch.setattr(update, "LEAST_BYTES", least_bytes)
    expected = trained(TPUStrategy(), 1, make=OPTIMIZERS[name])
    for result in run_ranks(4, lambda: trained(mesh(2), 2, make=OPTIMIZERS[name])):
        for ours, wanted in zip(result, expected, strict=True):
            numpy.testing.assert_allclose(ours, wanted, rtol=1e-12)


@pytest.mark.parametrize("make", [lambda: LARS(1.0, 0.0, 1.0, 0.0), lambda: LAMB(1.0, 0.0, 0.0)])
def test_parts_on_a_device_have_the_norm_of_the_whole(make):
    """It is 6, and that of the gradients, or for LAMB of their signs, 2 times a value that is the same in all."""

    def run():
        with pretended_device(""):
            strategy = mesh(2)
            with strategy.scope():
                start = numpy.array([5.0, 1.0, 3.0, 1.0])
                split, optimizer = Variable(on_device(start), partition_dimensions=[2]), make()
            strategy.run(lambda: optimizer.apply_gradients([(on_device(numpy.full(2, 4.0)), split)]))
            return as_host(split.value).tolist()

    for part, expected in zip(run_ranks(2, run), ([2.0, -2.0], [0.0, -2.0]), strict=True):
        numpy.testing.assert_allclose(part, expected, rtol=1e-6, atol=1e-6)


def test_a_flaw_in_one_part_leaves_the_step_out_on_all():
    def run():
        strategy = mesh(2)
        with strategy.scope():
            split, copied = Variable(numpy.zeros(4), partition_dimensions=[2]), Variable(numpy.zeros(3))
            optimizer = SGD(1.0, skip_nonfinite=True)
        flawed = numpy.array([1.0, numpy.inf if strategy.extended.logical_device == 1 else 1.0])
        for gradient in (flawed, numpy.ones(2)):
            strategy.run(lambda given=gradient: optimizer.apply_gradients([(given, split), (numpy.ones(3), copied)]))
        return optimizer.iterations, optimizer.skipped_steps, split.whole().tolist(), copied.value.tolist()

    assert run_ranks(4, run) == [(1, 1, [-2.0] * 4, [-2.0] * 3)] * 4


@pytest.mark.parametrize(("size", "parts"), [(2, 1), (2, 2), (4, 2), (3, 3)])
def test_accumulated_gradients_of_split_variables_are_saved_whole(tmp_path, size, parts):
    gradient = numpy.arange(6.0)

    def objects(devices):
        strategy = mesh(devices)
        with strategy.scope():
            variable = Variable(numpy.zeros(6), partition_dimensions=[devices])
        optimizer = SGD(1.0, gradient_accumulation_steps=2)
        mine = strategy.experimental_split_to_logical_devices(gradient, [devices]) / strategy.num_replicas_in_sync
        step = lambda: strategy.run(lambda: optimizer.apply_gradients([(mine, variable)]))  # noqa: E731
        return Checkpoint(w=variable, o=optimizer), variable, step

    def begin():
        checkpoint, _, step = objects(2)
        step()
        checkpoint.save(tmp_path / "c.h5")

    def go_on():
        checkpoint, variable, step = objects(parts)
        checkpoint.restore(tmp_path / "c.h5")
        step()
        return variable.saved_value().copy()

    run_ranks(4, begin)
    for value in run_ranks(size, go_on):
        numpy.testing.assert_allclose(value, -gradient, rtol=1e-15)


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_an_error_on_one_logical_device_reaches_all_ranks():
    def fn():
        strategy = mesh(2)
        rank = strategy.extended.whole.rank

        def step():
            if rank == 2:
                raise LookupError("row 7")
            return replica().logical_all_reduce("SUM", 1.0)

        try:
            strategy.run(step)
        except (LookupError, RemoteReplicaError) as error:
            seen = type(error).__name__
        return seen, strategy.run(lambda: replica().logical_all_reduce("SUM", 1.0))

    assert run_ranks(4, fn) == [("LookupError" if rank == 2 else "RemoteReplicaError", 2.0) for rank in range(4)]


def test_shapes_that_differ_inside_a_replica_are_named_there():
    def fn():
        strategy = mesh(2)
        rank = strategy.extended.whole.rank
        step = lambda: replica().logical_all_reduce("SUM", numpy.zeros(3 if rank == 1 else 2))  # noqa: E731
        try:
            strategy.run(step)
            strategy.reduce("SUM", 1.0, axis=None)
        except (CollectiveMismatchError, RemoteReplicaError) as error:
            seen = error
        return type(seen).__name__, str(seen), strategy.reduce("SUM", 1.0, axis=None)

    results = run_ranks(4, fn)
    assert [kind for kind, _, _ in results] == ["CollectiveMismatchError"] * 2 + ["RemoteReplicaError"] * 2
    assert all("(3,)" in text and total == 2 for _, text, total in results)
