"""How a rank ends, as far as that can be seen without ending one."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time

import pytest

from mpidist.errors import RankFailedError
from mpidist.options import Settings
from mpidist.runtime.board import StatusBoard
from mpidist.runtime.control import ControlChannel
from mpidist.runtime.exit_hooks import ExitHooks
from mpidist.runtime.process_hooks import ProcessHooks
from mpidist.runtime.stall import Messenger


class Aborted(BaseException):
    """Stands for the end of this process."""


class Counting(Messenger):
    """Counts how often it is used, and carries nothing."""

    used = 0

    def send(self, rank, notice):
        self.used += 1

    def arrived(self):
        self.used += 1
        return iter(())


@pytest.fixture
def board(monkeypatch):
    """The board of a node of ranks 0 and 1, on which rank 0 was a process that is gone."""
    board = StatusBoard(bytearray(StatusBoard.nbytes(2)), 2)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with monkeypatch.context() as as_child:
        as_child.setattr("os.getpid", lambda: child.pid)
        board.sign_on(0)
    assert board.alive(0)
    child.kill()
    child.wait()
    return board


def _hooks(*worlds):
    """Return the hooks of a process of these worlds, which are not put in place."""
    hooks = ProcessHooks()
    hooks._worlds.extend(worlds)
    return hooks


def _end(board, error):
    messenger = Counting()
    channel = ControlChannel(1, 4, board, [0, 1], hosts=["a", "a", "b", "b"], messenger=messenger, chosen=Settings())

    def abort(code):
        raise Aborted(code, messenger.used)

    with pytest.raises(Aborted) as aborted:
        _hooks(ExitHooks(channel, abort)).on_exception(type(error), error, None)
    return aborted.value.args


def test_a_rank_that_names_a_killed_one_prints_before_it_uses_mpi_again(board, capsys):
    code, messages = _end(board, RankFailedError("rank 1 of 4: rank 0 (a) died in all_reduce", 0))
    assert (code, messages) == (1, 0)
    assert "RankFailedError: rank 1 of 4: rank 0 (a) died in all_reduce" in capsys.readouterr().err


def test_a_rank_that_fails_tells_the_ranks_of_other_nodes(capsys):
    board = StatusBoard(bytearray(StatusBoard.nbytes(2)), 2)
    code, messages = _end(board, ValueError("boom"))
    assert code == 1 and messages >= 2  # rank 2 and rank 3
    assert "ValueError: boom" in capsys.readouterr().err


def test_ranks_of_a_node_that_fail_each_by_its_own_error_print_one_after_the_other(monkeypatch):
    board = StatusBoard(bytearray(StatusBoard.nbytes(3)), 3)
    channels = [ControlChannel(rank, 3, board, range(3), hosts=["a"] * 3, chosen=Settings()) for rank in range(3)]
    seen = []

    def say(text):
        rank = int(text.split()[2])
        seen.append(("begins", rank))
        time.sleep(0.02)  # a launcher that passes it on in pieces
        seen.append(("ends", rank))

    monkeypatch.setattr("mpidist.runtime.exit_hooks.say", say)
    hooks = [ExitHooks(channel, lambda code: seen.append(("aborts", code))) for channel in channels]
    errors = [ValueError("first"), ValueError("second"), KeyError("third")]
    pairs = zip(hooks, errors, strict=True)
    ranks = [threading.Thread(target=each.end_by, args=(error, f"{error!r}\n")) for each, error in pairs]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert seen[:6] == [(what, rank) for rank in range(3) for what in ("begins", "ends")]
    assert seen[6:] == [("aborts", 1)] * 3  # none ends the job before all have printed


class Slow(Messenger):
    """Brings what ranks 2 and 3 say when they leave, one at every tenth look."""

    def __init__(self):
        self.looks, self.coming = 0, [2, 3]

    def send(self, rank, notice):
        pass

    def arrived(self):
        self.looks += 1
        if self.coming and self.looks % 10 == 0:
            yield self.coming.pop(0), json.dumps({"kind": "left", "call": 0}).encode()


def test_a_rank_that_leaves_takes_in_what_the_others_say_when_they_leave():
    board = StatusBoard(bytearray(StatusBoard.nbytes(2)), 2)
    messenger = Slow()
    channel = ControlChannel(0, 4, board, [0, 1], messenger=messenger, chosen=Settings())
    _hooks(ExitHooks(channel, pytest.fail, all_left=lambda: lambda: True)).on_exit()
    assert messenger.coming == []


@pytest.mark.parametrize("stdout", [None, "closed"])
def test_a_program_that_closed_its_output_still_names_its_error(board, monkeypatch, capsys, stdout):
    if stdout is not None:
        stdout = io.StringIO()
        stdout.close()
    monkeypatch.setattr(sys, "stdout", stdout)
    _end(board, ValueError("the reason"))
    assert "ValueError: the reason" in board.text(1)
    assert "ValueError: the reason" in capsys.readouterr().err
