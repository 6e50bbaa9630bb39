"""What tells the machine of this process from others."""

from __future__ import annotations

import os
from pathlib import Path

#: What tells a machine from others: the number of its start, which containers share, and its numbering of processes, of
#: which a container may have one of its own.
BOOT_ID, PROCESS_NUMBERS = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"


def boot_id() -> str:
    """Return the number of the machine's start; "" where the system has none.  Local."""
    try:
        return Path(BOOT_ID).read_text().strip()
    except OSError:
        return ""


def process_numbers() -> str:
    """Return the name of this process's numbering of processes; "" where the system has none.  Local."""
    try:
        return os.readlink(PROCESS_NUMBERS)
    except OSError:
        return ""
