"""What the exchange through shared segments takes without anything around it: the limit that mpidist is held against.

    mpidist run -n 2 benchmarks/bare_segments.py

ResNet-50's gradients are copied into segments, each rank adds its share of a segment, and all copy the sums out; flags
in shared memory, three segments in turn.  No call is checked, no deadline looked at, sizes and places are known before,
and the result lies where it lay the last time.  Beside it, in turns in the same launch: a plain copy of the list,
mpi4py's `Allreduce` of each tensor, and mpidist's all-reduce of the list.  Medians in ms, of the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy
from mpi4py import MPI

from mpidist.collectives.communicator import Communicator
from mpidist.commands.bench.tensor_lists import shapes_of
from mpidist.fusion.pipeline import FusedAllReduce
from mpidist.transports.shared import map_together

#: Segments in turn, and 8-byte words from one rank's flag to the next.
DEPTH, FLAG_WORDS = 3, 16


class Segments:
    """Segments of `nbytes` bytes, shared by the ranks of `comm`.  Collective."""

    def __init__(self, comm: Any, nbytes: int) -> None:
        self.rank, self.size = comm.rank, comm.size
        flags = -(-2 * FLAG_WORDS * 8 * self.size // 4096) * 4096
        memory = memoryview(map_together(flags + DEPTH * self.size * nbytes, comm.rank, comm.allgather))
        self.words = memory[:flags].cast("Q")
        self.elements = nbytes // 4
        self.slots = numpy.frombuffer(memory, "f4", offset=flags).reshape(DEPTH, self.size, self.elements)
        self.turn = 0

    def reduce(self, flat: list[Any], pieces: list[list[tuple[int, int, int]]], out: Any) -> None:
        """Write the sums of the arrays of all ranks to `out`.  Collective."""
        first, last = self.turn, self.turn + len(pieces)
        for turn in range(first, last + 1):
            if turn < last:
                slot = self.slots[turn % DEPTH][self.rank]
                parts = [flat[place][start:stop] for place, start, stop in pieces[turn - first]]
                numpy.concatenate(parts, out=slot[: sum(part.size for part in parts)])
                self.words[2 * self.rank * FLAG_WORDS] = turn + 1
            if turn > first:
                self._await(1, turn)
                begin = (turn - 1 - first) * self.elements
                self._copy_out(self.slots[(turn - 1) % DEPTH], out[begin : begin + self.elements])
            if turn < last:
                self._await(0, turn + 1)
                self._add(self.slots[turn % DEPTH])
                self.words[(2 * self.rank + 1) * FLAG_WORDS] = turn + 1
        self.turn = last

    def _await(self, which: int, value: int) -> None:
        for rank in range(self.size):
            while self.words[(2 * rank + which) * FLAG_WORDS] < value:
                if self.size > 2:
                    os.sched_yield()

    def _share(self, rank: int) -> slice:
        return slice(rank * self.elements // self.size, (rank + 1) * self.elements // self.size)

    def _add(self, slots: Any) -> None:
        share = self._share(self.rank)
        total = slots[self.rank][share]
        for rank in range(self.size):
            if rank != self.rank:
                numpy.add(total, slots[rank][share], out=total)

    def _copy_out(self, slots: Any, out: Any) -> None:
        for rank in range(self.size):
            share = self._share(rank)
            part = out[share]
            part[...] = slots[rank][share][: part.size]


def cut(sizes: list[int], elements: int) -> list[list[tuple[int, int, int]]]:
    """Return, by segment, which elements of which arrays lie in it."""
    found: list[list[tuple[int, int, int]]] = [[]]
    room = elements
    for place, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            found[-1].append((place, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                found.append([])
                room = elements
    return found if found[-1] else found[:-1]


def main() -> None:
    """Measure; rank 0 prints.  Collective."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    comm = MPI.COMM_WORLD.Dup()
    lists = [[numpy.full(shape, comm.rank + step, "f4") for shape in shapes_of("resnet50")] for step in range(2)]
    flats = [[each.reshape(-1) for each in tensors] for tensors in lists]
    sizes = [each.size for each in flats[0]]
    out, outs = numpy.empty(sum(sizes), "f4"), [numpy.empty_like(each) for each in lists[0]]
    contenders: dict[str, Callable[[int], object]] = {
        "copy": lambda step: [numpy.copyto(into, each) for into, each in zip(outs, lists[step], strict=True)],
        "Allreduce each": lambda step: [
            comm.Allreduce(each, into) for into, each in zip(outs, lists[step], strict=True)
        ],
    }
    for kib in (256, 512, 1024):
        segments = Segments(comm, kib << 10)
        places = cut(sizes, segments.elements)
        contenders[f"bare, {kib} KiB"] = lambda step, bare=segments, at=places: bare.reduce(flats[step], at, out)
    fused, kept = FusedAllReduce(Communicator.world()), [None]
    contenders["mpidist"] = lambda step: kept.__setitem__(0, fused(lists[step]))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-20, rounds):  # mpidist tries its ways in the first ones
        for name, run in contenders.items():
            comm.Barrier()
            start = time.perf_counter()
            run(turn % 2)
            seconds = comm.allreduce(time.perf_counter() - start, MPI.MAX)
            if turn >= 0:
                times[name].append(seconds)
    expected = sum((rounds - 1) % 2 + rank for rank in range(comm.size))
    assert (out == expected).all() and all((each == expected).all() for each in kept[0])
    if comm.rank == 0:
        copy = statistics.median(times["copy"])
        for name, found in times.items():
            print(
                f"{name:<16} {1e3 * statistics.median(found):8.1f} ms  {statistics.median(found) / copy:5.2f}x a copy"
            )


if __name__ == "__main__":
    main()
