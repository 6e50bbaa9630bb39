"""How a job ends whose launcher does not say what became of it."""

from __future__ import annotations

import os
import sys
import termios
import time

import pytest

from mpidist.commands.launch import supervisor
from tests.helpers.launch import ROOT


def run(script: str, **env: str) -> supervisor.Ended:
    """Supervise a launcher that only runs this script."""
    return supervisor.supervise([sys.executable, "-c", script], ["true"], 2, {**os.environ, **env}, 30.0)


ENDING = "print('MPI will try to terminate your MPI job as well)', file=sys.stderr, flush=True)"


def test_a_launcher_that_does_not_end_after_mpi_has_ended_the_job_is_ended(monkeypatch):
    monkeypatch.setattr(supervisor, "_ENDING_SECONDS", 0.2)
    ended = run(f"import sys, time; {ENDING}; time.sleep(60)")
    assert ended.status == 1 and not ended.timed_out
    assert "its launcher did not end within 0.2 s" in ended.stuck


def test_a_launcher_that_ends_then_keeps_its_status():
    ended = run(f"import sys; {ENDING}; sys.exit(14)")
    assert (ended.status, ended.stuck) == (14, "")


@pytest.mark.parametrize("tolerant", ["0", "1"])
def test_a_job_that_has_lost_a_host_has_failed(tolerant):
    said = "print('PRTE has lost communication with a remote daemon.', file=sys.stderr)"
    assert run(f"import sys; {said}", MPIDIST_FAULT_TOLERANT=tolerant).status == 1
    assert run("pass", MPIDIST_FAULT_TOLERANT=tolerant).status == 0


#: A launcher that starts two ranks, and reports a status of its own, whatever became of them.
LAUNCHER = """
import os, subprocess, sys
environ = {**os.environ, "OMPI_COMM_WORLD_SIZE": "2"}
ranks = [subprocess.Popen(sys.argv[2:], env={**environ, "OMPI_COMM_WORLD_RANK": str(rank)}) for rank in (0, 1)]
for rank in ranks: rank.wait()
sys.exit(int(sys.argv[1]))
"""

#: A rank that leaves as `PreemptionCheckpointHandler` does.
ASKS = """
import sys
from mpidist.cluster.join_notes import noting_exit
from mpidist.cluster.launchers import detect_launcher
with noting_exit(detect_launcher()): {leave}
"""


