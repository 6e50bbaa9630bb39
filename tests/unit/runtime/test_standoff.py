"""Standoffs are found, by one process of each circle, and nothing else is taken for one."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.errors import RankFailedError, TransportError
from mpidist.options import Settings
from mpidist.runtime.board import StatusBoard
from mpidist.runtime.control import ControlChannel
from mpidist.runtime.standoff import Standoffs, _has_one_thread


class Processes:
    """Processes that wait for each other: each in a world of its own with the one it waits for."""

    def __init__(self, targets, blocked=lambda: True):
        self.standoffs = [Standoffs(number, blocked) for number in range(1, len(targets) + 1)]
        self.waits = {process: self._wait(process, target) for process, target in enumerate(targets)
                      if target is not None}  # fmt: skip

    def _wait(self, process, target):
        """Return the channel and the watch of a process that waits in a new world of it and its target."""
        board = StatusBoard(bytearray(StatusBoard.nbytes(2)), 2)
        channels = [ControlChannel(rank, 2, board, [0, 1], chosen=Settings(), job_ranks=[process, target])
                    for rank in (0, 1)]  # fmt: skip
        for channel, owner in zip(channels, (process, target), strict=True):
            self.standoffs[owner].add(channel)
        return channels[0], channels[0].begin("all_reduce", 1), channels[1]

    def look(self, process):
        if process not in self.waits:
            return None
        control, watch, _ = self.waits[process]
        return self.standoffs[process].error(control, watch)

    def found(self, order):
        """Return which processes find a standoff when they look in that order."""
        return {process for process in order if self.look(process) is not None}


def circles(targets):
    """Return the circles among processes each of which waits for one other, or for none."""
    found = set()
    for start in range(len(targets)):
        path, at = [], start
        while at is not None and at not in path:
            path.append(at)
            at = targets[at]
        if at is not None:
            found.add(frozenset(path[path.index(at) :]))
    return found


@st.composite
def graphs(draw):
    size = draw(st.integers(2, 7))
    others = [st.none() | st.sampled_from([other for other in range(size) if other != each]) for each in range(size)]
    order = draw(st.lists(st.permutations(range(size)), min_size=3 * size, max_size=3 * size))
    return [draw(other) for other in others], [process for turn in order for process in turn]


@given(graphs())
def test_one_process_of_each_circle_finds_it_and_no_other_does(graph):
    targets, order = graph
    found = Processes(targets).found(order)
    assert all(len(found & circle) == 1 for circle in circles(targets))
    assert found <= set().union(*circles(targets))


@given(st.permutations(range(4)))
def test_a_circle_that_opens_is_none(order):
    processes = Processes([1, 2, 3, 0])
    processes.found(order)  # labels are on their way
    control, watch, awaited = processes.waits.pop(0)
    awaited.begin("all_reduce", 1)  # process 1 comes after all, from another wait
    assert processes.standoffs[0].error(control, watch) is None
    assert processes.found([*order] * 12) == set()


def test_a_rank_that_waits_for_the_next_missing_one_starts_anew():
    board = StatusBoard(bytearray(StatusBoard.nbytes(3)), 3)
    three = [ControlChannel(rank, 3, board, [0, 1, 2], chosen=Settings()) for rank in range(3)]
    two = StatusBoard(bytearray(StatusBoard.nbytes(2)), 2)
    back = [ControlChannel(rank, 2, two, [0, 1], chosen=Settings()) for rank in range(2)]  # ranks 0 and 2
    first, last = Standoffs(1, lambda: True), Standoffs(3, lambda: True)
    for standoffs, channels in ((first, (three[0], back[0])), (last, (three[2], back[1]))):
        for channel in channels:
            standoffs.add(channel)
    watch, late = three[0].begin("x", 1), back[1].begin("y", 1)
    for _ in range(9):  # rank 0 waits for rank 1, which is only slow
        assert (first.error(three[0], watch), last.error(back[1], late)) == (None, None)
    three[1].begin("x", 1)
    found = [error for _ in range(9) for error in (first.error(three[0], watch), last.error(back[1], late)) if error]
    assert found and {type(error) for error in found} == {TransportError}


def test_the_error_names_the_call_the_rank_and_the_cure():
    processes = Processes([1, 0])
    errors = [error for _ in range(5) for process in (0, 1) if (error := processes.look(process))]
    text = str(errors[0])
    assert (
        text.startswith("rank 0 of 2 (rank ") and "of COMM_WORLD): all_reduce (call 1) waits for rank 1 (rank " in text
    )
    assert "which waits in another world" in text and "in the same order on all of these ranks" in text


def test_a_process_with_other_threads_is_not_taken_for_blocked(monkeypatch):
    assert Processes([1, 0], blocked=lambda: False).found([0, 1] * 9) == set()
    # plugins of pytest have threads too
    enumerate_all, others = threading.enumerate, set(threading.enumerate()) - {threading.current_thread()}
    monkeypatch.setattr(threading, "enumerate", lambda: [each for each in enumerate_all() if each not in others])
    assert _has_one_thread()
    release = threading.Event()
    for name, expected in (("mpidist-prefetch", True), ("the user's", False)):
        thread = threading.Thread(target=release.wait, name=name)
        thread.start()
        assert _has_one_thread() == expected
        release.set()
        thread.join()
        release.clear()


def test_a_process_with_one_world_does_not_look():
    board = StatusBoard(bytearray(StatusBoard.nbytes(2)), 2)
    channel, standoffs = ControlChannel(0, 2, board, [0, 1], chosen=Settings()), Standoffs(1, pytest.fail)
    standoffs.add(channel)
    assert standoffs.error(channel, channel.begin("x", 1)) is None


def test_the_others_of_the_world_are_told_by_the_wait():
    processes = Processes([1, 0])
    for process, (control, _, _) in processes.waits.items():
        control.standoffs = processes.standoffs[process]
    found = []
    while not found:
        for control, watch, other in processes.waits.values():
            if (error := control.standoff(watch)) is not None:
                found.append((error, other))
    error, other = found[0]
    told = other.failures.first(other.begin("all_reduce", 1))
    assert isinstance(told, RankFailedError) and "none of them can go on" in str(told)
