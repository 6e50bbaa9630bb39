"""NVIDIA's NCCL between the GPUs of some ranks, by CuPy's binding."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any

import numpy

from mpidist import own_process
from mpidist.device.cards import (
    SHARING_VARIABLE,
    Card,
    current_card,
    dotted_nccl,
    idle_hint,
    places_without_choice,
    shared_cards,
    sharing_problem,
)
from mpidist.device.nccl_values import WIDER, standing_in
from mpidist.device.waiting import broken_links, check_links, open_links, wait_to_end
from mpidist.errors import MpidistError, RankFailedError, TransportError, listed
from mpidist.output import say

if TYPE_CHECKING:
    from mpidist.device.memory import Arrived
    from mpidist.runtime.watch import Watch
    from mpidist.transports.base import Transport

_log = logging.getLogger("mpidist")

#: NCCL's dtypes by NumPy's.  Truth values are bytes of 0 and 1, whose least and greatest are truth values again.
_DTYPES = {
    "bool": "UINT8",
    "int8": "INT8",
    "uint8": "UINT8",
    "int32": "INT32",
    "uint32": "UINT32",
    "int64": "INT64",
    "uint64": "UINT64",
    "float32": "FLOAT32",
    "float64": "FLOAT64",
}

#: What a complex number is made of: its sum is that of its parts.
_PARTS = {"complex64": "float32", "complex128": "float64"}

#: What is moved as it is, whatever it stands for.
_BYTE = "UINT8"

#: A call of NCCL's communicator: its name, and its arguments without the stream.
_Call = tuple[Any, ...]

#: The calls between two ranks; their last argument is the other rank.
_BETWEEN_TWO = ("send", "recv")

#: How long a rank whose NCCL fails waits to hear of another rank's end, which is the cause then.
_GRACE_SECONDS = 1.0
#: How often a thread looks at NCCL, and for how long the program may go on after a failure without meeting it.
_LOOK_SECONDS, _PATIENCE_SECONDS = 1.0, 10.0

#: What NCCL says, and what to do about it, as docs/gpu.md tells it; what says least comes last.
_CURES = (
    ("Duplicate GPU", "start as many ranks as there are GPUs, or bind each rank to a GPU of its own"),
    ("Multiple Ranks are using the same GPU", f"set {SHARING_VARIABLE}=1, or start as many ranks as there are GPUs"),
    ("/dev/shm", "give /dev/shm more room (docker run --shm-size=8g), or set NCCL_SHM_DISABLE=1"),
    ("No space left on device", "give /dev/shm more room (docker run --shm-size=8g), or set NCCL_SHM_DISABLE=1"),
    ("no socket interface found", "name the interface between the nodes with NCCL_SOCKET_IFNAME"),
    ("Connection refused", "name the interface between the nodes with NCCL_SOCKET_IFNAME"),
    ("Connection timed out", "name the interface between the nodes with NCCL_SOCKET_IFNAME"),
    ("Mismatched NCCL version", "start all ranks in one environment, with one libnccl.so.2"),
    ("driver version is insufficient", "install a newer driver, or the NCCL of the driver's CUDA version"),
    ("out of memory", "leave NCCL some GPU memory, or set NCCL_BUFFSIZE=1048576"),
    ("remote process exited", "look for the rank that ended first, or at the network between the nodes"),
    ("unhandled cuda error", "look whether memory is left and how new the driver is (nvidia-smi)"),
    ("unhandled system error", "set NCCL_DEBUG=INFO, which prints the call that failed: memory, a socket, InfiniBand"),
    ("invalid usage", "start as many ranks as there are GPUs, if ranks share one"),
)


class Nccl:
    """NCCL's communicator of some ranks; see `Link`.

    `transport`: over the same ranks.
    """

    def __init__(self, communicator: Any, transport: Transport, version: int) -> None:
        self.name, self.control = f"NCCL {dotted_nccl(version)}", transport.control
        self._communicator: Any = communicator
        self._rank, self._process = transport.rank, os.getpid()
        self.left: Arrived | None = None
        self._event: Any = None  # behind the last calls: NCCL does all of them in one order
        self._connected: set[tuple[str, int]] = set()  # calls that were made, and with whom: NCCL has connected them
        self._is_beginning = self._is_connecting = False
        self._lock, self._is_closed = threading.RLock(), threading.Event()
        open_links.append(self)
        self.control.at_break.append(self._at_break)
        own_process.at_exit(self._at_exit)
        threading.Thread(target=self._keep_watch, name="mpidist-nccl-watch", daemon=True).start()

    def can_reduce(self, dtype: numpy.dtype, op: str) -> bool:
        """Return whether NCCL reduces such values, or what stands for them, to the host's results."""
        if dtype.kind == "c":
            return op == "sum" and dtype.name in _PARTS
        return dtype.name in _DTYPES or dtype.name in WIDER

    def reduce(self, buffer: Any, op: str, watch: Watch) -> None:
        """Reduce an array in place."""
        with standing_in(buffer, op) as values:
            address, factor, dtype = _numbers(values)
            call = ("allReduce", address, address, values.size * factor, dtype, _constant(op.upper()))
            self._begin(f"all_reduce({op})", [call], watch)

    def reduce_parts(self, buffer: Any, op: str, bounds: Sequence[int], watch: Watch) -> None:
        """Reduce for each rank its part: by one call for equal parts, else by one a part."""
        with standing_in(buffer, op) as values:
            address, factor, dtype = _numbers(values)
            parts, how = _parts(address, values.itemsize, bounds), (dtype, _constant(op.upper()))
            calls: list[_Call] = [("reduceScatter", address, parts[self._rank][0], bounds[1] * factor, *how)]
            if not _are_equal(bounds):
                calls = [
                    ("reduce", at, at, count * factor, *how, rank) for rank, (at, count) in enumerate(parts) if count
                ]
            self._begin(f"reduce_scatter({op})", calls, watch)

    def from_root(self, buffer: Any, root: int, watch: Watch) -> None:
        """Give all ranks the bytes of rank `root`."""
        address = buffer.data.ptr
        call = ("broadcast", address, address, buffer.nbytes, _constant(_BYTE), root)
        self._begin(f"broadcast(root={root})", [call], watch)

    def gather(self, joined: Any, bounds: Sequence[int], watch: Watch) -> None:
        """Give all ranks the bytes of all: by one call for equal parts, else by one a part."""
        address, size, byte = joined.data.ptr, joined.itemsize, _constant(_BYTE)
        parts = _parts(address, size, bounds)
        calls: list[_Call] = [("allGather", parts[self._rank][0], address, bounds[1] * size, byte)]
        if not _are_equal(bounds):
            calls = [("broadcast", at, at, count * size, byte, rank) for rank, (at, count) in enumerate(parts) if count]
        self._begin("all_gather", calls, watch)

    def exchange(self, gives: Mapping[int, Any], places: Mapping[int, Any], watch: Watch) -> None:
        """Move bytes between pairs of ranks."""
        byte, named = _constant(_BYTE), (("send", gives), ("recv", places))
        calls = [
            (name, each.data.ptr, each.nbytes, byte, rank)
            for name, arrays in named
            for rank, each in arrays.items()
            if each.nbytes
        ]
        self._begin("an exchange of arrays", calls, watch)

    def _begin(self, what: str, calls: Sequence[_Call], watch: Watch) -> None:
        """Begin calls of NCCL, by name with their arguments, as one on the current stream."""
        import cupy
        from cupy.cuda import nccl

        from mpidist.device.pinned import event_of

        watch.look()
        check_links()
        stream = cupy.cuda.get_current_stream()
        begin = partial(self._begin_group, self._communicator, calls, stream.ptr)
        new = {(name, given[-1] if name in _BETWEEN_TWO else 0) for name, *given in calls} - self._connected
        self._is_beginning = True  # for good if it fails: nobody knows what of it is on its way
        try:
            self._communicator.check_async_error()
            if not new or stream.ptr == cupy.cuda.Stream.ptds.ptr:  # which is another one in each thread
                begin()
            else:
                self._is_connecting = True
                _watched(begin, watch)()
        except nccl.NcclError as error:
            raise self._failed(what, error) from error
        self._event = event_of(stream)
        self._is_beginning = False
        self._connected |= new

    def _begin_group(self, communicator: Any, calls: Iterable[_Call], stream: int) -> None:
        """Begin calls as one group on a stream, in any thread."""
        from cupy.cuda import nccl

        try:
            nccl.groupStart()
            try:
                for name, *given in calls:
                    getattr(communicator, name)(*given, stream)
            finally:
                nccl.groupEnd()
        finally:
            self._is_connecting = False

    def is_done(self) -> bool:
        """Return whether all is done that all ranks have begun.  Local; in any thread."""
        from mpidist.device.pinned import has_happened

        if self._is_beginning:
            return False
        if self.left is not None:
            return self.left()
        return self._event is None or has_happened(self._event)

    def _has_ended(self) -> bool:
        """Return whether all is done; it is not where CUDA itself has failed.  Local; in any thread."""
        with suppress(RuntimeError):
            return self.is_done()
        return False

    def look(self) -> None:
        """Raise if what was begun has failed."""
        error = self._error()
        if error is not None:
            raise self._failed("what was begun", error) from error

    def _error(self) -> Exception | None:
        """Return the error that NCCL has met since its calls were begun.  Local; in any thread."""
        from cupy.cuda import nccl

        try:
            with self._lock:
                if self._communicator is not None:
                    self._communicator.check_async_error()
        except nccl.NcclError as error:
            return error
        return None

    def _failed(self, what: str, error: Exception) -> MpidistError:
        """Return the error of this rank, which ends the control channel: that of another rank, if it is the cause."""
        watch, end = self.control.watch(what), time.monotonic() + _GRACE_SECONDS
        try:
            while time.monotonic() < end:
                watch.tick()
        except MpidistError as cause:
            return cause
        failure = self.control.error(TransportError, f"{what} by {self.name} failed: {_told(error)}")
        self.control.fail(str(failure))
        return self.control.breaks(failure)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, in_order: bool) -> None:
        """Give back what NCCL holds; errors as for `wait_for` in place of a wait for ranks that are gone."""
        if in_order and self._communicator is not None:
            is_main = threading.current_thread() is threading.main_thread()  # any may drop the last user of a link
            wait_to_end(self.is_done, self.control.watch(f"the end of {self.name}") if is_main else None)
        with self._lock:
            communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        self._is_closed.set()
        open_links.remove(self)
        self.control.at_break.remove(self._at_break)
        own_process.not_at_exit(self._at_exit)
        if in_order and self.left is None:
            communicator.destroy()
            return
        if not self._has_ended():
            broken_links.append(self.name)
        if not self._is_connecting:  # in another thread: NCCL would give back what that thread uses
            communicator.abort()

    def _at_exit(self) -> None:
        """End before MPI does: what a failed rank has left unfinished would be waited for."""
        try:
            with suppress(MpidistError):  # which ends the control channel, and so the job
                self.close(in_order=self.control.broken is None)
        finally:
            self.close(in_order=False)

    def _at_break(self) -> None:
        """Leave no kernel behind that waits for another rank."""
        if os.getpid() == self._process:  # and no forked child
            self.close(in_order=False)

    def _keep_watch(self) -> None:
        """End this process where NCCL has failed and the program waits for the GPU by itself: it would for ever.

        To abort NCCL is no way: the program would go on with wrong numbers.
        """
        since = 0.0
        while not self._is_closed.wait(_LOOK_SECONDS):
            error = self._error()
            since = since or time.monotonic()
            if error is None or self._has_ended():
                since = 0.0
            elif time.monotonic() - since > _PATIENCE_SECONDS:
                text = f"{self.control.own_name}: what was begun by {self.name} failed: {_told(error)}"
                say(f"mpidist: {text}. The program has not noticed it in {_PATIENCE_SECONDS:g} s, and is ended")
                sys.stdout.flush()
                os._exit(1)


