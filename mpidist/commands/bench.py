"""``mpidist bench``: mpidist's all-reduce on these ranks, against the ``Allreduce`` of the user's own MPI."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

import mpidist
from mpidist.cluster.launchers import detect_launcher
from mpidist.commands import run
from mpidist.commands.machine import machine
from mpidist.commands.parser import Parser
from mpidist.commands.quantities import count, nbytes, show_bytes, show_seconds
from mpidist.errors import LaunchError

#: Ranks, where nothing is said and no launcher has started this process.
_RANKS = 2

#: Sizes in bytes; the first is the latency.
_SIZES = [4, 1 << 10, 1 << 16, 1 << 20, 1 << 24]

#: Elements of the list of gradients: 160 arrays of 1 KiB to 4 MiB, as a model has them.
_LIST = [256 << number % 13 for number in range(160)]

#: Bytes that a turn moves, about, and the most calls it makes.
_TURN_BYTES, _MOST_CALLS = 1 << 22, 200

#: Calls before the first that is timed.
_WARM_UPS = 10

#: The upper quartile divided by the lower one from which on a row says more about the machine than about the contender.
_NOISY = 2

OURS = "mpidist"

_EXAMPLES = """examples:
  mpidist bench                          two ranks of this machine
  mpidist bench -n 4 --json bench.json
  mpirun -n 8 mpidist bench              by a launcher of your own; srun alike

The ratio is the time divided by that of the best Allreduce. A line below the table says so if the machine was noisy: if
in some row the upper quartile is more than twice the lower one. The exit status is 1 if a sum was wrong.
"""


@dataclass(frozen=True)
class Timing:
    """The time of one reduction, of one contender.

    `work` is ``"array"`` or ``"list"``, of `tensors` arrays that have `size` bytes together.  `seconds`, `low` and
    `high` are the median over the turns and the quartiles; `ratio` divides by the best of MPI.  `wrong` counts elements
    that were not the exact sum, on all ranks.
    """

    work: str
    tensors: int
    size: int
    who: str
    seconds: float
    low: float
    high: float
    ratio: float
    wrong: int


def parser() -> Parser:
    """Return the parser of ``mpidist bench``'s arguments."""
    what = "Measure all-reduces of arrays and of a list of gradients, by mpidist and by MPI's Allreduce."
    parser = Parser("bench", what, _EXAMPLES)
    add = parser.add_argument
    add("-n", dest="ranks", type=count, metavar="RANKS", help=f"start so many ranks ({_RANKS})")
    add("--sizes", nargs="*", type=_size, default=_SIZES, metavar="BYTES", help="of single arrays: 4 64KiB 16MiB")
    add("--no-list", action="store_true", help="leave the list of gradients out")
    add("--rounds", type=count, default=21, metavar="N", help="turns of each (21)")
    add("--json", type=_writable, metavar="FILE", help="write what was measured")
    return parser


def _size(text: str) -> int:
    """Return a size in bytes that holds a float32."""
    found = nbytes(text)
    if found < 4:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size of 4 bytes or more")
    return found


