"""``mpidist trace``: one clock, one timeline, shares of time, and who was late, from traces with known times."""

from __future__ import annotations

import json
import re

import numpy
import pytest

from mpidist.commands.main import main
from mpidist.commands.trace import report, write_timeline
from mpidist.runtime import trace_kinds as kinds
from mpidist.runtime.trace import Trace
from mpidist.runtime.trace_file import About, Recording
from mpidist.tracing.shares import gather, lateness, on_one_clock, shares

MS = 1_000_000


def recording(*events, rank=0, size=1, offsets=(), event_seconds=0.0) -> Recording:
    """Return a recording of events (kind, begin ms, end ms, call)."""
    rows = [[kind, begin * MS, end * MS, call, 0] for kind, begin, end, call in events]
    told = About("job", rank, size, "host", event_seconds, list(offsets))
    return Recording(told, list(kinds.KINDS), numpy.array(rows, dtype=numpy.int64).reshape(-1, 5))


def written(folder, rank, size, job="job", calls=(1, 2), name="all_reduce(sum)", close=True) -> Trace:
    trace = Trace(folder, About(job, rank, size, "host", event_seconds=1e-7), capacity=4)
    for call in calls:
        trace.add(kinds.ARRIVE, call * MS + rank, call, trace.kind(name), clock=lambda: 10 * MS)
    trace.add(kinds.STEP, 0, clock=lambda: 20 * MS)
    if close:
        trace.close()
    return trace


def shown(recordings, folder) -> list[dict]:
    """Return the events of the timeline of some recordings."""
    write_timeline(recordings, folder / "timeline.json")
    return json.loads((folder / "timeline.json").read_text())["traceEvents"]


# -- one clock ---------------------------------------------------------------------------------------------------------


def test_a_clock_that_was_compared_once_is_shifted():
    shifted = on_one_clock(recording((kinds.CALL, 5, 7, 1), offsets=[(0, -3 * MS)]))
    assert shifted[0, 1:3].tolist() == [2 * MS, 4 * MS]


def test_between_two_comparisons_the_difference_grows_evenly():
    events = [(kinds.CALL, at, at, 1) for at in (0, 50, 100, 150, 200, 900)]
    shifted = on_one_clock(recording(*events, offsets=[(0, 0), (100 * MS, 10 * MS)]))
    assert shifted[:, 1].tolist() == [0, 55 * MS, 110 * MS, 165 * MS, 220 * MS, 920 * MS]


def test_without_comparison_the_times_are_as_they_are():
    assert on_one_clock(recording((kinds.CALL, 5, 7, 1)))[0, 1:3].tolist() == [5 * MS, 7 * MS]


# -- shares of time and lateness ---------------------------------------------------------------------------------------


def test_shares_are_those_inside_the_steps():
    found = shares(
        recording(
            (kinds.CALL, 0, 4, 1),  # before the first step
            (kinds.STEP, 10, 20, 0),
            (kinds.CALL, 12, 17, 2),
            (kinds.ARRIVE, 12, 14, 2),
            (kinds.PACK, 14, 15, 2),
            (kinds.REDUCE, 15, 17, 2),
            (kinds.STEP, 30, 40, 0),
            (kinds.CALL, 39, 40, 3),
            event_seconds=1e-5,
        )
    )
    assert (found.steps, found.events) == (2, 7)
    assert found.total == pytest.approx(0.020)
    assert found.cost == pytest.approx(7e-5)
    expected = {"communication": 6, "waiting": 2, "pack": 1, "reduce": 2, "send": 0, "unpack": 0, "apply": 0}
    assert {name: seconds * 1e3 for name, seconds in found.parts.items()} == pytest.approx(expected)


def test_what_runs_at_the_same_time_counts_once():
    sent = [(kinds.SEND, 10, 16, 1), (kinds.SEND, 14, 18, 1), (kinds.SEND, 11, 13, 1), (kinds.SEND, 19, 20, 1)]
    assert shares(recording(*sent)).parts["send"] == pytest.approx(0.009)


