"""Ever new lists of the same variables: the numbers of one list, and no more plans than the last lists need."""

from __future__ import annotations

import random
import tracemalloc
from weakref import ref

import numpy
import pytest

import mpidist
from mpidist.collectives.reductions import plan_cache
from mpidist.optimizers import SGD, Adam
from mpidist.parameter_server.client import part
from mpidist.parameter_server.client import plans as plans_module
from mpidist.parameter_server.client.local_client import LocalClient
from mpidist.parameter_server.consistency import BackupWorkers, StaleSynchronous
from mpidist.parameter_server.registry import installed
from mpidist.parameter_server.server.requests import Requests
from mpidist.parameter_server.server.store import Store
from tests.helpers.served import run, spec, value
from tests.unit.parameter_server.jobs import one_worker

VARIABLES, LISTS = 9, 500
KEYS = [(number, 0) for number in range(VARIABLES)]

#: Kept in any case, of which a list takes 1 KiB and 2 KiB for each variable: so many lists of one variable.
LEAST_BYTES, PLAN_BYTES, MOST = 1 << 17, 1 << 10, (1 << 17) // (3 << 10)

WAYS = pytest.mark.parametrize(
    "way",
    [{}, {"consistency": StaleSynchronous(10**6)}, {"far": True}, {"push_dtype": "float16"}],
    ids=["direct", "near", "far", "narrow"],
)


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
    monkeypatch.setattr(plan_cache, "_LEAST_BYTES", LEAST_BYTES)
    monkeypatch.setattr(plan_cache, "_PLAN_BYTES", PLAN_BYTES)


def random_lists(number=LISTS, seed=0):
    """Return lists of variables, in any order; some of them come several times."""
    rng = random.Random(seed)
    return [rng.sample(KEYS, rng.randint(1, VARIABLES)) for _ in range(number)]


def times(lists):
    """Return in how many of the lists each variable is."""
    return [sum(key in each for each in lists) for key in KEYS]


def made(client, servers, size=4):
    for number, _ in KEYS:
        client.create(
            spec(number, (size,), "float32"), number % servers, numpy.zeros(size) if client.is_chief else None
        )
    return client.register_optimizer(SGD(1.0))


class Foreign(Adam):
    """A rule of somebody else, which only a server applies."""


@WAYS
@pytest.mark.parametrize("servers", [1, 3])
def test_500_random_lists_are_as_one_and_few_are_kept(way, servers):
    lists = random_lists()

    def job(client):
        optimizer, kept = made(client, servers), []
        for keys in lists:
            client.push(optimizer, [(key, numpy.ones(4, "f4")) for key in keys])
            kept.append(len(client.plans.lists))
        client.flush()
        numbers = {part.number for planned in client.plans.lists for _, part in planned.parts}
        for end in client.servers:
            assert {part.number for part in end.parts} <= numbers
        return max(kept), len(client.plans.lists), [client.value(key).tolist() for key in KEYS]

    ((most, kept, values),), served = run(1, job, servers, **way)
    assert values == [[-float(each)] * 4 for each in times(lists)]
    assert most <= MOST
    for server in served:  # which may not have been told yet of what the last list has displaced
        assert 1 <= len(server.store.plans) <= len(server.clients[0].plans) <= kept + VARIABLES


@WAYS
def test_clients_of_different_lists_keep_theirs(way):
    lists = [random_lists(150, seed) for seed in range(3)]

    def job(client):
        optimizer = made(client, 2)
        for keys in lists[client.number]:
            client.push(optimizer, [(key, numpy.ones(4, "f4")) for key in keys])
        client.flush()

    if "far" in way:
        way = {"far": [False, True, True]}
    _, served = run(3, job, 2, **way)
    for key, each in zip(KEYS, times(sum(lists, [])), strict=True):
        assert value(served, key).tolist() == [-float(each)] * 4
    for server in served:
        assert len(server.store.plans) <= 3 * (MOST + VARIABLES)


