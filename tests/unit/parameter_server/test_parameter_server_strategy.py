"""`ParameterServerStrategy`: who is who, optimizers on servers, workers of several ranks, checkpoints."""

from __future__ import annotations

import logging
import pickle
import threading
import time
import warnings

import numpy
import pytest

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver, SimpleClusterResolver
from mpidist.collectives.reductions import update
from mpidist.errors import CheckpointError, CheckpointNotFoundError
from mpidist.experimental.partitioners import FixedShardsPartitioner
from mpidist.optimizers import LossScaleOptimizer
from mpidist.optimizers.schedules import ExponentialDecay
from mpidist.parameter_server.consistency import BackupWorkers, StaleSynchronous
from mpidist.parameter_server.pickles import packed
from mpidist.testing import run_ranks
from tests.helpers.grid import grid
from tests.unit.parameter_server.jobs import job, one_worker

# -- roles ------------------------------------------------------------------------------------------------------------


def simple(**jobs):
    return mpidist.ClusterSpec({name: [f"h:{index}" for index in range(count)] for name, count in jobs.items()})


def facts(strategy):
    extended = strategy.extended
    return extended.device_name, extended.parameter_devices, strategy.cluster_resolver.task_type, extended.is_chief


def test_devices_and_tasks():
    chief, worker = job(facts, 4, num_ps=2)
    servers = tuple(f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(2))
    assert chief == ("/job:chief/replica:0/task:0/device:CPU:0", servers, "chief", True)
    assert worker == ("/job:worker/replica:0/task:0/device:CPU:0", servers, "worker", False)


def test_alone_a_worker_keeps_the_variables():
    device = "/job:worker/replica:0/task:0/device:CPU:0"
    strategy = mpidist.experimental.ParameterServerStrategy()
    assert facts(strategy) == (device, (device,), "worker", True)
    assert strategy.num_replicas_in_sync == 1


def test_roles_of_a_resolver():
    def main():
        resolver = MPIClusterResolver("ps,worker:2,chief", *place())
        strategy = mpidist.experimental.ParameterServerStrategy(resolver, FixedShardsPartitioner(2))
        return strategy.extended.number

    assert run_ranks(4, main) == [None, 1, 2, 0]


def place():
    transport = mpidist.transports.world().transport
    return transport.rank, ["localhost"] * transport.size


def test_a_cluster_whose_program_is_no_part_of_it():
    def on_rank(strategy):
        return strategy.cluster_resolver.cluster_spec().jobs, strategy.extended.number

    spec = simple(worker=2, ps=1)
    found = job(on_rank, 4, num_ps=None, cluster_resolver=SimpleClusterResolver(spec))
    assert found == [(["worker", "ps"], 0), (["worker", "ps"], 1), (["worker", "ps"], 2)]


def test_every_rank_says_what_it_is():
    tasks = [("ps", 0), ("worker", 1), ("worker", 0), ("worker", 1), ("worker", 0)]

    def main():
        kind, index = tasks[place()[0]]
        resolver = SimpleClusterResolver(simple(worker=2, ps=1), task_type=kind, task_id=index)
        extended = mpidist.ParameterServerStrategy(resolver, ranks_per_worker=2).extended
        return extended.number, extended.replica_id, extended.num_replicas

    # worker 0 is ranks 2 and 4, worker 1 ranks 1 and 3
    assert run_ranks(5, main) == [None, (1, 0, 2), (0, 0, 2), (1, 1, 2), (0, 1, 2)]
    with pytest.raises(ValueError, match="worker 1 of the cluster is no rank of this job"):
        tasks[1] = tasks[3] = ("worker", 0)
        run_ranks(5, main)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"cluster_resolver": "mpi"}, "must be a ClusterResolver, got 'mpi'"),
        ({"variable_partitioner": 2}, "function of shape and dtype, got 2"),
        ({"consistency": "stale"}, "consistency must be one of .*'stale'"),
        ({"placement": "size"}, "'round_robin', 'bytes'; got 'size'"),
        ({"on_server_failure": "wait"}, "'end' or 'restore', got 'wait'"),
        ({"push_dtype": "int8"}, "dtype of floats such as 'float16', got 'int8'"),
        ({"push_dtype": "float17"}, "got 'float17'"),
        ({"num_ps": 1.5}, "a whole number of them. Received: num_ps=1.5"),
        ({"cluster_resolver": SimpleClusterResolver(simple(master=1, ps=1))}, "Disallowed task type"),
        ({"cluster_resolver": SimpleClusterResolver(simple(chief=1, ps=1))}, "There must be at least one worker."),
        ({"cluster_resolver": SimpleClusterResolver(simple(chief=2, worker=1, ps=1))}, "at most one 'chief' job"),
        ({"cluster_resolver": SimpleClusterResolver(simple(worker=2, ps=1))}, "3 tasks, but there are 1 ranks.*-n 3"),
        ({"cluster_resolver": SimpleClusterResolver(simple(worker=2, ps=1)), "num_ps": 2}, "has 1 ps, but num_ps=2"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        mpidist.ParameterServerStrategy(**arguments)


def test_there_is_one_such_strategy_in_a_job():
    with pytest.raises(RuntimeError, match="there is one ParameterServerStrategy in a job"):
        job(lambda strategy: mpidist.ParameterServerStrategy(num_ps=1), 3)


def test_log_lines(caplog):
    with caplog.at_level(logging.INFO, "mpidist"):
        job(facts, 3)
    (device,) = {"/job:chief/replica:0/task:0/device:CPU:0"}
    text = "ParameterServerStrategy (CentralStorageStrategy if you are using a single machine) with compute_devices = "
    assert f"{text}['{device}'], variable_device = ['/job:ps/replica:0/task:0/device:CPU:0']" in caplog.messages
    assert any("is initialized with cluster_spec: {'chief': " in message for message in caplog.messages)


def test_who_is_who_is_printed_once(capsys):
    job(facts, 3)
    assert capsys.readouterr().err.splitlines() == [
        "roles of 3 ranks (num_ps=1):",
        "  rank 0  chief     localhost",
        "  rank 1  worker 0  localhost",
        "  rank 2  ps 0      localhost",
    ]


def test_an_evaluator_has_variables_of_its_own(monkeypatch):
    monkeypatch.setenv("MPIDIST_ROLES", "chief:1,ps:1,evaluator:1")

    def on_rank(strategy):
        with strategy.scope():
            v = mpidist.Variable(1.0)
        v.assign_add(1.0)
        return strategy.cluster_resolver.task_type, float(v.read_value())

    assert job(on_rank, 3) == [("chief", 2.0), ("evaluator", 2.0)]


# -- training ---------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda: mpidist.optimizers.SGD(0.1),
    "momentum": lambda: mpidist.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: mpidist.optimizers.Adam(0.1),
    "adamw": lambda: mpidist.optimizers.AdamW(0.1, weight_decay=0.1),
    "adagrad": lambda: mpidist.optimizers.Adagrad(0.1),
    "ftrl": lambda: mpidist.optimizers.Ftrl(0.1, l1_regularization_strength=0.01, beta=0.5),
    "rmsprop": lambda: mpidist.optimizers.RMSprop(0.1),
    "lamb": lambda: mpidist.optimizers.LAMB(0.1),
    "schedule": lambda: mpidist.optimizers.SGD(ExponentialDecay(0.1, 1, 0.5)),
    "clipnorm": lambda: mpidist.optimizers.SGD(0.1, clipnorm=0.5),
    "global_clipnorm": lambda: mpidist.optimizers.SGD(0.1, global_clipnorm=0.5),
    "clipvalue": lambda: mpidist.optimizers.SGD(0.1, clipvalue=0.25),
    "accumulation": lambda: mpidist.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "loss_scale": lambda: mpidist.optimizers.SGD(0.1, loss_scale_factor=8.0),
    "dynamic": lambda: LossScaleOptimizer(mpidist.optimizers.SGD(0.1), 4.0),
}