def test_buckets_between_nodes_have_rows_of_their_own(tmp_path):
    found = recording(*[(kinds.SEND, at, at + 5, 1) for at in range(5)])
    found.events[:, 4] = range(5)  # the first is a wait for messages
    events = shown({0: found}, tmp_path)
    assert [event["tid"] for event in events if event["name"] == "send"] == [0, 2, 3, 1, 2]
    assert [event["tid"] for event in events if event["name"] == "thread_name"] == [1, 2, 3]


def test_without_steps_the_whole_trace_counts():
    found = shares(recording((kinds.CALL, 0, 4, 1), (kinds.CALL, 6, 8, 2)))
    assert (found.steps, found.total) == (1, pytest.approx(0.008))
    assert found.parts["communication"] == pytest.approx(0.006)


def test_who_came_last_how_often_and_how_long_the_first_had_waited():
    come = {0: {1: 0, 2: 5, 3: 10, 4: 0}, 1: {1: 2, 2: 9, 3: 3}, 2: {1: 1, 2: 6, 3: 4, 5: 0}}
    recordings = {
        rank: recording(*((kinds.ARRIVE, at, 20, call) for call, at in calls.items()), rank=rank, size=3)
        for rank, calls in come.items()
    }
    late = lateness(recordings)  # calls 4 and 5 were not made by all
    assert [(late[rank].last, late[rank].calls) for rank in range(3)] == [(1, 3), (2, 3), (0, 3)]
    assert late[0].mean_seconds == pytest.approx(0.007)
    assert late[1].mean_seconds == pytest.approx((0.002 + 0.004) / 2)


def test_a_single_rank_is_never_late():
    assert lateness({0: recording((kinds.ARRIVE, 0, 1, 1))})[0].last == 0


def test_a_trace_that_costs_more_than_it_may_is_said():
    cheap, dear = ({0: recording((kinds.STEP, 0, 100, 0), event_seconds=cost)} for cost in (1e-4, 1e-2))
    assert "more than 2%" not in report(cheap)
    assert "tracing took more than 2% of the time of rank 0" in report(dear)


def test_the_report_has_a_line_for_each_rank():
    lines = report({rank: recording((kinds.STEP, 0, 10, 0), (kinds.CALL, 2, 7, 1), rank=rank) for rank in (0, 4)})
    rows = [line.split() for line in lines.splitlines()]
    assert rows[1][:6] == ["0", "1", "10", "ms", "50.0", "%"] and rows[2][0] == "4"


def test_nothing_recorded_is_said():
    assert report({0: recording()}) == "no rank has recorded anything"


# -- files -------------------------------------------------------------------------------------------------------------


