"""One copy of each variable for all ranks: who sees it, who writes it, and that the numbers are the mirrored ones."""

from __future__ import annotations

import errno
import logging

import numpy
import pytest

import mpidist
from mpidist import CentralStorageStrategy, MirroredStrategy, Variable
from mpidist.collectives.reductions import update
from mpidist.errors import CollectiveMismatchError, RemoteReplicaError, TornVariableError, TransportError
from mpidist.optimizers import LAMB, SGD, Adam, LossScaleOptimizer
from mpidist.runtime import shared_memory
from mpidist.testing import run_ranks
from mpidist.testing.device import on_device, pretended_device
from mpidist.transports import node_memory
from mpidist.variables import AggregatingVariable, IndexedSlices
from mpidist.world import world_communicator
from tests.helpers.grid import grid

SHAPES = [(40, 30), (7,), (), (300,), (3, 5, 20), (0,), (1,)]
OPTIMIZERS = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: Adam(0.01, weight_decay=0.1),
    "lamb": lambda: LAMB(0.01),
    "global": lambda: Adam(0.01, global_clipnorm=1.0),
    "scaled": lambda: LossScaleOptimizer(SGD(0.1, momentum=0.5), 2.0**8),
    "accumulated": lambda: SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
}


def of_shapes(*seed):
    random = numpy.random.default_rng(seed)
    return [random.normal(size=shape) for shape in SHAPES]


def in_scope(fn, *args):
    strategy = CentralStorageStrategy()
    with strategy.scope():
        return fn(strategy, *args)


# -- the strategy ------------------------------------------------------------------------------------------------------


def test_devices_and_the_log_line(caplog):
    def fn():
        strategy = CentralStorageStrategy(["/cpu:1", "CPU:0"], parameter_device="/cpu:0")
        extended = strategy.extended
        return strategy.num_replicas_in_sync, extended.device_name, extended.worker_devices, extended.parameter_devices

    full = "/job:localhost/replica:0/task:0/device:CPU:"
    with caplog.at_level(logging.INFO, "mpidist"):
        found = run_ranks(2, fn)
    assert found == [(2, full + number, (full + "1", full + "0"), (full + "0",)) for number in "10"]
    assert [record.getMessage() for record in caplog.records] == [
        f"Using CentralStorageStrategy with compute_devices = ('{full}1', '{full}0'), parameter_device = '{full}0'"
    ]


def test_one_rank_has_its_variables_where_it_computes():
    assert CentralStorageStrategy(["/gpu:0"]).extended.parameter_devices[0].endswith("device:GPU:0")
    assert CentralStorageStrategy(["/gpu:0"], "/gpu:0").extended.parameter_devices[0].endswith("device:GPU:0")
    assert CentralStorageStrategy(["/gpu:0"], "/cpu:0").extended.parameter_devices[0].endswith("device:CPU:0")
    assert mpidist.experimental.CentralStorageStrategy is CentralStorageStrategy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["/cpu:0"],), "got 1 devices .* for 2 ranks"),
        ((["/cpu:0", "/cpu:0"],), "the same device more than once"),
        ((None, "/gpu:0"), "parameter_device /gpu:0 holds what only one rank sees, and 2 are to share it"),
        ((None, "/job:worker/cpu:0"), "is no device of this machine"),
    ],
)
def test_wrong_devices(arguments, message):
    with pytest.raises(ValueError, match=message):
        run_ranks(2, CentralStorageStrategy, *arguments)


def test_several_nodes_are_told_what_to_use():
    with pytest.raises(RuntimeError, match="CentralStorageStrategy is for .* one machine.* MultiWorkerMirroredStra"):
        run_ranks(2, CentralStorageStrategy, hosts=["a", "b"])


def test_ranks_that_share_no_memory_are_told_what_to_use():
    def fn():
        world_communicator().segments = None
        CentralStorageStrategy()

    with pytest.raises(RuntimeError, match="share none: MPIDIST_SHARED_MEMORY=0.*MirroredStrategy needs no shared"):
        run_ranks(2, fn)