def gradients(step, is_rows=False):
    """Return the gradients of a matrix and a vector in a step, of the first perhaps some rows only."""
    random = numpy.random.default_rng(step)
    matrix, vector = (random.normal(size=size).astype("float32") for size in ((4, 2), (3,)))
    return [mpidist.IndexedSlices(matrix[:2], [3, 1]) if is_rows else matrix, vector]


class Run:
    """A matrix and a vector, an optimizer, and steps whose gradients are known."""

    def __init__(self, strategy, optimizer="momentum", is_rows=False) -> None:
        self.strategy, self.is_rows = strategy, is_rows
        with strategy.scope():
            self.matrix = mpidist.Variable(numpy.ones((4, 2), "float32"), name="matrix")
            self.vector = mpidist.Variable(numpy.ones(3, "float32"), name="vector")
            self.optimizer = OPTIMIZERS[optimizer]()
        self.checkpoint = mpidist.Checkpoint(v=self.vector, m=self.matrix, optimizer=self.optimizer)

    def train(self, first, last):
        for step in range(first, last):
            pairs = list(zip(gradients(step, self.is_rows), [self.matrix, self.vector], strict=True))
            # not in the order of creation
            self.strategy.run(self.optimizer.apply_gradients, args=(pairs[::-1],))
        return self

    def values(self):
        return numpy.concatenate([self.matrix.numpy().ravel(), self.vector.numpy()])


@pytest.mark.parametrize("name", ["LARS", "LAMB"])
def test_norms_of_shards_are_not_taken_for_those_of_the_whole(name):
    def on_worker(strategy):
        with strategy.scope():
            table, row = mpidist.Variable(numpy.ones((4, 2)), name="table"), mpidist.Variable(numpy.ones((1, 2)))
            optimizer = getattr(mpidist.optimizers, name)(0.1)
        strategy.run(lambda: optimizer.apply_gradients([(numpy.ones((1, 2)), row)]))  # of one shard
        pairs = [(numpy.ones((1, 2)), row), (numpy.ones((4, 2)), table)]
        with pytest.raises(NotImplementedError, match=f"{name} needs whole variables, and 'table' has 2 shards"):
            strategy.run(lambda: optimizer.apply_gradients(pairs))
        return optimizer.iterations, table.read_value().tolist()

    found = one_worker(on_worker, 2, variable_partitioner=FixedShardsPartitioner(2))
    assert found == (1, [[1.0, 1.0]] * 4)


@pytest.mark.parametrize("name", ["LARS", "LAMB"])
def test_norms_of_shards_are_refused_before_micro_batches_are_accumulated(name):
    def on_worker(strategy):
        with strategy.scope():
            table = mpidist.Variable(numpy.ones((4, 2)), name="table")
            optimizer = getattr(mpidist.optimizers, name)(0.1, gradient_accumulation_steps=3)
        with pytest.raises(NotImplementedError, match=f"{name} needs whole variables, and 'table' has 2 shards"):
            strategy.run(lambda: optimizer.apply_gradients([(numpy.ones((4, 2)), table)]))
        return optimizer.micro_step

    assert one_worker(on_worker, 2, variable_partitioner=FixedShardsPartitioner(2)) == 0


@pytest.mark.parametrize("pattern", ["^bias$", "ias"])
def test_shards_that_are_not_adapted_need_no_norms(pattern):
    def on_worker(strategy):
        with strategy.scope():
            bias = mpidist.Variable(numpy.ones(4), name="bias")
            optimizer = mpidist.optimizers.LARS(0.5, 0.0, weight_decay=1.0, exclude_from_layer_adaptation=[pattern])
        strategy.run(lambda: optimizer.apply_gradients([(numpy.array([0.0, 0.5, 1.0, 2.0]), bias)]))
        return bias.read_value().tolist()

    # p - learning_rate * (g + weight_decay * p)
    found = one_worker(on_worker, 2, variable_partitioner=FixedShardsPartitioner(2))
    assert found == [0.5, 0.25, 0.0, -0.5]


