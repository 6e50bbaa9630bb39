"""Cross-device ops: the same numbers by every route, and what users may write themselves."""

from __future__ import annotations

import logging

import numpy
import pytest

from mpidist import arrays, context
from mpidist.collectives.engine import Recent
from mpidist.collectives.reductions.lists import BoundList
from mpidist.cross_device_ops import (
    AllReduceCrossDeviceOps,
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)
from mpidist.errors import CollectiveMismatchError, MissingDependencyError, UnsupportedDtypeError
from mpidist.optimizers import SGD
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.strategies.mirrored_extended import MirroredExtended
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.testing import run_ranks
from mpidist.variables import Variable
from mpidist.world import world_communicator

ROUTES = {
    "automatic": AllReduceCrossDeviceOps,
    "unpacked": lambda: AllReduceCrossDeviceOps(num_packs=0),
    "ring": RingAllReduce,
    "hierarchical": lambda: HierarchicalCopyAllReduce(num_packs=2),
    "one device": ReductionToOneDevice,
    "one device, own sum": lambda: ReductionToOneDevice("/cpu:0", accumulation_fn=sum),
}


def bound(ops):
    ops.bind(world_communicator())
    return ops


def component_of(rank, index, dtype):
    """Return tensor `index` of a rank: small integers, so that sums are exact in any order."""
    return (numpy.arange(3 * index, dtype=dtype) + 2 * rank).reshape(index, 3)


