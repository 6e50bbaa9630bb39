"""Bound collectives: called, started and waited for, several at a time, dropped and bound again."""

from __future__ import annotations

import gc

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.collectives.call import Call
from mpidist.collectives.engine import Engine
from mpidist.collectives.handle import Handle, together
from mpidist.collectives.persistent import Once, UnlikeArraysError
from mpidist.collectives.reductions import sinks
from mpidist.errors import CollectiveMismatchError, RemoteReplicaError
from mpidist.testing import run_ranks
from mpidist.world import world_communicator

SIGNATURES = [("a", "f4", (3, 2)), ("b", "f4", ()), ("c", "f8", (5,))]
LONG = [("long", "f4", (700, 1000))]


def _arrays(signatures, value):
    return [numpy.full(shape, value, dtype) for _, dtype, shape in signatures]


def _bound(signatures=SIGNATURES, op="sum"):
    return Engine(world_communicator()).bind(_arrays(signatures, 0.0), op)


@pytest.mark.parametrize("signatures", [SIGNATURES, LONG], ids=["short", "long"])
@pytest.mark.parametrize(("op", "expected"), [("sum", 6.0), ("mean", 2.0), ("max", 3.0)])
def test_a_bound_list_is_reduced_as_often_as_it_is_called(signatures, op, expected):
    def on_rank():
        bound, rank = _bound(signatures, op), world_communicator().rank
        return [[set(each.reshape(-1).tolist()) for each in bound(_arrays(signatures, rank + 1))] for _ in range(3)]

    assert run_ranks(3, on_rank) == [[[{expected}] * len(signatures)] * 3] * 3


def test_binding_sends_nothing_and_one_rank_may_bind_anew_alone():
    def on_rank():
        communicator = world_communicator()
        bound = _bound()
        calls = communicator.control.call
        if communicator.rank == 1:
            bound = _bound()
        assert communicator.control.call == calls
        return [each.tolist() for each in bound(_arrays(SIGNATURES, 1.0))[1:]]

    assert run_ranks(2, on_rank) == [[2.0, [2.0] * 5]] * 2


def test_a_bound_list_takes_arrays_however_they_lie_in_memory():
    def on_rank():
        bound = _bound([("m", "f8", (40, 30))])
        plain = numpy.arange(1200.0).reshape(40, 30)
        given = numpy.asfortranarray(plain) if world_communicator().rank else numpy.repeat(plain, 2, 1)[:, ::2]
        return (bound([given])[0] == 2 * plain).all()

    assert run_ranks(2, on_rank) == [True, True]


def test_arrays_of_another_shape_are_refused_without_a_call():
    def on_rank():
        bound, control = _bound(), world_communicator().control
        calls = control.call
        for reduce in (bound, bound.start):
            with pytest.raises(ValueError, match=r"was bound to other arrays; got float\d+\[.*; bind another one"):
                reduce(_arrays(LONG, 1.0))
        return control.call - calls, float(bound(_arrays(SIGNATURES, 1.0))[1])

    assert run_ranks(2, on_rank) == [(0, 2.0), (0, 2.0)]


def test_an_error_is_raised_by_the_first_wait_and_a_later_one_only_tells_of_it():
    def on_rank():
        rank = world_communicator().rank
        handle = _bound(SIGNATURES if rank else LONG).start(_arrays(SIGNATURES if rank else LONG, 1.0))
        with pytest.raises(CollectiveMismatchError):
            handle.wait()
        with pytest.raises(RuntimeError, match="failed before: .*ranks differ") as caught:
            handle.wait()
        return isinstance(caught.value.__cause__, CollectiveMismatchError), float(_bound()(_arrays(SIGNATURES, 1.0))[1])

    assert run_ranks(2, on_rank) == [(True, 2.0)] * 2


# -- started and waited for -------------------------------------------------------------------------------------------


def test_several_are_under_way_and_waited_for_in_another_order():
    def on_rank():
        first, second = _bound(), _bound(LONG)
        one, two = first.start(_arrays(SIGNATURES, 1.0)), second.start(_arrays(LONG, 2.0))
        late = float(two.wait()[0][0, 0])
        return float(one.wait()[1]), late, float(one.wait()[1])

    assert run_ranks(2, on_rank) == [(2.0, 4.0, 2.0)] * 2


