"""The status board: what one rank writes, another reads."""

import os
import subprocess
import sys

import pytest

from mpidist.runtime import board as states
from mpidist.runtime.board import StatusBoard, start_time


@pytest.fixture
def board():
    return StatusBoard(bytearray(StatusBoard.nbytes(3)), 3)


def test_a_fresh_board_says_nothing(board):
    assert [board.call(line) for line in range(3)] == [0, 0, 0]
    assert [board.state(line) for line in range(3)] == [states.UNKNOWN] * 3
    assert not board.alarm


def test_the_last_two_calls_keep_their_digests(board):
    for call in range(1, 8):
        board.post(1, call, 1000 + call)
        assert board.call(1) == call
        assert board.digest(1, call) == 1000 + call
        if call > 1:
            assert board.digest(1, call - 1) == 1000 + call - 1
    assert board.call(0) == board.call(2) == 0


def test_digests_have_64_bits(board):
    board.post(2, 1, 2**64 - 1)
    assert board.digest(2, 1) == 2**64 - 1


def test_a_state_raises_the_alarm_and_carries_its_text(board):
    board.set_state(0, states.FAILED, "ValueError: Größe")
    assert board.alarm
    assert board.state(0) == states.FAILED
    assert board.text(0) == "ValueError: Größe"
    assert board.text(1) == ""


def test_a_text_that_is_too_long_is_cut_not_spilled(board):
    board.set_state(0, states.FAILED, "x" * 100_000)
    assert set(board.text(0)) == {"x"}
    assert board.text(1) == ""


def test_of_a_text_that_is_too_long_the_end_is_kept_which_names_the_error(board):
    board.set_state(1, states.FAILED, 'File "model.py", line 1\n' * 1000 + "ValueError: the reason")
    assert board.text(1).endswith("\nValueError: the reason")


def test_this_process_is_alive_and_one_that_ended_is_not(board):
    board.sign_on(0)
    assert board.alive(0)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    base = (1 + 1) * 16
    board.words[base + 5] = child.pid
    board.words[base + 6] = start_time(child.pid)
    assert board.alive(1)
    child.kill()
    # Not reaped yet: a zombie is as dead as one that is gone.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not board.alive(1)
    child.communicate()
    assert not board.alive(1)


def test_a_line_nobody_signed_on_counts_as_alive(board):
    assert board.alive(2)
