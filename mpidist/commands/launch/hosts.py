"""The hosts of a job and how many ranks each takes: by a list as on a command line, or a file of either launcher."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from pathlib import Path

from mpidist.errors import LaunchError, counted

#: A host, and how many ranks it takes: ``node1``, ``node1:4`` (MPICH's file), ``node1 slots=4`` (Open MPI's).
_HOST = re.compile(r"([^\s:,=]+)(?::(\d+)|\s+slots\s*=\s*(\d+))?")


def parse_hosts(text: str, ranks: int) -> dict[str, int]:
    """Return how many ranks each host takes, by a list such as ``"node1:4,node2:4"``; LaunchError if it fails."""
    return _places([(part.strip(), f"--hosts {text}") for part in text.split(",")], ranks)


def read_hosts(path: str, ranks: int) -> dict[str, int]:
    """Return the same by a file: a line a host, ``node1``, ``node1:4`` or ``node1 slots=4``; comments after ``#``."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--hostfile {path}: {error}") from error
    numbered = [(line.partition("#")[0].strip(), f"line {number} of {path}") for number, line in enumerate(lines, 1)]
    return _places([(entry, where) for entry, where in numbered if entry], ranks)


def ranks_by_host(hosts: dict[str, int], ranks: int) -> dict[str, int]:
    """Return how many ranks each host gets; Local.

    The launchers fill one host after the other, and deal those that find no slot evenly.
    """
    counts, left = {}, ranks
    for name, places in hosts.items():
        counts[name] = min(places, left)
        left -= counts[name]
    for number, name in enumerate(hosts):
        counts[name] += left // len(hosts) + int(number < left % len(hosts))
    return {name: count for name, count in counts.items() if count}


def begin_here(hosts: dict[str, int]) -> bool:
    """Return whether rank 0 is on this machine: no hosts are given, or the first one is called like it; Local."""
    first = next(iter(hosts), "localhost")
    return first in ("localhost", "127.0.0.1", "::1") or first.partition(".")[0] == platform.node().partition(".")[0]


def _places(entries: Iterable[tuple[str, str]], ranks: int) -> dict[str, int]:
    """Return the sums by host; without any number all hosts share `ranks`, else one without a number takes 1."""
    parsed = [_parsed(entry, where) for entry, where in entries]
    names = [name for name, _ in parsed]
    is_plain = len({*names}) == len(names) and all(places is None for _, places in parsed)
    share = -(-ranks // max(1, len(names))) if is_plain else 1
    hosts: dict[str, int] = {}
    for name, places in parsed:
        hosts[name] = hosts.get(name, 0) + (share if places is None else places)
    if sum(hosts.values()) < ranks:
        has = ", ".join(f"{name}:{places}" for name, places in hosts.items()) or "none"
        raise LaunchError(f"the hosts take {counted(sum(hosts.values()), 'rank')} ({has}), and -n asks for {ranks}")
    return hosts


def _parsed(entry: str, where: str) -> tuple[str, int | None]:
    match = _HOST.fullmatch(entry)
    if match is None:
        raise LaunchError(f"{where}: expected a host as NAME, NAME:RANKS or NAME slots=RANKS, got {entry!r}")
    number = match[2] or match[3]
    return match[1], None if number is None else int(number)