def test_what_rounding_loses_of_a_variable_is_added_in_its_next_list():
    lists, gradient = random_lists(), numpy.array([1 + 2.0**-13, 1 / 3, 1.0], "f4")

    def job(client):
        optimizer = made(client, 2, 3)
        for keys in lists:
            client.push(optimizer, [(key, gradient) for key in keys])
        return numpy.array([client.value(key) for key in KEYS])

    (got,), _ = run(1, job, 2, push_dtype="float16")
    exact = -numpy.outer(times(lists), gradient.astype(float))
    assert numpy.abs(got - exact).max() <= 2.0**-11  # of one rounding, not of 250


def test_residues_are_one_model_and_a_list_is_one_run_of_them():
    residues = part.Residues()
    specs = [spec(number, (size,), "float32") for number, size in enumerate([3, 0, 2, 4])]
    (most, whole) = residues.of(specs[:3])[0]
    assert (most, whole.tolist()) == (3, [0.0] * 5)
    whole[:] = range(5)
    found = [(number, each.tolist()) for number, each in residues.of([specs[2], specs[0], specs[1], specs[3]])]
    assert found == [(1, [3, 4]), (2, [0, 1, 2]), (1, [0] * 4)]
    (again,) = residues.of(specs[:3])
    assert again[0] == 3 and numpy.shares_memory(again[1], whole)


@pytest.mark.parametrize("way", [{}, {"far": True}, {"push_dtype": "float16"}, {"consistency": BackupWorkers(1)}])
@pytest.mark.usefixtures("without_collector")
def test_what_is_dropped_is_gone_at_once_here_and_there(way, monkeypatch):
    here, there = [], []

    class Recorded(plans_module.PlannedList):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            here.extend(map(ref, [self, *(part for _, part in self.parts)]))

    def target(store, number, planned):
        found = find(store, number, planned)
        there.extend([ref(planned), ref(found)])
        return found

    find = Store.target
    monkeypatch.setattr("mpidist.parameter_server.client.plans.PlannedList", Recorded)
    monkeypatch.setattr(Store, "target", target)

    def job(client):
        made(client, 1)
        optimizer = client.register_optimizer(Foreign())
        for keys in random_lists(100):
            client.value(keys[0])
            client.push(optimizer, [(key, numpy.ones(4, "f4")) for key in keys])
        client.flush()
        alive = [each() for each in here if each() is not None]
        kept = [*client.plans.lists, *(part for planned in client.plans.lists for _, part in planned.parts)]
        return set(map(id, alive)) == set(map(id, kept)), len(kept), sum(each() is not None for each in there)

    ((all_kept, number, at_server),), _ = run(1, job, **way)
    assert all_kept and len(here) > 150 and len(there) > 150
    assert at_server <= number + 2 * VARIABLES


def test_means_of_ever_new_lists_at_a_server_that_gathers_take_the_memory_of_few():
    size, lists, held = 1 << 14, random_lists(100), []

    def job(client):
        optimizer = made(client, 1, size)
        for step, keys in enumerate(lists):
            client.refresh()
            client.value(KEYS[0])
            client.push(optimizer, [(key, numpy.ones(size, "f4")) for key in keys])
            if step in (30, 99):
                client.flush()
                if client.is_chief:
                    held.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        _, served = run(2, job, consistency=BackupWorkers(2))
    finally:
        tracemalloc.stop()
    whole = 4 * VARIABLES * size
    assert held[1] - held[0] < 2 * whole + (1 << 20)
    assert len(served[0].store.plans) < 20
    assert [value(served, key)[0] for key in KEYS] == [-float(each) for each in times(lists)]


