"""Clients and servers together, on threads: near servers, whose memory is read, and far ones, which are asked."""

from __future__ import annotations

import random
import threading
import time
import tracemalloc

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.errors import RankFailedError, ServerError, TornVariableError, TransportTimeoutError
from mpidist.optimizers import LAMB, LARS, SGD, Adagrad, Adam, AdamW, Ftrl, RMSprop
from mpidist.parameter_server.consistency import BackupWorkers, StaleSynchronous
from mpidist.parameter_server.copies import Buffers
from mpidist.parameter_server.ledger import Ledger
from mpidist.parameter_server.server.store import Store
from mpidist.runtime.control import ControlChannel
from tests.helpers.served import run, spec, value

#: How a client changes variables: itself, in the memory of a server on its node; by messages there; or to elsewhere.
WAYS = pytest.mark.parametrize(
    "way",
    [{}, {"consistency": StaleSynchronous(10**6)}, {"far": True}],
    ids=["direct", "near", "far"],
)
NEAR_AND_FAR = pytest.mark.parametrize("far", [False, True], ids=["near", "far"])

#: Each client counts in digits of its own of one number.
DIGIT = 1 << 12


def make(client, specs, servers=1):
    """Create variables in turn on the servers; they begin with zeros."""
    for number, each in enumerate(specs):
        client.create(each, number % servers, numpy.zeros(each.shape, each.dtype) if client.is_chief else None)


@pytest.mark.parametrize("write", ["assign_add", "scatter_add"])
@NEAR_AND_FAR
def test_who_sees_what_a_client_writes_sees_what_it_pushed_to_other_servers_before(monkeypatch, far, write):
    done, push, assign, scatter = [], Store.push, Store.assign, Store.scatter

    def slow_push(store, *arguments):
        if (0, 0) in store.variables:  # the other server is told of the step, too, with nothing in it
            time.sleep(0.1)
            done.append("push")
        push(store, *arguments)

    monkeypatch.setattr(Store, "push", slow_push)
    monkeypatch.setattr(Store, "assign", lambda *arguments: (done.append("write"), assign(*arguments)))
    monkeypatch.setattr(Store, "scatter", lambda *arguments: (done.append("write"), scatter(*arguments)))

    def work(client):
        make(client, [spec(0, (1,)), spec(1, (1,))], servers=2)
        optimizer = client.register_optimizer(SGD(1.0))
        for _ in range(3):
            client.push(optimizer, [((0, 0), numpy.ones(1))])
            if write == "assign_add":
                client.assign((1, 0), numpy.ones(1), write)
            else:
                client.scatter((1, 0), write, [0], 1.0)
        return float(client.value((0, 0))[0]), float(client.value((1, 0))[0])

    # near by a policy that has pushes sent: else the client makes them itself
    assert run(1, work, servers=2, far=far, consistency=StaleSynchronous(10**6))[0] == [(-3.0, 3.0)]
    assert done == ["push", "write"] * 3


# -- one client against a model of one process -------------------------------------------------------------------------

SPECS = [spec(0, (3,)), spec(1, (2, 2), "float32"), spec(2), spec(3, (4, 1), "float32")]
TABLES = (1, 3)
STEPS = st.one_of(
    st.tuples(st.just("push"), st.sets(st.integers(0, 3), min_size=1), st.integers(-3, 3)),
    st.tuples(st.just("rows"), st.sampled_from(TABLES), st.lists(st.integers(0, 1), max_size=3)),
    st.tuples(st.just("assign"), st.integers(0, 3), st.sampled_from(["assign", "assign_add", "assign_sub"])),
    st.tuples(st.just("scatter"), st.sampled_from(TABLES), st.sampled_from(["scatter_add", "scatter_update"])),
    st.tuples(st.just("look"), st.integers(0, 3), st.booleans()),
)


def play(client, steps, servers):
    """Do some steps at the servers and in a model, and compare after each."""
    make(client, SPECS, servers)
    optimizer = client.register_optimizer(SGD(1.0))
    model = [numpy.zeros(each.shape, each.dtype) for each in SPECS]
    changes = [0] * len(SPECS)
    for verb, which, what in steps:
        if verb == "push":
            gradients = [(number, numpy.full(SPECS[number].shape, what, SPECS[number].dtype)) for number in which]
            client.push(optimizer, [(SPECS[number].key, each) for number, each in gradients])
            for number, each in gradients:
                model[number] = model[number] - each
                changes[number] += 1
        elif verb == "rows":
            rows = numpy.ones((len(what), *SPECS[which].shape[1:]), SPECS[which].dtype)
            client.push(optimizer, [(SPECS[which].key, mpidist.IndexedSlices(rows, numpy.array(what, int)))])
            numpy.subtract.at(model[which], numpy.array(what, int), rows)
            changes[which] += 1
        elif verb == "assign":
            client.assign(SPECS[which].key, numpy.full(SPECS[which].shape, 2.0), what)
            model[which] = {"assign": 2.0, "assign_add": model[which] + 2, "assign_sub": model[which] - 2}[what]
            model[which] = numpy.broadcast_to(model[which], SPECS[which].shape).astype(SPECS[which].dtype)
            changes[which] += 1
        elif verb == "scatter":
            client.scatter(SPECS[which].key, what, [1, 0, 1], 3.0)
            assert what in ("scatter_add", "scatter_update")
            if what == "scatter_add":
                numpy.add.at(model[which], [1, 0, 1], 3.0)
            else:
                model[which][[1, 0]] = 3.0
            changes[which] += 1
        elif what:
            client.refresh()
            numpy.testing.assert_array_equal(client.value(SPECS[which].key), model[which])
        else:
            numpy.testing.assert_array_equal(client.read(SPECS[which].key), model[which])
    for number, each in enumerate(SPECS):
        numpy.testing.assert_array_equal(client.value(each.key), model[number])
        assert client.version(each.key) == changes[number]


@WAYS
@pytest.mark.parametrize("servers", [1, 2])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEPS, max_size=12))
def test_one_client_sees_what_one_process_would_have(way, servers, steps):
    run(1, lambda client: play(client, steps, servers), servers, **way)


# -- several clients ---------------------------------------------------------------------------------------------------

MOVES = st.lists(st.sampled_from(["push", "read", "hold", "add", "flush", "pause"]), min_size=1, max_size=25)


