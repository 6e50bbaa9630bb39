"""Finding the first failing rank in error output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.commands.launch.failures import FailureLog
from mpidist.commands.launch.rank_deaths import RankDeath
from mpidist.commands.run import render

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
    ~~~~^^
ValueError: {}"""

FRAME = "mpidist: rank {rank} of 8 failed on n1\n{text}\nmpidist: end of rank {rank}"

SYNTAX_ERROR = """  File "train.py", line 1
    def f(:
          ^
SyntaxError: invalid syntax"""

CHAINED = (
    TRACEBACK.format("first")
    + "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    + TRACEBACK.format("second")
)


def log_of(*outputs):
    log = FailureLog()
    for rank, text in outputs:
        for line in text.split("\n"):
            log.feed(rank, line)
    return log


def test_nothing_failed():
    log = log_of((0, "step 1\nstep 2"), (None, "a word of the launcher"))
    assert log.first() is None
    assert not log.framed()


def test_a_frame_is_a_failure_and_names_its_rank():
    log = log_of((None, "noise\n" + FRAME.format(rank=3, text=TRACEBACK.format("boom")) + "\nlauncher's chatter"))
    assert log.framed()
    failure = log.first()
    assert failure.rank == 3
    assert failure.lines == FRAME.format(rank=3, text=TRACEBACK.format("boom")).split("\n")


def test_a_frame_begins_behind_a_progress_bar():
    log = log_of((2, "\r 10 %\r 20 % mpidist: rank 2 of 8 failed\r\nValueError: boom\nmpidist: end of rank 2"))
    assert log.first().lines == ["mpidist: rank 2 of 8 failed", "ValueError: boom", "mpidist: end of rank 2"]


def test_a_frame_that_was_cut_off_counts():
    failure = log_of((1, "mpidist: rank 1 of 8 failed\nTraceback (most")).first()
    assert (failure.rank, failure.framed) == (1, True)


def test_the_first_frame_wins_over_later_ones_and_over_plain_tracebacks():
    log = log_of(
        (0, TRACEBACK.format("logged")),
        (5, FRAME.format(rank=5, text=TRACEBACK.format("first"))),
        (2, FRAME.format(rank=2, text=TRACEBACK.format("second"))),
    )
    assert log.first().rank == 5


def test_a_plain_traceback_is_a_failure_of_its_rank():
    log = log_of((4, "hello\n" + TRACEBACK.format("boom\nsecond line of the message")))
    assert not log.framed()
    assert log.first().rank == 4
    assert log.first().lines == TRACEBACK.format("boom\nsecond line of the message").split("\n")


def test_of_plain_tracebacks_the_first_rank_s_last_one_counts():
    log = log_of(
        (1, TRACEBACK.format("caught and logged") + "\ngoing on"),
        (0, TRACEBACK.format("first")),
        (1, TRACEBACK.format("second")),
    )
    assert log.first().rank == 0
    assert log.first().lines[-1] == "ValueError: first"


def test_a_chain_of_exceptions_is_one_failure():
    assert log_of((0, CHAINED)).first().lines == CHAINED.split("\n")


def test_a_syntax_error_of_the_script_itself():
    assert log_of((0, SYNTAX_ERROR)).first().lines == SYNTAX_ERROR.split("\n")


def test_a_traceback_long_survived_is_no_failure():
    log = log_of((0, TRACEBACK.format("caught") + "\nstep" * 100))
    assert log.first() is None


@pytest.mark.parametrize(
    ("text", "rank", "did"),
    [
        ("RankFailedError: rank 0 of 4: rank 2 (node1) died: its process 12 is gone", 2, "died"),
        (
            "RankFailedError: rank 1 of 4: rank 1 waits for a message of rank 0 (vm): rank 0 (vm) died: killed",
            0,
            "died",
        ),
        ("PeerLostError: rank 0 of 4: ps 0 (rank 3 (vm)) died: its process 7 is gone", 3, "died"),
        (
            "PeerLostError: rank 2 of 4: rank 2 waits for ps 0 (rank 3 (vm)): rank 3 (vm) left",
            3,
            "left",
        ),
        ("RankFailedError: rank 0 of 2: rank 1 (vm) failed: ValueError: boom", 1, "failed"),
    ],
)
def test_who_broke_off_is_read_from_the_errors_of_others(text, rank, did):
    failure = log_of((0, "Traceback (most recent call last):\nmpidist.errors." + text + " ")).first()
    assert failure.cause() == (rank, did)


def test_interleaved_ranks_are_kept_apart():
    log = FailureLog()
    for line in TRACEBACK.format("boom").split("\n"):
        for rank in (1, 0):
            log.feed(rank, line)
    assert log.first().rank == 1
    assert log.first().lines == TRACEBACK.format("boom").split("\n")


@given(
    before=st.lists(st.text(alphabet="ab :.", max_size=9), max_size=9),
    after=st.lists(st.text(alphabet="ab :.", max_size=9), max_size=9),
    rank=st.integers(0, 7),
)
def test_a_frame_is_found_in_any_noise(before, after, rank):
    frame = FRAME.format(rank=rank, text=TRACEBACK.format("boom"))
    log = log_of((None, "\n".join([*before, frame, *after])))
    assert log.first().rank == rank
    assert log.first().lines == frame.split("\n")


def test_the_repeated_text_ends_in_the_traceback():
    framed = log_of((5, FRAME.format(rank=5, text=TRACEBACK.format("boom")))).first()
    assert render(framed).endswith("rank 5 failed first; its traceback again:\n" + TRACEBACK.format("boom"))
    unknown = log_of((None, TRACEBACK.format("boom") + "\n\n")).first()
    assert render(unknown).endswith("a rank failed first; its traceback again:\n" + TRACEBACK.format("boom"))


def other_failed(rank, did, host=" (n1)"):
    """Return the frame of a rank that only tells what another did; `did` begins as the control channel's texts do."""
    error = f"mpidist.errors.RankFailedError: rank {rank} of 8: rank 5{host} {did} in all_reduce(sum)"
    return FRAME.format(rank=rank, text=f'Traceback (most recent call last):\n  File "a.py", line 3, in f\n{error}')


@pytest.mark.parametrize("host", [" (n1)", ""])
@pytest.mark.parametrize("did, heading", [("left", "left early"), ("died", "died"), ("failed", "failed first")])
def test_the_heading_names_the_rank_that_is_to_blame_not_the_one_that_tells(did, heading, host):
    failure = log_of((0, other_failed(0, did, host))).first()
    assert failure.cause() == (5, did)
    assert render(failure).startswith(f"\nmpidist run: rank 5 {heading}; rank 0 reported it; its traceback again:\n")


def test_after_the_sentence_about_a_death_the_rank_is_not_named_again():
    failure = log_of((0, other_failed(0, "died"))).first()
    assert render(failure, RankDeath((5,), -9)).startswith("\nmpidist run: rank 0 reported it; its traceback again:\n")


def test_an_error_of_its_own_is_about_no_other_rank():
    failure = log_of((3, FRAME.format(rank=3, text=TRACEBACK.format("rank 5 (n1) left the room")))).first()
    assert failure.cause() is None
    assert "rank 3 failed first" in render(failure)


def test_the_first_failure_of_some_ranks():
    log = log_of((4, TRACEBACK.format("logged")), (2, TRACEBACK.format("boom")))
    assert log.first().rank == 4
    assert log.first((2, 3)).rank == 2
    assert log.first((3,)) is None
