"""A Slurm of a few virtual nodes on this machine, and how to start jobs on it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess, run

from mpidist.cluster.slurm_plugins import family
from mpidist.commands.launch.probe import MpiFound, probe_mpi
from tests.helpers.launch import JobResult, JobTimeout, environment, run_process

FOLDER = Path(__file__).resolve().parent

#: Seconds within which any job here must have ended, whatever went wrong in it: far more than one takes on a machine
#: with twenty times as many processes as cores.
LIMIT_SECONDS = 180

#: How often a batch job of a test starts at most, queued again.
_STARTS = 2

#: What Slurm's pmi2 plugin says in the rare case that it reads a message of MPICH in two pieces and takes neither.
#: Some ranks then end in MPI_Init, before anything of ours has begun, and the others wait there for ever.
_BROKEN_START = "mpi/pmi2: invalid client request"

#: For each MPI, the way of `srun --mpi` to make one world of its ranks; and all others.
PLUGINS = {"Open MPI": "pmix", "MPICH": "pmi2"}
WRONG_PLUGINS = {"Open MPI": ("pmi2", "none"), "MPICH": ("pmix", "none")}


class BrokenStart(JobTimeout):
    """A job step did not start, for a reason that is Slurm's."""


@functools.cache
def mpi() -> MpiFound:
    """Return the MPI of the interpreter that runs the tests."""
    return probe_mpi()


def plugin() -> str:
    """Return what `srun --mpi=` is right for it."""
    return PLUGINS[family(mpi().vendor)]


@dataclass(frozen=True)
class Slurm:
    """A running cluster of the nodes ``node1``, ``node2`` and so on, of 4 CPUs each.

    Attributes
    ----------
    folder : Path
        Where its configuration, logs and sockets are.
    nodes : int
        How many.
    """

    folder: Path
    nodes: int

    @classmethod
    def start(cls, folder: Path, nodes: int) -> Slurm:
        """Start a cluster below `folder`; OSError says what this machine lacks."""
        done = _call("up", "-n", str(nodes), "-c", "4", str(folder))
        if done.returncode != 0:
            stop(folder)
            lines = done.stderr.strip().splitlines() or [f"tests/slurm/up ended with status {done.returncode}"]
            raise OSError("; ".join(lines[-3:]))
        return cls(folder, nodes)

    def crash(self, node: str) -> None:
        """Have a node lose all its processes at once, Slurm's among them."""
        os.kill(int((self.folder / "pids" / node).read_text().split()[0]), signal.SIGKILL)

    def repair(self, node: str) -> None:
        """Start a node that has crashed, when Slurm has noticed: before that it would send jobs there too early."""
        end = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < end and not self._has_given_up(node):
            time.sleep(0.1)
        done = _call("up", str(self.folder))
        assert done.returncode == 0, done.stderr

    def _has_given_up(self, node: str) -> bool:
        """Return whether Slurm takes a node for down, and has no message under way.

        It tries for 10 s to send a node the end of a job. If the node is back by then, and the job has started on it
        anew, the message ends the new start.
        """
        is_down = "down" in self.client("sinfo", "-h", "-n", node, "-o", "%t").stdout
        return is_down and re.search(r"Agent count:\s+0\b", self.client("sdiag").stdout) is not None

    def srun(
        self,
        *command: str,
        options: Sequence[str] = ("--nodes=2", "--ntasks-per-node=2"),
        mpi: str = "",
        env: dict[str, str] | None = None,
    ) -> JobResult:
        """Run a command as a job step of four ranks on two nodes, wired up by `mpi` (the right one by default)."""
        line = ["srun", f"--mpi={mpi or plugin()}", *options, *command]
        environ = {**self.environ(), **(env or {})}
        try:
            return self._step(line, environ)
        except BrokenStart:
            return self._step(line, environ)

    def _step(self, line: Sequence[str], environ: dict[str, str]) -> JobResult:
        try:
            result = run_process(line, environ, LIMIT_SECONDS)
        except JobTimeout as error:
            self.client("scancel", "--user=root")  # what srun would have done, had it not been killed
            if _BROKEN_START in str(error):
                raise BrokenStart(str(error)) from error
            raise
        if _BROKEN_START in result.stderr:
            raise BrokenStart(result.stderr)
        return result

    def run_script(self, text: str, *options: str, env: dict[str, str] | None = None) -> JobResult:
        """Run the text of a Python script on four ranks, two a node."""
        with tempfile.TemporaryDirectory(prefix="mpidist-job-") as folder:
            path = Path(folder, "script.py")
            path.write_text(text)
            options = ("--nodes=2", "--ntasks-per-node=2", *options)
            return self.srun(sys.executable, str(path), options=options, env=env)

    def sbatch(self, text: str) -> JobResult:
        """Run a batch script to its end; the result's stdout is what the job printed."""
        with self.submitted(text) as job:
            return job.ended()

    @contextmanager
    def submitted(self, text: str) -> Iterator[BatchJob]:
        """Submit a batch script; what is left of the job when the body ends is cancelled."""
        with tempfile.TemporaryDirectory(prefix="mpidist-job-") as folder:
            script, output = Path(folder, "job.sh"), Path(folder, "output")
            script.write_text(text)
            submit = ["sbatch", "--parsable", f"--output={output}", f"--chdir={folder}", str(script)]
            number = run(submit, env=self.environ(), capture_output=True, text=True, check=True).stdout.strip()
            try:
                yield BatchJob(self, number, output, time.monotonic())
            finally:
                self.client("scancel", number)

    def client(self, *command: str) -> CompletedProcess[str]:
        """Run a client of the cluster, such as `scontrol`."""
        return run(command, env=self.environ(), capture_output=True, text=True, timeout=LIMIT_SECONDS)

    def shared_memory(self) -> set[str]:
        """Return the names in /dev/shm of all nodes, each with its node."""
        listing = 'for name in $(ls -A /dev/shm); do echo "$SLURMD_NODENAME $name"; done'
        options = (f"--nodes={self.nodes}", "--ntasks-per-node=1")
        result = self.srun("sh", "-c", listing, options=options, mpi="none")
        assert result.returncode == 0, result.stderr
        return set(result.stdout.splitlines())

    def environ(self) -> dict[str, str]:
        """Return the environment of this cluster's clients, free of an enclosing job's variables."""
        mine = {name: value for name, value in environment().items() if not name.startswith("SLURM_")}
        return {**mine, "SLURM_CONF": str(self.folder / "slurm.conf")}


