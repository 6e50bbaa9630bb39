"""Slurm's compact lists: of host names (``n[1-3,07],m5``) and of tasks per node (``3(x2),1``)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?", re.ASCII)
_PART = re.compile(r"[^\[\],\s]+|\[[^\[\]]*\]|,")


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the host names of a list such as ``gpu-[01-03,7]-ib,n[1-2]c[0-1]``, in the order written.  Local.

    Each bracket holds numbers and ranges; leading zeros are kept.  Several brackets in a name are expanded like nested
    loops, the last one fastest.  An empty list has no hosts.  A ValueError shows the list and the part that cannot be
    read.
    """
    if not hostlist:
        return []
    return [name for parts in _names(hostlist) for name in map("".join, itertools.product(*parts))]


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Return the number of tasks on each node of a list such as ``3(x2),2,1``: 3, 3, 2, 1. Local."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise ValueError(f"tasks per node {tasks_per_node!r}: expected a list like '3(x2),1', cannot read {part!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _names(hostlist: str) -> Iterator[list[Sequence[str]]]:
    """Yield for each name its parts: the alternatives of a bracket, or the one text between brackets."""
    name: list[Sequence[str]] = []
    for token in [*_tokens(hostlist), ","]:
        if token != ",":
            name.append(_alternatives(token, hostlist) if token.startswith("[") else [token])
            continue
        if not name:
            raise ValueError(f"host list {hostlist!r}: a name is missing before or after a comma")
        yield name
        name = []


def _tokens(hostlist: str) -> Iterator[str]:
    position = 0
    while position < len(hostlist):
        match = _PART.match(hostlist, position)
        if match is None:
            raise ValueError(f"host list {hostlist!r}: expected names like n[1-3], cannot read {hostlist[position:]!r}")
        yield match[0]
        position = match.end()


def _alternatives(bracket: str, hostlist: str) -> list[str]:
    numbers: list[str] = []
    for part in bracket[1:-1].split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"host list {hostlist!r}: expected a number or range, cannot read {part!r} of {bracket!r}")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"host list {hostlist!r}: the range {part!r} in {bracket!r} runs backwards")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def short_host(host: str) -> str:
    """Return a host's name without its domain."""
    return host.partition(".")[0]
