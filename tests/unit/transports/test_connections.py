"""Connections between threads: through shared memory where they are on one node, by messages where they are not."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.errors import CollectiveMismatchError, RankFailedError, TransportTimeoutError
from mpidist.testing import run_ranks
from mpidist.transports import world
from mpidist.transports.connections.open import open_connections
from tests.helpers.connection_checks import CHECKS, RING_BYTES, content

#: Hosts: all on one, each on its own, and both kinds of connection at once.
PLACES = {
    "one node": lambda n: ["a"] * n,
    "apart": lambda n: [f"h{i}" for i in range(n)],
    "pairs": lambda n: [f"h{i // 2}" for i in range(n)],
}


def _connections(ring_bytes=RING_BYTES):
    everyone = world().transport
    return open_connections(
        world(), [peer for peer in range(everyone.size) if peer != everyone.rank], ring_bytes=ring_bytes
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_connection(check, size, place):
    hosts = PLACES[place](size)

    def on_rank():
        connections = _connections()
        rank = world().transport.rank
        assert {peer: connection.is_shared for peer, connection in connections.items()} == {
            peer: hosts[peer] == hosts[rank] for peer in range(size) if peer != rank
        }
        check(rank, connections)

    run_ranks(size, on_rank, hosts=hosts, timeout_seconds=60)


#: What a rank does, one after the other: send a header of so many bytes, and a payload or none, or receive.
ACTIONS = st.lists(
    st.one_of(st.none(), st.tuples(st.integers(0, 3000), st.one_of(st.none(), st.integers(0, 3000)))), max_size=30
)


@pytest.mark.parametrize("place", ["one node", "apart"])
@settings(deadline=None, max_examples=40)
@given(st.tuples(ACTIONS, ACTIONS))
def test_any_sequence_of_sends_and_receives_arrives_whole_and_in_order(place, actions):
    def on_rank():
        rank = world().transport.rank
        ((peer, connection),) = _connections().items()
        got, sent = [], 0
        areas = []
        for action in actions[rank]:
            if action is None:
                got += [] if (message := connection.receive()) is None else [message]
                continue
            nbytes, payload_bytes = action
            area = None
            if payload_bytes is not None:
                area = connection.area(payload_bytes)
                area.array[:] = list(content(rank, peer, sent, payload_bytes))
                areas.append(area)
            connection.send(content(rank, peer, sent, nbytes), area)
            sent += 1
        expected = [action for action in actions[peer] if action is not None]
        while len(got) < len(expected):
            got.append(connection.wait())
        for index, (message, (nbytes, payload_bytes)) in enumerate(zip(got, expected, strict=True)):
            assert message.header == content(peer, rank, index, nbytes)
            payload = None if message.payload is None else message.payload.tobytes()
            assert payload == (None if payload_bytes is None else content(peer, rank, index, payload_bytes))
            message.release()
        for area in areas:
            area.wait_free()

    run_ranks(2, on_rank, hosts=PLACES[place](2), timeout_seconds=30)


def test_a_shared_area_is_busy_until_the_peer_releases_it():
    def on_rank():
        ((_, connection),) = _connections().items()
        if world().transport.rank == 0:
            area = connection.area(8)
            connection.send(b"look", area)
            assert connection.wait().header == b"seen, and kept" and area.busy
            with pytest.raises(ValueError, match="is busy; call wait_free"):
                connection.send(b"again", area)
            connection.send(b"release it")
            area.wait_free()
            assert not area.busy
        else:
            message = connection.wait()
            connection.send(b"seen, and kept")
            assert connection.wait().header == b"release it"
            message.release()

    run_ranks(2, on_rank)


@pytest.mark.parametrize("place", ["one node", "apart"])
def test_a_connection_is_lost_when_the_peer_has_left_and_all_that_it_sent_has_been_received(place):
    def on_rank():
        ((peer, connection),) = _connections().items()
        if world().transport.rank == 1:
            connection.send(b"one")
            connection.send(b"two")
            return
        while not connection.gone:
            assert not connection.lost
        assert not connection.lost
        assert [connection.wait().header for _ in range(2)] == [b"one", b"two"]
        with pytest.raises(RankFailedError, match=r"rank 0 waits for a message of rank 1 .*: rank 1 .* left") as caught:
            connection.wait()
        assert connection.lost and caught.value.rank == peer
        with pytest.raises(RankFailedError, match="left"):
            connection.send(b"to nobody")

    run_ranks(2, on_rank, hosts=PLACES[place](2), eager_bytes=1 << 20)


@pytest.mark.parametrize("place", ["one node", "apart"])
def test_who_waits_for_a_rank_that_fails_names_it(place):
    def on_rank():
        connections = _connections()
        if world().transport.rank == 2:
            raise ValueError("boom")
        with pytest.raises(RankFailedError, match="rank 2 .* failed while this rank was in this wait.*boom") as caught:
            connections[1 - world().transport.rank].wait()
        assert caught.value.rank == 2

    with pytest.raises(ValueError, match="boom"):
        run_ranks(3, on_rank, hosts=PLACES[place](3))


def test_a_wait_has_a_deadline_and_says_what_it_waited_for():
    def on_rank():
        ((_, connection),) = _connections().items()
        if world().transport.rank == 0:
            with pytest.raises(TransportTimeoutError, match="rank 0 waits for the answer: nothing came in 0.1"):
                connection.wait("rank 0 waits for the answer", timeout_seconds=0.1)

    def both():
        on_rank()
        while world().transport.rank == 1 and not world().control.board.alarm:
            time.sleep(0)

    run_ranks(2, both)


def test_ranks_that_do_not_name_each_other_are_named_on_all_ranks():
    def on_rank():
        rank = world().transport.rank
        with pytest.raises(CollectiveMismatchError, match=r"rank 0 names rank 2, which names \[1\]"):
            open_connections(world(), {0: [2], 1: [2], 2: [1]}[rank])

    run_ranks(3, on_rank)


def test_a_rank_has_no_connection_to_itself():
    with pytest.raises(ValueError, match="rank 0 of 2: connections to \\[0\\]"):
        run_ranks(2, lambda: open_connections(world(), [world().transport.rank]))


def test_connections_of_some_pairs_only():
    def on_rank():
        rank = world().transport.rank
        connections = open_connections(world(), {0: [3], 1: [3], 2: [], 3: [0, 1]}[rank])
        for peer, connection in connections.items():
            connection.send(content(rank, peer, 0, 100))
        assert {peer: connection.wait().header for peer, connection in connections.items()} == {
            peer: content(peer, rank, 0, 100) for peer in connections
        }

    run_ranks(4, on_rank, hosts=["a", "b", "a", "a"])


def test_connections_are_opened_more_than_once():
    def on_rank():
        rank = world().transport.rank
        first, second = _connections()[1 - rank], _connections()[1 - rank]
        second.send(b"second")
        first.send(b"first")
        assert (first.wait().header, second.wait().header) == (b"first", b"second")

    run_ranks(2, on_rank)
    run_ranks(2, on_rank, hosts=["a", "b"])
