"""Measure what all-reduces cost the ranks of a world: rounds of schedules by the executor, then whole all-reduces.

All is measured through the world's own transport and communicator.  Contenders take turns; of a turn the slowest rank
counts, of the turns the quicker quarter: other programs make turns slower, never faster.  If half of the turns took
much longer than that, all is measured again.  Every decision follows from figures that all ranks share, so that all
make the same one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from mpidist.collectives.call import Call
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.persistent import Once
from mpidist.collectives.ways import selection
from mpidist.collectives.ways.executor import Executor
from mpidist.collectives.ways.pieces import Pieces
from mpidist.collectives.ways.selection import LONG_BYTES, SEGMENT_BYTES, SEGMENTED, Way
from mpidist.runtime.control import Watch
from mpidist.schedules.cost import CostModel, Level
from mpidist.schedules.figures import FACTOR, Figures, ImplausibleFigures
from mpidist.schedules.rounds import NOBODY, Round, Schedule

#: Seconds that a calibration may take, about, and the longest all-reduce in it: beyond it seconds grow with the bytes.
BUDGET_SECONDS, LARGEST_BYTES = 50.0, 1 << 28

#: Sizes of segments in bytes that are compared, as far as a node's memory has room for them.
SEGMENT_SIZES = (1 << 18, 1 << 19, 1 << 20, 1 << 21)

#: How many turns there are; half as many, and none that does not count, where one of all takes longer than that.
TURNS, _QUICK_SECONDS = 15, 0.05

#: How long a turn is at least, in seconds and at most in calls.
_TURN_SECONDS, _MOST_CALLS = 3e-4, 25

#: Which part of the turns is taken to be undisturbed, and how often all is measured until it hardly differs from half.
_UNDISTURBED, _TRIES = 0.25, 3

#: Sizes in bytes of the messages of a calibration, multiples of 4.
_MESSAGES = (4, 1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 23)

#: From one size of all-reduces to the next: the factor, and a smaller one from where choices begin to differ.
_STEP, _FINE_STEP, _FINE_BYTES = 16, 4, 1 << 14

#: From one size to the next seconds are expected to grow by so much.
_GROWTH = 4

#: How many times the best one's seconds are too far behind for longer sizes, and from how many bytes on.
_FAR, _FAR_BYTES = 3.0, 1 << 18

#: What part of the budget the levels may take.
_LEVEL_SHARE = 0.25

#: Does once what is measured.
Run = Callable[[], object]


def calibrate(
    communicator: Communicator,
    budget_seconds: float = BUDGET_SECONDS,
    largest_bytes: int = LARGEST_BYTES,
    turns: int = TURNS,
) -> Figures:
    """Measure two ranks or more; ImplausibleFigures on all of them where they are disturbed.  Collective.

    The first, short sizes are measured in any case.  Messages are a quarter of the longest all-reduce at most.
    """
    stopwatch = Stopwatch(communicator, turns)
    sizes = [nbytes for nbytes in _MESSAGES if nbytes <= largest_bytes // 4]
    levels = Levels(stopwatch, sizes[-1])
    for nbytes in _affordable(stopwatch, sizes, _LEVEL_SHARE * budget_seconds, least=2):
        levels.measure([nbytes], {}).check()
    points, segments = _all_reduces(stopwatch, budget_seconds, largest_bytes)
    best = best_segments(segments)
    if best is not None:  # the choice among algorithms goes by the segments of later launches
        points["shared_memory"] = {**points["shared_memory"], **segments[best]}
    listed = {name: tuple(sorted(by_size.items())) for name, by_size in points.items()}
    return Figures(levels.model(), listed, {size: tuple(by.items()) for size, by in segments.items()}, best)


#: Seconds by bytes.
_Seconds = dict[float, float]


def _all_reduces(
    stopwatch: Stopwatch, budget_seconds: float, largest_bytes: int
) -> tuple[dict[str, _Seconds], dict[int, _Seconds]]:
    """Return the seconds of all-reduces by algorithm, and of those through memory by size of segments.  Collective."""
    communicator = stopwatch.communicator
    names = selection.eligible(communicator.facts())
    contenders = every = [Way(name, SEGMENT_BYTES if name in SEGMENTED else 0) for name in names]
    shared, cuts = Way("shared_memory", SEGMENT_BYTES), _segment_sizes(communicator)
    seconds: dict[Way, _Seconds] = defaultdict(dict)
    for nbytes in _affordable(stopwatch, _sizes(largest_bytes), budget_seconds, least=1):
        source, work = (numpy.full(nbytes // 4, 0.0, dtype=numpy.float32) for _ in range(2))
        is_cut = nbytes >= LONG_BYTES and shared in contenders
        ways = dict.fromkeys([*contenders, *(Way(shared.algorithm, size) for size in cuts if is_cut)])
        runs = {f"{way.label} of {nbytes} bytes": _all_reduce(communicator, way, source, work) for way in ways}
        for way, taken in zip(ways, stopwatch.compare(runs).check(), strict=True):
            seconds[way][float(nbytes)] = taken
        if nbytes >= _FAR_BYTES:
            limit = _FAR * min(seconds[way][float(nbytes)] for way in ways)
            contenders = [way for way in contenders if seconds[way][float(nbytes)] <= limit]
    segments = {
        size: {n: t for n, t in seconds[Way(shared.algorithm, size)].items() if n >= LONG_BYTES} for size in cuts
    }
    return {way.algorithm: seconds[way] for way in every}, {
        size: by_size for size, by_size in segments.items() if by_size
    }


def _segment_sizes(communicator: Communicator) -> list[int]:
    """Return the sizes of segments that a node's memory has room for; none where there are no two (Local)."""
    if "shared_memory" not in selection.eligible(communicator.facts()) or communicator.segments is None:
        return []
    sizes = [size for size in SEGMENT_SIZES if size <= communicator.segments.room]
    return sizes if SEGMENT_BYTES in sizes and len(sizes) > 1 else []