def count(client, moves, servers, pause):
    """Push and add ones in this client's digit, and check what is seen on the way; return how many."""
    specs = [spec(0, (2,)), spec(1), spec(2, (3,), "float64"), spec(3)]
    pushed, added = specs[:3], specs[3]
    make(client, specs, servers)
    optimizer = client.register_optimizer(SGD(1.0))
    one = float(DIGIT**client.number)
    pushes = adds = 0
    held, seen = [], {each.key: 0.0 for each in specs}
    for move in moves:
        if move == "push":
            client.push(optimizer, [(each.key, numpy.full(each.shape, -one)) for each in pushed])
            pushes += 1
        elif move == "add":
            client.assign(added.key, one, "assign_add")
            adds += 1
        elif move == "flush":
            client.flush()
        elif move == "pause":
            pause()
        else:
            client.refresh()
            held = []
            for each in specs:
                view = client.value(each.key)
                assert len(set(view.reshape(-1).tolist())) == 1
                number = float(view.reshape(-1)[0])
                own = pushes if each is not added else adds
                assert int(number / DIGIT**client.number) % DIGIT == own  # what it wrote itself, no less and no more
                assert number >= seen[each.key]
                seen[each.key] = number
                held.append((view, number))
            for server in range(servers):  # what one push changed is seen together
                together = {float(client.value(each.key).reshape(-1)[0]) for each in pushed[server::servers]}
                assert len(together) == 1
        if move != "read":
            for view, number in held:
                assert (view == number).all()
    client.flush()
    return pushes, adds


@WAYS
@pytest.mark.parametrize("servers", [1, 2])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plays=st.lists(MOVES, min_size=1, max_size=3), seed=st.integers(0, 100))
def test_nothing_is_lost_or_applied_twice_and_snapshots_stay(way, servers, plays, seed):
    chance = random.Random(seed)

    def pause():
        time.sleep(chance.random() * 0.002)

    results, served = run(
        len(plays), lambda client: count(client, plays[client.number], servers, pause), servers, **way
    )
    pushes = sum(done * DIGIT**number for number, (done, _) in enumerate(results))
    adds = sum(done * DIGIT**number for number, (_, done) in enumerate(results))
    for number in range(3):
        assert set(value(served, (number, 0)).reshape(-1).tolist()) == {float(pushes)}
    assert float(value(served, (3, 0))) == adds
    for server in served:
        for key in server.store.variables:
            assert server.store.version(key) == sum(done[key == (3, 0)] for done in results)


@NEAR_AND_FAR
def test_a_snapshot_outlives_variables_that_are_made_later(far):
    def job(client):
        client.create(spec(0, (2,)), 0, numpy.ones(2))
        optimizer = client.register_optimizer(SGD(1.0))
        before = client.value((0, 0))
        client.create(spec(1, (5,)), 0, numpy.full(5, 7.0))
        assert client.value((1, 0)).tolist() == [7.0] * 5
        assert before.tolist() == [1.0, 1.0]
        client.push(optimizer, [((0, 0), numpy.ones(2)), ((1, 0), numpy.ones(5))])
        assert before.tolist() == [1.0, 1.0]
        assert (client.value((0, 0)).tolist(), client.value((1, 0)).tolist()) == ([0.0, 0.0], [6.0] * 5)

    run(1, job, far=far)


