"""A traced communicator: what is noted of its calls, that results stay the same, and that clocks are compared."""

from __future__ import annotations

import sys
from types import BuiltinMethodType

import numpy
import pytest

import mpidist
from mpidist import transports
from mpidist.collectives.call import Call
from mpidist.collectives.call_check import CallCheck
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.engine import Engine
from mpidist.collectives.observer import NOBODY
from mpidist.collectives.persistent import Once
from mpidist.collectives.reductions import update
from mpidist.collectives.ways.pieces import Pieces
from mpidist.collectives.ways.selection import Way
from mpidist.runtime import trace_kinds as kinds
from mpidist.runtime.control import ControlChannel
from mpidist.runtime.turnstile import Turnstile
from mpidist.testing import run_ranks
from mpidist.tracing.clock import clock_offset
from mpidist.tracing.shares import gather, lateness
from mpidist.tracing.tracer import Tracer
from mpidist.world import world_communicator


def traced(hosts: str, folder, calls: int = 3, elements: int = 2000):
    """Run some all-reduces on traced ranks; return their results, and what was recorded by rank."""

    def on_rank():
        communicator = world_communicator()
        results = []
        for call in range(calls):
            buffer = numpy.full(elements, communicator.rank + call, dtype=numpy.float32)
            communicator.all_reduce(buffer)
            results.append(float(buffer[-1]))
        return results

    results = run_ranks(len(hosts), on_rank, hosts=list(hosts))
    return results, gather(folder)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDIST_TRACE", str(tmp_path / "traces"))
    return tmp_path / "traces"


@pytest.mark.parametrize("hosts", ["a", "aa", "aaa", "ab", "aab"])
def test_every_call_is_noted_and_results_are_the_same(hosts, folder):
    results, (recordings, problems) = traced(hosts, folder)
    total = sum(range(len(hosts)))
    assert results == [[float(total + call * len(hosts)) for call in range(3)]] * len(hosts)
    assert problems == [] and list(recordings) == list(range(len(hosts)))
    for recording in recordings.values():
        names = [recording.names[event[4]] for event in recording.events.tolist() if event[0] == kinds.ARRIVE]
        assert len([name for name in names if name.startswith("all_reduce(sum)")]) == 3
        assert (recording.events[:, 1] <= recording.events[:, 2]).all()


def test_a_call_contains_what_is_done_in_it(folder):
    _, (recordings, _) = traced("aa", folder, elements=5000)
    for recording in recordings.values():
        spans = {call: (begin, end) for kind, begin, end, call, _ in recording.events.tolist() if kind == kinds.CALL}
        inner = (kinds.ARRIVE, kinds.PACK, kinds.REDUCE, kinds.SEND, kinds.UNPACK)
        held = [event for event in recording.events.tolist() if event[0] in inner and event[3] in spans]
        assert held
        assert all(spans[event[3]][0] <= event[1] and event[2] <= spans[event[3]][1] for event in held)


@pytest.mark.parametrize("size", [2, 3])
def test_on_one_node_each_stripe_is_noted_when_it_is_packed_and_when_its_sums_are_copied_out(size, folder):
    _, (recordings, _) = traced("a" * size, folder, elements=5000)
    for recording in recordings.values():
        events = recording.events.tolist()
        packed, taken = ([event for event in events if event[0] == kind] for kind in (kinds.PACK, kinds.UNPACK))
        assert len(packed) > 3 and [event[3:] for event in packed] == [event[3:] for event in taken]
        assert all(pack[2] <= take[1] for pack, take in zip(packed, taken, strict=True))


def test_the_sum_of_a_short_buffer_is_noted_in_every_call(folder):
    _, (recordings, _) = traced("aa", folder, calls=5)
    for recording in recordings.values():
        events = recording.events.tolist()
        calls = {event[3] for event in events if event[0] == kinds.CALL}
        reduced = [event[3] for event in events if event[0] == kinds.REDUCE]
        assert len(reduced) == len(set(reduced)) == 5 and set(reduced) <= calls


