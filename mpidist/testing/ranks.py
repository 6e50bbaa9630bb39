"""Ranks as threads: `run_ranks`, and how the errors of several ranks become one."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from mpidist.cluster.topology import Topology
from mpidist.errors import MpidistError, RankFailedError, RemoteReplicaError, TransportTimeoutError
from mpidist.options import check_timeout, settings
from mpidist.runtime.control import ControlChannel
from mpidist.transports import World, installed
from mpidist.transports.loopback import Faults, LoopbackWorld
from mpidist.transports.node_memory import SharedSegments

_T = TypeVar("_T")

#: Shared memory that each rank has for small and for long collectives, in bytes: little, so that tests fill it.
_SEGMENT_BYTES, _PLACE_BYTES = 1024, 4096

#: What ranks that wait get beyond their own deadline, to raise an error that names who is missing.
_GRACE_SECONDS = 5.0


class RankErrors(MpidistError):
    """Several ranks raised errors of different types; the message shows all of them.

    Attributes
    ----------
    rank_errors : dict of int to BaseException
        By rank, those that failed on their own account first.
    """

    def __init__(self, errors: Mapping[int, BaseException], size: int) -> None:
        kinds = ", ".join(f"rank {rank}: {type(error).__name__}" for rank, error in errors.items())
        texts = "\n".join(_labelled(rank, size, error) for rank, error in errors.items())
        super().__init__(f"{len(errors)} of {size} ranks failed ({kinds})\n{texts}")
        self.rank_errors = dict(errors)


def run_ranks(
    size: int,
    fn: Callable[..., _T],
    *args: Any,
    hosts: Sequence[str] | None = None,
    timeout_seconds: float = 60,
    faults: Faults | None = None,
    eager_bytes: int = 0,
    memory: frozenset[str] = frozenset({"host"}),
) -> list[_T]:
    """Run ``fn(*args)`` on `size` threads, each a rank of a loopback world, and return the results by rank.

    Inside, `mpidist.transports.world` and all that is built on it see the thread's rank; threads that a rank starts are
    not ranks.  A rank that raises is seen by the waits of the others, as it would be in a real job.

    Parameters
    ----------
    size : int
    fn : callable
    hosts : sequence of str, optional
        The host of each rank; one node by default.
    timeout_seconds : float
        Deadline of every wait, and (with a few seconds on top, in which waits can say whom they missed) of the whole.
    faults : Faults, optional
        What shall go wrong.
    eager_bytes, memory
        As in `LoopbackWorld`.

    Raises
    ------
    Exception
        What the ranks raised.  Errors of one type are raised as the first of them, with the others and the ranks in its
        notes; otherwise `RankErrors`.  Either has ``rank_errors``, a dict of all of them by rank.  Ranks that only
        failed because another one did (RankFailedError, RemoteReplicaError) do not count unless there is nothing else.
    TransportTimeoutError
        A rank did not come to an end; the message shows where it stands.
    """
    hosts = ["localhost"] * size if hosts is None else list(hosts)
    if len(hosts) != size:
        raise ValueError(f"got {len(hosts)} hosts for {size} ranks")
    check_timeout(timeout_seconds)
    chosen = replace(settings(), timeout_seconds=timeout_seconds)
    controls = ControlChannel.for_threads(size, hosts, chosen)
    loopback = LoopbackWorld(controls, eager_bytes, memory, faults)
    topology = Topology(hosts)
    pairs = zip(loopback.transports, _segments(topology), strict=True)
    worlds = [World(each, topology, each.control, "run_ranks", segments) for each, segments in pairs]
    ranks = [_RankThread(world, fn, args) for world in worlds]
    _run_all(ranks, timeout_seconds + _GRACE_SECONDS)
    errors = {rank.number: rank.error for rank in sorted(ranks, key=lambda rank: rank.ended) if rank.error is not None}
    if errors:
        raise together(errors, size)
    return [rank.result for rank in ranks]


def _segments(topology: Topology) -> list[SharedSegments]:
    """Return by rank the memory that it shares with the ranks of its node."""
    sizes = map(len, topology.ranks_of_node)
    memories = [bytearray(SharedSegments.nbytes(size, _SEGMENT_BYTES, _PLACE_BYTES)) for size in sizes]
    places = zip(topology.node_of, topology.local_size_of, strict=True)
    return [SharedSegments(memories[node], size, _SEGMENT_BYTES, _PLACE_BYTES) for node, size in places]


class _RankThread(threading.Thread):
    """One rank: its result or error, and when it ended."""

    def __init__(self, world: World, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__(name=f"rank {world.transport.rank}", daemon=True)
        self.number = world.transport.rank
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = float("inf")
        self._world = world
        self._work = (fn, args)

    def run(self) -> None:
        fn, args = self._work
        with installed(self._world):
            try:
                self.result = fn(*args)
            except SystemExit as error:
                self.error = None if error.code in (None, 0) else error
            except BaseException as error:  # noqa: B036 - also pytest's outcomes, which are no Exceptions
                self.error = error
            self._tell()

    def _tell(self) -> None:
        """Tell the other ranks what became of this one, as a process does when it ends."""
        self.ended = time.monotonic()
        control = self._world.control
        if self.error is None or getattr(self.error, "on_all_ranks", False):
            control.leave()
        else:
            control.fail("".join(traceback.format_exception_only(type(self.error), self.error)))


def _run_all(ranks: Sequence[_RankThread], limit_seconds: float) -> None:
    """Run the threads to their ends; a thread that does not come to one gets an error that shows where it stands."""
    end = time.monotonic() + limit_seconds
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
    frames = sys._current_frames()
    for rank in ranks:
        if rank.is_alive() and rank.ident in frames:
            place = "".join(traceback.format_stack(frames[rank.ident])[-4:])
            rank.error = TransportTimeoutError(f"rank {rank.number} still runs after {limit_seconds:g} s, at\n{place}")


def together(errors: Mapping[int, BaseException], size: int) -> BaseException:
    """Return the one error to raise for the errors of several ranks, given in the order in which they came."""
    consequences = (RankFailedError, RemoteReplicaError)
    own = {rank: error for rank, error in errors.items() if not isinstance(error, consequences)} or dict(errors)
    others = {rank: error for rank, error in errors.items() if rank not in own}
    if len({type(error) for error in own.values()}) > 1:
        return RankErrors({**own, **others}, size)
    (first, error), *rest = own.items()
    error.rank_errors = {**own, **others}  # type: ignore[attr-defined]
    _add_note(error, f"raised on rank {first} of {size}")
    for rank, other in [*rest, *others.items()]:
        _add_note(error, f"also rank {rank} of {size}: {type(other).__name__}: {other}")
    return error


def _add_note(error: BaseException, note: str) -> None:
    """Add a line that tracebacks show below the message; Python 3.10 keeps it, but does not show it."""
    error.__notes__ = [*getattr(error, "__notes__", ()), note]


def _labelled(rank: int, size: int, error: BaseException) -> str:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f"-- rank {rank} of {size}:\n{text}"
