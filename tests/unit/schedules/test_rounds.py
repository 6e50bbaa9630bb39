"""The vocabulary: repetitions, relabelling, and that one generator serves one rank and all ranks at once."""

from __future__ import annotations

from dataclasses import fields

import numpy
import pytest

from mpidist.cluster.topology import Topology
from mpidist.schedules.rounds import NOBODY, Round, Schedule, choose, relabelled, unrolled
from mpidist.schedules.table import ALGORITHMS, algorithm, hierarchical, names

RANK_FIELDS = ("send_to", "send_chunk", "send_count", "receive_from", "receive_chunk", "receive_count")
OTHER_FIELDS = ("reduce", "repeat", "shift", "cycle")


def assert_arrays_equal_ints(schedule: Schedule, size: int, root: int = 0) -> None:
    """Entry r of every field of the array form is the field of rank r's own form, and that one is a plain int."""
    together = list(schedule.rounds_of(numpy.arange(size), size, root))
    for rank in range(size):
        alone = list(schedule.rounds_of(rank, size, root))
        assert len(alone) == len(together)
        for mine, ours in zip(alone, together, strict=True):
            for name in RANK_FIELDS:
                assert type(getattr(mine, name)) is int
                assert getattr(mine, name) == numpy.broadcast_to(getattr(ours, name), size)[rank], name
            for name in OTHER_FIELDS:
                assert getattr(mine, name) == getattr(ours, name), name


def test_the_two_lists_name_all_fields() -> None:
    assert {field.name for field in fields(Round)} == {*RANK_FIELDS, *OTHER_FIELDS}


@pytest.mark.parametrize("schedule", ALGORITHMS.values(), ids=lambda s: f"{s.collective}-{s.name}")
def test_one_rank_and_all_ranks_agree(schedule: Schedule) -> None:
    for size in (1, 2, 3, 4, 5, 7, 8, 12, 13, 16, 31, 32, 33, 64):
        for root in {0, size // 2, size - 1} if schedule.rooted else {0}:
            assert_arrays_equal_ints(schedule, size, root)


@pytest.mark.parametrize("inter", names("all_reduce"))
@pytest.mark.parametrize("hosts", ["a", "aabb", "abab", "aaabbbccc", "aaabbcccc", "abcbca", "abbcccdddd", "abcde"])
def test_one_rank_and_all_ranks_agree_on_levels(hosts: str, inter: str) -> None:
    assert_arrays_equal_ints(hierarchical(Topology(hosts), inter), len(hosts))


def test_ring_is_two_rounds_for_any_number_of_ranks() -> None:
    for size in (2, 3, 64, 100_000):
        rounds = list(algorithm("all_reduce", "ring").rounds(numpy.arange(size), size))
        assert [(round_.repeat, round_.reduce) for round_ in rounds] == [(size - 1, True), (size - 1, False)]


def test_repetitions_move_round_all_chunks() -> None:
    round_ = Round(1, 0, 1, 2, 2, 1, reduce=True, repeat=4, shift=-1)
    played = list(unrolled([round_], 3))
    assert [r.send_chunk for r in played] == [0, 2, 1, 0]
    assert [r.receive_chunk for r in played] == [2, 1, 0, 2]
    assert all((r.repeat, r.shift, r.reduce, r.send_to) == (1, 0, True, 1) for r in played)


def test_repetitions_move_round_inside_their_block() -> None:
    round_ = Round(1, 6, 2, 2, 10, 2, reduce=False, repeat=3, shift=2, cycle=6)
    played = list(unrolled([round_], 18))
    assert [r.send_chunk for r in played] == [6, 8, 10]
    assert [r.receive_chunk for r in played] == [10, 6, 8]


def test_relabelled_round_moves_as_its_group_does() -> None:
    """Unrolling then relabelling is relabelling then unrolling."""
    size, scale, first = 5, 3, 30
    for round_ in algorithm("all_reduce", "ring").rounds(2, size):

        def outer(round_: Round) -> Round:
            return relabelled(round_, rank_of=lambda rank: 10 * rank, first_chunk=first, scale=scale, chunks=size)

        one_way = [(r.send_to, r.send_chunk, r.receive_chunk) for r in unrolled([outer(round_)], 60)]
        other_way = [(outer(r).send_to, outer(r).send_chunk, outer(r).receive_chunk) for r in unrolled([round_], size)]
        assert one_way == other_way


def test_relabelled_leaves_out_who_takes_no_part() -> None:
    ranks = numpy.arange(4)
    round_ = Round(ranks ^ 1, 0, 1, ranks ^ 1, 0, 1, reduce=True)
    outer = relabelled(round_, rank_of=lambda rank: rank + 4, takes_part=ranks < 2)
    assert outer.send_to.tolist() == outer.receive_from.tolist() == [5, 4, NOBODY, NOBODY]


def test_choose_gives_back_what_came_in() -> None:
    assert choose(True, 3, 5) == 3 and type(choose(True, 3, 5)) is int
    assert choose(numpy.array([True, False]), 3, numpy.array([5, 6])).tolist() == [3, 6]


def test_unknown_names_are_errors_that_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'rign'; known ones: ring, recursive_doubling, rabenseifner, binomial"):
        algorithm("all_reduce", "rign")
    with pytest.raises(ValueError, match="'allreduce' is not a collective; known ones: all_reduce"):
        Schedule("ring", "allreduce", lambda size: 1, lambda rank, size: iter(()))
    with pytest.raises(ValueError, match="for 4 ranks, not for 5"):
        list(hierarchical(Topology("aabb")).rounds(0, 5))
