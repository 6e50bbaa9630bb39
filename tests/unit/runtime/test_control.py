"""The control channel: numbered calls, deadlines, and who is named when something goes wrong."""

import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mpidist.errors import RankFailedError, TransportTimeoutError
from mpidist.options import Settings
from mpidist.runtime import watch as watch_module
from mpidist.runtime.control import ControlChannel

QUICK = Settings(timeout_seconds=0.2, warn_seconds=0)


def _channels(size, chosen=QUICK):
    return ControlChannel.for_threads(size, [f"node{rank}" for rank in range(size)], chosen)


def _wait_forever(watch):
    while True:
        watch.tick()


def _meet_all(channels, digests):
    results = [None] * len(channels)

    def run(rank):
        results[rank] = channels[rank].meet(channels[rank].begin("all_reduce", digests[rank]))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(channels))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_equal_digests_meet_on_all_ranks_again_and_again(size):
    channels = _channels(size, replace(QUICK, timeout_seconds=30))
    for call in range(1, 6):
        assert _meet_all(channels, [17 + call] * size) == [True] * size
        assert [channel.call for channel in channels] == [call] * size


def test_one_other_digest_is_seen_by_all_ranks():
    channels = _channels(4, replace(QUICK, timeout_seconds=30))
    assert _meet_all(channels, [5, 5, 6, 5]) == [False] * 4
    assert _meet_all(channels, [7, 7, 7, 7]) == [True] * 4


def test_a_deadline_names_who_did_not_come_and_the_call():
    channels = _channels(3)
    channels[2].begin("broadcast of float32[3]", 1)
    watch = channels[0].begin("broadcast of float32[3]", 1)
    expected = r"rank 0 of 3: broadcast of float32\[3\].*rank 1 \(node1\)"
    with pytest.raises(TransportTimeoutError, match=expected) as caught:
        channels[0].meet(watch)
    assert "rank 2" not in str(caught.value)


def test_after_a_deadline_every_later_call_raises_the_same_and_so_do_the_others():
    channels = _channels(2)
    with pytest.raises(TransportTimeoutError) as first:
        channels[0].meet(channels[0].begin("barrier", 1))
    with pytest.raises(TransportTimeoutError) as again, channels[0].turnstile:
        pass
    assert str(again.value) == str(first.value)
    with pytest.raises(TransportTimeoutError, match=r"waited [\d.]+ s for rank 1"):
        _wait_forever(channels[1].watch("receive"))


def test_a_timeout_of_0_never_expires():
    channels = _channels(2, QUICK)
    watch = channels[0].begin("barrier", 1, timeout_seconds=0)
    end = threading.Event()
    timer = threading.Timer(0.5, end.set)
    timer.start()
    while not end.is_set():
        watch.tick()
    timer.join()


def test_a_rank_that_failed_is_named_with_the_last_line_of_its_traceback():
    channels = _channels(3)
    channels[1].fail("Traceback (most recent call last):\n  ...\nValueError: boom\n")
    with pytest.raises(RankFailedError, match=r"rank 1 \(node1\) failed.*all_reduce: ValueError: boom") as caught:
        channels[0].meet(channels[0].begin("all_reduce", 1))
    assert caught.value.rank == 1


def test_a_rank_that_left_before_this_call_is_named_with_its_number_of_calls():
    channels = _channels(2)
    channels[1].begin("barrier", 1)
    channels[0].begin("barrier", 1)
    channels[1].leave()
    with pytest.raises(RankFailedError, match=r"rank 1 \(node1\) left .* after 1 collective calls.* in call 2, gather"):
        channels[0].meet(channels[0].begin("gather", 2))


def test_a_rank_that_left_after_this_call_is_no_error():
    channels = _channels(2)
    watch = channels[0].begin("barrier", 1)
    channels[1].begin("barrier", 1)
    channels[1].leave()
    assert channels[0].meet(watch)


def test_who_left_is_named_before_who_failed_because_of_it():
    channels = _channels(3)
    channels[2].fail("RankFailedError: rank 1 left")
    channels[1].leave()
    with pytest.raises(RankFailedError) as caught:
        channels[0].meet(channels[0].begin("all_reduce", 1))
    assert caught.value.rank == 1


def test_who_failed_on_its_own_account_is_named_before_who_failed_because_of_it():
    channels = _channels(3)
    channels[0].fail("Traceback\nmpidist.errors.RankFailedError: rank 0 of 3: rank 1 (node1) failed\n")
    channels[1].fail("Traceback\nValueError: boom\n")
    with pytest.raises(RankFailedError, match="ValueError: boom") as caught:
        channels[2].meet(channels[2].begin("all_reduce", 1))
    assert caught.value.rank == 1


