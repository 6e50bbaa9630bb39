"""Which all-reduce is chosen for how many bytes, and what is said about a name that is none."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.cluster.topology import Topology
from mpidist.collectives.ways import selection
from mpidist.collectives.ways.selection import Choices, Facts
from mpidist.schedules.checker import check
from mpidist.schedules.cost import CostModel
from mpidist.schedules.figures import Figures
from mpidist.schedules.rounds import Schedule
from mpidist.schedules.table import BETWEEN_NODES, algorithm, hierarchical, names

NODE = Facts(Topology(["a"] * 4), ("all_reduce",), True)
TWO_NODES = Facts(Topology(list("aabb")), ("all_reduce",), False)
THREADS = Facts(Topology(["a"] * 4), (), False)


CHOICES = [
    (NODE, 0, "shared_memory"),
    (NODE, 1 << 30, "shared_memory"),
    (TWO_NODES, 4, "native"),
    (TWO_NODES, 1 << 20, "hierarchical"),
    (Facts(TWO_NODES.topology, ("all_reduce",), True), 1 << 20, "two_level"),
    (Facts(Topology(list("abcd")), ("all_reduce",), False), 1 << 20, "ring"),
    (Facts(Topology(list("abcd")), ("all_reduce",), True), 1 << 20, "ring"),
    (Facts(Topology(list("ab")), ("all_reduce",), True), 1 << 16, "ring"),
    (Facts(Topology(list("ab")), ("all_reduce",), True), 1 << 19, "two_level"),
    (THREADS, 4, "recursive_doubling"),
    (THREADS, 1 << 20, "ring"),
]

#: What the fixed table never has: it is chosen only where it was measured to be quicker.
MEASURED_ONLY = {"rabenseifner"}

#: What has no schedule: that all ranks get the same bits is tested on real ranks, in tests/parallel.
NO_SCHEDULE = {"shared_memory", "native"}


@pytest.mark.parametrize(("facts", "nbytes", "chosen"), CHOICES)
def test_what_is_chosen(facts, nbytes, chosen):
    assert selection.choose(nbytes, facts) == chosen


def test_all_that_may_be_chosen_is_chosen_somewhere():
    assert {chosen for _, _, chosen in CHOICES} == set(selection.AUTOMATIC) - MEASURED_ONLY


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
    assert selection.between_nodes(facts.topology) in BETWEEN_NODES
    assert selection.between_carriers(facts.topology) in BETWEEN_NODES


def schedules(name: str, size: int) -> Iterator[Schedule]:
    """Yield what `name` stands for on `size` ranks: the hierarchical one depends on the nodes, which may be uneven."""
    if name == "two_level":  # inside a node, one rank adds up what all of them have
        name = selection.between_carriers(Topology([str(node) for node in range(size)]))
    if name != "hierarchical":
        yield algorithm("all_reduce", name)
        return
    for ranks_of_node in (1, 2, 3, 4):
        for inter in BETWEEN_NODES:
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


@pytest.mark.parametrize(
    ("nodes", "chosen"), [(2, "recursive_doubling"), (3, "ring"), (4, "rabenseifner"), (9, "rabenseifner")]
)
def test_carriers_exchange_between_two_nodes_and_halve_between_powers_of_two(nodes, chosen):
    assert selection.between_carriers(Topology([str(node) for node in range(nodes)])) == chosen


# -- the measured choice ----------------------------------------------------------------------------------------------

#: Prices of messages in a round number of microseconds.
MODEL = CostModel.flat(alpha=1e-6, beta=1e-9, gamma=1e-10)


def figures(**microseconds: float) -> Figures:
    """Figures in which each algorithm takes so long at 4 KiB, more by the byte beyond, and as long for less."""
    return Figures(MODEL, {name: ((4096.0, taken * 1e-6),) for name, taken in microseconds.items()})


def measured(facts: Facts, **microseconds: float) -> Facts:
    return replace(facts, choices=selection.worked_out(figures(**microseconds), facts))


def test_the_quickest_is_chosen():
    facts = measured(NODE, shared_memory=50, native=20, recursive_doubling=30, ring=90, rabenseifner=90)
    assert selection.choose(4096, facts) == "native"


@pytest.mark.parametrize(
    ("native", "chosen"),
    [(91.0, "native"), (95.0, "shared_memory"), (100.0, "shared_memory"), (101.0, "shared_memory")],
)
def test_the_fixed_table_stands_where_the_gain_is_within_the_noise(native, chosen):
    facts = measured(NODE, shared_memory=100, native=native, recursive_doubling=900, ring=900, rabenseifner=900)
    assert selection.choose(4096, facts) == chosen


def test_a_gain_of_a_microsecond_is_noise():
    facts = measured(NODE, shared_memory=3, native=1.5, recursive_doubling=900, ring=900, rabenseifner=900)
    assert selection.choose(4096, facts) == "shared_memory"


@given(
    microseconds=st.fixed_dictionaries({name: st.floats(1, 1e6) for name in selection.eligible(NODE)}),
    nbytes=st.integers(0, 1 << 30),
    facts=st.sampled_from([NODE, TWO_NODES, THREADS]),
)
def test_what_is_chosen_is_never_far_from_the_best_prediction(microseconds, nbytes, facts):
    taken = selection.predictions(figures(**microseconds), nbytes, facts)
    known = measured(facts, **microseconds)
    chosen = selection.choose(nbytes, known)
    assert selection.check(chosen, known) == chosen
    best = min(taken.values())
    # sizes between two of the grid, at most a half apart, take the choice of the lower one
    assert taken[chosen] <= 1.5 * max(1.1 * best, best + 2e-6)


def test_without_segments_the_choice_is_another_one():
    facts = measured(NODE, shared_memory=10, native=50, recursive_doubling=20, ring=90, rabenseifner=90)
    assert selection.choose(4096, facts) == "shared_memory"
    assert selection.choose(4096, replace(facts, has_segments=False)) == "recursive_doubling"


@given(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.sampled_from(selection.AUTOMATIC)), max_size=5),
    st.integers(1, 1 << 30),
)
def test_choices_that_are_sent_arrive(rows, bucket_bytes):
    shared = tuple(rows)
    choices = Choices(shared, ((0, "ring"), *shared), bucket_bytes)
    assert Choices.from_bytes(choices.to_bytes()) == choices


@pytest.mark.parametrize(("facts", "nbytes"), [(facts, nbytes) for facts, nbytes, _ in CHOICES])
def test_a_pinned_choice_knows_no_measurement_and_is_never_left_to_mpi(facts, nbytes):
    known = measured(facts, shared_memory=100, native=1, recursive_doubling=50, ring=50, hierarchical=50)
    pinned = selection.asked_for(nbytes, "pinned", known)
    assert pinned == selection.asked_for(nbytes, "pinned", facts) != "native"


def test_an_explicit_choice_wins_over_what_was_measured():
    known = measured(NODE, shared_memory=1, native=900, recursive_doubling=900, ring=900, rabenseifner=900)
    assert selection.asked_for(4096, "native", known) == "native"
    assert selection.asked_for(4096, "auto", known) == "shared_memory"


def test_of_two_ranks_the_ring_stands_for_its_twin():
    assert "rabenseifner" not in selection.eligible(Facts(Topology(["a"] * 2), ("all_reduce",), True))
    assert "hierarchical" not in selection.eligible(NODE)
    assert "hierarchical" in selection.eligible(TWO_NODES)


def test_units_between_nodes_are_as_long_as_latency_asks_for():
    latency, per_byte = 1e-3, 1e-9
    sizes = [4.0**power for power in range(1, 14)]
    taken = tuple((nbytes, latency + per_byte * nbytes) for nbytes in sizes)
    names = selection.eligible(TWO_NODES)
    choices = selection.worked_out(Figures(MODEL, dict.fromkeys(names, taken)), TWO_NODES)
    # at 1 ms and 1 GB/s, latency is a tenth at 10 MB
    assert 1 << 22 <= choices.bucket_bytes <= 1 << 25
    quick = tuple((nbytes, per_byte * nbytes) for nbytes in sizes)
    assert selection.worked_out(Figures(MODEL, dict.fromkeys(names, quick)), TWO_NODES).bucket_bytes == 1 << 18


# -- the table --------------------------------------------------------------------------------------------------------


def test_the_rows_of_a_place_begin_at_nothing_and_ascend():
    for place in {row.place for row in selection.TABLE}:
        sizes = [row.least_bytes for row in selection.TABLE if row.place == place]
        assert sizes[0] == 0 and sizes == sorted(set(sizes))


def test_every_row_names_a_result_file_that_is_there_or_says_that_nothing_was_measured():
    results = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
    for row in selection.TABLE:
        files = [json.loads((results / name).read_text()) for name in row.files.split(", ") if name]
        assert row.ranks == max((each["ranks"] for file in files for each in file["launches"]), default=0), row


def test_evidence_of_few_ranks_is_none_of_more():
    row, guess = selection.row_of(4, NODE), selection.TABLE[-1]
    assert row.evidence(2) == row.evidence(row.ranks) == row.files
    assert row.evidence(row.ranks + 1) == f"not measured on more than 16 ranks: {row.files}"
    assert guess.evidence(1) == guess.evidence(64) == "not measured"


@given(nbytes=st.integers(0, 1 << 40), asked=st.sampled_from(["auto", "pinned", "shared_memory"]))
def test_a_segment_is_a_mebibyte_and_half_of_it_for_short_units(nbytes, asked):
    found = selection.way(nbytes, asked, NODE)
    assert found == ("shared_memory", 1 << 20 if nbytes >= 1 << 21 else 1 << 19)


@pytest.mark.parametrize(
    ("nbytes", "asked", "segment_bytes"),
    [
        (1 << 21, "auto", 1 << 18),
        (1 << 30, "auto", 1 << 18),
        ((1 << 21) - 1, "auto", 1 << 19),
        (1 << 21, "pinned", 1 << 20),
        (1 << 21, "shared_memory", 1 << 20),
    ],
)
def test_tuned_segments_are_those_of_long_units_that_are_left_to_auto(nbytes, asked, segment_bytes):
    tuned = replace(figures(shared_memory=1, native=900), segments={1 << 18: ((4e6, 1.0),)}, segment_bytes=1 << 18)
    known = replace(NODE, choices=Choices.from_bytes(selection.worked_out(tuned, NODE).to_bytes()))
    assert selection.way(nbytes, asked, known) == ("shared_memory", segment_bytes)


def test_tuned_segments_are_not_those_of_two_levels():
    facts = Facts(TWO_NODES.topology, ("all_reduce",), True)
    choices = Choices(((0, "two_level"),), ((0, "ring"),), 1 << 20, 1 << 18)
    assert selection.way(1 << 22, "auto", replace(facts, choices=choices)) == ("two_level", 1 << 20)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("auto", "device"),
        ("pinned", "device:pinned"),
        ("nccl", "nccl"),
        ("staged", "staged"),
        ("ring", "staged:ring"),
        ("shared_memory", "staged:shared_memory"),
    ],
)
def test_arrays_of_a_device_have_a_row_of_their_own(asked, expected):
    assert selection.way(1 << 22, asked, replace(NODE, on_device=True)) == (expected, 0)


@pytest.mark.parametrize("asked", ["nccl", "staged"])
def test_what_is_asked_for_arrays_of_devices_leaves_the_choice_for_those_of_the_host(asked):
    choices = Choices(((1, "shared_memory"),), ((1, "ring"),), 1 << 20, 1 << 18)
    for facts in (NODE, TWO_NODES, replace(NODE, choices=choices)):
        assert selection.way(1 << 22, asked, facts) == selection.way(1 << 22, "auto", facts)


@pytest.mark.parametrize("asked", ["two_level", "device", "device:pinned", "staged:ring", "staged:bogus"])
def test_an_algorithm_that_is_not_there_is_refused_for_arrays_of_a_device_too(asked):
    with pytest.raises(ValueError, match=asked):
        selection.way(1 << 22, asked, replace(NODE, on_device=True))
