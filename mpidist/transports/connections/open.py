"""`open_connections`: the one collective call about connections, and the choice of the kind of each."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mpidist.errors import CollectiveMismatchError
from mpidist.transports.base import exchange_among
from mpidist.transports.connections.base import Connection
from mpidist.transports.connections.messages import open_message_connections
from mpidist.transports.connections.shared import open_shared_connections
from mpidist.transports.connections.waiting import Presence
from mpidist.transports.membership import World


def open_connections(world: World, peers: Sequence[int], *, ring_bytes: int = 1 << 18) -> dict[int, Connection]:
    """Open a connection to each of `peers`, and return them by peer.

    Collective: every rank of the world calls it in the same order, also one without peers.  `peers` are ranks of the
    world's transport; two ranks that connect name each other.  `ring_bytes` is memory for headers under way, for each
    direction of a shared connection.  ValueError where a rank names itself, or one that does not exist;
    CollectiveMismatchError, on all ranks, where a rank names one that does not name it.
    """
    transport, control = world.transport, world.control
    mine = sorted(set(peers))
    if not all(0 <= peer < transport.size and peer != transport.rank for peer in mine):
        raise ValueError(
            f"rank {transport.rank} of {transport.size}: connections to {mine}: ranks that there are, not itself"
        )
    watch = control.watch("opening connections")
    peers_of = [json.loads(raw) for raw in transport.exchange(json.dumps(mine).encode(), watch)]
    _check_symmetric(peers_of)
    presence = Presence(control, transport.world_ranks)
    here = world.topology.ranks_of_node[world.topology.node_of[transport.rank]]
    connections: dict[int, Connection] = {}
    if control.settings.shared_memory and any(peer in here for rank in here for peer in peers_of[rank]):
        connections |= open_shared_connections(
            transport.rank,
            here,
            peers_of,
            presence,
            ring_bytes,
            lambda payload: exchange_among(transport, here, payload, watch),
        )
    missing = [peer for peer in mine if peer not in connections]
    if any(raw == b"1" for raw in transport.exchange(b"1" if missing else b"0", watch)):
        connections |= open_message_connections(transport.split(0), missing, presence)
    in_order = {peer: connections[peer] for peer in mine}
    presence.connections = list(in_order.values())
    return in_order


def _check_symmetric(peers_of: Sequence[Sequence[int]]) -> None:
    """Raise, on all ranks alike, unless all named each other."""
    for rank, peers in enumerate(peers_of):
        for peer in peers:
            if rank not in peers_of[peer]:
                raise CollectiveMismatchError(
                    f"opening connections: rank {rank} names rank {peer}, which names {peers_of[peer]}; "
                    "both must name each other"
                )