def test_what_far_servers_send_goes_to_memory_that_is_kept():
    nbytes = 8 << 20

    def job(client):
        make(client, [spec(0, (nbytes // 8,)), spec(1)])
        sgd, ones = client.register_optimizer(SGD(1.0)), numpy.ones(nbytes // 8)

        def turn():
            client.push(sgd, [((0, 0), ones)])
            pulled = client.value((0, 0))
            client.read((1, 0))  # takes no memory away from what was pulled
            assert pulled[0] == pulled[-1] == -client.version((0, 0))
            return pulled

        taken = [turn() for _ in range(3)]
        assert numpy.shares_memory(taken[0], taken[2]) or numpy.shares_memory(taken[1], taken[2])
        tracemalloc.start()
        try:
            for _ in range(4):
                turn()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    (most,), _ = run(1, job, far=True)
    assert most < nbytes // 2


# -- optimizers --------------------------------------------------------------------------------------------------------

OPTIMIZERS = [
    lambda: SGD(0.1),
    lambda: SGD(0.1, momentum=0.9, nesterov=True),
    lambda: Adam(0.01),
    lambda: AdamW(0.01),
    lambda: Adagrad(0.1),
    lambda: Ftrl(0.1, l2_regularization_strength=0.1),
    lambda: RMSprop(0.01),
    lambda: LARS(0.1),
    lambda: LAMB(0.01),
    lambda: SGD(0.1, weight_decay=0.01, clipvalue=0.5),
    lambda: SGD(mpidist.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
]


def gradients_of(step, specs):
    rng = numpy.random.default_rng(step)
    return [rng.standard_normal(each.shape).astype(each.dtype) for each in specs]


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_pushes_of_one_client_are_steps_of_the_optimizer(make_optimizer, dtype):
    """Bit for bit those that the same optimizer makes on variables of its own process."""
    specs = [spec(number, shape, dtype) for number, shape in enumerate([(40_000,), (3, 4), (), (7,)])]
    own = [mpidist.Variable(value, name=each.name) for value, each in zip(gradients_of(99, specs), specs, strict=True)]
    local = make_optimizer()
    local.exclude_from_weight_decay(var_names=["^v1"])

    def job(client):
        for each, start in zip(specs, gradients_of(99, specs), strict=True):
            client.create(each, 0, start)
        remote = make_optimizer()
        remote.exclude_from_weight_decay(var_names=["^v1"])
        optimizer = client.register_optimizer(remote)
        for step in range(5):
            client.push(optimizer, list(zip([each.key for each in specs], gradients_of(step, specs), strict=True)))
        return [client.value(each.key).copy() for each in specs], client.optimizer_state(optimizer)

    ((values, state),), _ = run(1, job)
    for step in range(5):
        local.apply_gradients(list(zip(gradients_of(step, specs), own, strict=True)))
    for got, variable in zip(values, own, strict=True):
        numpy.testing.assert_array_equal(got, variable.value)
    expected = local.state()
    assert state["iterations"] == expected["iterations"] == 5
    for number, each in enumerate(specs):
        for slot in local.slot_names:
            numpy.testing.assert_array_equal(state[f"{each.key[0]}/0/{slot}"], expected[f"{number}/{slot}"])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_many_small_gradients_of_any_dtype_and_order_arrive_where_they_belong(dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    specs = [spec(number, (2, 3), dtype) for number in range(12)]
    like = [numpy.arange(6.0).reshape(2, 3) + number for number in range(12)]
    turned = [numpy.asfortranarray(each).astype(dtype) for each in like]
    cut = [numpy.repeat(each, 2, axis=1)[:, ::2].astype(specs[0].dtype) for each in like]
    plain = [each.astype(dtype) for each in like]

    def job(client):
        make(client, specs)
        optimizer = client.register_optimizer(SGD(1.0))
        for gradients in (plain, turned, cut, like, [plain[0], *turned[1:5], *like[5:]]):
            client.push(optimizer, list(zip([each.key for each in specs], gradients, strict=True)))
        for each, gradient in zip(specs, like, strict=True):
            numpy.testing.assert_array_equal(client.value(each.key).astype(float), -5 * gradient)

    run(1, job)


def test_rows_are_updated_as_by_the_optimizer_itself():
    table, plain = spec(0, (6, 2), "float32"), spec(1, (3,), "float32")
    start = numpy.arange(12, dtype="float32").reshape(6, 2)
    steps = [([1, 4, 1], numpy.ones((3, 2), "f4")), ([0], numpy.full((1, 2), 3, "f4"))]
    own, other = mpidist.Variable(start), mpidist.Variable(numpy.zeros(3, "f4"))
    local = Adagrad(0.5)

    def pairs_of(rows):
        indices, values = rows
        return mpidist.IndexedSlices(values, numpy.array(indices), (6, 2)), numpy.ones(3, "f4")

    def job(client):
        client.create(table, 0, start)
        client.create(plain, 0, numpy.zeros(3))
        optimizer = client.register_optimizer(Adagrad(0.5))
        for rows in steps:
            client.push(optimizer, list(zip([table.key, plain.key], pairs_of(rows), strict=True)))
        numpy.testing.assert_array_equal(client.lookup(table.key, [[1], [4]]), client.read(table.key)[[[1], [4]]])
        return client.value(table.key).copy(), client.value(plain.key).copy()

    ((rows, whole),), _ = run(1, job)
    for each in steps:
        local.apply_gradients(list(zip(pairs_of(each), (own, other), strict=True)))
    numpy.testing.assert_array_equal(rows, own.value)
    numpy.testing.assert_array_equal(whole, other.value)


def test_a_variable_that_becomes_a_table_keeps_its_slots():
    table = spec(0, (4, 2), "float32")
    own, local = mpidist.Variable(numpy.zeros((4, 2), "f4")), SGD(1.0, momentum=0.5)
    dense, rows = numpy.ones((4, 2), "f4"), mpidist.IndexedSlices(numpy.ones((1, 2), "f4"), numpy.array([2]), (4, 2))

    def job(client):
        client.create(table, 0, numpy.zeros((4, 2)))
        optimizer = client.register_optimizer(SGD(1.0, momentum=0.5))
        for each in (dense, rows, dense):
            client.push(optimizer, [(table.key, each)])
        return client.value(table.key).copy()

    (got,), _ = run(1, job)
    for each in (dense, rows, dense):
        local.apply_gradients([(each, own)])
    numpy.testing.assert_array_equal(got, own.value)


@NEAR_AND_FAR
def test_state_goes_from_one_job_to_another(far):
    specs = [spec(number, (number + 1,), "float32") for number in range(3)]

    def trained(client, first, last, values=None, state=None):
        for number, each in enumerate(specs):
            client.create(each, number % 2, numpy.zeros(each.shape) if values is None else values[number])
        optimizer = client.register_optimizer(Adam(0.1))
        if state is not None:
            client.restore_optimizer(optimizer, state)
        for step in range(first, last):
            client.push(optimizer, list(zip([each.key for each in specs], gradients_of(step, specs), strict=True)))
        assert client.iterations(optimizer) == last
        return [client.value(each.key).copy() for each in specs], client.optimizer_state(optimizer)

    ((straight, _),), _ = run(1, lambda client: trained(client, 0, 6), 2, far=far)
    ((half, state),), _ = run(1, lambda client: trained(client, 0, 3), 2, far=far)
    ((resumed, _),), _ = run(1, lambda client: trained(client, 3, 6, half, state), 2, far=far)
    for got, expected in zip(resumed, straight, strict=True):
        numpy.testing.assert_array_equal(got, expected)


def test_a_push_may_have_its_own_scale_and_takes_the_rate_that_holds():
    def job(client):
        client.create(spec(0, (2,)), 0, numpy.zeros(2))
        optimizer = client.register_optimizer(SGD(1.0))
        client.push(optimizer, [((0, 0), numpy.ones(2))], scale=0.5)
        assert client.value((0, 0)).tolist() == [-0.5, -0.5]
        client.set_learning_rate(optimizer, 2)
        assert client.optimizer_state(optimizer)["learning_rate"] == 2
        client.set_learning_rate(optimizer, mpidist.optimizers.schedules.ExponentialDecay(3.0, 1, 1.0))
        client.push(optimizer, [((0, 0), numpy.ones(2))])
        assert client.value((0, 0)).tolist() == [-3.5, -3.5]

    run(1, job)


@NEAR_AND_FAR
def test_an_optimizer_that_servers_have_not_met_is_a_key_error(far):
    def job(client):
        with pytest.raises(KeyError, match="no optimizer 0"):
            client.iterations(0)
        with pytest.raises(KeyError, match="no optimizer 0"):
            client.optimizer_state(0)
        assert client.iterations(client.register_optimizer(SGD(1.0))) == 0

    run(1, job, far=far)


# -- 16 bits on the way ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("far", [False, True])
def test_what_16_bits_lose_is_added_to_the_next_gradient(far):
    gradient = numpy.array([1.0, 1.0 + 2**-13, 1 / 3, 1e-9], "float32")
    steps = 64

    def job(client):
        client.create(spec(0, (4,), "float32"), 0, numpy.zeros(4))
        optimizer = client.register_optimizer(SGD(1.0))
        for _ in range(steps):
            client.push(optimizer, [((0, 0), gradient)])
        return client.value((0, 0)).copy()

    (got,), _ = run(1, job, push_dtype="float16", far=far)
    # what is still owed is less than one rounding of one gradient
    numpy.testing.assert_array_less(numpy.abs(got + steps * gradient.astype(float)), 2.0**-11)
    (exact,), _ = run(1, job, far=far)
    assert not numpy.array_equal(got, exact)


@pytest.mark.parametrize("far", [False, True])
def test_what_16_bits_lose_is_in_the_unit_of_the_next_gradient(far):
    """A dynamic loss scale, or a norm that is clipped, gives each push a scale of its own."""
    gradient = numpy.array([1.0, 1.0 + 2**-13, 1 / 3], "float32")
    scales = [1024, 1024, 1024, 1, 1, 512, 2, 3]

    def job(client):
        client.create(spec(0, (3,), "float32"), 0, numpy.zeros(3))
        optimizer = client.register_optimizer(SGD(1.0))
        for scale in scales:
            client.push(optimizer, [((0, 0), gradient * numpy.float32(scale))], 1 / scale)
        client.push(optimizer, [((0, 0), gradient)], 0.0)  # counts for nothing, and takes nothing away
        client.push(optimizer, [((0, 0), gradient)])
        return client.value((0, 0)).copy()

    (got,), _ = run(1, job, push_dtype="float16", far=far)
    steps = len(scales) + 1
    numpy.testing.assert_array_less(numpy.abs(got + steps * gradient.astype(float)), 2.0**-11)


def test_a_gradient_beyond_the_range_of_16_bits_arrives_in_several_steps():
    def job(client):
        client.create(spec(0, (1,), "float32"), 0, numpy.zeros(1))
        optimizer = client.register_optimizer(SGD(1.0))
        for gradient in (100_000.0, 0.0):
            client.push(optimizer, [((0, 0), numpy.full(1, gradient, "float32"))])
        return float(client.value((0, 0))[0])

    (got,), _ = run(1, job, push_dtype="float16")
    assert got == pytest.approx(-100_000, abs=32)


# -- policies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", ["value", "lookup"])
@pytest.mark.parametrize("lists", ["optimizers", "variables"])
@NEAR_AND_FAR
def test_every_gradient_of_a_reading_that_is_late_is_dropped(far, lists, reads):
    """One reading, and then a push by each of two optimizers, or by one for each of two losses."""
    has_read, is_ahead = threading.Event(), threading.Event()

    def read(client):
        for key in ((0, 0), (1, 0)):
            if reads == "value":
                client.value(key)
            else:
                client.lookup(key, [0])

    def work(client):
        make(client, [spec(0, (1,)), spec(1, (1,))])
        both = [client.register_optimizer(SGD(1.0), number) for number in (0, 1)]
        optimizers = both if lists == "optimizers" else both[:1] * 2
        read(client)
        if client.number:
            has_read.set()
            assert is_ahead.wait(10)
        else:
            assert has_read.wait(10)
        for _ in range(1 + (client.number == 1)):
            for number, optimizer in enumerate(optimizers):
                client.push(optimizer, [((number, 0), numpy.full(1, 10.0**client.number))])
            client.flush()
            is_ahead.set()
            if client.number:
                read(client)  # the second time it is in time
                client.refresh()
                read(client)
        client.flush()

    _, (server,) = run(2, work, 1, BackupWorkers(1), far=far)
    assert server.consistency.dropped == 2
    assert [float(server.store.read((number, 0))[0]) for number in (0, 1)] == [-11.0, -11.0]


def test_a_scheduled_function_that_reads_nothing_pushes_gradients_that_are_in_time():
    """The chief may have given it the values."""
    turns = [threading.Event() for _ in range(5)]

    def work(client):
        make(client, [spec(0, (1,))])
        optimizer = client.register_optimizer(SGD(1.0))
        client.value((0, 0))
        for turn in range(client.number, 4, 2):
            assert not turn or turns[turn].wait(10)
            client.begin_function()
            for _ in range(1 if client.number else 5):
                client.push(optimizer, [((0, 0), numpy.ones(1))])
            client.flush()
            turns[turn + 1].set()

    _, (server,) = run(2, work, 1, BackupWorkers(1))
    assert (server.consistency.dropped, float(server.store.read((0, 0))[0])) == (0, -12.0)


@NEAR_AND_FAR
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("servers", [1, 2])
def test_no_worker_is_further_ahead_than_the_bound(far, staleness, servers):
    steps, workers = 12, 3
    finished = [0] * workers
    lock = threading.Lock()

    def job(client):
        chance = random.Random(client.number)
        make(client, [spec(0, (2,)), spec(1)], servers)
        optimizer = client.register_optimizer(SGD(1.0))
        ahead = 0
        for step in range(steps):
            client.refresh()
            client.value((1, 0))
            with lock:
                ahead = max(ahead, step - min(finished))
            time.sleep(chance.random() * 0.002 * client.number)
            with lock:
                finished[client.number] = step + 1
            client.push(optimizer, [((0, 0), numpy.ones(2)), ((1, 0), numpy.ones(()))])
        return ahead

    results, served = run(workers, job, servers, StaleSynchronous(staleness), far=far)
    assert max(results) <= staleness
    assert value(served, (1, 0)) == -steps * workers


@NEAR_AND_FAR
def test_who_has_no_work_holds_nobody_back(far):
    def job(client):
        make(client, [spec(0)])
        optimizer = client.register_optimizer(SGD(1.0))
        if client.number == 1:
            client.idle()
            seen = 0.0
            while seen > -8:  # until the other one has done all, which it can only if nobody waits for this one
                seen = float(client.read((0, 0)))
            client.push(optimizer, [((0, 0), numpy.ones(()))])
            return
        for _ in range(8):
            client.refresh()
            client.value((0, 0))
            client.push(optimizer, [((0, 0), numpy.ones(()))])

    _, served = run(2, job, 1, StaleSynchronous(0), far=far)
    assert value(served, (0, 0)) == -9


class _Recorded(BackupWorkers):
    """Notes in which order gradients come, and who has no more."""

    events: list[tuple[str, int, int]]

    def start(self, clients):
        policy = super().start(clients)
        policy.__class__, policy.events = _Recorded, []
        return policy

    def arrived(self, push):
        self.events.append(("push", push.client, push.iteration))
        return super().arrived(push)

    def set_active(self, client, is_active):
        self.events.append(("active" if is_active else "ended", client, 0))
        super().set_active(client, is_active)


def first_gradients(events, workers, needed):
    """Return what steps the first `needed` gradients of each make: clients by step, and how many came too late."""
    active, waiting, steps, late = set(range(workers)), [], [], 0
    for what, client, iteration in events:
        if what == "ended":
            active.discard(client)
        elif what == "push" and iteration < len(steps):
            late += 1
        elif what == "push":
            waiting.append(client)
        if waiting and len(waiting) >= min(needed, max(1, len(active))):
            steps.append(waiting)
            waiting = []
    assert not waiting
    return steps, late


@NEAR_AND_FAR
@pytest.mark.parametrize(("workers", "needed", "servers"), [(3, 2, 1), (4, 2, 2), (3, 3, 2), (4, 1, 1)])
def test_exactly_the_first_gradients_of_every_step_count_once(far, workers, needed, servers):
    least = 8

    def job(client):
        make(client, [spec(0, (2,)), spec(1)], servers)
        optimizer = client.register_optimizer(SGD(1.0))
        one = float(needed * DIGIT**client.number)  # of which the mean of so many keeps one in its own digit
        delays = random.Random(f"{client.number} {workers} {needed}")
        pushes = 0
        while client.iterations(optimizer) < least or pushes < 2:
            client.refresh()
            client.value((0, 0))
            time.sleep(delays.choice([0, 0, 1e-3, 3e-3]))
            client.push(optimizer, [((0, 0), numpy.full(2, one)), ((1, 0), numpy.full((), one))])
            pushes += 1
        client.flush()
        return pushes

    pushes, served = run(workers, job, servers, _Recorded(needed), far=far)
    for number, server in enumerate(served):
        policy = server.consistency
        came = [client for what, client, _ in policy.events if what == "push"]
        assert [came.count(client) for client in range(workers)] == pushes  # none is lost, none comes twice
        steps, late = first_gradients(policy.events, workers, needed)
        before_any_ended = [each[0] for each in policy.events].index("ended")
        whole, _ = first_gradients(
            [*policy.events[:before_any_ended], *[("ended", n, 0) for n in range(workers)]], workers, needed
        )
        assert all(len({*clients}) == needed for clients in whole[:-1])  # of different clients each
        expected = -sum(needed * DIGIT**client / len(clients) for clients in steps for client in clients)
        for key in [(0, 0), (1, 0)][number::servers]:
            assert set(numpy.ravel(server.store.read(key)).tolist()) == {expected}
        assert policy.dropped == late
        assert server.store.optimizers[0].optimizer.iterations == len(steps)
    assert max(server.store.optimizers[0].optimizer.iterations for server in served) >= least


def test_the_mean_of_the_first_gradients_is_applied():
    def job(client):
        make(client, [spec(0, (2,)), spec(1, (3, 1))])
        optimizer = client.register_optimizer(SGD(1.0))
        client.value((0, 0))
        rows = mpidist.IndexedSlices(numpy.full((1, 1), 2.0 * client.number), numpy.array([client.number]), (3, 1))
        client.push(optimizer, [((0, 0), numpy.full(2, 1.0 + client.number)), ((1, 0), rows)])
        return client.value((0, 0)).tolist(), client.value((1, 0)).tolist()

    results, _ = run(3, job, 1, BackupWorkers(3))
    assert results == [([-2.0, -2.0], [[0.0], [-2.0 / 3], [-4.0 / 3]])] * 3


@pytest.mark.parametrize("push_dtype", [None, "float16"])
def test_each_of_the_first_gradients_has_its_own_scale_in_their_mean(push_dtype):
    values, scales = [10.0, 0.5, 4.0], [0.1, 1.0, 0.0]  # two of norm 1 and 0.5, and one that is nothing

    def job(client):
        make(client, [spec(0, (2,)), spec(1, (3, 1))])
        optimizer, own = client.register_optimizer(SGD(1.0)), values[client.number]
        client.value((0, 0))
        rows = mpidist.IndexedSlices(numpy.full((1, 1), own), numpy.array([client.number // 2]), (3, 1))
        client.push(optimizer, [((0, 0), numpy.full(2, own)), ((1, 0), rows)], scales[client.number])
        return client.value((0, 0)), client.value((1, 0))[:, 0]

    results, _ = run(3, job, 1, BackupWorkers(3), push_dtype)
    for whole, rows in results:
        numpy.testing.assert_allclose(whole, [-1.5 / 3] * 2, rtol=1e-3)
        numpy.testing.assert_allclose(rows, [-1.5 / 3, 0, 0], rtol=1e-3)


def test_a_mean_of_16_bits_keeps_the_loss_scale():
    def job(client):
        make(client, [spec(0, (2,))])
        optimizer = client.register_optimizer(SGD(1.0))
        client.value((0, 0))
        # 1 and 0.5 times 2**-30, which float16 does not have
        client.push(optimizer, [((0, 0), numpy.ones(2))], 2.0 ** -(30 + client.number))
        return client.value((0, 0)).tolist()

    assert run(2, job, 1, BackupWorkers(2), "float16")[0] == [[-0.75 * 2.0**-30] * 2] * 2


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@NEAR_AND_FAR
def test_an_error_of_a_server_comes_back_and_the_server_goes_on(far):
    def job(client):
        make(client, [spec(0, (2, 2))])
        optimizer = client.register_optimizer(SGD(1.0))
        with pytest.raises(IndexError, match=r"ps 0 \(rank 2.*, lookup: row numbers from 0 to 5"):
            client.lookup((0, 0), [0, 5])
        bad = mpidist.IndexedSlices(numpy.ones((1, 2)), numpy.array([7]))
        client.push(optimizer, [((0, 0), bad)])
        with pytest.raises(IndexError, match="push 1: row numbers from 7 to 7"):
            client.flush()
        client.push(9, [((0, 0), numpy.ones((2, 2)))])
        with pytest.raises((ServerError, KeyError), match="push 2"):
            client.value((0, 0))
        client.push(optimizer, [((0, 0), numpy.ones((2, 2)))])
        client.flush()

    _, served = run(2, job, far=far)
    assert value(served, (0, 0)).tolist() == [[-2.0, -2.0]] * 2


def test_what_is_wrong_on_sight_is_refused_before_anything_is_sent():
    def job(client):
        make(client, [spec(0, (2,)), spec(1, (3,))], 2)
        optimizer = client.register_optimizer(SGD(1.0))
        with pytest.raises(ValueError, match=r"shape \(2,\) was pushed for variable 'v1'"):
            client.push(optimizer, [((0, 0), numpy.ones(2)), ((1, 0), numpy.ones(2))])
        with pytest.raises(ValueError, match="two gradients"):
            client.push(optimizer, [((0, 0), numpy.ones(2)), ((0, 0), numpy.ones(2))])
        with pytest.raises(ValueError, match=r"shape \(\) was assigned"):
            client.assign((0, 0), 1.0)
        with pytest.raises(KeyError, match="no variable"):
            client.value((5, 0))
        assert client.iterations(optimizer) == 0

    _, served = run(1, job, 2)
    assert [server.store.version((number, 0)) for number, server in enumerate(served)] == [0, 0]


def test_clients_must_create_the_same_variables():
    def job(client):
        each = spec(0, (2,) if client.is_chief else (3,))
        if client.is_chief:
            client.create(each, 0, numpy.zeros(2))
            return
        with pytest.raises(ValueError, match=r"of shape \(2,\).*client 1 creates.*of shape \(3,\).*same order"):
            client.create(each, 0)

    run(2, job)


def test_a_client_waits_for_the_chief_to_create():
    order = []

    def job(client):
        if client.is_chief:
            time.sleep(0.002)
            order.append("made")
            client.create(spec(0), 0, 3.0)
        else:
            client.create(spec(0), 0)
            order.append("known")
        return float(client.value((0, 0)))

    results, _ = run(2, job)
    assert (results, order[0]) == ([3.0, 3.0], "made")


@NEAR_AND_FAR
@pytest.mark.parametrize("consistency", [StaleSynchronous(0), BackupWorkers(2)])
def test_a_server_counts_the_steps_of_variables_of_others_too(far, consistency):
    """Or a schedule, and Adam, would go by a part of the steps."""
    clients = 2 if consistency.gathers else 1

    def job(client):
        make(client, [spec(0), spec(1)], 2)
        optimizer = client.register_optimizer(SGD(lambda step: 2.0**-step))
        for step in range(6):
            client.refresh()
            client.value((step % 2, 0))
            client.push(optimizer, [((step % 2, 0), numpy.ones(()))])
        client.flush()
        return client.iterations(optimizer)

    results, served = run(clients, job, 2, consistency, far=far)
    assert results == [6] * clients
    assert [server.store.optimizers[0].optimizer.iterations for server in served] == [6, 6]
    assert value(served, (0, 0)) == -(1 + 1 / 4 + 1 / 16)
    assert value(served, (1, 0)) == -(1 / 2 + 1 / 8 + 1 / 32)


@NEAR_AND_FAR
@pytest.mark.parametrize("servers", [1, 2])
def test_clients_that_push_variables_of_different_servers_do_not_wait_for_each_other_for_ever(servers, far):
    def job(client):
        make(client, [spec(0), spec(1)], servers)
        optimizer = client.register_optimizer(SGD(1.0))
        for step in range(20):
            key = ((step + client.number) % 2, 0)
            client.refresh()
            client.value(key)
            client.push(optimizer, [(key, numpy.ones(()))])
        client.flush()

    _, served = run(2, job, servers, BackupWorkers(2), far=far, timeout_seconds=10)
    (steps,) = {server.store.optimizers[0].optimizer.iterations for server in served}
    assert value(served, (0, 0)) + value(served, (1, 0)) == -steps


@NEAR_AND_FAR
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_lists_that_are_alike_on_one_of_several_servers_are_gathered_as_on_one_server(servers, far):
    """A list of both variables, and one of the first alone, are two steps on all servers."""

    def job(client):
        make(client, [spec(0), spec(1), spec(2)], servers)
        optimizer = client.register_optimizer(SGD(1.0))
        for _ in range(10):
            client.refresh()
            client.value((0, 0))
            numbers = [1, 0] if client.number == 0 else [0]
            client.push(optimizer, [((number, 0), numpy.full((), 1.0 + client.number)) for number in numbers])
        client.flush()

    _, served = run(2, job, servers, BackupWorkers(2), far=far, timeout_seconds=10)
    assert [value(served, (number, 0)) for number in range(3)] == [-10 * (1.0 + 2.0), -10.0, 0.0]
    assert [server.store.optimizers[0].optimizer.iterations for server in served] == [20] * servers


@NEAR_AND_FAR
def test_who_waits_in_vain_for_the_gradients_of_others_is_told_what_they_are(far):
    is_over = threading.Event()

    def job(client):
        make(client, [spec(0)])
        optimizer = client.register_optimizer(SGD(1.0))
        if client.number:
            assert is_over.wait(30)
            return
        client.push(optimizer, [((0, 0), numpy.ones(()))])
        try:
            client.flush()
        finally:
            is_over.set()

    which = "waits for ps 0 .* to (apply what it pushed|answer 'flush')"
    others = "with the gradients of workers that push the same lists of variables in the same order: nothing came in"
    with pytest.raises(TransportTimeoutError, match=f"{which}, {others}"):
        run(2, job, 1, BackupWorkers(2), far=far, timeout_seconds=1)


@pytest.mark.parametrize("consistency", [None, StaleSynchronous(0), BackupWorkers(2)])
def test_a_client_that_fails_is_not_waited_for_by_the_others(consistency):
    def job(client):
        make(client, [spec(0)])
        if client.number == 1:
            raise LookupError("on purpose")
        optimizer = client.register_optimizer(SGD(1.0))
        while True:
            client.refresh()
            client.value((0, 0))
            client.push(optimizer, [((0, 0), numpy.ones(()))])

    with pytest.raises(LookupError, match="on purpose") as raised:
        run(2, job, 1, consistency)
    assert {type(error) for rank, error in raised.value.rank_errors.items() if rank != 1} == {RankFailedError}


def test_a_client_that_leaves_without_a_word_is_not_waited_for():
    def job(client):
        make(client, [spec(0)])
        client.flush()
        if client.number == 1:
            client.leave = lambda: None
            return
        optimizer = client.register_optimizer(SGD(1.0))
        for _ in range(5):
            client.refresh()
            client.value((0, 0))
            client.push(optimizer, [((0, 0), numpy.ones(()))])

    _, served = run(2, job, 1, StaleSynchronous(0))
    assert value(served, (0, 0)) == -5


@NEAR_AND_FAR
def test_answers_that_bring_errors_of_pushes_give_their_memory_back(far):
    """A server has memory for two answers to a client: it must get both back, however often a push has failed."""

    def job(client):
        make(client, [spec(0, (4, 2))])
        optimizer = client.register_optimizer(SGD(1.0))
        bad = mpidist.IndexedSlices(numpy.ones((1, 2)), numpy.array([7]))
        for number in range(1, 6):
            client.push(optimizer, [((0, 0), bad)])
            with pytest.raises(IndexError, match=f"push {number}: row numbers from 7 to 7"):
                client.lookup((0, 0), [1])
        return client.lookup((0, 0), [1]).tolist()

    results, _ = run(1, job, far=far, timeout_seconds=10)
    assert results == [[[0.0, 0.0]]]


@NEAR_AND_FAR
@pytest.mark.parametrize("clients", [1, 2])
def test_a_push_that_fails_is_a_step_that_was_made(far, clients):
    """Or nobody would come further than the one whose push failed, itself included."""

    def job(client):
        make(client, [spec(0, (2, 2))])
        optimizer = client.register_optimizer(SGD(1.0))
        bad = mpidist.IndexedSlices(numpy.ones((1, 2)), numpy.array([7]))
        client.value((0, 0))
        client.push(optimizer, [((0, 0), bad if client.is_chief else numpy.ones((2, 2)))])
        client.refresh()
        if client.is_chief:
            with pytest.raises(IndexError, match="push 1: row numbers from 7 to 7"):
                client.value((0, 0))
        client.refresh()
        client.value((0, 0))
        client.push(optimizer, [((0, 0), numpy.ones((2, 2)))])
        client.flush()

    _, served = run(clients, job, 1, StaleSynchronous(0), far=far, timeout_seconds=10)
    assert value(served, (0, 0)).tolist() == [[-(2.0 * clients - 1)] * 2] * 2


class _Fails(SGD):
    """Fails at gradients that begin with 13, when it has written half of the variable."""

    def update_slice(self, parameters, gradient, slots, scratch, coefficients):
        if gradient[0] == 13:
            parameters[: len(parameters) // 2] = 1e9
            raise FloatingPointError("on purpose")
        super().update_slice(parameters, gradient, slots, scratch, coefficients)


def test_nothing_of_a_push_whose_rule_fails_is_ever_seen():
    def job(client):
        make(client, [spec(0, (4,)), spec(1, (4,))])
        optimizer = client.register_optimizer(_Fails(1.0))
        ones = numpy.ones(4)
        for number in (0, 1, 0, 1, 1):
            client.push(optimizer, [((number, 0), ones)])
        for again in range(3):
            client.push(optimizer, [((0, 0), 13 * ones)])
            with pytest.raises(ServerError, match="FloatingPointError: on purpose"):
                client.flush()
            client.push(optimizer, [((1, 0), ones)])  # into the copy that was given up, where that is free
            client.refresh()
            assert client.value((0, 0)).tolist() == [-2.0] * 4
            assert client.value((1, 0)).tolist() == [-4.0 - again] * 4

    run(1, job)


class _Halved(SGD):
    """Halves gradients, and says so in `update_slice` alone."""

    def update_slice(self, parameters, gradient, slots, scratch, coefficients):
        super().update_slice(parameters, gradient / 2, slots, scratch, coefficients)


@pytest.mark.parametrize(("momentum", "expected"), [(0.0, -1.0), (0.5, -1.25)])
def test_a_subclass_that_overrides_only_the_update_of_a_slice_is_asked(momentum, expected):
    def job(client):
        make(client, [spec(0, (4,))])
        optimizer = client.register_optimizer(_Halved(1.0, momentum=momentum))
        for _ in range(2):
            client.push(optimizer, [((0, 0), numpy.ones(4))])
        assert client.value((0, 0)).tolist() == [expected] * 4

    run(1, job)


class _FailsLate(_Fails):
    """Fails at gradients that begin with 13, when it has changed its slots."""

    def update_slice(self, parameters, gradient, slots, scratch, coefficients):
        if gradient[0] == 13:
            slots[0][0] = 1e9
        super().update_slice(parameters, gradient, slots, scratch, coefficients)


def test_slots_that_a_failing_rule_has_changed_are_of_no_use_until_they_are_restored():
    def job(client):
        make(client, [spec(0, (4,))])
        optimizer = client.register_optimizer(_FailsLate(1.0, momentum=0.5))
        ones = numpy.ones(4)
        client.push(optimizer, [((0, 0), ones)])
        state, before = client.optimizer_state(optimizer), client.read((0, 0))
        client.push(optimizer, [((0, 0), 13 * ones)])
        with pytest.raises(ServerError, match="FloatingPointError: on purpose"):
            client.flush()
        torn = "slots of _FailsLate are torn: its update ended with FloatingPointError: on purpose.*Restore"
        with pytest.raises(TornVariableError, match=torn):
            client.optimizer_state(optimizer)
        client.push(optimizer, [((0, 0), ones)])
        with pytest.raises(TornVariableError, match=torn):
            client.flush()
        client.refresh()
        for use in (client.value, client.read, lambda key: client.assign(key, ones, "assign_add")):
            with pytest.raises(TornVariableError, match=r"'v0' of shape \(4,\).* is torn: .*Set all of it"):
                use((0, 0))
        client.assign((0, 0), before)
        numpy.testing.assert_array_equal(client.value((0, 0)), before)
        client.restore_optimizer(optimizer, state)
        client.push(optimizer, [((0, 0), ones)])
        assert client.iterations(optimizer) == 2
        return client.read((0, 0)).tolist()

    results, _ = run(1, job, far=True)  # the server has one copy, which it writes in place
    assert results == [[-1.0 - (0.5 + 1.0)] * 4]


def test_slots_of_two_sides_are_as_they_were_when_a_rule_fails():
    def job(client):
        make(client, [spec(0, (4,))])
        optimizer = client.register_optimizer(_FailsLate(1.0, momentum=0.5))
        ones = numpy.ones(4)
        client.push(optimizer, [((0, 0), ones)])
        state = client.optimizer_state(optimizer)
        client.push(optimizer, [((0, 0), 13 * ones)])
        with pytest.raises(ServerError, match="FloatingPointError: on purpose"):
            client.flush()
        again = client.optimizer_state(optimizer)
        assert again["0/0/momentum"].tolist() == state["0/0/momentum"].tolist() == [-1.0] * 4
        client.push(optimizer, [((0, 0), ones)])
        return client.value((0, 0)).tolist()

    results, _ = run(1, job)
    assert results == [[-1.0 - (0.5 + 1.0)] * 4]


@NEAR_AND_FAR
def test_a_table_that_a_failing_rule_has_changed_is_torn_and_whole_variables_are_as_they_were(far):
    def job(client):
        make(client, [spec(0, (4,)), spec(1, (3, 2))])
        optimizer = client.register_optimizer(_Fails(1.0))
        rows = mpidist.IndexedSlices(numpy.full((1, 2), 13.0), numpy.array([1]))
        client.push(optimizer, [((0, 0), numpy.ones(4)), ((1, 0), rows)])
        with pytest.raises(ServerError, match="FloatingPointError: on purpose"):
            client.flush()
        client.refresh()
        for use in (client.value, client.read, lambda key: client.lookup(key, [0])):
            with pytest.raises(TornVariableError, match="'v[01]' .* is torn"):
                use((1, 0))
        with pytest.raises(TornVariableError, match="'v1' .* is torn"):
            client.scatter((1, 0), "scatter_add", [0], 1.0)
        if not far:
            assert client.value((0, 0)).tolist() == [0.0] * 4
        client.assign((0, 0), numpy.zeros(4))
        client.assign((1, 0), numpy.ones((3, 2)))
        client.push(optimizer, [((0, 0), numpy.ones(4)), ((1, 0), numpy.ones((3, 2)))])
        return client.value((0, 0)).tolist(), client.value((1, 0)).tolist()

    results, _ = run(1, job, far=far)
    assert results == [([-1.0] * 4, [[0.0] * 2] * 3)]


@NEAR_AND_FAR
def test_versions_are_those_of_the_snapshot_when_there_is_a_newer_layout(far):
    pulled, made = threading.Event(), threading.Event()

    def job(client):
        make(client, [spec(number, (3, 2)) for number in range(3)])
        optimizer = client.register_optimizer(SGD(1.0))
        ones, whole = numpy.ones((1, 2)), numpy.ones((3, 2))
        if client.number == 1:
            client.scatter((0, 0), "scatter_add", [1], ones)
            client.flush()
            pulled.wait(10)
            client.scatter((1, 0), "scatter_add", [1], ones)  # a table from now on: whole variables lie elsewhere
            client.push(optimizer, [((2, 0), whole)])
            client.flush()
            made.set()
            return
        for _ in range(3):
            client.push(optimizer, [((2, 0), whole)])
        client.refresh()
        assert client.value((2, 0)).tolist() == [[-3.0] * 2] * 3
        before = client.version((2, 0))
        pulled.set()
        made.wait(10)
        client.value((0, 0))  # a table, which is asked for: the new layout is met
        assert client.value((2, 0)).tolist() == [[-3.0] * 2] * 3
        assert client.version((2, 0)) == before == 3

    run(2, job, far=far)


# -- what is kept, and what is counted ---------------------------------------------------------------------------------


@NEAR_AND_FAR
def test_a_snapshot_outlives_the_first_reading_of_a_new_variable(far):
    def work(client):
        make(client, [spec(0, (3,)), spec(1, (3,))])
        client.lookup((1, 0), numpy.zeros(1000, int))  # a message with room for any that follow
        seen = client.value((0, 0))
        client.create(spec(2, (3,), "float16"), 0, numpy.ones(3))  # will lie before the others
        client.value((2, 0))
        return seen.copy()

    assert not run(1, work, far=far)[0][0].any()


@NEAR_AND_FAR
@pytest.mark.parametrize("consistency", [None, StaleSynchronous(0), BackupWorkers(1)], ids=repr)
def test_a_later_optimizer_may_be_the_first_that_is_used(far, consistency):
    def work(client):
        make(client, [spec(0)])
        client.register_optimizer(SGD(1.0), 1)
        for _ in range(3):
            client.value((0, 0))
            client.push(1, [((0, 0), numpy.ones(()))])
        return float(client.value((0, 0)))

    assert run(1, work, consistency=consistency, far=far)[0] == [-3.0]


@NEAR_AND_FAR
def test_lists_in_turn_on_two_servers_count_the_same_steps(far):
    def work(client):
        make(client, [spec(0), spec(1)], servers=2)
        client.register_optimizer(SGD(lambda step: 10.0**-step), 0)
        for step in range(4):
            client.push(0, [((step % 2, 0), numpy.ones(()))])
        return client.iterations(0), float(client.value((0, 0))), float(client.value((1, 0)))

    steps, even, odd = run(1, work, servers=2, far=far)[0][0]
    assert (steps, even, odd) == (4, pytest.approx(-1.01), pytest.approx(-0.101))


def test_means_of_gathered_gradients_take_the_memory_of_one():
    size, peaks = 1 << 17, []

    def work(client):
        make(client, [spec(0, (size,))])
        client.register_optimizer(SGD(1.0))
        for step in range(20):
            client.value((0, 0))
            client.push(0, [((0, 0), numpy.ones(size))])
            if client.is_chief and step in (3, 19):
                client.flush()
                peaks.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        run(2, work, consistency=BackupWorkers(2))
    finally:
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 4 * 8 * size


@NEAR_AND_FAR
def test_rows_too_large_for_float16_are_cut_off_as_whole_gradients_are(far):
    def work(client):
        make(client, [spec(0, (2, 1), "float32")])
        client.register_optimizer(SGD(1.0))
        rows = mpidist.IndexedSlices(numpy.full((1, 1), 1e5, "f4"), numpy.array([1]), (2, 1))
        client.push(0, [((0, 0), rows)])
        return client.value((0, 0)).tolist()

    assert run(1, work, push_dtype="float16", far=far)[0] == [[[0.0], [-65504.0]]]


@NEAR_AND_FAR
def test_what_is_infinite_is_not_cut_off(far):
    def work(client):
        make(client, [spec(0, (2, 1), "float32"), spec(1, (2, 1), "float32")])
        client.register_optimizer(SGD(1.0))
        infinite = numpy.array([[numpy.inf], [1.0]], "f4")
        rows = mpidist.IndexedSlices(infinite, numpy.array([0, 1]), (2, 1))
        client.push(0, [((0, 0), infinite), ((1, 0), rows)])
        return client.value((0, 0)).tolist(), client.value((1, 0)).tolist()

    assert run(1, work, push_dtype="float16", far=far)[0] == [([[-numpy.inf], [-1.0]],) * 2]


@NEAR_AND_FAR
def test_rows_that_are_gathered_have_the_means_that_whole_gradients_have(far):
    def work(client):
        make(client, [spec(0, (2, 1), "float32"), spec(1, (2, 1), "float32")])
        client.register_optimizer(SGD(1.0))
        client.value((0, 0))
        whole = numpy.full((2, 1), 4e4, "f4")  # of which two are too many for float16
        rows = mpidist.IndexedSlices(whole[:1], numpy.array([1]), (2, 1))
        client.push(0, [((0, 0), whole), ((1, 0), rows)])
        return client.value((0, 0)).tolist(), client.value((1, 0)).tolist()

    found = run(2, work, consistency=BackupWorkers(2), push_dtype="float16", far=far)[0]
    assert found == [([[-4e4], [-4e4]], [[0.0], [-4e4]])] * 2


# -- where memory is short --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [2, 3, 5])
@pytest.mark.parametrize("way", [{}, {"consistency": StaleSynchronous(10**6)}], ids=["direct", "near"])
def test_nine_clients_train_on_where_there_is_no_memory_for_their_copies(copies, way, monkeypatch):
    """Nine clients may pin nine copies; there is memory for fewer."""
    reserve, said = Buffers._reserve_one, []

    def reserve_one(buffers):
        has_memory = [buffers._words[buffers._reserved + buffer] for buffer in range(buffers.count)]
        return sum(has_memory) < copies and reserve(buffers)

    monkeypatch.setattr(Buffers, "_reserve_one", reserve_one)
    monkeypatch.setattr(ControlChannel, "warn", lambda control, text: said.append(text))

    def job(client):
        each = spec(0, (1000,))
        client.create(each, 0, numpy.zeros(1000) if client.is_chief else None)
        number = client.register_optimizer(SGD(1.0))
        for step in range(10):
            seen = client.value(each.key)
            before = seen.copy()
            client.push(number, [(each.key, numpy.ones(1000))])
            numpy.testing.assert_array_equal(seen, before)  # held until the next reading
            if step % 2:  # with nothing held, one can push again
                del seen
                client.push(number, [(each.key, numpy.ones(1000))])
        seen = None
        client.flush()
        return client.iterations(number)

    _, (server,) = run(9, job, **way)
    assert not server.ledger.words[Ledger.SHORT]
    assert value([server], (0, 0)).tolist() == [-135.0] * 1000
    assert sum("no memory for 11 copies of its variables of 8000 bytes" in text for text in said) == 1, said


def test_initial_values_leave_no_memory_behind():
    def job(client):
        each = spec(0, (1 << 18,))
        client.create(each, 0, numpy.zeros(1 << 18) if client.is_chief else None)
        return [area.array.nbytes for end in client.servers for area in end._areas if area is not None]

    (areas, _), _ = run(2, job)
    assert sum(areas) <= 1 << 20