def best_segments(segments: Mapping[int, _Seconds]) -> int | None:
    """Return the size that is clearly quicker than the default over all sizes of buffers; None if none is (Local)."""
    if SEGMENT_BYTES not in segments:
        return None
    means = {size: numpy.mean(numpy.log([*by_size.values()])) for size, by_size in segments.items()}
    best = min(means, key=lambda size: (means[size], size))
    return best if numpy.exp(means[best] - means[SEGMENT_BYTES]) <= selection.GAIN else None


def _all_reduce(communicator: Communicator, way: Way, source: Any, work: Any) -> Run:
    """Return one all-reduce as a training loop makes it: packed, by what was bound before."""
    if way.algorithm == "shared_memory" and communicator.small(work.shape, work.dtype, "sum") is not None:
        return lambda: communicator.all_reduce(work, algorithm=way.algorithm)
    pieces = Pieces((0, work.size))
    reduction = communicator.reduction(way, pieces, pieces, (work.dtype,) * 3, "sum")

    def move(watch: Watch) -> None:
        reduction.run(watch, (source,), (work,))

    bound = Once(communicator, Call(f"calibration of {way.label}", [("", work.dtype, work.shape)]), move)
    return lambda: bound(None)


def _sizes(largest_bytes: int) -> list[int]:
    """Return the sizes of all-reduces, in bytes: short ones are further apart."""
    sizes = [4]
    while (nbytes := sizes[-1] * (_STEP if sizes[-1] < _FINE_BYTES else _FINE_STEP)) <= largest_bytes:
        sizes.append(nbytes)
    return sizes


def _affordable(stopwatch: Stopwatch, sizes: Sequence[int], budget_seconds: float, least: int) -> Iterable[int]:
    """Yield ascending sizes, `least` at least, until the next one would exceed the budget.  Collective."""
    before = stopwatch.elapsed()
    for place, nbytes in enumerate(sizes):
        now = stopwatch.elapsed()
        if place >= least and now + _GROWTH * (now - before) > budget_seconds:
            break
        before = now
        yield nbytes


# -- time -------------------------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """What contenders took: seconds by name, and how much longer half of the turns of the least steady one took."""

    seconds: dict[str, float]
    unsteady: float
    name: str

    def check(self) -> list[float]:
        """Return the seconds; ImplausibleFigures if the measurement was disturbed."""
        if self.unsteady > FACTOR:
            times = f"{self.unsteady:.1f} times as long in half of its turns as in the quickest quarter"
            raise ImplausibleFigures(f"{self.name} took {times}")
        return [*self.seconds.values()]


