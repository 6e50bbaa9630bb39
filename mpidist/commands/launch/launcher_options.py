"""A launcher's own options: those that ``mpidist run`` uses, by vendor, and those that it cannot honour."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpidist.errors import LaunchError


@dataclass(frozen=True)
class Words:
    """How one vendor's launcher is told."""

    hosts: str  # the option with the hosts, and the ranks that each takes
    tag: str  # the option with which the launcher tells the rank in front of each line that it passes on
    tagged: re.Pattern[bytes]  # what it puts there: the rank, and ``b"err"`` or ``b"out"`` where it tells that
    names_variables: bool  # whether ranks on other hosts get only the variables that are named by ``-x``
    asks: frozenset[str]  # the schedulers of which it learns the hosts by itself


WORDS = {
    "Open MPI": Words(
        "--host",
        "--tag-output",
        re.compile(rb"\[\d+,(\d+)\]<std(err|out)>: ?"),
        names_variables=True,
        asks=frozenset(["Slurm", "PBS"]),
    ),
    "MPICH": Words(
        "-hosts",
        "-prepend-rank",
        re.compile(rb"\[(\d+)\]() "),
        names_variables=False,
        asks=frozenset(["Slurm", "PBS", "LSF", "Grid Engine"]),
    ),
}

#: Options whose work is done by `mpidist run`, which takes the output of the ranks itself, and knows when they end.
_INSTEAD = {
    **dict.fromkeys(["tag-output", "timestamp-output", "prepend-rank", "prepend-pattern"], "--tag"),
    **dict.fromkeys(["output-filename", "output-directory", "outfile-pattern", "errfile-pattern"], "--log-dir DIR"),
    **dict.fromkeys(["output", "merge-stderr-to-stdout", "xml"], "--tag or --log-dir DIR"),
    **dict.fromkeys(["n", "np", "c"], "-n RANKS"),
    "timeout": "--timeout TIME",
}


def instead_of(argument: str) -> str | None:
    """Return the option of ``mpidist run`` that does what this one of a launcher does; None if there is none; Local."""
    return _INSTEAD.get(argument.lstrip("-").partition("=")[0]) if argument.startswith("-") else None


def parse_launcher_args(text: str) -> list[str]:
    """Return a user's arguments for the launcher; LaunchError if they would have no effect, or a wrong one; Local."""
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"--launcher-args {text!r}: {error}; expected words as in a shell") from None
    for argument in arguments:
        instead = instead_of(argument)
        if instead is not None:
            raise LaunchError(f"--launcher-args: {argument} has no effect here; use {instead} of mpidist run instead")
        if argument == ":":
            raise LaunchError("--launcher-args: a second program (:) cannot be started; use mpirun itself for that")
    return arguments


def words_of(vendor: str, asked: str) -> Words:
    """Return how the launcher of this vendor is told; LaunchError, which names what was `asked`, if that is unknown."""
    if vendor not in WORDS:
        raise LaunchError(
            f"{asked} works with the launchers of {' and '.join(WORDS)}, and this one is of "
            f"{vendor or 'an unknown MPI'}; use its own options by --launcher-args"
        )
    return WORDS[vendor]


def parse_variables(given: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``-x NAME`` and ``-x NAME=VALUE``, with their values."""
    variables = {}
    for text in given:
        name, has_value, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise LaunchError(f"-x {text}: expected NAME or NAME=VALUE")
        if not has_value and name not in environ:
            raise LaunchError(f"-x {name}: there is no such variable here; give its value, -x {name}=VALUE")
        variables[name] = value if has_value else environ[name]
    return variables
