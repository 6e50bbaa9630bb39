"""The trace of one rank: what is added is read again, whatever becomes of the file."""

from __future__ import annotations

import errno
import json
import os

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.collectives.ways.lanes import Lanes
from mpidist.runtime import trace_file
from mpidist.runtime import trace_kinds as kinds
from mpidist.runtime.trace import Trace
from mpidist.runtime.trace_file import About, read


def about(rank: int = 0, size: int = 1) -> About:
    return About("job", rank, size, "host", event_seconds=1e-7)


WORD = st.integers(0, 2**63 - 1)


@settings(max_examples=25, deadline=None)
@given(events=st.lists(st.tuples(st.integers(0, 7), WORD, WORD, WORD, WORD), max_size=40), room=st.integers(2, 50))
def test_what_is_added_is_read(tmp_path_factory, events, room):
    trace = Trace(tmp_path_factory.mktemp("trace"), about(), capacity=room)
    expected = []
    for kind, one, other, call, number in events:
        part = 0 if kind in (kinds.CALL, kinds.ARRIVE) else number  # there it is the number of a name
        begin, end = sorted((one, other))
        expected.append([kind, begin, end, call, part])
        trace.add(kind, begin, call, part, clock=lambda end=end: end)
    trace.close()
    found = read(trace.path)
    own = [row for row in found.events.tolist() if row[0] != kinds.TRACE]  # which say when the memory was full
    assert own == expected
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
    found = read(trace.path)
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


def test_the_names_of_calls_are_those_of_their_events(tmp_path):
    trace = Trace(tmp_path, about())
    for name in ('"quoted" \\ name', "gradients of dense/\u00e4", "call"):
        for kind in (kinds.CALL, kinds.ARRIVE):
            trace.add(kind, 0, 1, trace.kind(name))
    trace.close()
    shown = [event["name"] for event in json.loads(trace.path.read_text()) if event["ph"] == "X"]
    assert shown[::2] == ['"quoted" \\ name', "gradients of dense/\u00e4", "call"]
    assert shown[1::2] == [f"wait for all: {name}" for name in shown[::2]]
    found = read(trace.path)
    assert [found.names[row[4]] for row in found.events.tolist()[:4:2]] == shown[:4:2]


def test_a_file_is_json_with_the_times_in_microseconds_for_viewers(tmp_path):
    trace = Trace(tmp_path / "new", About("job", 3, 5, "here", 2.5e-7, [(1, -7)]))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rank-00003.trace.json"]
    trace.add(kinds.PACK, 1_234_567_008, 12, 4, clock=lambda: 1_234_569_000)
    trace.add(kinds.SEND, 5, 13, 4, clock=lambda: 5)
    trace.close()
    trace.close()
    first, order, _, *rows, pack, send, last = json.loads(trace.path.read_text())
    assert first["ph"] == "M" and first["name"] == "process_name"
    expected = {"name": "rank 3 on here", "format": 2, "job": "job", "rank": 3, "size": 5, "host": "here"}
    assert first["args"] == expected | {"event_seconds": 2.5e-7, "offsets": [[1, -7]]}
    assert last["args"] == first["args"] | {"end": True, "dropped": 0}
    assert (order["name"], order["args"]) == ("process_sort_index", {"sort_index": 3})
    assert [(row["name"], row["tid"], row["args"]["name"]) for row in rows] == [
        ("thread_name", row, "between nodes") for row in (1, 2, 3)
    ]
    process = first["pid"]
    assert 0 < process < 2**31 and {each["pid"] for each in rows} == {process}  # more is none for Perfetto
    shape = {"ph": "X", "name": "pack", "cat": "pack", "pid": process, "tid": 0}
    assert pack == {**shape, "ts": 1234567.008, "dur": 1.992, "args": {"call": 12, "part": 4}}
    sent = {**shape, "name": "send", "cat": "send", "tid": 2}
    assert send == {**sent, "ts": 0.005, "dur": 0.0, "args": {"call": 13, "part": 4}}


def test_each_event_is_a_line_and_a_comma(tmp_path):
    trace = Trace(tmp_path, about())
    calls = [0, 1, 999, 1000, 1001, 1_000_000, 12_003_004]
    for call in calls:
        trace.add(kinds.CALL, call, call, clock=lambda call=call: 2 * call)
    trace.flush()
    first, *lines = trace.path.read_text().splitlines()
    assert first == "[" and len(lines) == 3 + 7 and all(line[-2:] == "}," for line in lines)
    assert [json.loads(line[:-1])["args"]["call"] for line in lines[3:]] == calls


def test_ranks_of_other_jobs_and_worlds_are_other_processes():
    processes = {About(job, rank, 5, "host").process for job in ("one", "other") for rank in (0, 1, 65_535)}
    assert len(processes) == 6 and all(0 <= process < 2**31 for process in processes)


def test_as_many_waves_as_are_under_way_have_rows():
    assert trace_file.WAVE_ROWS == Lanes.SLOTS


def test_events_after_the_end_do_no_harm(tmp_path):
    trace = Trace(tmp_path, about(), capacity=2, warn=lambda text: None)
    trace.close()
    for _ in range(5):
        trace.add(kinds.CALL, 0)
    assert len(read(trace.path).events) == 0


