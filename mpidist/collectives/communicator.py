"""Collectives by name over the ranks of a world: every call numbered and checked, on whichever algorithm is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn

import numpy

from mpidist import arrays
from mpidist.collectives.call import Call
from mpidist.collectives.call_check import CallCheck
from mpidist.collectives.engine import Engine
from mpidist.collectives.exchange import plain
from mpidist.collectives.exchange.array_collectives import ArrayCollectives
from mpidist.collectives.exchange.point_to_point import BoundReceive, BoundSend, PointToPoint
from mpidist.collectives.header import Header
from mpidist.collectives.observer import NOBODY, Observer
from mpidist.collectives.persistent import Bound, Once, Started
from mpidist.collectives.reductions.adjustment import AS_IT_IS, Adjustment
from mpidist.collectives.reductions.in_place import bind_in_place
from mpidist.collectives.reductions.list_reductions import adjusted_list
from mpidist.collectives.reductions.plan_cache import Bindings
from mpidist.collectives.ways import selection
from mpidist.collectives.ways.bucket_reduction import BucketReduction
from mpidist.collectives.ways.chooser import Chooser
from mpidist.collectives.ways.device_ways import DeviceReplay, DeviceWays
from mpidist.collectives.ways.lanes import Lanes
from mpidist.collectives.ways.messages import Messages, Native
from mpidist.collectives.ways.node_memory import NodeMemory
from mpidist.collectives.ways.packed import Replay, bind_packed
from mpidist.collectives.ways.pieces import Pieces
from mpidist.collectives.ways.scratch import Scratch
from mpidist.collectives.ways.selection import Choices, Facts, Way
from mpidist.runtime.control import Watch
from mpidist.runtime.turnstile import BaseTurnstile
from mpidist.schedules.table import algorithm as schedule_of
from mpidist.transports import World
from mpidist.transports.base import Transport

#: How many engines are kept: there are few sets of options, unless deadlines are new every time.
_KEPT_ENGINES = 64

_OF_HOST = numpy.empty(0)


class Communicator:
    """The collectives of one world, for one of its ranks.

    Parameters
    ----------
    world : World
    whole : Communicator, optional
        Of the world that this one is a part of, which numbers and compares the calls.
    observer : Observer, optional
        Who is told what is done when; by default nobody.

    Attributes
    ----------
    rank, size : int
    topology : Topology
    control : ControlChannel
    turnstile : BaseTurnstile
        What every collective call goes through.
    transport : Transport
    has_gpus : bool
        Whether a rank may have a GPU; the same on all ranks.
    segments : SharedSegments or None
        Of all ranks, where they are on one node.
    begin : callable
        See `CallCheck.begin`.
    started : Started
        The collectives of this rank that were started and not carried out yet.
    bindings : Bindings
        What is bound for the calls that bind nothing themselves, of all verbs.
    devices : DeviceWays
        How arrays in device memory are reduced.
    observer : Observer
    load_choices : callable or None
        ``load_choices(watch)`` returns what `mpidist tune` stored of these ranks, within a begun call; set by
        `mpidist.world`, called once.  Collective.
    """

    def __init__(self, world: World, whole: Communicator | None = None, observer: Observer = NOBODY) -> None:
        self.observer = observer
        self.transport = observer.transport(world.transport)
        self.topology = world.topology
        self.control = world.control
        self.turnstile: BaseTurnstile = observer.turnstile(self.control.turnstile) if whole is None else whole.turnstile
        self.rank = world.transport.rank
        self.size = world.transport.size
        self.has_gpus = world.has_gpus
        self.load_choices: Callable[[Watch], Choices | None] | None = None
        self.in_shared_memory: dict[int, Any] = {}
        self.adapters: dict[str, Any] = {}  # by name: what is kept of these ranks above, as long as they are there
        self.started: Started = Started() if whole is None else whole.started
        self.bindings = Bindings()
        self._engines: dict[Any, Engine] = {}
        lanes = _lanes(world)
        # Short all-reduces through segments are for whole worlds only: their flag barrier is the call's own.
        self.segments = world.segments if self.topology.node_count == 1 and self.size > 1 else None
        check = CallCheck(world, self.transport, _header(world, lanes, self.transport))
        self.begin: Callable[..., Watch] = observer.begin(check.begin) if whole is None else whole.begin
        self._miss: Callable[[BaseException], None] = check.miss if whole is None else whole.miss
        scratch = Scratch()
        self._memory = NodeMemory(self.control.board_index, self.segments, lanes, scratch, observer)
        self._messages = Messages(self.transport, self.topology, scratch)
        self._chooser = self._make_chooser(lanes)
        self.devices: DeviceWays = DeviceWays(self, None if whole is None else whole.devices)
        self._arrays = ArrayCollectives(self)

    # -- what an all-reduce is bound to -------------------------------------------------------------------------------

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "what belongs to a strategy, or to a world of ranks, cannot be pickled or copied: its ranks are those of "
            "this job. Pickle the `value` of a variable; save variables, optimizers and metrics with "
            "`mpidist.Checkpoint`"
        )

    def _make_chooser(self, lanes: Lanes | None) -> Chooser:
        segments = self.segments
        facts = Facts(self.topology, tuple(self.transport.native), segments is not None or lanes is not None)
        is_short = segments is not None and segments.room != segments.place_bytes
        room = segments.room if segments is not None and is_short else None
        return Chooser(facts, self.control.settings, room, "device" in self.transport.memory)

    def prepare(self, call: Call, algorithm: str | None = None, timeout_seconds: float | None = None) -> None:
        """Load what `mpidist tune` stored, before the first `call` that may be chosen by it.

        Collective: every rank calls it in the same order, before it binds an all-reduce.  Errors as for `Bound`.
        """
        load = self.load_choices
        if load is None or self._chooser.asked(algorithm) not in selection.FREE:
            return
        self._chooser.choices = Once(self, call, load)(None, timeout_seconds)
        self.load_choices = None

    def facts(self) -> Facts:
        """Return what the choice of an algorithm for arrays of the host depends on.  Local."""
        return self._chooser.facts()

    def way(self, nbytes: int, algorithm: str | None, on_host: bool = True) -> Way:
        """Return the way of a unit of `nbytes`; an explicit choice wins.  Local.

        ValueError where there is no such algorithm here.
        """
        return self._chooser.way(nbytes, algorithm, on_host)

    def bytes_per_pack(self, algorithm: str | None, on_host: bool = True) -> int:
        """Return from what size in bytes on a pack is closed when the user leaves it to us.  Local."""
        return self._chooser.bytes_per_pack(algorithm, on_host)

    def small(
        self, shape: tuple[int, ...], dtype: Any, op: str, scale: float | None = None, targets: Pieces | None = None
    ) -> BucketReduction | None:
        """Return the all-reduce in one step through shared memory, if it is the one for such arrays.  Local.

        Parameters as for `SegmentAllReduce`.
        """
        return self._memory.small(shape, dtype, op, scale, targets)

    def reduction(
        self,
        way: Way,
        sources: Pieces,
        targets: Pieces,
        dtypes: Sequence[Any],
        op: str,
        scale: float | None = None,
        kind: Any = None,
        scratch: Scratch | None = None,
        prescale: float | None = None,
    ) -> BucketReduction:
        """Return the reduction of a bucket.  Local.

        `dtypes` are those of the sources, of what is added, and of the targets; reduced values are multiplied by
        `scale`.  `kind` is an array of the kind that is reduced, by default NumPy's.  Buckets are packed into
        `scratch`; those that are reduced one after the other may share it.  `prescale` is for values of a device only,
        which are multiplied while they are packed.
        """
        bound = self._memory.reduction(way, sources, targets, dtypes, op, scale)
        if bound is not None:
            return bound
        kind = _OF_HOST if kind is None else arrays.empty(0, kind.dtype, kind)
        scratch = Scratch() if scratch is None else scratch
        replay = self._replay(sources.elements, dtypes[1], kind, op, way.algorithm)
        # MPI's own all-reduce is quicker where values and results lie apart.
        is_apart = isinstance(replay, Native) and not arrays.is_device(kind)
        like = kind, sources, targets, dtypes, scale, is_apart, scratch, self.observer, prescale
        packed = bind_packed(replay, *like)
        return self.observer.reduction(packed)

    def _replay(self, elements: int, dtype: numpy.dtype, kind: Any, op: str, algorithm: str) -> Replay:
        """Return what reduces flat buffers of that kind."""
        memory = self.devices.memory(kind)
        if memory is not None and self.size > 1 and elements:
            return DeviceReplay(self.devices, self, memory, dtype, op, algorithm)
        chosen = self._chooser.by_messages(elements * dtype.itemsize, algorithm)
        return self._messages.bind(elements, dtype, kind, op, chosen)

    def engine(
        self, bytes_per_pack: int = 0, algorithm: str | None = None, timeout_seconds: float | None = None
    ) -> Engine:
        """Return what reduces lists of tensors under these options, see `Engine`.  Local."""
        key = bytes_per_pack, algorithm, timeout_seconds
        if key not in self._engines:
            if len(self._engines) >= _KEPT_ENGINES:
                self._engines.clear()
            self._engines[key] = Engine(self, *key)
        return self._engines[key]

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

    def call_without_arrays(self, name: str, timeout_seconds: float | None = None) -> list[Any]:
        """Return no results: a structure without arrays is a call too, or the next call would be taken for it.

        Collective: every rank calls it in the same order; CollectiveMismatchError on all where some have arrays.
        """
        self.check(Call(name), timeout_seconds)
        return []

    def barrier(self, what: str = "barrier", timeout_seconds: float | None = None) -> None:
        """Return when all ranks have come here.

        Collective: every rank calls it in the same order.
        """
        self.bindings.call(("barrier", what), lambda: Once(self, Call(what)), (), None, timeout_seconds)

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
            The array is not C-contiguous, or read-only, or there is no such reduction or algorithm.
        """
        buffer = arrays.plain(buffer)
        plain.check_in_place(self.control, "all_reduce", buffer)
        key = ("all_reduce", type(buffer), buffer.shape, buffer.dtype, op, algorithm)
        like = (buffer, op, algorithm, timeout_seconds)
        self.bindings.call(key, self._bind_buffer, like, (buffer.reshape(-1),), timeout_seconds)

    def _bind_buffer(self, buffer: Any, op: str, algorithm: str | None, timeout_seconds: float | None) -> Bound:
        self._arrays.checked(buffer, op)
        signatures = [("", buffer.dtype, tuple(buffer.shape))]
        return bind_in_place(self, signatures, op, algorithm, timeout_seconds, buffer, is_checked=True)

    def all_reduce_list(
        self,
        tensors: Sequence[Any],
        op: str = "sum",
        adjustment: Adjustment = AS_IT_IS,
        timeout_seconds: float | None = None,
        names: tuple[str, ...] | None = None,
    ) -> list[Any]:
        """Return the arrays of a list reduced over all ranks in one fused call, as new ones that are the caller's.

        Collective: every rank calls it in the same order, with arrays of the same shapes and dtypes.

        Parameters
        ----------
        tensors : sequence of array
            Any of them may be None where `adjustment` says so: ranks then tell each other the shapes first.
        op : str
            ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
        adjustment : Adjustment
        timeout_seconds : float, optional
        names : tuple of str, optional
            Of the arrays; ranks compare them.

        Raises
        ------
        CollectiveMismatchError, TransportTimeoutError, RankFailedError, UnsupportedDtypeError, ValueError
        """
        if not tensors:
            return self.call_without_arrays(f"all_reduce({op})", timeout_seconds)
        if adjustment == AS_IT_IS:
            return self.engine()(tensors, op, names, timeout_seconds)
        return adjusted_list(self, tensors, op, adjustment, timeout_seconds, names)

    def all_reduce_init(
        self,
        like: Sequence[Any],
        op: str = "sum",
        *,
        prescale: float | None = None,
        postscale: float | None = None,
        none_as_zeros: bool = False,
        algorithm: str | None = None,
        timeout_seconds: float | None = None,
    ) -> Bound:
        """Return the all-reduce of lists of arrays like this one, to be called or started with lists.

        Collective: every rank calls it in the same order; nothing is reduced.

        Parameters
        ----------
        like : sequence of array
            Shapes, dtypes and kinds count; no reference is kept.  Later lists may lie in memory otherwise.
        op : str
            ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
        prescale, postscale : float, optional
            What values are multiplied by before they are reduced, and what results are multiplied by.
        none_as_zeros : bool
            Whether an array of a later list may be None: it counts as zeros then, in a sum or a mean.  One that is None
            on all ranks is None in the result.
        algorithm : str, optional
            As for `all_reduce`.
        timeout_seconds : float, optional
            For calls that name none.

        Raises
        ------
        ValueError, UnsupportedDtypeError, TypeError
            What cannot be reduced so; before any communication.
        """
        adjustment = Adjustment(prescale, postscale, none_as_zeros)
        return self.engine(algorithm=algorithm).bind(like, op, timeout_seconds, adjustment)

    def reduce_scatter(
        self, array: Any, op: str = "sum", timeout_seconds: float | None = None, paths: tuple[str, ...] = ()
    ) -> Any:
        """Return this rank's rows of the reduced array: of n rows those from r * n // size to (r + 1) * n // size.

        Collective: every rank calls it in the same order, with arrays of the same shape and dtype.

        Parameters
        ----------
        array : array, at least one dimension
            Unchanged.
        op : str
            ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
        timeout_seconds : float, optional
        paths : tuple of str
            Of all leaves of the structure whose first one this array is; ranks compare them.

        Returns
        -------
        array
            The caller's own.  Means of integers are float64; 16-bit floats are reduced in float32 and rounded once.
        """
        array = self._as_array(array)
        key = ("reduce_scatter", op, type(array), array.dtype, array.shape)
        return self.bindings.call(key, self._arrays.bind_reduce_scatter, (array, op), array, timeout_seconds, paths)

    def all_gather(
        self, array: Any, axis: int = 0, timeout_seconds: float | None = None, paths: tuple[str, ...] = ()
    ) -> Any:
        """Return the arrays of all ranks, joined along `axis` in rank order.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        array : array, at least one dimension
            Ranks may differ in the length of `axis`, text in its width, and in nothing else.
        axis : int
        timeout_seconds : float, optional
        paths : tuple of str
            As for `reduce_scatter`.
        """
        array = self._as_array(array)
        if array.dtype.kind in "SU":
            array = self._widened(array, "all_gather", timeout_seconds)
        axis = plain.whole(axis, "all_gather: axis")
        others = array.shape[1:] if axis == 0 else (axis, array.shape[:axis], array.shape[axis:][1:])
        key = ("all_gather", type(array), array.dtype, array.ndim, others)
        return self.bindings.call(key, self._arrays.bind_gather, (array, axis, None), array, timeout_seconds, paths)

    def gather(
        self,
        array: Any,
        root: int = 0,
        axis: int = 0,
        timeout_seconds: float | None = None,
        paths: tuple[str, ...] = (),
    ) -> Any:
        """Return the arrays of all ranks, joined along `axis` in rank order, on rank `root`; None on the others.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        array : array, at least one dimension
            Ranks may differ in the length of `axis`, text in its width, and in nothing else.
        root, axis : int
        timeout_seconds : float, optional
        paths : tuple of str
            As for `reduce_scatter`.
        """
        array = self._as_array(array)
        if array.dtype.kind in "SU":
            array = self._widened(array, "gather", timeout_seconds)
        root, axis = self._arrays.checked_root(root, "gather"), plain.whole(axis, "gather: axis")
        others = array.shape[:axis], array.shape[axis:][1:]
        key = ("gather", root, axis, type(array), array.dtype, array.ndim, others)
        return self.bindings.call(key, self._arrays.bind_gather, (array, axis, root), array, timeout_seconds, paths)

    def all_to_all(
        self, array: Any, splits: Sequence[int] | None = None, timeout_seconds: float | None = None
    ) -> tuple[Any, list[int]]:
        """Send rows to every rank, and return those that every rank has sent to this one.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        array : array, at least one dimension
            Its first rows are for rank 0, the next ones for rank 1, and so on.  Ranks may differ in the number of rows;
            text has one width on all of them.
        splits : sequence of int, optional
            How many rows each rank gets, 0 included; by default all get as many.
        timeout_seconds : float, optional

        Returns
        -------
        rows : array
            What this rank got, in rank order.  The caller's own.
        splits : list of int
            How many rows each rank gave.

        Raises
        ------
        ValueError
            Splits that are negative, too many or too few, or that do not add up; before any communication.
        """
        array = self._as_array(array)
        key = ("all_to_all", type(array), array.dtype, array.ndim, array.shape[1:])
        return self.bindings.call(key, self._arrays.bind_all_to_all, (array,), (array, splits), timeout_seconds)

    def broadcast(self, array: Any, root: int = 0, timeout_seconds: float | None = None) -> None:
        """Give all ranks the array of rank `root`, in place.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        array : array, C-contiguous, any dtype, modified in place on all ranks but `root`
        root : int
        timeout_seconds : float, optional

        Raises
        ------
        ValueError
            The array is not C-contiguous, or read-only on another rank than `root`; before any communication.
        """
        array, root = self._as_array(array), self._arrays.checked_root(root, "broadcast")
        plain.check_in_place(self.control, "broadcast", array, is_written=self.rank != root)
        key = ("broadcast", root, type(array), array.dtype, array.shape)
        self.bindings.call(key, self._arrays.bind_broadcast, (array, root, True), array, timeout_seconds)

    def broadcast_copy(
        self, array: Any, root: int = 0, timeout_seconds: float | None = None, paths: tuple[str, ...] = ()
    ) -> Any:
        """Return a new array with the values of rank `root`; all ranks give arrays of the same shape and dtype.

        Collective: every rank calls it in the same order.  `paths` as for `reduce_scatter`.
        """
        array, root = self._as_array(array), self._arrays.checked_root(root, "broadcast")
        key = ("broadcast_copy", root, type(array), array.dtype, array.shape)
        return self.bindings.call(key, self._arrays.bind_broadcast, (array, root), array, timeout_seconds, paths)

    # -- from one rank to another --------------------------------------------------------------------------------------

    def send(self, array: Any, to: int, timeout_seconds: float | None = None) -> None:
        """Send an array to one other rank, and return when that one has received it, or a short one is on its way.

        Local, but for the rank `to`, which calls `receive`.

        Parameters
        ----------
        array : array, any shape and dtype
            One in device memory goes by the host.
        to : int
            Another rank.
        timeout_seconds : float, optional

        Raises
        ------
        ValueError
            There is no such rank, or it is this one.
        TransportTimeoutError, RankFailedError, RemoteReplicaError
            As for `Transfer.wait`.
        """
        self.point_to_point.start_send(self._as_array(array), to, timeout_seconds).wait()

    def receive(self, source: int, like: Any = None, timeout_seconds: float | None = None) -> Any:
        """Return the next array that rank `source` sends to this one, as the caller's own.

        Local, but for the rank `source`, which calls `send`.

        Parameters
        ----------
        source : int
            Another rank.
        like : array, optional
            What is expected: another shape or dtype is a CollectiveMismatchError, on this rank only.  What comes
            is put into memory of its kind; without it, into the host's.
        timeout_seconds : float, optional

        Raises
        ------
        ValueError
            There is no such rank, or it is this one.
        CollectiveMismatchError, TransportTimeoutError, RankFailedError, RemoteReplicaError
            As for `Transfer.wait`.
        """
        return self.point_to_point.start_receive(source, like, timeout_seconds).wait()

    @cached_property
    def point_to_point(self) -> PointToPoint:
        """The sends and receives of this rank, which may be started."""
        return PointToPoint(self)

    # -- bound once, called or started every step: see `Bound` ----------------------------------------------------

    def all_gather_init(self, like: Any, axis: int = 0) -> Bound:
        """Return the `all_gather` of arrays like this one, of any length of `axis`.  Local.

        Text has one width on all ranks.
        """
        return self._arrays.bind_gather(like, axis, None)

    def gather_init(self, like: Any, root: int = 0, axis: int = 0) -> Bound:
        """Return the `gather` of arrays like this one, of any length of `axis`.  Local.

        Text has one width on all ranks.
        """
        return self._arrays.bind_gather(like, axis, self._arrays.checked_root(root, "gather"))

    def reduce_scatter_init(self, like: Any, op: str = "sum") -> Bound:
        """Return the `reduce_scatter` of arrays like this one.  Local."""
        return self._arrays.bind_reduce_scatter(like, op)

    def broadcast_init(self, like: Any, root: int = 0) -> Bound:
        """Return the `broadcast_copy` of arrays like this one.  Local."""
        return self._arrays.bind_broadcast(like, self._arrays.checked_root(root, "broadcast"))

    def all_to_all_init(self, like: Any, splits: Sequence[int] | None = None) -> Bound:
        """Return the `all_to_all` of arrays like this one, of any number of rows.  Local.

        It is called, or started, with an array, or with an array and its splits as a tuple; `splits` are for calls that
        give none.
        """
        bound = self._arrays.bind_all_to_all(like)
        if splits is not None:
            counts = plain.whole_splits(splits)
            bound.splits = plain.checked_splits(sum(counts), counts, self.size)
        return bound

    def send_init(self, like: Any, to: int) -> BoundSend:
        """Return the `send` of arrays like this one.  Local."""
        return BoundSend(self.point_to_point, self._as_array(like), to)

    def receive_init(self, like: Any, source: int) -> BoundReceive:
        """Return the `receive` of arrays like this one.  Local."""
        return BoundReceive(self.point_to_point, self._as_array(like), source)

    def _widened(self, text: Any, verb: str, timeout_seconds: float | None) -> Any:
        """Return text as wide as the widest of all ranks.  Collective."""
        kind, width = text.dtype.str[:2], text.dtype.str[2:]
        widths = self.exchange(width.encode(), f"width of text for {verb}", timeout_seconds)
        return text.astype(f"{kind}{max(map(int, widths))}", copy=False)

    def _as_array(self, array: Any) -> Any:
        return array if type(array) is numpy.ndarray else self._arrays.checked(array)


def _lanes(world: World) -> Lanes | None:
    """Return who carries what between nodes, where the ranks of each node share memory."""
    if world.segments is None or world.topology.node_count == 1 or not world.transport.has_channels:
        return None
    across = schedule_of("all_reduce", selection.between_carriers(world.topology))
    return Lanes(world.segments, world.transport, world.topology, across)


def _header(world: World, lanes: Lanes | None, transport: Transport) -> Header | None:
    """Return what compares the calls of several nodes whose ranks share memory."""
    if lanes is None or world.control.arbiter is None:
        return None
    return Header(lanes.segments, world.control, transport, world.topology)
