"""Strategies besides the first one train arrays on a GPU to what NumPy computes by hand on the global batch."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.cluster.topology import Topology as ClusterTopology
from mpidist.tpu.experimental import DeviceAssignment, Topology
from tests.gpu import library
from tests.gpu.library import check_on_all_ranks, host, is_own, place, problem_of, problems_of, slowly, stream

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:OneDeviceStrategy reduces nothing"),
]

ROWS, STEPS, RATE, MOMENTUM = 24, 5, 0.5, 0.75


def one_device(xp):
    """On GPU 0, which need not be the rank's own."""
    return mpidist.OneDeviceStrategy("/cpu:0" if xp is numpy else "/gpu:0")


def mesh(xp, devices=1):
    """Replicas of so many ranks."""
    topology = Topology.of(ClusterTopology(["any"] * mpidist.size()))
    return mpidist.TPUStrategy(experimental_device_assignment=DeviceAssignment.build(topology, [1, 1, 1, devices]))


MADE = {
    "mirrored": lambda xp: mpidist.MirroredStrategy(),
    "mirrored, to one": lambda xp: mpidist.MirroredStrategy(cross_device_ops=mpidist.ReductionToOneDevice()),
    "mirrored, hierarchical": lambda xp: mpidist.MirroredStrategy(cross_device_ops=mpidist.HierarchicalCopyAllReduce()),
    "tpu": mesh,
    "one device": one_device,
    "default": lambda xp: mpidist.get_strategy(),
}


def made(xp, name):
    """Return a strategy, and which of how many parts of a batch is this rank's."""
    rank, size = place()
    return MADE[name](xp), *((0, 1) if name in ("one device", "default") else (rank, size))


def batch(step):
    random = numpy.random.default_rng(step)
    return random.normal(size=(ROWS, 4)), random.integers(0, 7, ROWS), random.normal(size=(ROWS, 3))


def start():
    random = numpy.random.default_rng(99)
    return random.normal(size=(4, 3)), random.normal(size=(7, 3))


