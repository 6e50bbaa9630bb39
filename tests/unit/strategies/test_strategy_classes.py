"""Strategies: construction and its errors, log lines, run, input, the extended part."""

from __future__ import annotations

import copy
import logging

import numpy
import pytest

import mpidist
from mpidist import arrays, context
from mpidist.cluster.resolvers.mpi import MPIClusterResolver
from mpidist.cluster.resolvers.simple import SimpleClusterResolver
from mpidist.cluster.spec import ClusterSpec
from mpidist.cross_device_ops import RingAllReduce
from mpidist.input import Dataset
from mpidist.options import CommunicationImplementation, CommunicationOptions
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.strategies.one_device import OneDeviceStrategy
from mpidist.testing import run_ranks
from mpidist.variables import Variable

CPU = "/job:localhost/replica:0/task:0/device:CPU:"


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    """Whether the machine has GPUs must not matter."""
    monkeypatch.setattr(arrays, "list_physical_devices", lambda device_type=None: [])


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.INFO, logger="mpidist")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "mpidist"]


def strategies():
    """Return one strategy of each class, for one rank."""
    return [
        mpidist.get_strategy(),
        OneDeviceStrategy("/cpu:0"),
        MirroredStrategy(),
        MultiWorkerMirroredStrategy(),
    ]


# -- construction -----------------------------------------------------------------------------------------------------


def test_mirrored_gives_every_rank_its_device(logged):
    def fn():
        strategy = MirroredStrategy(devices=["/cpu:2", "/cpu:0"])
        return strategy.run(lambda: context.get_replica_context().devices), strategy.num_replicas_in_sync

    assert run_ranks(2, fn) == [((CPU + "2",), 2), ((CPU + "0",), 2)]
    assert logged() == [("INFO", f"Using MirroredStrategy with devices ('{CPU}2', '{CPU}0')")]


def test_mirrored_with_another_number_of_devices_than_ranks():
    with pytest.raises(ValueError, match="mpidist run -n 2 "):
        MirroredStrategy(["/gpu:0", "/gpu:1"])
    with pytest.raises(ValueError, match="mpidist run -n 1 "):
        run_ranks(3, lambda: MirroredStrategy(["/cpu:0"]))


def test_mirrored_with_a_device_named_twice():
    with pytest.raises(ValueError, match="more than once"):
        run_ranks(2, lambda: MirroredStrategy(["/cpu:0", "CPU:0"]))


def test_mirrored_across_nodes_names_the_strategy_for_that():
    with pytest.raises(RuntimeError, match="2 nodes x 1 rank.*MultiWorkerMirroredStrategy"):
        run_ranks(2, MirroredStrategy, hosts=["a", "b"])


@pytest.mark.parametrize("make", [lambda: MirroredStrategy(["/gpu:0"]), lambda: OneDeviceStrategy("/gpu:0")])
def test_devices_that_cannot_be_seen_are_logged(make, logged):
    make()
    invisible = CPU.replace("CPU", "GPU") + "0"
    line = f"Some requested devices in `tf.distribute.Strategy` are not visible to mpidist: {invisible}"
    assert ("WARNING", line) in logged()


def test_cross_device_ops_of_another_type():
    with pytest.raises(ValueError, match="cross_device_ops must be a CrossDeviceOps, got 'ring'"):
        MirroredStrategy(cross_device_ops="ring")


def test_multi_worker_on_one_rank_is_all_of_it_for_one_replica(logged):
    strategy = MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 1
    assert (strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id) == ("worker", 0)
    assert strategy.run(lambda: context.get_replica_context().all_reduce("SUM", numpy.ones(2))).tolist() == [1, 1]
    line = f"local_devices = ('{CPU}0',), communication = CollectiveCommunication.AUTO"
    assert logged() == [("INFO", f"Single-worker MultiWorkerMirroredStrategy with {line}")]