def _writable(text: str) -> Path:
    """Return where a result is to be written, if that is possible: before anything is measured."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written; name a file in a folder that there is")
    return path


def main(argv: Sequence[str]) -> int:
    """Measure where a launcher has started this process, and else start ranks; return the exit status.

    Collective under a launcher.
    """
    options = parser().parse_args(argv)
    if not options.sizes and options.no_list:
        parser().error("nothing is left to measure: give --sizes some, or leave --no-list out")
    if detect_launcher() is not None:
        if options.ranks is not None:
            parser().error("-n starts ranks, and this process is a rank already; leave it out")
        return _measured(options)
    words = [*map(str, ["--rounds", options.rounds, "--sizes", *options.sizes])]
    words += ["--no-list"] * options.no_list
    words += ["--json", str(options.json.resolve())] if options.json else []
    try:
        return run.main(run.words_for(options.ranks or _RANKS, "bench", *words))
    except LaunchError as error:
        print(f"mpidist bench: {error}", file=sys.stderr)
        return 1


def _measured(options: argparse.Namespace) -> int:
    """Measure as one of the ranks; rank 0 prints and writes.  Collective."""
    strategy = mpidist.MultiWorkerMirroredStrategy()  # first: it joins the ranks and names a wrong launch
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    vendor, version = MPI.get_vendor()
    title = f"{vendor} {'.'.join(map(str, version))}, {comm.size} ranks, {os.cpu_count()} cores"
    rows: list[Timing] = []
    if comm.rank == 0:
        print(f"# {title}\n{heading()}", flush=True)
    lists = [("array", [size // 4]) for size in options.sizes] + ([] if options.no_list else [("list", _LIST)])
    for work, elements in lists:
        found = Turns(comm, MPI, strategy, elements).rows(work, options.rounds)
        rows += found
        if comm.rank == 0:
            print("\n".join(map(line, found)), flush=True)
    if comm.rank == 0 and (told := noise(rows)):
        print(told, flush=True)
    if comm.rank == 0 and options.json is not None:
        found_rows = [asdict(row) for row in rows]
        text = {"format": "mpidist bench 2", "mpi": title, "ranks": comm.size, "machine": machine(), "rows": found_rows}
        options.json.write_text(json.dumps(text, indent=1) + "\n")
    wrong = [f"{row.who} on {show_bytes(row.size)}" for row in rows if row.wrong]
    if wrong and comm.rank == 0:
        print(f"mpidist bench: wrong elements: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


class Turns:
    """The contenders of one list of arrays, which take turns.  Making it is collective, and so is `rows`."""

    def __init__(self, comm: Any, mpi: Any, strategy: Any, elements: Sequence[int]) -> None:
        self._comm, self._mpi, self._strategy, self._elements = comm, mpi, strategy, elements
        self._out = [numpy.zeros(each, "float32") for each in elements]
        self._packed, self._reduced = (numpy.zeros(sum(elements), "float32") for _ in range(2))
        self._size = 4 * sum(elements)
        self._calls = max(1, min(_MOST_CALLS, _TURN_BYTES // self._size))
        self._step = 0
        self._kept: Any = None
        self._wrong: dict[str, int] = {}

    def rows(self, work: str, rounds: int) -> list[Timing]:
        """Return a row for each contender.  Collective."""
        contenders = self._contenders(work)
        for who, run_all in contenders.items():
            for _ in range(-(-_WARM_UPS // self._calls)):
                self._turn(who, run_all)
        seconds: dict[str, list[float]] = {who: [] for who in contenders}
        for round_ in range(rounds):
            names = list(contenders)
            for place in range(len(names)):
                who = names[(round_ + place) % len(names)]
                seconds[who].append(self._turn(who, contenders[who]))
        return self._rows(work, seconds)

    def _rows(self, work: str, seconds: dict[str, list[float]]) -> list[Timing]:
        quartiles = {who: [float(each) for each in numpy.percentile(own, [25, 50, 75])] for who, own in seconds.items()}
        best = min(median for who, (_, median, _) in quartiles.items() if who != OURS)
        count_of = len(self._elements)
        return [
            Timing(work, count_of, self._size, who, median, low, high, median / best, self._wrong[who])
            for who, (low, median, high) in quartiles.items()
        ]

    def _contenders(self, work: str) -> dict[str, Callable[[list[Any]], Any]]:
        """Return by name the function that reduces a batch of lists."""
        if work == "array":
            return {OURS: self._by_mpidist, "Allreduce": self._each}
        return {OURS: self._by_mpidist, "Allreduce each": self._each, "Allreduce packed": self._pack}

    def _by_mpidist(self, batch: list[Any]) -> Any:
        return self._strategy.run(self._replica, args=(batch,))

    def _replica(self, batch: list[Any]) -> Any:
        all_reduce, is_single = mpidist.get_replica_context().all_reduce, len(self._elements) == 1
        for arrays in batch:
            self._kept = [all_reduce("SUM", arrays[0])] if is_single else all_reduce("SUM", arrays)
        return self._kept

    def _each(self, batch: list[Any]) -> Any:
        for arrays in batch:
            for source, target in zip(arrays, self._out, strict=True):
                self._comm.Allreduce(source, target)
        return self._out

    def _pack(self, batch: list[Any]) -> Any:
        for arrays in batch:
            numpy.concatenate(arrays, out=self._packed)
            self._comm.Allreduce(self._packed, self._reduced)
            start = 0
            for target in self._out:
                target[...] = self._reduced[start : start + len(target)]
                start += len(target)
        return self._out

    def _turn(self, who: str, run_all: Callable[[list[Any]], Any]) -> float:
        """Return the seconds of one reduction, of the slowest rank; count wrong elements.  Collective."""
        comm, size = self._comm, self._comm.size
        self._step += 1
        own = float(self._step % 7 + comm.rank)  # whole numbers, whose sums are exact
        batch = [[numpy.full(each, own, "float32") for each in self._elements] for _ in range(self._calls)]
        comm.Barrier()
        start = time.perf_counter()
        results = run_all(batch)
        seconds = float(comm.allreduce(time.perf_counter() - start, self._mpi.MAX))
        expected = size * (self._step % 7) + size * (size - 1) // 2
        wrong = sum(int(numpy.count_nonzero(each != expected)) for each in results)
        self._wrong[who] = self._wrong.get(who, 0) + comm.allreduce(wrong)
        return seconds / self._calls


def noise(rows: Sequence[Timing]) -> str:
    """Return that the machine was noisy, as the quartiles have it; empty if it was not."""
    wide = [row for row in rows if row.high > _NOISY * row.low]
    if not wide:
        return ""
    return (
        f"# noisy: in {len(wide)} of {len(rows)} rows the upper quartile is more than {_NOISY} times the lower one. "
        "Their ratios mean little.\n"
        "# Other programs run, or ranks share cores: see uptime; start fewer ranks, or raise --rounds"
    )


def heading() -> str:
    """Return the line above the table."""
    return (
        f"# {'arrays':>6} {'bytes':>10}  {'':<16} {'time':>10} {'quartiles':>22} {'GB/s':>7} {'ratio':>6} {'wrong':>6}"
    )


def line(row: Timing) -> str:
    """Return a row of the table."""
    quartiles = f"{show_seconds(row.low)} - {show_seconds(row.high)}"
    speed = f"{row.size / row.seconds / 1e9:.2f}"
    what = f"{row.tensors:>8} {show_bytes(row.size):>10}  {row.who:<16}"
    return f"{what} {show_seconds(row.seconds):>10} {quartiles:>22} {speed:>7} {row.ratio:>6.2f} {row.wrong:>6}"
