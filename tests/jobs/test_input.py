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


def said(tmp_path, given, *what, ranks=2, **options):
    path = tmp_path / "script.py"
    path.write_text(READING)
    line = command("-n", str(ranks), "--quiet", str(path), *what)
    done = subprocess.run(
        line, **{"input": given, **options}, capture_output=True, env=environ(), timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stderr.decode()
    return sorted(done.stdout.decode().splitlines())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rank_0_reads_what_is_piped_in(tmp_path, ranks):
    others = [f"{rank} None 0" for rank in range(1, ranks)]
    assert said(tmp_path, b"Ada\nB", "line", "rest", ranks=ranks) == ["0 Ada 1", *others]


def test_more_than_a_pipe_holds(tmp_path):
    assert said(tmp_path, b"x" * 5_000_000, "rest") == ["0 None 5000000", "1 None 0"]


def test_input_that_nobody_reads_keeps_no_job_waiting(tmp_path):
    assert said(tmp_path, b"x" * 5_000_000) == ["0 None 0", "1 None 0"]


def test_a_pipe_that_never_ends_keeps_no_job_waiting(tmp_path):
    reader, writer = os.pipe()
    try:
        assert said(tmp_path, None, input=None, stdin=reader) == ["0 None 0", "1 None 0"]
    finally:
        os.close(reader)
        os.close(writer)


def test_a_file_is_read_from_where_it_stands(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"one\ntwo\nthree")
    with open(text, "rb", buffering=0) as file:
        file.seek(4)
        assert said(tmp_path, None, "line", "rest", input=None, stdin=file) == ["0 two 5", "1 None 0"]


def test_a_closed_input_is_at_its_end(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(READING)
    line = ["sh", "-c", 'exec "$@" <&-', "sh", *command("-n", "2", "--quiet", str(path), "rest")]
    done = subprocess.run(line, capture_output=True, env=environ(), timeout=LIMIT_SECONDS)
    assert (done.returncode, sorted(done.stdout.split(b"\n"))) == (0, [b"", b"0 None 0", b"1 None 0"]), done.stderr


#: Makes the terminal its own, and runs a job on it.
ON_TERMINAL = """
import fcntl, os, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""


def test_a_line_that_is_typed_at_a_terminal(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(READING)
    keyboard, terminal = pty.openpty()
    line = [sys.executable, "-c", ON_TERMINAL, *command("-n", "2", "--quiet", str(path), "line")]
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