@pytest.mark.parametrize("hosts", [["a", "a", "a"], ["a", "b", "a"]], ids=["one node", "two nodes"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_every_route_gives_the_same(route, dtype, hosts):
    size = len(hosts)

    def fn():
        ops = bound(ROUTES[route]())
        values = [component_of(ops.communicator.rank, index, dtype) for index in range(4)]
        pairs = [(value, value) for value in values]
        sums = ops.batch_reduce("SUM", pairs)
        means = ops.batch_reduce(ReduceOp.MEAN, pairs)
        return sums, means, ops.reduce("sum", values[2], "/cpu:0"), values

    for rank, (sums, means, alone, values) in enumerate(run_ranks(size, fn, hosts=hosts)):
        for index in range(4):
            total = size * numpy.arange(3 * index).reshape(index, 3) + size * (size - 1)
            numpy.testing.assert_array_equal(sums[index], total)
            numpy.testing.assert_allclose(means[index], total / size, rtol=1e-6)
            numpy.testing.assert_array_equal(values[index], component_of(rank, index, dtype))
            assert sums[index].dtype == dtype
            assert means[index].dtype == ("float64" if dtype == "int32" else dtype)
        numpy.testing.assert_array_equal(alone, sums[2])


def test_results_are_the_callers():
    def fn():
        ops = bound(AllReduceCrossDeviceOps())
        kept = [ops.reduce("SUM", numpy.full(4, step), "/cpu:0") for step in range(6)]
        return [result.tolist() for result in kept]

    assert run_ranks(2, fn) == [[[2 * step] * 4 for step in range(6)]] * 2


def test_broadcast_and_gather():
    def fn():
        ops = bound(CrossDeviceOps())
        rank = ops.communicator.rank
        value = numpy.full((2, 2), rank).T
        scalar = numpy.array(rank)
        return ops.broadcast(value, value), ops.broadcast(scalar, scalar), ops._gather(value[:rank], "/cpu:0", axis=0)

    for array, scalar, rows in run_ranks(3, fn):
        assert array.tolist() == [[0, 0], [0, 0]] and scalar.tolist() == 0 and scalar.shape == ()
        assert rows.tolist() == [[1, 1], [2, 2], [2, 2]]


class Maximum(CrossDeviceOps):
    """A user's own: takes SUM for the maximum, one tensor after the other."""

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        result = numpy.array(per_replica_value)
        self.communicator.all_reduce(result, op="max")
        return result

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        return [self.reduce_implementation(reduce_op, *pair, options) for pair in value_destination_pairs]


def test_users_can_write_their_own():
    def fn():
        strategy = MirroredStrategy(cross_device_ops=Maximum())
        rank = strategy.extended.replica_id
        replica = strategy.run(lambda: context.get_replica_context().all_reduce("SUM", [numpy.ones(2) * rank, rank]))
        return replica[0].tolist(), replica[1], strategy.reduce("SUM", rank, axis=None)

    assert run_ranks(3, fn) == [([2.0, 2.0], 2, 2)] * 3


def test_what_is_not_written_raises_at_use():
    ops = CrossDeviceOps()
    with pytest.raises(NotImplementedError, match="reduce_implementation"):
        ops.reduce("SUM", 1.0, "/cpu:0")
    with pytest.raises(NotImplementedError, match="batch_reduce_implementation method must be implemented"):
        ops.batch_reduce("SUM", [(1.0, "/cpu:0")])


def test_arguments_are_checked_before_anything_is_sent():
    ops = Maximum()
    with pytest.raises(ValueError, match="must be a tuple"):
        ops.batch_reduce("SUM", [(1.0,)])
    with pytest.raises(ValueError, match="destinations can not be empty"):
        ops.reduce("SUM", 1.0, "")
    with pytest.raises(TypeError, match="destinations must be one device"):
        ops.reduce("SUM", 1.0, ["/cpu:0"])
    with pytest.raises(ValueError, match="'LEAST' is not a valid ReduceOp"):
        ops.reduce("LEAST", 1.0, "/cpu:0")


def test_truth_values_have_no_sum():
    def fn():
        MirroredStrategy().reduce("SUM", numpy.array([True]), axis=None)

    with pytest.raises(UnsupportedDtypeError, match="no reduction 'sum' of bool"):
        run_ranks(2, fn)


@pytest.mark.parametrize("kind", [NcclAllReduce, HierarchicalCopyAllReduce, AllReduceCrossDeviceOps])
def test_negative_num_packs(kind):
    with pytest.raises(ValueError, match="requires num_packs >= 0, but -1 is specified"):
        kind(num_packs=-1)


def test_nccl_without_a_gpu(monkeypatch):
    monkeypatch.setattr(arrays, "_gpus", lambda: (0, "RuntimeError: no driver", "install one"))
    needs = r"NcclAllReduce needs an NVIDIA GPU and CuPy.*\(RuntimeError: no driver\)\. install one; or .*RingAllReduce"
    with pytest.raises(MissingDependencyError, match=needs):
        MirroredStrategy(cross_device_ops=NcclAllReduce())
    with pytest.raises(MissingDependencyError, match="CommunicationImplementation.RING"):
        MultiWorkerMirroredStrategy("nccl")


def _asked_of(communicator):
    """Return the sizes of packs and the algorithms that lists were bound with."""
    questions = [bound.question for bound in communicator.bindings if isinstance(bound, BoundList)]
    return {(each.bytes_per_pack, each.algorithm) for each in questions}


def test_options_of_a_call_win():
    def fn():
        strategy = MultiWorkerMirroredStrategy(communication_options=CommunicationOptions(bytes_per_pack=64))
        strategy.run(lambda: context.get_replica_context().all_reduce("SUM", [numpy.ones(3), numpy.ones(4)]))
        ring = CommunicationOptions(implementation="ring", bytes_per_pack=128)
        strategy.run(lambda: context.get_replica_context().all_reduce("SUM", [numpy.ones(3), numpy.ones(4)], ring))
        return _asked_of(strategy.extended.communicator)

    assert run_ranks(2, fn) == [{(64, None), (128, "ring")}] * 2


def test_a_deterministic_strategy_pins_the_choice_unless_an_algorithm_is_asked_for():
    def fn():
        options = CommunicationOptions(deterministic=True)
        strategy = MultiWorkerMirroredStrategy(communication_options=options)
        strategy.run(lambda: context.get_replica_context().all_reduce("SUM", [numpy.ones(3)]))
        ring = CommunicationOptions(implementation="ring")
        strategy.run(lambda: context.get_replica_context().all_reduce("SUM", [numpy.ones(3)], ring))
        return _asked_of(strategy.extended.communicator)

    assert run_ranks(2, fn) == [{(0, "pinned"), (0, "ring")}] * 2


def test_lists_that_alternate_as_in_a_gan():
    def fn():
        strategy = MirroredStrategy()
        rank = strategy.extended.replica_id
        generator = [numpy.full((2, 3), rank, "float32"), numpy.full(5, rank, "float64")]
        discriminator = [numpy.full((3, 2), rank, "float32"), numpy.full(4, rank, "float32"), numpy.full(1, rank)]
        for step in range(4):
            for gradients in (generator, discriminator)[: 1 + step % 2]:
                reduced = strategy.run(lambda g: context.get_replica_context().all_reduce("SUM", g), args=(gradients,))
                for gradient, total in zip(gradients, reduced, strict=True):
                    numpy.testing.assert_array_equal(total, numpy.full(gradient.shape, 3))
                    assert total.dtype == gradient.dtype

    run_ranks(3, fn)


def test_a_shape_that_changes_on_one_rank_is_told_on_all():
    def fn():
        strategy = MirroredStrategy()
        for step in range(10):
            gradient = numpy.ones(4 if step == 9 and strategy.extended.replica_id == 1 else 3)
            strategy.run(lambda g: context.get_replica_context().all_reduce("MEAN", [g, numpy.ones(2)]), (gradient,))

    with pytest.raises(CollectiveMismatchError, match=r"rank 1 passed float64 \(4,\), ranks 0, 2 passed") as raised:
        run_ranks(3, fn)
    assert set(raised.value.rank_errors) == {0, 1, 2}


def test_none_among_the_values():
    strategy = MultiWorkerMirroredStrategy()
    with pytest.raises(TypeError, match="got None in place of an array"):
        strategy.run(lambda: context.get_replica_context().all_reduce("SUM", [numpy.ones(1), None]))


def test_a_variable_is_reduced_by_its_value():
    strategy = MultiWorkerMirroredStrategy()
    with strategy.scope():
        variable = Variable([1.0, 2.0])
    assert strategy.reduce("SUM", variable, axis=0) == 3.0
    assert strategy.extended.reduce_to("MEAN", variable, variable).tolist() == [1.0, 2.0]


def test_the_route_over_one_device_is_logged(caplog):
    def fn():
        strategy = MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ReductionToOneDevice())
        for _ in range(20):
            strategy.reduce("SUM", 1.0, axis=None)

    with caplog.at_level(logging.INFO, logger="mpidist"):
        run_ranks(2, fn)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Reduce to")]
    cpu = "/job:localhost/replica:0/task:0/device:CPU:"
    assert lines == [f"Reduce to {cpu}0 then broadcast to ('{cpu}0', '{cpu}1')."] * 10


def test_reduce_to_device_that_is_none_of_the_ranks():
    def fn():
        MirroredStrategy(cross_device_ops=ReductionToOneDevice("/gpu:7", accumulation_fn=sum)).reduce("SUM", 1.0, None)

    with pytest.raises(ValueError, match="'/gpu:7' names no device of 2 ranks"):
        run_ranks(2, fn)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("dtype", "value"), [("int8", 100), ("uint8", 200), ("int64", 2**62), ("float16", 60000)])
