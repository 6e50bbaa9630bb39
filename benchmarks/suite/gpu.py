"""``gpu``: CuPy arrays on a GPU, reduced by the public call and updated by Adam, against raw NCCL and plain copies.

Each turn is a synchronized wall clock over some calls that follow each other without a wait: what it takes longer, the
host or the card, counts.  Contenders take turns.  On one rank packing alone is measured, too, and how long the card
takes for it, by events: the host has enqueued all calls by then.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy

import mpidist
from benchmarks.suite.measured import Measured, show
from benchmarks.suite.ranks import Ranks, imported
from benchmarks.suite.rows import Row, all_reduce_factor, row_of
from benchmarks.suite.tensor_lists import Shape, shapes_of
from mpidist.arrays import GET_CUPY, list_physical_devices
from mpidist.commands.quantities import nbytes
from mpidist.device.memory import memory_of
from mpidist.errors import MissingDependencyError

WHAT = "CuPy arrays on a GPU: all-reduces and steps of Adam, against raw NCCL and copies"

#: Bytes of single arrays.
SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 4 << 20, 25 << 20, 100_000_000)

#: Lists by name, as `tensor_lists` has them.
LISTS = ("resnet50", "bert-base", "small")

#: Contenders that are held against the targets.
OURS, NCCL, COPY, ROUND_TRIP, ON_HOST = (
    "mpidist", "NCCL", "copy on the device", "copies to the host and back", "mpidist on the host"
)  # fmt: skip
PACK, UNPACK, ADAM, ADAM_COPY = "pack", "unpack", "Adam alone", "copy of as many bytes"

#: Behind the names of those whose time is the card's alone.
ALONE = " (the card alone)"

#: How often each contender runs before it is timed: plans are made, kernels compiled, memory is in the pool.
WARM_UPS = 5

#: Bytes that are reduced in one turn, at the least, but for the most calls.
_TURN_BYTES, _MOST_CALLS = 64 << 20, 50

_CURE = f"it needs CuPy: {GET_CUPY}"


#: Runs for as many cycles of the card as it is told, one thread alone.
_SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) { }
}
"""

#: Of `spin`: some fifty milliseconds, far above what the host needs to enqueue what follows.
_CYCLES = 100_000_000


