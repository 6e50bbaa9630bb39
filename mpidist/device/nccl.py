"""NVIDIA's NCCL between the GPUs of some ranks, by CuPy's binding."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from mpidist import own_process
from mpidist.device.cards import SHARING_VARIABLE, Card, current_card, dotted_nccl, shared_cards, sharing_problem
from mpidist.errors import TransportError, listed

if TYPE_CHECKING:
    from mpidist.runtime.watch import Watch
    from mpidist.transports.base import Transport

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

#: What NCCL says, and what to do about it.
_CURES = (
    ("Duplicate GPU", "start as many ranks as there are GPUs, or bind each rank to a GPU of its own"),
    ("Multiple Ranks are using the same GPU", f"set {SHARING_VARIABLE}=1, or start as many ranks as there are GPUs"),
    ("/dev/shm", "give /dev/shm more room (docker run --shm-size=8g), or set NCCL_SHM_DISABLE=1"),
    ("No space left on device", "give /dev/shm more room (docker run --shm-size=8g), or set NCCL_SHM_DISABLE=1"),
    ("no socket interface found", "name the interface between the nodes with NCCL_SOCKET_IFNAME"),
    ("Connection refused", "name the interface between the nodes with NCCL_SOCKET_IFNAME"),
    ("driver version is insufficient", "install a newer driver, or the NCCL of the driver's CUDA version"),
    ("out of memory", "leave NCCL some GPU memory, or set NCCL_BUFFSIZE=1048576"),
)


class Nccl:
    """NCCL's communicator of some ranks; see `Link`.

    Parameters
    ----------
    communicator : cupy.cuda.nccl.NcclCommunicator
    transport : Transport
        Over the same ranks.
    version : int
    """

    def __init__(self, communicator: Any, transport: Transport, version: int) -> None:
        self.name = f"NCCL {dotted_nccl(version)}"
        self._communicator: Any = communicator
        self._own_name = f"rank {transport.rank} of {transport.size}"
        self._control = transport.control
        own_process.at_exit(self._at_exit)

    def can_reduce(self, dtype: numpy.dtype, op: str) -> bool:
        """Return whether NCCL reduces such values, and to the host's results: its least and greatest lose NaN."""
        if dtype.kind == "c":
            return op == "sum" and dtype.name in _PARTS
        return dtype.name in _DTYPES and not (dtype.kind == "f" and op in ("min", "max"))

    def all_reduce(self, buffer: Any, op: str, watch: Watch) -> None:
        """Reduce a flat array in place, on the current stream."""
        import cupy
        from cupy.cuda import nccl

        watch.look()
        part, count = buffer.dtype.name, buffer.size
        if part in _PARTS:
            part, count = _PARTS[part], 2 * count
        dtype, reduction = getattr(nccl, f"NCCL_{_DTYPES[part]}"), getattr(nccl, f"NCCL_{op.upper()}")
        address, stream = buffer.data.ptr, cupy.cuda.get_current_stream().ptr
        try:
            self._communicator.check_async_error()
            self._communicator.allReduce(address, address, count, dtype, reduction, stream)
        except nccl.NcclError as error:
            self.close(in_order=False)
            raise TransportError(f"{self._own_name}: all_reduce({op}) by {self.name} failed: {_told(error)}") from error

    def close(self, in_order: bool) -> None:
        """Give back what NCCL holds."""
        communicator, self._communicator = self._communicator, None
        own_process.not_at_exit(self._at_exit)
        if communicator is not None:
            communicator.destroy() if in_order else communicator.abort()

    def _at_exit(self) -> None:
        """End before MPI does: what a failed rank has left unfinished would be waited for."""
        if self._communicator is not None:
            self.close(in_order=self._control.broken is None)


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
    why = why_not(facts)
    if why is not None:
        return why
    from cupy.cuda import nccl

    made = _attempt(nccl.get_unique_id) if transport.rank == 0 else (b"", "")
    key = _agreed(transport, watch, made, "make the id of its communicator")[0]
    ended = _attempt(lambda: nccl.NcclCommunicator(transport.size, key, transport.rank))
    communicator = ended[0]
    try:
        _agreed(transport, watch, (b"", ended[1]), "start")
    except TransportError:
        if communicator is not None:
            communicator.abort()
        raise
    return Nccl(communicator, transport, mine["version"])


def why_not(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why ranks of which this is known cannot use NCCL together; None if they can.  Local.

    Parameters
    ----------
    facts : sequence of mapping
        By rank: `why` NCCL cannot be used there or "", its `version`, the `card` as a mapping, and the `problem` with
        sharing it or "".
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
    facts: dict[str, Any] = {"why": "", "version": 0, "card": None, "problem": ""}
    try:
        import cupy
        from cupy.cuda import nccl

        if not os.environ.get("NCCL_DEBUG"):
            _keep_warnings()
        facts["version"] = nccl.get_version()
        facts["card"] = asdict(current_card(cupy))
        facts["problem"] = sharing_problem(facts["version"])
    except (ImportError, AttributeError, OSError, RuntimeError) as error:  # without NCCL CuPy's module is an empty one
        facts["why"] = f"NCCL cannot be used ({type(error).__name__}: {error})"
    return facts


def _attempt(fn: Callable[[], Any]) -> tuple[Any, str]:
    """Return what a call of NCCL gives, or the text of its error."""
    from cupy.cuda import nccl

    try:
        return fn(), ""
    except nccl.NcclError as error:
        return None, _told(error)


def _agreed(transport: Transport, watch: Watch, made: tuple[Any, str], what: str) -> list[bytes]:
    """Return by rank what was made; TransportError on all ranks if one of them could not."""
    value, why = made
    answers = transport.exchange(b"\1" + why.encode() if why else b"\0" + (value or b""), watch)
    failed = [(rank, raw[1:].decode()) for rank, raw in enumerate(answers) if raw[:1] == b"\1"]
    if failed:
        told = "; ".join(f"rank {rank}: {why}" for rank, why in failed[:4])
        raise TransportError(
            f"rank {transport.rank} of {transport.size}: NCCL could not {what}: {told}. Without it GPU arrays are "
            "reduced through the host: MPIDIST_ALGORITHM=staged"
        )
    return [raw[1:] for raw in answers]


# -- what NCCL says ----------------------------------------------------------------------------------------------------

_warnings: list[Path] = []


def _keep_warnings() -> None:
    """Have NCCL write its warnings into a file, from which errors quote them."""
    if not _warnings:
        handle, name = tempfile.mkstemp(prefix=f"mpidist-nccl-{os.getpid()}-")
        os.close(handle)
        _warnings.append(Path(name))
        own_process.at_exit(_drop_warnings)
        os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_FILE"] = "WARN", name


def _drop_warnings() -> None:
    for path in _warnings:
        path.unlink(missing_ok=True)


def _told(error: Exception) -> str:
    """Return NCCL's error with the last of its warnings, and what to do about it."""
    lines = [line for path in _warnings if path.exists() for line in path.read_text(errors="replace").splitlines()]
    said = "; ".join(line.partition("NCCL WARN ")[2] or line for line in lines[-3:] if line.strip())
    text = f"{error}{f' ({said})' if said else ''}"
    cures = [cure for sign, cure in _CURES if sign in text]
    return f"{text}; {cures[0]}" if cures else text
