"""The checker proves every schedule of the table for every number of ranks, and rejects what is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mpidist.cluster.topology import Topology
from mpidist.schedules.checker import ScheduleError, check
from mpidist.schedules.rounds import NOBODY, Index, Round, Schedule, unrolled
from mpidist.schedules.table import ALGORITHMS, algorithm, hierarchical, names

SIZES = range(1, 65)
SCHEDULES = list(ALGORITHMS.values())

#: Ways to lay `size` ranks out: nodes of equal size as far as it goes, in turn, and nodes that grow.
LAYOUTS: dict[str, Callable[[int], list[str]]] = {
    "block": lambda size: [f"n{rank // 4}" for rank in range(size)],
    "cyclic": lambda size: [f"n{rank % 3}" for rank in range(size)],
    "growing": lambda size: [f"n{int((2 * rank + 9) ** 0.5)}" for rank in range(size)],
}


def roots(schedule: Schedule, size: int) -> set[int]:
    if not schedule.rooted:
        return {0}
    return set(range(size)) if size <= 20 else {0, 1, size // 2, size - 1}


# -- proofs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.collective}-{s.name}")
def test_every_schedule_is_proved_for_every_size(schedule: Schedule) -> None:
    for size in SIZES:
        for root in roots(schedule, size):
            assert check(schedule, size, root).same_bits, f"ranks end with different bits on {size} ranks"


@pytest.mark.parametrize("inter", names("all_reduce"))
def test_hierarchical_is_proved_for_many_sizes(inter: str) -> None:
    for size in (*range(1, 41), 63, 64):
        hosts = list(LAYOUTS.values())[size % 3](size)
        assert check(hierarchical(Topology(hosts), inter), size).same_bits


@given(hosts=st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=24), inter=st.sampled_from(names("all_reduce")))
@settings(max_examples=60, deadline=None)
def test_hierarchical_is_proved_for_any_topology(hosts: list[str], inter: str) -> None:
    assert check(hierarchical(Topology(hosts), inter), len(hosts)).same_bits


def test_levels_nest() -> None:
    """Between nodes there may be a hierarchy again: 12 ranks on 6 nodes in 2 racks."""
    nodes = Topology("aabbccddeeff")
    racks = Topology("xxxyyy")
    assert check(hierarchical(nodes, hierarchical(racks, "ring")), 12).same_bits


@given(schedule=st.sampled_from(SCHEDULES), size=st.integers(1, 64), data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_root_is_as_good_as_root_0(schedule: Schedule, size: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    at_0, at_root = check(schedule, size), check(schedule, size, root)
    assert at_root.rounds == at_0.rounds
    assert sorted(at_root.chunks_sent) == sorted(at_0.chunks_sent)


# -- rejections --------------------------------------------------------------------------------------------------------


def changed(schedule: Schedule, change: Callable[[list[Round], int, int], list[Round]]) -> Schedule:
    """Return `schedule` with each rank's unrolled rounds given through ``change(rounds, rank, size)``."""

    def rounds(rank: Index, size: int, *root: int) -> Iterator[Round]:
        return iter(change(list(unrolled(schedule.rounds(rank, size, *root), schedule.chunks(size))), rank, size))

    return replace(schedule, rounds=rounds)


RING = algorithm("all_reduce", "ring")
GATHER = algorithm("all_gather", "ring")
DOUBLING = algorithm("all_reduce", "recursive_doubling")
RABENSEIFNER = algorithm("all_reduce", "rabenseifner")
TREE = algorithm("broadcast", "binomial")


def at(rounds: list[Round], number: int, **change: object) -> list[Round]:
    """Return `rounds` with round `number`, counted from 1, changed."""
    return [*rounds[: number - 1], replace(rounds[number - 1], **change), *rounds[number:]]


def only(chosen: int, number: int, **change: object) -> Callable[[list[Round], int, int], list[Round]]:
    return lambda rounds, rank, size: at(rounds, number, **change) if rank == chosen else rounds


