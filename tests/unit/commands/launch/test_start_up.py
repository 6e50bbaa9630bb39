"""A start-up of MPI that cannot end, seen from the ranks' notes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.commands.launch.start_up import RankState, StartUp, judge
from mpidist.options import Settings

WAITS = RankState(process=10, waiting_seconds=5.0)
JOINED = RankState(process=11, joined=True)
GONE = RankState(process=12, gone_seconds=4.0)
LATE = RankState(process=13)
ELSEWHERE = RankState()


def test_a_rank_that_ended_is_named_with_those_that_wait_for_it():
    verdict = judge([WAITS, GONE, WAITS], 60, 1800)
    assert verdict.fatal
    assert "rank 1 ended before all ranks had joined; ranks 0, 2 wait for it in MPI's start-up" in verdict.message


def test_several_ranks_that_ended():
    assert (
        "ranks 0, 2 ended before all ranks had joined; rank 1 waits for them"
        in judge([GONE, WAITS, GONE], 0, 0).message
    )


@pytest.mark.parametrize(
    "ranks",
    [
        [GONE, GONE],
        [GONE, LATE],
        [GONE, JOINED],
        [WAITS, RankState(process=12, gone_seconds=1.0)],
        [RankState(process=10, waiting_seconds=1.0), GONE],
        [WAITS, RankState(process=12, joined=True, gone_seconds=9.0)],
        [RankState(process=12, joined=True, waiting_seconds=9.0), GONE],
        [WAITS, LATE],
        [LATE, ELSEWHERE],
        [ELSEWHERE, ELSEWHERE],
    ],
)
def test_all_may_be_well(ranks):
    assert judge(ranks, 60, 1800) is None


def test_a_rank_that_ended_while_it_waited_has_ended():
    verdict = judge([WAITS, RankState(process=12, gone_seconds=4.0, waiting_seconds=5.0)], 60, 1800)
    assert "rank 1 ended before" in verdict.message
    assert "rank 0 waits" in verdict.message


def test_late_ranks_are_named_in_a_warning():
    verdict = judge([WAITS, LATE, JOINED], 5, 1800)
    assert not verdict.fatal
    assert "rank 0 waits in MPI's start-up, for 5 s by now; rank 1 has not come to it" in verdict.message
    assert "--pid 13" in verdict.message


def test_a_rank_without_notes_is_not_called_late():
    assert judge([WAITS, ELSEWHERE], 5, 1800).message == "rank 0 waits in MPI's start-up, for 5 s by now"


def test_time_is_up():
    verdict = judge([WAITS, LATE], 1, 5)
    assert verdict.fatal
    assert "rank 1 has not come to it" in verdict.message
    assert "MPIDIST_TIMEOUT_SECONDS is 5" in verdict.message


def test_ranks_whose_program_is_over_are_named_with_those_that_they_wait_for():
    over = RankState(process=14, over_seconds=7.0)
    verdict = judge([LATE, over, LATE, GONE, ELSEWHERE], 5, 1800)
    assert not verdict.fatal
    assert verdict.message == (
        "rank 1 came to the end of its program 7 s ago, and waits in MPI_Finalize for ranks 0, 2. "
        "All is well while they work alone; a call that needs rank 1 hangs"
    )
    several = judge([over, over, LATE], 5, 1800).message
    assert several.startswith("ranks 0, 1 came to the end of their program 7 s ago, and wait in MPI_Finalize for rank")
    assert several.endswith(". All is well while it works alone; a call that needs ranks 0, 1 hangs")
    gone, joined = RankState(12, gone_seconds=1.0, over_seconds=7.0), RankState(11, True, over_seconds=7.0)
    for well in ([over, over], [over, ELSEWHERE], [gone, LATE], [joined, LATE]):
        assert judge(well, 5, 1800) is None
    assert judge([over, LATE], 0, 1800) is judge([over, LATE], 8, 1800) is None


def test_zero_is_never():
    assert judge([RankState(process=10, waiting_seconds=1e9), LATE], 0, 0) is None


seconds = st.none() | st.floats(0, 1e4)
states = st.builds(RankState, st.none() | st.integers(1, 99), st.booleans(), seconds, seconds)


@given(st.lists(states, min_size=1, max_size=6), st.floats(0, 100), st.floats(0, 100))
def test_nothing_is_ever_said_unless_a_living_rank_waits(ranks, warn_seconds, timeout_seconds):
    waits = [each.waiting_seconds is not None and each.gone_seconds is None and not each.joined for each in ranks]
    assert judge(ranks, warn_seconds, timeout_seconds) is None or any(waits)


@given(st.lists(states, min_size=1, max_size=6))
def test_without_limits_a_job_is_ended_only_for_a_rank_that_is_gone_and_never_joined(ranks):
    lost = [each.gone_seconds is not None and each.gone_seconds >= 3 and not each.joined for each in ranks]
    verdict = judge(ranks, 0, 0)
    assert verdict is None or (verdict.fatal and any(lost))


# -- notes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gone():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_rank_that_is_gone_is_seen_from_its_notes(tmp_path, gone):
    start_up = StartUp(str(tmp_path), 2, Settings())
    (tmp_path / "0.process").write_text(f"{os.getpid()}\n")
    (tmp_path / "1.process").write_text(f"{gone}\n")
    assert start_up.look(100.0) is None
    (tmp_path / "0.joining").touch()
    assert start_up.look(110.0) is None
    assert start_up.look(112.0) is None
    assert "rank 1 ended" in start_up.look(113.0).message


def test_a_process_whose_status_nobody_has_asked_for_is_gone(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as process:
        process.stdout.read()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        (tmp_path / "0.process").write_text(f"{process.pid}\n")
        (tmp_path / "1.process").write_text(f"{os.getpid()}\n")
        (tmp_path / "1.joining").touch()
        start_up = StartUp(str(tmp_path), 2, Settings())
        start_up.look(0.0)
        assert "rank 0 ended" in start_up.look(3.0).message


def test_a_rank_that_has_waited_and_joined_is_forgotten(tmp_path, gone):
    start_up = StartUp(str(tmp_path), 2, Settings())
    (tmp_path / "0.process").write_text(f"{os.getpid()}\n")
    (tmp_path / "1.process").write_text(f"{gone}\n")
    (tmp_path / "0.joining").touch()
    start_up.look(0.0)
    (tmp_path / "0.joining").unlink()
    assert start_up.look(5.0) is None
    (tmp_path / "0.joining").touch()
    assert start_up.look(6.0) is None


def test_the_warning_comes_once_and_the_end_after_it(tmp_path):
    start_up = StartUp(str(tmp_path), 2, Settings(warn_seconds=5, timeout_seconds=20))
    for rank in range(2):
        (tmp_path / f"{rank}.process").write_text(f"{os.getpid()}\n")
    (tmp_path / "1.joining").touch()
    verdicts = [start_up.look(float(now)) for now in range(22)]
    said = [(now, verdict.fatal) for now, verdict in enumerate(verdicts) if verdict is not None]
    assert said == [(5, False), (20, True), (21, True)]


def test_half_a_note_of_a_process_is_none(tmp_path):
    (tmp_path / "0.process").write_text("")
    (tmp_path / "1.process").write_text(f"{os.getpid()}\n")
    (tmp_path / "1.joining").touch()
    start_up = StartUp(str(tmp_path), 2, Settings())
    assert [start_up.look(now) for now in (0.0, 10.0)] == [None, None]


def test_a_program_without_notes_is_let_be(tmp_path, gone):
    start_up = StartUp(str(tmp_path), 3, Settings(warn_seconds=1, timeout_seconds=2))
    for rank in range(2):
        (tmp_path / f"{rank}.process").write_text(f"{gone}\n")
    assert [start_up.look(now) for now in (0.0, 10.0, 1e6)] == [None] * 3
