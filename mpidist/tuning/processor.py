"""The processor of this host, as it names itself: its figures hold for no other."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path


def processor(proc: Path = Path("/proc/cpuinfo"), cpus: Path = Path("/sys/devices/system/cpu")) -> str:
    """Return model, cores and caches in one line; the machine's type where the system tells no more (Local)."""
    model = platform.machine()
    with suppress(OSError):
        names = [
            line.partition(":")[2].strip() for line in proc.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    caches = [_cache(index) for index in sorted(cpus.glob("cpu0/cache/index*"))]
    return ", ".join([model, f"{os.cpu_count()} cores", *filter(None, caches)])


def _cache(index: Path) -> str:
    """Return level and size of a cache; empty for one of instructions, or one that cannot be read."""
    with suppress(OSError):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        return "" if kind == "Instruction" else f"L{level} {size}"
    return ""