def test_a_mean_holds_what_all_replicas_have(dtype, value, route, size):
    def fn():
        given = numpy.array([value], dtype)
        return bound(ROUTES[route]()).reduce("MEAN", given, given)

    for mean in run_ranks(size, fn):
        assert mean.dtype == ("float16" if dtype == "float16" else "float64") and mean.tolist() == [value]


@pytest.mark.parametrize(
    ("sum_fn", "values", "got"),
    [
        (numpy.sum, [1.0, 2.0, 3.0], r"float64 of shape \(\) for arrays of float64 and of shape \(3,\)"),  # of all
        (lambda values: sum(values) / 2, [1, 2], r"float64 of shape \(2,\) for arrays of int64 and of shape \(2,\)"),
        (
            lambda values: numpy.array([200, 300]),
            numpy.ones(2, "uint8"),
            r"int64 of shape \(2,\) for arrays of uint8 and of shape \(2,\), which has no room for its values",
        ),
        (
            lambda values: numpy.array([200, 100]),
            numpy.ones(2, "int8"),
            r"int64 of shape \(2,\) for arrays of int8 and of shape \(2,\), which has no room for its values",
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_sum_of_the_users_own_has_the_shape_and_kind_of_the_values(size, sum_fn, values, got):
    def fn():
        MirroredStrategy(cross_device_ops=ReductionToOneDevice(accumulation_fn=sum_fn)).reduce(
            "SUM", numpy.array(values), axis=None
        )

    message = rf"accumulation_fn returned {got} on rank 0 of {size}: return their sum as {numpy.array(values).dtype}, "
    with pytest.raises(ValueError, match=message) as raised:
        run_ranks(size, fn)
    assert set(raised.value.rank_errors) == {*range(size)}


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint64"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_sum_of_the_users_own_may_be_longer_integers(size, dtype):
    """NumPy's own sum of short integers is an int64 or a uint64."""

    def fn():
        own = ReductionToOneDevice(accumulation_fn=lambda values: sum(each.astype("int64") for each in values))
        return MirroredStrategy(cross_device_ops=own).reduce("SUM", numpy.array([40, 2], dtype), axis=None)

    for found in run_ranks(size, fn):
        assert found.dtype == dtype and found.tolist() == [40 * size, 2 * size]


@pytest.mark.parametrize("root", [0, 1])
def test_an_error_in_a_sum_of_the_users_own_is_raised_on_all_ranks_and_they_go_on(root):
    cause = ZeroDivisionError("no weights")

    def fails(values):
        raise cause

    def fn():
        own = ReductionToOneDevice(f"/cpu:{root}", fails)
        strategy = MirroredStrategy(cross_device_ops=own)
        try:
            strategy.reduce("SUM", numpy.ones(2), axis=None)
        except Exception as error:
            own.accumulation_fn = sum
            return error, strategy.reduce("SUM", numpy.ones(2), axis=None).tolist()

    found = run_ranks(2, fn)
    assert [values for _, values in found] == [[2.0, 2.0]] * 2 and found[root][0] is cause
    other = found[1 - root][0]
    assert type(other) is ValueError
    assert str(other) == f"accumulation_fn raised ZeroDivisionError on rank {root} of 2: no weights"


class OwnLists(AllReduceCrossDeviceOps):
    """Ops that count the lists that they reduce."""

    seen = 0

    def reduce_list(self, *args):
        self.seen += 1
        return super().reduce_list(*args)


class OwnPairs(AllReduceCrossDeviceOps):
    """Ops that count them where they get destinations, too."""

    seen = 0

    def batch_reduce_implementation(self, *args):
        self.seen += 1
        return super().batch_reduce_implementation(*args)


def _sums_of_many(ops, lists):
    """Return the sums of lists of arrays, by a strategy with such ops, on this rank."""
    strategy = MirroredStrategy(cross_device_ops=ops)

    def step(values):
        return context.get_replica_context().all_reduce("sum", values)

    return [strategy.run(step, args=(values,)) for values in lists]


@pytest.mark.parametrize("kind", [OwnLists, OwnPairs])
def test_who_has_an_own_way_sees_every_list_also_those_like_the_last_one(kind):
    def fn():
        ops = kind()
        results = _sums_of_many(ops, [[numpy.ones(4, "f4")] * 70] * 5)
        return ops.seen, [float(each[69][3]) for each in results]

    assert run_ranks(2, fn) == [(5, [2.0] * 5)] * 2


def test_lists_that_are_not_to_be_packed_are_not_packed_the_second_time_either(monkeypatch):
    packed, repeat = [], Recent.__call__

    def noted(self, values, *rest):
        packed.append(values)
        return repeat(self, values, *rest)

    monkeypatch.setattr(Recent, "__call__", noted)

    def fn():
        ops = AllReduceCrossDeviceOps(num_packs=0)
        return [float(each[69][3]) for each in _sums_of_many(ops, [[numpy.ones(4, "f4")] * 70] * 3)]

    assert run_ranks(2, fn) == [[2.0] * 3] * 2
    assert packed and all(len(values) == 1 for values in packed)


@pytest.mark.parametrize("strange", [[[1.0, 2.0]], [[1.0, 2.0]] * 2], ids=["lists", "longer lists"])
def test_after_arrays_a_list_of_lists_is_still_one(strange):
    def fn():
        first, second = _sums_of_many(None, [[numpy.ones((1, 2))] * 70, [strange] * 70])
        return type(first[0]), second[0]

    assert run_ranks(2, fn) == [(numpy.ndarray, [[2.0 * each for each in row] for row in strange])] * 2


def test_a_rank_that_gives_lists_where_others_give_arrays_like_the_last_ones_is_named():
    def fn():
        communicator = world_communicator()
        second = [[[1.0, 2.0]]] * 70 if communicator.rank else [numpy.ones((1, 2))] * 70
        return _sums_of_many(None, [[numpy.ones((1, 2))] * 70, second])

    with pytest.raises(CollectiveMismatchError):
        run_ranks(2, fn)


class Clipped(MirroredExtended):
    """What a strategy of a user's own may do with all that is reduced."""

    def reduce_arrays(self, *args, **options):
        return [numpy.clip(each, -1, 1) for each in super().reduce_arrays(*args, **options)]


def test_a_strategy_that_reduces_in_its_own_way_does_so_with_everything():
    def fn():
        strategy = MirroredStrategy()
        devices = tuple(f"/cpu:{rank}" for rank in range(2))
        communicator = world_communicator()
        ops = AllReduceCrossDeviceOps()
        strategy.extended = Clipped(strategy, communicator, devices[communicator.rank], devices, ops)
        with strategy.scope():
            variable = Variable(numpy.zeros(300_000, "f4"))
            optimizer = SGD(0.5)

        def step():
            reduce = context.get_replica_context().all_reduce
            optimizer.apply_gradients([(numpy.full(300_000, 7.0, "f4"), variable)])
            sevens = numpy.full(3, 7.0)
            return [reduce("sum", sevens)[0], reduce("sum", [sevens])[0][0], *[reduce("sum", [sevens] * 70)[0][0]] * 2]

        return [float(each) for each in strategy.run(step)], float(variable.value[0])

    assert run_ranks(2, fn) == [([1.0] * 4, -0.5)] * 2
