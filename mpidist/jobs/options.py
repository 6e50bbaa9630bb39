"""The options of ``mpidist job``: the same on its command line and in a site file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpidist.jobs.request import parse_array, parse_count, parse_memory, parse_number, parse_seconds, parse_time


@dataclass(frozen=True)
class Option:
    """One option: its text becomes the field of a `Request` that has its name.

    Attributes
    ----------
    parse : callable
        Text -> value; ValueError says the accepted form.
    metavar, what : str
        For the page of help.
    repeats : bool
        Whether it may be given several times, each a text of its own.
    """

    parse: Callable[[str], Any]
    metavar: str
    what: str
    repeats: bool = False


OPTIONS: Mapping[str, Option] = {
    "nodes": Option(parse_count, "N", "nodes (1)"),
    "ranks-per-node": Option(parse_count, "N", "ranks on each node (one for each GPU, else 1)"),
    "cores": Option(parse_count, "N", "cores of each rank (1)"),
    "gpus-per-node": Option(parse_number, "N", "GPUs of each node (0)"),
    "cores-per-node": Option(parse_number, "N", "what a node has: more ranks times cores are refused"),
    "memory": Option(parse_memory, "SIZE", "of each node: 64G"),
    "time": Option(parse_time, "TIME", "the limit: 90m, 4h, 1-12:00:00 (1h)"),
    "name": Option(str, "NAME", "of the job, its output and its folder (the script's)"),
    "servers": Option(parse_number, "N", "ranks that serve, on one further node"),
    "array": Option(parse_array, "A-B", "a job for each number; 0-9%%2: two at a time"),
    "requeue": Option(parse_number, "N", "a job that has saved goes on by itself, so often at most (0)"),
    "save-before": Option(parse_seconds, "TIME", "USR1 to the ranks so long before the time limit; 0: none (120)"),
    "apptainer": Option(str, "IMAGE", "run in a container of Apptainer"),
    "pyxis": Option(str, "IMAGE", "run in a container of Pyxis"),
    "setup": Option(str, "LINE", "bash to run first, as 'module load openmpi'", repeats=True),
    "python": Option(str, "PATH", "the interpreter (this one; in a container python3)"),
    "mpi": Option(str, "HOW", "how ranks find each other, as srun --mpi (what fits mpi4py's MPI)"),
    "partition": Option(str, "NAME", "partition or queue"),
    "account": Option(str, "NAME", "who pays"),
    "scratch": Option(str, "PATH", "a folder that all nodes see ($SCRATCH, else the job's own)"),
    "directive": Option(str, "OPTION", "a further option for the scheduler: --directive=--exclusive", repeats=True),
}


def read_options(texts: Mapping[str, Sequence[str]], sources: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a `Request` that options ask for; ValueError begins with the source of a bad text."""
    fields: dict[str, Any] = {}
    for name, values in texts.items():
        option = OPTIONS[name]
        if not option.repeats and len(values) != 1:
            raise ValueError(f"{sources[name]}: expected one value, got {len(values)}")
        try:
            parsed = tuple(option.parse(value) for value in values)
        except ValueError as error:
            raise ValueError(f"{sources[name]}: {error}") from None
        fields["directives" if name == "directive" else name.replace("-", "_")] = (
            parsed if option.repeats else parsed[0]
        )
    return fields


def command_line(
    scheduler: str, texts: Mapping[str, Sequence[str]], script: str, arguments: Sequence[str]
) -> list[str]:
    """Return the words that ask for a job, the options in the order of the page of help."""
    words = ["mpidist", "job", scheduler]
    for name, option in OPTIONS.items():
        for value in texts.get(name, ()):
            words += [f"--{name}={value}"] if value.startswith("-") or option.repeats else [f"--{name}", value]
    return [*words, script, *(["--", *arguments] if arguments else [])]