@pytest.mark.parametrize("kept", [0, 1, 3, 4])
@pytest.mark.parametrize("rest", [0, 1, 60, -2, -1])
def test_of_a_truncated_file_the_whole_lines_are_read(tmp_path, kept, rest):
    trace = Trace(tmp_path, about(), capacity=4)
    for call in range(4):
        trace.add(kinds.PACK, 0, call)
    lines = trace.path.read_bytes().splitlines(keepends=True)[: 4 + kept + 1]
    cut = lines[-1][:rest] if kept < 4 else b""
    trace.path.write_bytes(b"".join(lines[: 4 + kept]) + cut)
    found = read(trace.path)
    assert found.events[:, 3].tolist() == list(range(kept))
    assert "its end is missing" in found.problem


def test_a_trace_that_was_killed_is_what_viewers_take(tmp_path):
    trace = Trace(tmp_path, about(), capacity=2)
    for call in range(2):
        trace.add(kinds.PACK, 0, call)
    raw = trace.path.read_text()
    assert raw.startswith('[\n{"')  # by which Perfetto knows it
    assert [each["ph"] for each in json.loads(raw.rstrip(",\n") + "]")] == ["M", "M", "M", "X", "X"]


@pytest.mark.parametrize(
    "line", [b"\x00\x00\n", b'{"ph":"X"},\n', b"7,\n", b"\xff{},\n", b'{"ph":"X","args":[]},\n', b"[" * 99_999 + b"\n"]
)
def test_a_line_that_cannot_be_read_is_said_and_what_is_before_it_is_read(tmp_path, line):
    trace = Trace(tmp_path, about(), capacity=4)
    for call in range(4):
        trace.add(kinds.PACK, 0, call)
    trace.close()
    lines = trace.path.read_bytes().splitlines(keepends=True)
    trace.path.write_bytes(b"".join([*lines[:6], line, *lines[7:]]))
    found = read(trace.path)
    assert found.events[:, 3].tolist() == [0, 1]
    assert found.problem == "line 7 cannot be read; it and all after it are left out"


@pytest.mark.parametrize("content", [b"", b"{", b"{}\n", b"[]\n", b"\x00\xff\n", b"[\n", b"[\n{}\n", b"[\n[],\n"])
def test_what_is_no_trace_is_said(tmp_path, content):
    path = tmp_path / "rank-00000.trace.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is no trace of this version"):
        read(path)


def test_a_binary_trace_of_an_earlier_version_is_said_to_be_one(tmp_path):
    path = tmp_path / "rank-00000.trace"
    path.write_bytes(b'{"format": 1, "fields": 5, "job": "job", "rank": 0, "size": 1}\n{"events": 1}\n' + bytes(40))
    with pytest.raises(ValueError, match=r"binary format of an earlier version.*trace the job again"):
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


@pytest.mark.parametrize("room", [0, 10, 500])
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


class Interrupted:
    """A file whose second write takes so many bytes, and is broken off by a signal handler that does something."""

    def __init__(self, file, room, handler):
        self.file, self.room, self.handler, self.writes = file, room, handler, 0

    def write(self, raw):
        self.writes += 1
        if self.writes == 2:
            self.file.write(raw[: self.room])
            self.handler()
            raise KeyboardInterrupt
        return self.file.write(raw)

    def __getattr__(self, name):
        return getattr(self.file, name)


def interrupted(folder, room, handler, said) -> Trace:
    """Return a trace that a signal has kept from writing its first three events."""
    trace = Trace(folder, about(), capacity=3, warn=said.append)
    trace._file = Interrupted(trace._file, room, lambda: handler(trace))
    for call in range(2):
        trace.add(kinds.PACK, 0, call)
    with pytest.raises(KeyboardInterrupt):
        trace.add(kinds.PACK, 0, 2)
    return trace


LOST = ["3 events of the trace of rank 0 are lost: a signal came while they were written"]


def test_events_whose_writing_is_broken_off_are_counted_and_leave_no_half_line(tmp_path):
    said = []
    trace = interrupted(tmp_path, 60, lambda trace: None, said)
    trace.add(kinds.PACK, 0, 3)
    trace.close()
    found = read(trace.path)
    assert (found.events[:, 3].tolist(), found.dropped, found.problem) == ([3], 3, "")
    assert said == LOST


def test_a_trace_that_a_signal_handler_ends_while_events_are_written_says_that_they_are_lost(tmp_path):
    said = []
    trace = interrupted(tmp_path, 0, Trace.close, said)
    found = read(trace.path)
    assert (len(found.events), found.dropped, found.problem) == (0, 3, "")
    assert said == LOST


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
    trace.add(kinds.PACK, 2**63 - 2, 2**63 - 1, 2**63 - 1, clock=lambda: 2**63 - 1)
    trace.close()
    events = read(trace.path).events
    assert events.dtype == numpy.int64
    assert events.tolist() == [[kinds.PACK, 2**63 - 2, 2**63 - 1, 2**63 - 1, 2**63 - 1]]
