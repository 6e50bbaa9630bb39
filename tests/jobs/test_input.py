"""Standard input of ``mpidist run``: rank 0 has it, as under mpirun, and no other rank."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from tests.jobs.test_run import RANK, command, environ

LIMIT_SECONDS = 300

#: Each rank tells what it reads; the line that input() takes is told by rank 0.
READING = (
    RANK
    + """
line = input() if rank == 0 and "line" in sys.argv else None
rest = sys.stdin.read() if "rest" in sys.argv or rank else ""
os.write(1, f"{rank} {line} {len(rest)}\\n".encode())
"""
)


#: Hosts of which the first is this machine change nothing.
PLACES = pytest.mark.parametrize("place", [(), ("--hosts", "localhost:2")], ids=["here", "hosts"])


def said(tmp_path, given, *what, ranks=2, place=(), **options):
    path = tmp_path / "script.py"
    path.write_text(READING)
    line = command("-n", str(ranks), "--quiet", *place, str(path), *what)
    done = subprocess.run(
        line, **{"input": given, **options}, capture_output=True, env=environ(), timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stderr.decode()
    return sorted(done.stdout.decode().splitlines())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rank_0_reads_what_is_piped_in(tmp_path, ranks):
    others = [f"{rank} None 0" for rank in range(1, ranks)]
    assert said(tmp_path, b"Ada\nB", "line", "rest", ranks=ranks) == ["0 Ada 1", *others]


@PLACES
def test_more_than_a_pipe_holds(tmp_path, place):
    assert said(tmp_path, b"x" * 5_000_000, "rest", place=place) == ["0 None 5000000", "1 None 0"]


def test_input_that_nobody_reads_keeps_no_job_waiting(tmp_path):
    assert said(tmp_path, b"x" * 5_000_000) == ["0 None 0", "1 None 0"]


@PLACES
def test_a_pipe_that_never_ends_keeps_no_job_waiting(tmp_path, place):
    reader, writer = os.pipe()
    try:
        assert said(tmp_path, None, place=place, input=None, stdin=reader) == ["0 None 0", "1 None 0"]
    finally:
        os.close(reader)
        os.close(writer)


def test_a_file_is_read_from_where_it_stands(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"one\ntwo\nthree")
    with open(text, "rb", buffering=0) as file:
        file.seek(4)
        assert said(tmp_path, None, "line", "rest", input=None, stdin=file) == ["0 two 5", "1 None 0"]


@PLACES
def test_a_closed_input_is_at_its_end(tmp_path, place):
    path = tmp_path / "script.py"
    path.write_text(READING)
    line = ["sh", "-c", 'exec "$@" <&-', "sh", *command("-n", "2", "--quiet", *place, str(path), "rest")]
    done = subprocess.run(line, capture_output=True, env=environ(), timeout=LIMIT_SECONDS)
    assert (done.returncode, sorted(done.stdout.split(b"\n"))) == (0, [b"", b"0 None 0", b"1 None 0"]), done.stderr


#: Makes the terminal its own, unless it is told not to, and runs a job on it.
ON_TERMINAL = """
import fcntl, os, subprocess, sys, termios
if sys.argv[1] == "own":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.exit(subprocess.run(sys.argv[2:]).returncode)
"""


@PLACES
@pytest.mark.parametrize("whose", ["own", "foreign"])
def test_a_line_that_is_typed_at_a_terminal(tmp_path, whose, place):
    path = tmp_path / "script.py"
    path.write_text(READING)
    keyboard, terminal = pty.openpty()
    line = [sys.executable, "-c", ON_TERMINAL, whose, *command("-n", "2", "--quiet", *place, str(path), "line")]
    job = subprocess.Popen(
        line, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ(), start_new_session=True
    )
    try:
        os.write(keyboard, b"Ada\n")
        out, errors = job.communicate(timeout=LIMIT_SECONDS)
    finally:
        job.kill()
        os.close(keyboard)
        os.close(terminal)
    assert (job.returncode, sorted(out.split(b"\n"))) == (0, [b"", b"0 Ada 0", b"1 None 0"]), errors


#: Runs a job in the background of the terminal, and says how its process has ended or that it was stopped.
IN_BACKGROUND = """
import fcntl, os, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
job = subprocess.Popen(sys.argv[1:], process_group=0)
_, status = os.waitpid(job.pid, os.WUNTRACED)
sys.exit("stopped" if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="process_group is new in 3.11")
@PLACES
def test_a_job_in_the_background_of_a_terminal_is_not_stopped(tmp_path, place):
    path = tmp_path / "script.py"
    path.write_text(READING)
    keyboard, terminal = pty.openpty()
    line = [sys.executable, "-c", IN_BACKGROUND, *command("-n", "2", "--quiet", *place, str(path))]
    try:
        os.write(keyboard, b"for the shell\n")
        done = subprocess.run(
            line, stdin=terminal, capture_output=True, env=environ(), start_new_session=True, timeout=LIMIT_SECONDS
        )
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert (done.returncode, sorted(done.stdout.split(b"\n"))) == (0, [b"", b"0 None 0", b"1 None 0"]), done.stderr
