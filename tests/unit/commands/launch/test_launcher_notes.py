"""What launchers tell in notes of the end of a job, as recorded, is held back; all else passes."""

from __future__ import annotations

import pytest

from mpidist.commands.launch.launcher_notes import LauncherNotes

EDGE = b"-" * 74 + b"\n"

ABORT = (
    EDGE
    + b"""\
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[34711,1],1]
  Errorcode: 1

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
"""
    + EDGE
)

KILLED = (
    EDGE
    + b"""\
prterun noticed that process rank 1 with PID 14777 on node vm exited on
signal 9 (Killed).
"""
    + EDGE
)

MPICH = b"""
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 14837 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""

EPOLL = b"[warn] Epoll MOD(1) on fd 27 failed. Old events were 6; read change was 0 (none): Bad file descriptor\n"
SLOTS = EDGE + b"There are not enough slots available in the system to satisfy the 8\n" + EDGE


@pytest.mark.parametrize("text", [ABORT, KILLED, ABORT + KILLED, EPOLL, MPICH.lstrip()])
@pytest.mark.parametrize("is_whole", [True, False])
def test_what_only_tells_of_the_end_is_held_back(text, is_whole):
    notes = LauncherNotes()
    parts = [text] if is_whole else text.splitlines(keepends=True)
    assert b"".join(map(notes.take, [b"before\n", *parts, b"after\n"])) == b"before\nafter\n"
    assert notes.held == text and notes.flush() == b""


@pytest.mark.parametrize("text", [SLOTS, EDGE + b"a | b\n" + EDGE + b"1 | 2\n" + EDGE, b"-" * 80 + b"\n", b"\n\n", b""])
def test_all_else_passes(text):
    notes = LauncherNotes()
    assert notes.take(text) + notes.flush() == text
    assert notes.held == b""


def test_the_edge_of_a_box_waits_for_the_next_line_and_no_longer():
    notes = LauncherNotes()
    assert notes.take(b"a table\n" + EDGE) == b"a table\n"
    assert notes.flush() == EDGE
    assert notes.take(KILLED) == b""


def test_a_box_that_does_not_end_holds_no_more_than_a_box():
    notes = LauncherNotes()
    shown = notes.take(EDGE + b"MPI_ABORT was invoked on rank 1\n" + b"line\n" * 200)
    assert 150 <= shown.count(b"line\n") < 200
    assert shown.count(b"line\n") + notes.held.count(b"line\n") == 200
