"""Finding out who is missing between nodes, over a messenger made of queues."""

import threading
from collections import deque

import pytest

from mpidist.errors import RankFailedError, TransportTimeoutError
from mpidist.options import Settings
from mpidist.runtime import stall
from mpidist.runtime.board import StatusBoard
from mpidist.runtime.control import ControlChannel
from mpidist.runtime.stall import Messenger

QUICK = Settings(timeout_seconds=0.3, warn_seconds=0)


class Queues(Messenger):
    """Notices through lists in this process."""

    def __init__(self, boxes, rank):
        self._boxes, self._rank = boxes, rank

    def send(self, rank, notice):
        self._boxes[rank].append((self._rank, notice))

    def arrived(self):
        while self._boxes[self._rank]:
            yield self._boxes[self._rank].popleft()


def _two_nodes(per_node=2, nodes=2):
    size = nodes * per_node
    boxes = [deque() for _ in range(size)]
    channels = []
    for node in range(nodes):
        board = StatusBoard(bytearray(StatusBoard.nbytes(per_node)), per_node)
        ranks = range(node * per_node, (node + 1) * per_node)
        hosts = [f"host{rank // per_node}" for rank in range(size)]
        channels += [
            ControlChannel(rank, size, board, ranks, hosts=hosts, messenger=Queues(boxes, rank), chosen=QUICK)
            for rank in ranks
        ]
    return channels


def _errors_of_waiting(channels, ranks, what="all_reduce", come=()):
    errors = {}
    # all begin before anybody waits: on a slow machine the first could miss ranks whose thread has not started yet
    watches = {rank: channels[rank].begin(what, 1) for rank in {*ranks, *come}}

    def wait(rank):
        try:
            while True:
                watches[rank].tick()
        except (TransportTimeoutError, RankFailedError) as error:
            errors[rank] = error

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("missing", [1, 3])
def test_all_waiting_ranks_of_all_nodes_name_the_missing_one(missing):
    channels = _two_nodes()
    waiting = [rank for rank in range(4) if rank != missing]
    errors = _errors_of_waiting(channels, waiting)
    assert sorted(errors) == waiting
    for error in errors.values():
        assert isinstance(error, TransportTimeoutError)
        assert f"rank {missing} (host{missing // 2})" in str(error)
        assert not any(f"for rank {rank}" in str(error) for rank in waiting)


def test_a_node_of_which_no_rank_comes_is_named_as_one():
    errors = _errors_of_waiting(_two_nodes(nodes=3), [0, 1, 2])
    assert sorted(errors) == [0, 1, 2]
    expected = "s for rank 3 (host1), rank 4 (host2), rank 5 (host2), all ranks of host2: that node may be down. Every"
    assert all(expected in str(error) for error in errors.values()), errors


@pytest.mark.parametrize("stopped", [1, 3])
def test_all_waiting_ranks_name_one_that_has_come_and_does_not_move_on(stopped):
    channels = _two_nodes()
    for channel in channels:
        channel.settings = Settings(timeout_seconds=3, warn_seconds=0)  # a busy machine holds threads up
    waiting = [rank for rank in range(4) if rank != stopped]
    errors = _errors_of_waiting(channels, waiting, come=[stopped])
    assert sorted(errors) == waiting
    expected = f"s for rank {stopped} (host{stopped // 2}), which came to this call and does not move on"
    assert all(expected in str(error) for error in errors.values())


def test_a_verdict_that_another_node_asked_for_reaches_the_ranks_beside_rank_0():
    channels = _two_nodes()
    for channel in channels[:2]:
        channel.settings = Settings(timeout_seconds=30, warn_seconds=0)  # only rank 2's deadline passes
    errors = _errors_of_waiting(channels, [0, 1, 2])
    assert sorted(errors) == [0, 1, 2]
    for error in errors.values():
        assert isinstance(error, TransportTimeoutError)
        assert "rank 3 (host1)" in str(error)


def test_when_rank_0_is_missing_the_others_say_so_without_its_verdict(monkeypatch):
    monkeypatch.setattr(stall, "_VERDICT_SECONDS", 0.2)  # it never comes
    errors = _errors_of_waiting(_two_nodes(), [1, 2, 3])
    assert sorted(errors) == [1, 2, 3]
    assert all("rank 0 (host0)" in str(error) for error in errors.values())


def test_a_failure_is_told_to_the_other_node():
    channels = _two_nodes()
    channels[3].fail("Traceback ...\nValueError: boom")
    errors = _errors_of_waiting(channels, [0, 1, 2])
    assert {error.rank for error in errors.values()} == {3}
    assert all("ValueError: boom" in str(error) for error in errors.values())


def test_a_rank_that_leaves_is_told_to_rank_0_and_named_there():
    channels = _two_nodes()
    channels[2].leave()
    errors = _errors_of_waiting(channels, [0])
    assert isinstance(errors[0], RankFailedError)
    assert "rank 2 (host1) left" in str(errors[0])


def test_rank_0_leaving_is_told_to_every_node():
    channels = _two_nodes()
    channels[0].leave()
    errors = _errors_of_waiting(channels, [2, 3])
    assert all("rank 0 (host0) left" in str(error) for error in errors.values())
