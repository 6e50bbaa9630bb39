"""Where the ranks are: which of them share a node."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from mpidist.errors import counted


class Topology:
    """The nodes of a group of ranks, worked out from the ranks' hosts alone, so that all ranks agree on it.

    Nodes are numbered by first appearance in rank order, and never sorted by name: ``n9`` may come before ``n10``.

    Parameters
    ----------
    hosts : sequence of str
        The host of every rank, in rank order.

    Attributes
    ----------
    hosts : tuple of str
        As given.
    size, node_count : int
        The number of ranks, and of nodes.
    node_names : tuple of str
        By node: its host.
    ranks_of_node : tuple of tuples of int
        By node: its ranks, ascending.
    node_of, local_rank_of, local_size_of : tuple of int
        By rank: its node, its place among the ranks of that node, and how many those are.

    Raises
    ------
    ValueError
        There are no hosts.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        if not hosts:
            raise ValueError("a topology needs the host of at least one rank, got none")
        ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            ranks.setdefault(host, []).append(rank)
        numbers = {host: node for node, host in enumerate(ranks)}
        local_rank_of = [0] * len(hosts)
        for on_node in ranks.values():
            for local_rank, rank in enumerate(on_node):
                local_rank_of[rank] = local_rank
        self.hosts = tuple(hosts)
        self.size = len(hosts)
        self.node_count = len(ranks)
        self.node_names = tuple(ranks)
        self.ranks_of_node = tuple(tuple(on_node) for on_node in ranks.values())
        self.node_of = tuple(numbers[host] for host in hosts)
        self.local_rank_of = tuple(local_rank_of)
        self.local_size_of = tuple(len(ranks[host]) for host in hosts)

    @property
    def is_uniform(self) -> bool:
        """Whether every node has as many ranks as the others."""
        return len(set(map(len, self.ranks_of_node))) == 1

    @property
    def placement(self) -> str:
        """How ranks were dealt to nodes: "block" (node after node), "cyclic" (in turn), else "irregular"."""
        if all(ranks[-1] - ranks[0] + 1 == len(ranks) for ranks in self.ranks_of_node):
            return "block"
        # In turn: by local rank first, and by node within the same local rank.
        turns = sorted(range(self.size), key=lambda rank: (self.local_rank_of[rank], self.node_of[rank]))
        return "cyclic" if turns == list(range(self.size)) else "irregular"

    def describe(self) -> str:
        """Return a compact text: ``2 nodes x 4 ranks``, ``3 nodes: 3+3+2 ranks, cyclic``."""
        counts = [len(ranks) for ranks in self.ranks_of_node]
        nodes = counted(self.node_count, "node")
        shape = f"{nodes} x {counted(counts[0], 'rank')}" if self.is_uniform else f"{nodes}: {_folded(counts)} ranks"
        return shape if self.placement == "block" else f"{shape}, {self.placement}"

    def __eq__(self, other: object) -> bool:
        return self.hosts == other.hosts if isinstance(other, Topology) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.hosts)

    def __repr__(self) -> str:
        return f"<Topology {self.describe()}>"


def _folded(counts: Sequence[int]) -> str:
    """Return ``3+3+2``; three equal counts or more in a row are folded, as in ``8(x99)+4``."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return "+".join(f"{count}(x{times})" if times > 2 else "+".join([str(count)] * times) for count, times in runs)
