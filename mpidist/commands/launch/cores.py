"""How many cores this process may use, and whether all of the machine's: what binding and thread counts go by."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_CPU = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Cores:
    """The cores that are visible from here."""

    count: int  # physical cores this process may run on; two hardware threads of one core count once
    restricted: bool  # whether the machine has processors this process may not run on (taskset, a batch system's share)


def visible_cores() -> Cores:
    """Return the `Cores` of this process; Local."""
    if not hasattr(os, "sched_getaffinity"):
        return Cores(os.cpu_count() or 1, restricted=False)
    processors = os.sched_getaffinity(0)
    physical = {_siblings(processor) for processor in processors}
    return Cores(len(physical), restricted=len(processors) < (os.cpu_count() or 1))


def _siblings(processor: int) -> str:
    """Return the list of hardware threads of this processor's core: equal for two threads of one core."""
    path = _CPU / f"cpu{processor}" / "topology" / "thread_siblings_list"
    try:
        return path.read_text().strip()
    except OSError:  # a container without /sys: every processor counts as a core
        return str(processor)