def test_what_is_sent_from_elsewhere_is_noted_too(folder):
    def on_rank():
        communicator, buffer = world_communicator(), numpy.zeros(5, "f4")
        where = Pieces((0, 5))
        bound = communicator.reduction(Way("ring"), where, where, (buffer.dtype,) * 3, "sum")

        def move(watch):
            bound.run(watch, (numpy.full(5, 3.0, "f4"),), (buffer,))

        Once(communicator, Call("odd"), move)(None)
        return buffer.tolist()

    assert run_ranks(2, on_rank) == [[6.0] * 5] * 2
    for recording in gather(folder)[0].values():
        assert [event[0] for event in recording.events.tolist()].count(kinds.REDUCE) == 1


def test_a_list_unlike_the_last_one_is_no_call(folder):
    def on_rank():
        fused = Engine(world_communicator())
        for shape in [(3,), (4,), (5,)]:
            fused([numpy.ones(shape, "f4"), numpy.ones(2, "f4")])

    run_ranks(2, on_rank)
    for recording in gather(folder)[0].values():
        calls = [event[3] for event in recording.events.tolist() if event[0] == kinds.CALL]
        assert len(calls) == len(set(calls))


def test_calls_of_all_ranks_are_compared(folder):
    _, (recordings, _) = traced("aaa", folder, calls=5)
    late = lateness(recordings)
    assert sum(each.last for each in late.values()) == late[0].calls >= 5


def test_clocks_are_compared_between_nodes_only_and_again_later(folder):
    _, (recordings, _) = traced("aab", folder, calls=70)
    numbers = {rank: len(recording.about.offsets) for rank, recording in recordings.items()}
    assert numbers[0] == numbers[1] == numbers[2] >= 2  # at the start, and in call 64
    assert all(offset == 0 for rank in (0, 1) for _, offset in recordings[rank].about.offsets)


def test_on_one_node_no_clock_is_compared(folder):
    _, (recordings, _) = traced("aa", folder)
    assert all(recording.about.offsets == [] for recording in recordings.values())


def test_threads_of_one_process_have_one_clock(tmp_path):
    """Offsets are within the time of the messages that told them."""

    def on_rank():
        communicator = world_communicator()
        with communicator.control.turnstile:
            return clock_offset(transports.world(), communicator.begin(communicator.call("clocks")))

    offsets = run_ranks(4, on_rank, hosts=list("abbc"))
    assert offsets[0] == 0 and offsets[1] == offsets[2]
    assert max(map(abs, offsets)) < 1_000_000_000


def test_a_rank_that_fails_leaves_its_trace(folder):
    def on_rank():
        communicator = world_communicator()
        communicator.barrier()
        if communicator.rank == 1:
            raise ValueError("on purpose")
        communicator.barrier()

    with pytest.raises(ValueError, match="on purpose"):
        run_ranks(2, on_rank)
    recordings, problems = gather(folder)
    assert list(recordings) == [0, 1] and problems == []


def test_without_a_trace_nothing_stands_in_between():
    def on_rank():
        communicator, transport = world_communicator(), transports.world().transport
        same = communicator.transport is transport and communicator.turnstile is communicator.control.turnstile
        return communicator.observer is NOBODY, same, communicator.begin.__self__, communicator.turnstile.leave

    for nobody, same, check, leave in run_ranks(2, on_rank):
        assert nobody and same and type(check) is CallCheck
        assert isinstance(leave, BuiltinMethodType)  # leaving is no function of Python


def test_a_trace_assigns_nothing_of_the_channel_and_nothing_of_the_communicator_when_it_is_made(folder, monkeypatch):
    assigned = []

    def note(own, name, value):
        module = sys._getframe(1).f_globals["__name__"]
        if module.startswith("mpidist.tracing") or (is_made and isinstance(own, Communicator)):
            assigned.append((type(own).__name__, name, module))
        object.__setattr__(own, name, value)

    is_made = []
    for kind in (ControlChannel, Communicator, Turnstile):
        monkeypatch.setattr(kind, "__setattr__", note, raising=False)
    start = Tracer.start

    def noted_start(*arguments):
        is_made.append(True)
        start(*arguments)
        is_made.clear()

    monkeypatch.setattr(Tracer, "start", noted_start)

    def on_rank():
        communicator = world_communicator()
        turnstile = communicator.turnstile
        communicator.all_reduce(numpy.ones(5, "f4"))
        return communicator.turnstile is turnstile, communicator.observer is not NOBODY

    assert run_ranks(1, on_rank) == [(True, True)]
    assert assigned == []


