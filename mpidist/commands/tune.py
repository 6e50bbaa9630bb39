"""``mpidist tune``: measure what all-reduces cost the ranks of a launch, and keep it for the launches to come."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from mpidist.cluster.launchers import detect_launcher
from mpidist.collectives.communicator import Communicator
from mpidist.commands import choice_page, quantities, run
from mpidist.commands.parser import Parser
from mpidist.errors import MpidistError
from mpidist.schedules.figures import ImplausibleFigures
from mpidist.tuning import store
from mpidist.tuning.calibration import BUDGET_SECONDS, LARGEST_BYTES, calibrate
from mpidist.tuning.store import Record, key_of
from mpidist.world import world_communicator

#: What to do when a calibration is refused.
_CURE = "nothing is kept; other programs use these hosts, so run mpidist tune again when they are idle"

_EXAMPLES = """examples:
  mpidist tune -n 4                          four ranks of this machine
  mpidist tune -n 4 --largest 16MiB --dry-run
  srun --mpi=pmix -N 2 --ntasks-per-node 8 python -m mpidist tune
"""


def main(argv: Sequence[str]) -> int:
    """Measure, print the table on rank 0, and return the exit status; Collective under a launcher."""
    options = parser().parse_args(argv)
    if options.largest < 1 << 16:
        parser().error(f"--largest must be 64KiB or more, got {options.largest} bytes")
    if options.ranks is not None:
        flags = [flag for flag, asked in (("--json", options.json), ("--dry-run", options.dry_run)) if asked]
        budget = ["--largest", str(options.largest), "--seconds", str(options.seconds)]
        return run.main(run.words_for(options.ranks, "tune", *budget, *flags))
    if detect_launcher() is None:
        parser().error("-n RANKS is needed, or a launcher such as srun: mpidist tune -n 2")
    try:
        communicator = world_communicator()
        return _tune(communicator, options)
    except ImplausibleFigures as refused:
        if communicator.rank == 0:  # all ranks may refuse
            print(f"mpidist tune: {refused}; {_CURE}", file=sys.stderr)
        return 1
    except (MpidistError, ValueError) as error:
        print(f"mpidist tune: {error}", file=sys.stderr)
        return 1


def parser() -> Parser:
    """Return the parser of ``mpidist tune``'s arguments."""
    what = (
        "Measure latency, bandwidth, reductions, all-reduces and sizes of segments of the ranks, and keep the figures "
        "by hosts, ranks on them, processor and MPI library: launches on the same choose by them."
    )
    parser = Parser("tune", what, _EXAMPLES)
    add = parser.add_argument
    add("-n", "-np", "--ranks", type=quantities.count, metavar="RANKS", help="start so many ranks on this machine")
    add("--largest", type=quantities.nbytes, default=LARGEST_BYTES, metavar="BYTES", help="longest all-reduce (256MiB)")
    add("--seconds", type=quantities.seconds, default=BUDGET_SECONDS, help="about how long it may take at most (50)")
    add("--json", action="store_true", help="print the figures as JSON")
    add("--dry-run", action="store_true", help="print the table and keep nothing")
    return parser


def _tune(communicator: Communicator, options: argparse.Namespace) -> int:
    """Measure, print, and keep figures where the next launch finds them; return the exit status.  Collective."""
    if communicator.size == 1:
        print("mpidist tune: one rank reduces nothing; use two or more: mpidist tune -n 2", file=sys.stderr)
        return 2
    start = time.perf_counter()
    figures = calibrate(communicator, options.seconds, options.largest)
    seconds = time.perf_counter() - start
    if communicator.rank != 0:
        return 0
    figures.check(communicator.topology)
    record = Record(key_of(communicator), communicator.topology.hosts, figures)
    print(json.dumps(figures.to_json()) if options.json else choice_page.page(record), flush=True)
    if options.dry_run:
        return 0
    where = store.folder()
    try:
        path = store.write(record, where)
    except OSError as error:
        cure = "set MPIDIST_TUNING_FOLDER to a folder that can be written"
        print(f"mpidist tune: the figures cannot be kept in {where} ({error}); {cure}", file=sys.stderr)
        return 1
    print(f"\nmeasured in {seconds:.1f} s, kept in {path}", file=sys.stderr if options.json else sys.stdout)
    return 0
