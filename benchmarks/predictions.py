"""How far predictions are off, and how far the machine is off from itself: both in one launch.

    mpidist run -n 2 benchmarks/predictions.py
    mpidist run -n 2 benchmarks/predictions.py --save benchmarks/results    # adds to .../predictions-2.json

What ``mpidist simulate --measure`` does is done twice, one after the other: rounds are calibrated, schedules predicted
and measured.  Told is how many of the times were predicted to 15 %, each time, and how many of the schedules took the
second time what they took the first time, to 15 %.  No prediction can hold better than the machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mpidist.collectives.communicator import Communicator
from mpidist.commands.machine import machine
from mpidist.commands.simulate_measure import TARGET, Comparison, compared
from mpidist.world import world_communicator


def main() -> None:
    """Measure twice; rank 0 prints a line.  Collective."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="FOLDER", help="add the launch to the results there")
    folder = parser.parse_args().save
    communicator = world_communicator()
    turns = [compared(communicator)[1] for _ in range(2)]
    if communicator.rank == 0:
        launch = summary(*turns)
        print("predicted {predicted} of {count} to 15 %, measured again {again}".format(**launch))
        if folder:
            save(Path(folder), communicator, launch)


def summary(first: list[Comparison], second: list[Comparison]) -> dict[str, Any]:
    """Return how many predictions held, each time, and how many times of the first turn did in the second."""
    pairs = list(zip(first, second, strict=True))
    return {
        "count": len(first),
        "predicted": [sum(abs(each.deviation) <= TARGET for each in turn) for turn in (first, second)],
        "again": sum(abs(after.measured / before.measured - 1) <= TARGET for before, after in pairs),
        "seconds": [
            [before.algorithm, before.bytes, before.predicted, before.measured, after.predicted, after.measured]
            for before, after in pairs
        ],
    }


def save(folder: Path, communicator: Communicator, launch: dict[str, Any]) -> None:
    """Add a launch to the file of results for so many ranks, or begin one."""
    path = folder / f"predictions-{communicator.size}.json"
    command = ["run", "-n", str(communicator.size), "benchmarks/predictions.py", "--save", "benchmarks/results"]
    found = json.loads(path.read_text()) if path.exists() else {"command": command, "target": TARGET, "launches": []}
    found["launches"].append({"machine": {"mpi": communicator.transport.library, **machine()}, **launch})
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
