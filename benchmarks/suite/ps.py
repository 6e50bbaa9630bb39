"""``ps``: steps that a coordinator schedules on parameter servers, against messages and TensorFlow.

Everybody is a job of its own, with a chief, two workers and a server: ranks that serve come back to no other work.  In
each round all jobs run, one after the other.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from benchmarks.suite import results
from benchmarks.suite.ps_work import ADAM, LARGE, MANY, MODEL, MOMENTUM, ONE, SAME, WORKS
from benchmarks.suite.results import Launch
from benchmarks.suite.rows import Row, row_of, table
from benchmarks.suite.targets import Target, report_of, time_of
from mpidist.commands.launch.probe import probe_mpi
from mpidist.commands.machine import machine
from mpidist.errors import LaunchError

WHAT = "steps scheduled on parameter servers"

#: Chief, two workers, one server.
_RANKS = 4
#: Rounds, where nothing is said; and how long a turn is.
_ROUNDS, _SECONDS = 3, 1.0
#: Turns of the works that are compared inside one job.
_TURNS = 3

OURS, MESSAGES, TENSORFLOW = "mpidist", "messages of MPI", "TensorFlow"
_TWO, _ALONE = "2 servers", "1 server"

TARGETS = (
    Target("ps", ONE, _RANKS, "TensorFlow / ours", time_of(TENSORFLOW, OURS), 100, False),
    Target("ps", MOMENTUM, _RANKS, "TensorFlow / ours", time_of(TENSORFLOW, OURS), 100, False),
    Target("ps", ADAM, _RANKS, "TensorFlow / ours", time_of(TENSORFLOW, OURS), 100, False),
    Target("ps", LARGE, _RANKS, "TensorFlow / ours", time_of(TENSORFLOW, OURS), 10, False),
    Target("ps", MANY, _RANKS, "against one variable", time_of(MANY, SAME), 2),
    Target("ps", MODEL, _RANKS, "two servers against one", time_of(_TWO, _ALONE), 1.0),
)

#: What the servers of a model hold may differ so much from even.
_UNEVEN = 0.05


@dataclass(frozen=True)
class Job:
    """One of those that take turns.

    Attributes
    ----------
    name : str
        In messages.
    arguments : tuple of str
        What is run: a module and its arguments; others are added.
    ranks : int
        0 for a program that starts its own processes.
    whos : dict
        Title of a work -> (work, who, kind) of the row that it goes into.
    turns : int
        Of each work in a round, alternating.
    """

    name: str
    arguments: tuple[str, ...]
    ranks: int
    whos: dict[str, tuple[str, str, str]]
    turns: int = 1

    def run(self, seconds: float) -> dict[str, Any]:
        """Return what the job has found.

        Raises
        ------
        LaunchError
            It failed, after it has said why.
        """
        start = ("-m", "mpidist", "run", "-n", str(self.ranks), "--quiet", "-m") if self.ranks else ("-m",)
        with tempfile.TemporaryDirectory(prefix="mpidist-bench-") as folder:
            path = Path(folder, "found.json")
            options = (
                "--works",
                *self.whos,
                "--seconds",
                str(seconds),
                "--turns",
                str(self.turns),
                "--save",
                str(path),
            )
            ended = subprocess.run(
                [sys.executable, *start, *self.arguments, *options], stderr=subprocess.PIPE, text=True
            )
            if not path.exists():
                print(ended.stderr, file=sys.stderr, flush=True)
                raise LaunchError(f"{self.name} ended with status {ended.returncode} before it had a result")
            return json.loads(path.read_text())


_SUITE, _PEERS = "benchmarks.suite.", "benchmarks.peers."


def jobs(with_peers: bool) -> tuple[list[Job], dict[str, str]]:
    """Return the jobs, and who cannot run, and why."""
    ours = _SUITE + "ps_job"
    steps = {title: (title, OURS, "ours") for title in _STEPS}
    lists = {MANY: (MANY, MANY, "ours"), SAME: (MANY, SAME, "reference")}
    found = [
        Job(OURS, (ours,), _RANKS, steps),
        Job(MESSAGES, (_PEERS + "ps_mpi",), _RANKS, _of(MESSAGES)),
        Job(f"{OURS}, {MANY}", (ours,), _RANKS, lists, turns=_TURNS),
        Job(_TWO, (ours, "--servers", "2"), _RANKS + 1, {MODEL: (MODEL, _TWO, "ours")}),
        Job(_ALONE, (ours, "--servers", "1"), _RANKS, {MODEL: (MODEL, _ALONE, "reference")}),
    ]
    if not with_peers:
        return found, {}
    if importlib.util.find_spec("tensorflow") is None:
        return found, {TENSORFLOW: "needs TensorFlow: pip install tensorflow-cpu"}
    return [*found, Job(TENSORFLOW, (_PEERS + "ps_tensorflow",), 0, _of(TENSORFLOW))], {}


def _of(peer: str) -> dict[str, tuple[str, str, str]]:
    return {title: (title, peer, "peer") for title in _STEPS}


#: Works that peers do too.
_STEPS = (ONE, MOMENTUM, ADAM, LARGE)

#: Work -> whom its ratios refer to.
_REFERENCES = {**dict.fromkeys(_STEPS, MESSAGES), MANY: SAME, MODEL: _ALONE}


@dataclass
class _Times:
    """What has been found so far: seconds of a step and lost updates, by (work, who, kind)."""

    seconds: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    wrong: dict[tuple[str, str, str], int] = field(default_factory=dict)
    server_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, job: Job, found: dict[str, Any]) -> None:
        """Take in what a job has found."""
        for title, who in job.whos.items():
            self.seconds.setdefault(who, []).extend(found["seconds"][title])
            self.wrong[who] = self.wrong.get(who, 0) + found["wrong"][title]
        if job.name == _TWO:
            self.server_bytes = found["server_bytes"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: this subcommand takes what all take."""