@pytest.mark.parametrize("shape", [(2,), (1 << 19,)])
def test_too_little_memory_is_said_on_all_ranks(shape, monkeypatch):
    def fn(strategy):
        monkeypatch.setattr(shared_memory, "_reserve", no_room)
        with pytest.raises(TransportError) as raised:
            Variable(numpy.zeros(shape), name="table")
        return str(raised.value)

    def no_room(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    for message in run_ranks(3, in_scope, fn):
        assert message.startswith("Variable 'table': the ranks of this node cannot share one copy of it")
        assert "No space left on device" in message and "more memory" in message


# -- one copy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3, 4), (1 << 15,)])
def test_all_ranks_see_the_same_memory(shape):
    def fn(strategy):
        rank, communicator = strategy.extended.replica_id, strategy.extended.communicator
        variable = Variable(numpy.full(shape, float(rank)), name="v")
        optimizer = Adam()
        slots = optimizer.slots(variable)
        begun = float(variable.value.min()), float(variable.value.max())
        communicator.barrier()
        if rank == 1:
            variable.storage[...] = 7
            slots["velocity"][...] = 8
        communicator.barrier()
        return begun, set(variable.value.ravel()), set(slots["velocity"].ravel()), variable.value.flags.writeable

    assert run_ranks(3, in_scope, fn) == [((0.0, 0.0), {7.0}, {8.0}, False)] * 3


def test_short_arrays_lie_together():
    def fn(strategy):
        places = [Variable(numpy.zeros(3, "float32")).storage.ctypes.data for _ in range(3)]
        return numpy.diff(places).tolist()

    assert run_ranks(2, in_scope, fn) == [[64, 64]] * 2


def test_one_rank_alone_needs_no_shared_memory(monkeypatch):
    monkeypatch.setattr(node_memory, "SharedFile", None)
    assert in_scope(lambda strategy: type(Variable(1.0, aggregation="SUM").assign_add(1.0)).__name__) == (
        "DistributedVariable"
    )


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("SUM", 10.0 + 1 + 2 + 3), ("MEAN", 10.0 + 2), ("ONLY_FIRST_REPLICA", 10.0 + 1)]
)
def test_what_replicas_write_is_aggregated_and_written_once(aggregation, expected):
    def fn(strategy):
        rank, variable = strategy.extended.replica_id, Variable(10.0, aggregation=aggregation)
        strategy.run(lambda: variable.assign_add(rank + 1.0))
        return float(variable.value)

    assert run_ranks(3, in_scope, fn) == [expected] * 3


def test_replicas_cannot_each_write_what_they_share():
    def fn(strategy):
        variable = Variable(numpy.ones((2, 2)), name="kernel")
        rows = IndexedSlices(numpy.ones((1, 2)), [0])
        for write in (lambda: variable.assign(numpy.zeros((2, 2))), lambda: variable.scatter_add(rows)):
            with pytest.raises(ValueError, match="must specify an aggregation method.*'kernel'"):
                strategy.run(write)
        strategy.run(lambda: mpidist.get_replica_context().merge_call(lambda _: variable.assign_sub(numpy.eye(2))))
        return variable.value.tolist()

    assert run_ranks(2, in_scope, fn) == [[[0.0, 1.0], [1.0, 0.0]]] * 2


def test_across_replicas_a_write_is_made_once():
    def fn(strategy):
        variable = Variable(numpy.zeros(4), aggregation="SUM")
        variable.assign_add(numpy.ones(4))
        variable.scatter_add(IndexedSlices([10.0, 10.0], [1, 1]))
        found = strategy.extended.update(variable, lambda v, by: v.assign_sub(by).value.sum(), args=(numpy.ones(4),))
        strategy.run(lambda: variable.scatter_add(IndexedSlices([1.0], [strategy.extended.replica_id])))
        return found, variable.value.tolist()

    assert run_ranks(3, in_scope, fn) == [(20.0, [1.0, 21.0, 1.0, 0.0])] * 3


def test_ranks_that_write_different_variables_are_named():
    def fn(strategy):
        variables = [Variable(0.0, name=name) for name in "ab"]
        with pytest.raises(CollectiveMismatchError, match="'a'"):
            variables[strategy.extended.replica_id].assign(1.0)
        return [float(variable) for variable in variables]

    assert run_ranks(2, in_scope, fn) == [[0.0, 0.0]] * 2


def test_variables_that_are_synchronized_on_read_have_a_copy_on_each_rank():
    def fn(strategy):
        variable = Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        strategy.run(lambda: variable.assign_add(strategy.extended.replica_id + 1.0))
        return isinstance(variable, AggregatingVariable), float(variable.value)

    assert run_ranks(3, in_scope, fn) == [(False, 6.0)] * 3


# -- updates -----------------------------------------------------------------------------------------------------------


def train(strategy_class, optimizer, steps=4, gradients_of=lambda rank, step: of_shapes(rank, step)):
    strategy = strategy_class()
    with strategy.scope():
        variables = [Variable(values, name=f"v{number}") for number, values in enumerate(of_shapes(99))]
        made = OPTIMIZERS[optimizer]()
    for step in range(steps):
        gradients = gradients_of(strategy.extended.replica_id, step)
        strategy.run(made.apply_gradients, args=(list(zip(gradients, variables, strict=True)),))
    slots = [made.slots(variable) for variable in variables]
    return [variable.numpy() for variable in variables], slots, made.iterations


