"""What the chief does for all ranks: its result, or its error, is known to every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from mpidist.collectives.communicator import Communicator


class ChiefResult(NamedTuple):
    """What became of a call on the chief; the same on all ranks.

    `kind` and `text` are the type of the error and what it says, empty where there was none; the chief has the `error`
    itself.
    """

    result: Any = None
    kind: str = ""
    text: str = ""
    error: Exception | None = None

    def checked(self, kind_of: Callable[[str], type[Exception]]) -> Any:
        """Return the result; raise the error on the chief, and one of ``kind_of(kind)`` on the others.  Local."""
        if self.error is not None:
            raise self.error
        if self.kind:
            raise kind_of(self.kind)(self.text)
        return self.result


def from_chief(
    communicator: Communicator,
    fn: Callable[[], Any],
    what: str,
    root: int = 0,
    timeout_seconds: float | None = None,
) -> ChiefResult:
    """Call a function on the chief, or another `root`, and return on all ranks what became of it.  Collective.

    JSON can hold the result of `fn`; `what` is for messages.
    """
    own: Exception | None = None
    told = ""
    if communicator.rank == root:
        try:
            told = json.dumps([fn(), "", ""])
        except Exception as error:  # whatever it is, the other ranks are waiting for word of it
            own, told = error, json.dumps([None, type(error).__name__, _text_of(error)])
    result, kind, text = json.loads(communicator.exchange(told.encode(), what, timeout_seconds)[root])
    return ChiefResult(result, kind, text, own)


def _text_of(error: Exception) -> str:
    """Return what an error says; also of a class that cannot say it."""
    try:
        return str(error)
    except Exception as why:
        return f"(its text cannot be made: {type(why).__name__})"
