"""The ``mpidist`` command itself: finds the subcommand and hands over."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from mpidist.whole_file import FULL

#: Subcommand -> (module with ``main(argv) -> exit status``, what it does in one line).
COMMANDS = {
    "run": ("mpidist.commands.run", "start a program on N ranks with the mpirun that belongs to mpi4py"),
    "info": ("mpidist.commands.info", "one page about this machine: MPI, launcher, topology, versions, GPUs"),
    "doctor": ("mpidist.commands.doctor", "what is wrong with this machine or this job, and the command that mends it"),
    "tune": ("mpidist.commands.tune", "measure the ranks' all-reduces, so that launches choose their algorithms by it"),
    "bench": ("mpidist.commands.bench", "all-reduces of these ranks, against the Allreduce of their own MPI"),
    "job": ("mpidist.commands.job", "the script of a batch job, filled in, checked and submitted"),
    "trace": ("mpidist.commands.trace", "merge what MPIDIST_TRACE made the ranks write, and say where the time went"),
    "report": ("mpidist.commands.report", "make the page about a training, from what its ranks noted"),
    "simulate": ("mpidist.commands.simulate", "what a collective takes on any number of ranks, and the best algorithm"),
    "completion": ("mpidist.commands.completion", "a script by which a shell completes these commands"),
}

_EXAMPLES = """examples:
  mpidist run -n 4 train.py --epochs 3     a Python file on 4 ranks
  mpidist info                             which MPI, and which launcher belongs to it
  mpidist run --help                       the options of a command"""


def usage() -> str:
    """Return the page that ``mpidist --help`` prints."""
    lines = [f"  {name:<10} {what}" for name, (_, what) in COMMANDS.items()]
    heading = "usage: mpidist COMMAND [options] | mpidist --version"
    return "\n".join([heading, "", "commands:", *lines, "", _EXAMPLES])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; Local."""
    _open_closed()
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:  # also when a page of help has been printed
            sys.stdout.flush()
    except OSError as error:
        unread = isinstance(error, BrokenPipeError)  # nobody reads what is printed, as of ``mpidist info | head``
        if not unread and (error.errno not in FULL or error.filename is not None):
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # or the interpreter would try once more at its end
        if unread:
            os.dup2(nowhere, sys.stderr.fileno())
            return 128 + signal.SIGPIPE
        print(f"mpidist: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _open_closed() -> None:
    """Open what this process was started without, as by ``>&-``: else the next file would be taken for its output."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the least one that is free
            os.set_inheritable(descriptor, True)  # or the commands that are started have none
            if name != "stdin":  # None says that there is no input
                setattr(sys, name, open(descriptor, "w", closefd=False))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        print(importlib.import_module("mpidist").__version__)
        return 0
    if name not in COMMANDS:
        print(f"mpidist: {name!r} is not a command; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if name in ("run", "job"):
        try:
            os.getcwd()
        except FileNotFoundError:
            print(f"mpidist {name}: the working folder is gone; cd into one that is there", file=sys.stderr)
            return 1
    return importlib.import_module(COMMANDS[name][0]).main(rest)
