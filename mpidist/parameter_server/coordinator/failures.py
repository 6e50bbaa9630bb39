"""Errors of scheduled functions: from the worker where they were raised to the chief, with the traceback."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from mpidist.errors import OutOfRangeError, RemoteFunctionError
from mpidist.parameter_server.client.server_end import ServerEnd
from mpidist.parameter_server.coordinator.functions import PROTOCOL


class Failure(NamedTuple):
    """An error as it travels."""

    error: bytes | None
    text: str
    place: int | None = None


def described(error: BaseException, name: str, frames: int = 1) -> Failure:
    """Return an error that left the function `name`, below so many frames of the worker's own.  Local."""
    trace = error.__traceback__
    for _ in range(frames):
        trace = trace.tb_next if trace is not None else None
    text = "".join(traceback.format_exception(type(error), error, trace))
    if isinstance(error, StopIteration):
        error = OutOfRangeError(
            f"{name} asked for the next element of a data set that has no more: let the function that makes it end in "
            ".repeat(), or schedule as many calls as there are elements"
        )
    return Failure(_pickled(error), text)


def described_of_push(error: BaseException, name: str, place: int) -> Failure:
    """Return an error that a server had to say of what an earlier call, of the function `name`, had pushed.  Local."""
    text = "".join(traceback.format_exception_only(error)).rstrip()
    return Failure(_pickled(error), f"{text}\n\nThis is about what {name} had pushed, when it had returned.\n", place)


def followed(failure: Failure, later: Failure, name: str) -> Failure:
    """Return a failure that also tells of a later one, of the function `name`.  Local."""
    return failure._replace(text=f"{failure.text.rstrip()}\n\nAfter that, {name} raised\n\n{later.text}")


def place_of_push(error: BaseException, servers: Sequence[ServerEnd], pushed: Sequence[Sequence[int]]) -> int | None:
    """Return the call whose push an error is about, None if it is about no push.  Local."""
    if not hasattr(error, "failed_push"):
        return None
    server, number = error.failed_push
    (at,) = [index for index, end in enumerate(servers) if end.number == server]
    return sum(counts[at] < number for counts in pushed)


def _pickled(error: BaseException) -> bytes | None:
    """Return an error pickled, if it is the same when it is unpickled; a SystemExit would end the chief."""
    if not isinstance(error, Exception):
        return None
    try:
        data = pickle.dumps(error, PROTOCOL)
        return data if str(pickle.loads(data)) == str(error) else None
    except Exception:  # noqa: BLE001 - an error's own code may raise anything
        return None


def raised(failure: Failure, where: str, name: str) -> BaseException:
    """Return what the chief raises for a failure; `where` is the worker.  Local."""
    remote = RemoteFunctionError(f"{where} ran {name}, which raised\n\n{failure.text.rstrip()}\n")
    if failure.error is None:
        return remote
    try:
        error = pickle.loads(failure.error)
    except Exception:  # noqa: BLE001 - its class may not be here
        return remote
    error.__cause__ = remote
    return error