@pytest.mark.parametrize("is_rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize(
    "excluded",
    [
        lambda bias: {"var_names": ["bias$"]},
        lambda bias: {"var_names": ["^bias$"]},
        lambda bias: {"var_list": [bias]},
        lambda bias: {"var_list": bias.variables},
        lambda bias: {"var_names": ["bias/part_[01]$"]},
    ],
)
def test_shards_are_left_out_of_the_weight_decay_by_the_name_of_the_whole(excluded, is_rows):
    def on_worker(strategy):
        with strategy.scope():
            bias, other = (mpidist.Variable(numpy.ones((4, 1)), name=name) for name in ("bias", "bias_2"))
            optimizer = mpidist.optimizers.SGD(0.5, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(**excluded(bias))
        none = numpy.zeros((4, 1))
        gradient = mpidist.IndexedSlices(none, numpy.arange(4)) if is_rows else none
        strategy.run(lambda: optimizer.apply_gradients([(gradient, bias), (gradient, other)]))
        return bias.read_value().ravel().tolist(), other.read_value().ravel().tolist()

    # p - learning_rate * weight_decay * p
    found = one_worker(on_worker, 2, variable_partitioner=FixedShardsPartitioner(2))
    assert found == ([1.0] * 4, [0.75] * 4)


BEFORE = {
    "step": lambda run: run.train(0, 1),
    "learning_rate": lambda run: setattr(run.optimizer, "learning_rate", 0.5),
    "iterations": lambda run: setattr(run.optimizer, "iterations", 5),
    "state": lambda run: run.optimizer.state(),
}


@pytest.mark.parametrize("before", BEFORE)
def test_what_servers_would_not_know_is_refused(before):
    def on_worker(strategy):
        run = Run(strategy, "adamw")
        run.optimizer.exclude_from_weight_decay(var_names=["vector"])
        BEFORE[before](run)
        with pytest.raises(RuntimeError, match="no effect: the servers have this AdamW already.*Call exclude_from_w"):
            run.optimizer.exclude_from_weight_decay(var_names=["matrix"])
        return True

    assert one_worker(on_worker)


#: Norms of shards are not those of the whole.
ROWS_AND_SHARDS = [(name, shards) for name in OPTIMIZERS for shards in (1, 2) if (name, shards) != ("lamb", 2)]


@pytest.mark.parametrize("is_rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("name, shards", ROWS_AND_SHARDS)
def test_pushes_of_one_worker_are_textbook_steps(name, is_rows, shards):
    expected = Run(mpidist.OneDeviceStrategy("cpu:0"), name, is_rows).train(0, 4)

    def on_worker(strategy):
        run = Run(strategy, name, is_rows).train(0, 4)
        return run.values(), run.optimizer.iterations, run.optimizer.skipped_steps

    values, iterations, skipped = one_worker(on_worker, 2, variable_partitioner=FixedShardsPartitioner(shards))
    assert (iterations, skipped) == (expected.optimizer.iterations, expected.optimizer.skipped_steps)
    numpy.testing.assert_allclose(values, expected.values(), rtol=2e-6)


def test_the_norm_of_accumulated_rows_is_that_of_their_sums():
    def on_worker(strategy):
        with strategy.scope():
            table = mpidist.Variable(numpy.zeros((3, 1)))
            optimizer = mpidist.optimizers.SGD(1.0, clipnorm=1.0, gradient_accumulation_steps=2)
        for _ in range(2):
            rows = mpidist.IndexedSlices(numpy.array([[3.0]]), numpy.array([0]), (3, 1))
            strategy.run(lambda rows=rows: optimizer.apply_gradients([(rows, table)]))
        return table.read_value().tolist()

    # the mean of both micro-batches is 3 in one row
    assert one_worker(on_worker) == [[-1.0], [0.0], [0.0]]


def test_the_learning_rate_can_be_set_and_read():
    def on_worker(strategy):
        run = Run(strategy, "sgd")
        run.optimizer.learning_rate = 0.5
        run.train(0, 1)
        first = run.values()
        run.optimizer.learning_rate = 0.0
        run.train(1, 3)
        return first, run.values(), run.optimizer.learning_rate

    first, last, rate = one_worker(on_worker)
    flat = numpy.concatenate([each.ravel() for each in gradients(0)])
    numpy.testing.assert_allclose(first, 1 - 0.5 * flat, rtol=1e-6)
    assert last.tolist() == first.tolist()
    assert rate == 0.0


def test_slots_and_iterations_are_the_servers_own():
    def on_worker(strategy):
        run = Run(strategy).train(0, 1)
        run.optimizer.iterations = 7
        run.train(1, 2)
        return run.optimizer.slots(run.matrix)["momentum"], run.optimizer.iterations, strategy.extended.number

    slot, iterations, _ = one_worker(on_worker, 2, variable_partitioner=FixedShardsPartitioner(2))
    expected = Run(mpidist.OneDeviceStrategy("cpu:0")).train(0, 2)
    numpy.testing.assert_allclose(slot, expected.optimizer.slots(expected.matrix)["momentum"], rtol=1e-6)
    assert iterations == 8


def test_steps_that_are_set_before_the_first_push_count():
    def on_worker(strategy):
        with strategy.scope():
            v = mpidist.Variable(0.0)
            optimizer = mpidist.optimizers.SGD(ExponentialDecay(1.0, 1, 0.5))
        optimizer.iterations = 2
        before = optimizer.iterations, optimizer.learning_rate
        strategy.run(optimizer.apply_gradients, args=([(numpy.float32(1), v)],))
        return *before, float(v.read_value()), optimizer.iterations

    assert one_worker(on_worker, 2) == (2, 0.25, -0.25, 3)


def test_a_shard_that_no_push_has_reached_is_saved_with_the_slots_of_a_new_one():
    def on_worker(strategy):
        with strategy.scope():
            table = mpidist.Variable(numpy.zeros((2, 1), "float32"))
            optimizer = mpidist.optimizers.Adagrad(0.1, initial_accumulator_value=0.5)
        optimizer.learning_rate = 0.1
        strategy._client.push(0, [((0, 0), numpy.ones((1, 1), "float32"))])  # another worker's, half under way
        saved = optimizer.state()["0/accumulator"]
        return saved.tolist(), saved.dtype.name, optimizer.slots(table)["accumulator"].tolist()

    found = one_worker(on_worker, 2, variable_partitioner=FixedShardsPartitioner(2))
    assert found == ([[1.5], [0.5]], "float32", [[1.5], [0.5]])


def test_a_state_is_saved_while_another_worker_registers_the_optimizer():
    def on_worker(strategy):
        with strategy.scope():
            mpidist.Variable(numpy.zeros(2))
            optimizer = mpidist.optimizers.SGD(0.1)
        rule = numpy.frombuffer(packed(optimizer), numpy.uint8)
        strategy._client.servers[0].ask("register", rule, number=0)  # another worker's, half under way
        return optimizer.state()["iterations"], [end.iterations(0) for end in strategy._client.servers]

    assert one_worker(on_worker, 2) == (0, [0, 0])


def test_an_optimizer_is_pickled_as_a_reference():
    def on_worker(strategy):
        run = Run(strategy).train(0, 1)
        return pickle.loads(pickle.dumps(run.optimizer)) is run.optimizer

    assert one_worker(on_worker)


def test_an_optimizer_that_another_process_has_not_made_comes_with_all_its_stages():
    def on_worker(strategy):
        with strategy.scope():
            made = mpidist.optimizers.SGD(0.5, clipnorm=2.0, gradient_accumulation_steps=3, loss_scale_factor=4.0)
        _, (number, content) = made.__reduce_ex__(4)
        other = pickle.loads(content)
        stages = other.gradient_accumulation_steps, other.loss_scale.scale, other._stages.clipping.clipnorm
        return number, other.learning_rate, *stages

    assert one_worker(on_worker) == (0, 0.5, 3, 4.0, 2.0)


def test_an_optimizer_made_outside_of_the_scope_is_served_too():
    def on_worker(strategy):
        with strategy.scope():
            v = mpidist.Variable(1.0)
        optimizer = mpidist.optimizers.SGD(0.5)
        strategy.run(optimizer.apply_gradients, args=([(numpy.float32(1), v)],))
        return float(v.read_value()), optimizer.iterations

    assert one_worker(on_worker) == (0.5, 1)


def test_an_optimizer_that_was_restored_outside_of_the_scope_does_not_lose_its_slots_quietly():
    def on_worker(strategy):
        with strategy.scope():
            v = mpidist.Variable(1.0)
        saved, local = mpidist.optimizers.SGD(1.0, momentum=0.5), mpidist.Variable(0.0)
        saved.apply_gradients([(numpy.float32(4), local)])
        optimizer = mpidist.optimizers.SGD(1.0, momentum=0.5)
        optimizer.restore(saved.state())
        with pytest.raises(RuntimeError, match="has 1 steps and slots that are in this process.*restore it there"):
            strategy.run(optimizer.apply_gradients, args=([(numpy.float32(1), v)],))
        return float(v.read_value())

    assert one_worker(on_worker) == 1.0


def test_steps_of_all_workers_count():
    met = threading.Barrier(3)

    def on_worker(strategy):
        run = Run(strategy).train(0, 5)
        strategy._client.flush()
        met.wait(20)
        return run.optimizer.iterations

    assert job(on_worker, 4) == [15, 15, 15]


# -- workers of several ranks -----------------------------------------------------------------------------------------


def half(gradient, replica):
    """Return the part of a gradient that a replica of two contributes."""
    part = gradient.copy()
    part[1 - replica :: 2] = 0
    return part


@pytest.mark.parametrize("name", ["momentum", "adam", "global_clipnorm", "accumulation"])
def test_two_ranks_of_a_worker_are_one_worker(name):
    expected = Run(mpidist.OneDeviceStrategy("cpu:0"), name).train(0, 4)

    def on_rank(strategy):
        run = Run(strategy, name)
        replica = strategy.extended.replica_id
        for step in range(4):
            parts = [half(each, replica) for each in gradients(step)]
            pairs = list(zip(parts, [run.matrix, run.vector], strict=True))
            seen = strategy.run(lambda pairs=pairs: (run.optimizer.apply_gradients(pairs), run.matrix.value)[1])
        return run.values(), run.optimizer.iterations, strategy.num_replicas_in_sync, seen.tolist()

    (first, *facts), (second, *others) = job(on_rank, 4, num_ps=2, ranks_per_worker=2)
    assert first.tolist() == second.tolist() and facts == others
    assert facts[:2] == [expected.optimizer.iterations, 2]
    numpy.testing.assert_allclose(first, expected.values(), rtol=2e-6)


def test_the_first_replica_of_every_worker_counts_the_steps():
    met = threading.Barrier(4)

    def on_rank(strategy):
        with strategy.scope():
            steps = mpidist.Variable(0, aggregation="ONLY_FIRST_REPLICA")
            total = mpidist.Variable(0.0, aggregation="SUM")
        for _ in range(3):
            strategy.run(lambda: (steps.assign_add(1), total.assign_add(1.0)))
        met.wait(20)
        return int(steps.read_value()), float(total.read_value())

    assert job(on_rank, 5, ranks_per_worker=2) == [(6, 12.0)] * 4


def test_rows_are_looked_up_by_each_rank_of_a_worker():
    def on_rank(strategy):
        with strategy.scope():
            start = numpy.arange(10, dtype="float32").reshape(5, 2)
            v = mpidist.Variable(start, aggregation="ONLY_FIRST_REPLICA")
        replica = strategy.extended.replica_id

        def step():
            found = v.sparse_read([replica, 4, 1][: 2 + replica]).tolist()
            v.scatter_add(mpidist.IndexedSlices(numpy.ones((1, 2), "float32"), [0]))
            return found

        return strategy.run(step), v.value.tolist()

    whole = numpy.arange(10, dtype="float32").reshape(5, 2)
    first, second = job(on_rank, 3, ranks_per_worker=2)
    assert (first[0], second[0]) == (whole[[0, 4]].tolist(), whole[[1, 4, 1]].tolist())
    whole[0] += 1
    assert first[1] == second[1] == whole.tolist()


def test_each_rank_of_a_worker_looks_up_rows_of_other_shards():
    whole = numpy.arange(12, dtype="float32").reshape(6, 2)

    def on_rank(strategy):
        with strategy.scope():
            table = mpidist.Variable(whole, name="table")
        replica = strategy.extended.replica_id
        looked_up = [[[0, 1], [5]], [[], [0, 5, 3]], [[4], [4, 4]]]  # by step and replica; of 3 shards

        def step(number):
            return table.sparse_read(looked_up[number][replica]).tolist()

        def read():  # the table is read shard by shard from now on
            return table[5 * replica].tolist(), table[4 * replica : 4 * replica + 2].tolist()

        found = [strategy.run(step, args=(number,)) for number in range(3)]
        return found, [whole[rows[replica]].tolist() for rows in looked_up], strategy.run(read)

    first, second = job(on_rank, 5, num_ps=3, ranks_per_worker=2, variable_partitioner=FixedShardsPartitioner(3))
    for found, expected, _ in (first, second):
        assert found == expected
    assert first[2] == (whole[0].tolist(), whole[:2].tolist())
    assert second[2] == (whole[5].tolist(), whole[4:].tolist())


@pytest.mark.parametrize("write", ["assign_add", "scatter_add"])
def test_what_several_ranks_of_a_worker_write_needs_an_aggregation(write):
    def on_rank(strategy):
        with strategy.scope():
            v = mpidist.Variable(numpy.zeros((2, 1), "float32"))
        value = numpy.ones((2, 1), "float32")
        given = value if write == "assign_add" else mpidist.IndexedSlices(value, [0, 1])
        with pytest.raises(ValueError, match="You must specify an aggregation method.*share one copy of variable"):
            strategy.run(lambda: getattr(v, write)(given))
        getattr(v, write)(given)  # across replicas it is the first one's
        return v.value.tolist()

    assert job(on_rank, 3, ranks_per_worker=2) == [[[1.0], [1.0]]] * 2


def test_an_error_of_the_servers_reaches_all_ranks_of_a_worker():
    def on_rank(strategy):
        with strategy.scope():
            v = mpidist.Variable(numpy.zeros((2, 2), "float32"))
        with pytest.raises(IndexError, match="outside"):
            strategy._client.scatter(v.key, "scatter_add", [5], numpy.ones((1, 2)))
        return True

    assert job(on_rank, 3, ranks_per_worker=2) == [True, True]


def test_servers_update_for_an_optimizer_that_was_made_outside_of_the_scope(monkeypatch):
    monkeypatch.setattr(update, "LEAST_BYTES", 1)

    def on_rank(strategy):
        optimizer = mpidist.optimizers.SGD(0.5)
        with strategy.scope():
            v = mpidist.Variable(numpy.zeros((200, 3), "float32"))
        gradient = numpy.full((200, 3), 1.0 + strategy.extended.replica_id, "float32")
        is_in_reduction = optimizer.updates_in_reduction([v])
        strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))
        return is_in_reduction, numpy.unique(v.value).tolist()

    assert job(on_rank, 3, ranks_per_worker=2) == [(False, [-1.5])] * 2


