"""`PlannedList`: what goes to each server of the gradients of one list of variables."""

from __future__ import annotations

from typing import Any

from mpidist.parameter_server.client.part import Part
from mpidist.parameter_server.client.server_end import ServerEnd


class PlannedList:
    """What goes to each server of the gradients of one list of variables.

    No cycle of references leads back to it: when the client drops it, its parts say so to their servers.
    """

    def __init__(self, key: Any, parts: list[tuple[ServerEnd, Part]]) -> None:
        self.key = key
        self.parts = parts
        # a server that gathers has memory for the mean of a list's gradients
        self.nbytes = sum(part.plan.own_nbytes + part.nbytes * end.gathers for end, part in parts)
        self.last_call = 0
