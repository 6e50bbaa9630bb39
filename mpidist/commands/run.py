"""``mpidist run``: start a program on N ranks, here or where a scheduler says, with the mpirun that is mpi4py's."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mpidist.cluster.allocation import Allocation, given_allocation, het_group_option
from mpidist.cluster.slurm_plugins import plugin_for
from mpidist.commands.launch.command_line import CommandLine, command_line, other_python, program_command
from mpidist.commands.launch.cores import visible_cores
from mpidist.commands.launch.destinations import LogFiles, Terminal
from mpidist.commands.launch.failures import FailedRank
from mpidist.commands.launch.hosts import begin_here, parse_hosts, ranks_by_host, read_hosts
from mpidist.commands.launch.launcher_options import WORDS, instead_of, parse_launcher_args, parse_variables, words_of
from mpidist.commands.launch.mpirun import Mpirun, check_tolerates_faults, find_mpirun
from mpidist.commands.launch.probe import MpiFound, probe_mpi, without_launcher
from mpidist.commands.launch.rank_deaths import RankDeath
from mpidist.commands.launch.room import least_room
from mpidist.commands.launch.site_options import fill_in, flags, site_options, used_defaults
from mpidist.commands.launch.supervisor import Ended, supervise
from mpidist.commands.parser import Parser
from mpidist.commands.quantities import count, duration
from mpidist.commands.site_page import add_site_options, given_defaults, sources
from mpidist.errors import ClusterResolutionError, LaunchError
from mpidist.jobs.site import Default
from mpidist.options import FAULT_TOLERANT, settings
from mpidist.runtime.short_traceback import shorten

#: What options are where neither the command line nor a site file has them.
_BUILT_IN: dict[str, Any] = {
    "ranks": None,
    "hosts": None,
    "hostfile": None,
    "x": [],
    "tag": False,
    "log_dir": None,
    "timeout": None,
    "fault_tolerant": False,
    "launcher_args": "",
    "quiet": False,
}

#: With more lines after it, a traceback is told again.
_IN_SIGHT_LINES = 8

_EXAMPLES = """examples:
  mpidist run -n 8 train.py --epochs 3     a Python file, with this interpreter
  mpidist run -n 4 -m pytest tests         a module
  mpidist run -n 2 ./simulate              any program
  mpidist run -n 8 --hosts node1:4,node2:4 -x PYTHONPATH --log-dir logs train.py

