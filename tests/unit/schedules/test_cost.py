"""Cost and traffic of every algorithm against closed forms in the number of ranks and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.cluster.topology import Topology
from mpidist.schedules.checker import check
from mpidist.schedules.cost import CostModel, Level, cost, traffic
from mpidist.schedules.rounds import NOBODY, Index, Round, Schedule
from mpidist.schedules.table import ALGORITHMS, algorithm, hierarchical, names

ALPHA, BETA, GAMMA = 2e-6, 4e-11, 3e-11
FLAT = CostModel.flat(ALPHA, BETA, GAMMA)
LEVELS = CostModel(intra=Level(3e-7, 1e-11, 2e-11), inter=Level(ALPHA, BETA, GAMMA))


@dataclass(frozen=True)
class Closed:
    """What is known of an algorithm on p ranks: each entry is a function of p; bytes are in units of the buffer.

    `sent` is what the busiest rank sends, `total` what all ranks send together.  On the critical path `moved` buffers
    go over the wire and `reduced` are reduced.
    """

    rounds: Callable[[int], int]
    sent: Callable[[int], float]
    total: Callable[[int], float]
    moved: Callable[[int], float]
    reduced: Callable[[int], float]


def floor_log2(p: int) -> int:
    return p.bit_length() - 1


def ceil_log2(p: int) -> int:
    return (p - 1).bit_length()


def folded(p: int) -> int:
    """1 where p is no power of two and ranks are folded in first, and out last."""
    return int(p != 2 ** floor_log2(p))


def extra(p: int) -> int:
    return p - 2 ** floor_log2(p)


def but_one(p: int) -> float:
    return (p - 1) / p


def core_share(p: int) -> float:
    return but_one(2 ** floor_log2(p))


CLOSED = {
    ("all_reduce", "ring"): Closed(
        rounds=lambda p: 2 * (p - 1),
        sent=lambda p: 2 * but_one(p),
        total=lambda p: 2 * (p - 1),
        moved=lambda p: 2 * but_one(p),
        reduced=but_one,
    ),
    ("reduce_scatter", "ring"): Closed(
        rounds=lambda p: p - 1, sent=but_one, total=lambda p: p - 1, moved=but_one, reduced=but_one
    ),
    ("all_gather", "ring"): Closed(
        rounds=lambda p: p - 1, sent=but_one, total=lambda p: p - 1, moved=but_one, reduced=lambda p: 0
    ),
    ("all_reduce", "recursive_doubling"): Closed(
        rounds=lambda p: floor_log2(p) + 2 * folded(p),
        sent=lambda p: floor_log2(p) + folded(p),
        total=lambda p: 2 ** floor_log2(p) * floor_log2(p) + 2 * extra(p),
        moved=lambda p: floor_log2(p) + 2 * folded(p),
        reduced=lambda p: floor_log2(p) + folded(p),
    ),
    ("all_reduce", "rabenseifner"): Closed(
        rounds=lambda p: 2 * floor_log2(p) + 2 * folded(p),
        sent=lambda p: 2 * core_share(p) + folded(p),
        total=lambda p: 2 * (2 ** floor_log2(p) - 1) + 2 * extra(p),
        moved=lambda p: 2 * core_share(p) + 2 * folded(p),
        reduced=lambda p: core_share(p) + folded(p),
    ),
    ("all_reduce", "binomial"): Closed(
        rounds=lambda p: 2 * ceil_log2(p),
        sent=ceil_log2,
        total=lambda p: 2 * (p - 1),
        moved=lambda p: 2 * ceil_log2(p),
        reduced=ceil_log2,
    ),
    ("broadcast", "binomial"): Closed(
        rounds=ceil_log2, sent=ceil_log2, total=lambda p: p - 1, moved=ceil_log2, reduced=lambda p: 0
    ),
    ("reduce", "binomial"): Closed(
        rounds=ceil_log2, sent=lambda p: int(p > 1), total=lambda p: p - 1, moved=ceil_log2, reduced=ceil_log2
    ),
}

few = settings(max_examples=25, deadline=None)
sizes = st.integers(1, 200)
lengths = st.integers(0, 10**9)


def closed_cost(key: tuple[str, str], p: int, nbytes: float, level: Level) -> float:
    form = CLOSED[key]
    seconds_a_buffer = form.moved(p) * level.beta + form.reduced(p) * level.gamma
    return form.rounds(p) * level.alpha + nbytes * seconds_a_buffer


def test_every_algorithm_has_a_closed_form() -> None:
    assert CLOSED.keys() == ALGORITHMS.keys()


@pytest.mark.parametrize("key", CLOSED, ids="-".join)
@few
@given(size=sizes, nbytes=lengths, data=st.data())
def test_cost_is_the_closed_form(key: tuple[str, str], size: int, nbytes: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    expected = closed_cost(key, size, nbytes, FLAT.inter)
    assert cost(ALGORITHMS[key], size, nbytes, FLAT, root=root) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("key", CLOSED, ids="-".join)
@few
@given(size=sizes, nbytes=lengths, data=st.data())
def test_traffic_is_the_closed_form(key: tuple[str, str], size: int, nbytes: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    seen = traffic(ALGORITHMS[key], size, nbytes, root)
    assert seen.rounds == CLOSED[key].rounds(size)
    assert seen.bytes_sent.shape == (size,)
    assert seen.bytes_sent.max() == pytest.approx(CLOSED[key].sent(size) * nbytes, rel=1e-12)
    assert seen.bytes_sent.sum() == pytest.approx(CLOSED[key].total(size) * nbytes, rel=1e-12)


@pytest.mark.parametrize("key", CLOSED, ids="-".join)
def test_traffic_is_what_the_checker_counts(key: tuple[str, str]) -> None:
    schedule = ALGORITHMS[key]
    for size in range(1, 34):
        proof = check(schedule, size)
        seen = traffic(schedule, size, nbytes=schedule.chunks(size))
        assert seen.rounds == proof.rounds
        numpy.testing.assert_allclose(seen.bytes_sent, proof.chunks_sent, rtol=1e-12)


# -- which one wins: what docs/algorithms.md says ----------------------------------------------------------------------


def assert_crossover(first: str, then: str, size: int, nbytes: float) -> None:
    """`first` is the faster one on buffers shorter than `nbytes`, `then` on longer ones."""

    def seconds(name: str, factor: float) -> float:
        return cost(algorithm("all_reduce", name), size, factor * nbytes, FLAT)

    assert seconds(first, 0.99) < seconds(then, 0.99)
    assert seconds(first, 1.01) > seconds(then, 1.01)


@pytest.mark.parametrize("size", [4, 8, 64, 1024])
def test_where_rabenseifner_overtakes_recursive_doubling(size: int) -> None:
    rounds = floor_log2(size)
    a_byte = (rounds - 2 * but_one(size)) * BETA + (rounds - but_one(size)) * GAMMA
    assert_crossover("recursive_doubling", "rabenseifner", size, rounds * ALPHA / a_byte)


@pytest.mark.parametrize("size", [6, 12, 100, 1000])
def test_where_the_ring_overtakes_rabenseifner_off_powers_of_two(size: int) -> None:
    rounds = 2 * (size - 1) - (2 * floor_log2(size) + 2)
    moved = 2 * core_share(size) + 2 - 2 * but_one(size)
    reduced = core_share(size) + 1 - but_one(size)
    assert_crossover("rabenseifner", "ring", size, rounds * ALPHA / (moved * BETA + reduced * GAMMA))


@given(bits=st.integers(2, 10), nbytes=lengths)
@few
def test_the_ring_never_beats_rabenseifner_on_powers_of_two(bits: int, nbytes: int) -> None:
    ring, halving = (cost(algorithm("all_reduce", name), 2**bits, nbytes, FLAT) for name in ("ring", "rabenseifner"))
    assert halving < ring


# -- levels ------------------------------------------------------------------------------------------------------------


def block(nodes: int, local_size: int) -> Topology:
    return Topology([f"n{node}" for node in range(nodes) for _ in range(local_size)])


@pytest.mark.parametrize("inter", names("all_reduce"))
@few
@given(nodes=st.integers(1, 20), local_size=st.integers(1, 9), nbytes=lengths)
def test_hierarchical_cost_is_the_sum_of_its_levels(inter: str, nodes: int, local_size: int, nbytes: int) -> None:
    """2 (g-1) a_i + 2 (g-1)/g n b_i + (g-1)/g n g_i, and the algorithm between the nodes on n/g bytes."""
    topology = block(nodes, local_size)
    inside = closed_cost(("all_reduce", "ring"), local_size, nbytes, LEVELS.intra)
    between = closed_cost(("all_reduce", inter), nodes, nbytes / local_size, LEVELS.inter)
    seconds = cost(hierarchical(topology, inter), topology.size, nbytes, LEVELS, topology)
    assert seconds == pytest.approx(inside + between, rel=1e-12)


@few
@given(nodes=st.integers(2, 12), local_size=st.integers(1, 9), links=st.integers(1, 9), nbytes=lengths)
def test_local_ranks_share_the_links_of_their_node(nodes: int, local_size: int, links: int, nbytes: int) -> None:
    topology = block(nodes, local_size)
    model = CostModel(LEVELS.intra, LEVELS.inter, links_per_node=links)
    crowding = max(1.0, local_size / links)
    shared = Level(LEVELS.inter.alpha, crowding * LEVELS.inter.beta, LEVELS.inter.gamma)
    inside = closed_cost(("all_reduce", "ring"), local_size, nbytes, LEVELS.intra)
    between = closed_cost(("all_reduce", "ring"), nodes, nbytes / local_size, shared)
    seconds = cost(hierarchical(topology), topology.size, nbytes, model, topology)
    assert seconds == pytest.approx(inside + between, rel=1e-12)


@few
@given(nodes=st.integers(2, 12), local_size=st.integers(1, 9))
def test_a_flat_ring_in_rank_order_has_a_link_to_itself(nodes: int, local_size: int) -> None:
    """One message leaves each node and one enters, so a single link is enough; all rounds cost an inter message."""
    topology = block(nodes, local_size)
    ring = algorithm("all_reduce", "ring")
    model = CostModel(LEVELS.intra, LEVELS.inter, links_per_node=1)
    expected = closed_cost(("all_reduce", "ring"), topology.size, 1e6, LEVELS.inter)
    assert cost(ring, topology.size, 1e6, model, topology) == pytest.approx(expected, rel=1e-12)


@few
@given(nodes=st.integers(2, 12), local_size=st.integers(2, 8))
def test_a_ring_dealt_in_turn_crowds_the_links(nodes: int, local_size: int) -> None:
    topology = Topology([f"n{node}" for _ in range(local_size) for node in range(nodes)])
    model = CostModel(LEVELS.intra, LEVELS.inter, links_per_node=1)
    crowded = Level(LEVELS.inter.alpha, local_size * LEVELS.inter.beta, LEVELS.inter.gamma)
    expected = closed_cost(("all_reduce", "ring"), topology.size, 1e6, crowded)
    ring = algorithm("all_reduce", "ring")
    assert cost(ring, topology.size, 1e6, model, topology) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("messages", [{0: 2, 1: 3}, {2: 0, 3: 1}], ids=["leaving one node", "entering one node"])
def test_messages_share_links_at_either_end(messages: dict[int, int]) -> None:
    """Two messages between a node of two ranks and two nodes of one rank each: the node of two is the narrow end."""

    def rounds(rank: Index, size: int) -> Iterator[Round]:
        send_to = numpy.array([messages.get(sender, NOBODY) for sender in range(size)])
        sources = {receiver: sender for sender, receiver in messages.items()}
        receive_from = numpy.array([sources.get(receiver, NOBODY) for receiver in range(size)])
        yield Round(send_to, 0, 1, receive_from, 0, 1, reduce=False)

    two_messages = Schedule("two_messages", "all_reduce", lambda size: 1, rounds)
    model = CostModel(LEVELS.intra, LEVELS.inter, links_per_node=1)
    expected = LEVELS.inter.alpha + 1e6 * 2 * LEVELS.inter.beta
    assert cost(two_messages, 4, 1e6, model, Topology("aabc")) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("key", CLOSED, ids="-".join)
def test_on_one_node_all_messages_are_inside(key: tuple[str, str]) -> None:
    for size in range(1, 20):
        seconds = cost(ALGORITHMS[key], size, 1e6, LEVELS, Topology(["n"] * size))
        assert seconds == pytest.approx(closed_cost(key, size, 1e6, LEVELS.intra), rel=1e-12)


@few
@given(hosts=st.lists(st.sampled_from("abcd"), min_size=1, max_size=20), inter=st.sampled_from(names("all_reduce")))
def test_traffic_of_uneven_levels_is_what_the_checker_counts(hosts: list[str], inter: str) -> None:
    schedule = hierarchical(Topology(hosts), inter)
    proof = check(schedule, len(hosts))
    seen = traffic(schedule, len(hosts), nbytes=schedule.chunks(len(hosts)))
    assert seen.rounds == proof.rounds
    numpy.testing.assert_allclose(seen.bytes_sent, proof.chunks_sent, rtol=1e-12)


@few
@given(hosts=st.lists(st.sampled_from("abcd"), min_size=1, max_size=24))
def test_uneven_levels_send_between_nodes_as_if_all_were_the_smallest(hosts: list[str]) -> None:
    """With s ranks on the smallest of k nodes, s ranks a node send 2 (k-1)/k of a shard of 1/s; inside, a ring each."""
    topology = Topology(hosts)
    nodes = topology.node_count
    between = 2 * (nodes - 1)
    inside = sum(2 * (len(ranks) - 1) for ranks in topology.ranks_of_node)
    assert traffic(hierarchical(topology), len(hosts), 1.0).bytes_sent.sum() == pytest.approx(between + inside)


# -- measured points ---------------------------------------------------------------------------------------------------

#: 1 s at 0 bytes, 3 s at 100, 4 s at 200, and 0.02 s a byte from there on.
BENT = Level(1.0, 0.02, exchange=((100, 3.0), (200, 4.0)))


@pytest.mark.parametrize("nbytes, seconds", [(0, 1.0), (50, 2.0), (100, 3.0), (150, 3.5), (200, 4.0), (300, 6.0)])
def test_seconds_are_interpolated_between_points_and_extrapolated_behind_them(nbytes: int, seconds: float) -> None:
    assert BENT.message_seconds(nbytes) == pytest.approx(seconds)
    assert BENT.message_seconds(numpy.array([nbytes, 0])).tolist() == pytest.approx([seconds, 1.0])


def test_crowded_messages_wait_for_the_link_but_not_for_alpha_again() -> None:
    assert BENT.message_seconds(100, crowding=3) == pytest.approx(1.0 + 3 * 2.0)


def test_a_message_without_another_coming_in_has_its_own_points() -> None:
    level = Level(1.0, 0.0, exchange=((100, 5.0),), one_way=((100, 2.0),))
    assert level.message_seconds(100) == 5.0
    assert level.message_seconds(100, alone=True) == 2.0
    assert level.message_seconds(100, alone=numpy.array([True, False])).tolist() == [2.0, 5.0]


def test_points_of_one_kind_serve_for_both() -> None:
    assert Level(1.0, 0.0, one_way=((100, 2.0),)).message_seconds(100) == 2.0
    assert Level(1.0, 0.0, exchange=((100, 5.0),)).message_seconds(100, alone=True) == 5.0


def test_reductions_have_points_too() -> None:
    level = Level(0.0, 0.0, gamma=0.5, reduction=((10, 1.0), (20, 3.0)))
    assert level.reduce_seconds(numpy.array([0, 5, 15, 24])).tolist() == pytest.approx([0.0, 0.5, 2.0, 5.0])


def test_reductions_on_the_way_and_in_place_have_their_own_points() -> None:
    level = Level(0.0, 0.0, 0.5, ((9, 1.0),), reduction=((10, 1.0),), one_way_reduction=((10, 2.0),))
    assert [float(level.reduce_seconds(10, alone)) for alone in (False, True)] == [1.0, 2.0]
    assert float(level.reduce_seconds(10, in_place=True)) == 1.0
    level = Level(0.0, 0.0, 0.5, ((9, 1.0),), reduction=((10, 1.0),), in_place_reduction=((10, 4.0),))
    assert level.reduce_seconds(numpy.array([10, 12]), in_place=numpy.array([False, True])).tolist() == [1.0, 5.0]


def test_which_schedules_reduce_on_the_way_and_which_in_place() -> None:
    """On two ranks: the ring reduces one half while the other goes out, doubling what is sent, the tree one way."""
    reductions = {"reduction": 1.0, "in_place_reduction": 10.0, "one_way_reduction": 100.0}
    level = Level(0.0, 0.0, 0.0, **{name: ((1, seconds),) for name, seconds in reductions.items()})
    model = CostModel(intra=level, inter=level)
    seconds = {name: cost(algorithm("all_reduce", name), 2, 100, model) for name in names("all_reduce")}
    assert seconds == {"ring": 1.0, "rabenseifner": 1.0, "recursive_doubling": 10.0, "binomial": 100.0}


def test_a_call_takes_its_own_time_once() -> None:
    model = CostModel(LEVELS.intra, LEVELS.inter, call_seconds=5.0)
    for name in names("all_reduce"):
        without = cost(algorithm("all_reduce", name), 7, 100, LEVELS)
        assert cost(algorithm("all_reduce", name), 7, 100, model) == pytest.approx(without + 5.0)


def test_a_broadcast_sends_one_way_and_a_ring_exchanges() -> None:
    level = Level(1.0, 0.0, exchange=((100, 5.0),), one_way=((100, 2.0),))
    model = CostModel(intra=level, inter=level)
    assert cost(algorithm("broadcast", "binomial"), 2, 100, model) == 2.0
    assert cost(algorithm("all_gather", "ring"), 2, 200, model) == 5.0


@few
@given(size=sizes, nbytes=lengths, cuts=st.lists(st.integers(1, 10**9), max_size=5, unique=True))
def test_points_on_a_straight_line_change_nothing(size: int, nbytes: int, cuts: list[int]) -> None:
    messages = tuple((float(cut), ALPHA + BETA * cut) for cut in sorted(cuts))
    reductions = tuple((float(cut), GAMMA * cut) for cut in sorted(cuts))
    level = Level(ALPHA, BETA, GAMMA, exchange=messages, one_way=messages[:2], reduction=reductions)
    for name in names("all_reduce"):
        seconds = cost(algorithm("all_reduce", name), size, nbytes, CostModel(level, level))
        assert seconds == pytest.approx(cost(algorithm("all_reduce", name), size, nbytes, FLAT), rel=1e-9)


def test_a_measured_level_continues_its_first_and_last_lines() -> None:
    level = Level.measured(exchange=[(10, 3.0), (20, 4.0), (40, 10.0)], reduction=[(10, 1.0), (20, 4.0)])
    assert (level.alpha, level.beta, level.gamma) == pytest.approx((2.0, 0.3, 0.3))
    assert level.message_seconds(50) == pytest.approx(13.0)


def test_noise_makes_no_level_with_negative_prices() -> None:
    level = Level.measured(exchange=[(10, 3.0), (20, 2.0)], reduction=[(10, 1.0), (20, 0.5)])
    assert (level.alpha, level.beta, level.gamma) == (3.0, 0.0, 0.0)


@pytest.mark.parametrize("points", [((20, 1.0), (10, 1.0)), ((10, 1.0), (10, 2.0)), ((0, 1.0),)])
def test_points_out_of_order_are_an_error(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="ascending sizes above 0"):
        Level(1.0, 1.0, exchange=points)


def test_topology_of_another_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="the topology has 4 ranks, expected 5"):
        cost(algorithm("all_reduce", "ring"), 5, 100, FLAT, Topology("aabb"))
