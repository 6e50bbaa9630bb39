"""``mpidist job status|logs|cancel``, and submission: what is done with jobs by the scheduler's own programs."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from mpidist.cluster.programs import answer
from mpidist.commands.parser import Parser
from mpidist.commands.quantities import table
from mpidist.jobs.request import Request
from mpidist.jobs.schedulers import SCHEDULERS
from mpidist.jobs.submitted import SubmittedJob, find_job, record_file, remember, submitted_jobs

#: Seconds that a scheduler has to answer.
_PATIENCE = 60.0
#: Seconds between two looks at the output of a job, and at its state.
_OUTPUT_PAUSE, _STATE_PAUSE = 0.5, 5.0
#: Jobs that ``status`` shows without a number.
_SHOWN = 10
#: The state of a job that the scheduler knows no longer.
_ENDED = "ended"


def submit(request: Request, script: str) -> tuple[SubmittedJob, bool]:
    """Submit a script, and return the job, and whether there is a record of it.

    ValueError where the scheduler does not take it.
    """
    scheduler = SCHEDULERS[request.scheduler]
    text = Path(script).read_text("utf-8") if scheduler.reads_script else None
    words = [*scheduler.submit, *([] if scheduler.reads_script else [script])]
    number = scheduler.read_job_id(_ask(words, text))
    pattern = scheduler.array_output if request.array is not None else scheduler.output
    digits = re.match(r"\d*", number)
    output = pattern.format(name=request.name, job=number, number=digits[0] if digits else "")
    here = os.getcwd()
    job = SubmittedJob(number, request.scheduler, request.name, os.path.abspath(script), here, output, time.time())
    path = record_file(os.environ)
    try:
        remember(job, path)
    except OSError as error:  # it is submitted all the same, and nobody is to do it again
        lost = f"mpidist job cannot look after job {number}: end it by {' '.join([*scheduler.cancel, number])}"
        print(f"mpidist job: warning: {path} cannot be written ({error.strerror}): {lost}", file=sys.stderr)
        return job, False
    return job, True


def _ask(words: Sequence[str], text: str | None = None) -> str:
    """Return what a scheduler's program prints; ValueError with its errors where it fails."""
    if shutil.which(words[0], os.F_OK) is None:
        raise ValueError(f"there is no program {words[0]!r} here; submit where the scheduler's programs are")
    printed, faults = answer(words, _PATIENCE, text)
    if faults:
        raise ValueError(f"{words[0]}: " + "\n".join(faults))
    return printed


def state_of(job: SubmittedJob) -> tuple[str, str]:
    """Return the state of a job and what the scheduler says besides; ``ended`` where it knows the job no longer."""
    scheduler = SCHEDULERS[job.scheduler]
    try:
        printed = _ask([*scheduler.status, job.job])
    except ValueError as error:
        if re.search(scheduler.unknown_job, str(error)):
            return _ENDED, ""
        raise
    matches = re.findall(scheduler.state, printed, re.MULTILINE)
    if not matches:
        return _ENDED, ""
    states = dict.fromkeys(state.lower() for state, _ in matches)
    return ", ".join(states), " ".join(dict.fromkeys(rest.strip() for _, rest in matches if rest.strip()))


def is_ended(job: SubmittedJob, state: str) -> bool:
    """Return whether no part of a job waits or runs, by what `state_of` says."""
    waits_or_runs = SCHEDULERS[job.scheduler].alive
    states = state.split(", ")
    return states == [_ENDED] or not any(re.fullmatch(waits_or_runs, each) for each in states)


def status(argv: Sequence[str]) -> int:
    """``mpidist job status``: print jobs and their states; Local."""
    parser = _parser("status", "Print the states of jobs that `mpidist job ... --submit` has submitted.")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    asked = parser.parse_args(argv)
    path = record_file(os.environ)
    jobs = submitted_jobs(path)[-_SHOWN:] if asked.number is None else [find_job(path, asked.number)]
    rows = [(job, *_state_or_reason(job)) for job in jobs]
    if asked.json:
        print(json.dumps([{**asdict(job), "state": state, "detail": detail} for job, state, detail in rows], indent=2))
    elif rows:
        cells = [(job.job, job.name, state, detail, job.output) for job, state, detail in rows]
        print(table([("job", "name", "state", "", "output"), *cells], left=range(5)))
    else:
        print("no jobs: `mpidist job SCHEDULER ... --submit` has submitted none")
    return 0


def _state_or_reason(job: SubmittedJob) -> tuple[str, str]:
    """Return state and detail; a scheduler that cannot be asked is the detail of an unknown state."""
    try:
        return state_of(job)
    except ValueError as error:
        return "unknown", str(error).splitlines()[0]


def logs(argv: Sequence[str]) -> int:
    """``mpidist job logs``: print the output of a job; Local."""
    parser = _parser("logs", "Print the output of a job, by default of the last one.")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")
    asked = parser.parse_args(argv)
    job = find_job(record_file(os.environ), asked.number)
    shown, read = os.path.join(job.folder, job.output), dict[str, int]()
    pattern = os.path.join(glob.escape(job.folder), job.output)
    ended, looked, seen, told = not asked.follow, time.monotonic(), 0, ""
    while True:
        _print_new(pattern, read)
        if ended:
            break
        time.sleep(_OUTPUT_PAUSE)
        if time.monotonic() - looked >= _STATE_PAUSE:
            state, detail = state_of(job)
            ended, silent = is_ended(job, state), sum(read.values()) == seen
            if state != told and (ended or silent):  # output speaks for itself
                print(f"mpidist job: job {job.job} is {state}" + f": {detail}" * bool(detail), file=sys.stderr)
                told = state
            looked, seen = time.monotonic(), sum(read.values())
    if not read:
        print(f"mpidist job: there is no {shown} yet; mpidist job status {job.job} says why", file=sys.stderr)
    return 0 if read else 1


def _print_new(pattern: str, read: dict[str, int]) -> None:
    """Print what was added to the files; `read` has how many bytes of each were printed before."""
    files = sorted(glob.glob(pattern))
    for path in files:
        with open(path, "rb") as file:
            file.seek(read.get(path, 0))
            added = file.read()
        if added and len(files) > 1:
            print(f"==> {os.path.basename(path)} <==", flush=True)
        sys.stdout.buffer.write(added)  # as it is: its end may be the first half of a letter
        read[path] = read.get(path, 0) + len(added)
    sys.stdout.flush()


def cancel(argv: Sequence[str]) -> int:
    """``mpidist job cancel``: end a job; Local."""
    asked = _parser("cancel", "End a job, by default the last one that was submitted.").parse_args(argv)
    job = find_job(record_file(os.environ), asked.number)
    words = [*SCHEDULERS[job.scheduler].cancel, job.job]
    _ask(words)
    print(f"mpidist job: {' '.join(words)} ({job.name})")
    return 0


def _parser(verb: str, what: str) -> Parser:
    parser = Parser(f"job {verb}", what, f"examples:\n  mpidist job {verb}\n  mpidist job {verb} 4711\n")
    parser.add_argument("number", nargs="?", metavar="JOB", help="the scheduler's number of it")
    return parser


#: What is done with jobs that were submitted.
VERBS: dict[str, Callable[[Sequence[str]], int]] = {"status": status, "logs": logs, "cancel": cancel}
