"""Trying several ways in the first steps, and settling on one alike on all ranks."""

import threading

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.collectives import ways
from mpidist.collectives.contest import Contests
from mpidist.collectives.trial import Trial
from mpidist.errors import CollectiveMismatchError, TransportError, TransportTimeoutError
from mpidist.fusion.pipeline import FusedAllReduce
from mpidist.testing import run_ranks
from mpidist.world import world_communicator


def _try(trial, seconds, calls=1000):
    """Make the calls of a heat in which ways take so long (a function of way and call); return which were tried."""
    tried = []
    while not trial.is_over and len(tried) < calls:
        tried.append(trial.way)
        trial.record(seconds(tried[-1], len(tried) - 1))
    return tried


def test_four_calls_come_before_the_trial_and_then_ways_take_turns_twice():
    trial = Trial(range(3))
    tried = _try(trial, lambda way, call: [50.0, 50.0, 50.0, 50.0, 5.0, 4.0, 6.0, 7.0, 3.0, 6.5][call])
    assert tried == [0] * 4 + [0, 1, 2, 0, 1, 2]
    assert trial.seconds.tolist() == [5.0, 3.0, 6.0]


def test_only_ways_that_are_not_far_behind_come_to_a_second_heat_and_their_medians_count():
    trial = Trial(range(4))
    _try(trial, lambda way, call: [5.0, 4.0, 6.0, 5.9][way])
    assert not trial.judge(trial.seconds)
    times = iter([9.0, 1.0, 4.5, 5.0, 3.0, 7.0])
    assert _try(trial, lambda way, call: next(times)) == [0, 1, 3, 0, 1, 3]
    assert trial.seconds.tolist() == [5.0, 3.0, 6.0, 5.9]  # of 5 5 9 5, of 4 4 1 3, of 6 6, of 5.9 5.9 4.5 7
    assert trial.judge(trial.seconds)


def test_one_heat_decides_where_all_other_ways_are_far_behind():
    trial = Trial(range(3))
    _try(trial, lambda way, call: [9.0, 2.0, 3.0][way])
    assert trial.judge(trial.seconds)


@given(st.integers(2, 7), st.sampled_from([[1.0, 3.0], [3.0, 1.0]]), st.data())
def test_two_lists_in_turn_mislead_no_trial(ways_, lists, data):
    seconds = data.draw(st.lists(st.floats(1.0, 10.0), min_size=ways_, max_size=ways_))
    trial = Trial(range(ways_))
    calls = 0
    while True:
        heat = _try(trial, lambda way, call, before=calls: seconds[way] * lists[(before + call) % 2])
        calls += len(heat)
        assert calls % 2 == 0
        if trial.judge(trial.seconds):
            break
    assert trial.seconds.tolist() == [each * min(lists) for each in seconds]


def test_the_first_of_a_family_stands_for_it_in_the_first_heat():
    trial = Trial(["segments", "segments", "segments", "ring", "remote"])
    assert _try(trial, lambda way, call: [2.0, 0.0, 0.0, 9.0, 2.5][way])[4:] == [0, 3, 4, 0, 3, 4]
    assert trial.seconds.tolist() == [2.0, 2.0, 2.0, 9.0, 2.5]
    assert not trial.judge(trial.seconds)
    second = _try(trial, lambda way, call: [2.0, 1.5, 3.0, 0.0, 2.5][way])
    assert sorted(second) == [0, 0, 1, 1, 2, 2, 4, 4]
    assert trial.seconds.tolist() == [2.0, 1.5, 3.0, 9.0, 2.5]
    assert trial.judge(trial.seconds)


def test_a_family_that_is_far_behind_is_not_tried_in_other_sizes():
    trial = Trial(["segments", "segments", "ring"])
    assert set(_try(trial, lambda way, call: [9.0, 0.0, 2.0][way])) == {0, 2}
    assert trial.judge(trial.seconds)
    assert trial.seconds.tolist() == [9.0, 9.0, 2.0]