def start(options: argparse.Namespace) -> list[Launch]:
    """Run the jobs, print the table, and return what was found.  Local.

    Raises
    ------
    ValueError
        A number of ranks was asked for.
    LaunchError
        A job failed.
    """
    if options.size is not None:
        raise ValueError(f"ps starts jobs of {_RANKS} and {_RANKS + 1} ranks: leave -n out")
    found = []
    for number in range(options.launches):
        if options.launches > 1:
            print(f"# launch {number + 1} of {options.launches}", flush=True)
        found.append(_measured(options))
    print(f"\n{report_of(TARGETS, found)}", flush=True)
    return found


def _measured(options: argparse.Namespace) -> Launch:
    mpi = probe_mpi()
    library, cores = f"{mpi.vendor} {'.'.join(map(str, mpi.version))}", machine()["cores"]
    print(f"# ps: {library}, chief, 2 workers and 1 server on {cores} cores", flush=True)
    running, missing = jobs(options.peers)
    for who, why in missing.items():
        print(f"# without {who}: {why}", flush=True)
    times, count = _Times(), options.rounds or _ROUNDS
    for round_ in range(count):
        for place in range(len(running)):
            job = running[(round_ + place) % len(running)]
            times.add(job, job.run(options.seconds or _SECONDS))
    rows = rows_of(times)
    for work in results.works(rows):
        same = [row for row in rows if row.work == work]
        steps = ", ".join(f"{row.who} {1e6 / row.time_us:.0f}" for row in same)
        print(f"# {work}\n{table(same)}\n# steps per second: {steps}\n", flush=True)
    print(balance(times.server_bytes), flush=True)
    facts = {**machine(), "server_bytes": times.server_bytes}
    return Launch("ps", ["benchmarks", "ps"], _RANKS, library, "1 node", {}, rows, missing, facts)


def rows_of(times: _Times) -> list[Row]:
    """Return the rows of all works.  Local, pure."""
    medians = {key: float(numpy.median(values)) for key, values in times.seconds.items()}
    base = {work: medians[key] for work, who in _REFERENCES.items() for key in medians if key[:2] == (work, who)}
    return [_row(key, times.seconds[key], base[key[0]], times.wrong[key]) for key in sorted(medians, key=_place)]


def _place(key: tuple[str, str, str]) -> tuple[int, bool]:
    """Return where a row stands: by works, those with the lower half of the kinds first."""
    work, _, kind = key
    return list(_REFERENCES).index(work), kind != "ours"


def _row(key: tuple[str, str, str], seconds: Sequence[float], base: float, wrong: int) -> Row:
    work, who, kind = key
    return row_of(work, WORKS[work].nbytes, "float32", who, kind, seconds, (_REFERENCES[work], base), wrong=wrong)


def balance(server_bytes: dict[str, int]) -> str:
    """Return a line on what the servers hold.  Local, pure."""
    held = sorted(server_bytes.values())
    uneven = max(held) * len(held) / sum(held) - 1
    verdict = "reached" if uneven <= _UNEVEN else "missed"
    return f"# {MODEL} by bytes: servers hold {held} bytes, {uneven:.1%} above even (at most {_UNEVEN:.0%}: {verdict})"
