"""What bash, shellcheck and the scheduler say about a script that is not submitted yet."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from mpidist.jobs.schedulers import Scheduler

#: Seconds after which a scheduler that does not answer is left alone.
_PATIENCE = 20.0


def find_problems(scheduler: Scheduler, text: str) -> list[str]:
    """Return what is wrong with a script, each in one line; programs that are not here find nothing."""
    problems = [_problem(("bash", "-n", "/dev/stdin"), text), _problem(("shellcheck", "-"), text)]
    if scheduler.check:
        problems.append(_problem(scheduler.check, text))
    return [problem for problem in problems if problem]


def _problem(command: Sequence[str], text: str) -> str:
    """Return what a program says about the script in its standard input; empty where it finds no fault."""
    if shutil.which(command[0]) is None:
        return ""
    shown = " ".join(word for word in command if word not in ("-", "/dev/stdin"))
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return f"{shown} did not answer within {_PATIENCE:g} s"
    if done.returncode == 0:
        return ""
    lines = (done.stderr + done.stdout).strip().splitlines() or [f"status {done.returncode}"]
    return f"{shown}: {'; '.join(line.strip() for line in lines[-3:] if line.strip())}"
