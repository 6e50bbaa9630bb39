"""What a batch job asks for, checked before a script is written."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from mpidist.jobs.schedulers import SCHEDULERS, Scheduler

_TIME_FORM = "a time such as 90m, 4h, 1h30m, 2d, 04:00:00 or 1-12:00:00 (days-hours:minutes:seconds)"
_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
_MEMORY = re.compile(r"([1-9]\d*)([MGT])(?:i?B)?")
_ARRAY = re.compile(r"(\d+)-(\d+)(?:%([1-9]\d*))?")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*")
_PLACE = re.compile(r"\{(folder|checkpoints|task)\}")


@dataclass(frozen=True)
class Array:
    """Tasks of a job array: the numbers `first` to `last`, at most `most` of them at once (0: all)."""

    first: int
    last: int
    most: int = 0


@dataclass(frozen=True)
class Request:
    """What a job asks for; ValueError, which says the accepted form, where it can be no job.

    Attributes
    ----------
    scheduler, script : str
        A name in ``SCHEDULERS``; a Python file that exists.
    arguments : tuple of str
        Of the script. ``{folder}``, ``{checkpoints}`` and ``{task}`` stand for the job's own.
    nodes, ranks_per_node, cores : int
        `cores` is for each rank.
    gpus_per_node : int
        0 for none.
    cores_per_node : int
        What a node has; 0 where it is not known.
    memory : int
        MiB of each node; 0 leaves it to the scheduler.
    time : int
        Seconds.
    servers : int
        Ranks that serve, on one further node; 0 for none.
    requeue : int
        How often the job may go back to the queue to go on.
    save_before : int
        Seconds before the time limit at which ranks are told to save; 0 for never.
    apptainer, pyxis : str
        An image; empty for none.
    setup : tuple of str
        Lines of bash that come before everything else.
    python : str
        The interpreter; bash replaces variables in it.
    mpi : str
        How the ranks find each other, for schedulers that start them.
    scratch : str
        A folder that all nodes see; bash replaces variables in it.
    directives : tuple of str
        Further options for the scheduler, each on a line of its own.
    """

    scheduler: str
    script: str
    arguments: tuple[str, ...] = ()
    nodes: int = 1
    ranks_per_node: int = 1
    cores: int = 1
    gpus_per_node: int = 0
    cores_per_node: int = 0
    memory: int = 0
    time: int = 3600
    name: str = "job"
    servers: int = 0
    array: Array | None = None
    requeue: int = 0
    save_before: int = 120
    apptainer: str = ""
    pyxis: str = ""
    setup: tuple[str, ...] = ()
    python: str = "python3"
    mpi: str = ""
    partition: str = ""
    account: str = ""
    scratch: str = "${SCRATCH:-$PWD}"
    directives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        scheduler = find_scheduler(self.scheduler)
        _check_script(self.script)
        _check_sizes(self)
        _check_words(self, scheduler)
        _check_time(self)
        _check_features(self, scheduler)

    @property
    def ranks(self) -> int:
        """The ranks that train; servers are not among them."""
        return self.nodes * self.ranks_per_node

    @property
    def container(self) -> str:
        """The image of the container; empty for none."""
        return self.apptainer or self.pyxis


def find_scheduler(name: str) -> Scheduler:
    """Return the scheduler of that name; ValueError lists those that there are."""
    if name not in SCHEDULERS:
        raise ValueError(f"{name!r} is not a scheduler; expected one of {', '.join(SCHEDULERS)}")
    return SCHEDULERS[name]


def parse_count(text: str) -> int:
    """Return a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def parse_number(text: str) -> int:
    """Return a whole number, 0 or more."""
    if not text.isdecimal():
        raise ValueError(f"{text!r}: expected a whole number, 0 or more")
    return int(text)


def parse_time(text: str) -> int:
    """Return the seconds of ``4h``, ``1h30m``, ``04:00:00`` or ``1-12:00:00``.

    Plain numbers and ``30:00`` are refused: each scheduler takes them for something else.
    """
    match = _UNITS.fullmatch(text) or _CLOCK.fullmatch(text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    found = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not found:
        raise ValueError(f"{text!r}: expected {_TIME_FORM}")
    return found


def parse_seconds(text: str) -> int:
    """Return the seconds of ``120`` or of a time with units; 0 is one."""
    return int(text) if text.isdecimal() else parse_time(text)


def parse_memory(text: str) -> int:
    """Return the MiB of ``64G``, ``512M`` or ``1T``."""
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r}: expected memory such as 512M, 64G or 1T")
    return int(match[1]) * {"M": 1, "G": 1024, "T": 1024**2}[match[2]]


def parse_array(text: str) -> Array:
    """Return the tasks of ``0-9``, or of ``0-9%2``: at most two at once."""
    match = _ARRAY.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f"{text!r}: expected FIRST-LAST such as 0-9, or 0-9%2 for at most two at once")
    return Array(int(match[1]), int(match[2]), int(match[3] or 0))