@pytest.mark.parametrize("way", [{"consistency": StaleSynchronous(10**6)}, {"far": True}, {}])
def test_lists_that_grow_leave_no_memory_that_was_too_small(way):
    size = 1 << 15

    def job(client):
        optimizer = made(client, 1, size)
        for number in range(1, VARIABLES + 1):
            for keys in (KEYS[:number], [KEYS[number - 1]]):
                client.push(optimizer, [(key, numpy.ones(size, "f4")) for key in keys])
        client.flush()
        (end,) = client.servers
        present = [area.array for area in end._areas if area is not None]
        present += [] if getattr(end, "_direct", None) is None else [end._direct._packed]
        known = [array for part in end.parts for array, _ in part.views]
        return [any(numpy.shares_memory(array, each) for each in present) for array in known]

    (found,), (server,) = run(1, job, **way)
    assert found and all(found)
    targets = [target for planned in server.store.plans.values() for target in planned.targets.values()]
    held = [payload for target in targets for each in target.update._runs for payload, _ in each._gradients.values()]
    assert all(payload.base.nbytes <= 1 << 18 for payload in held)


def test_a_plan_that_was_made_in_vain_is_forgotten():
    def job(client):
        optimizer, rows = made(client, 1), mpidist.IndexedSlices(numpy.ones((1,), "f4"), numpy.array([9]))
        for keys in random_lists(30):
            client.push(optimizer, [(KEYS[0], rows)])
            with pytest.raises(IndexError):  # most often with the answer to the plan
                client.push(optimizer, [(key, numpy.ones(4, "f4")) for key in keys])
                client.flush()
            client.push(optimizer, [(key, numpy.ones(4, "f4")) for key in keys])
        return {part.number for planned in client.plans.lists for _, part in planned.parts} | set(
            client.servers[0].forgotten
        )

    (known,), (server,) = run(1, job, far=True)
    assert set(server.clients[0].plans) <= known


def by_updates(strategy, lists, again):
    """Return the variables after each list was pushed `again` times by an optimizer, and how many are kept."""
    with strategy.scope():
        variables = [mpidist.Variable(numpy.zeros(4, "f4")) for _ in KEYS]
        optimizer = SGD(1.0)
    for keys in lists:
        pairs = [(numpy.ones(4, "f4"), variables[number]) for number, _ in keys]
        for _ in range(again):
            strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
    lists = list(installed().client.plans.lists)
    known = [known[-1]() for known in optimizer._updates._known]
    assert all(planned is None or planned in lists for planned in known)
    return [variable.value.tolist() for variable in variables], len(lists)


@pytest.mark.parametrize("servers", [1, 2])
def test_lists_that_are_pushed_again_are_void_when_they_are_dropped(servers):
    lists = random_lists(60)
    turns = [each for first in range(0, 60, 20) for _ in range(2) for each in lists[first : first + 20]]
    values, kept = one_worker(lambda strategy: by_updates(strategy, turns, 3), servers)
    assert values == [[-3.0 * each] * 4 for each in times(turns)]
    assert kept <= MOST


@pytest.mark.parametrize("servers", [1, 2])
def test_a_list_that_is_pushed_in_every_step_is_planned_once_whatever_is_pushed_between(servers, monkeypatch):
    asked, on_plan = [], Requests._on_plan

    def noted(requests, client, request, array):
        asked.append(len(request["dense"]))
        return on_plan(requests, client, request, array)

    monkeypatch.setattr(Requests, "_on_plan", noted)
    others = [each for each in random_lists() if len(each) < 7]
    turns = [each for other in others for each in (KEYS, other)]
    values, _ = one_worker(lambda strategy: by_updates(strategy, turns, 1), servers)
    assert values == [[-float(each)] * 4 for each in times(turns)]
    if servers == 1:
        assert asked.count(VARIABLES) == 1
    assert len(asked) > 200


def test_a_process_without_servers_keeps_few_plans():
    client, lists = LocalClient(), random_lists()
    optimizer = made_alone(client)
    for keys in lists:
        client.push(optimizer, [(key, numpy.ones(4, "f4")) for key in keys])
    assert [client.value(key).tolist() for key in KEYS] == [[-float(each)] * 4 for each in times(lists)]
    assert len(client.servers[0].store.plans) <= MOST


def made_alone(client):
    for number, _ in KEYS:
        client.create(spec(number, (4,), "float32"), 0, numpy.zeros(4))
    return client.register_optimizer(SGD(1.0), 0)