The exit status is that of the rank that failed first, 128 + n after signal n, and 124 after --timeout. Signals go to
the ranks of this machine, and the launcher gets none: a job that saves a checkpoint after SIGTERM has the time for it,
and the exit status that it asks for is that of mpidist run.
"""


def parser() -> Parser:
    """Return the parser of ``mpidist run``'s arguments."""
    parser = Parser(
        "run",
        "Start a program on RANKS ranks with the mpirun that belongs to mpi4py.",
        _EXAMPLES,
        usage="mpidist run -n RANKS [options] PROGRAM [arguments] | -m MODULE [arguments]",
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("-n", "-np", "--ranks", type=count, metavar="RANKS", help="how many ranks")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--hosts", metavar="LIST", help="where: node1:4,node2:4; without numbers, the same on each")
    hosts.add_argument("--hostfile", metavar="FILE", help="the same, a line a host: node1:4, or node1 slots=4")
    add("-x", action="append", metavar="NAME[=VALUE]", help="a variable for the ranks, also on other hosts")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--tag", action="store_true", help="begin each line of a rank with its number: [3] ...")
    output.add_argument("--log-dir", metavar="DIR", help="what rank 3 prints goes to the end of DIR/rank3.log")
    add("--timeout", type=duration, metavar="TIME", help="end the job after so long, 90 or 5m, with status 124")
    tolerant = "go on when a rank dies that others can do without (Open MPI 5)"
    add("--fault-tolerant", action="store_true", help=tolerant)
    add("--launcher-args", metavar="'...'", help="for mpirun, as one word: --launcher-args='--mca btl ^tcp'")
    add("--dry-run", action="store_true", default=False, help="print the command line instead of running it")
    add("--quiet", action="store_true", help="do not say what was added to the command line, and why")
    add_site_options(parser)
    add("-m", dest="module", default=None, nargs=argparse.REMAINDER, help="run a module, as python -m does")
    add("program", nargs=argparse.REMAINDER, help="a .py file or any program, and its arguments")
    return parser


def words_for(ranks: int, *command: str) -> list[str]:
    """Return the arguments that start a command of mpidist on ranks of this machine, by no defaults of a site."""
    return ["--site", os.devnull, "--quiet", "-n", str(ranks), "-m", "mpidist", *command]


def main(argv: Sequence[str]) -> int:
    """Run the job and return its exit status; Local."""
    asked, unknown = parser().parse_known_args(argv)
    if unknown:
        hint = f"one of mpirun's own goes into --launcher-args='{unknown[0]} ...'"
        parser().refuse(unknown, hint, instead_of(unknown[0]))
    options = site_options(parser())
    try:
        defaults = given_defaults(asked, "run", options, flags(options))
        if defaults is None:
            return 0
        defaults = used_defaults(asked, options, defaults)
        fill_in(asked, options, defaults)
    except ValueError as error:
        parser().error(str(error))
    return _run(argparse.Namespace(**{**_BUILT_IN, **vars(asked)}), defaults)


def _run(arguments: argparse.Namespace, defaults: Mapping[str, Default]) -> int:
    """Run a job whose options are complete; return its exit status."""
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    _check_arguments(arguments, program)
    try:
        _check_program(program[0] if program else sys.executable)
        # a variable that cannot be read is better told once than by every rank
        arguments.fault_tolerant = settings().fault_tolerant or arguments.fault_tolerant
        command = program_command(program, arguments.module)
        mpi = probe_mpi()
        launcher = find_mpirun(mpi)
        if arguments.fault_tolerant:
            check_tolerates_faults(launcher)
        # Open MPI's launcher gives its ranks a terminal, wanted or not; for others there is none to be had
        as_it_is = not (arguments.tag or arguments.log_dir)
        terminal = as_it_is and sys.stdout.isatty() and launcher.vendor == "Open MPI"
        allocation = _allocation()
        if allocation is not None and allocation.components > 1:
            _tell_components(allocation, plugin_for(mpi.title) or "PLUGIN")
        line = _complete(launcher, arguments, allocation, terminal)
        _tell(mpi, launcher, line, program, arguments, sources(defaults))
        if arguments.dry_run:
            variables = [f"{name}={value}" for name, value in line.environ.items()]
            print(shlex.join(["env", *variables, *line.arguments, *command]))
            return 0
        logs = arguments.log_dir
        destination = LogFiles(logs, arguments.ranks) if logs else Terminal(has_tags=arguments.tag)
    except (LaunchError, ValueError) as error:
        print(f"mpidist run: {error}", file=sys.stderr)
        return 1
    environ = {**without_launcher(os.environ), **line.environ}
    tagged = None if as_it_is or launcher.vendor not in WORDS else WORDS[launcher.vendor].tagged
    ended = supervise(
        line.arguments,
        command,
        arguments.ranks,
        environ,
        arguments.timeout,
        terminal,
        destination,
        tagged,
        takes_input=begin_here(_hosts(arguments)),
    )
    return _report(ended, arguments)


def _check_arguments(arguments: argparse.Namespace, program: Sequence[str]) -> None:
    """Leave by way of the parser when it is not said what to run, or on how many ranks."""
    behind = [*program, *(["-m", *arguments.module] if arguments.module else [])]
    if arguments.ranks is None:
        late = [word for word in behind if re.fullmatch(r"-np?\d*|--ranks(=.*)?", word)]
        hint = f"; {late[0]} goes before the program, whose arguments come last" if late else ""
        shown = " ".join(behind[: 2 if arguments.module else 1]) or "train.py"
        parser().error(f"-n RANKS is needed{hint}: mpidist run -n 2 {shown}")
    if not behind:
        parser().error("there is no program to run")


def _check_program(program: str) -> None:
    """Raise before N ranks do when the program is not there."""
    if program.endswith(".py"):
        if not os.path.isfile(program):
            raise LaunchError(f"there is no file {program!r} in {os.getcwd()}")
    elif not shutil.which(program):
        raise LaunchError(f"there is no program {program!r} here or on PATH; a Python file's name ends in .py")


def _complete(
    launcher: Mpirun, arguments: argparse.Namespace, allocation: Allocation | None, terminal: bool
) -> CommandLine:
    """Return the launcher's command line; LaunchError where it cannot be told what is asked for."""
    own, ranks = parse_launcher_args(arguments.launcher_args), arguments.ranks
    variables = parse_variables(arguments.x, os.environ)
    environ = {**os.environ, **variables}
    root, cores = os.geteuid() == 0, visible_cores()
    hosts, places = _hosts(arguments), allocation.places if allocation else {}
    words = WORDS.get(launcher.vendor)
    if allocation and not hosts and words is not None and allocation.scheduler not in words.asks:
        hosts = ranks_by_host(places, ranks)
    ranks_of = ranks_by_host(hosts or places, ranks)
    room = least_room(ranks_of, cores, allocation) if ranks_of else None
    line = command_line(launcher.path, launcher.vendor, ranks, cores, environ, root, terminal, own, room)
    if arguments.fault_tolerant:
        line.add("the job is to go on when a rank dies", "--with-ft", "ulfm", **{FAULT_TOLERANT: "1"})
    if hosts:
        line.arguments += [
            words_of(launcher.vendor, "--hosts").hosts,
            ",".join(f"{host}:{places}" for host, places in hosts.items()),
        ]
    if arguments.tag or arguments.log_dir:  # for ranks that cannot reach our pipes; those that can leave it nothing
        line.arguments.append(words_of(launcher.vendor, "--tag" if arguments.tag else "--log-dir").tag)
    line.environ |= variables
    if words is not None and words.names_variables:
        settings_given = [name for name in environ if name.startswith("MPIDIST_")]
        for name in {**variables, **(dict.fromkeys([*line.environ, *settings_given]) if hosts else {})}:
            line.arguments += ["-x", name]
    line.arguments += own
    return line


def _allocation() -> Allocation | None:
    """Return what a scheduler has given to this job; where that cannot be read, say so and go on without."""
    try:
        return given_allocation()
    except ClusterResolutionError as error:
        print(f"mpidist run: warning: {error}; cores are counted as on this machine", file=sys.stderr)
        return None


def _tell_components(allocation: Allocation, plugin: str) -> None:
    """Say what mpirun does not see of a heterogeneous job."""
    option, seen = het_group_option(allocation.components), ", ".join(allocation.shares)
    sees = f"the {allocation.title} has {allocation.components} components, and mpirun sees the first one only ({seen})"
    cure = f"in all of them ranks start by srun --mpi={plugin} {option}"
    print(f"mpidist run: warning: {sees}; {cure}", file=sys.stderr)


def _hosts(arguments: argparse.Namespace) -> dict[str, int]:
    """Return how many ranks each host takes; none where no hosts are given."""
    if arguments.hosts is not None:
        return parse_hosts(arguments.hosts, arguments.ranks)
    return {} if arguments.hostfile is None else read_hosts(arguments.hostfile, arguments.ranks)


def _tell(
    mpi: MpiFound,
    launcher: Mpirun,
    line: CommandLine,
    program: Sequence[str],
    arguments: argparse.Namespace,
    defaults: str,
) -> None:
    """Say what was added to the command line, and why, unless nobody wants to know."""
    reasons = [f"{launcher.title}, which belongs to mpi4py's {mpi.title}", *line.reasons]
    if defaults:
        reasons.append(f"defaults of {defaults}")
    if launcher.version != mpi.version:
        reasons.append(f"warning: the versions differ, and no {mpi.title} launcher was found")
    other = other_python(program)
    if other is not None:
        own = f"mpidist run itself, and its MPI, belong to {sys.executable}"
        reasons.append(f"warning: the ranks run {other}, but {own}")
    for reason in [] if arguments.quiet else reasons:
        print(f"mpidist run: {reason}", file=sys.stderr)


def _report(ended: Ended, arguments: argparse.Namespace) -> int:
    """Say how the job failed, the failing rank's traceback last; return the exit status."""
    sys.stdout.flush()
    if ended.unread:
        return ended.status
    sys.stderr.write(ended.held_back)
    if ended.timed_out:
        print(f"mpidist run: the job was ended after --timeout {arguments.timeout:g} s", file=sys.stderr)
    if ended.removed and not arguments.quiet:
        print(f"mpidist run: removed what MPI had left behind: {', '.join(ended.removed)}", file=sys.stderr)
    if ended.stuck:
        print(f"mpidist run: {ended.stuck}", file=sys.stderr)
    if ended.lost:
        print(f"mpidist run: the launcher itself was ended by signal {ended.lost}", file=sys.stderr)
    if ended.death is not None:
        print(f"mpidist run: {ended.death.describe()}", file=sys.stderr)
    if arguments.log_dir and ended.status != 0:
        if ended.last_lines:
            print("\n".join(["mpidist run: its last errors:", *ended.last_lines]), file=sys.stderr)
        print(f"mpidist run: what the ranks printed is in {arguments.log_dir}", file=sys.stderr)
    if ended.status != 0 and ended.failure is not None and not ended.interrupted:
        is_in_sight = not arguments.log_dir and ended.lines_after <= _IN_SIGHT_LINES
        heading = f"mpidist run: {_heading(ended.failure, ended.death)}; its traceback is above"
        print(heading if is_in_sight else render(ended.failure, ended.death, not arguments.log_dir), file=sys.stderr)
    return ended.status


def render(failure: FailedRank, death: RankDeath | None = None, is_again: bool = True) -> str:
    """Return the text that tells a failure (again) after everything else; `death` is what has been told before it."""
    lines = [line for line in failure.lines if not (failure.framed and line.startswith("mpidist: "))]
    text = "\n".join(shorten(lines)).rstrip()
    return f"\nmpidist run: {_heading(failure, death)}; its traceback{' again' if is_again else ''}:\n{text}"


def _heading(failure: FailedRank, death: RankDeath | None) -> str:
    """Return which rank is to blame, and what the one that printed the failure has to do with it."""
    who = "a rank" if failure.rank is None else f"rank {failure.rank}"
    cause = failure.cause()
    if cause is not None:
        did = {"left": "left early", "died": "died", "failed": "failed first"}[cause.did]
        return f"{who} reported it" if death is not None else f"rank {cause.rank} {did}; {who} reported it"
    return f"{who} failed first" if death is None else f"{who} has said this"
