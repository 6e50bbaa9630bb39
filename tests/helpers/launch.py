"""Run a script on N real ranks in a subprocess, for tests of jobs that fail.

The launcher is the one that belongs to the MPI of the interpreter that runs the tests.  Tests that use this run on one
rank themselves: they live in ``tests/jobs/``, not in ``tests/parallel/``.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired

from mpidist.commands.launch.command_line import command_line
from mpidist.commands.launch.cores import Cores, visible_cores
from mpidist.commands.launch.mpirun import Mpirun, find_mpirun
from mpidist.commands.launch.probe import probe_mpi, without_launcher
from mpidist.commands.launch.rank_processes import end_processes, processes_of
from mpidist.options import RUN_TOKEN

ROOT = Path(__file__).resolve().parents[2]

#: After so long a job is ended, and its test fails: far above any honest wait, however busy the machine is.
LIMIT_SECONDS = 300.0

#: How long ranks, and names of shared memory, may take to vanish after the launcher has ended.
_VANISH_SECONDS = 60.0

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class JobResult:
    """How a job ended: the launcher's exit status, what all ranks printed, how long it took.

    `ended_at` is when the last of its processes was seen to be gone, in seconds of ``time.time()``.
    """

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    ended_at: float


class JobTimeout(AssertionError):
    """A job did not end in time, and was killed."""


@functools.cache
def launcher() -> Mpirun:
    """Return the launcher that belongs to this interpreter's MPI."""
    return find_mpirun(probe_mpi())


def run_job(
    ranks: int,
    script: str | Path,
    args: Sequence[str] = (),
    timeout_seconds: float = LIMIT_SECONDS,
    env: Mapping[str, str] | None = None,
) -> JobResult:
    """Run a Python script under mpirun and return how it ended.

    Parameters
    ----------
    ranks : int
    script : str or Path
        The script's text, or where it is.
    args : sequence of str
        Its arguments.
    timeout_seconds : float
        After so long the whole job is killed.
    env : mapping, optional
        Variables put over this process's own; those of an enclosing mpirun are taken out first.

    Raises
    ------
    JobTimeout
        The job did not end in time; the message has what it printed.
    AssertionError
        A rank was still alive after the launcher had ended.
    """
    with tempfile.TemporaryDirectory(prefix="mpidist-job-") as folder:
        path = script if isinstance(script, Path) else Path(folder, "script.py")
        if isinstance(script, str):
            path.write_text(script)
        return run_command(ranks, [sys.executable, str(path), *args], timeout_seconds, env)


def run_command(
    ranks: int, command: Sequence[str], timeout_seconds: float = LIMIT_SECONDS, env: Mapping[str, str] | None = None
) -> JobResult:
    """Run any command on `ranks` ranks under mpirun; as `run_job`."""
    environ = environment(env)
    # no binding: several jobs may share the cores of a testing machine
    cores = Cores(visible_cores().count, restricted=True)
    line = command_line(launcher().path, launcher().vendor, ranks, cores, environ, os.geteuid() == 0)
    # of its own, as `mpidist run` gives it: jobs that run at a time may have the same names in /dev/shm
    with tempfile.TemporaryDirectory(prefix="sm_segments.", dir=_SHARED_MEMORY, ignore_cleanup_errors=True) as segments:
        # buffered, so that `print` writes a line at once and ranks' lines do not mix in the file
        own = {"OMPI_MCA_btl_sm_backing_directory": segments, "PYTHONUNBUFFERED": ""}
        return run_process([*line.arguments, *command], {**environ, **line.environ, **own}, timeout_seconds)


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's variables without those of an enclosing mpirun, the checkout importable, `env` over all."""
    environ = without_launcher(os.environ)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    return {**environ, **(env or {})}


def run_process(command: Sequence[str], environ: Mapping[str, str], timeout_seconds: float) -> JobResult:
    """Run a command that starts a job, with a time limit, and prove that it leaves no process behind."""
    token, began = uuid.uuid4().hex, time.monotonic()
    # files, not pipes: a process that is left behind would keep a pipe open, and the reader waiting
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr, _own_folder(environ) as environ:
        process = Popen(
            command,
            env={**environ, RUN_TOKEN: token},
            stdin=DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            timed_out = not _ends(process, timeout_seconds)
            seconds = time.monotonic() - began
            alive = [] if timed_out else survivors(token)
            ended_at = time.time()
        finally:
            end_processes(token)
            process.wait()
        texts = [_text(file) for file in (stdout, stderr)]
    if timed_out:
        raise JobTimeout(f"{command} did not end within {timeout_seconds:g} s; it printed:\n{texts[0]}\n{texts[1]}")
    assert not alive, f"ranks were alive after the launcher had ended: {alive}\n{texts[0]}\n{texts[1]}"
    return JobResult(process.returncode, *texts, seconds, ended_at)


@contextmanager
def _own_folder(environ: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Yield the variables with a temporary folder of this job's own, unless the test has chosen one.

    In a folder that is shared, Open MPI's launchers remove each other's when one starts as another ends.
    """
    if environ.get("TMPDIR") != os.environ.get("TMPDIR"):
        yield environ
        return
    with tempfile.TemporaryDirectory(prefix="mpidist-tmp-", ignore_cleanup_errors=True) as folder:
        yield {**environ, "TMPDIR": folder}


def _ends(process: Popen[bytes], timeout_seconds: float) -> bool:
    try:
        process.wait(timeout_seconds)
    except TimeoutExpired:
        return False
    return True


def survivors(token: str) -> list[int]:
    """Return the processes that carry `token` and do not vanish within moments."""
    end = time.monotonic() + _VANISH_SECONDS
    while (left := sorted(processes_of(token))) and time.monotonic() < end:
        time.sleep(0.01)
    return left


@contextmanager
def no_shared_memory_left() -> Iterator[None]:
    """Fail if names of mpidist's shared memory stay behind the block; other jobs have some for moments."""
    before = _names_of_shared_memory()
    yield
    end = time.monotonic() + _VANISH_SECONDS
    while (left := _names_of_shared_memory() - before) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left, f"shared memory was left behind: {sorted(left)}"


def _names_of_shared_memory() -> set[str]:
    return {path.name for path in _SHARED_MEMORY.glob("mpidist*")}


def _text(file) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
