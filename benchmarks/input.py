"""Input: rows a second through `Dataset.from_hdf5` against the same file read with plain h5py, and what a step costs.

    python benchmarks/input.py                        # the tables, alone
    python benchmarks/input.py --save results         # and as results/input.json

Files: 28 x 28 bytes a row (small images), and 64 x 64 x 3 float32 a row; contiguous, in chunks, in compressed chunks;
in a temporary folder, so that the page cache serves both sides.  Contenders read the whole file once, in batches, in
turn, 2 x ROUNDS times in all; who is first changes from round to round.  Ratios are medians over the rounds.

- plain: ``file["x"][i:i + n]`` in a loop
- batch: ``for part in DistributedDataset(Dataset.from_hdf5(path, ("x", "y")).batch(n), 0, 1)``
- prefetch: the same with ``.prefetch(2)``
- shuffled: the same rows in a random order, once, against plain h5py's ``file["x"][sorted rows]`` (its selection by a
  list); not of compressed chunks, which are read again for every batch either way
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy

from mpidist.commands.machine import machine
from mpidist.input import Dataset, DistributedDataset

ROUNDS = 3

#: Rows, shape and dtype of a row, rows of a batch.
SHAPES = {
    "28x28 uint8": (120_000, (28, 28), "uint8", 512),
    "64x64x3 float32": (2_000, (64, 64, 3), "float32", 64),
}

#: How the rows lie in the file.
LAYOUTS: dict[str, Callable[[tuple[int, ...]], dict[str, Any]]] = {
    "contiguous": lambda shape: {},
    "chunks": lambda shape: {"chunks": (100, *shape)},
    "gzip": lambda shape: {"chunks": (100, *shape), "compression": "gzip", "compression_opts": 1},
}

Row = dict[str, Any]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the rows as JSON")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    rows: list[Row] = []
    print(f"{'rows':>18} {'layout':>12} {'contender':>14} {'rows/s':>12} {'GB/s':>7} {'of plain':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for shape_name in SHAPES:
            for layout in LAYOUTS:
                rows += measure(Path(folder), shape_name, layout, options.rounds)
    rows.append(step_cost())
    if options.save:
        facts = {"h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version, **machine()}
        options.save.mkdir(parents=True, exist_ok=True)
        (options.save / "input.json").write_text(json.dumps({**facts, "rows": rows}, indent=1))


def measure(folder: Path, shape_name: str, layout: str, rounds: int) -> list[Row]:
    """Print and return one row for every contender on one file."""
    count, shape, dtype, batch = SHAPES[shape_name]
    path = write(folder / "rows.h5", count, shape, dtype, LAYOUTS[layout](shape))
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for number in range(2 * rounds):
        names = list(CONTENDERS)
        for name in names if number % 2 else reversed(names):
            if not name.startswith("shuffled") or (number < SHUFFLED_ROUNDS and layout != "gzip"):
                seconds[name].append(timed(CONTENDERS[name], path, batch, count))
    found = []
    for name, times in seconds.items():
        if not times:
            continue
        base = seconds["shuffled h5py" if name.startswith("shuffled") else "plain"]
        ratio = statistics.median(first / second for first, second in zip(base, times, strict=True))
        median = statistics.median(times)
        row_bytes = int(numpy.prod(shape)) * numpy.dtype(dtype).itemsize + 8
        row = {"rows": shape_name, "layout": layout, "contender": name, "rows_per_second": count / median}
        row |= {"gigabytes_per_second": row_bytes * count / median / 1e9, "of_plain": ratio}
        found.append(row)
        print(
            f"{shape_name:>18} {layout:>12} {name:>14} {row['rows_per_second']:>12,.0f} "
            f"{row['gigabytes_per_second']:>7.2f} {ratio:>9.0%}",
            flush=True,
        )
    return found


def write(path: Path, count: int, shape: tuple[int, ...], dtype: str, layout: dict[str, Any]) -> Path:
    """Write rows that can be compressed a little."""
    random = numpy.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=random.integers(0, 32, (count, *shape)).astype(dtype), **layout)
        file.create_dataset("y", data=numpy.arange(count))
    return path


def timed(contender: Callable[[Path, int], int], path: Path, batch: int, count: int) -> float:
    """Return the seconds that reading the file takes, labels summed to prove that all rows came."""
    began = time.perf_counter()
    total = contender(path, batch)
    seconds = time.perf_counter() - began
    assert total == count * (count - 1) // 2, (contender, total)
    return seconds


def plain(path: Path, batch: int) -> int:
    """Read with h5py alone, row after row."""
    total = 0
    with h5py.File(path, "r") as file:
        x, y = file["x"], file["y"]
        for first in range(0, len(x), batch):
            _images, labels = x[first : first + batch], y[first : first + batch]  # held, as a training loop does
            total += int(labels.sum())
    return total


def shuffled_plain(path: Path, batch: int) -> int:
    """Read with h5py alone, in a random order: ascending within a batch, which h5py demands."""
    total = 0
    with h5py.File(path, "r") as file:
        x, y = file["x"], file["y"]
        order = numpy.random.default_rng(0).permutation(len(x))
        for first in range(0, len(x), batch):
            rows = numpy.sort(order[first : first + batch])
            _images, labels = x[rows], y[rows]
            total += int(labels.sum())
    return total


def through(chain: Callable[[Dataset, int], Dataset]) -> Callable[[Path, int], int]:
    """Return the contender that reads through a data set."""

    def contender(path: Path, batch: int) -> int:
        parts = DistributedDataset(chain(Dataset.from_hdf5(path, ("x", "y")), batch), 0, 1)
        return sum(int(y.sum()) for _, y in parts)

    return contender


CONTENDERS: dict[str, Callable[[Path, int], int]] = {
    "plain": plain,
    "batch": through(lambda dataset, batch: dataset.batch(batch)),
    "prefetch": through(lambda dataset, batch: dataset.batch(batch).prefetch(2)),
    "shuffled h5py": shuffled_plain,
    "shuffled": through(lambda dataset, batch: dataset.shuffle(seed=0).batch(batch)),
}

#: Random orders are slow to read, and their ratio is plain after a few rounds.
SHUFFLED_ROUNDS = 1


def step_cost() -> Row:
    """Print and return what a step costs beside taking its rows: 32 shuffled rows of 784 float32 in memory."""
    x, y = numpy.zeros((60_000, 784), "float32"), numpy.arange(60_000)
    order = numpy.random.default_rng(0).permutation(60_000)
    parts = DistributedDataset(Dataset.from_arrays((x, y)).shuffle(seed=0).batch(64), 0, 2)

    def bare() -> None:
        for first in range(0, 60_000 - 32, 64):
            x[order[first : first + 32]], y[order[first : first + 32]]

    differences = []
    for _ in range(ROUNDS):
        times = []
        for run in (bare, lambda: [None for _ in parts]):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        differences.append((times[1] - times[0]) / len(parts) * 1e6)
    row = {"contender": "a step of shuffled arrays", "microseconds_over_bare": statistics.median(differences)}
    print(f"a step of arrays in memory, shuffled: {row['microseconds_over_bare']:.1f} us over taking its rows")
    return row


if __name__ == "__main__":
    main()
