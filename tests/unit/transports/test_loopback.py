"""Ranks as threads: the suites of all transports, and the faults that can be ordered."""

import numpy as np
import pytest

from mpidist.errors import RankFailedError, TransportError, TransportTimeoutError, UnsupportedDtypeError
from mpidist.testing import Faults, InjectedFault, run_ranks
from mpidist.testing.conformance import CollectiveTests, DeadlineTests, LoopbackRanks, TransportTests, watch_of
from mpidist.testing.device import on_device, pretended_device
from mpidist.transports import world

#: Deadline in seconds of what never comes.  Who waits for what comes has a long one: machines may be slow.
_SOON = 0.2


class TestLoopback(LoopbackRanks, TransportTests):
    sizes = (1, 2, 3, 4, 8)
    large_bytes = (1 << 18) + 3


class TestEagerLoopback(LoopbackRanks, TransportTests):
    sizes = (2, 3)
    large_bytes = (1 << 18) + 3
    eager_bytes = 1 << 14


class TestSlowLoopback(LoopbackRanks, TransportTests):
    sizes = (2, 3)
    large_bytes = (1 << 18) + 3
    faults = Faults(delay_seconds=lambda source, destination: 0.002 * (source + 1))


class TestLoopbackDeadlines(LoopbackRanks, DeadlineTests):
    pass


class TestLoopbackCollectives(LoopbackRanks, CollectiveTests):
    sizes = (1, 2, 3, 4, 5, 8)  # the checker proves every number; parallel tests run on 8 real ranks


def ring(message=None, timeout_seconds=30.0):
    """Send a number to the right and return the one from the left."""
    transport = world().transport
    right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    got = np.zeros(1, "i8")
    sent = np.array([transport.rank if message is None else message])
    transport.wait([transport.receive(got, left), transport.send(sent, right)], watch_of(transport, timeout_seconds))
    return int(got[0])


def test_a_send_is_done_only_when_it_is_received():
    def blocking_sends_first(timeout_seconds=30.0):
        transport = world().transport
        other, got = 1 - transport.rank, np.zeros(1)
        transport.wait([transport.send(np.ones(1), other)], watch_of(transport, timeout_seconds))
        transport.wait([transport.receive(got, other)], watch_of(transport))
        return got[0]

    with pytest.raises(TransportTimeoutError):
        run_ranks(2, blocking_sends_first, _SOON)
    assert run_ranks(2, blocking_sends_first, eager_bytes=1 << 10) == [1, 1]


def test_an_eager_send_has_copied_its_bytes():
    def overwrite():
        transport = world().transport
        other, sent, got = 1 - transport.rank, np.ones(1), np.zeros(1)
        transport.wait([transport.send(sent, other)], watch_of(transport))
        sent[0] = 5
        transport.wait([transport.receive(got, other)], watch_of(transport))
        return got[0]

    assert run_ranks(2, overwrite, eager_bytes=1 << 10) == [1, 1]


def test_a_lost_message_ends_in_a_timeout_where_it_was_awaited():
    def once():
        return ring(timeout_seconds=_SOON if world().transport.rank == 1 else 30.0)

    with pytest.raises(TransportTimeoutError) as caught:
        run_ranks(3, once, faults=Faults(drop=(0, 1, 0)))
    assert list(caught.value.rank_errors) == [1]


def test_only_the_message_that_was_named_is_lost():
    def twice(second_seconds=30.0):
        return ring(1), ring(2, second_seconds)

    with pytest.raises(TransportTimeoutError) as caught:
        run_ranks(2, twice, _SOON, faults=Faults(drop=(0, 1, 1)))
    assert 1 in caught.value.rank_errors
    assert run_ranks(2, twice, faults=Faults(drop=(0, 1, 2))) == [(1, 2)] * 2


def test_a_rank_fails_at_a_message_and_the_others_hear_of_it():
    def rounds():
        transport = world().transport
        for _ in range(3):
            transport.exchange(b"x", watch_of(transport))

    with pytest.raises(InjectedFault, match="rank 1 of 3") as caught:
        run_ranks(3, rounds, faults=Faults(fail_at=(1, 8)))
    errors = caught.value.rank_errors
    assert set(errors) == {0, 1, 2}
    assert all(isinstance(errors[rank], RankFailedError) and "InjectedFault" in str(errors[rank]) for rank in (0, 2))


def test_messages_must_be_as_long_as_the_array_that_receives_them():
    def mismatch():
        transport = world().transport
        other = 1 - transport.rank
        pendings = [transport.receive(np.zeros(1), other), transport.send(np.zeros(2), other)]
        transport.wait(pendings, watch_of(transport))

    with pytest.raises(TransportError, match="16 bytes from rank . does not fit the 8 bytes"):
        run_ranks(2, mismatch)


def test_arrays_that_are_not_contiguous_are_refused():
    with pytest.raises(ValueError, match="C-contiguous"):
        run_ranks(2, lambda: world().transport.send(np.zeros((4, 4))[:, 1], 0))


def test_device_memory_goes_where_it_is_allowed():
    def send_device():
        transport = world().transport
        got, other = on_device(np.zeros(2)), 1 - transport.rank
        sent = on_device(np.full(2, transport.rank))
        transport.wait([transport.receive(got, other), transport.send(sent.astype("f8"), other)], watch_of(transport))
        return got._hidden.tolist()

    with pretended_device():
        assert run_ranks(2, send_device, memory=frozenset({"device"})) == [[1, 1], [0, 0]]
        with pytest.raises(UnsupportedDtypeError, match="loopback transport moves host memory"):
            run_ranks(2, send_device)
