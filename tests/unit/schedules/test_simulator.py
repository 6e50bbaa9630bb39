"""The simulator against the cost model, against the law of maxima, and against playing every repetition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.cluster.topology import Topology
from mpidist.schedules.cost import CostModel, Level, cost
from mpidist.schedules.rounds import Index, Round, Schedule, unrolled
from mpidist.schedules.simulator import simulate
from mpidist.schedules.table import ALGORITHMS, algorithm, hierarchical, names

FLAT = CostModel.flat(alpha=2e-6, beta=4e-11, gamma=3e-11)
LEVELS = CostModel(intra=Level(3e-7, 1e-11, 2e-11), inter=Level(2e-6, 4e-11, 3e-11), links_per_node=2)
RING = algorithm("all_reduce", "ring")
few = settings(max_examples=25, deadline=None)
RABENSEIFNER = algorithm("all_reduce", "rabenseifner")

hosts_lists = st.lists(st.sampled_from("abcde"), min_size=1, max_size=40)


def repetition_by_repetition(schedule: Schedule) -> Schedule:
    def rounds(rank: Index, size: int, *root: int) -> Iterator[Round]:
        return unrolled(schedule.rounds(rank, size, *root), schedule.chunks(size))

    return replace(schedule, rounds=rounds)


@pytest.mark.parametrize("schedule", ALGORITHMS.values(), ids=lambda s: f"{s.collective}-{s.name}")
@few
@given(size=st.integers(1, 150), nbytes=st.integers(0, 10**9), data=st.data())
def test_without_jitter_it_is_the_cost(schedule: Schedule, size: int, nbytes: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    result = simulate(schedule, size, nbytes, FLAT, root=root)
    assert result.seconds == pytest.approx(cost(schedule, size, nbytes, FLAT, root=root), rel=1e-11)
    assert result.finish_seconds.shape == (size,)
    assert result.extrapolated_rounds == 0


@pytest.mark.parametrize("inter", names("all_reduce"))
@few
@given(nodes=st.integers(1, 12), local_size=st.integers(1, 8), nbytes=st.integers(0, 10**9))
def test_equal_nodes_take_what_the_cost_model_says(inter: str, nodes: int, local_size: int, nbytes: int) -> None:
    topology = Topology([f"n{node}" for node in range(nodes) for _ in range(local_size)])
    schedule = hierarchical(topology, inter)
    expected = cost(schedule, topology.size, nbytes, LEVELS, topology)
    assert simulate(schedule, topology.size, nbytes, LEVELS, topology).seconds == pytest.approx(expected, rel=1e-11)


@few
@given(hosts=hosts_lists, name=st.sampled_from(names("all_reduce")))
def test_waiting_for_one_sender_is_never_longer_than_waiting_for_all(hosts: list[str], name: str) -> None:
    topology = Topology(hosts)
    for schedule in (algorithm("all_reduce", name), hierarchical(topology, name)):
        bound = cost(schedule, len(hosts), 1e6, LEVELS, topology)
        assert simulate(schedule, len(hosts), 1e6, LEVELS, topology).seconds <= bound * (1 + 1e-11)


@few
@given(hosts=hosts_lists, data=st.data())
def test_folded_repetitions_are_the_played_ones(hosts: list[str], data: st.DataObject) -> None:
    """Ranks anywhere, so that the pace takes a while to settle; every clock must come out the same."""
    topology = Topology(hosts)
    schedule = data.draw(st.sampled_from([RING, hierarchical(topology, "ring")]))
    folded = simulate(schedule, len(hosts), 1e6, LEVELS, topology)
    played = simulate(repetition_by_repetition(schedule), len(hosts), 1e6, LEVELS, topology)
    numpy.testing.assert_allclose(folded.finish_seconds, played.finish_seconds, rtol=1e-10)
    assert folded.rounds == played.rounds


def test_a_broadcast_reaches_each_rank_after_its_own_path() -> None:
    """Of 5 ranks, rank 4 hears in the first round and has nobody to send to; the others send or hear in the last."""
    finish = simulate(algorithm("broadcast", "binomial"), 5, 0, CostModel.flat(alpha=1.0, beta=0.0)).finish_seconds
    assert finish.tolist() == [3.0, 3.0, 3.0, 3.0, 1.0]


def test_a_call_begins_with_its_own_time() -> None:
    model = replace(FLAT, call_seconds=5.0)
    finish = simulate(RING, 4, 1e6, FLAT).finish_seconds
    numpy.testing.assert_allclose(simulate(RING, 4, 1e6, model).finish_seconds, finish + 5.0)


# -- jitter ------------------------------------------------------------------------------------------------------------


def test_the_seed_decides() -> None:
    def seconds(seed: int) -> float:
        return simulate(RABENSEIFNER, 64, 1e6, FLAT, jitter=0.3, seed=seed).seconds

    assert seconds(1) == seconds(1) != seconds(2)


def test_jitter_0_is_no_jitter() -> None:
    assert simulate(RING, 9, 1e6, FLAT, jitter=0.0).seconds == simulate(RING, 9, 1e6, FLAT).seconds


@few
@given(size=st.integers(2, 64), jitter=st.floats(0.01, 1.0), seed=st.integers(0, 2**32))
def test_one_round_takes_its_slowest_message(size: int, jitter: float, seed: int) -> None:
    """One exchange between the ranks of each pair: the largest of `size` log-normal numbers."""

    def pairs(rank: Index, size: int) -> Iterator[Round]:
        yield Round(rank ^ 1, 0, 1, rank ^ 1, 0, 1, reduce=False)

    size -= size % 2
    schedule = Schedule("pairs", "all_reduce", lambda size: 1, pairs)
    result = simulate(schedule, size, 0, CostModel.flat(alpha=1.0, beta=0.0), jitter=jitter, seed=seed)
    logarithms = jitter * numpy.random.default_rng(seed).standard_normal(size)
    numpy.testing.assert_allclose(result.finish_seconds, numpy.exp(logarithms))
    assert result.seconds == result.finish_seconds.max()


def test_many_repetitions_continue_at_the_pace_of_those_played() -> None:
    """Working out 200 of 1999 repetitions comes within one percent of working out all."""
    size, level = 2000, CostModel.flat(alpha=1e-6, beta=0.0)
    all_played = simulate(RING, size, 0, level, jitter=0.2, jitter_repetitions=size)
    few_played = simulate(RING, size, 0, level, jitter=0.2, jitter_repetitions=200)
    assert all_played.extrapolated_rounds == 0
    assert few_played.extrapolated_rounds == 2 * (size - 1 - 200)
    assert few_played.seconds == pytest.approx(all_played.seconds, rel=0.01)


@pytest.mark.parametrize("arguments", [{"jitter": -0.1}, {"jitter": 0.1, "jitter_repetitions": 1}])
def test_jitter_out_of_range_is_an_error(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="jitter must be 0 or more"):
        simulate(RING, 4, 100, FLAT, **arguments)


# -- size --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names("all_reduce"))
def test_100_000_ranks(name: str) -> None:
    size = 100_000
    expected = cost(algorithm("all_reduce", name), size, 1e8, FLAT)
    assert simulate(algorithm("all_reduce", name), size, 1e8, FLAT).seconds == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("inter", ["ring", "rabenseifner"])
def test_100_000_ranks_on_nodes_of_8(inter: str) -> None:
    topology = Topology([f"n{rank // 8}" for rank in range(100_000)])
    schedule = hierarchical(topology, inter)
    expected = cost(schedule, topology.size, 1e8, LEVELS, topology)
    assert simulate(schedule, topology.size, 1e8, LEVELS, topology).seconds == pytest.approx(expected, rel=1e-8)
