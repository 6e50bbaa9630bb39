"""Child processes of a rank: they inherit what the launcher has told the rank, and are no ranks themselves.

MPI would take one for its parent, and the job would hang or crash.  A rank leaves a mark in its environment before it
starts MPI.  A rank of another job, which a rank has started with a launcher, inherits the mark, too: but its launcher
has told it something else, or is among its parents.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from mpidist.cluster.launchers import Launcher, detect_launcher
from mpidist.errors import LaunchError

#: The variable of the mark: a process, and what its launcher has told it.
_MARK = "_MPIDIST_RANK_PROCESS"

#: How variables begin in which launchers tell jobs and ranks apart.
_TELLING = (
    *("PMIX_NAMESPACE", "PMIX_RANK", "PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "JSM_NAMESPACE_"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "FLUX_JOB_ID", "FLUX_TASK_RANK"),
)

#: How the programs of launchers begin, of which ranks are children.
_LAUNCHERS = ("mpi", "prte", "prun", "orte", "hydra", "srun", "slurm", "flux", "jsrun", "jsm")


def mark_rank() -> None:
    """Show the children that this process will have that it is a rank.  Local."""
    os.environ[_MARK] = f"{os.getpid()} {_told(os.environ)}"


def check_is_rank(launcher: Launcher | None) -> None:
    """Raise LaunchError if this process is a child of a rank, and no rank itself.  Local."""
    parent = _parent_rank() if launcher is not None else None
    if launcher is None or parent is None:
        return
    of = "" if launcher.size is None else f" of {launcher.size}"
    raise LaunchError(
        f"this process ({os.getpid()}) is a child of rank {launcher.rank}{of} (process {parent}), such as a worker "
        "of a data loader, and no rank itself: it cannot call mpidist, and MPI was not started in it. Let the rank "
        "make strategies and ask for ranks, after `if __name__ == '__main__':` or in functions that only the rank "
        "calls, and hand its children what they need. A child that is to work alone is started with MPIDIST_NO_MPI=1"
    )


def _parent_rank() -> int | None:
    """Return the process of the rank that this process is a child of; None if it is not."""
    parent = multiprocessing.parent_process()
    if parent is not None and not _was_started_by_hand(parent.pid):  # these variables are that process's
        return parent.pid
    number, _, told = os.environ.get(_MARK, "").partition(" ")
    if not number or number == str(os.getpid()) or told != _told(os.environ):
        return None
    for process, name in _parents():
        if process == int(number):
            break
        if name.startswith(_LAUNCHERS):
            return None
    return int(number)


def _was_started_by_hand(process: int | None) -> bool:
    """Return whether no launcher has started a process, as far as the system tells: what its child has is its own."""
    try:
        raw = Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return False
    items = (os.fsdecode(item).partition("=") for item in raw.split(b"\0"))
    return detect_launcher({name: value for name, _, value in items if name}) is None


def _told(environ: Mapping[str, str]) -> str:
    """Return what the launcher has told a process, as a digest."""
    told = sorted(item for item in environ.items() if item[0].startswith(_TELLING))
    return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()


def _parents() -> Iterator[tuple[int, str]]:
    """Yield number and name of the process that has started this one, of that one's, and so on; nothing off Linux."""
    process = os.getppid()
    while process > 0:
        try:
            text = Path(f"/proc/{process}/stat").read_text(errors="replace")
        except OSError:
            return
        name, _, rest = text.partition("(")[2].rpartition(")")
        yield process, name
        process = int(rest.split()[1])