def _constant(name: str) -> int:
    """Return NCCL's number of a dtype or a reduction."""
    from cupy.cuda import nccl

    number: int = getattr(nccl, f"NCCL_{name}")
    return number


def _numbers(buffer: Any) -> tuple[int, int, int]:
    """Return the address of an array that is reduced, of how many numbers each element is made, and their dtype."""
    name = buffer.dtype.name
    return buffer.data.ptr, 2 if name in _PARTS else 1, _constant(_DTYPES[_PARTS.get(name, name)])


def _parts(address: int, itemsize: int, bounds: Sequence[int]) -> list[tuple[int, int]]:
    """Return address and elements of each rank's part."""
    return [(address + start * itemsize, stop - start) for start, stop in pairwise(bounds)]


def _are_equal(bounds: Sequence[int]) -> bool:
    return len({stop - start for start, stop in pairwise(bounds)}) == 1


def connect(transport: Transport, watch: Watch) -> Nccl | str:
    """Return NCCL between the ranks of a transport, or why it cannot be used, alike on all ranks.

    Collective: every rank calls it, within a begun call.

    Raises
    ------
    TransportError
        NCCL could not be started on a rank; on all ranks, with that rank's reason.
    """
    mine = _facts()
    facts = [json.loads(raw) for raw in transport.exchange(json.dumps(mine).encode(), watch)]
    _tell_of_idle_cards(transport, facts)
    why = why_not(facts)
    if why is not None:
        return why
    with _warnings_kept(), _connected_at_start():
        return Nccl(_started(transport, watch), transport, mine["version"])