class Refuses(mpidist.optimizers.SGD):
    """Applies nothing."""

    def renew_slice(self, *arguments):
        raise ArithmeticError("not today")


@pytest.mark.parametrize(
    "read",
    [lambda w: w.value, lambda w: w.read_value(), lambda w: w.sparse_read([0])],
    ids=["value", "read_value", "sparse_read"],
)
def test_an_error_of_a_push_reaches_all_ranks_of_a_worker_when_they_read(read):
    def on_worker(strategy):
        with strategy.scope():
            w = mpidist.Variable(numpy.zeros((3, 2)))
            optimizer = Refuses(1.0)
        assert w.value.shape == (3, 2)
        strategy.run(lambda: optimizer.apply_gradients([(numpy.ones((3, 2)), w)]))
        with pytest.raises(mpidist.errors.ServerError, match="push 1: ArithmeticError: not today"):
            read(w)
        return read(w).sum()

    assert job(on_worker, 3, ranks_per_worker=2) == [0.0, 0.0]


@pytest.mark.parametrize("options", [{"clipnorm": 1.0}, {"gradient_accumulation_steps": 2}], ids=str)
def test_variables_of_16_bits_get_what_they_get_elsewhere(options):
    """Small gradients keep the loss scale on their way, and sums of micro-batches fit into 16 bits."""

    def trained(strategy):
        with strategy.scope():
            small, large = (mpidist.Variable(numpy.zeros(4, "float16"), name=name) for name in ("small", "large"))
            optimizer = mpidist.optimizers.SGD(8192.0, loss_scale_factor=2.0**15, **options)
        for _ in range(2):  # 2**15 times 1e-8, and 1.2
            pairs = [(numpy.full(4, scaled, "float16"), v) for scaled, v in ((3.3e-4, small), (40000.0, large))]
            strategy.run(optimizer.apply_gradients, args=(pairs,))
        return numpy.concatenate([small.numpy(), large.numpy()])

    expected = trained(mpidist.OneDeviceStrategy("cpu:0"))
    assert expected.all() and numpy.isfinite(expected).all()
    numpy.testing.assert_allclose(one_worker(trained, 2), expected, rtol=2e-3)


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Adagrad", "Ftrl"])
def test_shards_without_rows_make_the_step_too(name):
    """As the whole table does elsewhere: moments fade, and the steps that Adam counts are those of all shards."""

    def trained(strategy):
        with strategy.scope():
            table = mpidist.Variable(numpy.arange(8.0).reshape(4, 2))
            optimizer = getattr(mpidist.optimizers, name)(0.1, **({"momentum": 0.9} if name == "SGD" else {}))
        for row in (0, 3, 3, 0, 1):
            rows = mpidist.IndexedSlices(numpy.full((1, 2), 1.0 + row), numpy.array([row]), (4, 2))
            strategy.run(lambda rows=rows: optimizer.apply_gradients([(rows, table)]))
        return table.read_value()

    expected = trained(mpidist.OneDeviceStrategy("cpu:0"))
    found = one_worker(trained, 2, variable_partitioner=FixedShardsPartitioner(2))
    numpy.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_chief_that_restores_leaves_no_word_for_workers_that_it_coordinates(tmp_path):
    def on_rank(strategy):
        with strategy.scope():
            w = mpidist.Variable(numpy.zeros(3))
        coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
        try:
            checkpoint = mpidist.Checkpoint(w=w)
            checkpoint.save(tmp_path / "saved.h5")
            w.assign(numpy.ones(3))
            checkpoint.restore(tmp_path / "saved.h5")
            return w.value.tolist(), list(strategy._client.specs)
        finally:
            coordinator._end()  # a rank that is a thread has no end of its program

    assert job(on_rank, 3) == [([0.0] * 3, [(0, 0)])]


