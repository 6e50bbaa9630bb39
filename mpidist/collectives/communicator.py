"""Collectives by name over the ranks of a world: every call numbered and checked, on whichever algorithm is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpidist import arrays
from mpidist.collectives import plain, selection
from mpidist.collectives.bucket_reduction import BucketReduction
from mpidist.collectives.buffers import bind_buffer
from mpidist.collectives.call import Call
from mpidist.collectives.call_check import CallCheck
from mpidist.collectives.chooser import Chooser
from mpidist.collectives.header import Header
from mpidist.collectives.lanes import Lanes
from mpidist.collectives.messages import Messages, Replay
from mpidist.collectives.node_memory import NodeMemory
from mpidist.collectives.persistent import Bound, Once, Started
from mpidist.collectives.pieces import Pieces
from mpidist.collectives.scratch import Scratch
from mpidist.collectives.selection import Choices, Facts, Way
from mpidist.collectives.shared_memory import SegmentAllReduce
from mpidist.runtime.control import Watch
from mpidist.runtime.trace import Trace
from mpidist.schedules.table import algorithm as schedule_of
from mpidist.transports import World

#: How many calls of `Communicator.all_reduce` are kept ready, by shape: shapes may be new every time.
_KEPT_CALLS = 256


class Communicator:
    """The collectives of one world, for one of its ranks.

    Parameters
    ----------
    world : World
    whole : Communicator, optional
        Of the world that this one is a part of, which numbers and compares the calls.

    Attributes
    ----------
    rank, size : int
    topology : Topology
    control : ControlChannel
    transport : Transport
    segments : SharedSegments or None
        Of all ranks, where they are on one node.
    begin : callable
        See `CallCheck.begin`.
    started : Started
        The collectives of this rank that were started and not carried out yet.
    trace : Trace or None
        Where events are noted; set by `mpidist.world` if ``MPIDIST_TRACE`` asks for it.
    load_choices : callable or None
        ``load_choices(watch)`` returns what `mpidist tune` stored of these ranks, within a begun call; set by
        `mpidist.world`, called once.  Collective.
    """

    def __init__(self, world: World, whole: Communicator | None = None) -> None:
        self.transport = world.transport
        self.topology = world.topology
        self.control = world.control
        self.rank = world.transport.rank
        self.size = world.transport.size
        self.trace: Trace | None = None
        self.load_choices: Callable[[Watch], Choices | None] | None = None
        self.in_shared_memory: dict[int, Any] = {}
        self.started: Started = Started() if whole is None else whole.started
        self._calls: dict[Any, Bound] = {}
        lanes = _lanes(world)
        # Short all-reduces through segments are for whole worlds only: their flag barrier is the call's own.
        self.segments = world.segments if self.topology.node_count == 1 and self.size > 1 else None
        check = CallCheck(world, _header(world, lanes))
        self.begin: Callable[..., Watch] = check.begin if whole is None else whole.begin
        self._miss: Callable[[BaseException], None] = check.miss if whole is None else whole.miss
        scratch = Scratch()
        self._memory = NodeMemory(self.control.board_index, self.segments, lanes, scratch)
        self._messages = Messages(self.transport, self.topology, scratch)
        self._chooser = self._make_chooser(lanes)

    # -- what an all-reduce is bound to -------------------------------------------------------------------------------

    def _make_chooser(self, lanes: Lanes | None) -> Chooser:
        segments = self.segments
        facts = Facts(self.topology, tuple(self.transport.native), segments is not None or lanes is not None)
        is_short = segments is not None and segments.room != segments.place_bytes
        return Chooser(facts, self.control.settings, segments.room if segments is not None and is_short else None)

    def prepare(self, call: Call, algorithm: str | None = None, timeout_seconds: float | None = None) -> None:
        """Load what `mpidist tune` stored, before the first `call` that may be chosen by it.

        Collective: every rank calls it in the same order, before it binds an all-reduce.  Errors as for `Bound`.
        """
        load = self.load_choices
        if load is None or self._chooser.asked(algorithm) != selection.AUTO:
            return
        self._chooser.choices = Once(self, call, load)(None, timeout_seconds)
        self.load_choices = None

    def traced(self, kind: int, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn`, with an event around each of its calls if there is a trace.  Local."""
        return fn if self.trace is None else self.trace.wrapped(kind, fn)

    def observed(self, reduction: BucketReduction) -> BucketReduction:
        """Return a reduction that was made elsewhere; a trace puts another method in this one's place.  Local."""
        return reduction

    def facts(self, has_segments: bool = True) -> Facts:
        """Return what the choice of an algorithm depends on.  Local."""
        return self._chooser.facts(has_segments)

    def way(self, nbytes: int, algorithm: str | None, on_host: bool = True) -> Way:
        """Return the way of a unit of `nbytes`; an explicit choice wins.  Local.

        Raises
        ------
        ValueError
            There is no such algorithm here.
        """
        return self._chooser.way(nbytes, algorithm, on_host)

    def bytes_per_pack(self, algorithm: str | None) -> int:
        """Return from what size in bytes on a pack is closed when the user leaves it to us.  Local."""
        return self._chooser.bytes_per_pack(algorithm)

    def small(self, shape: tuple[int, ...], dtype: Any, op: str) -> SegmentAllReduce | None:
        """Return the all-reduce in one step through shared memory, if it is the one for such arrays.  Local."""
        return self._memory.small(shape, dtype, op)

    def reduction(
        self,
        way: Way,
        sources: Pieces,
        targets: Pieces,
        dtypes: Sequence[Any],
        op: str,
        scale: float | None = None,
    ) -> BucketReduction | None:
        """Return the reduction of tensors where they lie, None for a way that needs them packed and `bind`.  Local.

        Parameters as for `NodeMemory.reduction`.
        """
        return self._memory.reduction(way, sources, targets, dtypes, op, scale)

    def bind(self, buffer: Any, op: str, algorithm: str | None = None, is_example: bool = False) -> Replay:
        """Return what reduces `buffer` in place every time it is called with the watch of a begun call.  Local.

        Parameters
        ----------
        buffer : array, shape (n,), contiguous, in a dtype that is added as such
        op : str
        algorithm : str, optional
        is_example : bool
            Whether every call is given a buffer of its own, of the same length and dtype; this one is not kept.
        """
        return self._messages.bind(buffer, op, self._chooser.by_messages(buffer.nbytes, algorithm), is_example)

    def miss(self, error: BaseException) -> None:
        """Make no call of the next number, and give up what was started; see `CallCheck.miss`.  Local."""
        self.started.give_up(error)
        self._miss(error)

    # -- collectives --------------------------------------------------------------------------------------------------

    def call(
        self,
        name: str,
        tensors: Sequence[tuple[str, Any, Sequence[int]]] = (),
        packs: Sequence[tuple[str, int]] = (),
    ) -> Call:
        """Return what stands for a call of that name; parameters as for `Call`.  Local."""
        return Call(name, tensors, packs)

    def check(self, call: Call, timeout_seconds: float | None = None) -> None:
        """Make sure that all ranks are at the same place and describe it alike.

        Collective: every rank calls it in the same order.  Errors as for `Bound`.
        """
        Once(self, call)(None, timeout_seconds)

    def barrier(self, what: str = "barrier", timeout_seconds: float | None = None) -> None:
        """Return when all ranks have come here.

        Collective: every rank calls it in the same order.
        """
        self.check(Call(what), timeout_seconds)

    def exchange(self, payload: bytes, what: str = "exchange", timeout_seconds: float | None = None) -> list[bytes]:
        """Return the small byte string that every rank gave, in rank order; for agreement, not for data.

        Collective: every rank calls it in the same order.
        """

        def move(watch: Watch) -> list[bytes]:
            return [payload] if self.size == 1 else self.transport.exchange(payload, watch)

        return Once(self, Call(what), move)(None, timeout_seconds)

    def all_reduce(
        self, buffer: Any, op: str = "sum", algorithm: str | None = None, timeout_seconds: float | None = None
    ) -> None:
        """Reduce an array over all ranks, in place; all ranks end with the same bits.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        buffer : array, C-contiguous, any shape, modified in place
            16-bit floats are summed in float32 and rounded once.
        op : str
            ``"sum"``, ``"min"``, ``"max"`` or ``"prod"``.
        algorithm : str, optional
            One of ``names("all_reduce")``, ``"native"``, ``"hierarchical"``, ``"shared_memory"`` (on one node),
            ``"two_level"`` (on several); None or ``"auto"`` leaves it to `selection`.
        timeout_seconds : float, optional

        Raises
        ------
        CollectiveMismatchError, TransportTimeoutError, RankFailedError, UnsupportedDtypeError
        ValueError
            The array is not C-contiguous, or there is no such reduction or algorithm.
        """
        buffer = arrays.plain(buffer)
        key = (type(buffer), buffer.shape, buffer.dtype, op, algorithm)
        bound = self._calls.get(key)
        plain.check_contiguous("all_reduce", buffer)
        if bound is None:
            self._plain(buffer, op)
            if len(self._calls) >= _KEPT_CALLS:
                del self._calls[next(iter(self._calls))]
            bound = self._calls[key] = bind_buffer(self, buffer, op, algorithm, timeout_seconds)
        bound(buffer.reshape(-1), timeout_seconds)

    def reduce_scatter(self, buffer: Any, op: str = "sum", timeout_seconds: float | None = None) -> Any:
        """Return this rank's share of the reduced array: of n elements those from r * n // size to (r + 1) * n // size.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        buffer : array, C-contiguous, any shape, unchanged
        op : str
        """
        buffer = self._plain(buffer, op)
        call = Call(f"reduce_scatter({op})", [("", buffer.dtype, buffer.shape)])
        return Once(self, call, partial(plain.reduce_scatter, self.transport, buffer, op))(None, timeout_seconds)

    def all_gather(self, array: Any, axis: int = 0, timeout_seconds: float | None = None) -> Any:
        """Return the arrays of all ranks, joined along `axis` in rank order.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        array : array, at least one dimension
            Ranks may differ in the length of `axis`, and in nothing else.
        axis : int
        """
        array = self._plain(array)
        axis = plain.checked_axis(array, axis)
        others = [-1 if index == axis else length for index, length in enumerate(array.shape)]
        call = Call(f"all_gather(axis={axis})", [("", array.dtype, others)])
        return Once(self, call, partial(plain.all_gather, self.transport, array, axis))(None, timeout_seconds)

    def broadcast(self, array: Any, root: int = 0, timeout_seconds: float | None = None) -> None:
        """Give all ranks the array of rank `root`, in place.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        array : array, C-contiguous, any dtype, modified in place on all ranks but `root`
        root : int
        """
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is no rank of a world of {self.size}")
        array = self._plain(array)
        plain.check_contiguous("broadcast", array)
        call = Call(f"broadcast(root={root})", [("", array.dtype, array.shape)])
        Once(self, call, partial(plain.broadcast, self.transport, array, root))(None, timeout_seconds)

    def _plain(self, array: Any, op: str | None = None) -> Any:
        """Return an array as `arrays.plain` does; raise, before any communication, if it cannot be moved or reduced.

        Raises
        ------
        TypeError, UnsupportedDtypeError
        ValueError
            There is no reduction `op`.
        """
        array = arrays.plain(array)
        if op is not None:
            arrays.check_reducible(array.dtype, op)
        arrays.check_movable(array.dtype)
        if self.size > 1:
            arrays.check_memory(array, self.transport.memory, self.transport.name)
        return array


def _lanes(world: World) -> Lanes | None:
    """Return who carries what between nodes, where the ranks of each node share memory."""
    if world.segments is None or world.topology.node_count == 1 or not world.transport.has_channels:
        return None
    across = schedule_of("all_reduce", selection.between_carriers(world.topology))
    return Lanes(world.segments, world.transport, world.topology, across)


def _header(world: World, lanes: Lanes | None) -> Header | None:
    """Return what compares the calls of several nodes whose ranks share memory."""
    if lanes is None or world.control.arbiter is None:
        return None
    return Header(lanes.segments, world.control, world.transport, world.topology)
