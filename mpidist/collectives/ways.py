"""The ways to reduce tensors of one dtype over the ranks of a world, and which of them are worth trying.

A way that goes through the memory of one node, or through two levels, reduces tensors where they lie (`reduction`).
Others are schedules over messages and work on a packed buffer: `Communicator.bind` runs those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpidist.collectives import selection
from mpidist.collectives.bucket_reduction import BucketReduction, Piped
from mpidist.collectives.call import Call
from mpidist.collectives.direct_sum import DirectSum
from mpidist.collectives.lanes import Lanes
from mpidist.collectives.lookout import Lookout
from mpidist.collectives.pieces import Pieces
from mpidist.collectives.remote_sum import RemoteSum
from mpidist.collectives.segment_pipeline import SegmentPipeline
from mpidist.collectives.trial import Trial
from mpidist.collectives.two_level import TwoLevel
from mpidist.transports.remote_memory import RemoteMemory
from mpidist.transports.shared import SharedSegments

#: Size of a segment in bytes, and the sizes that are tried: which is best depends on what caches the cores share.
SEGMENT_BYTES, _SEGMENT_SIZES = 1 << 20, (1 << 20, 1 << 19, 1 << 18)

#: From this size in bytes on, ways are tried in the first steps.  Below, segments are so long: a unit of one or two MiB
#: in a single one would be out of cache when it is added.
TRIAL_BYTES, _UNTRIED_BYTES = selection.REMOTE_BYTES, 1 << 19

#: So many calls are watched together; fewer from so many bytes on, where each takes long.
_WINDOW, _LONG_WINDOW, _LONG_BYTES = 16, 4, 1 << 25


class Way(NamedTuple):
    """An algorithm, and the bytes of a segment where it has segments, else 0."""

    algorithm: str
    segment_bytes: int = 0

    @property
    def label(self) -> str:
        """What ranks must have in common: those that cut differently would read what is not there."""
        size = self.segment_bytes
        return f"{self.algorithm} in segments of {size >> 10} KiB" if size else self.algorithm


#: The sizes of segments to try; all add in the same order, `remote_read` in the same as `shared_memory`.
_VARIANTS = {"shared_memory": _SEGMENT_SIZES, "remote_read": (SEGMENT_BYTES,), "two_level": (SEGMENT_BYTES,)}

#: The algorithms that work on segments of tensors, which need not be packed.
SEGMENTED = tuple(_VARIANTS)


#: What contests have in common of which one is enough: about the same size in bytes, and the same ways.
Kind = tuple[int, tuple[Way, ...]]


class NodeMemory(NamedTuple):
    """What the ranks of a node see of each other's memory.

    Attributes
    ----------
    rank, size : int
        Among the ranks of the node.
    segments : SharedSegments or None
    remote : RemoteMemory or None
    lanes : Lanes or None
        What several nodes have instead.
    """

    rank: int
    size: int
    segments: SharedSegments | None
    remote: RemoteMemory | None
    lanes: Lanes | None

    def reduction(
        self,
        way: Way,
        sources: Pieces,
        targets: Pieces,
        dtypes: Sequence[Any],
        op: str,
        scale: float | None = None,
        first: int = 0,
        in_shares: bool = False,
        contiguous: bool = True,
    ) -> BucketReduction | None:
        """Return the reduction of a bucket by a way through memory, None for ways that need messages; Local.

        Parameters
        ----------
        way : Way
        sources, targets : Pieces
        dtypes : sequence of three dtypes
            Of the sources, of what is added, and of the targets.
        op : str
        scale : float, optional
        first : int
            How many addresses other buckets of the call have in a rank's table.
        in_shares : bool
            Whether shares will be transformed: each element on one rank of the node.
        contiguous : bool
            Whether all sources will be: those of `remote_read` must.
        """
        segments, (source, work, result) = self.segments, dtypes
        if not way.segment_bytes or sources.elements == 0:
            return None
        if way.algorithm == "two_level" and self.lanes is not None:
            return Piped(TwoLevel(self.lanes, sources.elements, work, op, scale), sources, targets)
        if segments is None:
            return None
        plain = source == work == result
        segment_bytes = min(way.segment_bytes, segments.place_bytes)
        if way.algorithm == "remote_read" and plain and contiguous and self.remote is not None:
            entries = first + RemoteSum.entries(sources, targets)
            if entries * 8 <= segments.segment_bytes:
                shape = (self.rank, sources, targets, work, op, scale, segment_bytes, first)
                return RemoteSum(self.remote, segments, *shape)
        if self.size == 2 and plain and len(targets.offsets) == 2 and not in_shares:
            return DirectSum(segments, self.rank, sources, work, op, scale, segment_bytes)
        pipeline = SegmentPipeline(segments, self.rank, sources.elements, work, op, scale, segment_bytes)
        return Piped(pipeline, sources, targets)


class Contest:
    """Some ways that take turns until the quickest is known; from then on it is taken, and the others now and then.

    It goes on with every call of its kind, whatever list it is of and however that lies in memory: ranks may differ in
    the latter, and must come to the same way.  So times count by the byte.

    Where the cores come into several modes in turn, each mode has its own times and its own choice.  The mode is known
    only when a call has begun: what is needed before that is for the ways of all modes.

    Parameters
    ----------
    ways : sequence of Way
    nbytes : int
        About how many bytes a call has.
    modes : int
        How many modes there are.

    Attributes
    ----------
    ways : list of Way
    modes : int
    mode : int
        The one of this call, below `modes`; to be set alike on all ranks.
    """

    def __init__(self, ways: Sequence[Way], nbytes: int, modes: int = 1) -> None:
        self._window = _LONG_WINDOW if nbytes >= _LONG_BYTES else _WINDOW
        self.ways = list(ways)
        self.modes = modes if len(ways) > 1 else 1
        self.mode = 0
        self._stages: list[Trial | Lookout] = [Trial(len(ways)) for _ in range(modes if len(ways) > 1 else 0)]

    @property
    def at(self) -> int:
        """Which way to take now, in this mode."""
        return self._stages[self.mode].way if self._stages else 0

    @property
    def turns(self) -> tuple[int, ...]:
        """Which ways the next call may take, each once."""
        return tuple(dict.fromkeys(stage.way for stage in self._stages)) if self._stages else (0,)

    @property
    def is_open(self) -> bool:
        """Whether ways take turns still, in this mode."""
        return bool(self._stages) and isinstance(self._stages[self.mode], Trial)

    @property
    def is_due(self) -> bool:
        """Whether ranks must compare their times before the next call: at the same one on all."""
        return bool(self._stages) and self._stages[self.mode].is_over

    def record(self, seconds: float, nbytes: int) -> None:
        """Take the time of the way that was taken for so many bytes, and go on to the next.  Local."""
        if self._stages:
            self._stages[self.mode].record(seconds / nbytes)

    def times(self) -> Any:
        """Return this rank's times of a byte to compare, array of float64.  Local."""
        return self._stages[self.mode].seconds

    def settle(self, times: Any) -> None:
        """Choose by the greatest times of all ranks, the same on all.  Local."""
        stage = self._stages[self.mode]
        if isinstance(stage, Lookout):
            stage.judge(times)
        else:
            self._stages[self.mode] = Lookout(times, self._window)
            for mode, other in enumerate(self._stages):  # every way has been used: in other modes a short trial will do
                if isinstance(other, Trial):
                    self._stages[mode] = Trial(len(self.ways), Trial.FEW_ROUNDS)