def test_the_trial_of_another_mode_is_of_one_call_a_heat():
    trial = Trial(["segments", "segments", "ring", "remote"], is_short=True)
    assert _try(trial, lambda way, call: [4.0, 0.0, 7.0, 5.0][way]) == [0, 2, 3]
    assert not trial.judge(trial.seconds)
    assert _try(trial, lambda way, call: [4.5, 3.0, 0.0, 5.0][way]) == [0, 1, 3]
    assert trial.seconds.tolist() == [4.0, 3.0, 7.0, 5.0]
    assert trial.judge(trial.seconds)


def test_one_disturbed_call_of_the_first_way_decides_no_trial_of_another_mode():
    trial = Trial(["segments", "segments", "ring", "remote"], is_short=True)
    assert _try(trial, lambda way, call: [48.0, 0.0, 41.0, 23.0][way]) == [0, 2, 3]
    assert not trial.judge(trial.seconds)
    assert sorted(_try(trial, lambda way, call: [18.0, 0.0, 0.0, 22.0][way])) == [0, 3]
    assert trial.seconds.tolist() == [18.0, 18.0, 41.0, 22.0]
    assert trial.judge(trial.seconds)


def test_what_was_slow_in_one_mode_is_tried_in_another():
    contest = Contests().of([ways.Way("shared_memory", 1 << 20), ways.Way("two_level", 1 << 20)], 1 << 26, modes=2)
    contest.mode = 1
    _use(contest, [30.0, 3.0], 10)
    assert not contest.is_open and contest.at == 1
    contest.mode = 0
    _use(contest, [2.0, 4.0], 10)
    assert not contest.is_open and contest.at == 0


