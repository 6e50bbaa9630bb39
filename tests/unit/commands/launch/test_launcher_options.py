"""Options of launchers: what is passed on, what is refused, and variables for the ranks."""

from __future__ import annotations

import shlex

import pytest

from mpidist.commands.launch.launcher_options import parse_launcher_args, parse_variables, words_of
from mpidist.errors import LaunchError


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (["--output", "tag"], "--tag or --log-dir DIR"),
        (["--output=dir=/tmp/logs"], "--tag or --log-dir DIR"),
        (["--tag-output"], "--tag"),
        (["-prepend-rank"], "--tag"),
        (["-outfile-pattern", "x%r"], "--log-dir DIR"),
        (["--bind-to", "none", "--timeout", "3"], "--timeout TIME"),
        (["-np", "4"], "-n RANKS"),
    ],
)
def test_what_mpidist_run_does_itself_is_refused(arguments, instead):
    with pytest.raises(LaunchError, match=f"has no effect here; use {instead} of mpidist run instead"):
        parse_launcher_args(shlex.join(arguments))


def test_a_second_program_is_refused():
    with pytest.raises(LaunchError, match="second program"):
        parse_launcher_args("--bind-to none : --host node2")


def test_words_that_no_shell_would_read_are_refused_by_the_name_of_the_option():
    with pytest.raises(LaunchError, match="--launcher-args '--mca x \"y': No closing quotation; expected"):
        parse_launcher_args('--mca x "y')


def test_all_else_is_the_users_to_know():
    text = "--host n1:4,n2:4 --mca btl '^vader' -x 'NAME=out put' --map-by core np"
    assert parse_launcher_args(text)[3:7] == ["btl", "^vader", "-x", "NAME=out put"]


def test_variables_with_and_without_a_value():
    given = ["A=1", "B", "C=", "D=x=y z", "A=2"]
    assert parse_variables(given, {"B": "of here"}) == {"A": "2", "B": "of here", "C": "", "D": "x=y z"}


@pytest.mark.parametrize(
    ("text", "says"), [("A", "no such variable here"), ("1A=2", "expected NAME"), ("=2", "NAME=V")]
)
def test_what_are_no_variables(text, says):
    with pytest.raises(LaunchError, match=says):
        parse_variables([text], {})


def test_a_launcher_that_is_told_otherwise_is_named():
    with pytest.raises(LaunchError, match="--hosts works with the launchers of Open MPI and MPICH, .* of Intel MPI"):
        words_of("Intel MPI", "--hosts")
