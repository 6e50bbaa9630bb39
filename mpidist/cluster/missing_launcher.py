"""A process in a job of several ranks that no launcher started: it works alone, and is told so, once."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

from mpidist.cluster.allocation import Allocation, given_allocation, het_group_option
from mpidist.cluster.launchers import detect_launcher
from mpidist.cluster.slurm_plugins import srun_cure
from mpidist.errors import ClusterResolutionError
from mpidist.options import settings

_log = logging.getLogger("mpidist")
_warned = threading.Lock()

#: Printed by a child process: this one must not load an MPI that it will not use.
_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


def warn_of_missing_launcher() -> None:
    """Warn once when this process is to work on all ranks of a job of several, and was started without a launcher."""
    if settings().no_mpi or detect_launcher() is not None:
        return
    try:
        allocation = given_allocation()
    except ClusterResolutionError:  # who starts ranks there is told
        return
    if allocation is not None and allocation.ranks > 1 and _warned.acquire(blocking=False):
        _log.warning("%s", _warning(allocation))


def _warning(allocation: Allocation) -> str:
    option, given = het_group_option(allocation.components), f"{allocation.ranks} ranks"
    start = srun_cure(_library(), option=option) if allocation.scheduler == "Slurm" else "Start it with a launcher"
    if option:  # mpirun sees the first component only
        given += f" in {allocation.components} components"
    else:
        start += f", or with `mpidist run -n {allocation.ranks} SCRIPT`"
    return (
        f"{allocation.title} was given {given}, but no launcher started this process: it works alone, as rank 0 of 1. "
        f"{start}; where one rank is meant, set MPIDIST_NO_MPI=1"
    )


def _library() -> str:
    """Return the text by which the MPI that mpi4py loads tells its version; empty where there is none."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", _LIBRARY], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return child.stdout
