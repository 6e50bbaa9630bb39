"""Several hosts on this one machine, and how to start jobs on them."""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import getpid
from pathlib import Path
from subprocess import CompletedProcess, run

from mpidist.cluster.slurm_plugins import family
from tests.helpers.launch import JobResult, environment, launcher, run_process

FOLDER = Path(__file__).resolve().parent

#: Seconds within which any job here must have ended, whatever went wrong in it.
LIMIT_SECONDS = 60


@dataclass(frozen=True)
class Hosts:
    """Running hosts ``host1``, ``host2``, ...

    Attributes
    ----------
    folder : Path
        Where `up` has put the commands that get there.
    """

    folder: Path

    def run(
        self,
        slots: Sequence[int],
        command: Sequence[str],
        cyclic: bool = False,
        env: dict[str, str] | None = None,
        timeout_seconds: float = LIMIT_SECONDS,
    ) -> JobResult:
        """Run a Python program on ``slots[0]`` ranks of host1, ``slots[1]`` of host2, ...

        Parameters
        ----------
        slots : sequence of int
            Ranks by host.
        command : sequence of str
            What the interpreter of the tests is given: a script and its arguments.
        cyclic : bool
            Deal ranks to hosts in turn; else host after host.
        env : dict, optional
            Variables put over this process's own.
        timeout_seconds : float
        """
        places = {f"host{number}": count for number, count in enumerate(slots, 1)}
        options = {"MPICH": self._mpich, "Open MPI": self._openmpi}[family(launcher().vendor)](places, cyclic)
        start = [str(self.folder / "on"), "head", launcher().path, *options, "-n", str(sum(slots))]
        return run_process([*start, sys.executable, *command], environment(env), timeout_seconds)

    def run_script(self, slots: Sequence[int], text: str, *arguments: str, cyclic: bool = False) -> JobResult:
        """Run the text of a Python script, as `run`."""
        with tempfile.TemporaryDirectory(prefix="mpidist-job-") as folder:
            path = Path(folder, "script.py")
            path.write_text(text)
            return self.run(slots, [str(path), *arguments], cyclic)

    def _mpich(self, places: dict[str, int], cyclic: bool) -> list[str]:
        rsh = ["-launcher", "ssh", "-launcher-exec", str(self.folder / "rsh")]
        if cyclic:
            return [*rsh, "-hosts", ",".join(places), "-ppn", "1"]
        return [*rsh, "-hosts", ",".join(f"{host}:{count}" for host, count in places.items())]

    def _openmpi(self, places: dict[str, int], cyclic: bool) -> list[str]:
        rsh = ["--prtemca", "plm_ssh_agent", str(self.folder / "rsh"), "--prtemca", "plm_ssh_no_tree_spawn", "1"]
        where = ["--host", ",".join(f"{host}:{count}" for host, count in places.items())]
        # where ranks outnumber cores, a rank of theirs that waits inside MPI takes milliseconds a message
        shared = ["--allow-run-as-root", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        return [*rsh, *where, *shared, "--map-by", "node" if cyclic else "slot"]

    def shared_memory(self, host: int) -> list[str]:
        """Return the names in /dev/shm of a host."""
        return self._on(f"host{host}", "ls", "-A", "/dev/shm").stdout.split()

    def _on(self, host: str, *command: str) -> CompletedProcess[str]:
        line = [str(self.folder / "on"), host, *command]
        return run(line, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True)


@contextmanager
def several_hosts(count: int = 2, rate: str = "100mbit") -> Iterator[Hosts]:
    """Start hosts whose links are limited to `rate`, and take them away at the end, whatever it is.

    Raises
    ------
    OSError
        What this machine lacks.
    """
    folder = Path(tempfile.mkdtemp(prefix="hosts."))
    try:
        done = _call("up", "-n", str(count), "-r", rate, "-p", str(getpid()), str(folder))
        if done.returncode != 0:
            raise OSError("; ".join(done.stderr.strip().splitlines()[-3:]) or f"up ended with {done.returncode}")
        yield Hosts(folder)
    finally:
        down = _call("down", str(folder))
        _remove(folder)
        assert down.returncode == 0, down.stderr


def _remove(folder: Path) -> None:
    """Remove the folder, into which processes that were just killed may still write."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def _call(script: str, *arguments: str) -> CompletedProcess[str]:
    return run([str(FOLDER / script), *arguments], capture_output=True, text=True, timeout=LIMIT_SECONDS)


@functools.cache
def obstacle() -> str:
    """Return why there can be no hosts on this machine, "" where there can."""
    if family(launcher().vendor) not in ("MPICH", "Open MPI"):
        return f"no way is known to start {launcher().vendor} on other hosts"
    try:
        with several_hosts():
            return ""
    except OSError as error:
        return str(error)
