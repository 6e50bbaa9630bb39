"""What variables and optimizer slots take of a node's memory: one copy for all ranks, against a copy on each.

    python benchmarks/central_memory.py --save benchmarks/results

Starts jobs of 1, 2 and 4 ranks under CentralStorageStrategy and under MirroredStrategy, with models of several sizes.
What is counted is the proportional set size (Linux: Pss in ``/proc/self/smaps_rollup``): a page that k processes map
counts a k-th for each, so that the sum over the ranks is what the job takes of the node.  It is read before there are
variables, and after some steps of Adam (two slots: three arrays of the model's size in all), without the gradients,
which are each rank's own.  Two models: *dense*, one matrix with a gradient for all of it, and *rows*, an embedding
table with a gradient for some of its rows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy

import mpidist
from mpidist.commands.machine import machine

MIB = 1 << 20
SIZES_MIB = (16, 64, 256)
RANKS = (1, 2, 4)
STRATEGIES = ("CentralStorageStrategy", "MirroredStrategy")
COLUMNS, ROWS_OF_A_STEP, STEPS = 256, 512, 4

#: Arrays that are freed go back to the system at once (glibc), so that they are not counted.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}

Row = dict[str, Any]


def main() -> None:
    """Measure everything, print the table, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="DIR", help="write central_memory.json there")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_MIB, metavar="MIB", help="of the models")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--measure", nargs=3, metavar=("STRATEGY", "MODEL", "MIB"), help="what each started job does")
    options = parser.parse_args()
    if options.measure:
        strategy, model, mib = options.measure
        measure(getattr(mpidist, strategy)(), strategy, model, int(mib))
        return
    rows = []
    for model in ("dense", "rows"):
        print(f"{'model':>6} {'strategy':>23} {'MiB':>5} {'ranks':>6} {'more memory (MiB)':>18} {'of 3 models':>12}")
        for mib in options.sizes:
            for strategy in STRATEGIES:
                for ranks in options.ranks:
                    rows.append(run(ranks, strategy, model, mib))
                    print(line(rows[-1]))
    if options.save:
        save(options.save, rows)


def run(ranks: int, strategy: str, model: str, mib: int) -> Row:
    """Return what a job of its own has measured."""
    command = [sys.executable, "-m", "mpidist", "run", "--quiet", "-n", str(ranks), __file__]
    command += ["--measure", strategy, model, str(mib)]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **GIVE_BACK})
    return json.loads(found.stdout.strip().splitlines()[-1])


def line(row: Row) -> str:
    """Return a row of the table."""
    more = row["after_bytes"] - row["before_bytes"]
    share = more / (3 * row["mib"] * MIB)
    return (
        f"{row['model']:>6} {row['strategy']:>23} {row['mib']:>5} {row['ranks']:>6} {more / MIB:>18.1f} {share:>12.2f}"
    )


def measure(strategy: Any, name: str, model: str, mib: int) -> None:
    """Print, on the chief, the bytes before and after training.  Collective."""
    rows = mib * MIB // 4 // COLUMNS
    train(strategy, model, 2)  # a small one: what any first step needs is there
    before = node_bytes(strategy)
    kept = train(strategy, model, rows)
    after = node_bytes(strategy)
    del kept
    if strategy.extended.replica_id == 0:
        facts = {"strategy": name, "model": model, "mib": mib, "ranks": strategy.num_replicas_in_sync}
        print(json.dumps({**facts, "before_bytes": before, "after_bytes": after}))


def train(strategy: Any, model: str, rows: int) -> Any:
    """Train a model of so many rows for some steps; return what a training keeps.  Collective."""
    with strategy.scope():
        variable = mpidist.Variable(numpy.zeros((rows, COLUMNS), "float32"), name="table")
        optimizer = mpidist.optimizers.Adam(0.01)
    random = numpy.random.default_rng(strategy.extended.replica_id)
    for _ in range(STEPS):
        strategy.run(optimizer.apply_gradients, args=([(gradient(model, rows, random), variable)],))
    assert numpy.isfinite(variable.value).all()  # which reads all of it on each rank
    return variable, optimizer


def gradient(model: str, rows: int, random: Any) -> Any:
    """Return a gradient, of all rows or of some."""
    if model == "dense":
        return numpy.ones((rows, COLUMNS), "float32")
    values = numpy.ones((ROWS_OF_A_STEP, COLUMNS), "float32")
    return mpidist.IndexedSlices(values, random.integers(0, rows, ROWS_OF_A_STEP))


def node_bytes(strategy: Any) -> int:
    """Return the proportional set sizes of all ranks together.  Collective."""
    strategy.reduce("sum", 0.0, axis=None)
    text = Path("/proc/self/smaps_rollup").read_text()
    kib = re.search(r"^Pss: +(\d+) kB$", text, re.MULTILINE)
    assert kib is not None
    return int(strategy.reduce("sum", float(kib[1]), axis=None)) * 1024


def save(folder: Path, rows: list[Row]) -> None:
    """Write the rows, with what they were measured on."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"machine": machine(), "rows": rows}
    (folder / "central_memory.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
