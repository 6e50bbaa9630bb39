"""``mpidist report``: the page about a training, from what its ranks noted, also of one that was killed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mpidist.reporting import page


def main(argv: Sequence[str]) -> int:
    """Write the page and print where it is; return the exit status; Local."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="mpidist report",
        description=f"Makes FOLDER/{page.NAME} from what mpidist.callbacks.Report(FOLDER) has made the ranks write.",
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"the page: default FOLDER/{page.NAME}")
    options = parser.parse_args(argv)
    try:
        print(page.write(options.folder, options.output))
    except (OSError, ValueError) as error:
        print(f"mpidist report: {error}", file=sys.stderr)
        return 1
    return 0