def places(argument: str) -> list[str]:
    """Split an argument at ``{folder}``, ``{checkpoints}`` and ``{task}``; their names are at the odd places."""
    return _PLACE.split(argument)


def _check_script(script: str) -> None:
    if not script.endswith(".py"):
        raise ValueError(f"script {script!r}: expected a Python file, train.py; its arguments come after --")
    if not os.path.isfile(script):
        raise ValueError(f"there is no file {script!r} in {os.getcwd()}")


def _check_sizes(asked: Request) -> None:
    """Refuse more ranks than a node has cores for; `parse_count` and `parse_number` have seen to each number."""
    needed, there = asked.ranks_per_node * asked.cores, asked.cores_per_node
    if there and needed > there:
        ranks = f"{asked.ranks_per_node} ranks of {asked.cores} cores need {needed} cores of a node, which has {there}"
        raise ValueError(f"{ranks}; expected --ranks-per-node times --cores of {there} or less")
    if there and asked.servers * asked.cores > there:
        ranks = f"{asked.servers} servers of {asked.cores} cores need {asked.servers * asked.cores} cores of one node"
        raise ValueError(f"{ranks}, which has {there}; expected --servers times --cores of {there} or less")


def _check_words(asked: Request, scheduler: Scheduler) -> None:
    """Refuse words that the scheduler, or bash, would take for something else."""
    if ":" in asked.arguments and scheduler.splits_at_colons:
        raise ValueError("argument ':': srun begins another program there; expected it as a part of a longer word")
    for argument in (asked.script, *asked.arguments):  # they stand in a comment of the script too
        if re.search("[\n\r\ud800-\udfff]", argument):  # what is no UTF-8 comes as surrogates
            raise ValueError(f"argument {argument!r}: expected one line of UTF-8")
    if not _NAME.fullmatch(asked.name):
        raise ValueError(f"--name {asked.name!r}: expected a letter, then letters, digits, '.', '_' and '-'")
    for name in ("partition", "account", "mpi"):
        word = getattr(asked, name)
        if word and not _WORD.fullmatch(word):
            raise ValueError(f"{_option(name)} {word!r}: expected one word of letters, digits and ._:/@+-")
    for name in ("python", "scratch", "apptainer", "pyxis"):
        if re.search(r'["`\\\n]|\$\(', getattr(asked, name)):
            raise ValueError(f"{_option(name)} {getattr(asked, name)!r}: expected a path without quotes and $(...)")
        if re.search(r"\$\{\w+:?[-=+]~", getattr(asked, name)):
            raise ValueError(f"{_option(name)} {getattr(asked, name)!r}: bash leaves ~ as it is there; give $HOME")
    for line in (*asked.directives, *asked.setup):
        if "\n" in line or not line.strip():
            raise ValueError(f"{line!r}: expected one line; give --directive and --setup once for each")
    for line in asked.directives:
        if not line.startswith("-"):
            raise ValueError(
                f"--directive {line!r}: expected an option of {scheduler.submit[0]}, which begins with '-'"
            )


def _check_time(asked: Request) -> None:
    if asked.time < 60:
        raise ValueError(f"--time {asked.time}s: expected a minute or more")
    if asked.save_before >= asked.time:
        before = f"--save-before {asked.save_before} s is not before a time limit of {asked.time} s"
        raise ValueError(f"{before}; expected less, or 0 for no signal")
    if asked.requeue and not asked.save_before:
        raise ValueError("--requeue needs a save before the time limit; expected --save-before 1 or more")


def _check_features(asked: Request, scheduler: Scheduler) -> None:
    """Refuse what the scheduler does not have, and what does not go together."""
    for name in ("servers", "array", "apptainer", "pyxis", "memory", "gpus_per_node"):
        if getattr(asked, name) and name in scheduler.lacks:
            raise ValueError(f"{_option(name)}: {scheduler.lacks[name]}")
    if scheduler.counts_gpus_by_rank and asked.gpus_per_node not in (0, asked.ranks_per_node):
        got = f"{asked.gpus_per_node} GPUs and {asked.ranks_per_node} ranks a node"
        raise ValueError(f"{scheduler.title} counts GPUs by rank: expected one for each, got {got}")
    if asked.apptainer and asked.pyxis:
        raise ValueError("--apptainer and --pyxis are two ways to one container; expected one of them")
    if asked.servers and asked.requeue:
        raise ValueError("--requeue with --servers: jobs of two components were not tried in it; expected one of them")
    if asked.servers and asked.array:
        raise ValueError("--array with --servers: Slurm has no arrays of jobs of two components; expected one of them")
    if asked.save_before > scheduler.most_notice:
        most = f"{scheduler.title} sends a signal {scheduler.most_notice} s before the limit at the earliest"
        raise ValueError(f"--save-before {asked.save_before} s: {most}; expected no more")
    if asked.array is None and any("task" in places(argument)[1::2] for argument in asked.arguments):
        raise ValueError("{task} is the number of a task of a job array; expected --array FIRST-LAST with it")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
