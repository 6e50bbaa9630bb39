"""Slurm's lists: expanded, against generators that know what they wrote."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.cluster.hostlist import expand_hostlist, expand_tasks_per_node

#: A bracket: its entries as (first, last or None, width).
ENTRIES = st.tuples(st.integers(0, 120), st.none() | st.integers(0, 5), st.integers(1, 4))
BRACKETS = st.lists(ENTRIES, min_size=1, max_size=3)
TEXTS = st.text("abgn-0.1_", min_size=1, max_size=4)
#: A name: text and brackets in turn, two texts never side by side.
NAMES = st.lists(st.tuples(TEXTS, BRACKETS | st.none()), min_size=1, max_size=3)


def _bracket(entries: list[tuple[int, int | None, int]]) -> tuple[str, list[str]]:
    """Return a bracket's text, and the numbers that it stands for."""
    texts, numbers = [], []
    for first, more, width in entries:
        last = first if more is None else first + more
        texts.append(f"{first:0{width}d}" + ("" if more is None else f"-{last:0{width}d}"))
        numbers += [f"{number:0{width}d}" for number in range(first, last + 1)]
    return f"[{','.join(texts)}]", numbers


def _name(parts: list[tuple[str, list[tuple[int, int | None, int]] | None]]) -> tuple[str, list[str]]:
    """Return a name's text, and the names that it stands for."""
    text, alternatives = "", []
    for literal, entries in parts:
        written, numbers = ("", [""]) if entries is None else _bracket(entries)
        text += literal + written
        alternatives.append([literal + number for number in numbers])
    return text, ["".join(name) for name in itertools.product(*alternatives)]


@given(st.lists(NAMES, min_size=1, max_size=3))
def test_hostlist_round_trip(names: list[list[tuple[str, list[tuple[int, int | None, int]] | None]]]) -> None:
    written = [_name(parts) for parts in names]
    expected = [host for _, hosts in written for host in hosts]
    assert expand_hostlist(",".join(text for text, _ in written)) == expected


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("", []),
        ("n10,n9", ["n10", "n9"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("gpu-[01-02]-ib", ["gpu-01-ib", "gpu-02-ib"]),
        ("r[1-2]n[0,8]", ["r1n0", "r1n8", "r2n0", "r2n8"]),
        ("[1-2]", ["1", "2"]),
        ("x[098-101]", ["x098", "x099", "x100", "x101"]),
    ],
)
def test_hostlists_by_hand(hostlist: str, hosts: list[str]) -> None:
    assert expand_hostlist(hostlist) == hosts


@pytest.mark.parametrize(
    ("hostlist", "says"),
    [
        ("n[1-2", r"cannot read '\[1-2'"),
        ("n1]", "cannot read '\\]'"),
        ("n[[1]]", "cannot read"),
        ("n[]", "cannot read '' of '\\[\\]'"),
        ("n[1,]", "cannot read ''"),
        ("n[1-2-3]", "cannot read '1-2-3'"),
        ("n[a-b]", "cannot read 'a-b'"),
        ("n[3-1]", "the range '3-1' in '\\[3-1\\]' runs backwards"),
        (",a", "a name is missing"),
        ("a,", "a name is missing"),
        ("a,,b", "a name is missing"),
        ("a b", "cannot read ' b'"),
    ],
)
def test_unreadable_hostlists(hostlist: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        expand_hostlist(hostlist)


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(1, 9), st.booleans()), min_size=1))
def test_tasks_per_node_round_trip(runs: list[tuple[int, int, bool]]) -> None:
    text = ",".join(f"{count}(x{times})" if folded else str(count) for count, times, folded in runs)
    expected = [count for count, times, folded in runs for _ in range(times if folded else 1)]
    assert expand_tasks_per_node(text) == expected


@pytest.mark.parametrize("text", ["", "2 (x2)", "2(2)", "2(x)", "x2", "2,,1", "-1", "2(x2),"])
def test_unreadable_tasks_per_node(text: str) -> None:
    with pytest.raises(ValueError, match="expected a list like"):
        expand_tasks_per_node(text)
