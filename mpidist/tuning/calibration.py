"""Measure what all-reduces cost the ranks of a world: messages and reductions a level, then whole all-reduces.

For long all-reduces through the memory of a node, sizes of segments are compared too.  All is measured through the
world's own transport and communicator, in rounds in which the contenders take turns; of each round the slowest rank
counts, of the rounds the median.  A comparison whose halves disagree is made again; if it never agrees with itself, the
calibration ends with an error.  Sizes grow until there are enough, or the next one would exceed the budget.  What is
far behind at two long sizes in a row is not measured at longer ones.  Every decision is made from figures that all
ranks share, so that all make the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy

from mpidist.cluster.topology import Topology
from mpidist.collectives.call import Call
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.persistent import Bound, Once
from mpidist.collectives.ways import selection
from mpidist.collectives.ways.pieces import Pieces
from mpidist.collectives.ways.selection import LONG_BYTES, SEGMENT_BYTES, SEGMENTED, Way
from mpidist.collectives.ways.shared_memory import SegmentAllReduce
from mpidist.runtime.control import Watch
from mpidist.schedules.cost import CostModel, Level
from mpidist.schedules.figures import Figures
from mpidist.tuning import plausibility
from mpidist.tuning.plausibility import ImplausibleFigures

#: Seconds that a calibration may take, about, and the longest all-reduce in it: beyond it seconds grow with the bytes.
BUDGET_SECONDS, LARGEST_BYTES = 50.0, 1 << 28

#: Sizes of segments in bytes that are compared, as far as a node's memory has room for them.
SEGMENT_SIZES = (1 << 18, 1 << 19, 1 << 20, 1 << 21)

#: Sizes in bytes of messages and of reductions.
_MESSAGES = (1, 1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 23)
_REDUCTIONS = (1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23)

#: How many rounds there are, and the fewest there are of contenders that take longer than `_QUICK_SECONDS` together.
ROUNDS, _LEAST_ROUNDS, _QUICK_SECONDS = 15, 3, 0.02

#: How many times more rounds there are of two contenders, when one of them seems to beat what the fixed table has.
_DUEL_ROUNDS = 3

#: How often a comparison is made until its halves agree: each half's quicker quarter, from so many rounds a half on.
_TRIES, _QUICKER, _HALF_ROUNDS = 3, 0.25, 2

#: How long a contender runs in one round at least, in seconds and at most in calls.
_ROUND_SECONDS, _MOST_CALLS = 3e-4, 25

#: From one size to the next: the factor, and a smaller one from where choices begin to differ.
_STEP, _FINE_STEP, _FINE_BYTES = 16, 4, 1 << 14

#: From one size to the next seconds are expected to grow by so much.
_GROWTH = 4

#: How many times the best one's seconds are "far behind", and from how many bytes on: latency alone tells nothing.
_FAR, _FAR_BYTES = 3.0, 1 << 18

#: What part of the budget the levels may take.
_LEVEL_SHARE = 0.25

#: Does once what is measured.
Run = Callable[[], object]


def calibrate(
    communicator: Communicator,
    budget_seconds: float = BUDGET_SECONDS,
    largest_bytes: int = LARGEST_BYTES,
    rounds: int = ROUNDS,
) -> Figures:
    """Measure the ranks of a communicator.

    Collective: every rank calls it in the same order, with the same arguments.

    Parameters
    ----------
    communicator : Communicator
        Of two ranks or more.
    budget_seconds : float
        It takes about so long at most; the first, short sizes are measured in any case.
    largest_bytes : int
        Of the all-reduces, 64 KiB or more; messages are a quarter of it at most.
    rounds : int
        How often the contenders take turns.

    Raises
    ------
    ImplausibleFigures
        On all ranks: a measurement does not agree with itself.
    TransportTimeoutError, RankFailedError
        As of any collective.
    """
    model = measure_levels(communicator, _LEVEL_SHARE * budget_seconds, largest_bytes // 4, rounds)
    stopwatch = Stopwatch(communicator, rounds)
    budget_seconds *= 1 - _LEVEL_SHARE
    points, segments = _all_reduces(communicator, stopwatch, budget_seconds, largest_bytes)
    best = best_segments(segments)
    if best is not None:  # what is chosen among algorithms goes by what the segments will be
        points["shared_memory"] = {**points["shared_memory"], **segments[best]}
    listed = {name: tuple(sorted(found.items())) for name, found in points.items()}
    return Figures(model, listed, {size: tuple(found.items()) for size, found in segments.items()}, best)


#: Seconds by bytes.
_Seconds = dict[float, float]


def _all_reduces(
    communicator: Communicator, stopwatch: Stopwatch, budget_seconds: float, largest_bytes: int
) -> tuple[dict[str, _Seconds], dict[int, _Seconds]]:
    """Return the seconds of all-reduces by algorithm, and of those through memory by size of segments.  Collective."""
    facts = communicator.facts()
    contenders: list[str] = list(selection.eligible(facts))
    points: dict[str, _Seconds] = {name: {} for name in contenders}
    segments: dict[int, _Seconds] = {size: {} for size in _segment_sizes(communicator)}
    behind, last = set[str](), 0.0
    for nbytes in _sizes(largest_bytes):
        if last and stopwatch.elapsed() + _GROWTH * last > budget_seconds:
            break
        before = stopwatch.elapsed()
        source, work = _zeros(nbytes), _zeros(nbytes)
        runs = {name: _all_reduce(communicator, _way(name), source, work) for name in contenders}
        seconds = _confirmed(stopwatch, runs, selection.by_table(nbytes, facts), nbytes)
        for name, taken in seconds.items():
            points[name][float(nbytes)] = taken
        if segments and nbytes >= LONG_BYTES and "shared_memory" in contenders:
            ways = [Way("shared_memory", size) for size in segments]
            runs = {way.label: _all_reduce(communicator, way, source, work) for way in ways}
            for size, taken in zip(segments, stopwatch.compare(runs, nbytes), strict=True):
                segments[size][float(nbytes)] = taken
        limit = _FAR * min(seconds.values()) if nbytes >= _FAR_BYTES else float("inf")
        far = {name for name, taken in seconds.items() if taken > limit}
        contenders = [name for name in contenders if name not in far or name not in behind]
        behind, last = far, stopwatch.elapsed() - before
    return points, {size: found for size, found in segments.items() if found}


def _segment_sizes(communicator: Communicator) -> list[int]:
    """Return the sizes of segments that a node's memory has room for; none where there are no two (Local)."""
    if "shared_memory" not in selection.eligible(communicator.facts()) or communicator.segments is None:
        return []
    found = [size for size in SEGMENT_SIZES if size <= communicator.segments.room]
    return found if SEGMENT_BYTES in found and len(found) > 1 else []