def test_a_rank_that_waits_at_once_and_one_that_waits_at_the_end_stay_in_step():
    """Who waits for the first one only does not wait for what was started after it."""

    def on_rank():
        first, second, rank = _bound(), _bound(LONG), world_communicator().rank
        one = first.start(_arrays(SIGNATURES, 1.0))
        if rank:
            found = float(one.wait()[1])
            two = second.start(_arrays(LONG, 2.0))
        else:
            two = second.start(_arrays(LONG, 2.0))
            found = float(one.wait()[1])
        return found, float(two.wait()[0][0, 0])

    assert run_ranks(2, on_rank) == [(2.0, 4.0)] * 2


def test_a_later_collective_carries_out_what_was_started_before():
    def on_rank():
        communicator = world_communicator()
        handle = _bound().start(_arrays(SIGNATURES, 1.0))
        communicator.barrier()
        calls = communicator.control.call
        return float(handle.wait()[1]), communicator.control.call - calls

    assert run_ranks(2, on_rank) == [(2.0, 0)] * 2


def test_a_handle_is_ready_when_its_collective_was_carried_out():
    def on_rank():
        communicator = world_communicator()
        first, second = _bound().start(_arrays(SIGNATURES, 1.0)), _bound(LONG).start(_arrays(LONG, 1.0))
        last, both = first.then(lambda results: results[1]), together([first, second])
        handles = [first, second, last, both, Handle.done(3)]
        found = [[each.is_ready() for each in handles]]
        first.wait()
        found.append([each.is_ready() for each in handles])
        communicator.barrier()  # carries out the second one
        found.append([each.is_ready() for each in handles])
        return found, float(last.wait()), Handle.done(3).wait()

    ready = [[False] * 4 + [True], [True, False, True, False, True], [True] * 5]
    assert run_ranks(2, on_rank) == [(ready, 2.0, 3)] * 2


def test_a_handle_that_was_waited_for_keeps_no_other_results_than_its_own():
    def on_rank():
        bound = _bound(LONG)
        handles = [bound.start(_arrays(LONG, 1.0)).then(lambda results: float(results[0][0, 0]))]
        handles.append(together([handles[0]]))
        assert handles[1].wait() == [2.0]
        (results,) = bound._sink._memory._kept
        return results.is_free()

    assert run_ranks(2, on_rank) == [True, True]


def test_a_second_start_before_the_first_is_over_is_refused():
    def on_rank():
        bound = _bound()
        handle = bound.start(_arrays(SIGNATURES, 1.0))
        with pytest.raises(RuntimeError, match=r"all_reduce\(sum\) of float32\[3, 2\] and 2 more is under way"):
            bound.start(_arrays(SIGNATURES, 2.0))
        found = float(handle.wait()[1])
        return found, float(bound.start(_arrays(SIGNATURES, 2.0)).wait()[1])

    assert run_ranks(2, on_rank) == [(2.0, 4.0)] * 2


def test_a_handle_that_is_dropped_is_named_and_its_collective_is_made_all_the_same(capsys):
    def on_rank():
        communicator = world_communicator()
        if communicator.rank:
            return float(_bound().start(_arrays(SIGNATURES, 1.0)).wait()[1])
        _bound().start(_arrays(SIGNATURES, 1.0))
        gc.collect()
        communicator.started.finish()
        return None

    assert run_ranks(2, on_rank) == [None, 2.0]
    assert (
        "the handle of all_reduce(sum) of float32[3, 2] and 2 more was dropped before wait()" in capsys.readouterr().err
    )


def test_ranks_that_start_in_another_order_are_named():
    def on_rank():
        bounds = [_bound(), _bound(LONG)]
        signatures = [SIGNATURES, LONG]
        order = [0, 1] if world_communicator().rank else [1, 0]
        handles = [bounds[at].start(_arrays(signatures[at], 1.0)) for at in order]
        for handle in handles:
            with pytest.raises(CollectiveMismatchError, match=r"float32 \(700, 1000\)"):
                handle.wait()
        return True

    assert run_ranks(2, on_rank) == [True, True]


@settings(max_examples=15, deadline=None)
@given(steps=st.lists(st.sampled_from(["call", "start", "wait", "other"]), min_size=1, max_size=12))
def test_any_sequence_of_calls_starts_and_waits_gives_the_sums_of_its_own_arrays(steps):
    def on_rank():
        bounds, fused = [_bound() for _ in range(13)], Engine(world_communicator())
        waiting, found, expected = [], [], []
        for number, step in enumerate(steps):
            arrays = _arrays(SIGNATURES, number + 1.0)
            if step == "call":
                found.append(float(bounds[number](arrays)[1]))
                expected.append(3.0 * (number + 1))
            elif step == "other":
                found.append(float(fused(arrays)[2][4]))
                expected.append(3.0 * (number + 1))
            elif step == "start":
                waiting.append((bounds[number].start(arrays), 3.0 * (number + 1)))
            elif waiting:
                handle, total = waiting.pop()
                found.append(float(handle.wait()[1]))
                expected.append(total)
        for handle, total in waiting:
            found.append(float(handle.wait()[1]))
            expected.append(total)
        return found == expected

    assert run_ranks(3, on_rank) == [True] * 3


