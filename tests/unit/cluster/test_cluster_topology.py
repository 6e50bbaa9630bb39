"""`Topology`: closed forms for block, cyclic and uneven placements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.cluster.topology import Topology

PLACES = st.lists(st.integers(0, 4), min_size=1, max_size=24)


@pytest.mark.parametrize("nodes", [1, 2, 3, 7])
@pytest.mark.parametrize("per_node", [1, 2, 5])
def test_block(nodes: int, per_node: int) -> None:
    topology = Topology([f"n{rank // per_node}" for rank in range(nodes * per_node)])
    ranks = range(nodes * per_node)
    assert topology.node_count == nodes
    assert topology.node_of == tuple(rank // per_node for rank in ranks)
    assert topology.local_rank_of == tuple(rank % per_node for rank in ranks)
    assert topology.local_size_of == (per_node,) * len(ranks)
    assert topology.ranks_of_node == tuple(
        tuple(range(node * per_node, (node + 1) * per_node)) for node in range(nodes)
    )
    assert topology.placement == "block" and topology.is_uniform


@pytest.mark.parametrize("nodes", [2, 3, 7])
@pytest.mark.parametrize("size", [9, 14, 21])
def test_cyclic(nodes: int, size: int) -> None:
    topology = Topology([f"n{rank % nodes}" for rank in range(size)])
    assert topology.node_of == tuple(rank % nodes for rank in range(size))
    assert topology.local_rank_of == tuple(rank // nodes for rank in range(size))
    assert topology.ranks_of_node == tuple(tuple(range(node, size, nodes)) for node in range(nodes))
    assert topology.placement == "cyclic"
    assert topology.is_uniform == (size % nodes == 0)


def test_nodes_keep_rank_order() -> None:
    topology = Topology(["n9", "n10", "n9", "a1"])
    assert topology.node_names == ("n9", "n10", "a1")
    assert topology.node_of == (0, 1, 0, 2)


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("a", "1 node x 1 rank"),
        ("aaaa", "1 node x 4 ranks"),
        ("aaaabbbb", "2 nodes x 4 ranks"),
        ("abab", "2 nodes x 2 ranks, cyclic"),
        ("aaabbbcc", "3 nodes: 3+3+2 ranks"),
        ("abcabcab", "3 nodes: 3+3+2 ranks, cyclic"),
        ("abba", "2 nodes x 2 ranks, irregular"),
        ("aabbccddde", "5 nodes: 2(x3)+3+1 ranks"),
        ("abc", "3 nodes x 1 rank"),
    ],
)
def test_describe(hosts: str, text: str) -> None:
    topology = Topology(list(hosts))
    assert topology.describe() == text
    assert text in repr(topology)


def test_no_ranks() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        Topology([])


@given(PLACES)
def test_parts_agree_with_hosts(places: list[int]) -> None:
    hosts = [f"node{place}" for place in places]
    topology = Topology(hosts)
    assert topology.size == len(hosts)
    for rank, host in enumerate(hosts):
        node, local_rank = topology.node_of[rank], topology.local_rank_of[rank]
        assert topology.node_names[node] == host
        assert topology.ranks_of_node[node][local_rank] == rank
        assert local_rank == hosts[:rank].count(host)
        assert topology.local_size_of[rank] == hosts.count(host) == len(topology.ranks_of_node[node])
    assert sorted(rank for ranks in topology.ranks_of_node for rank in ranks) == list(range(len(hosts)))
    assert [ranks[0] for ranks in topology.ranks_of_node] == sorted(ranks[0] for ranks in topology.ranks_of_node)


@given(PLACES, st.permutations(range(5)))
def test_names_do_not_matter(places: list[int], renamed: list[int]) -> None:
    one = Topology([f"n{place}" for place in places])
    other = Topology([f"n{renamed[place]}" for place in places])
    assert one.node_of == other.node_of and one.describe() == other.describe()
    assert (one == other) == (one.hosts == other.hosts)
    assert one == Topology(list(one.hosts)) and hash(one) == hash(Topology(one.hosts))
