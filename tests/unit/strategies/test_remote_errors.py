"""An exception in `run` on one replica reaches all ranks, and they agree afterwards on where they are."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import numpy
import pytest

from mpidist import context
from mpidist.errors import RankFailedError, RemoteReplicaError
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.testing import run_ranks


class BadRowError(Exception):
    """What the functions here raise."""


def total(value=1.0):
    return float(context.get_replica_context().all_reduce("SUM", numpy.float64(value)))


def caught(fn):
    """Return the error that `fn` raises, None if it raises none."""
    try:
        fn()
    except (BadRowError, RemoteReplicaError) as error:
        return error
    return None


def ways(error):
    return type(error).__name__


def _merged(fn):
    return context.get_replica_context().merge_call(fn)


def _sums(strategy):
    """Return the sums of three steps that differ: of ranks in step, each by their number."""
    return [strategy.run(total, (10.0**step,)) for step in range(3)]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("calls_before", [0, 1, 2, 3])
def test_the_others_learn_of_it_in_their_next_collective_and_all_can_go_on(size, calls_before):
    guilty = size - 1

    def rank():
        strategy = MirroredStrategy()
        me = strategy.extended.replica_id

        def step():
            for _ in range(calls_before):
                total()
            if me == guilty:
                raise BadRowError("row 7 is\nbad")
            return total()

        errors = [caught(lambda: strategy.run(step)) for _ in range(3)]
        return errors, strategy.run(total), strategy.reduce("SUM", 2.0, axis=None)

    for me, (errors, after, reduced) in enumerate(run_ranks(size, rank)):
        assert [type(error) for error in errors] == [BadRowError if me == guilty else RemoteReplicaError] * 3
        assert (after, reduced) == (size, 2.0 * size)
        if me != guilty:
            assert errors[0].rank == guilty
            assert errors[0].cause.startswith("tests.unit.strategies.test_remote_errors.BadRowError: row 7 is\nbad")
            assert "test_remote_errors.py, line" in errors[0].cause and errors[0].cause in str(errors[0])
            assert f"raised on rank {guilty} (localhost), while this rank was in all_reduce(sum)" in str(errors[0])


@pytest.mark.parametrize("elements", [3, 50_000])
def test_large_arrays_that_follow_are_whole(elements):
    """What a rank wrote for the missed call, or was still reading of the one before, is not mixed with it."""

    def rank():
        strategy = MirroredStrategy()
        me, results = strategy.extended.replica_id, []
        for step in range(12):

            def fn(step=step):
                value = numpy.full(elements, step + me, "float32")
                first = context.get_replica_context().all_reduce("SUM", value)
                if step % 3 == me:
                    raise BadRowError
                return first, context.get_replica_context().all_reduce("SUM", value * 2)

            try:
                results.append(strategy.run(fn))
            except (BadRowError, RemoteReplicaError):
                results.append(None)
        return results

    for results in run_ranks(4, rank):
        assert results == [None] * 12

    # and where nobody raises in between
    def quiet():
        strategy = MirroredStrategy()
        me = strategy.extended.replica_id
        caught(lambda: strategy.run(lambda: bad() if me == 1 else total()))
        value = numpy.full(elements, me, "float32")
        return [strategy.run(lambda: context.get_replica_context().all_reduce("SUM", value)) for _ in range(4)]

    def bad():
        raise BadRowError

    for results in run_ranks(4, quiet):
        for result in results:
            numpy.testing.assert_array_equal(result, numpy.full(elements, 6, "float32"))


def test_a_rank_that_raises_again_and_again_is_told_of_again_and_again():
    def rank():
        strategy = MirroredStrategy()
        me = strategy.extended.replica_id

        def step():
            if me == 0:
                raise BadRowError(f"{len(errors)}")
            return total()

        errors = []
        for _ in range(5):
            errors.append(caught(lambda: strategy.run(step)))
        return [str(error) for error in errors], strategy.run(total)

    first, *others = run_ranks(3, rank)
    assert first == (["0", "1", "2", "3", "4"], 3)
    for texts, after in others:
        assert after == 3
        for number, text in enumerate(texts):
            assert f"BadRowError: {number} (" in text


def test_ranks_that_all_raise_get_their_own_errors_and_stay_in_step():
    def rank():
        strategy = MirroredStrategy()
        me = strategy.extended.replica_id

        def step():
            raise BadRowError(me)

        return [caught(lambda: strategy.run(step)).args for _ in range(4)], strategy.run(total)

    assert run_ranks(3, rank) == [([(me,)] * 4, 3) for me in range(3)]


def test_an_error_after_the_last_collective_is_met_outside_of_run():
    def rank():
        strategy = MultiWorkerMirroredStrategy()
        me = strategy.extended.replica_id

        def step():
            total()
            if me == 0:
                raise BadRowError

        first = caught(lambda: strategy.run(step))
        second = caught(lambda: strategy.gather(numpy.ones(1), axis=0)) if me else None
        return ways(first), ways(second), len(strategy.gather(numpy.ones(1), axis=0))

    first, *others = run_ranks(3, rank)
    assert first == ("BadRowError", "NoneType", 3)
    assert others == [("NoneType", "RemoteReplicaError", 3)] * 2


def test_without_further_collectives_nobody_waits():
    def rank():
        strategy = MirroredStrategy()
        me = strategy.extended.replica_id

        def step():
            if me == 1:
                raise BadRowError

        return ways(caught(lambda: strategy.run(step)))

    assert run_ranks(3, rank) == ["NoneType", "BadRowError", "NoneType"]


def test_uncaught_it_is_the_cause_and_the_others_are_consequences():
    def rank():
        strategy = MirroredStrategy()

        def step():
            if strategy.extended.replica_id == 1:
                raise BadRowError("boom")
            return total()

        strategy.run(step)

    with pytest.raises(BadRowError, match="boom") as raised:
        run_ranks(4, rank)
    others = {rank: error for rank, error in raised.value.rank_errors.items() if rank != 1}
    assert set(others) == {0, 2, 3}
    assert all(isinstance(error, RemoteReplicaError) and "boom" in str(error) for error in others.values())


def test_a_rank_that_catches_it_and_leaves_is_not_waited_for():
    def rank():
        strategy = MirroredStrategy()

        def step():
            if strategy.extended.replica_id == 1:
                raise BadRowError
            return total()

        if ways(caught(lambda: strategy.run(step))) == "BadRowError":
            return None
        return strategy.run(total)

    with pytest.raises(RankFailedError, match="rank 1.* left .*after 1 collective calls, while this rank is in call 2"):
        run_ranks(3, rank)


def test_an_error_that_all_ranks_raise_together_is_not_told_again():
    def total_of(value):
        return context.get_replica_context().all_reduce("SUM", value)

    def mismatch():
        strategy = MirroredStrategy()
        me = strategy.extended.replica_id
        with pytest.raises(ValueError, match="ranks differ"):
            strategy.run(lambda: total_of(numpy.ones(2 + (me == 1))))
        return strategy.run(total)

    assert run_ranks(3, mismatch) == [3, 3, 3]


@pytest.mark.parametrize("how", ["as it is", "as another", "from none", "twice inside", "kept", "kept, as another"])
def test_an_error_that_passes_through_two_runs_is_told_once(how):
    """Told twice it would stand for two calls, and the sums of different steps would be mixed."""
    error = BadRowError("the same in every step")

    def rank():
        strategy = MirroredStrategy()
        guilty = strategy.extended.replica_id == 1

        def inner():
            if guilty:
                raise error
            return total()

        def merge(merging):
            if how == "twice inside":
                caught(lambda: merging.run(inner))
            if how.startswith("kept"):
                kept = caught(lambda: merging.run(inner))
                assert merging.run(total) == 2
                if how == "kept":
                    raise kept
                raise (BadRowError() if guilty else kept) from kept
            try:
                return merging.run(inner)
            except BadRowError as found:
                if how == "as another":
                    raise BadRowError from found
                if how == "from none":
                    raise BadRowError from None
                raise

        def outer():
            return _merged(merge)

        seen = []
        for step in range(3):
            seen.append(type(caught(lambda: strategy.run(outer))))
            seen.append(strategy.run(total, (10.0**step,)))
        return seen

    for me, seen in enumerate(run_ranks(2, rank)):
        kind = BadRowError if me == 1 else RemoteReplicaError
        assert seen == [kind, 2.0, kind, 20.0, kind, 200.0]


def test_an_error_made_of_that_of_another_rank_is_not_told():
    def rank():
        strategy = MirroredStrategy()
        guilty = strategy.extended.replica_id == 1

        def step():
            if guilty:
                raise BadRowError
            try:
                return total()
            except RemoteReplicaError as error:
                raise BadRowError("the other had one") from error

        return [(type(caught(lambda: strategy.run(step))), strategy.run(total, (10.0**step_,))) for step_ in range(3)]

    assert run_ranks(2, rank) == [[(BadRowError, 2.0), (BadRowError, 20.0), (BadRowError, 200.0)]] * 2


def _steps(first, second):
    """Return what two ranks get of a step by these functions of rank and strategy, and of three plain ones after it."""

    def rank():
        strategy = MirroredStrategy()
        me, seen = strategy.extended.replica_id, []
        try:
            first(me, strategy)
        except (BadRowError, RemoteReplicaError):
            seen.append(type(caught(lambda: second(me, strategy))))
        return seen, _sums(strategy)

    return run_ranks(2, rank)


def _fail(me, strategy, guilty):
    def step():
        if me == guilty:
            raise BadRowError
        return total()

    strategy.run(step)


def test_a_new_error_in_a_run_that_recovers_from_another_is_told():
    first, second = _steps(
        lambda me, strategy: _fail(me, strategy, guilty=1), lambda me, strategy: _fail(me, strategy, guilty=0)
    )
    assert first == ([BadRowError], [2.0, 20.0, 200.0])
    assert second == ([RemoteReplicaError], [2.0, 20.0, 200.0])


def test_an_error_while_one_that_all_ranks_raised_is_handled_is_told():
    def mismatch(me, strategy):
        def step():
            try:
                context.get_replica_context().all_reduce("SUM", numpy.ones(2 + me))
            except ValueError:
                if me == 1:
                    raise BadRowError from None
                total()

        strategy.run(step)

    results = _steps(mismatch, lambda me, strategy: None)
    assert [sums for _, sums in results] == [[2.0, 20.0, 200.0]] * 2


def test_an_error_made_of_one_that_was_kept_from_an_earlier_step_is_told():
    def give_up(me, strategy, kept):
        def step():
            if me == 0:
                raise BadRowError("gave up") from kept[0]
            return total()

        strategy.run(step)

    def rank():
        strategy = MirroredStrategy()
        me, kept = strategy.extended.replica_id, []
        kept.append(caught(lambda: _fail(me, strategy, guilty=1)))
        second = caught(lambda: give_up(me, strategy, kept))
        return type(kept[0]), type(second), _sums(strategy)

    assert run_ranks(2, rank) == [
        (RemoteReplicaError, BadRowError, [2.0, 20.0, 200.0]),
        (BadRowError, RemoteReplicaError, [2.0, 20.0, 200.0]),
    ]


@pytest.mark.parametrize("first", [BadRowError, SystemExit])
def test_another_error_after_one_that_was_caught_in_an_inner_run_is_told(first):
    class Equal(BadRowError):
        __hash__ = None

        def __eq__(self, other):
            return True

    def rank():
        strategy = MirroredStrategy()
        guilty = strategy.extended.replica_id == 1

        def inner():
            if guilty:
                raise Equal if first is BadRowError else SystemExit
            return total() if first is BadRowError else None

        def outer():
            with suppress(BadRowError, RemoteReplicaError, SystemExit):
                _merged(lambda merging: merging.run(inner))
            if guilty:
                raise Equal
            return total()

        seen = type(caught(lambda: strategy.run(outer)))
        return issubclass(seen, BadRowError), _sums(strategy)

    assert run_ranks(2, rank) == [(False, [2.0, 20.0, 200.0]), (True, [2.0, 20.0, 200.0])]


@pytest.fixture
def failing():
    """A step that fails with a batch in hand, and references to the batches; no cycle is collected meanwhile."""
    held = []

    class Batch:
        pass

    def step():
        batch = Batch()
        held.append(weakref.ref(batch))
        raise BadRowError

    gc.disable()
    yield step, held
    gc.enable()


@pytest.mark.parametrize("is_nested", [False, True])
def test_what_a_failed_step_held_is_given_back(is_nested, failing):
    strategy, (step, held) = MirroredStrategy(), failing
    caught(lambda: strategy.run((lambda: _merged(lambda merging: merging.run(step))) if is_nested else step))
    assert held[0]() is None


def test_steps_that_fail_one_after_the_other_in_a_run_are_not_all_held(failing):
    strategy, (step, held) = MirroredStrategy(), failing

    def outer():
        for _ in range(4):
            _merged(lambda merging: caught(lambda: merging.run(step)) and None)
        return sum(reference() is not None for reference in held)

    assert strategy.run(outer) <= 1
    assert not any(reference() for reference in held)


def test_one_replica_alone_just_raises():
    strategy = MirroredStrategy()
    with pytest.raises(BadRowError):
        strategy.run(lambda: (_ for _ in ()).throw(BadRowError))
    assert strategy.run(total) == 1