# -- errors in the middle ---------------------------------------------------------------------------------------------


def test_what_was_started_in_a_step_that_raised_is_given_up_on_all_ranks():
    """Rank 0 raises between start and wait: nothing of that step may be added to a later one."""

    def on_rank():
        communicator = world_communicator()
        first, second = _bound(), _bound()
        handles = [bound.start(_arrays(SIGNATURES, 100.0)) for bound in (first, second)]
        if communicator.rank:
            with pytest.raises(RemoteReplicaError, match="ValueError: odd"):
                handles[0].wait()
            handles = handles[1:]
        else:
            communicator.miss(ValueError("odd"))
        for handle in handles:
            with pytest.raises(RuntimeError, match=r"all_reduce\(sum\) of float32.* was given up: .*Error ended"):
                handle.wait()
        found = Engine(communicator)(_arrays(SIGNATURES, 1.0))
        return float(found[1]), float(first.start(_arrays(SIGNATURES, 2.0)).wait()[1])

    assert run_ranks(2, on_rank) == [(2.0, 4.0)] * 2


def test_who_is_called_while_a_collective_is_carried_out_cannot_wait_for_it():
    def on_rank():
        communicator, handles = world_communicator(), []

        def move(watch):
            with pytest.raises(RuntimeError, match="odd is being carried out; a signal handler cannot wait for it"):
                handles[0].wait()
            return "moved"

        handles.append(Once(communicator, Call("odd"), move).start(None))
        return handles[0].wait()

    assert run_ranks(2, on_rank) == ["moved"] * 2


@pytest.mark.parametrize("signatures", [SIGNATURES, LONG], ids=["short", "long"])
def test_ranks_that_have_no_memory_for_results_stay_in_step(signatures, monkeypatch):
    def no_memory(*args, **options):
        raise MemoryError

    def on_rank():
        communicator, bound = world_communicator(), _bound(signatures)
        communicator.barrier()
        with pytest.raises(MemoryError):
            bound(_arrays(signatures, 1.0))
        communicator.barrier()
        monkeypatch.undo()
        communicator.barrier()
        return float(bound(_arrays(signatures, 1.0))[0].flat[0])

    monkeypatch.setattr(sinks, "ResultSet", no_memory)
    assert run_ranks(2, on_rank) == [2.0, 2.0]


@pytest.mark.parametrize("size", [1, 2])
def test_a_bound_array_refuses_lists_of_another_length(size):
    def on_rank():
        communicator = world_communicator()
        bound, calls = Engine(communicator).bind([numpy.ones(3)]), communicator.control.call
        for arrays in ([], [numpy.ones(3)] * 2):
            for call in (bound, bound.start):
                with pytest.raises(UnlikeArraysError, match="bind another one"):
                    call(arrays)
        assert communicator.control.call == calls
        return float(bound([numpy.ones(3)])[0][0])

    assert run_ranks(size, on_rank) == [float(size)] * size


def test_the_deadline_of_a_bound_list_is_that_of_all_its_calls():
    def on_rank():
        communicator, seen = world_communicator(), []
        bound, begin = (
            Engine(communicator).bind(_arrays(SIGNATURES, 1.0), timeout_seconds=41.0),
            communicator.begin,
        )

        def noted(call, timeout_seconds):
            seen.append(timeout_seconds)
            return begin(call, timeout_seconds)

        communicator.begin = noted
        bound(_arrays(SIGNATURES, 1.0))
        bound.start(_arrays(SIGNATURES, 1.0)).wait()
        bound(_arrays(SIGNATURES, 1.0), 42.0)
        return seen

    assert run_ranks(2, on_rank) == [[41.0, 41.0, 42.0]] * 2


def test_a_callback_may_start_a_collective_that_comes_after_those_that_wait():
    def on_rank():
        communicator, handles = world_communicator(), []
        late = _bound()

        def move(watch):
            handles.append(late.start(_arrays(SIGNATURES, 2.0)))

        first, second = Once(communicator, Call("odd"), move).start(None), _bound().start(_arrays(SIGNATURES, 1.0))
        if communicator.rank:
            first.wait()
        communicator.barrier()
        return [float(handle.wait()[1]) for handle in (second, *handles)]

    assert run_ranks(2, on_rank) == [[2.0, 4.0]] * 2
