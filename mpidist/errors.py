"""What can go wrong, as exception classes.

::

    MpidistError
    ├── ClusterResolutionError   (RuntimeError)   the set of ranks cannot be made out
    │   └── LaunchError                           ranks were started, but do not form one world
    ├── TransportError           (RuntimeError)   bytes could not be moved
    │   ├── TransportTimeoutError (TimeoutError)  a deadline passed; names the ranks that did not come
    │   └── RankFailedError                       another rank failed, was killed or left early; names it
    │       └── PeerLostError                     the same in a job that goes on without that rank
    ├── CollectiveMismatchError  (ValueError)     ranks called collectives with different tensors
    │   └── MergeCallError       (RuntimeError)   some replicas made a `merge_call`, and others did not
    ├── RemoteReplicaError       (RuntimeError)   the function given to ``run`` raised on another replica
    ├── ServerError              (RuntimeError)   a parameter server could not do what it was asked; names it
    ├── RemoteFunctionError      (RuntimeError)   a scheduled function raised on a worker; has the traceback there
    ├── CancelledError           (RuntimeError)   a scheduled function was not run, because an earlier one failed
    ├── FunctionTimeoutError     (TimeoutError)   scheduled functions were not done in time; names worker and function
    ├── TornVariableError        (RuntimeError)   a variable's update was broken off in the middle
    ├── InputError               (RuntimeError)   an element of a data set could not be made; names it and the cause
    ├── OutOfRangeError          (IndexError)     `get_next` of an iterator that has no more elements
    ├── UnsupportedDtypeError    (TypeError)      no reduction or transport for this dtype or memory
    ├── ObjectError              (TypeError)      a Python object cannot be pickled, or not be unpickled on this rank
    ├── MissingDependencyError   (ImportError)    an optional package is needed here
    └── CheckpointError          (RuntimeError)   a checkpoint cannot be written or read
        └── CheckpointNotFoundError (FileNotFoundError)

Every message says what failed, on which rank, what was got and expected, and what to do, in that order.
A failure that depends on other ranks is raised on all of them; such an error has ``on_all_ranks = True``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mpidist.hints import public_module

_QUOTES = reprlib.Repr()
_QUOTES.maxstring = _QUOTES.maxother = 120


class MpidistError(Exception):
    """Base of every error that mpidist raises on its own account."""

    #: True when every rank of the group raises this error together (a mismatch, a timeout).
    on_all_ranks = False


class ClusterResolutionError(MpidistError, RuntimeError):
    """The set of ranks, or the role of one of them, cannot be made out."""


class LaunchError(ClusterResolutionError):
    """Ranks were started, but they do not form one world."""


class TransportError(MpidistError, RuntimeError):
    """Bytes could not be moved between ranks."""


class TransportTimeoutError(TransportError, TimeoutError):
    """A deadline passed, or would for certain; the message names the ranks that did not come, or wait in a ring."""

    on_all_ranks = True


class RankFailedError(TransportError):
    """Another rank failed, was killed or left early; the message names it.

    Parameters
    ----------
    message : str
    rank : int or None
        The rank that failed, as numbered in the world.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerLostError(RankFailedError):
    """The rank at the other end of a line is gone, in a job that tolerates faults: what does not need it goes on."""


class CollectiveMismatchError(MpidistError, ValueError):
    """Ranks called collectives with different tensors, or called different collectives."""

    on_all_ranks = True


class MergeCallError(CollectiveMismatchError, RuntimeError):
    """Some replicas made a `merge_call` where others called something else."""


class RemoteReplicaError(MpidistError, RuntimeError):
    """The function given to ``run`` raised on another replica; raised by the next collective of all other ranks.

    All ranks agree again on where they are: if each of them catches its error, they can go on together.

    Parameters
    ----------
    message : str
    rank : int
        The rank on which the function raised, as numbered in the world.
    cause : str
        The error there: its type, its text, and the line of the program.
    call : int
        The number of the collective call in which this rank met it.

    Attributes
    ----------
    rank, call : int
    cause : str
    """

    def __init__(self, message: str, rank: int, cause: str, call: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.cause = cause
        self.call = call


class RemoteFunctionError(MpidistError, RuntimeError):
    """A function scheduled by a `ClusterCoordinator` raised on a worker; the message has worker, function, traceback.

    It is the ``__cause__`` of the error that the chief raises, and stands for errors that cannot be pickled.
    """


class CancelledError(MpidistError, RuntimeError):
    """A scheduled function was not run, because one that was scheduled before it failed."""


class FunctionTimeoutError(MpidistError, TimeoutError):
    """Scheduled functions were not done in time; the message names worker, function and seconds.  They go on."""


class ServerError(MpidistError, RuntimeError):
    """A parameter server could not do what this rank asked of it, or apply what it pushed; the server goes on."""


class TornVariableError(MpidistError, RuntimeError):
    """An update of this variable was broken off in the middle: it has no value until it is set or restored."""


class InputError(MpidistError, RuntimeError):
    """An element of a data set could not be read or mapped; the message names it, the cause is its ``__cause__``."""


class OutOfRangeError(MpidistError, IndexError):
    """`get_next` was called on an iterator that has no more elements."""


class UnsupportedDtypeError(MpidistError, TypeError):
    """There is no reduction or transport for this dtype or kind of memory."""


class DeviceError(MpidistError, RuntimeError):
    """The GPU of a rank cannot be used; the message names the rank, the GPU, and what CUDA says."""


class ObjectError(MpidistError, TypeError):
    """A Python object cannot be pickled (raised on all ranks), or cannot be unpickled on this rank."""


class MissingDependencyError(MpidistError, ImportError):
    """An optional package is needed for what was asked."""


class CheckpointError(MpidistError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at this place."""


def listed(items: Iterable[str], separator: str = ", ", most: int = 8) -> str:
    """Return items for a message: the first few, and how many more there are.  Local."""
    found = list(items)
    more = f"{separator}and {len(found) - most} more" if len(found) > most else ""
    return separator.join(found[:most]) + more


def counted(count: int, noun: str) -> str:
    """Return a number of things for a message: ``1 rank``, ``2 ranks``.  Local."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def quoted(value: object) -> str:
    """Return a value for a message, in one line: of a long one the beginning and the end.  Local."""
    try:
        return " ".join(_QUOTES.repr(value).split())
    except Exception:  # of a class with the name of one of Python's, or an int of too many digits
        return f"<{type(value).__name__}>"


if not TYPE_CHECKING:
    __all__ = [name for name, value in vars().items() if isinstance(value, type) and value.__module__ == __name__]

public_module(__name__)
