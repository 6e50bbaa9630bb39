"""One collective call at a time, each one whole."""

import threading

import numpy
import pytest

from mpidist.collectives.engine import Engine
from mpidist.errors import CollectiveMismatchError, RankFailedError, TransportError
from mpidist.options import Settings
from mpidist.runtime.control import ControlChannel
from mpidist.testing import run_ranks
from mpidist.world import world_communicator


def _channels(size=2):
    return ControlChannel.for_threads(size, chosen=Settings(timeout_seconds=5, warn_seconds=0))


def test_a_second_thread_is_turned_away_and_told_why():
    channel, caught = _channels()[0], []

    def other():
        try:
            with channel.turnstile:
                pass
        except RuntimeError as error:
            caught.append(str(error))

    with channel.turnstile:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(caught) == 1 and "from one thread" in caught[0]
    with channel.turnstile:  # and the next one passes
        pass


def test_a_call_that_is_broken_off_ends_the_channel_and_is_told_to_the_others():
    first, second = _channels()
    with pytest.raises(KeyboardInterrupt), first.turnstile:
        first.begin("all_reduce", 1)
        raise KeyboardInterrupt
    with (
        pytest.raises(TransportError, match=r"all_reduce \(call 1\) was broken off by KeyboardInterrupt"),
        first.turnstile,
    ):
        pass
    second.meet(second.begin("all_reduce", 1))  # the other had come to this one
    with pytest.raises(RankFailedError, match=r"rank 0 failed.*broken off by KeyboardInterrupt"):
        second.meet(second.begin("all_reduce", 1))


def test_an_error_before_the_call_was_begun_and_a_mismatch_leave_the_channel_whole():
    channel = _channels()[0]
    with pytest.raises(ValueError), channel.turnstile:
        raise ValueError
    with pytest.raises(CollectiveMismatchError), channel.turnstile:
        channel.begin("all_reduce", 1)
        raise CollectiveMismatchError
    with channel.turnstile:
        pass


def test_one_rank_alone_has_nobody_to_get_out_of_step_with():
    channel = _channels(1)[0]
    with pytest.raises(KeyboardInterrupt), channel.turnstile:
        channel.begin("all_reduce", 1)
        raise KeyboardInterrupt
    with channel.turnstile:
        pass


@pytest.mark.parametrize("count", [10, 100_000])
def test_no_rank_computes_with_the_values_of_a_call_that_was_broken_off(count):
    class Broken(Exception):
        pass

    def step():
        communicator = world_communicator()
        fused = Engine(communicator)
        fused([numpy.ones(count)])
        (planned,) = communicator.bindings
        if communicator.rank == 0:
            with pytest.raises(Broken), communicator.control.turnstile:
                communicator.begin(planned.call)
                raise Broken
        with pytest.raises(TransportError, match="broken off by Broken"):
            for _ in range(2):
                fused([numpy.ones(count)])

    run_ranks(2, step)


def test_a_missed_call_that_another_thread_has_posted_meanwhile_is_not_posted_again(monkeypatch):
    first, second = _channels()
    turnstile = first.turnstile

    def acquire_late():
        second.missed.miss("", lambda watch: None)  # it comes to the call, too, so that nobody waits
        with turnstile:  # the other thread, which settles before its own call
            pass
        return True

    monkeypatch.setattr(type(turnstile), "try_acquire", lambda self: self is not turnstile or acquire_late())
    monkeypatch.setattr(type(turnstile), "release", lambda self: None)
    first.missed.miss("boom", lambda watch: None)
    assert not first.missed.pending and first.call == second.call == 1