#: Taken for good when the warning of idle GPUs is given.
_idle_told = threading.Lock()


def _tell_of_idle_cards(transport: Transport, facts: Sequence[Mapping[str, Any]]) -> None:
    """Warn once, on rank 0 of a whole world: of a group, nobody knows which GPUs the other ranks have."""
    if transport.rank == 0 and transport.size == transport.control.world_size:
        cards = [Card(**fact["card"]) if fact["card"] else None for fact in facts]
        hint = idle_hint(cards, [fact["seen"] for fact in facts])
        if hint and _idle_told.acquire(blocking=False):
            _log.warning("%s", hint)


def _started(transport: Transport, watch: Watch) -> Any:
    """Return NCCL's communicator.  Collective."""
    from cupy.cuda import nccl

    key, why = _attempt(nccl.get_unique_id) if transport.rank == 0 else (b"", "")
    answer = transport.exchange(b"\1" + why.encode() if why else b"\0" + key, watch)[0]
    if answer[:1] == b"\1":
        with suppress(RankFailedError):  # nobody raises, and so fails, while others wait for the answer
            transport.exchange(b"", watch)
        raise _not_started(transport, "make the id of its communicator", 0, answer[1:].decode())

    start = partial(nccl.NcclCommunicator, transport.size, answer[1:], transport.rank)
    communicator, why = _attempt(_watched(start, watch))
    if why:  # the others may be waiting for this rank within NCCL: they learn of it by their watch
        raise _not_started(transport, "start", transport.rank, why)
    try:
        transport.exchange(b"", watch)
    except BaseException:
        communicator.abort()
        raise
    return communicator