def test_a_rank_that_failed_in_a_later_call_has_done_its_part_of_this_one():
    channels = _channels(3, replace(QUICK, timeout_seconds=30))
    watch = channels[0].begin("all_reduce", 1)
    for call in (1, 2):
        channels[1].begin("all_reduce", call)
    channels[2].begin("all_reduce", 1)
    channels[2].leave()
    channels[1].fail("mpidist.errors.RankFailedError: rank 2 left")
    watch.tick()  # which looks at the alarm
    assert channels[0].meet(watch)
    with pytest.raises(RankFailedError, match="rank 2 .* left") as caught:
        channels[0].meet(channels[0].begin("all_reduce", 2))
    assert caught.value.rank == 2


def test_a_long_wait_warns_once_from_the_lowest_waiting_rank(capsys, monkeypatch):
    clock = itertools.count(0.0, 1e-3)  # a time of its own: a busy machine may stop this process anywhere
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=clock.__next__, sleep=lambda seconds: None))
    channels = _channels(3, Settings(timeout_seconds=0.6, warn_seconds=0.1))
    watches = [channels[rank].begin("all_reduce", 1) for rank in (0, 1)]
    for _ in range(2):
        with pytest.raises(TransportTimeoutError):
            while True:
                for watch in watches:
                    watch.tick()
    lines = [line for line in capsys.readouterr().err.splitlines() if "has waited" in line]
    assert len(lines) == 1
    assert lines[0].startswith("mpidist: rank 0 of 3: all_reduce (call 1) has waited")
    assert "for rank 2 (node2)" in lines[0] and "fails after 0.6 s" in lines[0]


def test_many_missing_ranks_are_counted_not_listed():
    channels = _channels(20)
    with pytest.raises(TransportTimeoutError, match=r"rank 8 \(node8\), and 11 more"):
        channels[0].meet(channels[0].begin("barrier", 1))


@pytest.mark.parametrize("duties", [{}, {1: ("ps 0", "Start again.")}])
def test_a_rank_with_a_duty_is_named_by_it_and_what_to_do_is_said(duties):
    channel = _channels(2)[0]
    channel.duties = duties
    error = channel.failures.died(1, channel.watch("a wait"))
    assert error.rank == 1
    begins, ends = (
        ("ps 0 (rank 1 (node1)) died in a wait: ", ". Start again.") if duties else ("rank 1 (node1) died", "")
    )
    assert str(error).startswith(f"rank 0 of 2: {begins}")
    assert str(error).endswith(f"is gone (killed, or out of memory){ends}")


@pytest.mark.parametrize("has_waited", [False, True])
@pytest.mark.parametrize("stopped", [0, 2])
def test_a_deadline_names_a_rank_that_has_come_and_does_not_move_on(stopped, has_waited, capsys):
    channels = _channels(3, Settings(timeout_seconds=2, warn_seconds=0.5))
    watches = [channel.begin("all_reduce", 1) for channel in channels]
    while has_waited and not channels[0].board.waiting[stopped]:
        watches[stopped].tick()
    waiting = [rank for rank in range(3) if rank != stopped]
    with pytest.raises(TransportTimeoutError) as caught:
        while True:
            for rank in waiting:
                watches[rank].tick()
    expected = f"s for rank {stopped} (node{stopped}), which came to this call and does not move on in it (stopped"
    assert expected in str(caught.value)
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "has waited" in line]
    assert warning.startswith(f"mpidist: rank {waiting[0]} of 3: ") and expected in warning


def test_a_deadline_names_nobody_where_all_have_come_and_wait():
    channels = _channels(3, replace(QUICK, timeout_seconds=1))
    watches = [channel.begin("all_reduce", 1) for channel in channels]
    with pytest.raises(TransportTimeoutError, match=r"s for a message \(all ranks have come, and wait\)"):
        while True:
            for watch in watches:
                watch.tick()


@pytest.mark.parametrize("end", [lambda channel: channel.fail("boom"), lambda channel: channel.leave()])
def test_what_is_to_be_done_at_the_end_is_done_before_others_hear_of_it_and_may_end_the_job(end):
    channel, seen = _channels(2)[0], []
    channel.at_end.append(lambda: seen.append(channel.board.state(channel.board_index)))
    before = channel.board.state(channel.board_index)
    end(channel)
    assert seen == [before] and channel.board.state(channel.board_index) != before