def _sums(monkeypatch, size, steps):
    monkeypatch.setattr(ways, "TRIAL_BYTES", 1000)

    def run():
        fused = FusedAllReduce(world_communicator())
        wrong = 0
        for step in range(steps):
            first, second = fused(
                [numpy.full(3000, step + fused._communicator.rank, "f4"), numpy.full((2, 50), 1.0, "f4")]
            )
            wrong += not ((first == size * step + size * (size - 1) // 2).all() and (second == size).all())
        (planned,) = fused.plans
        del first, second
        assert all(results.is_free() for results in planned._sets)
        tried = [way.algorithm for way in planned.contest.ways]
        return wrong, not planned.contest.is_open, planned.contest.at, tried

    return run_ranks(size, run)


def test_every_step_of_a_trial_is_right_and_all_ranks_settle_on_the_same(monkeypatch):
    for size in (2, 3):
        results = _sums(monkeypatch, size, 40)
        assert all(result == results[0] for result in results)
        assert results[0][:2] == (0, True)


def test_until_it_is_over_nothing_is_settled(monkeypatch):
    ((wrong, settled, _, algorithms), _) = _sums(monkeypatch, 2, 5)
    assert (wrong, settled) == (0, False)
    assert algorithms == ["shared_memory"] * 3 + ["ring"]


def test_more_than_two_ranks_try_only_what_adds_in_the_same_order(monkeypatch):
    assert _sums(monkeypatch, 3, 2)[0][3] == ["shared_memory"] * 3


def test_what_was_settled_is_not_tried_again_for_lists_of_about_the_same_size(monkeypatch):
    monkeypatch.setattr(ways, "TRIAL_BYTES", 1000)

    def run():
        fused = FusedAllReduce(world_communicator())
        for _ in range(30):
            fused([numpy.ones(3000, "f4")])
        fused([numpy.ones((3, 1001), "f4")])
        first, second = (planned.contest for planned in fused.plans)
        return first.is_open, second.is_open, first.at == second.at

    assert run_ranks(2, run) == [(False, False, True)] * 2


def _use(contest, seconds, calls):
    """Make calls by the contest where ways take so long, on one rank; return which were taken."""
    taken = []
    for _ in range(calls):
        taken.append(contest.at)
        contest.record(seconds[contest.at], 1)
        if contest.is_due:
            contest.settle(contest.times())
    return taken


def test_a_way_that_has_become_slow_is_left_for_one_that_is_quicker_now():
    contest = Contests().of([ways.Way("shared_memory", 1 << 20), ways.Way("two_level", 1 << 20)], 1 << 26)
    assert _use(contest, [2.0, 3.0], 8) == [0] * 5 + [1, 1, 0]
    assert not contest.is_open
    assert set(_use(contest, [2.0, 3.0], 20)) == {0}
    _use(contest, [6.0, 3.0], 20)
    assert set(_use(contest, [6.0, 3.0], 20)) == {1}


def test_an_explicit_choice_is_not_tried_against_others():
    def run():
        communicator = world_communicator()
        return [communicator.ways(1 << 30, name) for name in ("ring", "shared_memory")]

    assert run_ranks(2, run)[0] == [[("ring", 0)], [("shared_memory", 1 << 20)]]


def _as_it_lies(kind, rank, step):
    """Return a tensor that lies otherwise in memory on rank 1 in every second step."""
    values = numpy.full((60, 50), rank + step, "f4")
    if rank == 0 or step % 2 == 0:
        return values
    return numpy.asfortranarray(values) if kind == "another order" else numpy.repeat(values, 2, axis=1)[:, ::2]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["another order", "gaps"])
def test_ranks_whose_tensors_lie_otherwise_in_memory_try_the_same_way(kind, size, monkeypatch):
    monkeypatch.setattr(ways, "TRIAL_BYTES", 1000)

    def run():
        communicator = world_communicator()
        fused = FusedAllReduce(communicator)
        for step in range(100):
            (result,) = fused([_as_it_lies(kind, communicator.rank, step)])
            assert (result == size * step + size * (size - 1) // 2).all()
        return next(iter(fused.plans)).contest.at

    assert len(set(run_ranks(size, run))) == 1


def _until_times_are_compared(communicator, step):
    """Make calls of one kind until ranks must compare their times before the next; return their contest."""
    step()
    (contest,) = (each for each in communicator._contests._found.values() if len(each.ways) > 1)
    while not contest.is_due:
        step()
    return contest


@pytest.mark.parametrize("is_list", [True, False])
def test_ranks_that_compare_their_times_keep_the_deadline_of_the_call(is_list, monkeypatch):
    monkeypatch.setattr(ways, "TRIAL_BYTES", 1000)
    given_up = threading.Event()

    def run():
        communicator = world_communicator()
        fused, gradient = FusedAllReduce(communicator), numpy.ones(3000, "f4")

        def step(**limit):
            if is_list:
                fused([gradient], **limit)
            else:
                communicator.all_reduce(gradient, **limit)

        _until_times_are_compared(communicator, step)
        if communicator.rank == 1:
            given_up.wait(30)
            return
        try:
            with pytest.raises(TransportTimeoutError):
                step(timeout_seconds=0.2)
        finally:
            given_up.set()

    run_ranks(2, run)


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_rank_that_does_not_compare_its_times_is_told_what_the_other_does(hosts, monkeypatch):
    monkeypatch.setattr(ways, "TRIAL_BYTES", 1000)

    def run():
        communicator = world_communicator()
        gradient = numpy.ones(3000, "f4")
        contest = _until_times_are_compared(communicator, lambda: communicator.all_reduce(gradient))
        with pytest.raises(CollectiveMismatchError, match="rank 0 called comparison of times before an all-reduce"):
            if communicator.rank == 0:
                communicator.all_reduce(gradient)
            else:
                communicator.barrier()
        gradient[...] = 1
        communicator.all_reduce(gradient)
        return set(gradient.tolist()), contest.is_due

    assert run_ranks(2, run, hosts=hosts) == [({2.0}, False)] * 2


def test_a_rank_that_is_interrupted_when_times_are_compared_ends_the_job(monkeypatch):
    monkeypatch.setattr(ways, "TRIAL_BYTES", 1000)

    def run():
        communicator = world_communicator()
        gradient = numpy.ones(3000, "f4")
        contest = _until_times_are_compared(communicator, lambda: communicator.all_reduce(gradient))
        if communicator.rank == 1:

            def interrupted(times):
                raise KeyboardInterrupt

            contest.settle = interrupted
            with pytest.raises(KeyboardInterrupt):
                communicator.all_reduce(gradient)
        with pytest.raises(TransportError, match="broken off by KeyboardInterrupt"):
            communicator.all_reduce(gradient)

    run_ranks(2, run)