def test_input_pipelines_are_those_of_all_workers():
    def on_rank(strategy):
        seen = []

        def dataset_fn(context):
            seen.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
            return mpidist.data.Dataset.from_arrays(numpy.arange(4.0)).batch(2)

        strategy.distribute_datasets_from_function(dataset_fn)
        return seen[0]

    assert job(on_rank, 5, ranks_per_worker=2) == [(4, 0, 2), (4, 1, 2), (4, 2, 2), (4, 3, 2)]
    assert job(on_rank, 4) == [(3, 0, 1), (3, 1, 1), (3, 2, 1)]


PIPELINES: list[tuple[int, int]] = []


def part_of_rows(context):
    PIPELINES.append((context.num_input_pipelines, context.input_pipeline_id))
    return mpidist.data.Dataset.range(4).shard(*PIPELINES[-1]).batch(1)


def parts_of_rows():
    return mpidist.get_strategy().distribute_datasets_from_function(part_of_rows)


@pytest.mark.parametrize("is_made_by", ["workers", "chief"])
@pytest.mark.parametrize("arguments", [(4, {}), (6, {"ranks_per_worker": 2})], ids=str)
def test_a_chief_that_schedules_is_no_input_pipeline(is_made_by, arguments):
    """Nobody would read its part of the rows."""
    ranks, options = arguments
    PIPELINES.clear()

    def on_rank(strategy):
        coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            given = parts_of_rows if is_made_by == "workers" else parts_of_rows()
        try:
            coordinator.create_per_worker_dataset(given)
            coordinator.schedule(abs, args=(1,))
            coordinator.join()
        finally:
            coordinator._end()

    job(on_rank, ranks, **options)
    assert sorted(PIPELINES) == [(ranks - 2, number) for number in range(ranks - 2)]


