"""How much memory is left: on this machine, and for this process's container or batch job (a control group, version 2).

Memory that is reserved beyond that is not refused by Linux.  It ends processes later, any of them, without a message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mpidist.own_machine import text_of

_MACHINE, _OWN_GROUP, _GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def room_bytes() -> int | None:
    """Return how many bytes can still be had, None where the system does not tell.  Local."""
    return min((room for room in (_of_machine(), *map(_of_group, _own_groups())) if room is not None), default=None)


def _of_machine() -> int | None:
    found = re.search(r"^MemAvailable: +(\d+) kB", text_of(_MACHINE), re.MULTILINE)
    return None if found is None else 1024 * int(found[1])


def _own_groups() -> Iterator[Path]:
    """Yield the directories of this process's control group and of those around it: each may have a limit."""
    found = re.search(r"^0::/?(.*)$", text_of(_OWN_GROUP), re.MULTILINE)
    if found is not None:
        own = _GROUPS / found[1]
        yield from (each for each in (own, *own.parents) if each.is_relative_to(_GROUPS))


def _of_group(folder: Path) -> int | None:
    limit, used = (text_of(folder / name).strip() for name in ("memory.max", "memory.current"))
    if not (limit.isdigit() and used.isdigit()):
        return None  # no limit, or no such file
    # What files leave in memory is counted, and given up when need be.
    kept = re.search(r"^inactive_file (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE)
    return max(0, int(limit) - int(used) + (int(kept[1]) if kept else 0))
