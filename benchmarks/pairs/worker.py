"""One launch of a case on all ranks: ``python -m benchmarks.pairs.worker --case NAME --seconds S --save FILE``.

Without a case it only looks at the cache mode, for jobs whose ranks have other things to do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.pairs.cases import CASES
from benchmarks.suite import results
from benchmarks.suite.measured import Measured
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.results import Launch

#: Looks at the cache mode in a launch without a case.
_LOOKS = 9


def main() -> None:
    """Measure; rank 0 writes the launch.  Collective."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--save", type=Path, required=True)
    options = parser.parse_args()
    ranks, measured = Ranks(), Measured()
    if options.case is None:
        for _ in range(_LOOKS):
            ranks.probe.look()
    else:
        measure = CASES[options.case].measure
        assert measure is not None, "ps is a job of its own"
        measured = measure(ranks, options.seconds)
    if ranks.rank == 0:
        place = f"{ranks.node_count} nodes, {ranks.size} ranks"
        looks = dict(ranks.probe.looks)
        launch = Launch(
            options.case or "looks", [], ranks.size, ranks.library, place, looks, measured.rows, measured.missing
        )
        results.write(options.save, [launch])
    ranks.comm.Barrier()


if __name__ == "__main__":
    main()
