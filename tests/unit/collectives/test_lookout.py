"""Staying with the quickest way on a machine that changes: pure decisions, on a machine that is simulated."""

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.collectives.lookout import Lookout

WINDOW = 4

#: What part of the time looking at other ways may take, whatever happens.
MOST = 0.02

#: The first way is kept until another takes less than this part of its time.
KEPT = 0.93


def _run(lookout, seconds, calls):
    """Make some calls on a machine where ways take so long; return which were taken."""
    taken = []
    for _ in range(calls):
        taken.append(lookout.way)
        lookout.record(seconds[lookout.way])
        if lookout.is_over:
            lookout.judge(lookout.seconds)
    return taken


def _calls_until(lookout, seconds, best, most):
    """Return after how many calls the best way is the one that is taken for whole windows."""
    taken = _run(lookout, seconds, most)
    others = [number for number, way in enumerate(taken) if way != best]
    settled = [number for number in range(len(taken)) if taken[number : number + WINDOW] == [best] * WINDOW]
    assert settled, f"{best} is not taken within {most} calls, {len(others)} by others"
    return settled[0]


def test_the_quickest_way_is_taken():
    assert _run(Lookout([3.0, 1.0, 2.0], WINDOW), [3.0, 1.0, 2.0], WINDOW) == [1] * WINDOW


def test_the_first_way_is_taken_while_no_other_is_clearly_quicker():
    for seconds in ([1.0, KEPT, 0.95], [1.0, 0.95, 0.94]):
        taken = _run(Lookout(seconds, WINDOW), seconds, 1000)
        assert taken.count(0) > 0.75 * len(taken)
        assert {1, 2} <= set(taken)
    assert _run(Lookout([1.0, KEPT - 0.01], WINDOW), [1.0, KEPT - 0.01], 1000).count(1) > 750


def test_the_first_way_is_taken_again_when_it_is_as_quick_as_the_chosen_one():
    lookout = Lookout([1.0, 0.8], WINDOW)
    assert _run(lookout, [1.0, 0.8], WINDOW) == [1] * WINDOW
    _calls_until(lookout, [0.79, 0.8], 0, 200)
    assert _run(lookout, [0.79, 0.75], 500).count(0) > 250


def test_when_the_chosen_way_becomes_slow_the_others_are_tried_at_once():
    lookout = Lookout([11.0, 12.0, 13.0, 60.0, 24.0], WINDOW)
    _run(lookout, [11.0, 12.0, 13.0, 60.0, 24.0], 200)
    two_caches = [18.0, 16.0, 14.2, 60.0, 15.5]
    assert _calls_until(lookout, two_caches, 4, 200) <= 2 * WINDOW + 1


def test_the_quickest_of_several_that_have_become_quicker_is_found():
    lookout = Lookout([11.0, 12.0, 13.0, 14.0], WINDOW)
    assert _calls_until(lookout, [18.0, 15.0, 12.0, 16.0], 2, 200) <= 6 * WINDOW


def test_a_chosen_way_that_is_a_third_slower_than_usual_changes_nothing():
    seconds = [11.0, 20.0, 21.0, 19.0]
    lookout = Lookout(seconds, WINDOW)
    assert _run(lookout, seconds, WINDOW) == [0] * WINDOW
    assert _run(lookout, [1.35 * 11.0, *seconds[1:]], 3 * WINDOW) == [0] * 3 * WINDOW


def test_when_the_chosen_way_becomes_slow_those_that_took_over_twice_as_long_are_left_alone():
    lookout = Lookout([11.0, 24.0, 35.0, 60.0], WINDOW)
    taken = _run(lookout, [16.0, 24.0, 35.0, 60.0], 6 * WINDOW)
    assert set(taken) == {0, 1}


def test_ways_that_are_as_quick_as_the_chosen_one_are_looked_at_a_window_apart():
    seconds = [1.0] * 5
    taken = _run(Lookout(seconds, WINDOW), seconds, 1000)
    assert taken.count(0) >= 1000 * WINDOW // (WINDOW + 1) - WINDOW