def test_all_ranks_are_merged_into_a_timeline(tmp_path, capsys):
    for rank in range(3):
        written(tmp_path, rank, 3)
    assert main(["trace", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "came last" in printed.out and "timeline.json" in printed.out
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    arrivals = [event for event in events if event["name"] == "wait for all: all_reduce(sum)"]
    assert sorted((event["pid"], event["args"]["call"]) for event in arrivals) == [
        (rank, call) for rank in range(3) for call in (1, 2)
    ]
    first = min(arrivals, key=lambda event: (event["pid"], event["ts"]))
    assert (first["ts"], first["dur"]) == (1000.0, 9000.0)  # microseconds since the first event
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        f"rank {rank} on host" for rank in range(3)
    }


def test_missing_and_truncated_traces_are_said_and_the_rest_is_merged(tmp_path, capsys):
    written(tmp_path, 0, 4)
    written(tmp_path, 2, 4, close=False)  # killed before it could write
    broken = written(tmp_path, 3, 4).path
    broken.write_bytes(broken.read_bytes()[:-70])
    assert main(["trace", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "no trace of rank 1 of 4" in printed.err
    assert "the trace of rank 2: its end is missing" in printed.err
    assert "the trace of rank 3: its end is missing" in printed.err
    pids = {event["pid"] for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]}
    assert pids == {0, 2, 3}


def test_the_shares_as_json(tmp_path, capsys):
    for rank in range(2):
        written(tmp_path, rank, 3)
    assert main(["trace", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == ["no trace of rank 2 of 3; the others are merged"]
    assert list(found["ranks"]) == ["0", "1"] and found["ranks"]["1"]["host"] == "host"
    assert found["ranks"]["0"]["shares"]["steps"] == 1 and found["ranks"]["0"]["shares"]["total"] == 0.02
    assert found["ranks"]["1"]["lateness"] == {"last": 2, "calls": 2, "mean_seconds": 1e-9}


def test_files_of_another_job_and_of_no_job_are_left_out(tmp_path):
    import os

    old = written(tmp_path, 5, 6, job="old").path
    os.utime(old, (0, 0))
    (tmp_path / "rank-00009.trace.json").write_text("no trace")
    written(tmp_path, 0, 1, job="new")
    found, problems = gather(tmp_path)
    assert list(found) == [0]
    assert any("several jobs" in problem for problem in problems)
    assert any("rank-00009.trace.json is no trace" in problem for problem in problems)


def test_binary_traces_of_an_earlier_version_are_said_to_be_such(tmp_path, capsys):
    for name in ("rank-00000.trace", "rank-00001.trace.part"):
        (tmp_path / name).write_bytes(b'{"format": 1, "fields": 5, "job": "job"}\n' + bytes(40))
    assert main(["trace", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.count("binary format of an earlier version") == 2 and "trace the job again" in said
    written(tmp_path, 0, 1)
    recordings, problems = gather(tmp_path)
    assert list(recordings) == [0] and len(problems) == 2


def test_the_timeline_has_the_times_of_rank_0(tmp_path):
    for rank, offset in enumerate((0, -3 * MS)):
        trace = Trace(tmp_path, About("job", rank, 2, f"host{rank}", 1e-7, [(0, offset)]))
        trace.add(kinds.PACK, 5 * MS + rank * 1001, 1, clock=lambda: 7 * MS)
        trace.close()
    recordings, problems = gather(tmp_path)
    events = [event for event in shown(recordings, tmp_path) if event["ph"] == "X"]
    assert problems == [] and [(event["pid"], event["ts"], event["dur"]) for event in events] == [
        (0, 2998.999, 2000.0),
        (1, 0.0, 1998.999),
    ]


def test_the_time_in_which_events_were_written_counts_as_tracing():
    found = shares(recording((kinds.STEP, 0, 100, 0), (kinds.TRACE, 20, 25, 0), event_seconds=1e-5))
    assert found.cost == pytest.approx(0.005 + 2e-5)


def test_a_folder_without_traces_says_how_to_get_some(tmp_path, capsys):
    assert main(["trace", str(tmp_path)]) == 1
    assert f"MPIDIST_TRACE={tmp_path}" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_said(tmp_path, capsys):
    written(tmp_path, 0, 1)
    assert main(["trace", str(tmp_path), "--output", str(tmp_path / "none" / "file")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_a_folder_as_the_output_is_said_and_leaves_nothing(tmp_path, capsys):
    written(tmp_path / "traces", 0, 1)
    (tmp_path / "folder").mkdir()
    assert main(["trace", str(tmp_path / "traces"), "--output", str(tmp_path / "folder")]) == 1
    assert "folder cannot be written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "traces"]


def test_a_folder_must_be_named(capsys):
    with pytest.raises(SystemExit) as left:
        main(["trace"])
    assert left.value.code == 2 and "MPIDIST_TRACE" in capsys.readouterr().err


def test_the_cost_of_an_event_can_be_asked_for(capsys):
    assert main(["trace", "--cost"]) == 0
    assert re.fullmatch(r"one event costs \S+ \S+, and \S+ \S+ when it is written\n", capsys.readouterr().out)


def test_the_timeline_begins_at_0(tmp_path):
    written(tmp_path, 0, 1)
    recordings, _ = gather(tmp_path)
    events = [event for event in shown(recordings, tmp_path) if event["ph"] == "X"]
    assert min(event["ts"] for event in events) == 0.0
