"""A chief whose servers die: what it asks is asked again, and what is undone is told.  Ranks are threads."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import h5py
import numpy
import pytest

import mpidist
from mpidist.collectives.reductions import plan_cache
from mpidist.errors import CheckpointError, PeerLostError
from mpidist.parameter_server.registry import installed
from mpidist.parameter_server.server.server import Server
from mpidist.testing import run_ranks


class Deaths:
    """Which servers are to die: at once, or when the chief asks them for something."""

    def __init__(self) -> None:
        self.now: set[int] = set()
        self.at_verb: dict[int, str] = {}


@pytest.fixture
def deaths(monkeypatch):
    monkeypatch.setenv("MPIDIST_FAULT_TOLERANT", "1")
    deaths, poll, answer = Deaths(), Server.poll, Server._answer

    def mortal_poll(server):
        if server.number in deaths.now:
            sys.exit(0)
        return poll(server)

    def mortal_answer(server, client, message, has_turn):
        verb = deaths.at_verb.get(server.number)
        if client.number == 0 and verb is not None and f'"verb":"{verb}"'.encode() in bytes(message.header):
            sys.exit(0)
        answer(server, client, message, has_turn)

    monkeypatch.setattr(Server, "poll", mortal_poll)
    monkeypatch.setattr(Server, "_answer", mortal_answer)
    return deaths


def on_chief(
    program: Callable[[Any], Any], folder: Any, servers: int = 2, micro_batches: int | None = None, **arguments: Any
) -> Any:
    """Return what `program` returns on the chief of one worker."""

    def on_rank() -> Any:
        strategy = mpidist.ParameterServerStrategy(num_ps=servers, on_server_failure="restore", **arguments)
        with strategy.scope():
            model = [mpidist.Variable(numpy.zeros(4), name=f"v{n}") for n in range(2 * servers)]
            optimizer = mpidist.optimizers.SGD(0.5, momentum=0.5, gradient_accumulation_steps=micro_batches)
            mean, other = mpidist.metrics.Mean("saved"), mpidist.metrics.Mean("not saved")

        def train(value):
            optimizer.apply_gradients([(numpy.full(4, value), v) for v in model])
            mean.update_state(value)
            other.update_state(value)
            return value

        coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
        checkpoint = mpidist.Checkpoint(model=model, optimizer=optimizer, mean=mean)
        manager = mpidist.CheckpointManager(checkpoint, folder / "checkpoints")
        told: list[Any] = []
        coordinator.restore_from(manager, told.append)

        def run(count):
            found = [coordinator.schedule(train, args=(1.0,)) for _ in range(count)]
            coordinator.join()
            return found

        try:
            job = SimpleNamespace(strategy=strategy, model=model, optimizer=optimizer, mean=mean, other=other)
            vars(job).update(coordinator=coordinator, manager=manager, train=train, run=run, told=told)
            coordinator.schedule(lambda: None)
            coordinator.join()  # the worker knows all servers: one that dies before is another story
            return program(job)
        finally:
            coordinator._end()  # a rank that is a thread has no end of its program

    return run_ranks(2 + servers, on_rank, timeout_seconds=20)[0]


def values(model: Any) -> set[float]:
    return {float(each) for variable in model for each in variable.read_value()}


def sgd(steps: int) -> float:
    """Return where gradients of 1 take a 0 in so many steps."""
    value = velocity = 0.0
    for _ in range(steps):
        velocity = 0.5 * velocity - 0.5
        value += velocity
    return value


READS: dict[str, Callable[[Any, int], Any]] = {
    "read": lambda job, n: job.model[n].read_value(),
    "assign": lambda job, n: job.model[n].assign(job.model[n].read_value()),
    "assign_add": lambda job, n: job.model[n].assign_add(numpy.zeros(4)),
    "rows": lambda job, n: job.model[n].sparse_read([0]),
    "scatter": lambda job, n: job.model[n].scatter_add(mpidist.IndexedSlices(numpy.zeros(1), numpy.array([0]), (4,))),
    "optimizer": lambda job, n: job.optimizer.state(),
    "learning rate": lambda job, n: setattr(job.optimizer, "learning_rate", 0.5),
    "metric": lambda job, n: (job.mean.result(), job.other.result()),
    "reset": lambda job, n: (job.other.reset_state(), job.mean.result(), job.model[n].read_value()),
    "save": lambda job, n: job.manager.checkpoint.save(job.manager.directory / "other.h5"),
}


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("what", sorted(READS))
def test_what_the_chief_asks_is_asked_again_of_the_servers_that_are_left(what, victim, deaths, tmp_path):
    def program(job):
        job.run(3)
        job.manager.save()
        job.run(2)
        deaths.now.add(victim)
        lost = next(n for n, variable in enumerate(job.model) if variable.servers == (victim,))
        READS[what](job, lost)
        found = values(job.model), job.optimizer.iterations, job.mean.result(), len(job.coordinator.restores)
        job.run(1)
        return found, values(job.model), job.optimizer.iterations, [each.servers for each in job.told]

    found = on_chief(program, tmp_path)
    assert found == (({sgd(3)}, 3, 1.0, 1), {sgd(4)}, 4, [(victim,)])


@pytest.mark.parametrize("verb", ["state", "read"])
def test_a_save_in_whose_middle_a_server_dies_is_of_one_moment(verb, deaths, tmp_path):
    def program(job):
        job.run(3)
        job.manager.save()
        job.run(2)
        (server,) = job.mean.remote.variable.servers  # which also has slots
        deaths.at_verb[server] = verb
        job.manager.save()
        return len(job.told), job.optimizer.iterations

    assert on_chief(program, tmp_path) == (1, 3)
    with h5py.File(tmp_path / "checkpoints" / "checkpoint-2.h5") as file:
        assert {float(each) for n in range(4) for each in file[f"model/{n}"]} == {sgd(3)}
        assert file["mean/count"][()] == 3


def test_the_program_learns_what_is_undone(deaths, tmp_path):
    def program(job):
        job.run(3)
        path = job.manager.save()
        done = job.run(4)
        deaths.now.add(1)
        job.model[1].read_value()
        (restore,) = job.coordinator.restores
        assert job.told == [restore] and job.coordinator.fetch(done) == [1.0] * 4  # results stay
        return restore.servers, restore.undone, restore.checkpoint == path, job.run(1) and values(job.model)

    assert on_chief(program, tmp_path) == ((1,), 4, True, {sgd(4)})


def test_functions_can_be_scheduled_again_when_they_are_undone(deaths, tmp_path):
    def program(job):
        job.manager.save()
        job.coordinator.restore_from(job.manager, lambda restore: job.run(restore.undone))
        job.run(5)
        deaths.now.add(0)
        return values(job.model), job.optimizer.iterations

    assert on_chief(program, tmp_path) == ({sgd(5)}, 5)


def test_a_metric_that_is_in_no_checkpoint_begins_anew_and_this_is_told(deaths, tmp_path):
    def program(job):
        job.run(3)
        job.manager.save()
        (server,) = job.other.remote.variable.servers
        deaths.now.add(server)
        result = job.other.result()
        return result, job.told[0].begun_anew, job.mean.result()

    assert on_chief(program, tmp_path) == (0.0, ("not saved",), 1.0)


@pytest.mark.parametrize("victim", [0, 1])
def test_functions_that_run_again_count_once(victim, deaths, tmp_path):
    def program(job):
        job.run(3)
        job.manager.save()
        job.run(2)
        deaths.now.add(victim)
        job.model[0].read_value()
        job.model[1].read_value()
        job.run(job.told[0].undone)
        return [float(metric.state()["count"]) for metric in (job.mean, job.other)], job.told[0].begun_anew

    assert on_chief(program, tmp_path) == ([3 + 2, 2], ("not saved",))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_function_that_a_death_has_broken_off_counts_once(victim, deaths, tmp_path):
    def program(job):
        model, mean, other = job.model, job.mean, job.other

        def counted(value):
            mean.update_state(value)
            other.update_state(value)
            end = time.monotonic() + 0.2
            while time.monotonic() < end:  # the server dies meanwhile
                for variable in model:
                    variable.read_value()

        job.run(3)
        job.manager.save()
        job.coordinator.schedule(counted, args=(1.0,))
        deaths.now.add(victim)
        job.coordinator.join()
        return [float(metric.state()["count"]) for metric in (mean, other)], len(job.told)

    assert on_chief(program, tmp_path) == ([3 + 1, 1], 1)


@pytest.mark.filterwarnings("ignore:a checkpoint has none of the gradients")
def test_micro_batches_that_are_undone_are_part_of_no_later_update(deaths, tmp_path):
    def program(job):
        job.manager.save()
        job.coordinator.schedule(job.train, args=(9.0,))  # the first of two
        job.coordinator.join()
        deaths.now.add(1)
        restored = values(job.model)
        job.run(2)
        return restored, values(job.model), job.optimizer.iterations

    assert on_chief(program, tmp_path, micro_batches=2) == ({0.0}, {sgd(1)}, 1)


def test_a_second_server_that_dies_while_the_first_is_replaced(deaths, tmp_path):
    def program(job):
        job.run(3)
        job.manager.save()
        job.run(2)
        deaths.at_verb[1] = "create"  # when the chief makes there what the first had
        deaths.now.add(0)
        found = values(job.model)
        job.run(1)
        servers = {server for variable in job.model for server in variable.servers}
        return found, values(job.model), [sorted(each.servers) for each in job.told], servers

    assert on_chief(program, tmp_path, servers=3) == ({sgd(3)}, {sgd(4)}, [[0, 1]], {2})


def test_shards_are_read_and_written_of_one_moment(deaths, tmp_path):
    def program(job):
        job.run(3)
        job.manager.save()
        job.run(2)
        deaths.at_verb[1] = "assign"
        job.model[0].assign(numpy.full(4, 7.0))  # the first shard was written when the second was lost
        return job.model[0].read_value().tolist(), len(job.told), job.model[1].value.tolist()

    found = on_chief(
        program, tmp_path, variable_partitioner=mpidist.experimental.partitioners.FixedShardsPartitioner(2)
    )
    assert found == ([7.0] * 4, 1, [sgd(3)] * 4)


def test_without_a_checkpoint_the_job_ends_and_says_what_to_do(deaths, tmp_path):
    def program(job):
        deaths.now.add(1)
        with pytest.raises(PeerLostError, match=r"ps 1.*there is no checkpoint in .* to restore its variables from"):
            job.model[1].read_value()

    on_chief(program, tmp_path)


def test_variables_that_are_in_no_checkpoint_end_the_job(deaths, tmp_path):
    def program(job):
        job.manager.save()
        with job.strategy.scope():
            more = [mpidist.Variable(0.0, name=f"more{n}") for n in range(2)]
        deaths.now.add(1)
        with pytest.raises(CheckpointError, match="its variables more1 are not in the checkpoint"):
            more[1].read_value()

    on_chief(program, tmp_path)


@pytest.mark.parametrize(
    ("make", "is_refused"),
    [
        (lambda: mpidist.optimizers.SGD(1.0, momentum=0.5), True),
        (lambda: mpidist.optimizers.SGD(lambda step: 1.0), True),
        (lambda: mpidist.optimizers.SGD(1.0), False),
        (None, False),
    ],
)
def test_an_optimizer_that_is_in_no_checkpoint_does_not_go_back_without_its_slots(make, is_refused, deaths, tmp_path):
    def program(job):
        with job.strategy.scope():
            another = mpidist.optimizers.Adam(1.0)  # of which no step was made
            optimizer = job.optimizer if make is None else make()
        job.manager.save()
        for _ in range(2):
            job.strategy.run(lambda: optimizer.apply_gradients([(numpy.ones(4), v) for v in job.model]))
        deaths.now.add(1)
        if is_refused:
            with pytest.raises(CheckpointError, match="SGD, which has made 2 steps, is not in the check"):
                job.model[1].read_value()
            return set()
        job.model[1].read_value()
        return values(job.model), another.iterations

    assert on_chief(program, tmp_path) == (set() if is_refused else ({0.0}, 0))


@pytest.mark.parametrize("push_dtype", [None, "float16"])
def test_ever_new_lists_are_as_one_and_few_are_kept_also_on_the_servers_that_are_left(
    push_dtype, deaths, tmp_path, monkeypatch
):
    monkeypatch.setattr(plan_cache, "_LEAST_BYTES", 1 << 17)
    monkeypatch.setattr(plan_cache, "_PLAN_BYTES", 1 << 10)
    serving, serve, most = [], Server.serve, (1 << 17) // (3 << 10)
    monkeypatch.setattr(Server, "serve", lambda server: (serving.append(server), serve(server))[1])
    rng = random.Random(0)
    lists = [rng.sample(range(6), rng.randint(1, 6)) for _ in range(250)]

    def program(job):
        model, optimizer = job.model, job.optimizer

        def train(chosen):
            optimizer.apply_gradients([(numpy.ones(4), model[n]) for n in chosen])
            client = installed().client
            client.held = list(client.plans.lists)  # as the traceback of an error may hold them
            return len(client.held)

        def run(some):
            found = [job.coordinator.schedule(train, args=(each,)) for each in some]
            job.coordinator.join()
            return max(job.coordinator.fetch(found))

        run(lists[:100])
        job.manager.save()
        run([range(6)] * 3)  # which are undone
        deaths.now.add(1)
        job.model[1].read_value()
        kept = run([range(6), *lists[100:]])
        plans = [len(client.plans) for server in serving if server.number != 1 for client in server.clients]
        return len(job.coordinator.restores), kept, max(plans), [each.read_value().tolist() for each in job.model]

    restores, kept, plans, found = on_chief(program, tmp_path, servers=3, push_dtype=push_dtype)
    assert found == [[sgd(1 + sum(n in each for each in lists))] * 4 for n in range(6)]
    assert restores == 1 and kept <= most and plans <= most + 6
