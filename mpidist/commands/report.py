"""``mpidist report``: the page about a training, from what its ranks noted, also of one that was killed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mpidist.commands.parser import Parser
from mpidist.reporting import page

_EXAMPLES = """examples:
  mpidist run -n 4 examples/train.py --report run      writes run/report.html at its end
  mpidist report run                                   writes it anew, also of a training that was killed
"""


def parser() -> Parser:
    """Return the parser of ``mpidist report``'s arguments."""
    what = "Make the page about a training from what its ranks have noted for mpidist.callbacks.Report(FOLDER)."
    parser = Parser("report", what, _EXAMPLES)
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="of the callback")
    parser.add_argument("--output", metavar="FILE", help=f"the page (FOLDER/{page.NAME})")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write the page and print where it is; return the exit status; Local."""
    options = parser().parse_args(argv)
    if options.folder is None:
        parser().error("name the folder that mpidist.callbacks.Report was given")
    try:
        print(page.write(Path(options.folder), Path(options.output) if options.output else None))
    except (OSError, ValueError) as error:
        print(f"mpidist report: {error}", file=sys.stderr)
        return 1
    return 0
