"""`ProcessIdentity`: a process and its machine as text, and whether the process lives.

A process number is valid on one machine, between two starts of it, and inside one container.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from typing import NamedTuple

from mpidist.own_machine import boot_id, process_numbers
from mpidist.runtime import board

_TAG = re.compile(r"(.+)-([0-9a-f]{8})-(\d+)-(\d+)")
_HOST_CHARACTERS = 40


class ProcessIdentity(NamedTuple):
    """A process.

    `host` is for messages.  `machine` says where process numbers mean the same: host, start of the machine and
    container, as a digest.  `started` is in clock ticks since the start of the machine; 0 where the system does not
    tell.
    """

    host: str
    machine: str
    process: int
    started: int

    @classmethod
    def own(cls) -> ProcessIdentity:
        """Return that of this process.  Local."""
        process = os.getpid()
        return cls(platform.node() or "localhost", _machine(), process, board.start_time(process) or 0)

    @classmethod
    def of_tag(cls, tag: str) -> ProcessIdentity | None:
        """Return the process of a tag; None if the text is no tag.  Local."""
        match = _TAG.fullmatch(tag)
        return None if match is None else cls(match[1], match[2], int(match[3]), int(match[4]))

    @property
    def tag(self) -> str:
        """What names of files have of it."""
        host = re.sub(r"[^\w-]", "_", self.host)[:_HOST_CHARACTERS]
        return f"{host}-{self.machine}-{self.process}-{self.started}"

    @property
    def lives(self) -> bool | None:
        """Whether it runs; None if that cannot be seen from here."""
        return board.lives(self.process, self.started) if self.machine == _machine() else None


def _machine() -> str:
    facts = (platform.node(), boot_id(), process_numbers())
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