def test_what_is_least_like_the_way_that_has_become_slow_is_tried_first():
    lookout = Lookout([11.0, 12.0, 13.0, 14.0], WINDOW)
    taken = _run(lookout, [30.0, 30.0, 30.0, 30.0], WINDOW + 3)
    assert taken[WINDOW:] == [3, 2, 1]


def test_a_way_that_becomes_quicker_is_found_though_the_chosen_one_is_as_quick_as_ever():
    lookout = Lookout([18.0, 14.0], WINDOW)
    _run(lookout, [18.0, 14.0], 100)
    # it costs 18 / 14 - 1 of a call, which is 1.5 % of the time every 19 calls
    assert _calls_until(lookout, [11.0, 14.0], 0, 200) <= 19 + WINDOW + 1


def test_the_same_way_is_kept_while_nothing_changes():
    seconds = [1.0, 1.05, 1.3, 4.0]
    taken = _run(Lookout(seconds, WINDOW), seconds, 3000)
    assert taken.count(0) > 0.9 * len(taken)
    assert {1, 2, 3} <= set(taken)
    assert taken.count(1) > taken.count(2) > taken.count(3)


def test_one_disturbed_call_does_not_put_a_way_off():
    seconds = [1.0, 1.1]
    lookout = Lookout(seconds, WINDOW)
    while lookout.way == 0:
        _run(lookout, seconds, 1)
    _run(lookout, [1.0, 50.0], 1)
    assert 1 in _run(lookout, seconds, 20)


def test_ranks_that_see_different_times_do_the_same():
    generator = numpy.random.default_rng(7)
    lookouts = [Lookout([2.0, 2.2, 2.4], WINDOW) for _ in range(3)]
    for _ in range(2000):
        assert len({lookout.way for lookout in lookouts}) == 1
        for lookout in lookouts:
            lookout.record(generator.uniform(1, 3))
        assert len({lookout.is_over for lookout in lookouts}) == 1
        if lookouts[0].is_over:
            times = numpy.max([lookout.seconds for lookout in lookouts], axis=0)
            for lookout in lookouts:
                lookout.judge(times.copy())


ways = st.lists(st.floats(1.0, 20.0), min_size=2, max_size=6)


@settings(deadline=None)
@given(ways, st.sampled_from([4, 16]))
def test_looking_at_the_other_ways_costs_no_more_than_its_share(seconds, window):
    taken = _run(Lookout(seconds, window), seconds, 6000)
    chosen = min(seconds) if min(seconds) < KEPT * seconds[0] else seconds[0]
    spent = sum(seconds[way] for way in taken)
    # what has just been spent, its time is still to come
    assert spent <= (1 + MOST) * chosen * len(taken) + sum(seconds)
    assert spent <= 1.1 * min(seconds) * len(taken) + sum(seconds)


@settings(deadline=None)
@given(ways, st.data())
def test_the_quickest_way_is_found_again_whatever_a_machine_becomes(seconds, data):
    lookout = Lookout(seconds, WINDOW)
    _run(lookout, seconds, data.draw(st.integers(0, 400)))
    changed = data.draw(st.lists(st.floats(1.0, 20.0), min_size=len(seconds), max_size=len(seconds)))
    _run(lookout, changed, 6000)
    taken = _run(lookout, changed, 3 * WINDOW)
    assert changed[max(taken, key=taken.count)] * 0.9 <= min(changed)


def test_a_way_that_was_left_after_a_disturbed_window_is_taken_again_soon():
    seconds = [1.0, 1.2, 2.0]
    lookout = Lookout(seconds, WINDOW)
    while lookout.way != 1:  # the first way is disturbed, until another takes its place
        _run(lookout, [1.6, 1.2, 2.0], 1)
    _run(lookout, [1.6, 1.2, 2.0], 1)
    taken = _run(lookout, seconds, 5 * WINDOW)
    assert taken[-1] == 0 and taken.count(0) > 2 * WINDOW
