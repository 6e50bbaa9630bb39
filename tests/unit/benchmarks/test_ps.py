"""The tables of the case ``ps``, from made-up times; and how long a turn of steps is."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.suite import ps, ps_job, ps_work, show
from benchmarks.suite.ps_work import ADAM, LARGE, MANY, MODEL, MOMENTUM, ONE, SAME, WORKS, timed
from benchmarks.suite.results import Launch


def times():
    found = ps._Times()
    for job in ps.jobs(with_peers=False)[0]:
        seconds = {title: [3.0, 1.0, 2.0] for title in job.whos}
        found.add(job, {"seconds": seconds, "wrong": dict.fromkeys(job.whos, 1), "server_bytes": {"a": 7, "b": 9}})
    return found


def launch_of(rows):
    return Launch("ps", ["bench", "ps"], 4, "Open MPI", "1 node", {}, rows)


def test_works_are_what_the_targets_say():
    assert {title: work.nbytes for title, work in WORKS.items()} == {
        **{ONE: 4, MOMENTUM: 4, ADAM: 4, LARGE: 1 << 22, MANY: 204_800, SAME: 204_800, MODEL: 1 << 26}
    }
    assert len(WORKS[MANY].elements) == 200 and set(WORKS[MANY].elements) == {256}
    assert ps_job.STEPS.keys() == WORKS.keys() == {ONE, MOMENTUM, ADAM, LARGE, MANY, SAME, MODEL}


def test_rows_have_medians_and_refer_to_the_reference_of_their_work():
    rows = ps.rows_of(times())
    assert [(row.work, row.who, row.kind) for row in rows] == [
        *(
            (work, who, kind)
            for work in (ONE, MOMENTUM, ADAM, LARGE)
            for who, kind in ((ps.OURS, "ours"), (ps.MESSAGES, "peer"))
        ),
        (MANY, MANY, "ours"),
        (MANY, SAME, "reference"),
        (MODEL, "2 servers", "ours"),
        (MODEL, "1 server", "reference"),
    ]
    assert {(row.time_us, row.ratio, row.more_us, row.turns, row.wrong) for row in rows} == {(2e6, 1.0, 0.0, 3, 1)}


def test_targets_are_held_against_the_rows():
    found = times()
    found.seconds[ONE, ps.TENSORFLOW, "peer"] = [150.0]
    found.seconds[LARGE, ps.TENSORFLOW, "peer"] = [200.0]
    found.seconds[MOMENTUM, ps.TENSORFLOW, "peer"] = [240.0]
    found.wrong |= {key: 0 for key in found.seconds}
    found.seconds[MANY, MANY, "ours"] = [5.0]
    lines = ps.report_of(ps.TARGETS, [launch_of(ps.rows_of(found))]).splitlines()[1:]
    figures = [line.split("unknown")[1].split()[0] for line in lines if "unknown" in line]
    assert figures == ["75.00", "120.00", "100.00", "2.50", "1.00"]
    assert ["reached" in line for line in lines] == [False, True, False, True, False, True]
    assert lines[2].endswith("not measured")


def test_what_servers_hold():
    assert ps.balance({"a": 100, "b": 100}).endswith(
        "servers hold [100, 100] bytes, 0.0% above even (at most 5%: reached)"
    )
    assert ps.balance({"a": 100, "b": 120}).endswith("9.1% above even (at most 5%: missed)")


def test_show_adds_these_targets_to_files_that_have_them(tmp_path, capsys):
    path = tmp_path / "found.json"
    ps.results.write(path, [launch_of(ps.rows_of(times()))])
    show.start(argparse.Namespace(files=[path], markdown=False, choices=False, who=None, targets=True))
    printed = capsys.readouterr().out
    assert len(printed[printed.index("# work") :].splitlines()) == 1 + len(ps.TARGETS)


def test_a_number_of_ranks_is_refused():
    with pytest.raises(ValueError, match="4 and 5 ranks: leave -n out"):
        ps.start(argparse.Namespace(size=2))


@pytest.mark.parametrize("cost", [1e-6, 1e-3, 0.2])
def test_a_turn_takes_about_as_long_as_asked(cost, monkeypatch):
    clock, made = [0.0], []

    def run(steps):
        made.append(steps)
        clock[0] += cost * steps

    monkeypatch.setattr(ps_work.time, "perf_counter", lambda: clock[0])
    seconds, total = timed(run, 1.0)
    assert seconds == pytest.approx(cost)
    assert total == sum(made)
    assert made[-1] == pytest.approx(max(8, 1.0 / cost), rel=0.01)
    assert clock[0] < 4 + 16 * cost
