"""Servers and their clients as real processes: the last rank serves, or the last two."""

from __future__ import annotations

import os

import numpy
import pytest

import mpidist
from mpidist.optimizers import SGD, Adam
from mpidist.parameter_server.client.near_server import NearServer
from mpidist.parameter_server.client.server_end import ServerEnd
from mpidist.parameter_server.consistency import BackupWorkers, StaleSynchronous
from mpidist.parameter_server.ledger import LEDGER_OPTIMIZERS
from mpidist.parameter_server.server.server import Server
from mpidist.transports import world
from tests.helpers.served import on_rank, spec

pytestmark = pytest.mark.mpi(min_size=2)

SERVERS = [
    pytest.param(1, marks=pytest.mark.mpi(min_size=2)),
    pytest.param(2, marks=pytest.mark.mpi(min_size=3)),
]
STEPS = 40


def clients_of(servers: int) -> int:
    return world().transport.size - servers


def make(client, specs, servers):
    near = os.environ.get("MPIDIST_SHARED_MEMORY") != "0"
    assert {type(end) for end in client.servers} == {NearServer if near else ServerEnd}
    for number, each in enumerate(specs):
        client.create(each, number % servers, numpy.zeros(each.shape, each.dtype) if client.is_chief else None)


@pytest.fixture(params=["memory", "messages"])
def way(request, monkeypatch):
    """Servers near and far; what is far does not need another node."""
    monkeypatch.setenv("MPIDIST_SHARED_MEMORY", "0" if request.param == "messages" else "1")
    return request.param


@pytest.mark.parametrize("servers", SERVERS)
def test_no_push_is_lost_or_applied_twice(way, servers):
    specs = [spec(0, (3,)), spec(1, (50_000,), "float32"), spec(2), spec(3, (4, 2), "float32")]

    def job(client):
        make(client, specs, servers)
        optimizer = client.register_optimizer(SGD(1.0))
        for step in range(STEPS):
            client.refresh()
            own = [client.value(each.key) for each in specs]
            assert all(-float(view.reshape(-1)[0]) >= step for view in own)  # what it pushed itself is there
            copies = [view.copy() for view in own]
            client.push(optimizer, [(each.key, numpy.ones(each.shape, each.dtype)) for each in specs])
            for view, copy in zip(own, copies, strict=True):
                numpy.testing.assert_array_equal(view, copy)
        client.flush()
        assert client.iterations(optimizer) <= STEPS * clients_of(servers)

    found = on_rank(servers, job)
    if isinstance(found, Server):
        for key, variable in found.store.variables.items():
            numpy.testing.assert_array_equal(found.store.read(key), -float(STEPS * clients_of(servers)))
            assert found.store.version(key) == STEPS * clients_of(servers)
            assert variable.spec == specs[key[0]]


@pytest.mark.parametrize("number", [1, LEDGER_OPTIMIZERS, LEDGER_OPTIMIZERS + 1, 10**6])
def test_optimizers_that_servers_do_not_have_have_no_steps(way, number):
    def job(client):
        make(client, [spec(0, (3,))], 1)
        client.register_optimizer(SGD(1.0))  # its learning rate lies behind the steps of the last one
        with pytest.raises(KeyError, match=f"no optimizer {number}"):
            client.iterations(number)

    on_rank(1, job)


@pytest.mark.parametrize("servers", SERVERS)
def test_rows_and_whole_gradients_together(way, servers):
    specs = [spec(0, (6, 2), "float32"), spec(1, (3,), "float32")]

    def job(client):
        make(client, specs, servers)
        optimizer = client.register_optimizer(Adam(0.1))
        for _ in range(10):
            rows = mpidist.IndexedSlices(numpy.ones((2, 2), "f4"), numpy.array([client.number % 6, 0]), (6, 2))
            client.push(optimizer, [((0, 0), rows), ((1, 0), numpy.ones(3, "f4"))])
        client.scatter((0, 0), "scatter_add", [5], 1000.0)
        rows = client.lookup((0, 0), [[5, 0]])
        assert rows.shape == (1, 2, 2)
        assert (rows[0, 0] > 900).all() and (rows[0, 1] < 0).all()
        state = client.optimizer_state(optimizer)
        assert state["0/0/momentum"].shape == (6, 2)
        client.restore_optimizer(optimizer, state)

    on_rank(servers, job)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("consistency", [StaleSynchronous(0), StaleSynchronous(2), BackupWorkers(2)])
def test_every_policy_comes_to_an_end(way, consistency):
    def job(client):
        make(client, [spec(0, (2,))], 1)
        optimizer = client.register_optimizer(SGD(1.0))
        for _ in range(STEPS):
            client.refresh()
            client.value((0, 0))
            client.push(optimizer, [((0, 0), numpy.ones(2))])

    found = on_rank(1, job, consistency)
    if isinstance(found, Server) and not found.consistency.gathers:
        numpy.testing.assert_array_equal(found.store.read((0, 0)), -float(STEPS * clients_of(1)))
    elif isinstance(found, Server):
        made = found.store.optimizers[0].optimizer.iterations
        numpy.testing.assert_allclose(found.store.read((0, 0)), -float(made))
        assert found.pushes == STEPS * clients_of(1)


def test_16_bits_on_the_way(way):
    def job(client):
        make(client, [spec(0, (1000,), "float32")], 1)
        optimizer = client.register_optimizer(SGD(1.0))
        for _ in range(STEPS):
            client.push(optimizer, [((0, 0), numpy.full(1000, 1 / 3, "f4"))])
        client.flush()

    found = on_rank(1, job, push_dtype="float16")
    if isinstance(found, Server):
        clients = clients_of(1)
        expected = -STEPS * clients / 3
        # what each client still owes, and roundings of the sum
        numpy.testing.assert_allclose(found.store.read((0, 0)), expected, atol=2.0**-11 * clients, rtol=1e-5)


def test_an_error_comes_back_from_another_process(way):
    def job(client):
        make(client, [spec(0, (2, 2))], 1)
        optimizer = client.register_optimizer(SGD(1.0))
        client.push(optimizer, [((0, 0), mpidist.IndexedSlices(numpy.ones((1, 2)), numpy.array([7])))])
        with pytest.raises(IndexError, match="ps 0 .*push 1: row numbers from 7 to 7 are outside of variable 'v0'"):
            client.flush()
        client.push(optimizer, [((0, 0), numpy.ones((2, 2)))])

    found = on_rank(1, job)
    if isinstance(found, Server):
        numpy.testing.assert_array_equal(found.store.read((0, 0)), -float(clients_of(1)))