def by_hand():
    """Return what momentum makes of a matrix, and plain steps of a table's rows."""
    (matrix, table), speed = start(), 0.0
    for step in range(STEPS):
        x, rows, y = batch(step)
        error = 2 * (x @ matrix + table[rows] - y) / ROWS
        speed = MOMENTUM * speed - RATE * (x.T @ error)
        matrix = matrix + speed
        numpy.subtract.at(table, rows, RATE * error)
    return matrix, table


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_dense_gradients_and_rows_train_to_what_is_computed_by_hand(xp, name, is_slow):
    with stream(xp):  # the last work before was on the rank's own GPU
        mpidist.all_reduce([xp.ones(3)])
    strategy, rank, size = made(xp, name)
    assert name != "one device" or xp is numpy or xp.cuda.Device().id == 0
    with strategy.scope():
        matrix, table = (mpidist.Variable(xp.asarray(each) + rank) for each in start())
        dense = mpidist.optimizers.SGD(RATE, momentum=MOMENTUM)
        sparse = mpidist.optimizers.SGD(RATE)
    part = slice(ROWS * rank // size, ROWS * (rank + 1) // size)

    def step(x, rows, y):
        error = 2 * (x @ matrix.value + table.value[rows] - y) / ROWS
        if is_slow:
            computed, error = error, xp.zeros_like(error)
            slowly(xp, error, 0)
            error += computed
        dense.apply_gradients([(x.T @ error, matrix)])
        sparse.apply_gradients([(mpidist.IndexedSlices(error, rows, (7, 3)), table)])
        return (error**2).sum()

    for number in range(STEPS):
        losses = strategy.run(step, args=tuple(xp.asarray(each[part]) for each in batch(number)))
    assert float(host(strategy.reduce("SUM", losses, axis=None))) > 0
    problem = problems_of(xp, [matrix.value, table.value], by_hand(), rtol=1e-12, atol=1e-13)
    lies = all(is_own(xp, slot) for slot in dense.slots(matrix).values())
    check_on_all_ranks(problem or lies or "slots lie elsewhere")


@pytest.mark.parametrize("name", MADE)
def test_what_a_strategy_reduces_and_gathers(xp, name):
    strategy, rank, size = made(xp, name)
    ranks, problems = numpy.arange(size), []
    given = xp.full((3, 2), rank + 1.0)
    for op, wanted in {"SUM": size * (size + 1) / 2, "MEAN": (size + 1) / 2}.items():
        found = strategy.reduce(op, given, axis=None)
        problems.append(problem_of(xp, found, numpy.full((3, 2), wanted)))
    joined = strategy.gather(xp.full((rank + 1, 2), rank, "f4"), axis=0)
    problems.append(problem_of(xp, joined, numpy.repeat(ranks, ranks + 1)[:, None].repeat(2, 1).astype("f4")))
    with strategy.scope():
        total = mpidist.Variable(xp.zeros(3), synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: total.assign_add(xp.full(3, rank + 1.0)))
    is_right = numpy.array_equal(host(total.read_value()), numpy.full(3, size * (size + 1) / 2))
    check_on_all_ranks("".join(problems) or is_right or f"{total.read_value()}")


@pytest.mark.parametrize("devices", ["all", "pairs", "one"])
def test_replicas_of_several_ranks(xp, devices):
    """Each rank has a part of the columns of a matrix, and rows of its replica."""
    rank, size = place()
    count = {"all": size, "pairs": 2 if size % 2 == 0 else 1, "one": 1}[devices]
    strategy, replicas = mesh(xp, count), size // count
    replica, device = divmod(rank, count)
    start, whole_x = numpy.arange(4.0 * count * 2).reshape(4, -1) / 8, numpy.arange(48.0).reshape(12, 4) % 5
    x = xp.asarray(whole_x[12 * replica // replicas : 12 * (replica + 1) // replicas])
    with strategy.scope():
        matrix = mpidist.Variable(xp.asarray(start + rank), partition_dimensions=[1, count])
        bias = mpidist.Variable(xp.asarray(numpy.full(3, rank + 1.0)))
        optimizer = mpidist.optimizers.SGD(0.25)
    problem = problem_of(xp, matrix.value + 0, start[:, 2 * device : 2 * device + 2])

    def step():
        context = mpidist.get_replica_context()
        total = context.logical_all_reduce("SUM", (x @ matrix.value).sum(keepdims=True))
        joined = context.logical_all_gather(xp.asarray(numpy.full((device + 1, 2), rank, "f4")), 0)
        ones = xp.ones(matrix.value.shape) * x.sum(axis=0)[:, None] / 12
        optimizer.apply_gradients([(ones, matrix), (xp.full(3, replica + 1.0), bias)])
        return total, joined

    group = range(replica * count, replica * count + count)
    for number in range(3):
        before = start - 0.25 * number * whole_x.sum(axis=0)[:, None] / 12
        total, joined = strategy.run(step)
        problem += problem_of(xp, total, (host(x) @ before).sum(keepdims=True), rtol=1e-12)
        row = numpy.repeat(numpy.array(group, "f4"), numpy.arange(count) + 1)
        problem += problem_of(xp, joined, numpy.stack([row, row], axis=1))
    after = start - 0.75 * whole_x.sum(axis=0)[:, None] / 12
    problem += problem_of(xp, matrix.value + 0, after[:, 2 * device : 2 * device + 2], rtol=1e-12)
    problem += problem_of(xp, bias.value + 0, numpy.full(3, 1 - 0.75 * replicas * (replicas + 1) / 2))
    check_on_all_ranks(problem)


def test_values_are_placed_on_logical_devices_and_split(xp):
    rank, size = place()
    strategy = mesh(xp, size)
    last = size - 1
    given = xp.full((5, 2), rank + 1, "f4")
    with strategy.scope():
        variable = mpidist.Variable(given)
    placed = [
        strategy.experimental_assign_to_logical_device(given, last),
        strategy.experimental_assign_to_logical_device(variable, last),
        strategy.experimental_replicate_to_logical_devices(given if rank == 0 else xp.zeros(3)),
    ]
    plain = strategy.experimental_assign_to_logical_device(given if rank == last else None, last)
    is_right = numpy.array_equal(host(plain), numpy.full((5, 2), size, "f4"))
    assert isinstance(plain, xp.ndarray if rank == last else numpy.ndarray)
    whole = numpy.arange(4.0 * size).reshape(2, 2 * size)
    part = strategy.experimental_split_to_logical_devices(xp.asarray(whole), [1, size])
    wanted = [numpy.full((5, 2), each, "f4") for each in (size, 1, 1)]
    problem = problems_of(xp, [each + 0 for each in (*placed, part)], [*wanted, whole[:, 2 * rank : 2 * rank + 2]])
    check_on_all_ranks(problem or is_right or f"{plain}")


@pytest.mark.parametrize("name", ["central storage", "multi worker"])
def test_variables_on_the_host_take_what_lies_on_a_gpu(xp, name):
    rank, size = place()
    strategy = mpidist.CentralStorageStrategy(parameter_device="/cpu:0") if name[0] == "c" else library.strategy()
    with strategy.scope():
        variable = mpidist.Variable(numpy.zeros((5, 2)), aggregation="SUM")
        table = mpidist.Variable(numpy.zeros((5, 2)))
    places = xp.asarray(numpy.array([4, 1, 4]))
    slow = xp.zeros((5, 2))
    slowly(xp, slow, rank + 1)
    strategy.run(lambda: variable.assign_add(slow))
    slowly(xp, slow, 10)
    strategy.run(lambda: variable.scatter_add(mpidist.IndexedSlices(slow[:3], places)))
    optimizer = mpidist.optimizers.SGD(0.5)
    slowly(xp, slow, rank + 1)
    strategy.run(lambda: optimizer.apply_gradients([(mpidist.IndexedSlices(slow[:3], places, (5, 2)), table)]))
    total, counts = size * (size + 1) / 2, numpy.array([0, 1, 0, 0, 2.0])[:, None].repeat(2, 1)
    found, wanted = [variable.numpy(), table.numpy()], [total + 10 * size * counts, -total / 2 * counts]
    check_on_all_ranks(problems_of(numpy, found, wanted))
