"""A client on its server's node applies gradients itself: which it does, and that it is as if the server had."""

from __future__ import annotations

import os
import threading
import tracemalloc
import weakref

import numpy
import pytest

from mpidist.errors import TransportTimeoutError
from mpidist.optimizers import LARS, SGD, Adam, RMSprop
from mpidist.parameter_server.consistency import BackupWorkers, StaleSynchronous
from mpidist.parameter_server.copies import OwnSlotCopies
from mpidist.parameter_server.ledger import Ledger
from mpidist.runtime.control import ControlChannel
from tests.helpers.served import run, spec, value

KEY = (0, 0)


class Doubled(SGD):
    """A rule of somebody else: it may keep what it likes."""


def pushed(client, optimizer, count=5, length=4):
    """Push some gradients of one; return the value."""
    client.create(spec(0, (length,), "float32"), 0, numpy.zeros(length))
    number = client.register_optimizer(optimizer)
    for _ in range(count):
        client.push(number, [(KEY, numpy.ones(length, "float32"))])
    return client.value(KEY).tolist()


def test_no_push_is_a_message():
    (got,), (server,) = run(1, lambda client: pushed(client, SGD(0.5), 9))
    assert got == [-4.5] * 4
    assert (server.pushes, server.clients[0].arrived) == (9, 0)
    assert server.store.version(KEY) == 9
    assert server.store.optimizers[0].optimizer.iterations == 9


@pytest.mark.parametrize("elements", [1 << 14, (1 << 16) + 1, 1 << 17])
def test_no_gradient_of_the_user_is_kept(elements):
    def job(client):
        client.create(spec(0, (elements,), "float32"), 0, numpy.zeros(elements))
        number, alive = client.register_optimizer(SGD(0.5)), []
        for _ in range(5):
            gradient = numpy.ones(elements, "float32")
            alive.append(weakref.ref(gradient))
            client.push(number, [(KEY, gradient)])
            del gradient
        return set(client.value(KEY)), sum(each() is not None for each in alive)

    (got,), (server,) = run(1, job)
    assert got == ({-2.5}, 0)
    assert server.clients[0].arrived == 0


def test_a_rule_of_somebody_else_is_for_the_server_to_apply():
    _, (server,) = run(1, lambda client: pushed(client, Doubled(0.5)))
    assert (server.pushes, server.clients[0].arrived) == (5, 5)


@pytest.mark.parametrize("way", [{"consistency": StaleSynchronous(3)}, {"consistency": BackupWorkers(1)}])
@pytest.mark.parametrize("more", [{}, {"push_dtype": "float16"}, {"far": True}])
def test_policies_16_bits_and_other_nodes_are_served_by_messages(way, more):
    (got,), (server,) = run(1, lambda client: pushed(client, SGD(0.5)), **way, **more)
    assert got == [-2.5] * 4
    assert (server.pushes, server.clients[0].arrived) == (5, 5)


def test_rows_are_pushed_by_messages_and_whole_gradients_of_other_variables_are_not():
    from mpidist import IndexedSlices

    def job(client):
        for each in (spec(0, (4, 2)), spec(1)):
            client.create(each, 0, numpy.zeros(each.shape))
        number = client.register_optimizer(SGD(1.0))
        rows = IndexedSlices(numpy.ones((1, 2)), numpy.array([2]), (4, 2))
        for _ in range(3):
            client.push(number, [(KEY, rows)])
            client.push(number, [((1, 0), numpy.ones(()))])
        return client.lookup(KEY, [2, 0]).tolist(), float(client.value((1, 0)))

    (got,), (server,) = run(1, job)
    assert got == ([[-3.0, -3.0], [0.0, 0.0]], -3.0)
    assert server.pushes == 6
    assert server.clients[0].arrived < 6


def test_large_and_cut_gradients_are_those_that_were_given():
    length = 1 << 17  # more bytes than are packed

    def job(client):
        client.create(spec(0, (length,), "float32"), 0, numpy.zeros(length))
        number = client.register_optimizer(SGD(1.0))
        ramp = numpy.arange(length, dtype="float32")
        for gradient in (ramp, ramp, numpy.repeat(ramp, 2)[::2], ramp.astype("float64"), ramp[::-1]):
            client.push(number, [(KEY, gradient)])
        return client.value(KEY).tolist()

    (got,), _ = run(1, job)
    ramp = numpy.arange(length)
    assert got == (-(4 * ramp + ramp[::-1])).tolist()


