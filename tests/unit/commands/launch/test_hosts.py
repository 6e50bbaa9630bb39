"""Lists and files of hosts."""

from __future__ import annotations

import platform
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.commands import run
from mpidist.commands.launch.hosts import begin_here, parse_hosts, ranks_by_host, read_hosts
from mpidist.errors import LaunchError

FILE = """\
# of the batch system
node1 slots=4
node2:3   # MPICH's form

node3
node1
"""


def test_a_file_of_either_form(tmp_path):
    (tmp_path / "hosts").write_text(FILE)
    assert read_hosts(str(tmp_path / "hosts"), 9) == {"node1": 5, "node2": 3, "node3": 1}


def test_the_page_of_help_has_the_forms_of_a_file(tmp_path):
    forms = re.search(r"a line a host: (\S+), or (\S+ \S+)", " ".join(run.parser().format_help().split()))
    assert forms is not None
    for form in forms.groups():
        (tmp_path / "hosts").write_text(form)
        assert read_hosts(str(tmp_path / "hosts"), 4) == {"node1": 4}


@pytest.mark.parametrize(
    ("text", "ranks", "expected"),
    [
        ("node1:4,node2:4", 8, {"node1": 4, "node2": 4}),
        ("node1", 3, {"node1": 3}),
        ("node1,node2", 5, {"node1": 3, "node2": 3}),
        ("node1:2, node2", 3, {"node1": 2, "node2": 1}),
        ("node1,node1,node2", 3, {"node1": 2, "node2": 1}),
    ],
)
def test_a_list(text, ranks, expected):
    assert parse_hosts(text, ranks) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "--hosts : expected a host .*, got ''"),
        ("node1,,node2", "got ''"),
        ("node1:four", "got 'node1:four'"),
        ("node1 max_slots=4", "got 'node1 max_slots=4'"),
        ("node1:1,node2:2", r"take 3 ranks \(node1:1, node2:2\), and -n asks for 4"),
    ],
)
def test_what_are_no_hosts(text, says):
    with pytest.raises(LaunchError, match=says):
        parse_hosts(text, 4)


def test_files_that_are_none(tmp_path):
    path = tmp_path / "hosts"
    with pytest.raises(LaunchError, match="--hostfile .*hosts: .*No such file"):
        read_hosts(str(path), 1)
    path.write_text("node1\nnode2 cpu=4\n")
    with pytest.raises(LaunchError, match=r"line 2 of .*hosts: .*got 'node2 cpu=4'"):
        read_hosts(str(path), 1)
    path.write_text("# nothing\n")
    with pytest.raises(LaunchError, match=r"take 0 ranks \(none\)"):
        read_hosts(str(path), 1)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 40))
def test_hosts_are_filled_one_after_the_other_and_what_is_left_is_dealt_evenly(places, ranks):
    hosts = {f"node{number}": count for number, count in enumerate(places)}
    dealt = [name for name, count in hosts.items() for _ in range(count)][:ranks]
    dealt += [list(hosts)[number % len(hosts)] for number in range(ranks - len(dealt))]
    assert ranks_by_host(hosts, ranks) == {name: dealt.count(name) for name in hosts if name in dealt}


def test_rank_0_is_here_where_the_first_host_is_called_like_this_machine():
    own = platform.node()
    for hosts in ({}, {"localhost": 2}, {own: 1, "far": 1}, {f"{own}.example.org": 1}):
        assert begin_here(hosts)
    assert not begin_here({"far": 1, own: 1})
