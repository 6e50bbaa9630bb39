"""The policies by themselves: who may go on, and which gradients are applied."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.parameter_server.consistency import UNLIMITED, Asynchronous, BackupWorkers, StaleSynchronous


@dataclass
class Push:
    client: int
    iteration: int = 0
    iterations: int = 0
    optimizer: int = 0
    plan: int = 0
    dropped: bool = False


def test_asynchronous_holds_nobody_back():
    policy = Asynchronous().start(range(3))
    policy.pushed(1)
    assert not policy.gathers
    assert policy.permitted(1) == UNLIMITED


@given(st.integers(0, 3), st.integers(1, 4), st.lists(st.integers(0, 3), max_size=60))
def test_nobody_is_permitted_to_be_further_ahead_than_the_bound(staleness, clients, wishes):
    policy = StaleSynchronous(staleness).start(range(clients))
    done = [0] * clients
    for client in (wish % clients for wish in wishes):
        if policy.permitted(client) >= done[client]:
            assert done[client] - min(done) <= staleness
            policy.pushed(client)
            done[client] += 1
        else:
            assert done[client] - min(done) > staleness
    slowest = done.index(min(done))
    assert policy.permitted(slowest) >= done[slowest]  # so there is always somebody who can go on


def test_who_has_left_or_has_no_work_is_not_waited_for():
    policy = StaleSynchronous(0).start(range(3))
    policy.pushed(0)
    assert policy.permitted(0) < 1
    policy.set_active(1, False)
    assert policy.permitted(0) < 1
    policy.set_active(2, False)
    assert policy.permitted(0) >= 1


def test_who_comes_back_counts_from_where_the_slowest_is():
    policy = StaleSynchronous(1).start(range(2))
    policy.set_active(1, False)
    for _ in range(5):
        policy.pushed(0)
    policy.set_active(1, True)
    assert policy.permitted(0) >= 5
    assert policy.permitted(1) >= 0
    policy.pushed(0)
    assert policy.permitted(0) >= 6
    policy.pushed(0)
    assert policy.permitted(0) < 7


def test_the_first_gradients_of_a_step_make_it_and_later_ones_are_dropped():
    policy = BackupWorkers(2).start(range(3))
    first, second, late = Push(2), Push(0), Push(1, iteration=0, iterations=1)
    assert policy.arrived(first) == []
    assert policy.arrived(second) == [first, second]
    assert policy.arrived(late) == []
    assert (late.dropped, policy.dropped) == (True, 1)


def test_two_optimizers_have_steps_of_their_own():
    policy = BackupWorkers(2).start(range(2))
    a, b = Push(0, optimizer=0), Push(0, optimizer=1)
    assert policy.arrived(a) == policy.arrived(b) == []
    other = Push(1, optimizer=1)
    assert policy.arrived(other) == [b, other]


def test_where_fewer_are_left_those_make_the_step():
    policy = BackupWorkers(2).start(range(2))
    waiting = Push(0)
    assert policy.arrived(waiting) == []
    policy.set_active(1, False)
    assert policy.complete() == [waiting]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])  # each server gets them in an order of its own
def test_clients_that_push_different_variables_do_not_wait_for_each_other_for_ever(order):
    policy = BackupWorkers(2).start(range(2))
    pushes = [Push(0, plan=0), Push(1, plan=1)]
    first, second = (pushes[number] for number in order)
    assert policy.arrived(first) == []
    assert policy.arrived(second) == [pushes[0]]
    policy.arrived(Push(0, plan=0, iteration=1, iterations=1))


def test_who_stands_aside_is_not_waited_for_and_waits_for_nobody():
    policy = StaleSynchronous(0).start(range(3))
    policy.stand_aside(0)
    policy.set_active(0, False)
    policy.pushed(1)
    policy.pushed(2)
    policy.pushed(0)  # as a chief may, between the functions that it schedules
    for client in (1, 2):
        assert policy.permitted(client) == 1
        policy.pushed(client)
    assert policy.permitted(1) == policy.permitted(2) == 2
    assert policy.permitted(0) == UNLIMITED


def test_what_is_pushed_from_aside_is_a_step_of_its_own():
    policy = BackupWorkers(2).start(range(3))
    policy.stand_aside(0)
    policy.set_active(0, False)
    first, chief, second = Push(1), Push(0), Push(2, iteration=0)
    assert policy.arrived(first) == []
    assert policy.arrived(chief) == [chief]
    assert policy.arrived(second) == [first, second]
    policy.set_active(2, False)
    alone = Push(1, iteration=2, iterations=2)
    assert policy.arrived(alone) == [alone]  # the chief is not counted among those that are left
    assert policy.dropped == 0


@pytest.mark.parametrize("make", [lambda: StaleSynchronous(-1), lambda: BackupWorkers(0)])
def test_impossible_numbers_are_refused(make):
    with pytest.raises(ValueError, match="or more"):
        make()


def test_a_policy_is_started_anew_for_every_server():
    chosen = BackupWorkers(2)
    first, second = chosen.start(range(2)), chosen.start(range(2))
    first.arrived(Push(0))
    assert second.complete() == []
    assert repr(chosen) == "BackupWorkers(count=2)"
    assert repr(StaleSynchronous(3)) == "StaleSynchronous(staleness=3)"
    assert repr(Asynchronous()) == "Asynchronous()"
