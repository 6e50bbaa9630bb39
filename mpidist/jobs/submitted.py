"""The jobs that were submitted: a file of the user with a line of JSON for each."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class SubmittedJob:
    """A job, where it was submitted, and where its output goes.

    Attributes
    ----------
    job : str
        The scheduler's number of it.
    scheduler, name, script : str
        The script's path is absolute.
    folder : str
        The folder in which it was submitted.
    output : str
        The file of its output; of an array, a pattern.
    submitted : float
        Seconds since 1970.
    """

    job: str
    scheduler: str
    name: str
    script: str
    folder: str
    output: str
    submitted: float


def record_file(environ: Mapping[str, str]) -> Path:
    """Return the file of the user's jobs."""
    state = Path(environ.get("XDG_STATE_HOME") or Path(environ.get("HOME", "/"), ".local", "state"))
    return state / "mpidist" / "jobs.jsonl"


def remember(job: SubmittedJob, path: Path) -> None:
    """Add a job to the file, in one write: jobs that are submitted side by side keep their lines whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(asdict(job)) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def submitted_jobs(path: Path) -> list[SubmittedJob]:
    """Return all jobs of the file, the newest last; a line that is no job is left out."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    found = [_read(line) for line in lines]
    return [job for job in found if job is not None]


def find_job(path: Path, number: str | None) -> SubmittedJob:
    """Return the job of that number, or the last one; ValueError lists those that there are."""
    jobs = submitted_jobs(path)
    if not jobs:
        raise ValueError(f"no job was submitted yet by `mpidist job ... --submit` ({path})")
    for job in reversed(jobs):
        if number in (None, job.job):
            return job
    known = ", ".join(job.job for job in jobs[-10:])
    raise ValueError(f"job {number} was not submitted by `mpidist job`; expected one of {known}")


def _read(line: str) -> SubmittedJob | None:
    try:
        return SubmittedJob(**json.loads(line))
    except (ValueError, TypeError):
        return None
