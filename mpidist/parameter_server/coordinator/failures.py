"""Errors of scheduled functions: from the worker where they were raised to the chief, with the traceback."""

from __future__ import annotations

import pickle
import traceback
from typing import NamedTuple

from mpidist.errors import OutOfRangeError, RemoteFunctionError
from mpidist.parameter_server.coordinator.functions import PROTOCOL


class Failure(NamedTuple):
    """An error as it travels.

    Attributes
    ----------
    error : bytes or None
        Pickled; None for errors that cannot be.
    text : str
        Its traceback, from the function on.
    """

    error: bytes | None
    text: str


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


def described_of_batch(error: BaseException, name: str, calls: int) -> Failure:
    """Return an error that servers had to say of a push of one of so many calls, the last of them of `name`.  Local.

    Pushes are not waited for one by one, so nobody knows which of the calls it was.
    """
    failure = described(error, name)
    if calls == 1:
        return failure
    note = (
        f"This is about what one of the last {calls} functions on this worker had pushed, which need not be {name}: "
        "servers are asked for errors once for all of a batch."
    )
    return failure._replace(text=f"{failure.text.rstrip()}\n\n{note}\n")


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