def best_segments(segments: Mapping[int, _Seconds]) -> int | None:
    """Return the size that is clearly quicker than the default over all sizes of buffers; None if none is (Local)."""
    if SEGMENT_BYTES not in segments:
        return None
    default = segments[SEGMENT_BYTES]
    ratio = {size: _geometric_mean(found[n] / default[n] for n in default) for size, found in segments.items()}
    best = min(ratio, key=lambda size: (ratio[size], size))
    return best if ratio[best] <= selection.GAIN else None


def _geometric_mean(values: Iterable[float]) -> float:
    return float(numpy.exp(numpy.mean(numpy.log([*values]))))


def _way(name: str) -> Way:
    return Way(name, SEGMENT_BYTES if name in SEGMENTED else 0)


def _confirmed(stopwatch: Stopwatch, runs: Mapping[str, Run], default: str, nbytes: int) -> dict[str, float]:
    """Return the seconds of each; of one that seems to beat the table, and of the table's, measured once more."""
    seconds = dict(zip(runs, stopwatch.compare(runs, nbytes), strict=True))
    best = min(seconds, key=lambda name: (seconds[name], name))
    if default in seconds and selection.is_gain(seconds[best], seconds[default]):
        duel = {default: runs[default], best: runs[best]}
        seconds |= zip(duel, stopwatch.compare(duel, nbytes, _DUEL_ROUNDS), strict=True)
    return seconds


def measure_levels(
    communicator: Communicator,
    budget_seconds: float = BUDGET_SECONDS,
    largest_bytes: int = LARGEST_BYTES,
    rounds: int = ROUNDS,
) -> CostModel:
    """Measure messages inside a node and between nodes, and reductions, as the cost model wants them.

    Collective: every rank calls it in the same order, with the same arguments.  Where all ranks are on one node, or
    each is on a node of its own, there is one level only, which stands for both.
    """
    topology, rank = communicator.topology, communicator.rank
    sizes = [nbytes for nbytes in _MESSAGES if nbytes <= largest_bytes]
    stopwatch = Stopwatch(communicator, rounds)
    reduction = _measured(
        stopwatch, "a reduction", [each for each in _REDUCTIONS if each <= sizes[-1]], budget_seconds / 4, _addition
    )
    links, found = None, {}
    for side, circle in (("intra", _around_node(topology, rank)), ("inter", _around_nodes(topology, rank))):
        if not any(stopwatch.slowest([circle is not None])):
            continue
        exchange = _measured(stopwatch, "an exchange", sizes, budget_seconds / 4, _exchange(communicator, circle))
        forth = _one_way(communicator, circle, topology, side)
        one_way = _measured(stopwatch, "a message", sizes, budget_seconds / 4, forth)
        found[side] = Level.measured(exchange, one_way, reduction)
        if side == "inter":
            links = _links(stopwatch, communicator, exchange[-1])
    only = next(iter(found.values()))
    return CostModel(found.get("intra", only), found.get("inter", only), links)


