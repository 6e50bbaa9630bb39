"""The job of the case ``ps`` in bare messages of mpi4py: the same roles, and the same steps.

Rank 0 is the chief: it gives workers numbers of steps to make, and gets a message back for each batch of them.  Ranks 1
and 2 are workers.  A step asks rank 3, the server, for the variable, gets it, computes a gradient, and sends that; the
server applies it.  Buffers are made once, and nothing is pickled.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from benchmarks.suite.ps_work import RATE, SLOPE, WORKS, Work, timed
from benchmarks.suite.update_rules import RULES

CHIEF, SERVER, RANKS = 0, 3, 4
WORKERS = (1, 2)
_PULL, _PUSH, _WORK, _DONE = range(4)

#: Steps that a worker is given at a time, and how many times ahead.
_BATCH, _AHEAD = 64, 2


def main() -> None:
    """Measure; the chief writes what it has found to a file.  Collective."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), required=True)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--save", type=Path, required=True)
    options = parser.parse_args()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if comm.size != RANKS:
        raise SystemExit(f"{RANKS} ranks are needed, got {comm.size}")
    found: dict[str, Any] = {
        "seconds": {title: [] for title in options.works},
        "wrong": dict.fromkeys(options.works, 0),
    }
    for _ in range(options.turns):
        for title in options.works:
            elements = sum(WORKS[title].elements)
            if comm.rank == SERVER:
                serve(comm, MPI, elements, updating(WORKS[title]))
            elif comm.rank in WORKERS:
                work(comm, MPI, elements)
            else:
                took, _ = timed(giving(comm, MPI), options.seconds)
                found["seconds"][title].append(took)
                end(comm)
            comm.Barrier()
    if comm.rank == CHIEF:
        options.save.write_text(json.dumps(found))


def giving(comm: Any, mpi: Any) -> Callable[[int], None]:
    """Return the chief's part: what has the workers make so many steps.  Local."""

    def run(steps: int) -> None:
        left, underway, status, count = steps, 0, mpi.Status(), numpy.zeros(1, numpy.int64)
        waiting = [worker for _ in range(_AHEAD) for worker in WORKERS]
        while left or underway:
            while left and waiting:
                count[0] = min(left, _BATCH)
                comm.Send(count, waiting.pop(0), _WORK)
                left, underway = left - int(count[0]), underway + 1
            comm.Recv(count, mpi.ANY_SOURCE, _DONE, status)
            waiting.append(status.source)
            underway -= 1

    return run


def end(comm: Any) -> None:
    """Tell the workers that there is no more work.  Local."""
    for worker in WORKERS:
        comm.Send(numpy.zeros(1, numpy.int64), worker, _WORK)


def work(comm: Any, mpi: Any, elements: int) -> None:
    """Be a worker, until the chief has no more work.  Local."""
    count, nothing = numpy.zeros(1, numpy.int64), numpy.empty(0, "float32")
    variable, gradient = (numpy.empty(elements, "float32") for _ in range(2))
    while True:
        comm.Recv(count, CHIEF, _WORK)
        for _ in range(int(count[0])):
            comm.Send(nothing, SERVER, _PULL)
            comm.Recv(variable, SERVER, _PULL)
            numpy.multiply(variable, SLOPE, out=gradient)
            comm.Send(gradient, SERVER, _PUSH)
        if not count[0]:
            comm.Send(nothing, SERVER, _DONE)
            return
        comm.Send(count, CHIEF, _DONE)


def updating(work: Work) -> Callable[[Any, Any], None]:
    """Return the update of a variable by a gradient, which may be overwritten.  Local."""
    if work.rule == "plain":

        def update(variable: Any, gradient: Any) -> None:
            numpy.multiply(gradient, RATE, out=gradient)
            numpy.subtract(variable, gradient, out=variable)

        return update
    rule, elements, count = RULES[work.rule], sum(work.elements), itertools.count(1)
    slots, scratch = ([numpy.zeros(elements, "float32") for _ in range(each)] for each in (rule.slots, rule.scratch))
    return lambda variable, gradient: rule.block(variable, gradient, slots, scratch, next(count))


def serve(comm: Any, mpi: Any, elements: int, update: Callable[[Any, Any], None]) -> None:
    """Be the server, until all workers have ended.  Local."""
    variable, gradient = numpy.ones(elements, "float32"), numpy.empty(elements, "float32")
    status, left = mpi.Status(), len(WORKERS)
    while left:
        comm.Recv(gradient, mpi.ANY_SOURCE, mpi.ANY_TAG, status)
        if status.tag == _PULL:
            comm.Send(variable, status.source, _PULL)
        elif status.tag == _PUSH:
            update(variable, gradient)
        else:
            left -= 1


if __name__ == "__main__":
    main()