@dataclass(frozen=True)
class BatchJob:
    """A job that has been submitted.

    Attributes
    ----------
    number : str
        Its number, for Slurm's clients.
    output : Path
        What it prints.
    began : float
        When it was submitted, in seconds of ``time.monotonic()``.
    """

    cluster: Slurm
    number: str
    output: Path
    began: float

    @property
    def printed(self) -> str:
        """What the job has printed up to now."""
        return self.output.read_text() if self.output.exists() else ""

    def wait_for(self, pattern: str, count: int = 1) -> None:
        """Return when the job has printed something so often."""
        self.wait_until(lambda: len(re.findall(pattern, self.printed)) >= count, f"print {pattern!r} {count} times")

    def ended(self) -> JobResult:
        """Wait for the end of the job, and return how it ended."""
        self.wait_until(lambda: self._exit_code() is not None, "end")
        return JobResult(self._exit_code() or 0, self.printed, "", time.monotonic() - self.began, time.time())

    def wait_until(self, fact: Callable[[], bool], what: str) -> None:
        """Return when a fact holds; JobTimeout says that the job did not do `what`."""
        # not `sbatch --wait`, which looks only every ten seconds
        end = time.monotonic() + _STARTS * LIMIT_SECONDS
        while not fact():
            if time.monotonic() > end:
                raise JobTimeout(f"batch job {self.number} did not {what}; it printed:\n{self.printed}")
            time.sleep(0.1)

    def _exit_code(self) -> int | None:
        """Return the exit status of the job, None while it runs; that of a signal is above 128."""
        shown = self.cluster.client("scontrol", "--oneliner", "show", "job", self.number).stdout
        if re.search(r"JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING|REQUEUED)\b", shown):
            return None
        match = re.search(r"\bExitCode=(\d+):(\d+)", shown)
        assert match, shown
        status, by_signal = map(int, match.groups())
        return status or (128 + by_signal if by_signal else 0)


def stop(folder: Path) -> None:
    """Stop what was started below `folder`, and remove it."""
    done = _call("down", str(folder))
    shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr


def _call(script: str, *arguments: str) -> CompletedProcess[str]:
    return run([str(FOLDER / script), *arguments], capture_output=True, text=True, timeout=300)