#: Ranks, way, optimizer.  On 8 ranks the parts are the smallest: each optimizer by one of the ways.
UPDATES = grid(
    [(size, way, name) for size in (1, 2, 3) for way in ("when", "while") for name in OPTIMIZERS]
    + [(8, ("when", "while")[number % 2], name) for number, name in enumerate(OPTIMIZERS)],
    [(8, ("while", "when")[number % 2], name) for number, name in enumerate(OPTIMIZERS)],
)


@pytest.mark.parametrize("size, way, optimizer", UPDATES)
def test_updates_are_those_of_copies_bit_for_bit(optimizer, way, size, monkeypatch):
    """Also on more ranks than some variables have elements."""
    monkeypatch.setattr(update, "LEAST_BYTES", 1 if way == "while" else 1 << 40)
    expected = run_ranks(size, train, MirroredStrategy, optimizer)[0]
    for values, slots, iterations in run_ranks(size, train, CentralStorageStrategy, optimizer):
        assert iterations == expected[2]
        for got, wanted in zip(values, expected[0], strict=True):
            numpy.testing.assert_array_equal(got, wanted)
        for got, wanted in zip(slots, expected[1], strict=True):
            assert got.keys() == wanted.keys()
            for name in got:
                numpy.testing.assert_array_equal(got[name], wanted[name])


def test_ways_through_memory_and_gradient_buffers(monkeypatch):
    monkeypatch.setattr(update, "LEAST_BYTES", 1)
    monkeypatch.setenv("MPIDIST_ALGORITHM", "shared_memory")

    def fn(strategy):
        variables = [Variable(numpy.zeros(length), name=f"v{length}") for length in (3, 1000, 5)]
        optimizer = SGD(1.0, momentum=0.5)
        buffers = strategy.extended.gradient_buffers(variables)
        for buffer in buffers:
            buffer[...] = 1
        for gradients in ([numpy.ones(variable.shape) for variable in variables], buffers):
            strategy.run(lambda given=gradients: optimizer.apply_gradients(zip(given, variables, strict=True)))
        assert [found is not None for _, found in optimizer._updates._sharded._of_list.values()] == [True]
        return [set(variable.value) for variable in variables], set(optimizer.slots(variables[1])["momentum"])

    # Velocities -4 and -6 after gradients of 1 on each of 4 ranks.
    assert run_ranks(4, in_scope, fn) == [([{-10.0}] * 3, {-6.0})] * 4


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 3])
def test_rows_are_applied_once_each(optimizer, size):
    def trained(strategy_class):
        strategy = strategy_class()
        with strategy.scope():
            table, bias = Variable(numpy.ones((9, 4)), name="table"), Variable(numpy.ones(3), name="bias")
            made = OPTIMIZERS[optimizer]()
        for step in range(4):
            random = numpy.random.default_rng([strategy.extended.replica_id, step])
            rows = IndexedSlices(random.normal(size=(6, 4)), random.integers(0, 9, 6))
            gradients = [(rows, table), (random.normal(size=3), bias)]
            strategy.run(made.apply_gradients, args=(gradients,))
        return table.numpy(), bias.numpy(), *made.slots(table).values()

    expected = run_ranks(size, trained, MirroredStrategy)[0]
    for found in run_ranks(size, trained, CentralStorageStrategy):
        for got, wanted in zip(found, expected, strict=True):
            numpy.testing.assert_array_equal(got, wanted)


def test_arrays_of_devices_go_to_the_host_where_the_one_copy_is():
    def fn(strategy):
        variable = Variable(numpy.ones(3), aggregation="SUM")
        optimizer = SGD(1.0)
        strategy.run(lambda: variable.assign_add(on_device(numpy.full(3, 2.0))))
        strategy.run(lambda: optimizer.apply_gradients([(on_device(numpy.arange(3.0)), variable)]))
        return variable.value.tolist()

    with pretended_device():
        assert run_ranks(2, in_scope, fn) == [[5.0, 3.0, 1.0]] * 2


def test_few_descriptions_of_ever_new_lists_are_kept():
    def fn(strategy):
        variables, optimizer, kept = [Variable(numpy.zeros(5)) for _ in range(20)], SGD(1.0), []
        for variable in variables * 2:
            strategy.run(optimizer.apply_gradients, args=([(IndexedSlices([1.0], [3]), variable)],))
            kept.append(len(optimizer._updates._one_copy._calls))
        return max(kept), {tuple(variable.value.tolist()) for variable in variables}

    assert run_ranks(2, in_scope, fn) == [(8, {(0.0, 0.0, 0.0, -4.0, 0.0)})] * 2


