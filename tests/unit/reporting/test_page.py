"""The page of a report: its numbers are those of the notes and traces, whole or not; and it fits what it must fit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from mpidist.commands.main import main
from mpidist.reporting import page
from mpidist.runtime import trace_kinds as kinds
from mpidist.runtime.trace import Trace
from mpidist.runtime.trace_file import About

MS = 1_000_000


def line(kind, seconds, **content):
    return {"kind": kind, "seconds": seconds, **content}


def progress(seconds, step, rows, memory=5_000_000, epoch=0, **logs):
    return line("progress", seconds, epoch=epoch, step=step, rows=rows, memory=memory, logs=logs)


def noted(folder, rank, *lines, size=1, run="run", at=1e9, host="", trace=None, goes_on=False, **about):
    """Add a session to the notes of a rank."""
    first = {
        "kind": "about", "format": 1, "time": at, "run": run, "rank": rank, "ranks": size,
        "host": host or f"host{rank}", "command": "python train.py", "directory": "/home", "trace": trace,
        "versions": {"mpidist": "1.2.3"}, "job": {"strategy": "MirroredStrategy"}, "goes_on": goes_on, **about,
    }  # fmt: skip
    with open(folder / f"rank-{rank:05d}.jsonl", "a") as file:
        file.writelines(json.dumps({**each, "session": run}) + "\n" for each in (first, *lines))


def traced(folder, rank, size, steps):
    """Write a trace of steps: in each, 10 ms long, the rank comes to a call at a time, and all have come at 6 ms."""
    trace = Trace(folder, About("job", rank, size, "host"), capacity=64)
    for number, came in enumerate(steps):
        start = number * 10 * MS
        trace.add(kinds.STEP, start, clock=lambda start=start: start + 10 * MS)
        trace.add(kinds.CALL, start + came * MS, number, clock=lambda start=start: start + 8 * MS)
        trace.add(kinds.ARRIVE, start + came * MS, number, clock=lambda start=start: start + 6 * MS)
    trace.close()


def text_of(html: str) -> str:
    """Return what a page shows, with a bar between its parts."""
    return unescape(re.sub(r"(\s*<[^>]+>\s*)+", " | ", html.partition("</style>")[2]))


def table(html: str, title: str) -> list[list[str]]:
    """Return the cells of the table below a heading."""
    body = html.partition(f"<h2>{title}</h2>")[2].partition("</table>")[0]
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", body)]


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_every_number_of_the_notes_is_on_the_page(tmp_path):
    first = progress(2.0, 10, 300, loss=0.75, val_loss=0.8125)
    noted(
        tmp_path,
        0,
        line("chosen", 1.0, facts={"all-reduce": "ring", "because": "MPIDIST_ALGORITHM=ring asks for it"}),
        first,
        line("saved", 2.5, path="run/checkpoint-10.h5", took=0.25, bytes=4_000),
        progress(4.0, 20, 600, memory=7_000_000, epoch=1, loss=0.5, val_loss=0.625),
        line("end", 4.5, memory=8_000_000),
        size=2,
    )
    noted(tmp_path, 1, progress(4.0, 20, 400, memory=6_000_000, epoch=1, loss=0.5), line("end", 4.5), size=2)
    html = page.render(tmp_path)
    assert table(html, "Ranks")[1:] == [["0", "host0", "150", "600", "8 MB"], ["1", "host1", "100", "400", "6 MB"]]
    assert table(html, "Checkpoints")[1:] == [["saved", "run/checkpoint-10.h5", "4 KB", "250 ms", "2.5 s"]]
    shown = text_of(html)
    assert "| ranks | 2 on 2 hosts | steps | 20 in 2 epochs | time | 4.5 s | rows a second, all ranks | 250 |" in shown
    assert "| checkpoints saved | 1 | finished | yes |" in shown
    assert (
        "| loss | last 0.5, from 0.5 to 0.75 |" in shown and "| val_loss | last 0.625, from 0.625 to 0.8125 |" in shown
    )
    assert "| step 10: loss 0.75 | step 20: loss 0.5 |" in shown and "step 10: val_loss 0.8125" in shown
    assert "| all-reduce | ring | because | MPIDIST_ALGORITHM=ring asks for it |" in shown
    assert "| mpidist | 1.2.3 |" in shown and "| command | python train.py |" in shown
    assert 'class="problems"' not in html


@pytest.mark.parametrize(("seconds", "shown"), [(59.0, "59 s"), (119.9, "2 min 0 s"), (7384.0, "2 h 3 min 4 s")])
def test_long_times_have_minutes_and_hours(tmp_path, seconds, shown):
    noted(tmp_path, 0, line("end", seconds))
    assert f"| time | {shown} |" in text_of(page.render(tmp_path))


def test_points_lie_where_their_numbers_say(tmp_path):
    noted(tmp_path, 0, *(progress(1.0, step, 1, loss=loss) for step, loss in ((0, 0.0), (50, 5.0), (100, 10.0))))
    places = [tuple(map(float, found)) for found in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', page.render(tmp_path))]
    assert len(places) == 3
    assert places[1] == pytest.approx([(a + b) / 2 for a, b in zip(places[0], places[2], strict=True)], abs=0.1)
    assert places[2][0] > places[0][0] and places[2][1] < places[0][1]  # to the right, and up


def test_numbers_that_are_far_apart_are_drawn_by_their_logarithms(tmp_path):
    noted(tmp_path, 0, *(progress(1.0, step, 1, loss=10.0**-step) for step in (0, 2, 4)))
    heights = [float(found) for found in re.findall(r'cy="([\d.]+)"', page.render(tmp_path))]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.1) and heights[1] > heights[0]


def test_where_the_time_went_is_that_of_the_traces(tmp_path):
    trace = {"job": "job", "folder": str(tmp_path)}
    for rank, came in enumerate((1, 5)):  # the call begins 1 ms, or 5 ms, after the step, and ends after 8 ms
        noted(tmp_path, rank, progress(1.0, 2, 10, loss=1.0), line("end", 1.0), size=2, trace=trace)
        traced(tmp_path, rank, 2, [came, came])
    html = page.render(tmp_path)
    assert [row[5:] for row in table(html, "Ranks")[1:]] == [
        ["10 ms", "30.0 %", "50.0 %", "20.0 %", "0 of 2"],
        ["10 ms", "70.0 %", "10.0 %", "20.0 %", "2 of 2"],
    ]
    slowest = "rank 1: it came last to 2 of 2 collective calls, and the first rank had then waited 4 ms on average"
    assert slowest in text_of(html) and "| slowest rank | 1 |" in text_of(html)
    assert [float(found) for found in re.findall(r'style="width:([\d.]+)%"', html)] == [30, 50, 20, 70, 10, 20]


def test_without_a_trace_the_page_says_how_to_get_one(tmp_path):
    noted(tmp_path, 0, progress(1.0, 2, 10, loss=1.0), line("end", 1.0))
    assert f"Set | MPIDIST_TRACE={tmp_path} | when the job is started" in text_of(page.render(tmp_path))


def test_traces_that_are_too_long_for_the_end_of_a_training_are_left_to_the_command(tmp_path):
    noted(tmp_path, 0, progress(1.0, 2, 10), line("end", 1.0), trace={"job": "job", "folder": str(tmp_path)})
    traced(tmp_path, 0, 1, [1])
    short, whole = (text_of(page.render(tmp_path, most)) for most in (10, 1e9))
    assert f"`mpidist report {tmp_path}` reads them" in short and "| waiting |" not in short
    assert "reads them" not in whole and "| waiting |" in whole


def test_a_trace_of_another_job_is_not_taken(tmp_path):
    noted(tmp_path, 0, progress(1.0, 2, 10), line("end", 1.0), trace={"job": "other", "folder": str(tmp_path)})
    traced(tmp_path, 0, 1, [1])
    html = page.render(tmp_path)
    assert "has no traces" in text_of(html) and "compute" not in table(html, "Ranks")[0]


# -- what is not whole ------------------------------------------------------------------------------------------------


def test_a_killed_training_has_all_lines_but_the_one_that_is_cut_off(tmp_path):
    noted(tmp_path, 0, progress(2.0, 10, 300, loss=0.75), progress(4.0, 20, 600, loss=0.5))
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(path.read_bytes()[:-15])
    html = page.render(tmp_path)
    shown = text_of(html)
    assert table(html, "Ranks")[1][2:4] == ["150", "300"]
    assert "The last line of rank 0 is cut off." in shown and "| finished | no |" in shown
    assert "Rank 0 did not come to the end: it was killed, failed, or is still training." in shown


def test_missing_ranks_are_named_and_no_sum_is_told(tmp_path):
    noted(tmp_path, 1, progress(1.0, 2, 10), line("end", 1.0), size=3)
    shown = text_of(page.render(tmp_path))
    assert "No notes of rank 0, 2 of 3" in shown and "| rows a second, all ranks | - |" in shown


def test_a_training_that_went_on_is_one_curve_and_the_time_is_that_of_the_last_session(tmp_path):
    noted(tmp_path, 0, progress(1.0, 10, 50, loss=4.0), progress(2.0, 20, 100, loss=3.0), run="first")
    restored = line("restored", 0.5, path="checkpoint-10.h5", took=0.1, bytes=1)
    noted(tmp_path, 0, restored, progress(1.0, 15, 25, loss=2.0), line("end", 1.0), run="second", at=2e9)
    html = page.render(tmp_path)
    assert re.findall(r"<title>(step .*?)</title>", html) == ["step 10: loss 4", "step 15: loss 2"]
    assert table(html, "Ranks")[1][2:4] == ["25", "25"]


def test_a_session_goes_on_from_those_before_up_to_one_that_began_anew(tmp_path):
    noted(tmp_path, 0, progress(1.0, 1, 1, loss=1.0), run="other")
    noted(tmp_path, 0, progress(1.0, 2, 1, loss=2.0), run="first", at=2e9)
    noted(tmp_path, 0, progress(1.0, 3, 1, loss=3.0), run="second", at=3e9, goes_on=True)
    noted(tmp_path, 0, progress(1.0, 4, 1, loss=4.0), run="third", at=4e9, goes_on=True)
    steps = re.findall(r"<title>step (\d)", page.render(tmp_path))
    assert steps == ["2", "3", "4"]


def test_lines_of_two_trainings_at_a_time_are_told_apart(tmp_path):
    noted(tmp_path, 0, run="first")
    noted(tmp_path, 0, run="second", at=2e9)
    with open(tmp_path / "rank-00000.jsonl", "a") as file:
        for run, loss in (("first", 1.0), ("second", 2.0), ("first", 3.0)):
            file.write(json.dumps(progress(1.0, int(loss), 1, loss=loss) | {"session": run}) + "\n")
    assert re.findall(r"<title>(step .*?)</title>", page.render(tmp_path)) == ["step 2: loss 2"]


def test_another_training_in_the_folder_is_left_out(tmp_path):
    for rank in range(3):
        noted(tmp_path, rank, progress(1.0, 10, 50, loss=4.0), line("end", 1.0), run="first", size=3)
    noted(tmp_path, 0, progress(1.0, 10, 50, loss=2.0), line("end", 1.0), run="second", size=1, at=2e9)
    html = page.render(tmp_path)
    assert len(table(html, "Ranks")) == 2 and re.findall(r"<title>(step .*?)</title>", html) == ["step 10: loss 2"]


def test_numbers_that_are_none_are_counted_and_not_drawn(tmp_path):
    losses = (1.0, float("nan"), 2.0, float("inf"))
    noted(tmp_path, 0, *(progress(1.0, step, 1, loss=loss) for step, loss in enumerate(losses)))
    html = page.render(tmp_path)
    assert "last inf, from 1 to 2, 2 not finite" in text_of(html) and html.count("<circle") == 2


def test_unlike_versions_are_said(tmp_path):
    noted(tmp_path, 0, line("end", 1.0), size=2)
    noted(tmp_path, 1, line("end", 1.0), size=2, versions={"mpidist": "1.2.2"})
    assert "Versions of mpidist differ: rank 0 has 1.2.3, rank 1 has 1.2.2." in text_of(page.render(tmp_path))


# -- the file ---------------------------------------------------------------------------------------------------------


def test_text_is_escaped(tmp_path):
    bad = "<script>alert('&')</script>"
    saved = line("saved", 1.0, path=bad, took=1.0, bytes=None)
    facts = line("chosen", 1.0, facts={bad: bad})
    noted(tmp_path, 0, facts, progress(1.0, 1, 1, **{bad: 1.0}), saved, host=bad, command=bad, versions={bad: bad})
    html = page.render(tmp_path)
    assert "<script" not in html and text_of(html).count(bad) >= 8


def test_the_page_needs_no_network(tmp_path):
    noted(tmp_path, 0, progress(1.0, 1, 1, loss=1.0))
    assert re.findall(r"(?:https?:|src=|href=|url\(|@import)", page.render(tmp_path)) == []


def test_many_ranks_and_metrics_and_steps_stay_below_two_megabytes(tmp_path):
    trace = {"job": "job", "folder": str(tmp_path)}
    logs = {f"metric_{number}": 0.123456 for number in range(20)}
    for rank in range(1000):
        lines = [progress(1.0, step, 10, **logs) for step in range(2000)] if rank == 0 else [progress(1.0, 1, 10)]
        noted(tmp_path, rank, *lines, line("end", 1.0), size=1000, trace=trace)
    traced(tmp_path, 0, 1, [1])
    html = page.render(tmp_path)
    assert len(table(html, "Ranks")) == 1001 and "2000 points thinned" in html
    assert len(html.encode()) < 2_000_000 and "step 1999: metric_19" in html


def test_the_command_writes_the_page_and_says_where(tmp_path, capsys):
    noted(tmp_path, 0, progress(1.0, 1, 1, loss=1.0))
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/report.html\n"
    assert (tmp_path / "report.html").read_text() == page.render(tmp_path)
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").exists()


@pytest.mark.parametrize("name", ["", "none", "other"])
def test_a_folder_without_notes_is_an_error(tmp_path, capsys, name):
    folder = tmp_path / name if name else tmp_path
    if name == "other":
        folder.mkdir()
        (folder / "rank-00000.jsonl").write_text('{"a": 1}\n')
    assert main(["report", str(folder)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"mpidist report: {folder} has no notes of a training")
    assert f"mpidist.callbacks.Report('{folder}')" in error and list(folder.glob("*.html")) == []


def test_a_page_that_cannot_be_written_is_an_error(tmp_path, capsys):
    noted(tmp_path, 0, progress(1.0, 1, 1, loss=1.0))
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "none" / "report.html")]) == 1
    assert "No such file" in capsys.readouterr().err


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_it(tmp_path):
    trace = {"job": "job", "folder": str(tmp_path)}
    for rank in range(2):
        noted(tmp_path, rank, progress(1.0, 1, 10, loss=2.0), progress(2.0, 2, 20, loss=1.0), size=2, trace=trace)
        traced(tmp_path, rank, 2, [rank + 1])
    path = page.write(tmp_path)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    dom = subprocess.run([CHROMIUM, *options, f"file://{path}"], capture_output=True, text=True, timeout=300).stdout
    assert [row[0] for row in table(dom, "Ranks")[1:]] == ["0", "1"]
    assert [dom.count(part) for part in ("<svg", "<circle", '<i class="waiting" style')] == [1, 2, 2]
    assert text_of(dom).count("step 2: loss 1 ") == 1