class Stopwatch:
    """Times that all ranks agree on: those of the slowest one; `turns` is how often contenders take turns."""

    def __init__(self, communicator: Communicator, turns: int = TURNS) -> None:
        self.communicator = communicator
        self._turns = turns
        self._start = time.perf_counter()

    def slowest(self, values: Any) -> Any:
        """Return the greatest of each of the values over all ranks, shape as given, float64.  Collective."""
        greatest = numpy.array(values, dtype=numpy.float64)
        self.communicator.all_reduce(greatest, "max", algorithm=selection.PINNED)
        return greatest

    def elapsed(self) -> float:
        """Return the seconds since the start.  Collective."""
        return float(self.slowest([time.perf_counter() - self._start])[0])

    def compare(self, runs: Mapping[str, Run], steady: float = FACTOR) -> Times:
        """Return what one call of each takes: the first try within `steady`, else the steadiest.  Collective."""
        tries: list[Times] = []
        while not tries or (tries[-1].unsteady > steady and len(tries) < _TRIES):
            quarter, half = numpy.quantile(self._times([*runs.values()]), (_UNDISTURBED, 0.5), axis=0)
            ratio, name = max(zip((half / numpy.maximum(quarter, 1e-9)).tolist(), runs, strict=True))
            tries.append(Times(dict(zip(runs, quarter.tolist(), strict=True)), ratio, name))
        return min(tries, key=lambda taken: taken.unsteady)

    def _times(self, runs: Sequence[Run]) -> Any:
        """Return the seconds of a call by turn and run."""
        once = self.slowest([[self._turn(run, 1) for run in runs] for _ in range(2)]).min(axis=0)
        calls = [max(1, min(_MOST_CALLS, int(_TURN_SECONDS / max(seconds, 1e-9)))) for seconds in once]
        is_quick = once.sum() < _QUICK_SECONDS
        pairs = list(zip(runs, calls, strict=True))
        turns = range(self._turns if is_quick else (self._turns + 1) // 2)
        return self.slowest([[self._turn(*pair, is_quick) for pair in pairs] for _ in turns])

    def _turn(self, run: Run, calls: int, warm: bool = False) -> float:
        """Return the seconds of one call; a `warm` turn begins with one that does not count: it fills the caches."""
        if warm:
            run()
        self.communicator.barrier("barrier of a calibration")
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls


# -- levels -----------------------------------------------------------------------------------------------------------


class Levels:
    """The levels of the cost model, measured by rounds that the executor plays, in turn with other runs.

    What is sent was received, or reduced, just before: what never changes would be read from caches for nothing.  All
    work in the same memory, as the pages that a buffer lies on make a difference too.  Where all ranks are on one node,
    or each is on a node of its own, there is one level only, which stands for both.
    """

    def __init__(self, stopwatch: Stopwatch, longest_bytes: int) -> None:
        communicator = self._communicator = stopwatch.communicator
        self._stopwatch = stopwatch
        self._memory = numpy.full(2 * longest_bytes, 0, dtype=numpy.uint8)
        nodes = communicator.topology.ranks_of_node
        self._most = min(map(len, nodes))
        circles = {_INSIDE: nodes, _BETWEEN: [[ranks[0] for ranks in nodes]]}
        self._rounds = {
            f"{kind} {where}": rounds
            for where, members in circles.items()
            if max(map(len, members)) > 1
            for kind, rounds in _kinds(members, communicator.rank).items()
        }
        if len(nodes) > 1 and self._most > 1:
            every = [[ranks[place] for ranks in nodes] for place in range(self._most)]
            self._rounds[_TOGETHER] = _kinds(every, communicator.rank)["exchange"]
        self._points: dict[str, dict[int, float]] = {name: {} for name in self._rounds}
        self._call_seconds = float("inf")

    def measure(self, sizes: Sequence[int], others: Mapping[str, Run], steady: float = FACTOR) -> Times:
        """Measure messages of some sizes, multiples of 4, in turn with other runs; return their times.  Collective."""
        runs = {_CALL: self._playing([], 1, 4)}
        runs |= {
            f"{name} of {nbytes} bytes": self._playing(rounds, 2, nbytes)
            for name, rounds in self._rounds.items()
            for nbytes in sizes
        }
        taken = self._stopwatch.compare({**runs, **others}, steady)
        call = taken.seconds[_CALL]
        self._call_seconds = min(self._call_seconds, call)
        for name, by_size in self._points.items():
            for nbytes in sizes:
                by_size[nbytes] = max(0.0, taken.seconds[f"{name} of {nbytes} bytes"] - call) / 2
        return taken._replace(seconds={name: taken.seconds[name] for name in others})

    def model(self) -> CostModel:
        """Return the model of what was measured so far; the same on all ranks (Local)."""
        levels = [self._level(where) for where in (_INSIDE, _BETWEEN) if f"exchange {where}" in self._points]
        return CostModel(levels[0], levels[-1], self._links(), self._call_seconds)

    def play(self, schedule: Schedule, nbytes: int) -> Run:
        """Return what plays a schedule once (Local)."""
        buffer, watch = self._memory[:nbytes].view(numpy.float32), self._communicator.control.watch
        executor: Any = Executor(schedule, self._communicator.transport, buffer)
        return lambda: executor.run(watch(f"{schedule.name}, to be measured"))

    def _playing(self, rounds: Sequence[Round], chunks: int, nbytes: int) -> Run:
        schedule = Schedule("rounds", "all_reduce", lambda size: chunks, lambda rank, size: iter(rounds))
        return self.play(schedule, chunks * nbytes)

    def _level(self, where: str) -> Level:
        """Return the level through all points; reducing takes what a round takes more with it than without."""
        points = {kind: self._points[f"{kind} {where}"] for kind in _KINDS}
        for kind, without in _KINDS.items():
            if without:
                points[kind] = {size: max(0.0, taken - points[without][size]) for size, taken in points[kind].items()}
        return Level.measured(
            *(sorted((float(size), taken) for size, taken in points[kind].items()) for kind in _KINDS)
        )

    def _links(self) -> int | None:
        """Return how many messages can leave a node at full speed; None for as many as there are ranks."""
        together = self._points.get(_TOGETHER)
        if not together:
            return None
        longest = max(together)
        alone = self._points[f"exchange {_BETWEEN}"][longest]
        links = max(1, min(self._most, round(self._most * alone / max(together[longest], 1e-9))))
        return links if links < max(self._communicator.topology.local_size_of) else None


#: Names of what is measured: where rounds are played, those of all ranks of a node at once, and no round at all.
_INSIDE, _BETWEEN = "inside a node", "between nodes"
_TOGETHER, _CALL = f"exchange of all ranks {_BETWEEN}", "a schedule without rounds"

#: The rounds of a level, in the order of `Level.measured`; those that reduce, with what they are without.
_KINDS = {
    "exchange": "",
    "message": "",
    "reduction": "exchange",
    "one-way reduction": "message",
    "reduction in place": "exchange",
}


def _kinds(circles: Sequence[Sequence[int]], rank: int) -> dict[str, list[Round]]:
    """Return two rounds of each kind for a rank; idle ones for a rank in no circle, or alone in one."""
    members = next((members for members in circles if rank in members), [rank])
    place = members.index(rank)
    partner = members[place ^ 1] if place ^ 1 < len(members) else NOBODY
    after, before = (members[(place + 1) % len(members)], members[place - 1]) if len(members) > 1 else (NOBODY, NOBODY)

    def swap(reduce: bool) -> list[Round]:  # what came into one half is sent on
        return [Round(after, half, 1, before, 1 - half, 1, reduce) for half in (0, 1)]

    def there_and_back(reduce: bool) -> list[Round]:
        sends, receives = (partner, 0, 1, NOBODY, 0, 1, reduce), (NOBODY, 0, 1, partner, 0, 1, reduce)
        return [Round(*turn) for turn in ((sends, receives) if rank < partner else (receives, sends))]

    in_place = [Round(after, 0, 1, before, 0, 1, True)] * 2
    return dict(
        zip(_KINDS, (swap(False), there_and_back(False), swap(True), there_and_back(True), in_place), strict=True)
    )
