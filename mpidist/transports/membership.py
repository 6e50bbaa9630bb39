"""The world a process belongs to: what its transport, topology and control channel are."""

from __future__ import annotations

from dataclasses import dataclass

from mpidist.cluster.topology import Topology
from mpidist.runtime.control import ControlChannel
from mpidist.transports.base import Transport
from mpidist.transports.remote_memory import RemoteMemory
from mpidist.transports.shared import SharedSegments


@dataclass(frozen=True, eq=False)
class World:
    """All ranks of a job, as one of them sees it.

    Attributes
    ----------
    transport : Transport
    topology : Topology
    control : ControlChannel
    launcher : str
        What started the ranks, for messages.
    segments : SharedSegments or None
        Shared memory of the ranks of this node, where there is some.
    remote : RemoteMemory or None
        The memory of the ranks of this node, where they may read each other's.
    """

    transport: Transport
    topology: Topology
    control: ControlChannel
    launcher: str
    segments: SharedSegments | None = None
    remote: RemoteMemory | None = None