#: Name: the schedule, the number of ranks, and what the error must say.
BROKEN: dict[str, tuple[Schedule, int, str]] = {
    "wrong peer": (
        changed(RING, only(2, 3, send_to=4)),
        5,
        r"ring all_reduce on 5 ranks, round 3: rank 2 sends to rank 4, which does not receive from it",
    ),
    "waits for one that does not send": (
        changed(TREE, only(3, 1, receive_from=0)),
        4,
        r"round 1: rank 3 receives from rank 0, which does not send to it",
    ),
    "peer that does not exist": (changed(RING, only(0, 1, send_to=5)), 5, r"round 1: .* rank 5 is no other rank of 5"),
    "sends to itself": (changed(DOUBLING, only(1, 1, send_to=1)), 4, r"round 1: rank 1 sends .* rank 1 is no other"),
    "a round twice": (
        changed(DOUBLING, lambda rounds, rank, size: [*rounds, rounds[-1]]),
        4,
        r"round 3: rank 2 reduces chunk 0 from rank 0, which adds the contribution of ranks 0, 1, 2, 3 a second time",
    ),
    "reduce where copy": (
        changed(RING, lambda rounds, rank, size: at(rounds, size, reduce=True)),
        4,
        r"round 4: rank 1 reduces chunk 0 from rank 0, which adds the contribution of .* a second time",
    ),
    "copy where reduce": (
        changed(RING, lambda rounds, rank, size: at(rounds, 1, reduce=False)),
        4,
        r"round 6: it was the last, and rank 0 has chunk 0 with contributions of ranks 0, 1, 3, expected ranks 0, 1, 2",
    ),
    "reduce on one side only": (
        changed(TREE, only(2, 1, reduce=True)),
        4,
        r"round 1: rank 0 and rank 2 differ in whether chunk 0 is reduced",
    ),
    "last round missing": (
        changed(RING, lambda rounds, rank, size: rounds[:-1]),
        3,
        r"round 3: it was the last, and rank 0 has chunk 1 with contributions of ranks 0, 2, expected ranks 0, 1, 2",
    ),
    "one rank stops early": (
        changed(RING, lambda rounds, rank, size: rounds[:-1] if rank == 1 else rounds),
        3,
        r"round 3: rank 1 stops here, other ranks go on",
    ),
    "off by one, on all ranks": (
        changed(
            RING,
            lambda rounds, rank, size: at(rounds, 2, send_chunk=(rank - 1) % size, receive_chunk=(rank - 2) % size),
        ),
        4,
        r"round 2: rank 1 reduces chunk 3 from rank 0, which adds the contribution of rank 0 a second time",
    ),
    "off by one, on one rank": (
        changed(RING, only(2, 3, send_chunk=1)),
        5,
        r"round 3: rank 2 sends chunk 1 to rank 3, which receives chunk 4",
    ),
    "counts that differ": (
        changed(RABENSEIFNER, only(0, 1, receive_count=1)),
        4,
        r"round 1: rank 1 sends 2 chunks from 0 on to rank 0, which receives chunk 0",
    ),
    "range beyond the end": (
        changed(RABENSEIFNER, only(0, 1, send_chunk=3)),
        4,
        r"round 1: rank 0 sends 2 chunks from 3 on, but there are 4 chunks",
    ),
    "sends what it has not got": (
        changed(GATHER, lambda rounds, rank, size: [rounds[1], rounds[0], *rounds[2:]]),
        4,
        r"round 1: rank 0 sends chunk 3, which it does not have yet",
    ),
    "reduces into what it has not got": (
        changed(TREE, lambda rounds, rank, size: at(rounds, 1, reduce=True)),
        4,
        r"round 1: rank 2 reduces into chunk 0, which it does not have yet",
    ),
    "receives over what it sends": (
        changed(DOUBLING, lambda rounds, rank, size: at(rounds, 1, reduce=False)),
        4,
        r"round 1: rank 0 receives chunk 0 over the one that it sends",
    ),
    "reduces into part of what it sends": (
        changed(RABENSEIFNER, lambda rounds, rank, size: at(rounds, 1, send_chunk=1, receive_chunk=rank % 2)),
        4,
        r"round 1: rank 0 reduces into chunk 1 and sends it, but not just the same chunks",
    ),
    "too few chunks": (replace(GATHER, chunks=lambda size: size - 1), 4, r"3 chunks, expected one a rank"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_schedule_is_rejected(name: str) -> None:
    schedule, size, message = BROKEN[name]
    with pytest.raises(ScheduleError, match=message):
        check(schedule, size)


@given(schedule=st.sampled_from(SCHEDULES), size=st.integers(2, 12), data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_change_of_one_side_of_a_message_is_rejected(schedule: Schedule, size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1), label="rank")
    rounds = list(unrolled(schedule.rounds(rank, size), schedule.chunks(size)))
    number = data.draw(st.integers(1, len(rounds)), label="round")
    sides = [side for side in ("send", "receive") if _peer(rounds[number - 1], side) != NOBODY]
    assume(sides)
    side = data.draw(st.sampled_from(sides), label="side")
    peer = "send_to" if side == "send" else "receive_from"
    field = data.draw(st.sampled_from([peer, f"{side}_chunk", f"{side}_count"]), label="field")
    was = getattr(rounds[number - 1], field)
    now = data.draw(st.integers(-2, size + 1).filter(lambda value: value != was), label="now")
    with pytest.raises(ScheduleError, match=f"round {number}: "):
        check(changed(schedule, only(rank, number, **{field: now})), size)


def _peer(round_: Round, side: str) -> int:
    return round_.send_to if side == "send" else round_.receive_from


# -- the same bits -----------------------------------------------------------------------------------------------------


def test_a_sum_in_another_order_on_each_rank_is_seen() -> None:
    """Dissemination: rank r hears from r - 1, r - 2, ...; right as a sum, but every rank adds in its own order."""

    def rounds(rank: Index, size: int) -> Iterator[Round]:
        for distance in (1, 2):
            yield Round((rank + distance) % size, 0, 1, (rank - distance) % size, 0, 1, reduce=True)

    assert not check(Schedule("dissemination", "all_reduce", lambda size: 1, rounds), 4).same_bits


def test_order_of_operands_does_not_matter_for_bits() -> None:
    """In an exchange one rank has a + b and the other b + a, which are the same bits."""
    assert check(DOUBLING, 2).same_bits


def test_different_trees_in_different_chunks_are_the_same_bits() -> None:
    """The ring starts each chunk's sum at another rank; what counts is that all ranks hold the same one."""
    assert check(RING, 5).same_bits
    first, second = ([*unrolled(RING.rounds(rank, 5), 5)] for rank in (0, 1))
    assert {r.receive_chunk for r in chain(first, second)} == set(range(5))