class Stopwatch:
    """Times that all ranks agree on: those of the slowest one.

    Parameters
    ----------
    rounds : int
        How often contenders take turns.
    """

    def __init__(self, communicator: Communicator, rounds: int = ROUNDS) -> None:
        self._communicator = communicator
        self._rounds = rounds
        self._start = time.perf_counter()

    def slowest(self, values: Any) -> Any:
        """Return the greatest of each of the values over all ranks, shape as given, float64.  Collective."""
        found = numpy.array(values, dtype=numpy.float64)
        self._communicator.all_reduce(found, "max", algorithm=selection.PINNED)
        return found

    def elapsed(self) -> float:
        """Return the seconds since the start.  Collective."""
        return float(self.slowest([time.perf_counter() - self._start])[0])

    def compare(self, runs: Mapping[str, Run], nbytes: int, times_more: int = 1) -> list[float]:
        """Return the seconds of one call of each; they take turns, and the first calls do not count.  Collective.

        There are `times_more` rounds than usual.

        Raises
        ------
        ImplausibleFigures
            On all ranks: in every try, one of them took much longer in one half of the rounds than in the other.
        """
        disagreement = ""
        for _ in range(_TRIES):
            times = self._times(list(runs.values()), times_more)
            disagreement = self._disagreement([*runs], times, nbytes)
            if not disagreement:
                return [float(seconds) for seconds in numpy.median(times, axis=0)]
        raise ImplausibleFigures(disagreement)

    def _times(self, runs: Sequence[Run], times_more: int) -> Any:
        """Return the seconds of a call by round and run."""
        once = self.slowest([self._round(run, 1) for run in runs])
        once = numpy.minimum(once, self.slowest([self._round(run, 1) for run in runs]))
        calls = [max(1, min(_MOST_CALLS, int(_ROUND_SECONDS / max(seconds, 1e-9)))) for seconds in once]
        rounds = self._rounds if once.sum() < _QUICK_SECONDS else max(_LEAST_ROUNDS, self._rounds // 2)
        pairs = list(zip(runs, calls, strict=True))
        return self.slowest([[self._round(*pair) for pair in pairs] for _ in range(rounds * times_more)])

    def _disagreement(self, names: Sequence[str], times: Any, nbytes: int) -> str:
        """Return which run took much longer in one half of the rounds than in the other; empty if none did."""
        half = len(times) // 2
        if half < _HALF_ROUNDS:
            return ""
        quicker = [numpy.quantile(part, _QUICKER, axis=0) for part in (times[:half], times[half:])]
        for name, *halves in zip(names, *quicker, strict=True):
            if max(halves) > plausibility.FACTOR * min(halves):
                took = " and ".join(f"{1e6 * seconds:.1f} us" for seconds in halves)
                return f"{name} of {nbytes} bytes took {took} in the two halves of its measurement"
        return ""

    def _round(self, run: Run, calls: int) -> float:
        self._communicator.barrier("barrier of a calibration")
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls


def _measured(
    stopwatch: Stopwatch, what: str, sizes: Sequence[int], budget_seconds: float, make: Callable[[int], Run]
) -> list[tuple[float, float]]:
    """Return (bytes, seconds) of ascending sizes, two at least, as far as the budget goes.  Collective."""
    points: list[tuple[float, float]] = []
    start, last = stopwatch.elapsed(), 0.0
    for nbytes in sizes:
        before = stopwatch.elapsed()
        if len(points) >= 2 and before - start + _GROWTH * last > budget_seconds:
            break
        (seconds,) = stopwatch.compare({what: make(nbytes)}, nbytes)
        points.append((float(nbytes), seconds))
        last = stopwatch.elapsed() - before
    return points


# -- what is measured -------------------------------------------------------------------------------------------------


def _all_reduce(communicator: Communicator, way: Way, source: Any, work: Any) -> Run:
    """Return one all-reduce as a training loop makes it: packed, by what was bound before."""
    small = communicator.small(work.shape, work.dtype, "sum") if way.algorithm == "shared_memory" else None
    call = communicator.call(f"calibration of {way.label}", [("", work.dtype, work.shape)])
    if small is not None:
        bound: Bound = _InOneStep(communicator, call, small, work)
        return lambda: bound(source)
    pieces = Pieces((0, work.size))
    reduction = communicator.reduction(way, pieces, pieces, (work.dtype,) * 3, "sum")
    if reduction is not None:
        bound = Once(communicator, call, lambda watch: reduction.run(watch, (source,), (work,)))
        return lambda: bound(None)
    replay = communicator.bind(work, "sum", way.algorithm)

    def move(watch: Watch) -> None:
        numpy.copyto(work, source)
        replay(watch)

    bound = Once(communicator, call, move)
    return lambda: bound(None)


class _InOneStep(Bound):
    """The all-reduce in one step through shared memory."""

    def __init__(self, communicator: Communicator, call: Call, small: SegmentAllReduce, work: Any) -> None:
        super().__init__(communicator, call)
        self._small, self._work, self._control = small, work, communicator.control

    def fill(self, source: Any) -> bool:
        numpy.copyto(self._small.slot(self._control.call + 1), source)
        return True

    def move(self, watch: Watch, source: Any) -> None:
        self._small.combine(watch, self._work)


def _addition(nbytes: int) -> Run:
    first, second = _zeros(nbytes), _zeros(nbytes)
    return lambda: numpy.add(first, second, out=first)


#: The rank to send to and the one to receive from; None for a rank that takes no part.
Circle = tuple[int, int] | None


def _around_node(topology: Topology, rank: int) -> Circle:
    """Return the neighbours on this rank's node."""
    return _neighbours(topology.ranks_of_node[topology.node_of[rank]], rank)


def _around_nodes(topology: Topology, rank: int, everyone: bool = False) -> Circle:
    """Return the ranks of the same local rank on the nodes beside this one; for one rank a node, or for `everyone`."""
    local = topology.local_rank_of[rank]
    if local >= (min(topology.local_size_of) if everyone else 1):
        return None
    return _neighbours([ranks[local] for ranks in topology.ranks_of_node], rank)


def _neighbours(members: Sequence[int], rank: int) -> Circle:
    index = members.index(rank)
    return None if len(members) == 1 else (members[(index + 1) % len(members)], members[index - 1])


def _exchange(communicator: Communicator, circle: Circle) -> Callable[[int], Run]:
    """Return what makes a message to one side, while one comes from the other."""
    transport, watch = communicator.transport, communicator.control.watch

    def make(nbytes: int) -> Run:
        if circle is None:
            return _nothing
        sent, received = _bytes(nbytes), _bytes(nbytes)
        target, source = circle

        def run() -> None:
            pendings = [transport.receive(received, source), transport.send(sent, target)]
            transport.wait(pendings, watch("message of a calibration"))

        return run

    return make


def _one_way(communicator: Communicator, circle: Circle, topology: Topology, side: str) -> Callable[[int], Run]:
    """Return what makes a message forth and half as many back: between pairs of neighbours, one message at a time."""
    transport, watch = communicator.transport, communicator.control.watch
    places, sizes = (topology.local_rank_of, topology.local_size_of) if side == "intra" else (topology.node_of, ())
    place = places[communicator.rank]
    length = sizes[communicator.rank] if sizes else topology.node_count

    def make(nbytes: int) -> Run:
        if circle is None or (place ^ 1) >= length:  # the last of an odd number has no partner
            return _nothing
        buffer, (right, left) = _bytes(nbytes), circle
        turns = [False]

        def run() -> None:
            # the same way in even calls, back in odd ones: who has sent goes on, and waits in the next call
            forth, turns[0] = turns[0] == bool(place & 1), not turns[0]
            peer = left if place & 1 else right
            pending = transport.send(buffer, peer) if forth else transport.receive(buffer, peer)
            transport.wait([pending], watch("message of a calibration"))

        return run

    return make


def _links(stopwatch: Stopwatch, communicator: Communicator, longest: tuple[float, float]) -> int | None:
    """Return how many messages can leave a node at full speed; None for as many as there are ranks."""
    topology = communicator.topology
    most = min(topology.local_size_of)
    if most == 1:
        return None
    nbytes, alone = longest
    together = _exchange(communicator, _around_nodes(topology, communicator.rank, everyone=True))
    (seconds,) = stopwatch.compare({"an exchange of all ranks": together(int(nbytes))}, int(nbytes))
    links = max(1, min(most, round(most * alone / seconds)))
    return links if links < max(topology.local_size_of) else None


def _nothing() -> None:
    """A rank that takes no part."""


def _sizes(largest_bytes: int) -> list[int]:
    """Return the sizes of all-reduces, in bytes: short ones are further apart."""
    sizes, nbytes = [], 4
    while nbytes <= largest_bytes:
        sizes.append(nbytes)
        nbytes *= _STEP if nbytes < _FINE_BYTES else _FINE_STEP
    return sizes


def _zeros(nbytes: int) -> Any:
    """Return float32 values in memory that is there, and not one page of zeros seen many times."""
    return numpy.full(max(1, nbytes // 4), 0.0, dtype=numpy.float32)


def _bytes(nbytes: int) -> Any:
    return numpy.full(nbytes, 0, dtype=numpy.uint8)