def test_multi_worker_across_nodes(logged):
    def fn():
        strategy = MultiWorkerMirroredStrategy(CommunicationImplementation.RING)
        resolver = strategy.cluster_resolver
        return strategy.num_replicas_in_sync, resolver.task_type, resolver.task_id, strategy.extended.worker_devices

    device = "/job:worker/replica:0/task:{}/device:CPU:0".format
    expected = [(3, "worker", rank, (device(rank),)) for rank in range(3)]
    assert run_ranks(3, fn, hosts=["n9", "n10", "n9"]) == expected
    assert logged() == [
        (
            "INFO",
            "MultiWorkerMirroredStrategy with cluster_spec = {'worker': ['n9:0', 'n10:1', 'n9:2']}, "
            f"task_type = 'worker', task_id = 0, num_workers = 3, local_devices = ('{device(0)}',), "
            "communication = CollectiveCommunication.RING",
        )
    ]


RESOLVER = MPIClusterResolver(rank=0, hosts=["localhost"])


@pytest.mark.parametrize(
    ("arguments", "keywords", "implementation"),
    [
        ((), {}, "AUTO"),
        (("ring",), {}, "RING"),
        ((CommunicationImplementation.RING, RESOLVER), {}, "RING"),
        ((RESOLVER, CommunicationOptions(implementation="RING")), {}, "RING"),
        ((), {"communication": "RING"}, "RING"),
        ((), {"cluster_resolver": RESOLVER, "communication": CommunicationImplementation.AUTO}, "AUTO"),
    ],
)
def test_multi_worker_takes_the_arguments_of_old_and_new(arguments, keywords, implementation):
    strategy = MultiWorkerMirroredStrategy(*arguments, **keywords)
    assert strategy.extended._options.implementation.name == implementation
    if RESOLVER in (*arguments, *keywords.values()):
        assert strategy.cluster_resolver is RESOLVER


def simple(cluster, task_type=None, task_id=None):
    return SimpleClusterResolver(ClusterSpec(cluster), task_type=task_type, task_id=task_id)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"communication_options": "ring"}, "communication_options must be a CommunicationOptions, got 'ring'"),
        ({"cluster_resolver": 3}, "cluster_resolver must be a ClusterResolver, got 3"),
        ({"communication": "gloo"}, "'gloo' is not a valid CommunicationImplementation"),
        ({"cluster_resolver": simple({"worker": ["a:1"]})}, "you must also specify `task_type` and `task_id`"),
        ({"cluster_resolver": simple({"ps": ["a:1"]}, "ps", 0)}, "no tasks of type chief, worker, evaluator"),
        ({"cluster_resolver": simple({"worker": ["a:1", "b:1"]}, "worker", 0)}, "has 2 tasks.*MPI started 1 rank"),
    ],
)
def test_multi_worker_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiWorkerMirroredStrategy(**arguments)


def test_an_empty_cluster_is_a_single_worker():
    strategy = MultiWorkerMirroredStrategy(simple({}))
    assert strategy.num_replicas_in_sync == 1
    assert strategy.extended.worker_devices == (CPU + "0",)


@pytest.mark.parametrize("number", range(4))
def test_strategies_are_not_copied(number):
    strategy = strategies()[number]
    with pytest.raises(RuntimeError, match="Must only deepcopy"):
        copy.copy(strategy)
    if number == 0:
        assert copy.deepcopy(strategy) is strategy
    else:
        with pytest.raises(ValueError, match="make one strategy and pass it on"):
            copy.deepcopy(strategy)


# -- run --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(4))
def test_run_passes_arguments_and_the_result_through(number):
    strategy, seen = strategies()[number], object()
    assert strategy.run(lambda a, b: (a, [b]), args=[1], kwargs={"b": seen}) == (1, [seen])
    assert strategy.experimental_run_v2(lambda: seen) is seen
    assert strategy.experimental_local_results(seen) == (seen,)
    with pytest.raises(ValueError, match="positional args must be a list or tuple"):
        strategy.run(print, args=3)


def test_an_exception_in_run_is_the_callers_and_leaves_the_context():
    def fn():
        strategy = MirroredStrategy()
        try:
            strategy.run(lambda: 1 / strategy.extended.replica_id)
        finally:
            assert not context.has_strategy()

    with pytest.raises(ZeroDivisionError):
        run_ranks(2, fn)


