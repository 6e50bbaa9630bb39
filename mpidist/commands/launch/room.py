"""The room that ranks have: on the host where most of them share the fewest cores, by which all ranks are placed."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mpidist.cluster.allocation import Allocation
from mpidist.commands.launch.cores import Cores
from mpidist.errors import counted


@dataclass(frozen=True)
class Room:
    """The ranks and the cores of a host."""

    ranks: int
    cores: Cores
    host: str = ""  # its name, where the ranks are on several, or on another machine
    too_few_places: str = ""  # that the scheduler counts on fewer ranks than there are; empty where it does not

    @property
    def each(self) -> int:
        """How many whole cores each rank has."""
        return self.cores.count // self.ranks

    @property
    def ranks_there(self) -> str:
        """How many ranks are on which host, such as ``2 ranks on node1``."""
        return counted(self.ranks, "rank") + (f" on {self.host}" if self.host else "")


def least_room(ranks_of: Mapping[str, int], visible: Cores, allocation: Allocation | None) -> Room:
    """Return the room on the host where a rank has the fewest cores; Local.

    `visible` are the cores of this process.  Hosts of which `allocation` says nothing are taken to be like this
    machine.
    """
    rooms = [Room(ranks, _cores_of(host, visible, allocation), host) for host, ranks in ranks_of.items()]
    least = min(rooms, key=lambda room: room.cores.count / room.ranks)
    return replace(least, too_few_places=_too_few_places(ranks_of, allocation))


def _too_few_places(ranks_of: Mapping[str, int], allocation: Allocation | None) -> str:
    """Return which host has more ranks than places; empty if none has."""
    for host, ranks in ranks_of.items():
        share = allocation.share_of(host) if allocation else None
        if allocation and share and ranks > share.places:
            return f"{allocation.title} counts on {share.places} of the {ranks} ranks on {host}"
    return ""


def _cores_of(host: str, visible: Cores, allocation: Allocation | None) -> Cores:
    """Return the cores that the job has of a host.

    A scheduler counts cores, or hardware threads.  It may keep this process on its own, or may not: then we do.
    """
    share = allocation.share_of(host) if allocation else None
    if allocation is None or share is None or share.cpus is None:
        return visible
    own = allocation.share_of(platform.node())
    if own is None or own.cpus is None:  # from a login node, say: nothing is known of the machine but this
        return Cores(share.cpus, restricted=True)
    cores = min(own.cpus, visible.count)
    return Cores(max(1, share.cpus * cores // own.cpus), restricted=visible.restricted or cores < visible.count)
