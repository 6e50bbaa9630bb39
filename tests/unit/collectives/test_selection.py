"""Which all-reduce is chosen for how many bytes, and what is said about a name that is none."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.cluster.topology import Topology
from mpidist.collectives import selection
from mpidist.collectives.algorithms import algorithm, hierarchical, names
from mpidist.collectives.checker import check
from mpidist.collectives.rounds import Schedule
from mpidist.collectives.selection import Facts

NODE = Facts(Topology(["a"] * 4), ("all_reduce",), True)
TWO_NODES = Facts(Topology(list("aabb")), ("all_reduce",), False)
THREADS = Facts(Topology(["a"] * 4), (), False)


CHOICES = [
    (NODE, 0, "shared_memory"),
    (NODE, 1 << 30, "shared_memory"),
    (TWO_NODES, 4, "native"),
    (TWO_NODES, 1 << 20, "hierarchical"),
    (Facts(Topology(list("abcd")), ("all_reduce",), False), 1 << 20, "ring"),
    (THREADS, 4, "recursive_doubling"),
    (THREADS, 1 << 20, "ring"),
]

#: What has no schedule: that all ranks get the same bits is tested on real ranks, in tests/parallel.
NO_SCHEDULE = {"shared_memory", "native"}


@pytest.mark.parametrize(("facts", "nbytes", "chosen"), CHOICES)
def test_what_is_chosen(facts, nbytes, chosen):
    assert selection.choose(nbytes, facts) == chosen


def test_all_that_may_be_chosen_is_chosen_somewhere():
    assert {chosen for _, _, chosen in CHOICES} == set(selection.AUTOMATIC)


@given(
    hosts=st.lists(st.sampled_from("abcdefghijkl"), min_size=1, max_size=40),
    nbytes=st.integers(0, 1 << 40),
    native=st.sampled_from([(), ("all_reduce",)]),
    has_segments=st.booleans(),
)
def test_nothing_else_is_chosen(hosts, nbytes, native, has_segments):
    facts = Facts(Topology(hosts), native, has_segments)
    chosen = selection.choose(nbytes, facts)
    assert chosen in selection.AUTOMATIC
    assert selection.check(chosen, facts) == chosen
    assert selection.between_nodes(facts.topology) in selection.BETWEEN_NODES


def schedules(name: str, size: int) -> Iterator[Schedule]:
    """Yield what `name` stands for on `size` ranks: the hierarchical one depends on the nodes, which may be uneven."""
    if name != "hierarchical":
        yield algorithm("all_reduce", name)
        return
    for ranks_of_node in (1, 2, 3, 4):
        for inter in selection.BETWEEN_NODES:
            yield hierarchical(Topology([str(rank // ranks_of_node) for rank in range(size)]), inter)


@pytest.mark.parametrize("name", [name for name in selection.AUTOMATIC if name not in NO_SCHEDULE])
def test_all_ranks_get_the_same_bits_from_what_may_be_chosen(name):
    for size in range(1, 17):
        for schedule in schedules(name, size):
            assert check(schedule, size).same_bits, (schedule.name, size)


@pytest.mark.parametrize("name", [*names("all_reduce"), "hierarchical", "native", "shared_memory"])
def test_an_explicit_choice_wins(name):
    assert selection.check(name, NODE) == name


@pytest.mark.parametrize(("facts", "name"), [(NODE, "rign"), (THREADS, "native"), (TWO_NODES, "shared_memory")])
def test_an_unknown_name_lists_the_known_ones(facts, name):
    with pytest.raises(ValueError, match=f"{name!r}.*auto, ring, recursive_doubling"):
        selection.check(name, facts)


def test_few_messages_between_many_nodes():
    assert selection.between_nodes(Topology(list("ab"))) == "ring"
    assert selection.between_nodes(Topology([str(node) for node in range(100)])) == "rabenseifner"