@contextmanager
def _connected_at_start() -> Iterator[None]:
    """Have NCCL connect the ranks when it is started inside the block, unless the user has said when.

    By itself it connects them during the first call of a kind, in the host, where nobody looks at a deadline.
    """
    name = "NCCL_RUNTIME_CONNECT"
    if os.environ.get(name):
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def why_not(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why ranks of which this is known cannot use NCCL together; None if they can.  Local.

    `facts`: by rank: `why` NCCL cannot be used there or "", its `version`, the `card` as a mapping, and the `problem`
    with sharing it or "".
    """
    for rank, fact in enumerate(facts):
        if fact["why"]:
            return f"rank {rank}: {fact['why']}"
    versions = {fact["version"]: rank for rank, fact in reversed(list(enumerate(facts)))}
    if len(versions) > 1:
        told = ", ".join(f"{dotted_nccl(version)} on rank {rank}" for version, rank in sorted(versions.items()))
        return f"ranks have different versions of NCCL: {told}"
    cards = [Card(**fact["card"]) for fact in facts]
    for ranks in shared_cards(cards):
        problem = next((facts[rank]["problem"] for rank in ranks if facts[rank]["problem"]), "")
        if problem:
            names = listed(map(str, ranks))
            return f"ranks {names} have one GPU, {cards[ranks[0]]}: {problem}"
    return None


def _facts() -> dict[str, Any]:
    """Return what the others need to know of this rank."""
    facts: dict[str, Any] = {"why": "", "version": 0, "card": None, "problem": "", "seen": []}
    try:
        import cupy
        from cupy.cuda import nccl

        facts["card"], facts["seen"] = asdict(current_card(cupy)), places_without_choice(cupy)
        facts["version"] = nccl.get_version()
        facts["problem"] = sharing_problem(facts["version"])
    except (ImportError, AttributeError, OSError, RuntimeError) as error:  # without NCCL CuPy's module is an empty one
        facts["why"] = f"NCCL cannot be used ({type(error).__name__}: {error})"
    return facts


def _attempt(fn: Callable[[], Any]) -> tuple[Any, str]:
    """Return what a call of NCCL gives, or the text of its error."""
    try:
        return fn(), ""
    except Exception as error:
        return None, _told(error)


def _watched(fn: Callable[[], Any], watch: Watch) -> Callable[[], Any]:
    """Make a call of NCCL's, which waits for others for ever, with an eye on them; return what gives its outcome."""
    import cupy

    device, outcome = cupy.cuda.Device(), Future[Any]()

    def call() -> None:
        try:
            with device:  # a thread begins on the first one
                outcome.set_result(fn())
        except BaseException as error:
            outcome.set_exception(error.with_traceback(None))  # whose frames have the outcome

    threading.Thread(target=call, name="mpidist-nccl", daemon=True).start()
    while not outcome.done():
        watch.tick()
    return outcome.result


def _not_started(transport: Transport, what: str, rank: int, why: str) -> TransportError:
    return TransportError(
        f"rank {transport.rank} of {transport.size}: NCCL could not {what}: rank {rank}: {why}. Without it GPU arrays "
        "go through the host: MPIDIST_ALGORITHM=staged"
    )


# -- what NCCL says ----------------------------------------------------------------------------------------------------

#: The file of NCCL's warnings, which nobody else sees; empty until NCCL has been started here.
_warnings: list[IO[str]] = []


@contextmanager
def _warnings_kept() -> Iterator[None]:
    """Have NCCL, which is started inside the block, write its warnings into a file, unless the user sees to them.

    NCCL looks at its variables once.  They are taken back, for the programs that this one starts, and so is the name of
    the file: both this process and NCCL have it open.
    """
    if _warnings or os.environ.get("NCCL_DEBUG") or os.environ.get("NCCL_DEBUG_FILE"):
        yield
        return
    with tempfile.NamedTemporaryFile(prefix="mpidist-nccl-") as file:
        _warnings.append(open(file.name, errors="replace"))  # noqa: SIM115 - as long as the process
        os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_FILE"] = "WARN", file.name
        try:
            yield
        finally:
            os.environ.pop("NCCL_DEBUG", None)
            os.environ.pop("NCCL_DEBUG_FILE", None)


def _told(error: Exception) -> str:
    """Return NCCL's error with the last of its new warnings, and what to do about it."""
    lines = [line.strip() for file in _warnings for line in file if line.strip()]
    said = list(dict.fromkeys(line.partition("NCCL WARN ")[2] or line for line in lines[-3:]))
    if lines:
        said += _kept(lines)
    text = f"{error} ({'; '.join(said)})" if said else f"{error}"
    cures = [cure for sign, cure in _CURES if sign in text]
    return f"{text}; {cures[0]}" if cures else text


def _kept(lines: Sequence[str]) -> list[str]:
    """Return where people find lines of NCCL; nothing where they cannot be written."""
    with suppress(OSError), tempfile.NamedTemporaryFile("w", prefix="mpidist-nccl-", delete=False) as file:
        file.writelines(f"{line}\n" for line in lines)
        return [f"all that NCCL has said: {file.name}"]
    return []
