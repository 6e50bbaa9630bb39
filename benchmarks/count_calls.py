"""The functions that a short gradient passes, from ``strategy.run`` to the status board and back.

    mpidist run -n 2 benchmarks/count_calls.py --json calls.json

Two lists are reduced by ``all_reduce`` of the replica context inside ``strategy.run``: one array of 4 B, and 161 short
arrays.  After the warm-up, ``sys.setprofile`` counts every call of a Python function: comprehensions and functions that
C calls back are counted too.  A rank that waits looks at the board again and again, so the step with the fewest calls
of all steps and ranks counts.  Only public names of mpidist are used, so the script runs on older checkouts too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy

import mpidist

#: Title -> elements of each array.
LISTS = {"1 array of 4 B": [1], "161 arrays of 4 to 64 B": [1 + number % 16 for number in range(161)]}

#: Steps before any is counted, and steps that are counted.
WARM_UPS, STEPS = 60, 100

#: Where the status board is used: functions of its own file, and one that reads and writes its words itself.
BOARD = ("runtime/board.py:", "runtime/control.py:meet")


@dataclass
class Count:
    """The calls of one step.

    Attributes
    ----------
    calls, depth : int
        Calls of Python functions, and the most that were open at once; those of the script are not counted.
    functions, files : int
        Different ones among them.
    c_calls : int
        Calls of functions in C.
    board_depth : int
        How many were open when the first function of the board was called; 0 where none was.
    names : list of str
        File and function of each call, in order; files are relative to mpidist's folder, or to that of other packages.
    """

    calls: int = 0
    depth: int = 0
    functions: int = 0
    files: int = 0
    c_calls: int = 0
    board_depth: int = 0
    names: list[str] = field(default_factory=list)


def counted(run: Callable[[], Any]) -> Count:
    """Return the calls that `run` makes.  Local."""
    found, open_now, package = Count(), 0, str(Path(mpidist.__file__).parent)

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal open_now
        if event == "c_call":
            found.c_calls += argument is not sys.setprofile
        elif frame.f_code.co_filename == __file__:
            return
        elif event == "return":
            open_now -= 1
        elif event == "call":
            open_now += 1
            found.depth = max(found.depth, open_now)
            name = frame.f_code.co_filename.removeprefix(package + "/").rpartition("site-packages/")[2]
            found.names.append(f"{name}:{frame.f_code.co_name}")
            if found.names[-1].startswith(BOARD) and not found.board_depth:
                found.board_depth = open_now

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    found.calls, found.functions = len(found.names), len(set(found.names))
    found.files = len({name.partition(":")[0] for name in found.names})
    return found


def fewest(strategy: Any, elements: list[int]) -> Count:
    """Return the count of the step with the fewest calls on this rank.  Collective."""
    best, kept = None, None  # a result is kept until the next is there, as in a training step
    for step in range(WARM_UPS + STEPS):
        gradients = [numpy.full(each, step, "float32") for each in elements]

        def reduce(own: Any = gradients) -> Any:
            return mpidist.get_replica_context().all_reduce("SUM", own)

        if step < WARM_UPS:
            kept = strategy.run(reduce)
            continue
        results: list[Any] = []
        found = counted(lambda: results.append(strategy.run(reduce)))  # noqa: B023 - called at once
        kept = results
        best = found if best is None or found.calls < best.calls else best
    assert best is not None and kept
    return best


def main() -> None:
    """Count; rank 0 prints.  Collective."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--names", action="store_true", help="print every call")
    options = parser.parse_args()
    strategy = mpidist.MultiWorkerMirroredStrategy()
    from mpi4py import MPI

    comm, found = MPI.COMM_WORLD, {}
    for title, elements in LISTS.items():
        by_rank = comm.allgather(fewest(strategy, elements))
        found[title] = min(by_rank, key=lambda each: each.calls)
    if comm.rank == 0:
        for title, count in found.items():
            python = f"{count.calls} calls of {count.functions} functions in {count.files} files, {count.depth} deep"
            print(f"{title}: {python}; {count.board_depth} deep at the board; {count.c_calls} calls of C")
            if options.names:
                print("\n".join(f"  {times:>4}  {name}" for name, times in Counter(count.names).items()))
        if options.json is not None:
            lists = {title: asdict(count) for title, count in found.items()}
            text = {"ranks": comm.size, "python": sys.version.split()[0], "lists": lists}
            options.json.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
