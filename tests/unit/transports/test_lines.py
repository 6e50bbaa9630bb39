"""Lines between threads: through shared memory where they are on one node, by messages where they pretend not to be."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.errors import CollectiveMismatchError, RankFailedError, TransportTimeoutError
from mpidist.testing import run_ranks
from mpidist.transports import world
from mpidist.transports.lines import open_lines
from tests.lines_checks import CHECKS, RING_BYTES, content

#: Hosts: all on one, each on its own, and both kinds of line at once.
PLACES = {
    "one node": lambda n: ["a"] * n,
    "apart": lambda n: [f"h{i}" for i in range(n)],
    "pairs": lambda n: [f"h{i // 2}" for i in range(n)],
}


def _lines(ring_bytes=RING_BYTES):
    everyone = world().transport
    return open_lines(world(), [peer for peer in range(everyone.size) if peer != everyone.rank], ring_bytes=ring_bytes)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_line(check, size, place):
    hosts = PLACES[place](size)

    def on_rank():
        lines = _lines()
        rank = world().transport.rank
        assert {peer: line.is_shared for peer, line in lines.items()} == {
            peer: hosts[peer] == hosts[rank] for peer in range(size) if peer != rank
        }
        check(rank, lines)

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
        ((peer, line),) = _lines().items()
        got, sent = [], 0
        areas = []
        for action in actions[rank]:
            if action is None:
                got += [] if (message := line.receive()) is None else [message]
                continue
            nbytes, payload_bytes = action
            area = None
            if payload_bytes is not None:
                area = line.area(payload_bytes)
                area.array[:] = list(content(rank, peer, sent, payload_bytes))
                areas.append(area)
            line.send(content(rank, peer, sent, nbytes), area)
            sent += 1
        expected = [action for action in actions[peer] if action is not None]
        while len(got) < len(expected):
            got.append(line.wait())
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
        ((_, line),) = _lines().items()
        if world().transport.rank == 0:
            area = line.area(8)
            line.send(b"look", area)
            assert line.wait().header == b"seen, and kept" and area.busy
            with pytest.raises(ValueError, match="is busy; call wait_free"):
                line.send(b"again", area)
            line.send(b"release it")
            area.wait_free()
            assert not area.busy
        else:
            message = line.wait()
            line.send(b"seen, and kept")
            assert line.wait().header == b"release it"
            message.release()

    run_ranks(2, on_rank)


@pytest.mark.parametrize("place", ["one node", "apart"])
def test_a_line_is_lost_when_the_peer_has_left_and_all_that_it_sent_has_been_received(place):
    def on_rank():
        ((peer, line),) = _lines().items()
        if world().transport.rank == 1:
            line.send(b"one")
            line.send(b"two")
            return
        while not line.gone:
            assert not line.lost
        assert not line.lost
        assert [line.wait().header for _ in range(2)] == [b"one", b"two"]
        with pytest.raises(RankFailedError, match=r"rank 0 waits for a message of rank 1 .*: rank 1 .* left") as caught:
            line.wait()
        assert line.lost and caught.value.rank == peer
        with pytest.raises(RankFailedError, match="left"):
            line.send(b"to nobody")

    run_ranks(2, on_rank, hosts=PLACES[place](2), eager_bytes=1 << 20)


@pytest.mark.parametrize("place", ["one node", "apart"])
def test_who_waits_for_a_rank_that_fails_names_it(place):
    def on_rank():
        lines = _lines()
        if world().transport.rank == 2:
            raise ValueError("boom")
        with pytest.raises(RankFailedError, match="rank 2 .* failed while this rank was in this wait.*boom") as caught:
            lines[1 - world().transport.rank].wait()
        assert caught.value.rank == 2

    with pytest.raises(ValueError, match="boom"):
        run_ranks(3, on_rank, hosts=PLACES[place](3))


def test_a_wait_has_a_deadline_and_says_what_it_waited_for():
    def on_rank():
        ((_, line),) = _lines().items()
        if world().transport.rank == 0:
            with pytest.raises(TransportTimeoutError, match="rank 0 waits for the answer: nothing came in 0.1"):
                line.wait("rank 0 waits for the answer", timeout_seconds=0.1)

    def both():
        on_rank()
        while world().transport.rank == 1 and not world().control.board.alarm:
            time.sleep(0)

    run_ranks(2, both)


def test_ranks_that_do_not_name_each_other_are_named_on_all_ranks():
    def on_rank():
        rank = world().transport.rank
        with pytest.raises(CollectiveMismatchError, match=r"rank 0 names rank 2, which names \[1\]"):
            open_lines(world(), {0: [2], 1: [2], 2: [1]}[rank])

    run_ranks(3, on_rank)


def test_a_rank_has_no_line_to_itself():
    with pytest.raises(ValueError, match="rank 0 of 2: lines to \\[0\\]"):
        run_ranks(2, lambda: open_lines(world(), [world().transport.rank]))


def test_lines_of_some_pairs_only():
    def on_rank():
        rank = world().transport.rank
        lines = open_lines(world(), {0: [3], 1: [3], 2: [], 3: [0, 1]}[rank])
        for peer, line in lines.items():
            line.send(content(rank, peer, 0, 100))
        assert {peer: line.wait().header for peer, line in lines.items()} == {
            peer: content(peer, rank, 0, 100) for peer in lines
        }

    run_ranks(4, on_rank, hosts=["a", "b", "a", "a"])


def test_lines_are_opened_more_than_once():
    def on_rank():
        rank = world().transport.rank
        first, second = _lines()[1 - rank], _lines()[1 - rank]
        second.send(b"second")
        first.send(b"first")
        assert (first.wait().header, second.wait().header) == (b"first", b"second")

    run_ranks(2, on_rank)
    run_ranks(2, on_rank, hosts=["a", "b"])