def test_a_chief_that_schedules_does_not_go_through_a_data_set_of_its_workers():
    def on_rank(strategy):
        coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
        try:
            with pytest.raises(ValueError, match="pass this dataset to ClusterCoordinator.create_per_worker_dataset"):
                iter(strategy.distribute_datasets_from_function(part_of_rows))
        finally:
            coordinator._end()
        return True

    assert job(on_rank, 3) == [True]


@pytest.mark.parametrize("is_made_by", ["workers", "chief"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_distributed_data_set_of_workers(is_made_by, count):
    """One process alone is the chief and its worker by turns."""

    def on_rank(strategy):
        coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
        dataset = mpidist.data.Dataset.range(4).batch(2)

        def distributed_dataset():
            return strategy.experimental_distribute_dataset(dataset)

        try:
            given = distributed_dataset if is_made_by == "workers" else distributed_dataset()
            iterator = iter(coordinator.create_per_worker_dataset(given))
            found = coordinator.schedule(
                lambda batches: [batch.tolist() for batch in batches], args=(iterator,)
            ).fetch()
            with pytest.raises(ValueError, match="pass this dataset to ClusterCoordinator.create_per_worker_dataset"):
                iter(distributed_dataset())
        finally:
            coordinator._end()
        return found

    found = [on_rank(mpidist.ParameterServerStrategy())] if count == 1 else job(on_rank, count)
    assert found == [[[0, 1], [2, 3]]]


def test_a_data_set_that_was_distributed_before_there_was_a_coordinator_is_refused():
    def on_rank(strategy):
        given = strategy.distribute_datasets_from_function(part_of_rows)
        coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
        try:
            with pytest.raises(ValueError, match="has the chief's part of the rows.*Distribute it below"):
                coordinator.create_per_worker_dataset(given)
        finally:
            coordinator._end()
        return True

    assert job(on_rank, 3) == [True]


# -- checkpoints ------------------------------------------------------------------------------------------------------

STRATEGIES = {
    "one_device": lambda fn: fn(mpidist.OneDeviceStrategy("cpu:0")),
    "mirrored": lambda fn: run_ranks(1, lambda: fn(mpidist.MirroredStrategy()))[0],
    "servers": lambda fn: one_worker(fn, 1),
    "shards": lambda fn: one_worker(fn, 3, variable_partitioner=FixedShardsPartitioner(3)),
    "alone": lambda fn: fn(mpidist.ParameterServerStrategy()),
    "group": lambda fn: job(fn, 3, ranks_per_worker=2)[0],
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_count_of_steps_that_there_cannot_be_is_refused_and_changes_nothing(strategy):
    def train(strategy):
        run = Run(strategy, "adam").train(0, 1)
        optimizer, said, count = run.optimizer, [], numpy.array(4)
        for given in (2**63, -1, 1.5, True, None, numpy.nan):
            with pytest.raises((ValueError, TypeError)) as error:
                optimizer.iterations = given
            said.append(str(error.value))
        left = optimizer.iterations
        optimizer.iterations = count
        run.train(1, 2)
        return said, left, optimizer.iterations, int(count)

    said, *counts = STRATEGIES[strategy](train)
    assert counts == [1, 5, 4]
    assert said == [
        *(
            f"Adam.iterations must be from 0 to 2**63 - 1, got {each}; set the number of updates made"
            for each in (2**63, -1)
        ),
        *(
            f"Adam.iterations must be a whole number, got {each!r} ({type(each).__name__}); pass an int"
            for each in (1.5, True, None, numpy.nan)
        ),
    ]


#: First strategy, later one, optimizer.  Adam has more slots, and a count of steps that matters.
ROUTES = grid(
    [(first, later, "adam") for first in STRATEGIES for later in STRATEGIES]
    + [(each, each, "momentum") for each in STRATEGIES],
    [(first, later, "momentum") for first in STRATEGIES for later in STRATEGIES if first != later],
)


@pytest.mark.parametrize("first, later, name", ROUTES)
def test_one_strategy_goes_on_where_another_stopped(first, later, name, tmp_path):
    path = tmp_path / "checkpoint.h5"
    straight = Run(mpidist.OneDeviceStrategy("cpu:0"), name).train(0, 4)

    def save(strategy):
        run = Run(strategy, name)
        in_halves(run, 0, 2) if first == "group" else run.train(0, 2)
        run.checkpoint.save(path)

    def go_on(strategy):
        run = Run(strategy, name)
        run.checkpoint.restore(path)
        in_halves(run, 2, 4) if later == "group" else run.train(2, 4)
        return run.values(), run.optimizer.iterations

    STRATEGIES[first](save)
    values, iterations = STRATEGIES[later](go_on)
    assert iterations == 4
    numpy.testing.assert_allclose(values, straight.values(), rtol=2e-6)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("is_rows", [False, True], ids=["dense", "rows"])
def test_training_goes_on_in_the_middle_of_an_accumulation(is_rows, shards, tmp_path):
    straight = Run(mpidist.OneDeviceStrategy("cpu:0"), "accumulation", is_rows).train(0, 4)

    def save(strategy):
        Run(strategy, "accumulation", is_rows).train(0, 3).checkpoint.save(tmp_path / "checkpoint.h5")

    def go_on(strategy):
        run = Run(strategy, "accumulation", is_rows)
        run.checkpoint.restore(tmp_path / "checkpoint.h5")
        micro_step = run.optimizer.micro_step
        return micro_step, run.train(3, 4).values(), run.optimizer.iterations

    one_worker(save, 2, variable_partitioner=FixedShardsPartitioner(shards))
    micro_step, values, iterations = one_worker(go_on, 2, variable_partitioner=FixedShardsPartitioner(shards))
    assert (micro_step, iterations) == (1, 2)
    numpy.testing.assert_allclose(values, straight.values(), rtol=2e-6)


@pytest.mark.parametrize(("name", "workers"), [("accumulation", 1), ("accumulation", 2), ("momentum", 2)])
def test_what_other_workers_have_accumulated_is_said_to_be_lost(name, workers, tmp_path):
    def on_worker(strategy):
        Run(strategy, name).train(0, 1).checkpoint.save(tmp_path / "checkpoint.h5")

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        job(on_worker, 1 + workers)
    texts = [str(each.message) for each in found]
    assert texts == ([] if (name, workers) != ("accumulation", 2) else [
        "a checkpoint has none of the gradients that the other workers have accumulated since their last updates: a "
        "run that goes on from it has lost up to 1 micro-batches of each"
    ])  # fmt: skip


def in_halves(run, first, last):
    """Train on the two ranks of a worker, each with a part of the gradients."""
    replica = run.strategy.extended.replica_id
    for step in range(first, last):
        parts = [half(each, replica) for each in gradients(step)]
        pairs = list(zip(parts, [run.matrix, run.vector], strict=True))
        run.strategy.run(run.optimizer.apply_gradients, args=(pairs[::-1],))


def test_workers_wait_until_the_first_has_restored(tmp_path):
    Run(mpidist.OneDeviceStrategy("cpu:0")).train(0, 3).checkpoint.save(tmp_path / "checkpoint-3.h5")
    met = threading.Barrier(3)

    def on_worker(strategy):
        run = Run(strategy)
        manager = mpidist.CheckpointManager(run.checkpoint, tmp_path)
        restored = manager.restore_or_initialize()
        found = run.matrix.value.copy(), run.optimizer.iterations
        met.wait(20)
        manager.save()
        return restored.name, *found

    expected = Run(mpidist.OneDeviceStrategy("cpu:0")).train(0, 3)
    for name, matrix, iterations in job(on_worker, 4):
        assert (name, iterations) == ("checkpoint-3.h5", 3)
        assert matrix.tolist() == expected.matrix.value.tolist()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3.h5", "checkpoint-4.h5"]


@pytest.mark.parametrize("by", ["checkpoint", "manager"])
@pytest.mark.parametrize("arguments", [(3, {}), (5, {"ranks_per_worker": 2})], ids=str)
def test_workers_know_the_learning_rate_that_the_first_has_restored(by, arguments, tmp_path):
    """A callback that makes it smaller does so on every worker."""
    saved = Run(mpidist.OneDeviceStrategy("cpu:0")).train(0, 1)
    saved.optimizer.learning_rate = 0.03125
    saved.checkpoint.save(tmp_path / "checkpoint-1.h5")

    def on_worker(strategy):
        run = Run(strategy)
        if by == "manager":
            mpidist.CheckpointManager(run.checkpoint, tmp_path).restore_or_initialize()
        else:
            run.checkpoint.restore(tmp_path / "checkpoint-1.h5")
        return run.optimizer.learning_rate

    ranks, options = arguments
    assert job(on_worker, ranks, **options) == [0.03125] * (ranks - 1)


@pytest.mark.parametrize("error", [CheckpointNotFoundError, CheckpointError])
def test_what_the_first_cannot_restore_is_an_error_everywhere(error, tmp_path):
    path = tmp_path / "checkpoint.h5"
    if error is CheckpointError:
        path.write_bytes(b"no checkpoint")

    def on_worker(strategy):
        with pytest.raises(error, match="checkpoint.h5"):
            Run(strategy).checkpoint.restore(path)
        return True

    assert job(on_worker, 3) == [True, True]


def test_a_state_of_another_model_is_refused():
    state = Run(mpidist.OneDeviceStrategy("cpu:0")).train(0, 1).optimizer.state()

    def on_worker(strategy):
        with strategy.scope():
            mpidist.Variable(numpy.ones((2, 2), "float32"), name="matrix")
            mpidist.Variable(numpy.ones(3, "float32"), name="vector")
            optimizer = OPTIMIZERS["momentum"]()
        optimizer.restore(state)

    with pytest.raises(ValueError, match="slot 'momentum' for variable 'matrix' was saved with shape"):
        one_worker(on_worker)


# -- fit --------------------------------------------------------------------------------------------------------------


def fitted(strategy, seed=0, epochs=3):
    """Return loss by epoch and the weights of a line through 22 points, in batches of 5."""
    x = numpy.random.default_rng(0).normal(size=(22, 2)).astype("float32")
    with strategy.scope():
        w = mpidist.Variable(numpy.zeros(2, "float32"), name="w")
        optimizer = mpidist.optimizers.SGD(0.1, momentum=0.5)

    def value_and_grad(parameters, x, y):
        (w,) = parameters
        error = x @ w - y
        return float(error @ error) / len(x), [2 * x.T @ error / len(x)]

    trainer = mpidist.Trainer(value_and_grad, [w], optimizer)
    dataset = mpidist.data.Dataset.from_arrays((x, x @ numpy.array([2.0, -1.0], "float32")))
    history = trainer.fit(dataset.shuffle(seed=seed).batch(5), epochs=epochs)
    return history.history["loss"], w.numpy()


@pytest.mark.parametrize("arguments", [(2, {}), (3, {"ranks_per_worker": 2}), (4, {"ranks_per_worker": 3})], ids=str)
def test_fit_of_one_worker_is_that_of_one_device(arguments):
    ranks, options = arguments
    losses, w = fitted(mpidist.OneDeviceStrategy("cpu:0"))
    for found_losses, found_w in job(fitted, ranks, **options):
        numpy.testing.assert_allclose(found_losses, losses, rtol=1e-4)
        numpy.testing.assert_allclose(found_w, w, rtol=1e-4)


def test_fit_of_several_workers_trains_one_model():
    met = threading.Barrier(3)

    def on_worker(strategy):
        losses, _ = fitted(strategy, seed=strategy.extended.number, epochs=10)
        met.wait(20)
        strategy.extended.pull()
        return next(iter(strategy.extended._registry.by_name().values())).value.tolist()

    first, *others = job(on_worker, 4)
    assert others == [first] * 2
    numpy.testing.assert_allclose(first, [2, -1], atol=0.01)


@pytest.mark.parametrize("arguments", [(2, {}), (3, {"ranks_per_worker": 2}), (3, {})], ids=str)
def test_early_stopping_puts_the_variables_of_the_best_epoch_back(arguments):
    """Of several workers, the first does: the others' best is not what it was when they saw it."""
    ranks, options = arguments
    ended = threading.Barrier(2)

    def on_worker(strategy):
        with strategy.scope():
            w = mpidist.Variable(numpy.zeros(2), name="w")
            optimizer = mpidist.optimizers.SGD(1.0)
        losses = iter([3.0, 1.0, 2.0, 2.0, 2.0])
        count = strategy.num_replicas_in_sync

        def value_and_grad(parameters, x):
            return next(losses), [numpy.full(2, 1.0 if strategy.extended.number == 0 else 0.0)]

        trainer = mpidist.Trainer(value_and_grad, [w], optimizer)
        stopping = mpidist.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
        trainer.fit(
            mpidist.data.Dataset.from_arrays((numpy.zeros((count, 1)),)).batch(count), epochs=5, callbacks=[stopping]
        )
        if ranks == 3 and not options:
            ended.wait(20)
        strategy.extended.pull()
        return w.value.tolist(), stopping.best_epoch, stopping.stopped_epoch

    assert job(on_worker, ranks, **options)[0] == ([-2.0] * 2, 1, 2)


def test_steps_of_others_are_not_made_on_the_variables_that_early_stopping_puts_back():
    has_ended = threading.Event()

    class Ended(mpidist.callbacks.Callback):
        def on_train_end(self, logs=None):
            has_ended.set()

    def on_worker(strategy):
        with strategy.scope():
            w, optimizer = mpidist.Variable(numpy.zeros(2), name="w"), mpidist.optimizers.SGD(1.0)
        losses = iter([3.0, 1.0, 2.0, 2.0, 2.0])

        def value_and_grad(parameters, x):
            if strategy.extended.number:
                assert has_ended.wait(10)
                time.sleep(0.02)
            return next(losses), [numpy.ones(2)]

        trainer = mpidist.Trainer(value_and_grad, [w], optimizer)
        stopping = mpidist.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
        rows = mpidist.data.Dataset.from_arrays((numpy.zeros((1, 1)),)).batch(1)
        trainer.fit(rows, epochs=5, callbacks=[Ended(), stopping])
        strategy.extended.pull()
        return w.value.tolist()

    assert job(on_worker, 3) == [[-2.0] * 2] * 2


@pytest.mark.parametrize("arguments", [(3, {}), (5, {"ranks_per_worker": 2})], ids=str)
def test_workers_that_stop_early_wait_for_the_others_however_long_these_train(arguments):
    ranks, options = arguments

    def main():
        strategy = mpidist.ParameterServerStrategy(num_ps=1, **options)
        with strategy.scope():
            w, optimizer = mpidist.Variable(numpy.zeros(2), name="w"), mpidist.optimizers.SGD(1.0)
        count = strategy.num_replicas_in_sync

        def value_and_grad(parameters, x):
            if strategy.extended.number:
                time.sleep(1.5)  # longer than the deadline
            return 1.0, [numpy.ones(2) / count]

        trainer = mpidist.Trainer(value_and_grad, [w], optimizer)
        stopping = mpidist.callbacks.EarlyStopping("loss", restore_best_weights=True)
        rows = mpidist.data.Dataset.from_arrays((numpy.zeros((count, 1)),)).batch(count)
        trainer.fit(rows, epochs=1, callbacks=[stopping])
        return stopping.best_epoch

    assert run_ranks(ranks, main, timeout_seconds=1)[: ranks - 1] == [0] * (ranks - 1)


# -- consistency -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [["a", "a", "a"], ["a", "a", "b"]], ids=["near", "far"])
def test_the_first_step_of_backup_workers_is_made_by_gradients_of_an_optimizer_that_is_new(hosts):
    def main():
        strategy = mpidist.ParameterServerStrategy(num_ps=1, consistency=BackupWorkers(2))
        with strategy.scope():
            w, optimizer = mpidist.Variable(numpy.zeros(3)), mpidist.optimizers.SGD(1.0)

        def step():
            assert w.value.shape == (3,)  # a read begins the step: at first before servers have met the optimizer
            optimizer.apply_gradients([(numpy.ones(3), w)])

        for _ in range(5):
            strategy.run(step)
        strategy.extended.pull()
        return optimizer.iterations, w.value.tolist()

    # two workers and steps of two gradients: none can be missed
    assert run_ranks(3, main, hosts=hosts, timeout_seconds=10)[:2] == [(5, [-5.0] * 3)] * 2


@pytest.mark.parametrize("hosts", [["a", "a", "a"], ["a", "a", "b"]], ids=["near", "far"])
def test_gradients_of_what_servers_have_now_are_not_late_for_a_snapshot_from_before(hosts):
    """Before, all gradients of a worker that had once looked at a snapshot, and then at no other, were dropped."""
    turn = threading.Barrier(2)

    def main():
        strategy = mpidist.ParameterServerStrategy(num_ps=1, consistency=BackupWorkers(1))
        number = strategy.extended.number
        with strategy.scope():
            w, optimizer = mpidist.Variable(numpy.zeros(1)), mpidist.optimizers.SGD(1.0)

        def step():
            optimizer.apply_gradients([(numpy.ones(1) + 0 * w.read_value(), w)])

        assert w.value == 0
        turn.wait(10)
        for place in range(8):
            if place % 2 == number:
                strategy.run(step)
                strategy.extended.pull()
            turn.wait(10)
        return w.read_value().tolist()

    # only the first gradient of worker 1 is late: it began its step with the snapshot
    assert run_ranks(3, main, hosts=hosts, timeout_seconds=10)[:2] == [[-7.0]] * 2


def test_backup_workers_take_the_mean_of_gradients_that_each_has_clipped():
    def on_worker(strategy):
        with strategy.scope():
            w, optimizer = mpidist.Variable(numpy.zeros(1)), mpidist.optimizers.SGD(1.0, global_clipnorm=1.0)
        gradient = numpy.array([[10.0], [0.5]][strategy.extended.number])

        def step():
            assert w.value.shape == (1,)  # a read begins the step
            optimizer.apply_gradients([(gradient, w)])

        strategy.run(step)
        strategy.extended.pull()
        return float(w.value[0])

    assert job(on_worker, 3, consistency=BackupWorkers(2)) == pytest.approx([-(1.0 + 0.5) / 2] * 2)


@pytest.mark.parametrize("consistency", [None, StaleSynchronous(0), BackupWorkers(2)], ids=str)
def test_a_chief_may_train_between_the_functions_that_it_schedules(consistency):
    def on_rank(strategy):
        with strategy.scope():
            w, optimizer = mpidist.Variable(numpy.zeros(3)), mpidist.optimizers.SGD(1.0)

        def train():
            assert w.value.shape == (3,)  # a read begins the step
            optimizer.apply_gradients([(numpy.ones(3), w)])

        coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
        try:
            coordinator.schedule(train)
            coordinator.join()
            strategy.run(train)
            for _ in range(20):
                coordinator.schedule(train)
            coordinator.join()
            strategy.extended.pull()
            return w.value.tolist(), optimizer.iterations
        finally:
            coordinator._end()  # a rank that is a thread has no end of its program

    # one worker: every push is a step, the chief's too
    assert job(on_rank, 3, consistency=consistency) == [([-22.0] * 3, 22)]


def test_two_gradients_of_one_variable_are_refused_without_servers_too():
    with mpidist.ParameterServerStrategy(num_ps=1).scope():
        variable, optimizer = mpidist.Variable(numpy.zeros(2)), mpidist.optimizers.SGD(1.0)
    pair = numpy.ones(2), variable
    with pytest.raises(ValueError, match="two gradients"):
        optimizer.apply_gradients([pair, pair])
    assert variable.numpy().tolist() == [0, 0]
