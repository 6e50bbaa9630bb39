"""The command line of an MPI launcher, as a value: what goes in, what was added, and why."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpidist.commands.launch.cores import Cores
from mpidist.commands.launch.room import Room
from mpidist.errors import counted

_PYTHON = re.compile(r"python[\d.]*(\.exe)?")


@dataclass
class CommandLine:
    """A launcher's command line in the making."""

    arguments: list[str]  # the launcher and its arguments, without the program
    given: Mapping[str, str] = field(default_factory=dict)  # the user's environment
    environ: dict[str, str] = field(default_factory=dict)  # variables added to the environment of the ranks
    reasons: list[str] = field(default_factory=list)  # one line for every addition: what and why
    is_placed: bool = False  # whether the user says where ranks go, and nothing is added that does

    def add(self, reason: str, *arguments: str, **environ: str) -> None:
        """Add arguments or variables, for this reason."""
        if self.is_placed and _is_placing(arguments):
            return
        what = " ".join([*arguments, *(f"{name}={value}" for name, value in environ.items())])
        self.arguments += arguments
        self.environ |= environ
        self.reasons.append(f"{what}: {reason}")

    def add_default(self, reason: str, name: str, value: str) -> None:
        """Add a variable, for this reason, unless the user has set it."""
        if name not in self.given:
            self.add(reason, **{name: value})


def program_command(program: Sequence[str], module: Sequence[str] | None) -> list[str]:
    """Return what every rank executes: this interpreter for a module or a ``.py`` file, else the program itself."""
    if module:
        return [sys.executable, "-m", *module]
    if program[0].endswith(".py"):
        return [sys.executable, *program]
    return list(program)


def other_python(program: Sequence[str]) -> str | None:
    """Return the path of the Python that a program is, None if it is this one, or no Python; Local."""
    path = shutil.which(program[0]) if program and _PYTHON.fullmatch(os.path.basename(program[0])) else None
    return path if path is not None and _installation(path) != _installation(sys.executable) else None


def _installation(python: str) -> str:
    """Return what tells the packages of a Python: the folder of its virtual environment, else the Python itself."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(python)))
    return os.path.realpath(folder if os.path.exists(os.path.join(folder, "pyvenv.cfg")) else python)


def command_line(
    path: str,
    vendor: str,
    ranks: int,
    cores: Cores,
    environ: Mapping[str, str],
    root: bool,
    terminal: bool = False,
    launcher_args: Sequence[str] = (),
    room: Room | None = None,
) -> CommandLine:
    """Return the command line that starts `ranks` ranks, in this room; all on this machine by default."""
    room = Room(ranks, cores) if room is None else room
    line = CommandLine([path, "-n", str(ranks)], environ, is_placed=_is_placing(launcher_args))
    if vendor == "Open MPI":
        _open_mpi(line, room, root)
    elif vendor == "MPICH":
        _mpich(line, room)
    cores_for = f"{counted(room.cores.count, 'core')} for {room.ranks_there}"
    line.add_default(cores_for, "OMP_NUM_THREADS", str(max(1, room.each)))
    if not terminal:
        line.add_default("what a rank prints appears at once", "PYTHONUNBUFFERED", "1")
    line.add_default("UCX, below MPI, would keep SIGHUP from ending the ranks", "UCX_DEBUG_SIGNO", "0")
    return line


def _is_placing(arguments: Sequence[str]) -> bool:
    """Whether there is an option among these that maps ranks to cores, or binds them."""
    return any(argument.startswith("-") and argument.lstrip("-") in _PLACING for argument in arguments)


def _open_mpi(line: CommandLine, room: Room, root: bool) -> None:
    if root:
        line.add("you are root", "--allow-run-as-root")
    if not room.each:
        line.add(_crowd(room), "--map-by", ":OVERSUBSCRIBE")
        line.add("no rank is tied to a core that others use", "--bind-to", "none")
        line.add(_YIELD, "--mca", "mpi_yield_when_idle", "1")
        return
    if room.cores.restricted:
        if room.too_few_places:
            line.add(room.too_few_places, "--map-by", ":OVERSUBSCRIBE")
        line.add(_RESTRICTED, "--bind-to", "none")
        return
    line.add(f"{counted(room.each, 'core')} for each rank's threads", "--map-by", f"slot:PE={room.each}")
    if room.too_few_places:
        line.arguments[-1] += ":OVERSUBSCRIBE"
        line.reasons.append(f"OVERSUBSCRIBE: {room.too_few_places}")
    line.add("ranks do not move between cores", "--bind-to", "core:if-supported")


def _mpich(line: CommandLine, room: Room) -> None:
    if not room.each:
        line.add(_crowd(room), "-bind-to", "none")
        # MPICH calls sched_yield, which often returns at once; so set, it sleeps for a moment
        line.add_default(_YIELD, "MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
    elif room.cores.restricted:
        line.add(_RESTRICTED, "-bind-to", "none")
    else:
        line.add(f"{counted(room.each, 'core')} for each rank's threads", "-bind-to", f"core:{room.each}")


def _crowd(room: Room) -> str:
    return f"{room.ranks_there} share {counted(room.cores.count, 'core')}"


#: Options that say where ranks go.
_PLACING = frozenset(["map-by", "bind-to", "rankfile", "rf", "cpu-set", "cpu-list"])

_YIELD = "a waiting rank gives its core to the others"

# Both launchers number the machine's cores, not the allowed ones: binding would leave the share that was given.
_RESTRICTED = "the job may not use all cores of the machine, and the launcher would bind to any of them"
