"""``mpidist run``: start a program on N ranks of this machine with the mpirun that belongs to mpi4py."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence

from mpidist.commands.command_line import CommandLine, command_line, other_python, program_command, tolerate_faults
from mpidist.commands.cores import visible_cores
from mpidist.commands.failures import Failure
from mpidist.commands.launcher import Launcher, check_tolerates_faults, find_launcher
from mpidist.commands.probe import MpiFound, probe_mpi, without_launcher
from mpidist.commands.rank_deaths import RankDeath
from mpidist.commands.short_traceback import shorten
from mpidist.commands.supervisor import Ended, supervise
from mpidist.errors import LaunchError
from mpidist.options import settings

_EPILOG = """examples:
  mpidist run -n 8 train.py --epochs 3     a Python file, with this interpreter
  mpidist run -n 4 -m pytest tests         a module
  mpidist run -n 2 ./simulate              any program
  mpidist run -n 8 --fault-tolerant train.py     parameter servers that go on without a worker that dies
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``mpidist run``'s arguments."""
    found = argparse.ArgumentParser(
        prog="mpidist run",
        usage="mpidist run -n RANKS [options] PROGRAM [arguments] | -m MODULE [arguments]",
        description="Start a program on RANKS ranks of this machine with the mpirun that belongs to mpi4py.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("-n", "-np", "--ranks", type=_positive, metavar="RANKS", help="how many ranks")
    found.add_argument(
        "--fault-tolerant", action="store_true", help="go on when a rank dies that others can do without (Open MPI 5)"
    )
    found.add_argument("--timeout", type=float, metavar="SECONDS", help="end the job after so long, with status 124")
    found.add_argument("--launcher-args", default="", metavar="'...'", help="further arguments for mpirun, as one word")
    found.add_argument("--dry-run", action="store_true", help="print the command line instead of running it")
    found.add_argument("--quiet", action="store_true", help="do not say what was added to the command line, and why")
    found.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does")
    found.add_argument("program", nargs=argparse.REMAINDER, help="a .py file or any program, and its arguments")
    return found


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number of ranks, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"at least 1 rank is needed, got {number}")
    return number


def main(argv: Sequence[str]) -> int:
    """Run the job and return its exit status; Local."""
    arguments = parser().parse_args(argv)
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    _check_arguments(arguments, program)
    try:
        _check_program(program[0] if program else sys.executable)
        # a variable that cannot be read is better told once than by every rank
        arguments.fault_tolerant = settings().fault_tolerant or arguments.fault_tolerant
        command = program_command(program, arguments.module)
        mpi = probe_mpi()
        launcher = find_launcher(mpi)
        if arguments.fault_tolerant:
            check_tolerates_faults(launcher)
    except (LaunchError, ValueError) as error:
        print(f"mpidist run: {error}", file=sys.stderr)
        return 1
    # Open MPI's launcher gives its ranks a terminal, wanted or not; for others there is none to be had
    terminal = sys.stdout.isatty() and launcher.vendor == "Open MPI"
    line = _complete(mpi, launcher, arguments, terminal)
    other = other_python(program)
    if other is not None and not arguments.quiet:
        own = f"mpidist run itself, and its MPI, belong to {sys.executable}"
        print(f"mpidist run: warning: the ranks run {other}, but {own}", file=sys.stderr)
    if arguments.dry_run:
        variables = [f"{name}={value}" for name, value in line.environ.items()]
        print(shlex.join(["env", *variables, *line.arguments, *command]))
        return 0
    environ = {**without_launcher(os.environ), **line.environ}
    ended = supervise(line.arguments, command, arguments.ranks, environ, arguments.timeout, terminal)
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


def _complete(mpi: MpiFound, launcher: Launcher, arguments: argparse.Namespace, terminal: bool) -> CommandLine:
    root, cores = os.geteuid() == 0, visible_cores()
    own = shlex.split(arguments.launcher_args)
    line = command_line(launcher.path, launcher.vendor, arguments.ranks, cores, os.environ, root, terminal, own)
    if arguments.fault_tolerant:
        tolerate_faults(line)
    line.arguments += own
    reasons = [f"{launcher.title}, which belongs to mpi4py's {mpi.title}", *line.reasons]
    if launcher.version != mpi.version:
        reasons.append(f"warning: the versions differ, and no {mpi.title} launcher was found")
    if not arguments.quiet:
        for reason in reasons:
            print(f"mpidist run: {reason}", file=sys.stderr)
    return line


def _report(ended: Ended, arguments: argparse.Namespace) -> int:
    """Say how the job failed, the failing rank's traceback last; return the exit status."""
    sys.stdout.flush()
    if ended.unread:
        return ended.status
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
    if ended.status != 0 and ended.failure is not None and not ended.interrupted:
        print(render(ended.failure, ended.death), file=sys.stderr)
    return ended.status


def render(failure: Failure, death: RankDeath | None = None) -> str:
    """Return the text that repeats a failure after everything else; `death` is what has been told before it."""
    lines = [line for line in failure.lines if not (failure.framed and line.startswith("mpidist: "))]
    text = "\n".join(shorten(lines)).rstrip()
    return f"\nmpidist run: {_heading(failure, death)}; its traceback again:\n{text}"


def _heading(failure: Failure, death: RankDeath | None) -> str:
    """Return which rank is to blame, and what the one that printed the failure has to do with it."""
    who = "a rank" if failure.rank is None else f"rank {failure.rank}"
    about = failure.about()
    if about is not None:
        did = {"left": "left early", "died": "died", "failed": "failed first"}[about.did]
        return f"{who} reported it" if death is not None else f"rank {about.rank} {did}; {who} reported it"
    return f"{who} failed first" if death is None else f"{who} has said this"
