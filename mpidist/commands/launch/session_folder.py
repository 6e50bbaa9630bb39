"""The session folder of Open MPI's launcher, in which it keeps files while a job runs.

Its name is ``/tmp/ompi.PID``.  What a killed launcher has left there keeps a later one of the same number from
starting: "The PMIx server's listener thread failed to start".  So each job has it inside its own run folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

#: Of the launcher's own machine: daemons on other hosts make their folders where they always do.
_PLACE = "PRTE_MCA_prte_local_tmpdir_base"

_PLACED = re.compile(r'tmpdir_base" \(current value: "([^"]*)"')


def session_place(launcher: Sequence[str], environ: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the variable that puts the session folder into `folder`; none where it is placed, or cannot be."""
    # it knows variables and configuration files; the launcher refuses two places
    info = shutil.which("prte_info", path=os.path.dirname(launcher[0]))
    if info is None or any("tmpdir_base" in word for word in launcher):
        return {}
    try:
        answer = subprocess.run(
            [info, "--all"], env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = _PLACED.findall(" ".join(answer.stdout.split()))
    return {_PLACE: folder} if values and not any(values) else {}