def test_clients_here_and_elsewhere_change_the_same_variables():
    def job(client):
        client.create(spec(0, (3,)), 0, numpy.zeros(3) if client.is_chief else None)
        number = client.register_optimizer(SGD(1.0))
        for _ in range(50):
            client.push(number, [(KEY, numpy.full(3, -(100.0**client.number)))])
            if client.number % 2:
                client.assign(KEY, numpy.full(3, 1000.0**3), "assign_add")
        client.flush()
        return client.iterations(number)

    steps, (server,) = run(4, job, far=[False, True, False, True])
    expected = 50 * (1 + 100 + 100**2 + 100**3) + 2 * 50 * 1000.0**3
    assert value([server], KEY).tolist() == [expected] * 3
    assert (server.pushes, max(steps)) == (200, 200)


def test_a_rate_that_another_client_has_set_holds_from_the_next_push_on():
    def job(client):
        client.create(spec(0), 0, numpy.zeros(()) if client.is_chief else None)
        number = client.register_optimizer(SGD(1.0))
        gradient = [(KEY, numpy.ones(()))]
        if client.number:
            client.push(number, gradient)
            client.push(number, gradient)
            client.assign(KEY, 100.0, "assign_add")
            while client.optimizer_state(number)["learning_rate"] != 0.25:
                pass
            client.push(number, gradient)
            return None
        while client.read(KEY) != 98.0:
            pass
        client.set_learning_rate(number, 0.25)
        return None

    _, (server,) = run(2, job)
    assert float(value([server], KEY)) == 97.75
    assert server.clients[1].arrived == 0


def test_a_rate_that_depends_on_the_steps_sees_those_of_all():
    def job(client):
        client.create(spec(0), 0, numpy.zeros(()) if client.is_chief else None)
        number = client.register_optimizer(SGD(lambda step: 2.0**-step))
        for _ in range(5):
            client.push(number, [(KEY, numpy.full((), -1.0))])
        client.flush()

    _, (server,) = run(3, job)
    assert float(value([server], KEY)) == sum(2.0**-step for step in range(15))


@pytest.mark.parametrize("make", [SGD, Adam])
def test_a_rate_that_is_set_before_every_step_is_that_of_the_step(make):
    rates = [2.0**-step for step in range(6)]

    def job(client):
        client.create(spec(0), 0, numpy.zeros(()))
        number = client.register_optimizer(make(9.0))
        for rate in rates:
            client.set_learning_rate(number, rate)
            client.push(number, [(KEY, numpy.ones(()))])
        return float(client.value(KEY)), client.optimizer_state(number)["learning_rate"]

    (got,), _ = run(1, job)
    # a step of Adam with gradients that are all alike is the learning rate, but for epsilon, here beside 0.03
    assert got == (pytest.approx(-sum(rates), rel=1e-5), rates[-1])


def test_a_schedule_that_another_client_has_set_holds_from_the_next_push_on():
    def job(client):
        client.create(spec(0), 0, numpy.zeros(()) if client.is_chief else None)
        number = client.register_optimizer(SGD(1.0))
        for step in range(6):
            if client.number == step % 2:
                if step == 3:
                    client.set_learning_rate(number, lambda step: 2.0**-step)
                client.push(number, [(KEY, numpy.ones(()))])
            while client.iterations(number) <= step:
                pass

    _, (server,) = run(2, job)
    assert float(value([server], KEY)) == -(3 + 2.0**-3 + 2.0**-4 + 2.0**-5)


def test_a_request_that_fails_after_it_has_laid_out_anew_loses_no_push():
    def job(client):
        client.create(spec(0), 0, numpy.zeros(()))
        number = client.register_optimizer(SGD(1.0))
        for _ in range(3):
            client.push(number, [(KEY, numpy.ones(()))])
        client.create(spec(1, (2,), "bool"), 0, numpy.zeros(2, "bool"))
        with pytest.raises(TypeError):
            client.assign((1, 0), numpy.ones(2, "bool"), "assign_sub")
        for _ in range(3):
            client.push(number, [(KEY, numpy.ones(()))])
        return float(client.value(KEY))

    (got,), (server,) = run(1, job)
    assert got == value([server], KEY) == -6.0


