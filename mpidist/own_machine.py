"""What tells the machine of this process from others."""

from __future__ import annotations

import os
from pathlib import Path

#: What tells a machine from others: the number of its start, which containers share, and its numbering of processes, of
#: which a container may have one of its own.
BOOT_ID, PROCESS_NUMBERS = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"


def text_of(path: str | Path) -> str:
    """Return what a file of the system says, empty where there is none.  Local."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def boot_id() -> str:
    """Return the number of this machine's start, empty where it does not say.  Local."""
    return text_of(BOOT_ID).strip()


def process_numbers() -> str:
    """Return the name of this process's numbering of processes; "" where the system has none.  Local."""
    try:
        return os.readlink(PROCESS_NUMBERS)
    except OSError:
        return ""