#: A launcher that hears nothing, and stays when its two ranks have ended.
LOCKED = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for rank in (0, 1): subprocess.Popen(sys.argv[1:], env={**os.environ, "OMPI_COMM_WORLD_RANK": str(rank)})
while True: time.sleep(60)
"""


@pytest.mark.parametrize("status", [0, 3])
def test_a_launcher_that_stays_when_its_ranks_have_ended_is_ended_and_their_status_counts(monkeypatch, capfd, status):
    monkeypatch.setattr(supervisor, "_ENDING_SECONDS", 0.2)
    monkeypatch.setattr(supervisor, "_GRACE_SECONDS", 0.2)
    program = ["sh", "-c", f"echo 'ValueError: told' >&2; sleep 0.2; exit {status}"]
    ended = supervisor.supervise([sys.executable, "-c", LOCKED], program, 2, os.environ, 30.0)
    assert (ended.status, ended.timed_out, ended.lost, ended.stuck) == (status, False, 0, "")
    assert (ended.death is None) == (status == 0)
    said = "mpidist run: warning: the launcher did not end within 0.2 s after all ranks had, and was ended\n"
    assert capfd.readouterr().err.endswith(said)


@pytest.mark.parametrize(("tolerant", "status"), [("0", 137), ("1", 0)])
def test_a_launcher_that_stays_after_a_job_that_could_do_without_a_rank(monkeypatch, tolerant, status):
    monkeypatch.setattr(supervisor, "_ENDING_SECONDS", 0.2)
    monkeypatch.setattr(supervisor, "_GRACE_SECONDS", 0.2)
    program = ["sh", "-c", "sleep 0.2; [ $OMPI_COMM_WORLD_RANK = 0 ] || kill -9 $$"]
    environ = {**os.environ, "MPIDIST_FAULT_TOLERANT": tolerant}
    ended = supervisor.supervise([sys.executable, "-c", LOCKED], program, 2, environ, 30.0)
    assert (ended.status, ended.lost, ended.stuck) == (status, 0, "")


#: A launcher that stays after its two ranks until there is a file.
SLOW = """
import os, subprocess, sys, time
environ = [{**os.environ, "OMPI_COMM_WORLD_RANK": str(rank)} for rank in (0, 1)]
for each in [subprocess.Popen(sys.argv[2:], env=each) for each in environ]: each.wait()
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
sys.exit(7)
"""


def test_a_launcher_that_has_ended_while_nobody_looked_has_not_stayed(monkeypatch, capfd, tmp_path):
    file = tmp_path / "ended"

    def stand_still(job):  # as while nobody reads what is shown, or after Ctrl-Z
        if job._ending_since is not None:
            file.touch()
            job.process.wait()
            job._ending_since -= 2 * supervisor._ENDING_SECONDS

    monkeypatch.setattr(supervisor._Job, "_tell_deaths", stand_still)
    launcher = [sys.executable, "-c", SLOW, str(file)]
    ended = supervisor.supervise(launcher, ["sh", "-c", "sleep 0.2"], 2, os.environ, 30.0)
    assert (ended.status, ended.death) == (7, None)
    assert file.exists() and "the launcher did not end" not in capfd.readouterr().err


def test_a_launcher_may_wait_for_a_terminal_that_shows_nothing(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(supervisor, "_ENDING_SECONDS", 0.2)
    file, looks = tmp_path / "shown", []

    def stands(descriptors):
        looks.append(time.monotonic())
        if looks[-1] - looks[0] > 5 * supervisor._ENDING_SECONDS:
            file.touch()
        return True

    monkeypatch.setattr(supervisor, "_stands", stands)
    launcher = [sys.executable, "-c", SLOW, str(file)]
    ended = supervisor.supervise(launcher, ["sh", "-c", "sleep 0.2"], 2, os.environ, 30.0)
    assert (ended.status, ended.death) == (7, None)
    assert file.exists() and "the launcher did not end" not in capfd.readouterr().err


def test_a_terminal_stands_between_ctrl_s_and_ctrl_q():
    master, slave = os.openpty()
    try:
        assert not supervisor._stands([slave])
        termios.tcflow(slave, termios.TCOOFF)
        assert supervisor._stands([slave])
        termios.tcflow(slave, termios.TCOON)
        assert not supervisor._stands([slave])
    finally:
        os.close(slave)
        os.close(master)
    assert not supervisor._stands([slave])


@pytest.mark.parametrize("reported", ["0", "143"])
@pytest.mark.parametrize(
    ("leave", "status"),
    [
        ("sys.exit(42)", 42),
        ("sys.exit(298)", 42),
        ("sys.exit()", 0),
        ("sys.exit('saved')", 1),
        ("raise SystemExit(7)", 7),
    ],
)
def test_the_exit_status_that_ranks_ask_for_counts_whatever_the_launcher_says(tmp_path, reported, leave, status):
    script = tmp_path / "rank.py"
    script.write_text(ASKS.format(leave=leave))
    program = [sys.executable, str(script)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = supervisor.supervise([sys.executable, "-c", LAUNCHER, reported], program, 2, environ, 30.0)
    assert (ended.status, ended.death) == (status, None)


def test_what_is_no_exit_is_noted_as_none(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(ASKS.format(leave="pass"))
    program = [sys.executable, str(script)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert supervisor.supervise([sys.executable, "-c", LAUNCHER, "5"], program, 2, environ, 30.0).status == 5


def test_input_that_does_not_wait_is_passed_on_when_it_comes(tmp_path, monkeypatch):
    """Node.js gives such a pipe; a read before there is something is no end of it."""
    source, target = os.pipe()
    os.set_blocking(source, False)
    monkeypatch.setattr(supervisor, "_STDIN", source)
    supervisor._start_input(str(tmp_path / "0.0"))
    with open(tmp_path / "0.0", "rb") as rank_0:
        time.sleep(0.05)
        os.write(target, b"yes\n")
        os.close(target)
        assert rank_0.read() == b"yes\n"
    os.close(source)
