"""Who looks at a flag of shared memory and then at data has a fence in between; so has who stores them."""

import platform
from collections import deque

import numpy
import pytest

from mpidist.parameter_server import copies
from mpidist.runtime import board, control
from mpidist.runtime.board import StatusBoard
from mpidist.runtime.control import ControlChannel
from mpidist.transports import node_memory
from mpidist.transports.connections import shared
from mpidist.transports.node_memory import SharedSegments
from tests.helpers.memory_order import both_overlooked, stale_data

IS_STRONG = platform.machine() in ("x86_64", "AMD64")


def test_a_flag_is_never_seen_before_its_data():
    assert stale_data(50_000, board.fence) == 0


def test_of_two_that_store_and_look_one_sees_the_other():
    assert both_overlooked(50_000, board.full_fence) == 0


@pytest.mark.skipif(IS_STRONG, reason="this processor keeps the order without fences")
def test_the_stress_finds_a_fence_that_is_missing():
    assert any(stale_data(300_000, lambda: None) for _ in range(20))


# -- where the fences are ---------------------------------------------------------------------------------------------


class Words:
    """Words of memory that note who loads and stores what."""

    def __init__(self, words, log, name=""):
        self._words, self._log, self._name = words, log, name

    def __getitem__(self, key):
        self._log.append(f"load {self._name}{key}")
        return self._words[key]

    def __setitem__(self, key, value):
        self._log.append(f"store {self._name}{key}")
        self._words[key] = value


@pytest.fixture
def log(monkeypatch):
    found = []
    monkeypatch.setattr(control, "needs_fence", True)
    for module in (board, control, node_memory, shared, copies):
        for name in ("fence", "full_fence"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda name=name: found.append(name))
    return found


def _board(log):
    made = StatusBoard(bytearray(StatusBoard.nbytes(2)), 2)
    made.words = Words(made.words, log)
    return made


def test_a_call_is_posted_behind_its_digest(log):
    made = _board(log)
    made.post(0, 2, 17)
    call, _ = made.call_words(0)
    assert log == [f"store {call + 1}", "fence", f"store {call}"]


def test_a_call_begins_with_its_digest_and_is_posted_behind_it(log):
    made = _board(log)
    channel = ControlChannel(1, 2, made, range(2))
    log.clear()
    channel.begin("x", 5)
    call = made.call_words(1)[1]
    assert log == [f"store {call + 1}", "fence", f"store {call}"]
    assert made.digest(1, 1) == 5 and made.call(1) == 1


def test_a_digest_is_read_behind_its_call(log):
    made = _board(log)
    channels = [ControlChannel(rank, 2, made, range(2)) for rank in range(2)]
    for channel in channels:
        watch = channel.begin("x", 5)
    log.clear()
    assert channels[1].meet(watch)
    call = made.call_words(0)[1]
    assert log.index(f"load {call}") < log.index("fence") < log.index(f"load {call + 1}")


@pytest.mark.parametrize("read", [lambda b: b.text(0), lambda b: b.note(0, 2), lambda b: b.digest(0, 2)])
def test_what_comes_with_a_state_or_a_call_is_read_behind_a_fence(log, read):
    read(_board(log))
    assert log[0] == "fence"


def test_segments_are_read_behind_the_flag_and_said_behind_the_data(log):
    segments = SharedSegments(bytearray(SharedSegments.nbytes(2, 4096, 4096)), 2, 4096, 4096)
    segments.flags = Words(segments.flags, log)
    for say in (segments.say_filled, segments.say_reduced, segments.say_taken):
        log.clear()
        say(1, 1)
        assert log[0] == "fence" and log[1].startswith("store") and len(log) == 2
    log.clear()
    segments.wait([segments.filled_words[1]], 1, None)
    assert log == [f"load {segments.filled_words[1]}", "fence"]


def test_a_record_of_a_connection_is_read_behind_the_one_look_at_the_counter(log):
    counters = memoryview(bytearray(128)).cast("Q")
    ring = bytearray(4096)
    record = shared._record(b"hello", 0, 0, 0)
    ring[: len(record)] = record
    counters[shared._FILLED] = len(record)
    connection = object.__new__(shared.SharedConnection)
    connection._in_words, connection._in = Words(counters, log), ring
    connection._emptied, connection._size = 0, 4096
    connection._inbox, connection._parts = deque(), bytearray()
    assert connection.take_in() and connection._inbox[0].header == b"hello"
    assert log == [f"load {shared._FILLED}", "fence", "fence", f"store {shared._EMPTIED}"]


def test_an_area_is_filled_again_behind_the_look_whether_it_is_busy(log):
    words = numpy.zeros(8, numpy.uint64)
    area = object.__new__(shared.SharedArea)
    area.words = Words(words, log)
    assert not area.busy
    assert log == [f"load {shared._BUSY}", "fence"]


def test_a_copy_of_a_server_is_read_behind_the_second_look(log):
    reader = object.__new__(copies.Reader)
    words = numpy.zeros(64, numpy.int64)
    words[copies._CURRENT] = 1
    reader._words, reader._pin = Words(words, log), 9
    assert reader.pin() == 1
    current = f"load {copies._CURRENT}"
    assert log == [current, "load 9", "store 9", "full_fence", current, "fence"]