def test_messages_between_two_ranks_go_through_the_turnstile_of_the_communicator(folder):
    def on_rank():
        communicator = world_communicator()
        bound = (communicator.send_init if communicator.rank == 0 else communicator.receive_init)(
            numpy.ones(3), 1 - communicator.rank
        )
        turnstiles = {communicator.turnstile, communicator.point_to_point.turnstile, bound._turnstile}
        return len(turnstiles), communicator.turnstile is communicator.control.turnstile

    assert run_ranks(2, on_rank) == [(1, False)] * 2


@pytest.mark.parametrize("leave", ["leave", "leave_by"])
def test_a_signal_while_the_end_of_a_call_is_noted_leaves_the_turnstile_free(folder, leave):
    def on_rank():
        communicator = world_communicator()

        def interrupt(*arguments, **more):
            raise KeyboardInterrupt

        turnstile = communicator.turnstile
        turnstile.enter()
        communicator.begin(communicator.call("one"))
        with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(communicator.observer.trace, "add", interrupt)
            turnstile.leave() if leave == "leave" else turnstile.leave_by(ValueError())
        communicator.barrier()
        return communicator.control.call

    assert run_ranks(1, on_rank) == [4]  # two calls began the trace


def test_no_method_of_what_is_traced_is_replaced(folder):
    def on_rank():
        communicator = world_communicator()
        communicator.all_reduce(numpy.ones(5000, "f4"))
        bound = communicator.all_reduce_init([numpy.ones(5000, "f4")])
        bound([numpy.ones(5000, "f4")])
        things = [communicator, communicator.control, communicator._memory, transports.world().transport, bound]
        return [
            name
            for thing in things
            for name in getattr(thing, "__dict__", {})
            if callable(getattr(type(thing), name, None))
        ]

    assert run_ranks(2, on_rank) == [[], []]


def test_sums_and_updates_in_gradient_buffers_are_noted(folder, monkeypatch):
    monkeypatch.setattr(update, "LEAST_BYTES", 1)

    def on_rank():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            v = mpidist.Variable(numpy.zeros(500, "f4"))
            optimizer = mpidist.optimizers.SGD(0.5)
        buffers = strategy.extended.gradient_buffers([v])
        buffers[0][...] = 1
        strategy.run(lambda: mpidist.get_replica_context().all_reduce("sum", buffers))
        strategy.run(optimizer.apply_gradients, args=([(buffers[0], v)],))
        return float(v.value[0])

    assert run_ranks(2, on_rank) == [-1.0, -1.0]
    recordings, _ = gather(folder)
    for recording in recordings.values():
        found = recording.events[:, 0].tolist()
        assert found.count(kinds.REDUCE) == 2 and kinds.APPLY in found


@pytest.mark.parametrize("hosts", ["ab", "abab", "aab"])
def test_every_bucket_is_noted_from_being_packed_to_having_come_back(hosts, folder):
    def on_rank():
        communicator = world_communicator()
        buffer = numpy.full(5000, communicator.rank, dtype=numpy.float32)
        communicator.all_reduce(buffer, algorithm="two_level")
        return float(buffer[-1])

    assert run_ranks(len(hosts), on_rank, hosts=list(hosts)) == [sum(range(len(hosts)))] * len(hosts)
    recordings, _ = gather(folder)
    for recording in recordings.values():
        events = {kind: [list(event) for event in recording.events if event[0] == kind] for kind in range(9)}
        (reduced,) = events[kinds.REDUCE]
        sent = [event for event in events[kinds.SEND] if event[4]]
        assert len(sent) > 1 and sorted(event[4] for event in sent) == list(range(1, len(sent) + 1))
        assert {event[3] for event in sent} == {reduced[3]}
        assert all(reduced[1] <= event[1] <= event[2] <= reduced[2] for event in sent)
        assert min(event[1] for event in events[kinds.PACK]) < min(event[1] for event in sent)
        assert max(event[2] for event in sent) <= max(event[2] for event in events[kinds.UNPACK])


def test_without_a_trace_a_call_is_left_by_the_lock_alone(monkeypatch):
    monkeypatch.delenv("MPIDIST_TRACE", raising=False)
    turnstile = run_ranks(1, lambda: world_communicator().control.turnstile)[0]
    assert type(turnstile) is Turnstile and turnstile.leave == turnstile._lock.release
