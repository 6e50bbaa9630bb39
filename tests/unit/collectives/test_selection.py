"""Which all-reduce is chosen for how many bytes, and what is said about a name that is none."""

import pytest

from mpidist.cluster.topology import Topology
from mpidist.collectives import selection
from mpidist.collectives.algorithms import names
from mpidist.collectives.selection import Facts

NODE = Facts(Topology(["a"] * 4), ("all_reduce",), True)
TWO_NODES = Facts(Topology(list("aabb")), ("all_reduce",), False)
THREADS = Facts(Topology(["a"] * 4), (), False)


@pytest.mark.parametrize(
    ("facts", "nbytes", "chosen"),
    [
        (NODE, 0, "shared_memory"),
        (NODE, 1 << 30, "shared_memory"),
        (TWO_NODES, 4, "native"),
        (TWO_NODES, 1 << 20, "hierarchical"),
        (Facts(Topology(list("abcd")), ("all_reduce",), False), 1 << 20, "ring"),
        (THREADS, 4, "recursive_doubling"),
        (THREADS, 1 << 20, "ring"),
    ],
)
def test_what_is_chosen(facts, nbytes, chosen):
    assert selection.choose(nbytes, facts) == chosen


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
