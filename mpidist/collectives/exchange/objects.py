"""Collectives on Python objects: their pickles are gathered as bytes, of which ranks may have different numbers.

What cannot be pickled is replaced by the text of the error, behind a zero: no pickle begins with one.  A broadcast is a
gathering to which the root alone gives something.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy

from mpidist.collectives.call import Call
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.exchange import plain
from mpidist.collectives.exchange.array_bound import ArrayBound, SentCollective
from mpidist.collectives.exchange.node_exchange import CountedExchange, memory_of_results
from mpidist.errors import ObjectError
from mpidist.runtime.control import Watch
from mpidist.transports.base import Transport

_PROTOCOL = 5
_FAILED = b"\0"
_NOTHING = numpy.empty(0, numpy.uint8)


def broadcast_object(
    communicator: Communicator, root_object: Any, root_rank: int = 0, timeout_seconds: float | None = None
) -> Any:
    """Return the object of `root_rank` on every rank; there it is the object itself.

    Collective: every rank calls it in the same order, with the same `root_rank`.  Errors as for `all_gather_object`;
    and ValueError where there is no such rank.
    """
    root = plain.whole(root_rank, "broadcast_object: root_rank")
    if not 0 <= root < communicator.size:
        raise ValueError(f"{communicator.control.own_name}: root_rank {root} is no rank of a world of this size")
    name, is_root = f"broadcast_object(root_rank={root})", communicator.rank == root
    content, error = _packed(root_object) if is_root else (_NOTHING, None)
    joined, _ = _joined(communicator, name, root, content, timeout_seconds)
    _raise_problems(communicator, name, {root: joined}, error)
    return root_object if is_root else _unpacked(communicator, name, root, joined)


def all_gather_object(communicator: Communicator, rank_object: Any, timeout_seconds: float | None = None) -> list[Any]:
    """Return copies of the objects of all ranks, in rank order.

    Collective: every rank calls it in the same order.

    Raises
    ------
    ObjectError
        An object cannot be pickled: on all ranks.  It cannot be unpickled: on the rank that cannot.
    CollectiveMismatchError, TransportTimeoutError, RankFailedError
    """
    name, (content, error) = "all_gather_object", _packed(rank_object)
    joined, lengths = _joined(communicator, name, None, content, timeout_seconds)
    pieces, start = {}, 0
    for rank, length in enumerate(lengths):
        pieces[rank] = joined[start : start + length]
        start += length
    _raise_problems(communicator, name, pieces, error)
    return [_unpacked(communicator, name, rank, piece) for rank, piece in pieces.items()]


# -- bytes of different lengths ----------------------------------------------------------------------------------------


def _joined(
    communicator: Communicator, name: str, root: int | None, content: Any, timeout_seconds: float | None
) -> Any:
    """Return the joined bytes, and the length of each rank's; only `root` gives some, if there is one.  Collective."""
    return communicator.bindings.call((name,), _bound, (communicator, name, root), content, timeout_seconds)


def _bound(communicator: Communicator, name: str, root: int | None) -> ArrayBound:
    segments, call = communicator.segments, Call(name)
    if segments is not None:
        return CountedExchange(communicator, segments, call, _NOTHING, memory_of_results(), axis=0)
    move = plain.counted_gather if root is None else partial(_sent_from, root)
    return SentCollective(communicator, call, _NOTHING, 0, move)


def _sent_from(root: int, transport: Transport, content: Any, watch: Watch) -> tuple[Any, list[int]]:
    length = numpy.array([len(content)], numpy.int64)
    plain.from_root(transport, length, root, watch)
    joined = content if transport.rank == root else numpy.empty(int(length[0]), numpy.uint8)
    plain.from_root(transport, joined, root, watch)
    return joined, []


# -- pickles -----------------------------------------------------------------------------------------------------------


def _packed(value: Any) -> tuple[Any, Exception | None]:
    """Return the bytes of an object's pickle; or those that stand for the error, and the error."""
    try:
        return numpy.frombuffer(pickle.dumps(value, _PROTOCOL), numpy.uint8), None
    except Exception as error:  # any: it comes from the user's class, and the other ranks wait for word of it
        text = f"{type(error).__name__}: {error}".encode(errors="replace")
        return numpy.frombuffer(_FAILED + text, numpy.uint8), error


def _raise_problems(communicator: Communicator, name: str, found: Mapping[int, Any], own: Exception | None) -> None:
    """Raise on all ranks if an object could not be pickled; names the ranks whose objects these are."""
    control = communicator.control
    bad = [rank for rank, content in found.items() if content[0] == _FAILED[0]]
    if not bad:
        return
    text = found[bad[0]][1:].tobytes().decode(errors="replace")
    more = f" (nor can those of {control.names(bad[1:])})" if bad[1:] else ""
    error = ObjectError(
        f"{control.own_name}: {name}: the object of {control.name(bad[0])} cannot be pickled{more}: {text}. "
        "Give an object of plain values and arrays, whose classes and functions are at the top level of a module"
    )
    error.on_all_ranks = True
    raise error from own


def _unpacked(communicator: Communicator, name: str, rank: int, content: Any) -> Any:
    """Return the object of `rank`; raise, on this rank alone, where it cannot be made here."""
    control = communicator.control
    try:
        return pickle.loads(content)
    except Exception as error:  # any: it comes from the user's class
        raise ObjectError(
            f"{control.own_name}: {name}: the object of {control.name(rank)} cannot be unpickled here: "
            f"{type(error).__name__}: {error}. Every rank needs the modules of the object's classes"
        ) from error