def test_an_error_of_one_server_is_raised_before_another_has_applied_its_part():
    from mpidist import IndexedSlices

    def job(client):
        for number, each in enumerate((spec(0), spec(1), spec(2, (3, 1)))):
            client.create(each, number and 1, numpy.zeros(each.shape))
        optimizer = client.register_optimizer(SGD(1.0))
        both = [((0, 0), numpy.ones(())), ((1, 0), numpy.ones(()))]
        for _ in range(3):
            client.push(optimizer, both)
        client.push(optimizer, [((2, 0), IndexedSlices(numpy.ones((1, 1)), numpy.array([9])))])
        with pytest.raises(IndexError):
            client.push(optimizer, both)
        client.push(optimizer, both)
        return [float(client.value(key)) for key in ((0, 0), (1, 0))]

    (got,), _ = run(1, job, servers=2)
    assert got == [-4.0, -4.0]


@pytest.mark.parametrize("where", ["acquire", "release"])
def test_an_interrupt_does_not_keep_the_lock(monkeypatch, where):
    def job(client):
        pushed(client, SGD(1.0), 3)
        lock = client.servers[0]._direct._lock
        act = getattr(lock, where)

        def interrupted():
            if where == "acquire":
                act()
            monkeypatch.setattr(lock, where, act)
            raise KeyboardInterrupt

        monkeypatch.setattr(lock, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.push(0, [(KEY, numpy.ones(4, "float32"))])
        client.push(0, [(KEY, numpy.ones(4, "float32"))])
        return client.read(KEY).tolist()

    (got,), _ = run(1, job)
    assert got == [-4.0 if where == "acquire" else -5.0] * 4


def test_who_waits_too_long_for_the_lock_names_who_has_it():
    def job(client):
        client.create(spec(0, (4,), "float32"), 0, numpy.zeros(4) if client.is_chief else None)
        number = client.register_optimizer(SGD(1.0))
        gradient = [(KEY, numpy.ones(4, "float32"))]
        for _ in range(2):
            client.push(number, gradient)
        while client.iterations(number) < 4:
            pass
        if client.number == 0:
            client.servers[0]._direct._lock.acquire()
            while True:  # until the other one has failed, of which a look tells
                client.servers[0].look()
        while client.servers[0]._words[Ledger.HELD] != 1:
            pass
        client.push(number, gradient)

    with pytest.raises(TransportTimeoutError, match=r"change variables there, where rank 0 \(.*\) has the write lock"):
        run(2, job, timeout_seconds=1)


def test_what_went_by_message_is_applied_before():
    def job(client):
        client.create(spec(0), 0, numpy.full((), 10.0))
        slow, decaying = (client.register_optimizer(each) for each in (SGD(1.0, momentum=0.5), DECAYING))
        seen = []
        for _ in range(3):
            client.assign(KEY, 10.0)
            client.push(slow, [(KEY, numpy.ones(()))])
            client.push(decaying, [(KEY, numpy.zeros(()))])
            seen.append(float(client.value(KEY)))
        return seen

    (got,), _ = run(1, job)
    assert got == [9.0 / 2, 8.5 / 2, 8.25 / 2]  # the first gradient, then half of what is there


DECAYING = SGD(0.5, weight_decay=1.0)


def test_the_state_of_an_optimizer_that_was_restored_is_that_of_all():
    def job(client):
        pushed(client, SGD(0.5), 3)
        state = client.optimizer_state(0)
        client.restore_optimizer(0, {**state, "iterations": 40, "learning_rate": 2.0})
        client.push(0, [(KEY, numpy.ones(4, "float32"))])
        return client.value(KEY).tolist(), client.iterations(0)

    (got,), _ = run(1, job)
    assert got == ([-3.5] * 4, 41)


def test_a_server_that_cannot_lock_is_told_by_message(monkeypatch):
    def no_locks(self, *arguments):
        raise OSError("no locks here")

    monkeypatch.setattr("mpidist.runtime.node_lock.NodeLock.__init__", no_locks)
    (got,), (server,) = run(1, lambda client: pushed(client, SGD(0.5)))
    assert (got, server.clients[0].arrived) == ([-2.5] * 4, 5)


def test_reads_are_answered_while_the_holder_of_the_lock_is_stopped():
    """The holder does nothing, as a process that a debugger has stopped."""
    registered, stopped, read = (threading.Barrier(3) for _ in range(3))
    table = (1, 0)

    def job(client):
        for each in (spec(0, (4,), "float32"), spec(1, (3,))):
            client.create(each, 0, numpy.zeros(each.shape) if client.is_chief else None)
        number = client.register_optimizer(SGD(1.0))
        other = client.register_optimizer(Adam(1.0))
        registered.wait(20)  # a server takes the lock for this
        if client.number == 0:
            client.scatter(table, "scatter_add", [1], [5.0])
            for _ in range(3):
                client.push(number, [(KEY, numpy.ones(4, "float32"))])
            client.push(other, [(table, numpy.zeros(3))])
            client.flush()
            client.servers[0]._direct._lock.acquire()
            stopped.wait(20)
            read.wait(20)
            client.servers[0]._direct._lock.release()
            return None
        stopped.wait(20)
        found = [client.value(KEY).tolist(), client.read(KEY).tolist(), client.lookup(table, [1]).tolist()]
        found += [client.read(table).tolist(), client.iterations(number)]
        found += [client.optimizer_state(other)["iterations"], client.version(KEY)]
        client.flush()
        read.wait(20)
        client.assign(KEY, numpy.ones(4))
        return found

    (_, near, far), _ = run(3, job, far=[False, False, True])
    assert near == far == [[-3.0] * 4, [-3.0] * 4, [5.0], [0.0, 5.0, 0.0], 3, 1, 3]


@pytest.mark.parametrize("far", [False, True])
def test_who_waits_for_a_stopped_holder_says_so(far, monkeypatch):
    stopped, warned, said = threading.Event(), threading.Event(), []

    def warn(control, text):
        said.append(text)
        if "ps 0 waits for the write lock" in text:
            warned.set()

    monkeypatch.setenv("MPIDIST_WARN_SECONDS", "0.05")
    monkeypatch.setattr(ControlChannel, "warn", warn)

    def job(client):
        client.create(spec(0, (4,), "float32"), 0, numpy.zeros(4) if client.is_chief else None)
        client.value(KEY)
        if client.number == 0:
            client.servers[0]._direct._lock.acquire()
            stopped.set()
            assert warned.wait(20)
            client.servers[0]._direct._lock.release()
        else:
            assert stopped.wait(20)
            client.assign(KEY, numpy.ones(4))
        return client.read(KEY).tolist() if client.number else None

    (_, got), _ = run(2, job, far=[False, far])
    assert got == [1.0] * 4
    assert any(
        "ps 0 waits for the write lock, where rank 0 (here) has the write lock, for " in text for text in said
    ), said


def test_ever_new_lists_of_gradients_are_packed_in_the_memory_of_the_largest():
    count, size = 8, 1 << 15

    def job(client):
        for each in range(count):
            client.create(spec(each, (size,), "float32"), 0, numpy.zeros(size))
        number = client.register_optimizer(SGD(1.0))
        gradient, held = numpy.ones(size, "float32"), []
        for chosen in range(3, 1 << count):  # ever another list
            pairs = [((each, 0), gradient) for each in range(count) if chosen >> each & 1]
            if len(pairs) > 1:
                client.push(number, pairs)
                if chosen in (40, 255):
                    held.append(tracemalloc.get_traced_memory()[0])
        return [float(client.value((each, 0))[0]) for each in range(count)], held

    tracemalloc.start()
    try:
        ((values, (early, late)),), (server,) = run(1, job)
    finally:
        tracemalloc.stop()
    assert server.clients[0].arrived == 0
    assert values == [-127.0] * count  # each in half of the lists but those of one variable
    assert late - early < 8 * count * size * 4  # what the lists are, and not the gradients of 200 of them


def pushed_by_nine(client, arrived, make, size):
    """Push a few times; return the bytes of the memory that all clients and the server share."""
    client.create(spec(0, (size,), "float32"), 0, numpy.zeros(size) if client.is_chief else None)
    number = client.register_optimizer(make())
    held = None
    for _ in range(4):
        held = client.value(KEY)
        client.push(number, [(KEY, numpy.ones(size, "float32"))])
    client.flush()
    arrived.wait(30)
    (end,), (planned,) = client.servers, client.plans.lists
    slots, _ = end.ask("rule", number=number, plan=planned.parts[0][1].number)
    paths = [end.ask("layout", maps=False)[0]["path"], *([slots["slots"][0]] if slots["slots"] else [])]
    used = [os.stat(path).st_blocks * 512 for path in paths]
    arrived.wait(30)
    assert held is not None
    return used, client.iterations(number)


@pytest.mark.parametrize(("make", "slots"), [(lambda: SGD(0.1), 0), (lambda: SGD(0.1, momentum=0.5), 1), (Adam, 2)])
def test_nine_clients_take_the_memory_that_the_documentation_says(make, slots):
    size, words = 1 << 16, 1 << 13
    arrived = threading.Barrier(9)
    found, (server,) = run(9, lambda client: pushed_by_nine(client, arrived, make, size))
    nbytes = 4 * size
    for (variables, *of_slots), steps in found:
        assert (2 + 9) * nbytes <= variables <= (2 + 9) * nbytes + words
        assert len(of_slots) == (slots > 0)
        assert all(2 * slots * nbytes <= used <= 2 * slots * nbytes + words for used in of_slots)
        assert steps == 36
    assert all(client.arrived == 0 for client in server.clients)


@pytest.mark.parametrize("make", [lambda: SGD(0.1, momentum=0.9), lambda: Adam(0.01), lambda: LARS(0.1), RMSprop])
@pytest.mark.parametrize("lists", [[[0, 1, 2]], [[0], [1, 2]], [[2, 0], [1], [0, 1, 2]]])
def test_every_rule_makes_the_same_bits_as_the_server(make, lists):
    shapes = [(3,), (2, 2), (1,)]

    def job(client):
        for each, shape in enumerate(shapes):
            client.create(spec(each, shape, "float32"), 0, numpy.full(shape, 1.0))
        number = client.register_optimizer(make())
        for step in range(12):
            some = lists[step % len(lists)]
            client.push(number, [((each, 0), numpy.full(shapes[each], step - 5.5, "float32")) for each in some])
        slots = {name: each for name, each in client.optimizer_state(number).items() if name.count("/") == 2}
        return [client.value((each, 0)).tolist() for each in range(3)], {k: v.tolist() for k, v in slots.items()}

    (near,), (server,) = run(1, job)
    assert server.clients[0].arrived == 0
    (far,), (server,) = run(1, job, far=True)
    assert server.clients[0].arrived == 12
    assert near == far


def test_slots_follow_their_variable_to_another_layout_and_into_a_table():
    def job(client):
        client.create(spec(0, (2,)), 0, numpy.zeros(2))
        number = client.register_optimizer(SGD(1.0, momentum=0.5))
        client.push(number, [(KEY, numpy.ones(2))])
        client.create(spec(1, (2,)), 0, numpy.zeros(2))
        client.push(number, [(KEY, numpy.ones(2)), ((1, 0), numpy.ones(2))])
        beside = client.value(KEY).tolist(), client.value((1, 0)).tolist()
        client.scatter(KEY, "scatter_add", [0], [0.0])  # a table from now on
        client.push(number, [(KEY, numpy.ones(2)), ((1, 0), numpy.ones(2))])
        state = client.optimizer_state(number)
        return *beside, client.read(KEY).tolist(), client.read((1, 0)).tolist(), state["0/0/momentum"].tolist()

    (found,), _ = run(1, job)
    assert found == ([-2.5] * 2, [-1.0] * 2, [-4.25] * 2, [-2.5] * 2, [-1.75] * 2)


def test_without_room_for_slots_the_server_applies_what_it_gets_by_message(monkeypatch):
    monkeypatch.setattr(OwnSlotCopies, "_reserve", no_room)
    (got,), (server,) = run(1, lambda client: pushed(client, SGD(0.5, momentum=0.5)))
    assert got == [-0.5 * (5 + 4 * 0.5 + 3 * 0.25 + 2 * 0.125 + 0.0625)] * 4
    assert server.clients[0].arrived == 5


def test_slots_that_have_no_room_any_more_move_to_the_server(monkeypatch):
    def job(client):
        pushed(client, SGD(0.5, momentum=0.5), 2)
        client.create(spec(1, (4,), "float32"), 0, numpy.zeros(4))
        client.value((1, 0))  # a layout with both, in which the second has no slots yet
        client.push(0, [(KEY, numpy.ones(4, "float32"))])
        monkeypatch.setattr(OwnSlotCopies, "_reserve", no_room)
        client.push(0, [(KEY, numpy.ones(4, "float32")), ((1, 0), numpy.ones(4, "float32"))])
        client.push(0, [(KEY, numpy.ones(4, "float32"))])
        return client.value(KEY).tolist(), client.value((1, 0)).tolist(), client.iterations(0)

    (got,), (server,) = run(1, job)
    assert got == ([-0.5 * (5 + 4 * 0.5 + 3 * 0.25 + 2 * 0.125 + 0.0625)] * 4, [-0.5] * 4, 5)
    assert server.clients[0].arrived == 2


def no_room(slots, number, where):
    """Reserve memory as on a node that has none left."""
    if slots._file is not None:
        raise OSError("no room")
