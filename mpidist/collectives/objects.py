"""Collectives on Python objects: pickled, with their sizes sent first."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy

from mpidist.collectives import plain
from mpidist.collectives.call import Call
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.executor import Executor
from mpidist.collectives.persistent import Once
from mpidist.errors import ObjectError
from mpidist.runtime.control import Watch
from mpidist.schedules.table import algorithm as schedule_of

_PROTOCOL = 5


class _Packed(NamedTuple):
    """A pickled object; or, where there is a problem, the text of the error that pickling it has raised."""

    content: bytes
    error: Exception | None = None


def broadcast_object(
    communicator: Communicator, root_object: Any, root_rank: int = 0, timeout_seconds: float | None = None
) -> Any:
    """Return the object of `root_rank` on every rank; there it is the object itself.

    Collective: every rank calls it in the same order, with the same `root_rank`.  Errors as for `all_gather_object`;
    and ValueError where there is no such rank.
    """
    root = operator.index(root_rank)
    if not 0 <= root < communicator.size:
        raise ValueError(f"{communicator.control.own_name}: root_rank {root} is no rank of a world of this size")
    is_root = communicator.rank == root
    packed = _packed(root_object) if is_root else None
    call = Call(f"broadcast_object(root_rank={root})")
    found = Once(communicator, call, partial(_from_root, communicator, root, packed))(None, timeout_seconds)
    _raise_problems(communicator, call, {root: found}, packed)
    return root_object if is_root else _unpacked(communicator, call, root, found.content)


def all_gather_object(communicator: Communicator, rank_object: Any, timeout_seconds: float | None = None) -> list[Any]:
    """Return copies of the objects of all ranks, in rank order.

    Collective: every rank calls it in the same order.

    Raises
    ------
    ObjectError
        An object cannot be pickled: on all ranks.  It cannot be unpickled: on the rank that cannot.
    CollectiveMismatchError, TransportTimeoutError, RankFailedError
    """
    packed = _packed(rank_object)
    call = Call("all_gather_object")
    everything = Once(communicator, call, partial(_from_all, communicator, packed))(None, timeout_seconds)
    _raise_problems(communicator, call, dict(enumerate(everything)), packed)
    return [_unpacked(communicator, call, rank, each.content) for rank, each in enumerate(everything)]


def _packed(value: Any) -> _Packed:
    try:
        return _Packed(pickle.dumps(value, _PROTOCOL))
    except Exception as error:  # any: it comes from the user's class, and the other ranks wait for word of it
        return _Packed(f"{type(error).__name__}: {error}".encode(errors="replace"), error)


def _header(packed: _Packed | None) -> Any:
    """Return the bytes that follow, and whether they are those of an error."""
    sizes = (0, 0) if packed is None else (len(packed.content), packed.error is not None)
    return numpy.array(sizes, dtype=numpy.int64)


def _received(content: Any, failed: Any) -> _Packed:
    text = content.tobytes()
    return _Packed(text, Exception(text.decode(errors="replace")) if failed else None)


def _from_root(communicator: Communicator, root: int, packed: _Packed | None, watch: Watch) -> _Packed:
    """Return what `root` has packed."""
    if packed is not None and communicator.size == 1:
        return packed
    header = _header(packed)
    plain.broadcast(communicator.transport, header, root, watch)
    content = numpy.empty(header[0], numpy.uint8)
    if packed is not None:
        content[:] = numpy.frombuffer(packed.content, numpy.uint8)
    plain.broadcast(communicator.transport, content, root, watch)
    return _received(content, header[1])


def _from_all(communicator: Communicator, packed: _Packed, watch: Watch) -> Sequence[_Packed]:
    """Return what each rank has packed."""
    if communicator.size == 1:
        return [packed]
    transport, rank = communicator.transport, communicator.rank
    ring = schedule_of("all_gather", "ring")
    headers = numpy.zeros((communicator.size, 2), numpy.int64)
    headers[rank] = _header(packed)
    Executor(ring, transport, headers.reshape(-1), bounds=range(0, headers.size + 1, 2)).run(watch)
    bounds = [0, *headers[:, 0].cumsum().tolist()]
    joined = numpy.empty(bounds[-1], numpy.uint8)
    joined[bounds[rank] : bounds[rank + 1]] = numpy.frombuffer(packed.content, numpy.uint8)
    Executor(ring, transport, joined, bounds=bounds).run(watch)
    pieces = zip(bounds[:-1], bounds[1:], headers[:, 1], strict=True)
    return [_received(joined[start:stop], failed) for start, stop, failed in pieces]


def _raise_problems(communicator: Communicator, call: Call, found: dict[int, _Packed], own: _Packed | None) -> None:
    """Raise on all ranks if an object could not be pickled; names the first rank whose object it is."""
    control = communicator.control
    bad = [rank for rank, packed in found.items() if packed.error is not None]
    if not bad:
        return
    text = found[bad[0]].content.decode(errors="replace")
    more = f" (nor can those of {control.names(bad[1:])})" if bad[1:] else ""
    error = ObjectError(
        f"{control.own_name}: {call.what}: the object of {control.name(bad[0])} cannot be pickled{more}: {text}. "
        "Give an object of plain values and arrays, whose classes and functions are at the top level of a module"
    )
    error.on_all_ranks = True
    raise error from (own.error if own is not None else None)


def _unpacked(communicator: Communicator, call: Call, rank: int, content: bytes) -> Any:
    """Return the object of `rank`; raise, on this rank alone, where it cannot be made here."""
    control = communicator.control
    try:
        return pickle.loads(content)
    except Exception as error:  # any: it comes from the user's class
        raise ObjectError(
            f"{control.own_name}: {call.what}: the object of {control.name(rank)} cannot be unpickled here: "
            f"{type(error).__name__}: {error}. Every rank needs the modules of the object's classes"
        ) from error
