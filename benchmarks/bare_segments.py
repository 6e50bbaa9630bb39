"""What the exchange through shared segments takes without anything around it: the limit that mpidist is held against.

    mpidist run -n 2 -m benchmarks.bare_segments
    mpidist run -n 2 -m benchmarks.bare_segments --peers --json bare.json
    mpidist run -n 4 -m benchmarks.bare_segments --tensors small --peers "Allreduce each" "Allreduce packed"

A list of gradients goes through segments of shared memory with flags, in one of three ways.  *Shares*: all values are
copied in, each rank adds its share of a segment, and all copy the sums out.  *All add*: each adds all of it straight
into its result.  *Direct*: a rank copies in what others add up, adds what they have copied in for it to its own values
where these lie, and writes the sums over it, which is what mpidist does with long lists.  Beside them a sum of buffers
that all see into a result that all see, as of `gradient_buffers`.  No call is checked, no deadline looked at, and sizes
and places are known before.  A result is kept for one step, as all others' are.  In the loop of ``python -m benchmarks
gradients``, with a plain copy of the list, mpidist's all-reduce of it, and what peers `--peers` names, by default all.
`--json` adds the launch to a file, which ``python -m benchmarks show`` reads.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from benchmarks.peers.table import PEERS
from benchmarks.suite import results
from benchmarks.suite.contender import Contender, Copy, Ours, OursInBuffers
from benchmarks.suite.mapped import mapped
from benchmarks.suite.measured import Measured, show
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.results import Launch
from benchmarks.suite.rows import all_reduce_factor
from benchmarks.suite.tensor_lists import MODELS, shapes_of
from benchmarks.suite.tensors import TensorList
from benchmarks.suite.turns import Budget
from mpidist.commands.machine import machine

#: Segments in turn, and 8-byte words from one rank's flags to the next.
DEPTH, FLAG_WORDS = 4, 32
FILLED, REDUCED = 0, 16

#: What a rank does with a span of the buffer: its first element, and the values.
OnStretch = Callable[[int, Any], None]

#: Where the sums of a span go, by where it starts and stops.
TotalAt = Callable[[int, int], Any]


class Segments:
    """Segments of `kib` KiB of float32 for a buffer like `tensors`, shared by all ranks.  Collective.

    There are `rows` of them for each rank; the exchanges of this class take `DEPTH` rows in turn.
    """

    def __init__(self, ranks: Ranks, tensors: TensorList, kib: int, rows: int = DEPTH) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        flags = -(-FLAG_WORDS * 8 * self.size // 4096) * 4096
        memory = mapped(ranks.comm, flags + rows * self.size * (kib << 10))
        self.words = memoryview(memory)[:flags].cast("Q")
        self.step = kib << 8
        slots = numpy.frombuffer(memory, "f4", offset=flags).reshape(rows, self.size, self.step)
        self.bounds = [
            (start, min(start + self.step, tensors.elements)) for start in range(0, tensors.elements, self.step)
        ]
        self.slots = slots
        self.turn = 0
        self.is_crowded = self.size > (os.cpu_count() or 1)

    def parts(self, gradients: Sequence[Any]) -> list[list[Any]]:
        """Return, by segment, what of the gradients lies in it."""
        found: list[list[Any]] = [[] for _ in self.bounds]
        at = 0
        for gradient in gradients:
            flat, start = gradient.reshape(-1), 0
            while start < flat.size:
                index, offset = divmod(at, self.step)
                stop = min(flat.size, start + self.step - offset)
                found[index].append(flat[start:stop])
                at, start = at + stop - start, stop
        return found

    def all_add(self, parts: list[list[Any]], out: Any) -> None:
        """Write the sums over all ranks to `out`; each rank adds everything.  Collective."""
        for index in range(len(parts) + 1):
            if index < len(parts):
                self._fill(index, parts[index])
            if index > 0:
                start, stop = self.bounds[index - 1]
                self._await(FILLED, self.turn + index)
                first, second, *others = self.slots[(self.turn + index - 1) % DEPTH, :, : stop - start]
                numpy.add(first, second, out=out[start:stop])
                for other in others:
                    numpy.add(out[start:stop], other, out=out[start:stop])
        self.turn += len(parts)

    def in_shares(self, parts: list[list[Any]], own: OnStretch | None, take: OnStretch) -> None:
        """Give each rank's share of every segment, summed, to its `own`, and what is left there to the others' `take`.

        Collective.  Without `own` each takes its own shares, too.
        """
        for index in range(len(parts) + 1):
            if index < len(parts):
                self._fill(index, parts[index])
            if index > 0:
                self._await(REDUCED, self.turn + index)
                for rank in range(self.size):
                    if rank != self.rank or own is None:
                        take(*self._share(index - 1, rank, rank))
            if index < len(parts):
                self._await(FILLED, self.turn + index + 1)
                start, total = self._share(index, self.rank, self.rank)
                for rank in range(self.size):
                    if rank != self.rank:
                        numpy.add(total, self._share(index, self.rank, rank)[1], out=total)
                if own is not None:
                    own(start, total)
                self.words[self.rank * FLAG_WORDS + REDUCED] = self.turn + index + 1
        self.turn += len(parts)

    def _fill(self, index: int, parts: list[Any]) -> None:
        start, stop = self.bounds[index]
        numpy.concatenate(parts, out=self.slots[(self.turn + index) % DEPTH, self.rank, : stop - start])
        self.words[self.rank * FLAG_WORDS + FILLED] = self.turn + index + 1

    def _share(self, index: int, owner: int, by: int) -> tuple[int, Any]:
        """Return where the share of `owner` in a segment begins, and what `by` has there."""
        start, stop = self.bounds[index]
        first, last = ((stop - start) * each // self.size for each in (owner, owner + 1))
        return start + first, self.slots[(self.turn + index) % DEPTH, by, first:last]

    def _await(self, which: int, value: int) -> None:
        for rank in range(self.size):
            while self.words[rank * FLAG_WORDS + which] < value:
                if self.is_crowded:
                    os.sched_yield()


class Pairs(Segments):
    """For each rank a segment of `kib` KiB for every other rank; for two ranks two, in turn, as mpidist has them."""

    def __init__(self, ranks: Ranks, tensors: TensorList, kib: int) -> None:
        self.depth = 2 if ranks.size == 2 else 1
        super().__init__(ranks, tensors, kib, rows=self.depth * ranks.size)
        self.others = [rank for rank in range(self.size) if rank != self.rank]

    def directly(self, parts: list[list[Any]], total_at: TotalAt, own: OnStretch | None, take: OnStretch) -> None:
        """Add up each segment on one rank, in turn, where `total_at` says, and give it to `own`.

        Collective.  What is left there others get, by their `take`.
        """
        turns = -(-len(parts) // self.size)
        for turn in range(turns + 1):
            if turn > 0 and self.depth == 1:
                self._take_theirs(turn - 1, take)
            if turn < turns:
                self._give(turn, parts)
            if turn > 0 and self.depth > 1:
                self._take_theirs(turn - 1, take)
            if turn < turns:
                self._await(FILLED, self.turn + turn + 1)
                self._add_mine(turn, parts, total_at, own)
        self.turn += turns

    def _slot(self, turn: int, by: int, whose: int) -> tuple[int, Any]:
        """Return where the segment that `whose` adds up in a turn begins, and what `by` has there, if it is one."""
        index = turn * self.size + whose
        start, stop = self.bounds[index] if index < len(self.bounds) else (0, 0)
        return start, self.slots[(self.turn + turn) % self.depth * self.size + by, whose, : stop - start]

    def _give(self, turn: int, parts: list[list[Any]]) -> None:
        for rank in self.others:
            place = self._slot(turn, self.rank, rank)[1]
            if place.size:
                numpy.concatenate(parts[turn * self.size + rank], out=place)
        self.words[self.rank * FLAG_WORDS + FILLED] = self.turn + turn + 1

    def _take_theirs(self, turn: int, take: OnStretch) -> None:
        self._await(REDUCED, self.turn + turn + 1)
        for rank in self.others:
            take(*self._slot(turn, self.rank, rank))

    def _add_mine(self, turn: int, parts: list[list[Any]], total_at: TotalAt, own: OnStretch | None) -> None:
        index = turn * self.size + self.rank
        if index < len(parts):
            slots = [self._slot(turn, by, self.rank)[1] for by in self.others]
            start, stop = self.bounds[index]
            total, done = total_at(start, stop), 0
            for part in parts[index]:
                end = done + part.size
                numpy.add(part, slots[0][done:end], out=total[done:end])
                for slot in slots[1:]:
                    numpy.add(total[done:end], slot[done:end], out=total[done:end])
                done = end
            if own is not None:
                own(start, total)
            for slot in slots:
                slot[...] = total
        self.words[self.rank * FLAG_WORDS + REDUCED] = self.turn + turn + 1


class Bare(Contender):
    """The exchange through segments of `kib` KiB, in one of the ways."""

    kind = "reference"
    warm_ups = needed_warm_ups = 6  # its results lie in two arrays in turn, of which the memory is touched by then

    def __init__(self, ranks: Ranks, tensors: TensorList, kib: int, how: str) -> None:
        super().__init__(ranks, tensors)
        self.name = f"bare, {how}, {kib} KiB"
        self._segments, self._how = (Pairs if how == "direct" else Segments)(ranks, tensors, kib), how
        _, self._out = ranks.packed(tensors)
        self._before = numpy.empty_like(self._out)

    def prepare(self, gradients: list[Any]) -> Any:
        return self._segments.parts(gradients)

    def run(self, prepared: Any) -> Any:
        self._out, self._before = self._before, self._out
        if self._how == "shares":
            self._segments.in_shares(prepared, None, self._take)
        elif self._how == "all add":
            self._segments.all_add(prepared, self._out)
        else:
            out = self._out
            self._segments.directly(prepared, lambda start, stop: out[start:stop], None, self._take)
        return self._out

    def _take(self, start: int, values: Any) -> None:
        self._out[start : start + len(values)] = values

    def arrays(self, result: Any) -> list[Any]:
        return self.tensors.cut(result)


class BareBuffers(Contender):
    """A sum of buffers that all ranks see into a result that all see: what reduces `gradient_buffers` at best."""

    name = "sum of shared buffers"
    kind = "reference"
    warm_ups = needed_warm_ups = 6

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        arrays = ranks.size + 2  # results take turns
        memory = mapped(ranks.comm, arrays * tensors.nbytes)
        values = numpy.frombuffer(memory, tensors.dtype).reshape(arrays, tensors.elements)
        self._buffers, self._results = values[: ranks.size], list(values[ranks.size :])
        self._mine = tensors.cut(self._buffers[ranks.rank])

    def prepare(self, gradients: list[Any]) -> Any:
        for buffer, gradient in zip(self._mine, gradients, strict=True):
            buffer[...] = gradient
        return self._buffers

    def run(self, prepared: Any) -> Any:
        self._results.reverse()
        total, size = self._results[0], self.ranks.size
        step = min(1 << 20, -(-len(total) // size))
        self.ranks.comm.Barrier()
        for start in range(self.ranks.rank * step, len(total), size * step):
            sums, (first, second, *others) = total[start : start + step], prepared[:, start : start + step]
            numpy.add(first, second, out=sums)
            for other in others:
                numpy.add(sums, other, out=sums)
        self.ranks.comm.Barrier()
        return total

    def arrays(self, result: Any) -> list[Any]:
        return self.tensors.cut(result)


def bare(ranks: Ranks, tensors: TensorList) -> list[Callable[..., Contender]]:
    """Return the bare exchanges that may be the best, and the sum of buffers.

    For a short list it is one segment in which all or each add.
    """
    if tensors.nbytes <= 1 << 20:
        ways = [("shares", 1024), ("all add", 1024)]
    else:
        ways = [("direct", 512), ("direct", 1024), ("shares", 512), ("shares", 1024)]
        ways += [("all add", 1024)] if ranks.size == 2 else []
    return [*(partial(Bare, kib=kib, how=how) for how, kib in ways), BareBuffers]


def write(path: Path, found: Launch) -> None:
    """Add a launch to a file."""
    results.write(path, [*(results.read(path) if path.exists() else []), found])


def launch(subcommand: str, ranks: Ranks, measured: Measured, command: Sequence[str]) -> Launch:
    """Return what was measured as a launch of the suite."""
    topology, looks = f"{ranks.node_count} node x {ranks.size} ranks", dict(ranks.probe.looks)
    made = [subcommand, list(command), ranks.size, ranks.library, topology, looks, measured.rows, measured.missing]
    return Launch(*made, machine())


def main() -> None:
    """Measure; rank 0 prints.  Collective."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [peer.name for peer in PEERS]
    parser.add_argument("--tensors", choices=list(MODELS), default="resnet50")
    parser.add_argument("--peers", nargs="*", choices=names, metavar="NAME", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    asked = [] if options.peers is None else options.peers or names
    ranks, measured = Ranks(), Measured()
    if ranks.size == 1:
        raise SystemExit("one rank has nothing to exchange: start two or more, as with mpidist run -n 2")
    tensors = TensorList(shapes_of(options.tensors), "float32", ranks.rank, ranks.size)
    makers = [Copy, *bare(ranks, tensors), Ours, OursInBuffers, *(peer for peer in PEERS if peer.name in asked)]
    budget = Budget(options.seconds, options.rounds)
    factor = all_reduce_factor(ranks.size)
    show(measured.add(options.tensors, makers, tensors, ranks, budget, Copy.name, factor), ranks)
    ranks.say(f"# cache mode: {ranks.probe.describe()}")
    if options.json is not None and ranks.rank == 0:
        write(options.json, launch("gradients", ranks, measured, ["benchmarks/bare_segments.py"]))
    ranks.comm.Barrier()  # a peer's servers end only when nobody needs them any more


if __name__ == "__main__":
    main()
