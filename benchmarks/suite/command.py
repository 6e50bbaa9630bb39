"""The command line of ``python -m benchmarks``: measures where a launcher has started it, and else starts ranks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite import (
    all_reduce,
    collectives,
    first_steps,
    gpu,
    gpu_steps,
    gradients,
    plot,
    ps,
    results,
    scaling,
    show,
    slot_adding,
    small_variables,
    step,
    targets,
)
from benchmarks.suite.launches import launch
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.results import Launch
from mpidist.cluster.launchers import detect_launcher
from mpidist.commands.machine import machine
from mpidist.commands.quantities import count, duration
from mpidist.errors import LaunchError, MissingDependencyError

#: Subcommand -> its module: ``WHAT``, ``add_arguments(parser)``, and either ``measure(options, ranks)``, which runs on
#: all ranks of a launch, or ``start(options)``, which runs on none and may start launches; ``check(options)``, if it
#: has one, raises where it cannot be measured.
SUBCOMMANDS: dict[str, Any] = {
    "all-reduce": all_reduce,
    "gradients": gradients,
    "step": step,
    "first-steps": first_steps,
    "small-variables": small_variables,
    "slot-adding": slot_adding,
    "collectives": collectives,
    "gpu": gpu,
    "gpu-steps": gpu_steps,
    "scaling": scaling,
    "ps": ps,
    "targets": targets,
    "show": show,
}

_EPILOG = """examples:
  python -m benchmarks gradients -n 2 --peers           ResNet-50's gradients, against everybody who is installed
  python -m benchmarks step -n 2 --launches 10          medians over ten launches, for each cache mode
  mpirun -n 2 python -m benchmarks all-reduce           by a launcher of your own
  python -m benchmarks show a.json b.json --plot x.png  what was measured before
"""

#: Ranks, where nothing is said and no launcher has started this process.
_RANKS = 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``python -m benchmarks``'s arguments."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="How fast collectives are here, against a plain copy and against others.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = found.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for name, module in SUBCOMMANDS.items():
        parents = [_output()] if module is show else [_output(), _launching(), _measuring()]
        sub = subparsers.add_parser(
            name, help=module.WHAT, description=f"{module.WHAT}.", parents=parents, allow_abbrev=False
        )
        module.add_arguments(sub)
    return found


def _output() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    found.add_argument("--json", type=_writable, metavar="FILE", help="write what was measured")
    found.add_argument("--plot", type=_writable, metavar="FILE", help="draw it; needs matplotlib")
    return found


def _launching() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    found.add_argument("-n", dest="size", type=count, metavar="RANKS", help=f"start so many; default: {_RANKS}")
    found.add_argument("--launches", type=count, default=1, metavar="N", help="launches one after the other")
    return found


def _measuring() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    found.add_argument("--peers", action="store_true", help="add all peers that are installed")
    found.add_argument("--seconds", type=duration, metavar="S", help="time of one table, warm-up not counted")
    found.add_argument("--rounds", type=count, metavar="N", help="the most times that a contender is timed")
    return found


def _writable(text: str) -> Path:
    """Return where a result is to be written, if that is possible: before minutes are spent."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written; name a file in a folder that there is")
    return path


def main(argv: Sequence[str]) -> int:
    """Measure and return the exit status, 1 if a result was wrong; Collective under a launcher."""
    options = parser().parse_args(argv)
    module, started = SUBCOMMANDS[options.subcommand], detect_launcher() is not None
    _check(options, module, started)
    try:
        if options.plot is not None:
            plot.pyplot()  # before minutes are spent
        if started:
            return _finish(options, _in_launch(options, module, argv))
        if hasattr(module, "check"):
            module.check(options)
        found = module.start(options) if hasattr(module, "start") else _launched(options, argv)
        if module is not show:
            for each in found:
                each.command = ["benchmarks", *argv]
        return _finish(options, found)
    except (LaunchError, MissingDependencyError, ValueError, OSError) as error:
        if started and not isinstance(error, MissingDependencyError):
            raise  # a rank's traceback is passed on, and the other ranks are ended
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 1


def _check(options: argparse.Namespace, module: Any, started: bool) -> None:
    """Leave by way of the parser when ranks are to be started from a rank."""
    if not started:
        return
    if hasattr(module, "start"):
        parser().error(f"{options.subcommand} starts launches of its own; run it without mpirun")
    if options.size is not None or options.launches > 1:
        parser().error("-n and --launches start ranks, and this process is a rank already; leave them out")


def _launched(options: argparse.Namespace, argv: Sequence[str]) -> list[Launch]:
    """Start the launches, and tell what they have found together."""
    outer = argparse.ArgumentParser(parents=[_output(), _launching()], add_help=False, allow_abbrev=False)
    _, arguments = outer.parse_known_args(argv)
    found = launch(arguments, options.size or _RANKS, options.launches, options.json)
    if options.launches > 1:
        print(f"\n{results.summary(found)}", flush=True)
    return found


def _in_launch(options: argparse.Namespace, module: Any, argv: Sequence[str]) -> list[Launch]:
    """Measure as one of the ranks; only rank 0 returns the launch.  Collective."""
    ranks = Ranks()
    ranks.probe.look()
    found = Launch(
        subcommand=options.subcommand,
        command=["benchmarks", *argv],
        ranks=ranks.size,
        mpi=ranks.library,
        topology=ranks.communicator.topology.describe(),
        looks={},
        machine=machine(),
    )
    cores = f"{found.machine['cores']} cores"
    ranks.say(f"# {found.subcommand}: {found.mpi}, {found.topology}, {cores}, {ranks.probe.describe()}")
    measured = module.measure(options, ranks)
    found.rows, found.missing, found.looks = measured.rows, measured.missing, dict(ranks.probe.looks)
    found.machine |= measured.machine
    ranks.say(f"# cache mode: {ranks.probe.describe()}")
    ranks.comm.Barrier()  # a peer's servers end only when nobody needs them any more
    return [found] if ranks.rank == 0 else []


def _finish(options: argparse.Namespace, launches: list[Launch]) -> int:
    """Write what was asked for, and return the exit status."""
    if launches and options.json is not None:
        results.write(options.json, launches)
    if launches and options.plot is not None:
        plot.draw(launches, options.plot)
    wrong = [f"{row.who} on {row.work}" for each in launches for row in each.rows if row.wrong]
    if wrong:
        print(f"python -m benchmarks: wrong elements: {', '.join(dict.fromkeys(wrong))}", file=sys.stderr)
    return 1 if wrong else 0
