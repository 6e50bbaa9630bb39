"""Schedules side by side: which are compared, and their figures against closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.cluster.topology import Topology
from mpidist.schedules.comparison import candidates, compare
from mpidist.schedules.cost import CostModel, Level, cost, traffic
from mpidist.schedules.table import algorithm, hierarchical, names

MODEL = CostModel(intra=Level(3e-7, 1e-11, 2e-11), inter=Level(2e-6, 4e-11, 3e-11), links_per_node=1)
few = settings(max_examples=25, deadline=None)


def block(nodes: int, local_size: int) -> Topology:
    return Topology([f"n{node}" for node in range(nodes) for _ in range(local_size)])


def cyclic(nodes: int, local_size: int) -> Topology:
    return Topology([f"n{node}" for _ in range(local_size) for node in range(nodes)])


@pytest.mark.parametrize("nodes, local_size, by_levels", [(1, 8, 0), (8, 1, 0), (4, 2, 3)])
def test_levels_are_compared_where_there_are_two(nodes: int, local_size: int, by_levels: int) -> None:
    found = [schedule.name for schedule in candidates("all_reduce", block(nodes, local_size))]
    assert found[: len(names("all_reduce"))] == list(names("all_reduce"))
    assert len(found) - len(names("all_reduce")) == by_levels
    assert all(name.startswith("hierarchical_") for name in found[len(names("all_reduce")) :])


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "all_gather", "reduce_scatter"])
def test_other_collectives_have_those_of_the_table(collective: str) -> None:
    assert [each.name for each in candidates(collective, block(4, 2))] == list(names(collective))


def test_the_fastest_comes_first_and_has_the_least_cost() -> None:
    topology = block(8, 4)
    outcomes = compare(1e8, MODEL, topology)
    assert [each.seconds for each in outcomes] == sorted(each.seconds for each in outcomes)
    least = min(cost(each, 32, 1e8, MODEL, topology) for each in candidates("all_reduce", topology))
    assert outcomes[0].seconds == pytest.approx(least, rel=1e-9)


def test_short_and_long_buffers_have_the_winners_that_the_formulas_say() -> None:
    flat = CostModel.flat(2e-6, 4e-11)
    assert compare(8, flat, block(16, 1))[0].algorithm == "recursive_doubling"
    assert compare(1e9, flat, block(16, 1))[0].algorithm == "rabenseifner"
    assert compare(1e9, flat, block(12, 1))[0].algorithm == "ring"


@few
@given(nodes=st.integers(2, 12), local_size=st.integers(1, 8), nbytes=st.integers(1, 10**9))
def test_what_a_ring_moves_over_the_links_of_a_node(nodes: int, local_size: int, nbytes: int) -> None:
    """In block placement one message leaves a node in each round, in cyclic placement one for each of its ranks."""
    size = nodes * local_size
    ring = algorithm("all_reduce", "ring")
    once = 2 * (size - 1) / size * nbytes
    for topology, messages in ((block(nodes, local_size), 1), (cyclic(nodes, local_size), local_size)):
        sent = traffic(ring, size, nbytes, topology=topology)
        assert sent.bytes_leaving.tolist() == pytest.approx([messages * once] * nodes)
        assert sent.bytes_entering.tolist() == pytest.approx([messages * once] * nodes)


@few
@given(nodes=st.integers(2, 12), local_size=st.integers(2, 8), links=st.integers(1, 9))
def test_by_levels_a_node_sends_the_buffer_twice_but_one_share(nodes: int, local_size: int, links: int) -> None:
    topology = block(nodes, local_size)
    model = CostModel(MODEL.intra, MODEL.inter, links_per_node=links)
    (outcome,) = compare(1e6, model, topology, [hierarchical(topology, "ring")])
    assert outcome.bytes_per_link == pytest.approx(2 * (nodes - 1) / nodes * 1e6 / links)
    assert outcome.rounds == 2 * (local_size - 1) + 2 * (nodes - 1)


@few
@given(hosts=st.lists(st.sampled_from("abcd"), min_size=1, max_size=20))
def test_what_leaves_the_nodes_enters_the_nodes(hosts: list[str]) -> None:
    topology = Topology(hosts)
    for schedule in candidates("all_reduce", topology):
        sent = traffic(schedule, topology.size, 1e6, topology=topology)
        assert sent.bytes_leaving.sum() == pytest.approx(sent.bytes_entering.sum())
        assert sent.bytes_leaving.sum() <= sent.bytes_sent.sum() * (1 + 1e-12)


def test_a_broadcast_leaves_only_the_nodes_that_pass_it_on() -> None:
    sent = traffic(algorithm("broadcast", "binomial"), 4, 100, topology=Topology("aabb"))
    assert sent.bytes_leaving.tolist() == [100.0, 0.0]
    assert sent.bytes_entering.tolist() == [0.0, 100.0]


def test_with_jitter_the_seed_decides() -> None:
    first, again, other = (compare(1e6, MODEL, block(4, 2), jitter=0.3, seed=seed)[0].seconds for seed in (1, 1, 2))
    assert first == again != other