class Calls:
    """The calls that a contest's turns stand for: what ranks must have in common is every way that may be taken.

    Parameters
    ----------
    contest : Contest
    describe : callable
        ``describe(label)`` returns the call by a way, or ways, of that label.
    """

    def __init__(self, contest: Contest, describe: Callable[[str], Call]) -> None:
        self._ways, self._describe = contest.ways, describe
        self._calls: dict[tuple[int, ...], Call] = {}

    def __getitem__(self, turns: tuple[int, ...]) -> Call:
        """Return the call for such turns.  Local."""
        if turns not in self._calls:
            self._calls[turns] = self._describe(" or ".join(self._ways[at].label for at in turns))
        return self._calls[turns]


class Ways:
    """Which ways to try, and what came of trying; the same on all ranks.

    Parameters
    ----------
    size : int
        Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._contests: dict[Kind, Contest] = {}

    def worth_trying(self, nbytes: int, asked: str, facts: selection.Facts) -> list[Way]:
        """Return the ways for a unit of `nbytes`, the first one being chosen where none is tried; Local.

        Parameters
        ----------
        nbytes : int
        asked : str
            An explicit choice is the only way.
        facts : Facts
        """
        chosen = selection.asked_for(nbytes, asked, facts)
        if nbytes < TRIAL_BYTES or asked not in (selection.AUTO, selection.PINNED):
            size = _UNTRIED_BYTES if nbytes < TRIAL_BYTES else SEGMENT_BYTES
            return [Way(chosen, size if chosen in _VARIANTS else 0)]
        names = [chosen]
        if self._size == 2:  # all algorithms add the same two numbers; of more they add them in different orders
            others = ("ring",) if facts.choices is None else selection.near(nbytes, facts)
            # MPI's own least and greatest may treat NaN in another way.
            names += [name for name in others if name not in (chosen, "native")]
        if "shared_memory" in names and facts.has_remote:
            names = [name for name in names if name != "remote_read"] + ["remote_read"]
        return [Way(name, size) for name in names for size in _VARIANTS.get(name, (0,))]

    def contest(self, ways: Sequence[Way], nbytes: int, modes: int = 1) -> Contest:
        """Return the contest of these ways for a unit of `nbytes`, one for all units of about that size.  Local."""
        kind = nbytes.bit_length(), tuple(ways)
        if kind not in self._contests:
            self._contests[kind] = Contest(ways, nbytes, modes)
        return self._contests[kind]
