"""The trace of one rank: what is added is read again, whatever becomes of the file."""

from __future__ import annotations

import errno
import os

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.runtime import trace as kinds
from mpidist.runtime.trace import About, Trace, read


def about(rank: int = 0, size: int = 1) -> About:
    return About("job", rank, size, "host", event_seconds=1e-7)


@settings(max_examples=25, deadline=None)
@given(
    events=st.lists(st.tuples(st.integers(0, 8), *[st.integers(0, 2**62)] * 3), max_size=40), room=st.integers(2, 50)
)
def test_what_is_added_is_read(tmp_path_factory, events, room):
    trace = Trace(tmp_path_factory.mktemp("trace"), about(), capacity=room)
    for kind, begin, call, part in events:
        trace.add(kind, begin, call, part, clock=lambda: 7)
    trace.close()
    found = read(trace.path)
    own = found.events[found.events[:, 2] == 7]  # the others say when the memory was full
    assert [tuple(row) for row in own[:, [0, 1, 3, 4]].tolist()] == events
    assert (found.problem, found.dropped) == ("", 0)
    assert found.about.rank == 0 and found.about.host == "host"


def test_an_event_ends_when_it_is_added(tmp_path):
    trace = Trace(tmp_path, about())
    begin = trace.now()
    trace.add(kinds.PACK, begin)
    trace.close()
    (event,) = read(trace.path).events.tolist()[:1]
    assert begin == event[1] <= event[2] <= trace.now()


def test_the_memory_is_there_beforehand_and_stays_the_same(tmp_path):
    trace = Trace(tmp_path, about(), capacity=3)
    before = trace._events.buffer_info()
    for call in range(20):
        trace.add(kinds.CALL, 0, call)
    assert trace._events.buffer_info() == before


def test_a_full_memory_is_written_at_once(tmp_path):
    trace = Trace(tmp_path, about(), capacity=2)
    for call in range(2):
        trace.add(kinds.CALL, 0, call)
    found = read(trace.path.with_suffix(".trace.part"))
    assert found.events[:, 3].tolist() == [0, 1]
    assert "was killed" in found.problem


def test_names_of_calls_are_kept(tmp_path):
    trace = Trace(tmp_path, about())
    number = trace.kind("all_reduce(sum)")
    assert number == trace.kind("all_reduce(sum)") == len(kinds.KINDS)
    trace.add(number, 0)
    trace.close()
    assert read(trace.path).names[number] == "all_reduce(sum)"


def test_a_wrapped_function_is_an_event_also_when_it_raises(tmp_path):
    trace = Trace(tmp_path, about())
    assert trace.wrapped(kinds.STEP, lambda a, b: a + b)(1, b=2) == 3
    with pytest.raises(ZeroDivisionError):
        trace.wrapped(kinds.STEP, lambda: 1 // 0)()
    trace.close()
    assert (read(trace.path).events[:, 0] == kinds.STEP).sum() == 2


def test_the_file_gets_its_name_when_it_is_whole(tmp_path):
    trace = Trace(tmp_path / "new", about(rank=3, size=5))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rank-00003.trace.part"]
    trace.close()
    trace.close()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rank-00003.trace"]


def test_events_after_the_end_do_no_harm(tmp_path):
    trace = Trace(tmp_path, about(), capacity=2, warn=lambda text: None)
    trace.close()
    for _ in range(5):
        trace.add(kinds.CALL, 0)
    assert len(read(trace.path).events) == 0


@pytest.mark.parametrize("cut", [1, 39, 40, 41, 79, 120])
def test_of_a_truncated_file_the_whole_events_are_read(tmp_path, cut):
    trace = Trace(tmp_path, about(), capacity=4)
    for call in range(4):
        trace.add(kinds.CALL, 0, call)
    part = trace.path.with_suffix(".trace.part")
    part.write_bytes(part.read_bytes()[:-cut])
    found = read(part)
    assert found.events[:, 3].tolist() == list(range(4 - -(-cut // 40)))
    assert found.problem


@pytest.mark.parametrize("content", [b"", b"{", b"{}\n", b"[]\n", b"\x00\xff\n"])
def test_what_is_no_trace_is_said(tmp_path, content):
    path = tmp_path / "rank-00000.trace"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is no trace"):
        read(path)


class FullDisk:
    """A file that takes so many bytes more, and then has no room for a while."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, raw):
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.file.write(raw[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 10, 150])
def test_events_that_find_the_disk_full_are_counted(tmp_path, room):
    said = []
    trace = Trace(tmp_path, about(), capacity=3, warn=said.append)
    file = trace._file
    trace._file = FullDisk(file, room)
    for call in range(3):
        trace.add(kinds.CALL, 0, call)
    trace._file = file  # there is room again
    trace.add(kinds.CALL, 0, 3)
    trace.close()
    assert trace.dropped == 3
    assert any("No space left" in text and "has gaps" in text for text in said)
    assert any("3 events of the trace of rank 0 are lost" in text for text in said)
    found = read(trace.path)
    assert found.dropped == 3 and found.events[found.events[:, 0] == kinds.CALL][:, 3].tolist() == [3]


def test_a_folder_that_cannot_be_made_stops_nobody(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    trace = Trace(tmp_path / "file" / "folder", about(), capacity=2, warn=said.append)
    for _ in range(3):
        trace.add(kinds.CALL, 0)
    trace.close()
    assert len([text for text in said if "cannot be written" in text]) >= 1
    assert trace.dropped >= 3


def test_the_cost_of_an_event_is_measured_and_leaves_none(tmp_path):
    trace = Trace(tmp_path, About("job", 0, 1, "host"))
    trace.close()
    found = read(trace.path)
    assert found.about.event_seconds > 0
    assert len(found.events) == 0


def test_a_trace_without_room_is_refused(tmp_path):
    with pytest.raises(ValueError, match="2 events or more"):
        Trace(tmp_path, about(), capacity=1)


def test_events_are_numbers_of_64_bits(tmp_path):
    trace = Trace(tmp_path, about())
    trace.add(kinds.CALL, 2**63 - 1, 2**63 - 1, -(2**63))
    trace.close()
    assert read(trace.path).events.dtype == numpy.int64