@dataclass
class Timed:
    """Something that is timed: ``run()`` enqueues it once; a `wrong` result is counted in elements.

    `on_card`: what counts is the card's time alone.
    """

    name: str
    kind: str
    run: Callable[[], Any]
    wrong: Callable[[Any], int] | None = None
    factor: float = 0.0  # busbw by algbw; 0 for what is no reduction
    on_card: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this subcommand takes."""
    parser.add_argument(
        "--sizes", nargs="*", type=nbytes, default=list(SIZES), metavar="BYTES", help="of single arrays: 4 64KiB 25MiB"
    )
    parser.add_argument("--lists", nargs="*", choices=LISTS, default=list(LISTS), help="default: all")


def check(options: argparse.Namespace) -> None:
    """Raise MissingDependencyError, before ranks are started, where there is nothing to measure.  Local."""
    if not list_physical_devices("GPU"):
        raise MissingDependencyError("CuPy sees no GPU here, and gpu measures on one; nvidia-smi tells what there is")


def measure(options: argparse.Namespace, ranks: Ranks) -> Measured:
    """Measure in this launch, on the GPU of the ranks' strategy, which is CuPy's current device.  Collective."""
    cupy = imported("cupy", _CURE, ranks)
    card = Card(cupy, ranks, options.seconds or 3.0, options.rounds or 30)
    card.measured.machine = facts(cupy)
    ranks.say(f"# {', '.join(f'{name} {value}' for name, value in card.measured.machine.items())}")
    for size in options.sizes:
        card.reduce("array", [(max(1, size // 4),)])
    for name in options.lists if ranks.size == 1 else ():
        card.pack(name, shapes_of(name))
    for name in options.lists:
        card.reduce(name, shapes_of(name), with_host=name == "resnet50")
    if "resnet50" in options.lists:
        card.adam(shapes_of("resnet50"))
    card.close()
    return card.measured


@functools.cache
def _spin(cupy: Any) -> Any:
    return cupy.RawKernel(_SPIN, "spin")


def spin(cupy: Any) -> None:
    """Have the card wait in its current stream, for longer than the host enqueues calls.  Local; does not wait."""
    _spin(cupy)((1,), (1,), (numpy.int64(_CYCLES),))


def facts(cupy: Any) -> dict[str, Any]:
    """Return what the card and its software are.  Local."""
    from cupy.cuda import nccl

    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    names = ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE")
    return {
        "gpu": device["name"].decode(),
        "L2": f"{device['l2CacheSize'] >> 20} MiB",  # what fits is copied faster than the memory allows
        "CuPy": cupy.__version__,
        "CUDA driver": cupy.cuda.runtime.driverGetVersion(),
        "NCCL": nccl.get_version() if nccl.available else "none",
        **{name: os.environ[name] for name in names if name in os.environ},
    }


class Card:
    """The GPU of this rank, with a communicator of raw NCCL where it can be had."""

    def __init__(self, cupy: Any, ranks: Ranks, seconds: float, rounds: int) -> None:
        self.cupy, self.ranks, self.seconds, self.rounds = cupy, ranks, seconds, rounds
        self.measured = Measured()
        self._nccl, problem = _raw_nccl(ranks)
        if problem:
            self.measured.missing["NCCL"] = problem
            ranks.say(f"# without NCCL: {problem}")

    def close(self) -> None:
        """Give the communicator back.  Collective."""
        self.cupy.cuda.Device().synchronize()
        if self._nccl is not None:
            self._nccl.destroy()

    # -- what is measured ---------------------------------------------------------------------------------------------

    def reduce(self, work: str, shapes: Sequence[Shape], with_host: bool = False) -> None:
        """Measure all-reduces of a list of float32, and what they are held against.  Collective."""
        elements = sum(map(prod, shapes))
        flat = self.cupy.full(elements, self.ranks.rank + 1, "f4")
        target = self.cupy.empty_like(flat)
        parts = _cut(flat, shapes)
        given = parts[0] if len(parts) == 1 else parts
        factor = all_reduce_factor(self.ranks.size)
        contenders = [
            Timed(OURS, "ours", self._public(given), self._wrong, factor),
            *self._raw(flat, target, factor),
            Timed(COPY, "reference", self._copy(target, flat)),
        ]
        if with_host:
            pinned = self.cupy.cuda.alloc_pinned_memory(flat.nbytes)
            on_host = _cut(numpy.full(elements, self.ranks.rank + 1, "f4"), shapes)
            contenders += [
                Timed(ROUND_TRIP, "reference", self._round_trip(flat, target, pinned)),
                Timed(ON_HOST, "ours", self._public(on_host), self._wrong, factor),
            ]
        reference = COPY if self._nccl is None else NCCL
        self._rows(work, contenders, flat.nbytes, reference)

    def pack(self, work: str, shapes: Sequence[Shape]) -> None:
        """Measure how a list of float32 is put together and taken apart, by one launch each.  Collective."""
        offsets = [0, *numpy.cumsum([prod(shape) for shape in shapes]).tolist()]
        flat = self.cupy.full(offsets[-1], 1, "f4")
        target = self.cupy.empty_like(flat)
        memory: Any = memory_of(flat)
        packing = memory.packing(offsets)
        twos, parts = (_cut(self.cupy.full_like(flat, value), shapes) for value in (2, 0))

        def packed() -> Any:
            packing.pack(twos, target)
            return target

        def unpacked() -> Any:
            packing.unpack(flat, parts)
            return parts

        def wrong_packed(result: Any) -> int:
            return int((result != 2).sum())

        def wrong_unpacked(result: Any) -> int:
            return sum(int((part != 1).sum()) for part in result)

        contenders = []
        for where in ("", ALONE):
            contenders += [
                Timed(f"{COPY}{where}", "reference", self._copy(target, flat), on_card=bool(where)),
                Timed(f"{PACK}{where}", "ours", packed, wrong_packed, on_card=bool(where)),
                Timed(f"{UNPACK}{where}", "ours", unpacked, wrong_unpacked, on_card=bool(where)),
            ]
        self._rows(f"pack {work}", contenders, flat.nbytes, COPY)

    def adam(self, shapes: Sequence[Shape]) -> None:
        """Measure steps of Adam, with the reduction and without; a copy moves the bytes that an update must.

        These are gradient, both moments and parameter read, and the latter three written: 7 of 4 bytes an element.
        """
        cupy, strategy = self.cupy, self.ranks.strategy
        elements = sum(map(prod, shapes))
        with strategy.scope():
            variables = [mpidist.Variable(cupy.zeros(shape, "f4")) for shape in shapes]
            optimizers = [mpidist.optimizers.Adam(1e-3) for _ in range(2)]
        pairs = list(zip(_cut(cupy.full(elements, 1e-3, "f4"), shapes), variables, strict=True))

        def step(optimizer: Any, **options: Any) -> Callable[[], Any]:
            return lambda: strategy.run(lambda: optimizer.apply_gradients(pairs, **options))

        source = cupy.zeros(elements * 7 // 2, "f4")
        contenders = [
            Timed("Adam, gradients reduced", "ours", step(optimizers[0])),
            Timed(ADAM, "ours", step(optimizers[1], skip_gradients_aggregation=True)),
            Timed(ADAM_COPY, "reference", self._copy(cupy.empty_like(source), source)),
        ]
        self._rows("adam", contenders, elements * 4, ADAM_COPY)

    # -- contenders ---------------------------------------------------------------------------------------------------

    def _public(self, given: Any) -> Callable[[], Any]:
        strategy = self.ranks.strategy
        return lambda: strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", given))

    def _wrong(self, result: Any) -> int:
        size = self.ranks.size
        each = result if isinstance(result, list) else [result]
        return sum(int((part != size * (size + 1) // 2).sum()) for part in each)

    def _raw(self, source: Any, target: Any, factor: float) -> list[Timed]:
        if self._nccl is None:
            return []
        from cupy.cuda import nccl

        communicator = self._nccl
        fixed = source.data.ptr, target.data.ptr, source.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM

        def run() -> Any:
            communicator.allReduce(*fixed, self.cupy.cuda.get_current_stream().ptr)
            return target

        return [Timed(NCCL, "peer", run, self._wrong, factor)]

    def _copy(self, target: Any, source: Any) -> Callable[[], Any]:
        stream = self.cupy.cuda.get_current_stream
        return lambda: target.data.copy_from_device_async(source.data, source.nbytes, stream())

    def _round_trip(self, source: Any, target: Any, pinned: Any) -> Callable[[], Any]:
        def run() -> None:
            stream = self.cupy.cuda.get_current_stream()
            source.data.copy_to_host_async(pinned.ptr, source.nbytes, stream)
            target.data.copy_from_host_async(pinned.ptr, source.nbytes, stream)

        return run

    # -- time ---------------------------------------------------------------------------------------------------------

    def _rows(self, work: str, contenders: Sequence[Timed], length: int, reference: str) -> None:
        seconds, wrong = self._turns(contenders, max(1, min(_MOST_CALLS, _TURN_BYTES // length)))
        base = reference, float(numpy.median(seconds[reference]))
        what = work, length, "float32"
        rows: list[Row] = [
            row_of(*what, each.name, each.kind, seconds[each.name], base, each.factor, wrong[each.name])
            for each in contenders
        ]
        self.measured.rows += rows
        show(rows, self.ranks)

    def _turns(self, contenders: Sequence[Timed], calls: int) -> tuple[dict[str, list[float]], dict[str, int | None]]:
        """Return the seconds of a call in each turn of each contender, and how many elements were wrong."""
        wrong: dict[str, int | None] = {}
        for each in contenders:
            result = None
            for _ in range(WARM_UPS):
                result = each.run()
            self.cupy.cuda.Device().synchronize()
            wrong[each.name] = None if each.wrong is None else self.ranks.total(each.wrong(result))
        begun = time.perf_counter()
        for each in contenders:
            self._turn(each, calls)
        cost = self.ranks.slowest(time.perf_counter() - begun)  # with the card's wait before what it does alone
        rounds = max(3, min(self.rounds, int(self.seconds / max(cost, 1e-6))))
        found: dict[str, list[float]] = {each.name: [] for each in contenders}
        for turn in range(rounds):
            for place in range(len(contenders)):
                each = contenders[(turn + place) % len(contenders)]
                found[each.name].append(self._turn(each, calls))
        return found, wrong

    def _turn(self, contender: Timed, calls: int) -> float:
        """Return the seconds of one of some calls, of all ranks together.  Collective."""
        synchronize = self.cupy.cuda.Device().synchronize
        synchronize()
        self.ranks.comm.Barrier()
        start = time.perf_counter()
        if contender.on_card:
            return self.ranks.elapsed(0, self._card_seconds(contender, calls)) / calls
        for _ in range(calls):
            contender.run()
        synchronize()
        return self.ranks.elapsed(start, time.perf_counter()) / calls

    def _card_seconds(self, contender: Timed, calls: int) -> float:
        """Return how long the card takes for some calls.  Local; waits for them."""
        begun, ended = (self.cupy.cuda.Event() for _ in range(2))
        spin(self.cupy)
        begun.record()
        for _ in range(calls):
            contender.run()
        ended.record()
        ended.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(begun, ended)) / 1e3


def _raw_nccl(ranks: Ranks) -> tuple[Any, str]:
    """Return a communicator of NCCL's and "", or None and why there is none.  Collective."""
    from cupy.cuda import nccl

    try:
        mine = nccl.get_unique_id() if ranks.rank == 0 else None
        problem = ""
    except Exception as error:  # NCCL's are of a class that is not there without NCCL
        mine, problem = None, str(error)
    name, problem = ranks.comm.bcast((mine, problem))
    communicator = None
    if not problem:
        try:
            communicator = nccl.NcclCommunicator(ranks.size, name, ranks.rank)
        except Exception as error:
            problem = str(error)
    problem = ranks.first_problem(problem)
    return (None, problem) if problem else (communicator, "")


def _cut(flat: Any, shapes: Sequence[Shape]) -> list[Any]:
    """Return views of a flat array, one for each shape."""
    ends = numpy.cumsum([prod(shape) for shape in shapes]).tolist()
    return [flat[end - prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes, strict=True)]
