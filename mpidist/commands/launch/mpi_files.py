"""Folders for what Open MPI keeps while a job runs, one of each kind for every job.

Its own choices are ``/tmp/ompi.PID`` for the session, and for shared memory names in ``/dev/shm`` with 16 bits of a
hash of the launcher's host and process number.  What a killed launcher has left keeps a later one of the same number
from starting: "The PMIx server's listener thread failed to start".  Two jobs of the same 16 bits write into each
other's memory: a rank dies of a segmentation fault, or waits for ever.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence

from mpidist.cluster.programs import said

#: Of the launcher's own machine: daemons on other hosts make their folders where they always do.
_SESSION = "PRTE_MCA_prte_local_tmpdir_base"
_SESSION_PLACED = re.compile(r'tmpdir_base" \(current value: "([^"]*)"')

_SEGMENTS_PLACED = ("--param", "btl", "sm", "--level", "9", "--parsable")

#: What the run folder's name begins with, and that of the folder of shared memory, with the same end.
RUN, SEGMENTS = "mpidist-run-", "/dev/shm/sm_segments."


def open_mpi_folders(launcher: Sequence[str], environ: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the variables that put a job's session folder into its run folder, and make its folder of shared memory.

    Neither where the user has placed it, nor where the launcher is not that of Open MPI 5 or later.
    """
    if "btl_sm_backing_directory:source:default" in _says(launcher, environ, "ompi_info", *_SEGMENTS_PLACED):
        try:
            os.mkdir(_segments(folder), 0o700)
        except OSError:  # the names in /dev/shm will do, as nearly always
            pass
    # the launcher refuses two places
    values = _SESSION_PLACED.findall(_says(launcher, environ, "prte_info", "--all"))
    is_placed = any(values) or any("tmpdir_base" in word for word in launcher)
    return {_SESSION: folder} if values and not is_placed else {}


def remove_segments(folder: str) -> None:
    """Remove the folder of shared memory of the job with this run folder, whose ranks have ended.  Local."""
    shutil.rmtree(_segments(folder), ignore_errors=True)


def _segments(folder: str) -> str:
    return SEGMENTS + os.path.basename(folder).removeprefix(RUN)


def _says(launcher: Sequence[str], environ: Mapping[str, str], program: str, *words: str) -> str:
    """Return in one line what a program beside the launcher says of variables and configuration files."""
    return " ".join(said([os.path.join(os.path.dirname(launcher[0]), program), *words], 20, environ).split())