def test_sums_that_all_ranks_have_are_applied_once():
    def fn(strategy):
        variable, optimizer = Variable(numpy.zeros(5)), SGD(1.0)
        gradient = IndexedSlices([1.0, 1.0], [3, 3])
        for given in (numpy.ones(5), gradient):
            strategy.run(lambda given=given: optimizer.apply_gradients([(given, variable)], True))
        return variable.value.tolist()

    assert run_ranks(3, in_scope, fn) == [[-1.0, -1.0, -1.0, -3.0, -1.0]] * 3


def test_a_gradient_may_be_a_view_of_the_variable(monkeypatch):
    """As that of a square: what one rank writes must not be what another still reads."""
    monkeypatch.setattr(update, "LEAST_BYTES", 1)

    def fn(strategy):
        start = numpy.arange(5000.0)
        variable, optimizer = Variable(start), SGD(0.5)
        strategy.run(lambda: optimizer.apply_gradients([(variable.value, variable)]))
        return bool((variable.value == start - 0.5 * 2 * start).all())

    assert run_ranks(2, in_scope, fn) == [True] * 2


@pytest.mark.parametrize("way", ["when", "while"])
def test_an_update_that_is_broken_off_tears_the_variables_on_all_ranks(way, monkeypatch):
    monkeypatch.setattr(update, "LEAST_BYTES", 1 if way == "while" else 1 << 40)

    class Breaks(SGD):
        rank = 0

        def update_slice(self, parameter, gradient, slots, scratch, coefficients):
            if self.rank == 1:
                raise FloatingPointError("boom")

    def fn(strategy):
        variable, optimizer = Variable(numpy.zeros(600), name="w"), Breaks(1.0)
        optimizer.rank = strategy.extended.replica_id
        with pytest.raises((FloatingPointError, RemoteReplicaError, mpidist.errors.RankFailedError)):
            strategy.run(lambda: optimizer.apply_gradients([(numpy.ones(600), variable)]))
        with pytest.raises(TornVariableError, match="'w' is torn: .*boom"):
            _ = variable.value
        variable.restore(numpy.ones(600))
        return variable.value.sum()

    assert run_ranks(2, in_scope, fn) == [600.0] * 2


def test_slots_survive_a_change_of_the_way(monkeypatch):
    """Lists are updated while they are summed, or after it; slots are the same arrays."""
    monkeypatch.setattr(update, "LEAST_BYTES", 100 * 8)

    def fn(strategy):
        first, second = (Variable(numpy.zeros(60), name=name) for name in "ab")
        optimizer = SGD(1.0, momentum=0.5)
        for variables in ([first, second], [first], [first, second]):
            pairs = [(numpy.ones(60), variable) for variable in variables]
            strategy.run(lambda given=pairs: optimizer.apply_gradients(given))
        return first.value[0], second.value[0], optimizer.slots(first)["momentum"][0]

    # velocities of the first -2, -3, -3.5; of the second -2, -3
    assert run_ranks(2, in_scope, fn) == [(-8.5, -5.0, -3.5)] * 2


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [(MirroredStrategy, CentralStorageStrategy), (CentralStorageStrategy,) * 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_checkpoints_go_from_and_to_copies(classes, reverse, tmp_path):
    first, second = reversed(classes) if reverse else classes

    def steps(strategy_class, counts, restore_from=None, save_to=None):
        strategy = strategy_class()
        with strategy.scope():
            variables = [Variable(values, name=f"v{number}") for number, values in enumerate(of_shapes(99))]
            optimizer = Adam(0.01)
        checkpoint = mpidist.Checkpoint(model=variables, optimizer=optimizer)
        if restore_from is not None:
            checkpoint.restore(restore_from)
        for step in counts:
            pairs = list(zip(of_shapes(step), variables, strict=True))
            strategy.run(optimizer.apply_gradients, args=(pairs,), kwargs={"skip_gradients_aggregation": True})
        if save_to is not None:
            checkpoint.save(save_to)
        return [variable.numpy() for variable in variables]

    path = tmp_path / "middle.h5"
    run_ranks(2, steps, first, range(3), None, path)
    expected = steps(one_device, range(6))
    for found in run_ranks(3, steps, second, range(3, 6), path):
        for got, wanted in zip(found, expected, strict=True):
            numpy.testing.assert_allclose(got, wanted, rtol=1e-13)


def one_device():
    return mpidist.OneDeviceStrategy("/cpu:0")
