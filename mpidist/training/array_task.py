"""Which task of a job array has written the checkpoints of a directory, in a file there.  All Local.

Tasks of an array that run one after the other never meet, and the file of the `Owner` goes with its job: each would go
on with the training of the one before, and their checkpoints would mix.  Outside of arrays nothing is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mpidist.errors import CheckpointError
from mpidist.options import ARRAY_CHAIN, settings
from mpidist.training.temporary_files import temporary

FILE = ".job"


class ArrayTask(NamedTuple):
    """A task of a job array."""

    scheduler: str
    name: str  # of the job
    array: str
    task: str

    def __str__(self) -> str:
        return f"task {self.task} of {self.scheduler}'s job array {self.array} ({self.name})"


class _Variables(NamedTuple):
    """The variables of a scheduler, in the order of `ArrayTask`."""

    scheduler: str
    name: str
    array: str
    task: str
    cure: str  # how a job script names a directory for each task


_SCHEDULERS = (
    _Variables(
        "Slurm",
        "SLURM_JOB_NAME",
        "SLURM_ARRAY_JOB_ID",
        "SLURM_ARRAY_TASK_ID",
        "$SLURM_ARRAY_TASK_ID (in lines of #SBATCH: %a)",
    ),
    _Variables("PBS", "PBS_JOBNAME", "PBS_ARRAY_ID", "PBS_ARRAY_INDEX", "$PBS_ARRAY_INDEX"),
    _Variables("LSF", "LSB_JOBNAME", "LSB_JOBID", "LSB_JOBINDEX", "$LSB_JOBINDEX"),
    _Variables("Grid Engine", "JOB_NAME", "JOB_ID", "SGE_TASK_ID", "$SGE_TASK_ID"),
)

#: What the variable of the task has in a job that is no array, where it is set all the same.
_NO_TASK = ("0", "undefined")


def own_task(environ: Mapping[str, str] | None = None) -> ArrayTask | None:
    """Return the task that this process belongs to; None outside of job arrays."""
    environ = os.environ if environ is None else environ
    for variables in _SCHEDULERS:
        if variables.array in environ and variables.task in environ:
            task = environ[variables.task]
            if variables.scheduler != "Slurm" and task in _NO_TASK:
                continue
            return ArrayTask(variables.scheduler, environ.get(variables.name, ""), environ[variables.array], task)
    return None


def check_task(directory: Path) -> None:
    """Raise CheckpointError if a directory has the checkpoints of another task of this process's array."""
    own, writer = own_task(), _read(directory / FILE)
    if own is None or writer is None or own.task == writer.task or own[:3:2] != writer[:3:2]:
        return
    if settings().array_chain or not any(directory.glob("*-*.h5")):
        return
    cure = next(variables.cure for variables in _SCHEDULERS if variables.scheduler == own.scheduler)
    raise CheckpointError(
        f"the checkpoints in {directory} are those of {writer}, and this is task {own.task} of it: give each task a "
        f"directory of its own, with {cure} in its name. Where each task is to go on with the training of the one "
        f"before, set {ARRAY_CHAIN}=1"
    )


def note_task(directory: Path) -> None:
    """Note in a directory that this process's task writes checkpoints there; outside of job arrays, nothing."""
    own = own_task()
    if own is not None:
        written = temporary(directory / FILE)
        written.write_text(json.dumps(own._asdict()))
        written.replace(directory / FILE)


def forget_task(directory: Path) -> None:
    """Remove the note from a directory that has no checkpoints."""
    if not any(directory.glob("*-*.h5")):
        with suppress(OSError):
            (directory / FILE).unlink()


def _read(file: Path) -> ArrayTask | None:
    """Return the task that is noted in a file; None if there is none, or it is damaged."""
    try:
        return ArrayTask(**{name: str(value) for name, value in json.loads(file.read_text()).items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