def test_functions_in_any_order_and_number():
    def fn():
        strategy = MirroredStrategy()

        def total(value):
            return context.get_replica_context().all_reduce("SUM", value)

        results = [strategy.run(total, (numpy.full(length, 1.0),)).tolist() for length in (1, 3, 1, 2, 3, 3)]
        return results == [[2.0] * length for length in (1, 3, 1, 2, 3, 3)]

    assert run_ranks(2, fn) == [True, True]


# -- input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_parts_of_all_ranks_are_the_data_set(size):
    def fn():
        strategy = MirroredStrategy()
        dataset = Dataset.from_arrays(numpy.arange(11)).batch(4)
        return [
            strategy.gather(strategy.run(lambda part: part * 2, (part,)), axis=0).tolist()
            for part in strategy.experimental_distribute_dataset(dataset)
        ]

    assert run_ranks(size, fn) == [[[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20]]] * size


@pytest.mark.parametrize("number", [0, 1])
def test_strategies_that_distribute_nothing_leave_input_alone(number):
    strategy = strategies()[number]
    batches = strategy.experimental_distribute_dataset(Dataset.from_arrays(numpy.arange(5)).batch(3))
    assert [batch.tolist() for batch in batches] == [[0, 1, 2], [3, 4]]
    anything = [1, 2]
    assert strategy.experimental_distribute_dataset(anything) is anything


def test_input_without_batches():
    with pytest.raises(ValueError, match="Call the `batch` method"):
        MirroredStrategy().experimental_distribute_dataset(Dataset.from_arrays(numpy.arange(5)))


# -- the extended part ------------------------------------------------------------------------------------------------


def test_update_writes_a_copy_as_it_is():
    def fn():
        strategy = MirroredStrategy()
        with strategy.scope():
            variable = Variable(1.0, aggregation="SUM")

        def add(v, amount):
            return float(v.assign_add(amount).value)

        across = strategy.extended.update(variable, add, args=(2.0,))
        within = strategy.run(lambda: strategy.extended.update(variable, add, kwargs={"amount": 3.0}, group=False))
        return across, within

    assert run_ranks(3, fn) == [(3.0, (6.0,))] * 3


def test_colocate_vars_with():
    strategy, other = OneDeviceStrategy("/cpu:0"), OneDeviceStrategy("/cpu:1")
    with other.scope():
        foreign = Variable(0.0)
    with strategy.scope():
        variable = Variable(0.0)
        with strategy.extended.colocate_vars_with(variable):
            beside = Variable(0.0)
        with pytest.raises(ValueError, match="must only be passed a variable created in this"):
            strategy.extended.colocate_vars_with(foreign).__enter__()
    assert strategy.extended.variable_created_in_scope(beside)
    assert not strategy.extended.variable_created_in_scope(foreign)
    with pytest.raises(RuntimeError, match='Need to be inside "with strategy.scope'):
        strategy.extended.colocate_vars_with(variable).__enter__()


def test_batch_reduce_to():
    def fn():
        strategy = MirroredStrategy(cross_device_ops=RingAllReduce())
        rank = float(strategy.extended.replica_id)
        return strategy.extended.batch_reduce_to("SUM", zip([rank, numpy.full(2, rank)], ["/cpu:0"] * 2, strict=True))

    for total, array in run_ranks(3, fn):
        assert total == 3.0 and array.tolist() == [3.0, 3.0]
    with pytest.raises(ValueError, match="must be a tuple"):
        MirroredStrategy().extended.batch_reduce_to("SUM", [1.0])
    with pytest.raises(TypeError, match="destinations must be one device"):
        MirroredStrategy().extended.reduce_to("SUM", 1.0, ["/cpu:0"])
    assert MirroredStrategy().extended.batch_reduce_to("SUM", []) == []


def test_the_default_strategy_has_no_worker_devices():
    with pytest.raises(RuntimeError, match="worker_devices"):
        mpidist.get_strategy().extended.worker_devices  # noqa: B018


def test_names_of_devices_of_variables():
    extended = MirroredStrategy().extended
    assert extended.parameter_devices == extended.worker_devices == extended.non_slot_devices([]) == (CPU + "0",)
    assert extended.value_container(3) == 3
